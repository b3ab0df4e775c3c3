"""Four products between two attentions of a decoder, in one kernel, on Hopper: o with the residual addition, gate and
up with the norm in front and SiLU behind, down with the addition, and qkv of the next layer.

Each of these takes a few µs to a few tens, and what stands between two kernels 2 to 5: a program starts where one of
the kernel before has ended, and its loads with it. Here a program stays on its multiprocessor, weights of the next
product come while this one is finished, and programs wait for each other by a count in memory. A norm's rms is found
from the squares that whoever adds to the stream leaves.

The kernels are CUDA C++: ``chain_linear.cu`` for small layers, whose programs take in as little as can be, and
``large_chain.cu`` for large ones, of which each weight is read by one program. All programs must run at once, one a
multiprocessor: two such kernels beside each other on one device would wait for ever (after a minute they fail), so
launch them on one stream.

Bytes moved: the weights once; from L2 to a multiprocessor (rows + features) of a unit * k elements a product, at 64
bytes a cycle: Qwen3-0.6B at 256 rows 1.4 MB, 12 µs; Qwen3-14B at 128 rows 9.9 MB, 81 of the 155 µs that its weights
take from memory. Idea: persistent kernels that run a whole layer or model (Hazy Research's megakernels, 2025), here
without attention.
"""

import ctypes
from functools import cache
from typing import Any

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import compiling, num_sms
from minivllm.kernels.chain_config import ChainConfig, ChainShape, chain_config, chain_kernel
from minivllm.kernels.cluster_config import tile_rows
from minivllm.kernels.hopper import STEP, load, loads
from minivllm.kernels.pdl import use_pdl
from minivllm.kernels.rms_norm import RowScale


def use_chain(rows: int, shape: ChainShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the four products are faster here than apart: of shapes and rows that ``chain_config`` cuts, where the
    kernel runs."""
    if dtype != torch.bfloat16 or not nvrtc.available(device):
        return False
    config = chain_config(rows, shape, num_sms(device))
    if config is None or not loads(chain_kernel(shape, config), device):
        return False
    return compiling() or _fits(shape, config, device)


@cache
def _fits(shape: ChainShape, config: ChainConfig, device: torch.device) -> bool:
    """Whether all programs, which wait for each other, run at once there. Fewer multiprocessors than the device has may
    be this process's."""
    with torch.cuda.device(device):
        there = nvrtc.clusters_at_once(load(chain_kernel(shape, config), device), _launch_shape(config, False))
    return config.programs <= 2 * there


@cache
def _counts(device: torch.device) -> torch.Tensor:
    """(4,) int32, zeros between launches."""
    return torch.zeros(4, dtype=torch.int32, device=device)


@cache
def _parts(device: torch.device, words: int) -> torch.Tensor:
    """(words,) int32: float32 sums of which none is there between launches, see ``large_chain.cu``."""
    return torch.full((words,), -1, dtype=torch.int32, device=device)


@cache
def _launch_shape(config: ChainConfig, pdl: bool) -> nvrtc.LaunchShape:
    return nvrtc.LaunchShape((config.programs, 1, 1), (2, 1, 1), config.threads + 64, config.shared_bytes, pdl)


def chain_linear(
    heads: torch.Tensor,
    o: torch.Tensor,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    eps: float,
    down: torch.Tensor,
    qkv: torch.Tensor,
    eps_behind: float,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, RowScale | None]:
    """x (t, hidden) += heads @ o.T; then += (SiLU(gate) * up) @ down.T of x divided by its rows' rms; in place, each
    rounded once. Returns x @ qkv.T, (t, qkv), and what its rows are still to be multiplied by, and ``bias`` (qkv,)
    added to, or None: they are. ``eps_behind`` is of the rms that divides them.

    heads (t, width); o (hidden, width); gate_up (2 * inner, hidden), gate's rows first; down (hidden, inner); qkv (qkv,
    hidden). All bfloat16; norms' weights are folded into those of gate_up and qkv.
    """
    rows, device = x.shape[0], x.device
    shape = ChainShape(x.shape[1], heads.shape[1], down.shape[1], qkv.shape[0])
    config = chain_config(rows, shape, num_sms(device))
    assert config is not None and x.is_contiguous() and heads.stride(1) == 1
    projection = x.new_empty((rows, shape.qkv))
    scale = None if config.large else RowScale(x, eps_behind, bias)
    if compiling():
        return projection, scale
    hidden = x.new_empty((rows, shape.inner))
    squares = torch.empty((rows, config.row_parts(shape.hidden)), dtype=torch.float32, device=device)
    add, gate, last = config.add, config.gate, config.qkv
    gate_box = gate.columns(config.groups) // 2
    rest = [(gate_up, config.last // 2 or gate_box)] if config.large else []
    weights = [(o, add.features), (gate_up, gate_box), *rest, (down, add.features), (qkv, last.features)]
    inputs = ((heads, add), (x, gate), (hidden, add), (x, last))
    maps = [_map(weight, lines) for weight, lines in weights]
    maps += [_map(tensor, tile_rows(unit.rows, rows)) for tensor, unit in inputs]
    of_large = [_parts(device, config.part_words), bias] if config.large else []
    tensors = (x, hidden, projection, squares, *of_large, _counts(device))
    pointers = (ctypes.c_void_p * len(tensors))(*(0 if t is None else t.data_ptr() for t in tensors))
    number, floats = ctypes.c_int(rows), (ctypes.c_float * 2)(eps, eps_behind)
    addresses = [
        *(made.address for made in maps),
        *(ctypes.addressof(pointers) + 8 * i for i in range(len(tensors))),
        ctypes.addressof(number),
        *(ctypes.addressof(floats) + 4 * i for i in range(2 if config.large else 1)),
    ]
    nvrtc.launch(load(chain_kernel(shape, config), device), _launch_shape(config, use_pdl(device)), addresses)
    return projection, scale


def _map(matrix: torch.Tensor, lines: int) -> Any:
    rows, k = matrix.shape
    return nvrtc.tensor_map(matrix.data_ptr(), rows, k, matrix.stride(0), lines, STEP)
