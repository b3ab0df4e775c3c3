"""The four products between two attentions of a decoder in one Hopper kernel: o with the residual addition, gate and up
with the norm before and SiLU after, down with the addition, and qkv of the next layer.

Each product takes between a few µs and a few tens, and the gap between two kernels costs 2 to 5: a program starts, and
starts loading, only when one of the previous kernel has ended. Here a program stays on its SM, weights of the next
product load while this one finishes, and programs wait for each other on a counter in memory. A norm's rms is computed
from the squares that are written along with the residual stream.

The kernels are CUDA C++: ``chain_linear.cu`` for small layers, whose programs read as little as possible, and
``large_chain.cu`` for large ones, where each weight is read by one program. All programs must run at once, one per SM:
two such kernels side by side on one device would deadlock (after a minute they fail), so launch them on one stream.

Bytes moved: the weights once; from L2 to an SM (rows + features) of a unit * k elements per product, at 64 bytes a
cycle: Qwen3-0.6B at 256 rows 1.4 MB, 12 µs; Qwen3-14B at 128 rows 9.9 MB, 81 of the 155 µs that reading its weights
takes. Idea: persistent kernels that run a whole layer or model (Hazy Research's megakernels, 2025), here without
attention.
"""

import ctypes
from functools import cache
from typing import Any

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import compiling, num_sms
from minivllm.kernels.hopper import STEP, launch_kernel, load, loads
from minivllm.kernels.linear.chain_config import ChainConfig, ChainShape, chain_config, chain_kernel
from minivllm.kernels.linear.cluster_config import tile_rows
from minivllm.kernels.pdl import use_pdl
from minivllm.kernels.rms_norm import RowScale


def use_chain(rows: int, shape: ChainShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this is faster than four separate products: for shapes and rows that ``chain_config`` accepts, where the
    kernel runs."""
    if dtype != torch.bfloat16 or not nvrtc.available(device):
        return False
    config = chain_config(rows, shape, num_sms(device))
    if config is None or not loads(chain_kernel(shape, config), device):
        return False
    return compiling() or _fits(shape, config, device)


@cache
def _fits(shape: ChainShape, config: ChainConfig, device: torch.device) -> bool:
    """Whether all programs, which wait for each other, can run at once on the device. The process may have fewer SMs
    than the device."""
    with torch.cuda.device(device):
        there = nvrtc.clusters_at_once(load(chain_kernel(shape, config), device), _launch_shape(config, False))
    return config.programs <= 2 * there


@cache
def _counts(device: torch.device) -> torch.Tensor:
    """(4,) int32, zeros between launches."""
    return torch.zeros(4, dtype=torch.int32, device=device)


@cache
def _parts(device: torch.device, words: int) -> torch.Tensor:
    """(words,) int32: float32 sums, all absent between launches, see ``large_chain.cu``."""
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
    """In place, each rounded once: x (t, hidden) += heads @ o.T; then, with x's rows divided by their rms, x +=
    (SiLU(gate) * up) @ down.T. Returns x @ qkv.T (t, qkv), and what is still to be applied to its rows (a factor and
    ``bias`` (qkv,)), or None if it already is. ``eps_behind``: for the rms of that factor.

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
    floats = (ctypes.c_float * 2)(eps, eps_behind) if config.large else ctypes.c_float(eps)
    kernel = load(chain_kernel(shape, config), device)
    launch_kernel(kernel, _launch_shape(config, use_pdl(device)), maps, tensors, ctypes.c_int(rows), floats)
    return projection, scale


def _map(matrix: torch.Tensor, lines: int) -> Any:
    rows, k = matrix.shape
    return nvrtc.tensor_map(matrix.data_ptr(), rows, k, matrix.stride(0), lines, STEP)
