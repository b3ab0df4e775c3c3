"""How ``cluster_linear`` splits a product between programs: tile, splits of k, and stages in shared memory."""

from dataclasses import dataclass, replace
from functools import cache

from minivllm.kernels.hopper import FIXED_BYTES, SHARED_BYTES, STEP, Kernel
from minivllm.rounding import cdiv

SMALL_WEIGHT = 6 << 20  # elements up to which small tiles in one wave are fast for 128 rows and more, too
LARGE_WEIGHT = 1 << 24  # elements from which even shares of memory bandwidth matter most
HEADS_TILE = 128  # features: one head or two
MOST_FEATURES = {(1, 1): 256, (1, 2): 144, (1, 3): 80, (2, 1): 192, (3, 1): 144}  # by (groups, programs): registers
_MAX_STAGES = 16
_COMMON_BYTES = 148 * 1024  # for a program alone on an SM; leaves room for the next kernel's
_HEADS_BYTES = 164 * 1024  # the same if attention is next


@dataclass(frozen=True, slots=True)
class Tile:
    """A compiled kernel: a program computes 64 * ``groups`` features by ``columns`` rows, or the other way round."""

    groups: int
    columns: int
    rows_first: bool
    programs: int  # at least so many fit an SM's registers
    gated: bool = False  # half of the features are gate's, half up's
    head_dim: int = 0  # not 0: the features are heads of queries, keys and values
    float8: bool = False  # x and weight are float8_e4m3fn, and have scales

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
    def squaring(self) -> int:
        """Threads that square x if the norm is fused; 0: it cannot be."""
        if self.groups > 2:
            return 0
        return self.rows if self.rows_first else 128

    @property
    def stage_bytes(self) -> int:
        return (self.features + self.rows) * 2 * STEP

    @property
    def pitch_bytes(self) -> int:
        """Bytes of a row of float32 sums in shared memory."""
        return 4 * (self.features + (8 if self.rows_first else 4))


@cache
def tile_kernel(tile: Tile) -> Kernel:
    macros = {"GROUPS": tile.groups, "COLUMNS": tile.columns, "ROWS_FIRST": int(tile.rows_first),
              "MIN_PROGRAMS": tile.programs, "GATED": int(tile.gated), "HEAD": tile.head_dim,
              "FLOAT8": int(tile.float8)}  # fmt: skip
    return Kernel("cluster_linear", (tile.columns,), tuple(macros.items()), operands="e4m3" if tile.float8 else "bf16")


SMALL, MEDIUM, LARGE = Tile(1, 32, False, 3), Tile(1, 64, False, 2), Tile(1, 128, False, 2)
WIDE = Tile(2, 96, True, 1)  # 128 rows, 96 features: even shares for large n


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    tile: Tile
    stages: int  # of k in shared memory
    sharing: int = 1  # row tiles that load a feature tile's weights once; divides their number
    splits: int = 1  # of k; times ``sharing`` at most 8 programs per cluster


@cache
def cluster_config(
    rows: int, n: int, k: int, sms: int = 132, gated: bool = False, head_dim: int = 0
) -> ClusterConfig | None:
    """How to launch a product; None if no tile gives the SMs even shares.

    n: lines (rows of the weight), gate's and up's together. k: in bfloat16; two of float8 count as one.
    """
    if head_dim:
        return _heads_config(rows, n, k, sms, head_dim)
    if n * k > LARGE_WEIGHT:
        return _even_config(rows, n, k, sms, gated)
    if 64 < rows <= 128 and not gated and is_long(n, k):
        return _long_config(rows, n, k, sms)
    return _wave_config(rows, n, k, sms, gated)


def is_long(n: int, k: int) -> bool:
    """Whether there is more k than n to split, in a weight that is neither small nor large."""
    return SMALL_WEIGHT < n * k <= LARGE_WEIGHT and k >= 2 * n


