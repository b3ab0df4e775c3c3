"""Four products between two attentions of a decoder, in one kernel, on Hopper, for 65 to 256 rows: o with the residual
addition, gate and up with the norm in front and SiLU behind, down with the addition, and qkv of the next layer.

Each of these takes a few µs, and what stands between two kernels nearly as much: a program starts where one of the
kernel before has ended, and its loads with it. Here a program stays on its multiprocessor, weights of the next product
come while this one is finished, and programs wait for each other by a count in memory. A norm's rms is found from the
squares that whoever adds to the stream leaves.

The kernel is CUDA C++ (``chain_linear.cu``). Its programs must all run at once, one a multiprocessor: two of these
kernels beside each other on one device would wait for ever (after a minute they fail), so launch them on one stream.

Bytes moved: the weights once; from L2 to a multiprocessor (rows + features) of a unit * k elements a product, at 64
bytes a cycle: Qwen3-0.6B at 256 rows 1.4 MB, 12 µs. Idea: persistent kernels that run a whole layer or model
(Hazy Research's megakernels, 2025), here without attention.
"""

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import cdiv, compiling, num_sms
from minivllm.kernels.cluster_config import tile_rows
from minivllm.kernels.hopper import SHARED_BYTES, STEP, Kernel, load, loads
from minivllm.kernels.pdl import use_pdl

MIN_ROWS, MAX_ROWS = 65, 256
_MOST_WEIGHTS = 1 << 27  # elements; beyond, what stands between kernels is little beside them
_MOST_FEATURES = 256  # of a unit: wgmma's columns, and lines that TMA loads at once
_THREADS = 256  # that multiply
_FIXED_BYTES = 2048  # of a program's: barriers, and tiles start at a multiple of 1,024
_LEAST_STAGES = 4


@dataclass(frozen=True, slots=True)
class ChainShape:
    """Of a decoder's layer: sizes of the residual stream, of its attention's output, of gate and of qkv."""

    hidden: int
    width: int
    inner: int
    qkv: int


@dataclass(frozen=True, slots=True)
class Unit:
    """What a program has of a product: ``rows`` by ``features`` lines of the weight, ``at_once`` steps of k a stage."""

    rows: int
    features: int
    at_once: int = 1

    @property
    def step_bytes(self) -> int:
        return (self.rows + self.features) * 2 * STEP

    @property
    def columns(self) -> int:
        """Features of a warpgroup: there are two, which have 64 rows each, or the same ones."""
        return self.features if self.rows == 128 else self.features // 2


@dataclass(frozen=True, slots=True)
class ChainConfig:
    add: Unit  # o and down, k in two
    gate: Unit
    qkv: Unit
    stages: int
    programs: int

    @property
    def stage_bytes(self) -> int:
        return max(unit.at_once * unit.step_bytes for unit in (self.add, self.gate, self.qkv))

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + _sent_bytes(self.add) + 1024


def _sent_bytes(add: Unit) -> int:
    return _THREADS * add.columns


