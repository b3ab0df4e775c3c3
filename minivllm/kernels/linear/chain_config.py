"""How ``chain_linear`` splits its four products between programs: in small layers into units that read as little as
possible, in large ones into units of all rows."""

from dataclasses import dataclass, replace
from functools import cache

from minivllm.kernels.hopper import FIXED_BYTES, SHARED_BYTES, STEP, Kernel
from minivllm.rounding import cdiv

MIN_ROWS, MAX_ROWS = 2, 512  # of any layer
_LEAST_ROWS = (3 << 27, MIN_ROWS), (1 << 28, 17), (0, 33)  # (weights of a layer, more than; least rows)
_MOST_LARGE_ROWS = 192  # with more, arithmetic dominates, and the library's tiles need less time and power for it
_MOST_SMALL = 1 << 27  # weights of a small layer
_MOST_FEATURES = 256  # of a unit: wgmma's N, and lines (rows of the weight) per TMA load
_MOST_OF_THREE = 176  # with three warpgroups: limited by registers
_THIRD_ROWS, _THIRD_WEIGHTS = 161, 1 << 28  # from so many of either on, the third warpgroup has enough work
_MOST_OF_ROUND = 192  # per round of gate and up, in large layers
_ADD_SPLITS, _QKV_SPLITS = 4, 2  # of k, in large layers
_LEAST_STAGES = 4


@dataclass(frozen=True, slots=True)
class ChainShape:
    """Sizes of a decoder layer: of the residual stream, attention's output, gate, and qkv."""

    hidden: int
    width: int
    inner: int
    qkv: int

    @property
    def weights(self) -> int:
        """Elements."""
        return self.hidden * (self.width + 3 * self.inner + self.qkv)

    @property
    def large(self) -> bool:
        return self.weights > _MOST_SMALL


@dataclass(frozen=True, slots=True)
class Unit:
    """A program's part of a product: ``rows`` by ``features`` lines of the weight, for one of ``splits`` of k;
    ``at_once``: steps of k per stage."""

    rows: int
    features: int
    at_once: int = 1
    splits: int = 1

    @property
    def step_bytes(self) -> int:
        return (self.rows + self.features) * 2 * STEP

    def columns(self, groups: int = 2) -> int:
        """Features per warpgroup: each warpgroup has 64 of the rows, or two share the same rows."""
        return self.features if self.rows == 64 * groups else self.features // 2


