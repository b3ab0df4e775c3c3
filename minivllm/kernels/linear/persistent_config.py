"""How ``persistent_linear`` splits a product between programs: a grid of tiles for a thousand rows or more. For 65 to
192 rows and large weights, even shares: there reading the weight takes as long as the slowest program."""

from dataclasses import dataclass
from functools import cache
from itertools import count

from minivllm.kernels.hopper import FIXED_BYTES, SHARED_BYTES, STEP, Kernel
from minivllm.kernels.linear.cluster_config import LARGE_WEIGHT
from minivllm.rounding import cdiv

MIN_ROWS = 1024  # for a grid
MIN_EVEN_ROWS, MAX_EVEN_ROWS = 65, 192  # with more, arithmetic costs as much as memory, and the library is as good
UNIT = 16  # granularity of shares, in lines of gate and up: outputs are written in eights
_MOST_LINES = {2: 256, 3: 192}  # by warpgroups that multiply: limited by registers
_BUSY = 0.9  # below, the library's smaller tiles save more than the extra pass over the product costs
_BUSY_PARTS = 0.7  # for rows that arrive in parts, each of which the library would norm and multiply separately
_LEAST_STAGES, _MOST_STAGES = 4, 8  # with three, 192 rows of Qwen3-8B take longer than in the library


@dataclass(frozen=True, slots=True)
class Cut:
    groups: int  # warpgroups that multiply, 64 rows each
    lines: int  # rows of the weight, per tile
    sharing: int  # programs per cluster: different rows, the same lines
    stages: int  # of k, in shared memory
    rounds: int = 0  # passes in which each program takes its share; 0: a grid of tiles

    @property
    def rows(self) -> int:
        """Rows of a tile."""
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
    """Of a tile's sums, and for each row its place in the cache, among the angles, and its factor."""
    return 64 * groups * (2 * lines + 16)


@cache
def cut_kernel(cut: Cut, gated: bool, head_dim: int, parts: bool = False) -> Kernel:
    """``parts``: the kernel waits for parts of its rows, see ``exchange.Arrival``."""
    assert not (parts and cut.rounds)
    macros = {"GATED": int(gated), "HEAD": head_dim, "GROUPS": cut.groups, "LINES": cut.lines, "CLUSTER": cut.sharing,
              "STAGES": cut.stages, "EVEN": int(cut.rounds > 0), "PARTS": int(parts)}  # fmt: skip
    return Kernel("persistent_linear", (cut.lines,), tuple(macros.items()))


@cache
def even_cut(rows: int, n: int, sms: int) -> Cut:
    """For up to 192 rows and n lines of gate and up, with as few rounds as registers and shared memory allow, because
    every round reads x again."""
    groups = 2 if rows <= 128 else 3
    units = cdiv(cdiv(n, UNIT), sms)  # the largest share; others have one less
    for rounds in count(1):
        lines = UNIT * cdiv(units, rounds)
        room = SHARED_BYTES - FIXED_BYTES - _kept_bytes(groups, lines)
        stages = min(room // _stage_bytes(groups, lines), _MOST_STAGES)
        if lines <= _MOST_LINES[groups] and stages >= _LEAST_STAGES:
            return Cut(groups, lines, 1, stages, rounds)
    raise AssertionError("one unit always fits")


@cache
def persistent_cut(rows: int, n: int, k: int, sms: int, gated: bool) -> Cut | None:
    """None if no tiling gives the SMs even shares, or rows are too few, or between the two kinds.

    n: lines (rows of the weight), gate's and up's together.
    """
    if rows >= MIN_ROWS:
        return GRID if busy(rows, n, sms // 2) >= _BUSY else None
    if gated and n * k > LARGE_WEIGHT and MIN_EVEN_ROWS <= rows <= MAX_EVEN_ROWS:
        cut = even_cut(rows, n, sms)
        wide = 3 * cut.lines >= 2 * cut.rows  # otherwise x, which every round reads, is most of what a program reads
        return cut if wide and even(n, sms) >= _BUSY else None
    return None


def parts_cut(rows: int, n: int, sms: int) -> Cut | None:
    """``persistent_cut`` for rows that are still to arrive."""
    return GRID if rows >= MIN_ROWS and busy(rows, n, sms // 2) >= _BUSY_PARTS else None


def busy(rows: int, n: int, clusters: int) -> float:
    """The share of all programs' time spent on rows and features that exist; the rest is padding of tiles, or idle time
    in the last round of a grid. n: lines of the weight."""
    rounds = cdiv(cdiv(rows, 2 * GRID.rows) * cdiv(n, GRID.lines), clusters)
    return rows * n / (rounds * clusters * 2 * GRID.rows * GRID.lines)


def even(n: int, programs: int) -> float:
    """The same for even shares: the mean share relative to the largest."""
    units = cdiv(n, UNIT)
    return units / (cdiv(units, programs) * programs)
