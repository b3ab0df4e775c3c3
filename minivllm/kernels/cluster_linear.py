"""Linear layers over 17 to 256 rows, on Hopper: products whose weights are on their way before the input is there.

With the residual addition behind, or SiLU(gate) * up.

The kernel is CUDA C++ (``cluster_linear.cu``): it needs programs that share their loads and add up through each other's
shared memory (thread-block clusters), which Triton 3.6 has no words for. Tiles come by TMA; the tensor cores multiply
(wgmma); sums are float32. Structure after CUTLASS's warp-specialized GEMMs (NVIDIA, 2023).

Bytes moved: the weight, n * k elements; from L2 to a multiprocessor (features + rows) of a tile * k elements, at 64
bytes a cycle, which bounds 128 rows and more. Qwen3-0.6B's four products a layer at 256 rows: 31 MB, 8 GFLOP, 11 µs.
What stands around it counts as much: a program's first tiles of weights, often all, are asked for before ``gdc_wait``
(see pdl.py), so that behind a kernel of its own kind a product of 32 rows takes 3.7 µs, of which the launch is 1.3.
"""

import ctypes
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from minivllm.errors import MinivllmError
from minivllm.kernels import nvrtc
from minivllm.kernels._triton import cdiv, num_sms
from minivllm.kernels.pdl import use_pdl

logger = logging.getLogger("minivllm")

MIN_ROWS, MAX_ROWS = 17, 256
_STEP = 64  # elements of k a stage: 128 bytes
_MAX_STAGES = 16
_SHARED_BYTES = 227 * 1024  # what a program may have on Hopper
_FIXED_BYTES = 2048  # of them: barriers, and tiles start at a multiple of 1,024
_COMMON_BYTES = 148 * 1024  # what a program takes, alone on a multiprocessor, to leave room for the next kernel's


