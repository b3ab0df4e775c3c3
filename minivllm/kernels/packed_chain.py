"""``chain_linear`` of weights that come packed (``packed_weights.py``), for large layers and few rows, on Hopper.

Rows are the tensor cores' N, so that they are padded to 8 and not to 64, and weights their M, from registers, which two
warpgroups fill from what memory has: 1.4 instructions a weight, a third of what a multiprocessor has time for. Decoding
into shared memory, for a kernel like ``large_chain.cu``, takes more of that memory's time than there is (measured).

The kernel is CUDA C++ (``packed_chain.cu``). All programs must run at once, one a multiprocessor, as in
``chain_linear``: launch them on one stream.

Bytes moved: 12 bits a weight, once; from L2 to a multiprocessor the rows' k for each 256 lines, and the sums of blocks
that are cut along k, a float an element, there and back.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from itertools import chain

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import compiling, num_sms
from minivllm.kernels.chain_config import ChainShape
from minivllm.kernels.hopper import FIXED_BYTES, SHARED_BYTES, Kernel, load, loads
from minivllm.kernels.packed_weights import FIRST_EXPONENT, LINES, STEP, UNIT_BYTES, PackedWeight
from minivllm.kernels.pdl import use_pdl

_COLUMNS = 8, 16, 32, 48  # rows that kernels are compiled for
# For layers of so many weights, rows: with fewer one kernel of all layers is faster, with more what programs give each
# other counts most.
_ROWS = (190_000_000, range(1, 49)), (100_000_000, range(3, 33))
_THREADS = 384
_MOST_STAGES = 8  # of weights
_LEAST_INPUTS, _MOST_INPUTS = 8, 16
_SHARED_ROWS = 32  # from so many on clusters share their input
_AHEAD = 2  # units of weights under way: with more, programs get theirs at different paces


@dataclass(frozen=True, slots=True)
class PackedConfig:
    rows: int  # at most
    programs: int
    stages: int  # of weights, a unit each
    inputs: int  # stages of inputs, 64 of the rows' k each

    @property
    def shared_bytes(self) -> int:
        factors = 2 * 4 * self.rows  # the rows', of two products
        return self.stages * UNIT_BYTES + self.inputs * _tile_bytes(self.rows) + 1024 + factors


def _tile_bytes(rows: int) -> int:
    return rows * STEP  # 64 of k


def _cuts(shape: ChainShape) -> list[tuple[int, int]]:
    """Of each product: pairs of blocks of lines, steps of k."""
    sizes = (shape.hidden, shape.width), (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner), (
        shape.qkv, shape.hidden)  # fmt: skip
    return [(lines // (2 * LINES), k // STEP) for lines, k in sizes]


@cache
def packed_config(rows: int, shape: ChainShape, sms: int = 132) -> PackedConfig | None:
    """None: too many rows, or sizes that are not of whole units."""
    columns = next((c for c in _COLUMNS if rows <= c), None)
    if columns is None or any(n % (2 * LINES) for n in (shape.hidden, 2 * shape.inner, shape.qkv)):
        return None
    clusters = sms // 2
    if any(k % STEP for k in (shape.hidden, shape.width, shape.inner)):
        return None
    if any(0 < pairs % clusters * steps < clusters for pairs, steps in _cuts(shape)):
        return None  # not even a unit each
    room, tile = SHARED_BYTES - FIXED_BYTES - 2 * 4 * columns, _tile_bytes(columns)
    stages = min((room - _LEAST_INPUTS * tile) // UNIT_BYTES, _MOST_STAGES)
    inputs = min((room - stages * UNIT_BYTES) // tile, _MOST_INPUTS)
    return PackedConfig(columns, 2 * clusters, stages, inputs)


@cache
def packed_kernel(shape: ChainShape, config: PackedConfig) -> Kernel:
    macros = {"HIDDEN": shape.hidden, "WIDTH": shape.width, "INNER": shape.inner, "QKV": shape.qkv,
              "ROWS": config.rows, "PROGRAMS": config.programs, "STAGES": config.stages,
              "INPUTS": config.inputs, "AHEAD": _AHEAD, "UNIT_BYTES": UNIT_BYTES,
              "FIRST_EXPONENT": FIRST_EXPONENT}  # fmt: skip
    return Kernel("packed_chain", (), tuple(macros.items()), by=(config.rows,))


def packed_rows(shape: ChainShape) -> range:
    """Rows of which packed weights are multiplied faster than others are in any way; none of small layers."""
    return next((rows for weights, rows in _ROWS if shape.weights >= weights), range(0))


def use_packed(rows: int, shape: ChainShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel is for such products and runs there."""
    if dtype != torch.bfloat16 or not nvrtc.available(device):
        return False
    config = packed_config(rows, shape, num_sms(device))
    if config is None or not loads(packed_kernel(shape, config), device):
        return False
    return compiling() or _fits(shape, config, device)