@cache
def chain_config(rows: int, shape: ChainShape, sms: int = 132) -> ChainConfig | None:
    """The units that take in least, one a program at most; None: there are none that cut the products evenly."""
    programs = sms // 2 * 2
    add = _unit(rows, shape.hidden, programs // 2, False)
    gate = _unit(rows, 2 * shape.inner, programs, True)
    qkv = _unit(rows, shape.qkv, programs, False)
    if add is None or gate is None or qkv is None or shape.hidden // add.columns % 16:
        return None
    most_bytes = max(unit.step_bytes for unit in (add, gate, qkv)) * 5 // 4  # of a stage
    wanted = max(2 * _units(rows, add, shape.hidden), _units(rows, gate, 2 * shape.inner), _units(rows, qkv, shape.qkv))
    add = _deepened(add, most_bytes, shape.width // 2, shape.inner // 2)
    gate, qkv = (_deepened(unit, most_bytes, shape.hidden) for unit in (gate, qkv))
    if add is None or gate is None or qkv is None:
        return None
    config = ChainConfig(add, gate, qkv, stages=0, programs=cdiv(wanted, 2) * 2)
    stages = (SHARED_BYTES - _FIXED_BYTES - _sent_bytes(add)) // config.stage_bytes
    return replace(config, stages=stages) if stages >= _LEAST_STAGES else None


def _unit(rows: int, n: int, most: int, gated: bool) -> Unit | None:
    """Cuts n features, gate's and up's counted both, into at most ``most`` units of all rows."""
    found = []
    for unit_rows in (64, 128):
        step = (8 if unit_rows == 128 else 16) * (2 if gated else 1)
        if tiles := most // cdiv(rows, unit_rows):
            first = cdiv(cdiv(n, tiles), step) * step
            found += [Unit(unit_rows, f) for f in range(first, _MOST_FEATURES + 1, step) if n % f == 0][:1]
    return min(found, key=lambda unit: unit.rows + unit.features, default=None)


def _deepened(unit: Unit, most_bytes: int, *ks: int) -> Unit | None:
    """With as many steps a stage as fit and divide the products' k; None: k is not of whole steps."""
    fitting = (a for a in (4, 2, 1) if a * unit.step_bytes <= most_bytes and not any(k % (a * STEP) for k in ks))
    at_once = next(fitting, None)
    return None if at_once is None else replace(unit, at_once=at_once)


def _units(rows: int, unit: Unit, n: int) -> int:
    return cdiv(rows, unit.rows) * (n // unit.features)


@cache
def chain_kernel(shape: ChainShape, config: ChainConfig) -> Kernel:
    macros = {"HIDDEN": shape.hidden, "WIDTH": shape.width, "INNER": shape.inner, "QKV": shape.qkv,
              "STAGES": config.stages, "STAGE_BYTES": config.stage_bytes}  # fmt: skip
    units = {"ADD": config.add, "GATE": config.gate, "QKV": config.qkv}
    for name, unit in units.items():
        macros |= {f"{name}_ROWS": unit.rows, f"{name}_FEATURES": unit.features, f"{name}_AT_ONCE": unit.at_once}
    columns = tuple(sorted({unit.columns for unit in units.values()}))
    return Kernel("chain_linear", columns, tuple(macros.items()))


def use_chain(rows: int, shape: ChainShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the four products are faster here than apart; the one place that knows."""
    weights = shape.hidden * (shape.width + 3 * shape.inner + shape.qkv)
    if dtype != torch.bfloat16 or not MIN_ROWS <= rows <= MAX_ROWS or weights > _MOST_WEIGHTS:
        return False
    if not nvrtc.available(device):
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
def _launch_shape(config: ChainConfig, pdl: bool) -> nvrtc.LaunchShape:
    return nvrtc.LaunchShape((config.programs, 1, 1), (2, 1, 1), _THREADS + 64, config.shared_bytes, pdl)


def chain_linear(
    heads: torch.Tensor,
    o: torch.Tensor,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    eps: float,
    down: torch.Tensor,
    qkv: torch.Tensor,
    config: ChainConfig | None = None,
) -> torch.Tensor:
    """x (t, hidden) += heads @ o.T; then += (SiLU(gate) * up) @ down.T of x divided by its rows' rms; in place, each
    rounded once. Returns x @ qkv.T, (t, qkv), whose rows are still to be divided by x's rms (``RowScale``).

    heads (t, width); o (hidden, width); gate_up (2 * inner, hidden), gate's rows first; down (hidden, inner); qkv (qkv,
    hidden). All bfloat16; norms' weights are folded into those of gate_up and qkv.
    """
    rows, device = x.shape[0], x.device
    shape = ChainShape(x.shape[1], heads.shape[1], down.shape[1], qkv.shape[0])
    projection = x.new_empty((rows, shape.qkv))
    if compiling():
        return projection
    config = config or chain_config(rows, shape, num_sms(device))
    assert config is not None and x.is_contiguous() and heads.stride(1) == 1
    hidden = x.new_empty((rows, shape.inner))
    squares = torch.empty((rows, shape.hidden // config.add.columns), dtype=torch.float32, device=device)
    add, gate, last = config.add, config.gate, config.qkv
    gate_box = gate.columns // 2
    weights = ((o, add.features), (gate_up, gate_box), (down, add.features), (qkv, last.features))
    inputs = ((heads, add), (x, gate), (hidden, add), (x, last))
    maps = [_map(weight, lines) for weight, lines in weights]
    maps += [_map(tensor, tile_rows(unit.rows, rows)) for tensor, unit in inputs]
    tensors = (x, hidden, projection, squares, _counts(device))
    pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    number, factor = ctypes.c_int(rows), ctypes.c_float(eps)
    addresses = [
        *(made.address for made in maps),
        *(ctypes.addressof(pointers) + 8 * i for i in range(len(tensors))),
        ctypes.addressof(number),
        ctypes.addressof(factor),
    ]
    nvrtc.launch(load(chain_kernel(shape, config), device), _launch_shape(config, use_pdl(device)), addresses)
    return projection


def _map(matrix: torch.Tensor, lines: int) -> Any:
    rows, k = matrix.shape
    return nvrtc.tensor_map(matrix.data_ptr(), rows, k, matrix.stride(0), lines, STEP)