@dataclass(frozen=True, slots=True)
class Tile:
    """A compiled kernel: 64 * ``groups`` features and ``columns`` rows a program, or the other way round."""

    groups: int
    columns: int
    rows_first: bool
    programs: int  # at least so many fit a multiprocessor's registers
    gated: bool = False  # half of the features are gate's, half up's

    @property
    def features(self) -> int:
        return self.columns if self.rows_first else 64 * self.groups

    @property
    def outputs(self) -> int:
        return self.features // 2 if self.gated else self.features

    @property
    def rows(self) -> int:
        return 64 * self.groups if self.rows_first else self.columns

    @property
    def stage_bytes(self) -> int:
        return (self.features + self.rows) * 2 * _STEP

    @property
    def pitch_bytes(self) -> int:
        """A row of float32 sums in shared memory."""
        return 4 * (self.features + (8 if self.rows_first else 4))

    @property
    def source(self) -> str:
        n = self.columns
        sums = ", ".join(f"%{i}" for i in range(n // 2))
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(n // 2))
        return (
            f"#define GROUPS {self.groups}\n#define COLUMNS {n}\n#define ROWS_FIRST {int(self.rows_first)}\n"
            f"#define MIN_PROGRAMS {self.programs}\n#define GATED {int(self.gated)}\n"
            f"__device__ __forceinline__ void multiply(float (&d)[{n // 2}], unsigned long long a,"
            " unsigned long long b) {\n"
            f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, %{n // 2},'
            f' %{n // 2 + 1}, 1, 1, 1, 0, 0;" : {outputs} : "l"(a), "l"(b));\n}}\n'
            + (Path(__file__).parent / "cluster_linear.cu").read_text()
        )


SMALL, MEDIUM, LARGE = Tile(1, 32, False, 3), Tile(1, 64, False, 2), Tile(1, 128, False, 2)
WIDE = Tile(2, 96, True, 1)  # 128 rows, 96 features: even shares where n is large
PLAIN_TILES = (SMALL, MEDIUM, LARGE, WIDE)
TILES = PLAIN_TILES + tuple(replace(tile, gated=True) for tile in PLAIN_TILES)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    tile: Tile
    stages: int  # of k in shared memory
    sharing: int = 1  # row tiles that load a feature tile's weights once: divides their number
    splits: int = 1  # of k; with ``sharing`` at most 8 programs a cluster


def use_cluster(rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether (rows, k) @ (n, k).T is faster here than in the library; the one place that knows."""
    if not MIN_ROWS <= rows <= MAX_ROWS or dtype != torch.bfloat16 or n % 8 or k % 8:
        return False
    small = n * k <= 6 << 20 and (rows <= 128 or min(n, k) <= 1024)
    if not small and (rows > 64 or n * k > 1 << 26):  # there the library's larger tiles are better, or as good
        return False
    return usable(device)


@cache
def cluster_config(rows: int, n: int, k: int, sms: int = 132) -> ClusterConfig:
    """The smallest tile with which one wave of programs is enough; splits of k until most multiprocessors have one.

    n: lines of the weight, gate's and up's counted both.
    """
    steps = cdiv(k, _STEP)
    tile = SMALL if rows <= 32 else MEDIUM
    if rows > 64 and _programs(tile, rows, n) > sms:
        tile = LARGE
        if rows > 128 and _programs(tile, rows, n) > sms:
            tile = WIDE
    programs, row_tiles = _programs(tile, rows, n), cdiv(rows, tile.rows)
    clustered = sms * 17 // 20  # more programs in clusters of three or four may find no room at once
    wanted = max(cdiv(steps, _MAX_STAGES), cdiv(sms // 2 - 2, programs))
    splits = max(1, min(4, steps, wanted, clustered // programs))
    if splits == 1 and min(steps, wanted) > 1 and 2 * programs <= sms:
        splits = 2
    programs *= splits
    sharing = 2 if row_tiles % 2 == 0 and programs <= (sms if splits == 1 else clustered) else 1
    per_split, least = cdiv(steps, splits), cdiv((tile.rows + splits) * tile.pitch_bytes, tile.stage_bytes)

    def room(shared_bytes: int) -> int:
        return (shared_bytes - _FIXED_BYTES - _received_bytes(tile, rows, splits)) // tile.stage_bytes

    stages = room(_COMMON_BYTES)
    if programs > sms:  # two or three on a multiprocessor, if that leaves each a few stages
        stages = max(room(_SHARED_BYTES // 2), 4) if programs <= 2 * sms else max(room(_SHARED_BYTES // 3), 4)
    elif programs <= sms // 2 and per_split <= room(_SHARED_BYTES):
        stages = per_split  # all at once: nothing waits for a stage to be free
    # The sums take the place of the stages.
    return ClusterConfig(tile, max(min(stages, per_split, _MAX_STAGES), least), sharing, splits)


def _programs(tile: Tile, rows: int, n: int) -> int:
    return cdiv(n, tile.features) * cdiv(rows, tile.rows)


def _tile_rows(tile: Tile, rows: int) -> int:
    """Rows of each tile, if they share evenly; TMA writes them in eights."""
    return 8 * cdiv(cdiv(rows, cdiv(rows, tile.rows)), 8)


def _received_bytes(tile: Tile, rows: int, splits: int) -> int:
    return (splits - 1) * cdiv(_tile_rows(tile, rows), splits) * tile.pitch_bytes


@cache
def usable(device: torch.device) -> bool:
    """Whether all tiles compile and load here. Where one does not, a warning says why, once."""
    if not nvrtc.available(device):
        return False
    try:
        for tile in TILES:
            _kernel(tile, device)
    except MinivllmError as error:
        logger.warning("products of some rows go to the library, more slowly: %s", error)
        return False
    return True


@cache
def _compiled() -> dict[Tile, Future[bytes]]:
    """All tiles, compiled side by side when the first is needed: half a second each, the first time on a machine."""
    pool = ThreadPoolExecutor(len(TILES))
    futures = {tile: pool.submit(nvrtc.compile_cubin, tile.source) for tile in TILES}
    pool.shutdown(wait=False)
    return futures


@cache
def _kernel(tile: Tile, device: torch.device) -> Any:
    return nvrtc.load(_compiled()[tile].result(), "cluster_linear", device, _SHARED_BYTES - 1024)


@dataclass(frozen=True, slots=True)
class _Plan:
    """All of a launch that tensors of one shape share."""

    kernel: Any
    shape: nvrtc.LaunchShape
    weight_lines: int  # of a TMA load, and rows of x
    x_rows: int
    numbers: Any  # the kernel's integers, in an array that lives on
    addresses: list[int]  # of each


@cache
def _plan(
    rows: int, lines: int, n: int, k: int, add: bool, gated: bool, config: ClusterConfig | None, device: torch.device
) -> _Plan:
    config = config or cluster_config(rows, lines, k, num_sms(device))
    tile = replace(config.tile, gated=True) if gated else config.tile
    tile_rows = _tile_rows(tile, rows)
    assert cdiv(rows, tile_rows) % config.sharing == 0
    shape = nvrtc.LaunchShape(
        (cdiv(n, tile.outputs), cdiv(rows, tile_rows), config.splits),
        (1, config.sharing, config.splits),
        128 * tile.groups + 32,
        config.stages * tile.stage_bytes + _received_bytes(tile, rows, config.splits) + 1024,
        use_pdl(device),
    )
    values = (rows, n, cdiv(k, _STEP), tile_rows, config.stages, config.sharing, config.splits, int(add))
    numbers = (ctypes.c_int * len(values))(*values)
    addresses = [ctypes.addressof(numbers) + 4 * i for i in range(len(values))]
    return _Plan(_kernel(tile, device), shape, tile.outputs // config.sharing, tile_rows, numbers, addresses)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    add: bool = False,
    gated: bool = False,
    config: ClusterConfig | None = None,
) -> torch.Tensor:
    """x (t, k), weight (n or 2 * n, k), out (t, n) contiguous."""
    assert weight.is_contiguous() and out.is_contiguous()
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:  # TMA's alignment
        x = x.contiguous()
    (rows, k), lines = x.shape, weight.shape[0]
    plan = _plan(rows, lines, out.shape[1], k, add, gated, config, x.device)
    weights = nvrtc.tensor_map(weight.data_ptr(), lines, k, k, plan.weight_lines, _STEP)
    inputs = nvrtc.tensor_map(x.data_ptr(), rows, k, x.stride(0), plan.x_rows, _STEP)
    pointer = ctypes.c_void_p(out.data_ptr())
    addresses = [weights.address, inputs.address, ctypes.addressof(pointer), *plan.addresses]
    nvrtc.launch(plan.kernel, plan.shape, addresses)
    return out


def cluster_linear(x: torch.Tensor, weight: torch.Tensor, config: ClusterConfig | None = None) -> torch.Tensor:
    """x (t, k), weight (n, k), both bfloat16; returns (t, n)."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, config=config)


def cluster_gate_up(x: torch.Tensor, weight: torch.Tensor, config: ClusterConfig | None = None) -> torch.Tensor:
    """SiLU(gate) * up of ``cluster_linear``: weight (2 * n, k), gate's rows first; returns (t, n)."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, gated=True, config=config)


def cluster_linear_add(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, config: ClusterConfig | None = None
) -> torch.Tensor:
    """``residual`` (t, n) += x @ weight.T, in place and rounded once; returns it."""
    return _launch(x, weight, residual, add=True, config=config)