@cache
def _fits(shape: ChainShape, config: PackedConfig, device: torch.device) -> bool:
    with torch.cuda.device(device):
        there = nvrtc.clusters_at_once(load(packed_kernel(shape, config), device), _launch_shape(config, False))
    return config.programs <= 2 * there


@cache
def _counts(device: torch.device) -> torch.Tensor:
    """(4,) int32, zeros between launches."""
    return torch.zeros(4, dtype=torch.int32, device=device)


@cache
def _parts(device: torch.device, words: int) -> torch.Tensor:
    """(words,) int32: float32 sums of which none is there between launches."""
    return torch.full((words,), -1, dtype=torch.int32, device=device)


@cache
def _launch_shape(config: PackedConfig, pdl: bool) -> nvrtc.LaunchShape:
    return nvrtc.LaunchShape((config.programs, 1, 1), (2, 1, 1), _THREADS, config.shared_bytes, pdl)


def packed_chain(
    heads: torch.Tensor,
    o: PackedWeight,
    x: torch.Tensor,
    gate_up: PackedWeight,
    eps: float,
    down: PackedWeight,
    qkv: PackedWeight,
    eps_behind: float,
) -> torch.Tensor:
    """``chain_linear`` of a large layer: x (t, hidden) in place; returns (t, qkv). ``gate_up`` is packed as gated."""
    rows, device = x.shape[0], x.device
    shape = ChainShape(x.shape[1], heads.shape[1], down.weight.shape[1], qkv.weight.shape[0])
    config = packed_config(rows, shape, num_sms(device))
    assert config is not None and x.is_contiguous() and heads.stride(1) == 1 and gate_up.gated
    projection = x.new_empty((rows, shape.qkv))
    if compiling():
        return projection
    hidden = x.new_empty((rows, shape.inner))
    squares = torch.empty((rows, shape.hidden // 16), dtype=torch.float32, device=device)
    parts = _parts(device, 2 * config.programs * LINES * config.rows)
    counts = _counts(device)
    box = config.rows // (2 if config.rows >= _SHARED_ROWS else 1)
    maps = [nvrtc.tensor_map(t.data_ptr(), rows, t.shape[1], t.stride(0), box, STEP // 2) for t in (heads, x, hidden)]
    weights = (o, gate_up, down, qkv)
    of_weights = zip(*((its.data, its.scales) for its in weights), strict=True)
    tensors = (*chain.from_iterable(of_weights), x, hidden, projection, squares, parts, counts)
    pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    number = ctypes.c_int(rows)
    floats = (ctypes.c_float * 2)(eps, eps_behind)
    addresses = [
        *(made.address for made in maps),
        *(ctypes.addressof(pointers) + 8 * i for i in range(len(tensors))),
        ctypes.addressof(number),
        *(ctypes.addressof(floats) + 4 * i for i in range(2)),
    ]
    nvrtc.launch(load(packed_kernel(shape, config), device), _launch_shape(config, use_pdl(device)), addresses)
    return projection