def _long_config(rows: int, n: int, k: int, sms: int) -> ClusterConfig:
    """All rows in one tile, k in four splits: a program reads less than with narrow tiles of half of k."""
    tile, splits = Tile(2, 8 * cdiv(n, 8 * (_clustered(sms) // 4)), True, 1), 4
    return ClusterConfig(tile, _stages(tile, rows, cdiv(k, STEP), splits, SHARED_BYTES), 1, splits)


def _wave_config(rows: int, n: int, k: int, sms: int, gated: bool) -> ClusterConfig:
    """The smallest tile for which one wave of programs suffices; k is split until most SMs have a program."""
    steps = cdiv(k, STEP)
    tile = SMALL if rows <= 32 else MEDIUM
    if rows > 64 and _programs(tile, rows, n) > sms:
        tile = LARGE
        if rows > 128 and _programs(tile, rows, n) > sms:
            tile = WIDE
    tile = replace(tile, gated=gated)
    programs, row_tiles = _programs(tile, rows, n), cdiv(rows, tile.rows)
    clustered = _clustered(sms)
    wanted = max(cdiv(steps, _MAX_STAGES), cdiv(sms // 2 - 2, programs))
    splits = max(1, min(4, steps, wanted, clustered // programs))
    if splits == 1 and min(steps, wanted) > 1 and 2 * programs <= sms:
        splits = 2
    programs *= splits
    sharing = 2 if row_tiles % 2 == 0 and programs <= (sms if splits == 1 else clustered) else 1
    shared_bytes = _COMMON_BYTES
    if programs > sms:  # two or three per SM
        shared_bytes = SHARED_BYTES // (2 if programs <= 2 * sms else 3)
    elif programs <= sms // 2 and cdiv(steps, splits) <= _stages(tile, rows, steps, splits, SHARED_BYTES):
        shared_bytes = SHARED_BYTES  # all of k fits: no load waits for a free stage
    return ClusterConfig(tile, _stages(tile, rows, steps, splits, shared_bytes), sharing, splits)


def _even_config(rows: int, n: int, k: int, sms: int, gated: bool) -> ClusterConfig | None:
    """As many features per program as give each SM the same number of programs, all resident at once.

    Memory serves SMs equally, whatever they ask for: one with a program more than the others would finish last.
    """
    steps, groups, unit = cdiv(k, STEP), min(cdiv(rows, 64), 3), 16 if gated else 8

    def tile(programs: int, splits: int) -> Tile:
        return Tile(groups, unit * cdiv(n, unit * (programs * sms // splits)), True, programs, gated)

    splits, choices = 1, [tile(w, 1) for w in ((2, 3, 1) if groups == 1 else (1,))]
    if not gated and steps > 1 and tile(1, 2).features <= 176:
        splits, choices = 2, [tile(1, 2)]
    choices = [t for t in choices if t.features <= MOST_FEATURES[groups, t.programs] and t.outputs >= 8]
    if not choices or rows > 64 * groups:
        return None
    best = max(choices, key=lambda t: round(20 * cdiv(n, t.features) / (t.programs * sms)))
    shared_bytes = _COMMON_BYTES if groups == best.programs == 1 else SHARED_BYTES // best.programs
    return ClusterConfig(best, _stages(best, rows, steps, splits, shared_bytes), 1, splits)


def _heads_config(rows: int, n: int, k: int, sms: int, head_dim: int) -> ClusterConfig:
    """Tiles are whole heads, which their program norms and rotates; k is split as far as there is room."""
    steps, tile = cdiv(k, STEP), Tile(1 if rows <= 64 else 2, HEADS_TILE, True, 1, head_dim=head_dim)
    programs = _programs(tile, rows, n)
    splits = next(s for s in (4, 2, 1) if s == 1 or (s <= steps and s * programs <= _clustered(sms)))
    sharing = 2 if cdiv(rows, tile.rows) == 2 and programs * splits <= _clustered(sms) else 1
    shared_bytes = _HEADS_BYTES if tile.groups == 1 else SHARED_BYTES
    return ClusterConfig(tile, _stages(tile, rows, steps, splits, shared_bytes), sharing, splits)


def _clustered(sms: int) -> int:
    """Programs in clusters of three or four that are sure to be resident at once."""
    return sms * 17 // 20


def _stages(tile: Tile, rows: int, steps: int, splits: int, shared_bytes: int) -> int:
    """As many as fit, at least enough for the sums that replace them; four if several programs share an SM."""
    room = (shared_bytes - FIXED_BYTES - received_bytes(tile, rows, splits)) // tile.stage_bytes
    if shared_bytes < _COMMON_BYTES:
        room = max(room, 4)
    least = cdiv((tile.rows + splits) * tile.pitch_bytes, tile.stage_bytes)
    return max(min(room, cdiv(steps, splits), _MAX_STAGES), least)


def _programs(tile: Tile, rows: int, n: int) -> int:
    return cdiv(n, tile.features) * cdiv(rows, tile.rows)


def tile_rows(most: int, rows: int) -> int:
    """Rows per tile, at most ``most``, for the fewest tiles of equal size; a multiple of 8, as TMA writes eights."""
    return 8 * cdiv(cdiv(rows, cdiv(rows, most)), 8)


def received_bytes(tile: Tile, rows: int, splits: int) -> int:
    return (splits - 1) * cdiv(tile_rows(tile.rows, rows), splits) * tile.pitch_bytes
