"""How a product of ``persistent_linear`` is cut into programs: tiles of a grid for a thousand rows and more; for 65 to
192 rows and large weights, whose lines memory sends no faster than the slowest program takes them, even shares."""

from dataclasses import dataclass
from functools import cache
from itertools import count

from minivllm.kernels._triton import cdiv
from minivllm.kernels.cluster_config import LARGE_WEIGHT
from minivllm.kernels.hopper import FIXED_BYTES, SHARED_BYTES, STEP, Kernel

MIN_ROWS = 1024  # of a grid
MIN_EVEN_ROWS, MAX_EVEN_ROWS = 65, 192  # beyond, arithmetic counts as much as memory, and the library is as good
UNIT = 16  # lines of gate and up that shares are counted in: outputs are written in eights
_MOST_LINES = {2: 256, 3: 192}  # by warpgroups that multiply: registers
_BUSY = 0.9  # below, the library's smaller tiles save more than the pass over the product costs
_BUSY_PARTS = 0.7  # of rows that arrive in parts, each of which the library would norm and multiply by itself
_LEAST_STAGES, _MOST_STAGES = 4, 8  # with three, 192 rows of Qwen3-8B take longer than in the library


@dataclass(frozen=True, slots=True)
class Cut:
    groups: int  # warpgroups that multiply, 64 rows each
    lines: int  # of the weight, a tile
    sharing: int  # programs of a cluster: other rows, the same lines
    stages: int  # of k in shared memory
    rounds: int = 0  # in which each program goes through its share; 0: tiles of a grid

    @property
    def rows(self) -> int:
        """Of a program's tile."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        return (
            FIXED_BYTES // 2
            + _kept_bytes(self.groups, self.lines)
            + self.stages * _stage_bytes(self.groups, self.lines)
        )


GRID = Cut(2, 256, 2, 3)


def _stage_bytes(groups: int, lines: int) -> int:
    return (64 * groups + lines) * 2 * STEP


def _kept_bytes(groups: int, lines: int) -> int:
    """Of each row the sums, and a place in the cache, one among the angles, and a factor."""
    return 64 * groups * (2 * lines + 16)


@cache
def cut_kernel(cut: Cut, gated: bool, head_dim: int, parts: bool = False) -> Kernel:
    """``parts``: it waits for parts of its rows, see ``exchange.Arrival``."""
    assert not (parts and cut.rounds)
    macros = {"GATED": int(gated), "HEAD": head_dim, "GROUPS": cut.groups, "LINES": cut.lines, "CLUSTER": cut.sharing,
              "STAGES": cut.stages, "EVEN": int(cut.rounds > 0), "PARTS": int(parts)}  # fmt: skip
    return Kernel("persistent_linear", (cut.lines,), tuple(macros.items()))


@cache
def even_cut(rows: int, n: int, sms: int) -> Cut:
    """Of up to 192 rows and n lines of gate and up, in as few rounds as registers and shared memory allow: each reads x
    again."""
    groups = 2 if rows <= 128 else 3
    units = cdiv(cdiv(n, UNIT), sms)  # the largest share; others are one less
    for rounds in count(1):
        lines = UNIT * cdiv(units, rounds)
        room = SHARED_BYTES - FIXED_BYTES - _kept_bytes(groups, lines)
        stages = min(room // _stage_bytes(groups, lines), _MOST_STAGES)
        if lines <= _MOST_LINES[groups] and stages >= _LEAST_STAGES:
            return Cut(groups, lines, 1, stages, rounds)
    raise AssertionError("one unit always fits")


@cache
def persistent_cut(rows: int, n: int, k: int, sms: int, gated: bool) -> Cut | None:
    """None: no cut of ours gives the multiprocessors even shares of it, or rows are too few, or between the two kinds.

    n: lines of the weight, gate's and up's counted both.
    """
    if rows >= MIN_ROWS:
        return GRID if busy(rows, n, sms // 2) >= _BUSY else None
    if gated and n * k > LARGE_WEIGHT and MIN_EVEN_ROWS <= rows <= MAX_EVEN_ROWS:
        cut = even_cut(rows, n, sms)
        wide = 3 * cut.lines >= 2 * cut.rows  # else x, which every round reads, is most of what a program takes in
        return cut if wide and even(n, sms) >= _BUSY else None
    return None


def parts_cut(rows: int, n: int, sms: int) -> Cut | None:
    """The same of rows that are still to arrive."""
    return GRID if rows >= MIN_ROWS and busy(rows, n, sms // 2) >= _BUSY_PARTS else None


def busy(rows: int, n: int, clusters: int) -> float:
    """The share of all programs' time that goes into rows and features that are there; the rest pads tiles, or idles in
    the last round of a grid. n: lines of the weight."""
    rounds = cdiv(cdiv(rows, 2 * GRID.rows) * cdiv(n, GRID.lines), clusters)
    return rows * n / (rounds * clusters * 2 * GRID.rows * GRID.lines)


def even(n: int, programs: int) -> float:
    """The same of even shares: the others' time beside that of the largest."""
    units = cdiv(n, UNIT)
    return units / (cdiv(units, programs) * programs)
