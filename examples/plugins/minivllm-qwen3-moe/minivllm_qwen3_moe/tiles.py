"""Which tiles the grouped product takes for how many rows an expert has: the one place to tune.

Measured with ``python -m minivllm_qwen3_moe.bench --sweep`` on the shape of Qwen3-30B-A3B (128 experts, 8 a token).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """One product's launch: features and depth of a tile, warps, stages of loads in flight."""

    n: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Both products of a step. ``rows`` is common to them: routing cuts each expert's rows into tiles of so many."""

    rows: int
    gate_up: Tile  # its n counts gate's features; as many of up's come along
    down: Tile


Table = tuple[tuple[float, Tiles], ...]  # at most so many rows an expert, on average: tiles
TABLE: Table = (
    (12.0, Tiles(16, Tile(32, 128, 4, 4), Tile(64, 128, 4, 4))),
    (32.0, Tiles(32, Tile(64, 128, 4, 3), Tile(128, 128, 4, 2))),
    (96.0, Tiles(64, Tile(128, 64, 8, 4), Tile(256, 64, 8, 4))),
    (float("inf"), Tiles(128, Tile(128, 64, 8, 4), Tile(256, 64, 8, 4))),
)
# With weights in float8: twice the depth is as many bytes. Computed from the other table, not yet swept.
FP8_TABLE: Table = (
    (12.0, Tiles(16, Tile(32, 256, 4, 4), Tile(64, 256, 4, 3))),
    (32.0, Tiles(32, Tile(64, 256, 4, 3), Tile(128, 256, 4, 2))),
    (96.0, Tiles(64, Tile(128, 128, 8, 4), Tile(256, 128, 8, 4))),
    (float("inf"), Tiles(128, Tile(128, 128, 8, 4), Tile(256, 128, 8, 4))),
)


@cache
def tiles_for(tokens: int, top_k: int, experts: int, dtype: torch.dtype, float8: bool = False) -> Tiles:
    """``dtype``: the model's."""
    rows = tokens * top_k / experts
    found = next(tiles for most, tiles in (FP8_TABLE if float8 else TABLE) if rows <= most)
    if dtype.itemsize > 2:  # shared memory holds half as much, and precision counts more than speed
        return Tiles(min(found.rows, 64), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
    return found
