"""How kernels of packed weights (``packed.cuh``) are configured: the number of rows that they are compiled for,
programs, and shared memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import compiling
from minivllm.kernels.hopper import FIXED_BYTES, SHARED_BYTES, Kernel, load, loads
from minivllm.kernels.linear.packed_weights import FIRST_EXPONENT, LINES, PIECE_BYTES, STEP, UNIT_BYTES
from minivllm.rounding import cdiv

_COLUMNS = 8, 16, 32, 48, 64  # rows that kernels are compiled for
_THREADS = 384
_MOST_STAGES = 8  # of weights
_LEAST_INPUTS, _MOST_INPUTS = 8, 16
_SHARED_ROWS = 32  # from so many rows on, clusters share inputs
_AHEAD = 2  # units of weights in flight: with more, programs run at different paces


@dataclass(frozen=True, slots=True)
class PackedConfig:
    rows: int  # at most
    programs: int
    stages: int  # one unit of weights each
    inputs: int  # stages of 64 of the rows' k each

    @property
    def shared_bytes(self) -> int:
        factors = 2 * 4 * self.rows  # of the rows, for two products
        return self.stages * UNIT_BYTES + self.inputs * _tile_bytes(self.rows) + 1024 + factors

    @property
    def macros(self) -> dict[str, int]:
        return {"ROWS": self.rows, "PROGRAMS": self.programs, "STAGES": self.stages, "INPUTS": self.inputs,
                "AHEAD": _AHEAD, "PIECE_BYTES": PIECE_BYTES, "FIRST_EXPONENT": FIRST_EXPONENT}  # fmt: skip

    def kernel(self, name: str, sizes: dict[str, int]) -> Kernel:
        return Kernel(name, (), tuple((sizes | self.macros).items()), ("packed_piece", "packed"), by=(self.rows,))

    def launch_shape(self, pdl: bool) -> nvrtc.LaunchShape:
        return nvrtc.LaunchShape((self.programs, 1, 1), (2, 1, 1), _THREADS, self.shared_bytes, pdl)

    def runs(self, kernel: Kernel, device: torch.device) -> bool:
        """Whether the kernel loads on the device and all its programs, which wait for each other, can run at once."""
        return loads(kernel, device) and (compiling() or _fits(self, kernel, device))

    def input_map(self, x: torch.Tensor) -> nvrtc.TensorMap:
        """x (rows, k), with contiguous rows."""
        box = self.rows // (2 if self.rows >= _SHARED_ROWS else 1)
        return nvrtc.tensor_map(x.data_ptr(), *x.shape, x.stride(0), box, STEP // 2)

    def parts(self, device: torch.device) -> torch.Tensor:
        """The buffer for sums of blocks that are split along k."""
        return _parts(device, 2 * self.programs * LINES * self.rows)


@cache
def _fits(config: PackedConfig, kernel: Kernel, device: torch.device) -> bool:
    with torch.cuda.device(device):
        return config.programs <= 2 * nvrtc.clusters_at_once(load(kernel, device), config.launch_shape(False))


@cache
def _parts(device: torch.device, words: int) -> torch.Tensor:
    """(words,) int32: float32 sums, all absent between launches."""
    return torch.full((words,), -1, dtype=torch.int32, device=device)


def _tile_bytes(rows: int) -> int:
    return rows * STEP  # 64 of k


def packed_config(rows: int, products: Sequence[tuple[int, int]], sms: int) -> PackedConfig | None:
    """For consecutive products of sizes (lines, k). None if there are no rows or too many, sizes are not whole units,
    or a cluster would have no unit."""
    columns = next((c for c in _COLUMNS if 0 < rows <= c), None)
    clusters = sms // 2
    if columns is None or any(lines % LINES or k % STEP for lines, k in products):
        return None
    if any(0 < cdiv(lines, 2 * LINES) % clusters * (k // STEP) < clusters for lines, k in products):
        return None
    room, tile = SHARED_BYTES - FIXED_BYTES - 2 * 4 * columns, _tile_bytes(columns)
    stages = min((room - _LEAST_INPUTS * tile) // UNIT_BYTES, _MOST_STAGES)
    inputs = min((room - stages * UNIT_BYTES) // tile, _MOST_INPUTS)
    return PackedConfig(columns, 2 * clusters, stages, inputs)