@dataclass(frozen=True, slots=True)
class ChainConfig:
    add: Unit  # o and down
    gate: Unit
    qkv: Unit
    stages: int
    programs: int
    groups: int = 2  # warpgroups that multiply
    rounds: int = 1  # rounds in which a program computes gate's features
    last: int = 0  # features of one more, smaller round
    large: bool = False

    @property
    def threads(self) -> int:
        """Threads that multiply."""
        return 128 * self.groups

    @property
    def stage_bytes(self) -> int:
        return max(unit.at_once * unit.step_bytes for unit in (self.add, self.gate, self.qkv))

    @property
    def sent_bytes(self) -> int:
        """What a program of a small layer receives from the others of its cluster."""
        return 0 if self.large else self.threads * self.add.columns()

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.sent_bytes + 1024

    @property
    def part_words(self) -> int:
        """Words of memory in which splits of a large layer's products exchange their sums."""
        shares = (unit.features // 2 // unit.splits * (unit.splits - 1) for unit in (self.add, self.qkv))
        return self.programs * self.threads * max(shares)

    def row_parts(self, hidden: int) -> int:
        """Parts in which the squares of a row of x are written."""
        return hidden // self.add.columns(self.groups) * (self.add.splits if self.large else 1)


@cache
def chain_config(rows: int, shape: ChainShape, sms: int = 132) -> ChainConfig | None:
    """At most one unit per program. None if no units split the products evenly, or there are other kernels for so many
    rows."""
    least = next(rows for weights, rows in _LEAST_ROWS if shape.weights > weights)
    if not least <= rows <= MAX_ROWS:
        return None
    return _large_config(rows, shape, sms) if shape.large else _small_config(rows, shape, sms)


def _small_config(rows: int, shape: ChainShape, sms: int) -> ChainConfig | None:
    """The units that read least; k of o and down is split in two."""
    programs = sms // 2 * 2
    add = _unit(rows, shape.hidden, programs // 2, False)
    gate = _unit(rows, 2 * shape.inner, programs, True)
    qkv = _unit(rows, shape.qkv, programs, False)
    if add is None or gate is None or qkv is None or shape.hidden // add.columns() % 16:
        return None
    most_bytes = max(unit.step_bytes for unit in (add, gate, qkv)) * 5 // 4  # per stage
    wanted = max(2 * _units(rows, add, shape.hidden), _units(rows, gate, 2 * shape.inner), _units(rows, qkv, shape.qkv))
    add = _deepened(replace(add, splits=2), most_bytes, shape.width // 2, shape.inner // 2)
    gate, qkv = (_deepened(unit, most_bytes, shape.hidden) for unit in (gate, qkv))
    if add is None or gate is None or qkv is None:
        return None
    return _with_stages(ChainConfig(add, gate, qkv, stages=0, programs=cdiv(wanted, 2) * 2))


def _unit(rows: int, n: int, most: int, gated: bool) -> Unit | None:
    """Split n features (gate's and up's together) into at most ``most`` units of all rows."""
    found = []
    for unit_rows in (64, 128):
        step = (8 if unit_rows == 128 else 16) * (2 if gated else 1)
        if tiles := most // cdiv(rows, unit_rows):
            first = cdiv(cdiv(n, tiles), step) * step
            found += [Unit(unit_rows, f) for f in range(first, _MOST_FEATURES + 1, step) if n % f == 0][:1]
    return min(found, key=lambda unit: unit.rows + unit.features, default=None)


def _deepened(unit: Unit, most_bytes: int, *ks: int) -> Unit | None:
    """With as many steps per stage as fit and divide the products' k; None if k is not whole steps."""
    fitting = (a for a in (4, 2, 1) if a * unit.step_bytes <= most_bytes and not any(k % (a * STEP) for k in ks))
    at_once = next(fitting, None)
    return None if at_once is None else replace(unit, at_once=at_once)


def _units(rows: int, unit: Unit, n: int) -> int:
    return cdiv(rows, unit.rows) * (n // unit.features)


def _large_config(rows: int, shape: ChainShape, sms: int) -> ChainConfig | None:
    """As many programs as split all products evenly, if few SMs stay idle; gate's features in as few rounds as fit,
    because each round reads x again."""
    ks = (shape.width, _ADD_SPLITS), (shape.inner, _ADD_SPLITS), (shape.hidden, _QKV_SPLITS)
    if rows > _MOST_LARGE_ROWS or any(k % (splits * STEP) for k, splits in ks):
        return None
    if 128 < rows < _THIRD_ROWS and shape.weights < _THIRD_WEIGHTS:
        return None
    # In eights, as in wgmma; the splits of k divide up a unit's features, so a unit has ``splits`` times as many.
    features = shape.hidden, shape.inner, shape.qkv
    even = range(sms // 16 * 16, sms * 9 // 10, -16)  # a row's squares are read in sixteens
    programs = next((p for p in even if not any(n % (8 * p) for n in features)), None)
    if programs is None:
        return None
    groups = cdiv(rows, 64)
    most = _MOST_FEATURES if groups < 3 else _MOST_OF_THREE
    add = Unit(64 * groups, _ADD_SPLITS * shape.hidden // programs, splits=_ADD_SPLITS)
    qkv = Unit(64 * groups, _QKV_SPLITS * shape.qkv // programs, splits=_QKV_SPLITS)
    outputs = shape.inner // programs
    rounds = cdiv(2 * outputs, min(most, _MOST_OF_ROUND))
    gate = Unit(64 * groups, 16 * cdiv(outputs, 8 * rounds))
    rounds, last = divmod(2 * outputs, gate.features)
    if max(add.features, qkv.features) > most:
        return None
    return _with_stages(ChainConfig(add, gate, qkv, 0, programs, groups, rounds, last, large=True))


def _with_stages(config: ChainConfig) -> ChainConfig | None:
    stages = (SHARED_BYTES - FIXED_BYTES - config.sent_bytes) // config.stage_bytes
    return replace(config, stages=stages) if stages >= _LEAST_STAGES else None


@cache
def chain_kernel(shape: ChainShape, config: ChainConfig) -> Kernel:
    macros = {"HIDDEN": shape.hidden, "WIDTH": shape.width, "INNER": shape.inner, "QKV": shape.qkv,
              "STAGES": config.stages, "STAGE_BYTES": config.stage_bytes, "GROUPS": config.groups,
              "GATE_ROUNDS": config.rounds, "LAST_FEATURES": config.last}  # fmt: skip
    units = {"ADD": config.add, "GATE": config.gate, "QKV": config.qkv}
    for name, unit in units.items():
        macros |= {f"{name}_ROWS": unit.rows, f"{name}_FEATURES": unit.features, f"{name}_AT_ONCE": unit.at_once,
                   f"{name}_SPLITS": unit.splits}  # fmt: skip
    columns = {unit.columns(config.groups) for unit in units.values()} | ({config.last} if config.last else set())
    name = "large_chain" if config.large else "chain_linear"
    return Kernel(name, tuple(sorted(columns)), tuple(macros.items()), ("chain",))
