"""Which prefixes decode rows have in common, and how they are read once for all of these rows: cascade attention.

Rows whose block tables begin with the same blocks (a system prompt, examples, samples of one prompt) would each read
them. Here the rows are sorted by their tables, so that those with a common prefix are neighbours; what neighbours share
is a tree, and each of its nodes is some blocks that some rows have in common. Nodes are cut into items of about equal
work. A backend attends for all rows of an item at once and leaves a part for each; a row puts its parts together with
what it attends to alone. After Hydragen (Juravsky et al., 2024) and FlashInfer's cascades (Ye et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm.core.batch import Batch

ITEM = 6  # numbers of an item, see ``Cascade``
_LEAST_KEYS = 64  # of a node: fewer are read by those below it
_LEAST_SAVED = 256  # keys that a node saves: (rows - 1) * keys


@dataclass(frozen=True, slots=True)
class CascadeLimits:
    """What a backend takes, and when it pays."""

    rows: int  # of an item, at most
    keys: int  # an item begins at a multiple of these in its node
    busy: int  # items of equal work that keep the device busy
    items: int  # at most
    parts: int  # at most, of all rows
    saved_keys: int  # that need not be read again, from which on a step is faster so


@dataclass(frozen=True, slots=True, eq=False)
class CascadePlan:
    """``Cascade`` on the host: see there."""

    order: np.ndarray
    skips: np.ndarray
    parts: np.ndarray
    items: np.ndarray

    def padded(self, rows: int, items: int) -> np.ndarray:
        """As one array, int32, for ``Cascade.of``: with rows that share nothing, items without rows, up to so many."""
        n, m = len(self.order), len(self.items)
        more, none = np.arange(n, rows, dtype=np.int32), np.zeros(rows - n, dtype=np.int32)
        return np.concatenate(
            [
                self.order, more, self.skips, none, self.parts.reshape(-1), none, none, self.items.reshape(-1),
                np.zeros((items - m) * ITEM, dtype=np.int32),
            ]
        )  # fmt: skip


def plan_cascade(
    tables: np.ndarray, slots: np.ndarray, computed: np.ndarray, block_size: int, limits: CascadeLimits
) -> CascadePlan | None:
    """How decode rows read what they share: of row i, ``tables[slots[i]]`` and ``computed[i]`` tokens in the cache.
    tables (num_slots, max_blocks) int32; slots, computed (n,) int32. None: they share so little that it does not pay.
    """
    whole = computed // block_size
    first = np.where(whole > 0, tables[slots, 0], 0)
    ordered = np.sort(first)
    again = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] > 0)]
    if not len(again):
        return None
    rows = np.nonzero(np.isin(first, again))[0].astype(np.int32)
    order, common = _sorted_by_prefix(tables[slots[rows], : int(whole[rows].max())], whole[rows])
    nodes = _nodes(common, block_size)
    saved = sum((node.rows - 1) * node.blocks for node in nodes) * block_size
    if not nodes or saved < limits.saved_keys:
        return None
    return _cut(nodes, rows[order], len(slots), block_size, limits)


@dataclass(frozen=True, slots=True)
class _Node:
    """Blocks [begin, end) of the sorted rows [first, last)."""

    first: int
    last: int
    begin: int
    end: int

    @property
    def rows(self) -> int:
        return self.last - self.first

    @property
    def blocks(self) -> int:
        return self.end - self.begin


def _sorted_by_prefix(tables: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An order in which rows with equal prefixes are neighbours, and (n - 1,) blocks that neighbours share, of tables
    (n, width) whose first ``whole`` entries count. ``tables`` is written over."""
    n, width = tables.shape
    own = np.arange(width) >= whole[:, None]
    tables[own] = np.broadcast_to(-1 - np.arange(n, dtype=np.int32)[:, None], tables.shape)[own]  # equal to nobody's
    order = np.argsort(tables.view(np.dtype((np.void, width * tables.itemsize))).ravel(), kind="stable")
    ordered = tables[order]
    differ = ordered[1:] != ordered[:-1]
    return order, np.where(differ.any(1), differ.argmax(1), width)


def _nodes(common: np.ndarray, block_size: int) -> list[_Node]:
    """The tree of neighbours' common prefixes, parents first, without nodes that do not pay."""
    found: list[tuple[int, int, int]] = []
    open_: list[tuple[int, int]] = []  # first row, blocks: each deeper than the one before
    for i, depth in enumerate([*common.tolist(), 0]):
        first = i
        while open_ and open_[-1][1] > depth:
            first, blocks = open_.pop()
            found.append((first, i + 1, blocks))
        if depth and (not open_ or open_[-1][1] < depth):
            open_.append((first, depth))
    read = np.zeros(len(common) + 1, dtype=np.int64)  # of each row, by the nodes above
    nodes = []
    for first, last, end in reversed(found):
        node = _Node(first, last, int(read[first]), end)
        keys = node.blocks * block_size
        if keys >= _LEAST_KEYS and (node.rows - 1) * keys >= _LEAST_SAVED:
            nodes.append(node)
            read[first:last] = end
    return nodes


def _up(a: Any, b: Any) -> Any:
    """a / b, rounded up."""
    return -(-a // b)


def _cut(
    nodes: list[_Node], rows: np.ndarray, num_rows: int, block_size: int, limits: CascadeLimits
) -> CascadePlan | None:
    step = max(limits.keys // block_size, 1)
    blocks, members = (np.array([getattr(node, name) for node in nodes]) for name in ("blocks", "rows"))
    tiles = _up(members, limits.rows)
    share = max(int(_up((tiles * blocks).sum(), limits.busy)), step)
    while True:
        even = _up(_up(blocks, _up(blocks, share)), step) * step  # blocks of an item
        pieces = _up(blocks, even)
        if (tiles * pieces).sum() <= limits.items and (members * pieces).sum() <= limits.parts:
            break
        if share >= blocks.max():
            return None  # more nodes than are taken; so many save little each
        share *= 2
    skips, count = np.zeros((2, len(rows)), dtype=np.int32)
    items = []
    for node, size, n in zip(nodes, (even * block_size).tolist(), pieces.tolist(), strict=True):
        begin, end = node.begin * block_size, node.end * block_size
        part, lead = int(count[node.first]), int(rows[node.first])
        for first in range(node.first, node.last, limits.rows):
            some = min(limits.rows, node.last - first)
            for i in range(n):
                key = begin + i * size
                items.append((first, some, lead, key, min(key + size, end), part + i))
        skips[node.first : node.last] = node.end
        count[node.first : node.last] += n
    where = np.zeros(num_rows, dtype=np.int32), np.zeros((num_rows, 2), dtype=np.int32)
    where[0][rows] = skips
    where[1][rows, 0] = np.cumsum(count) - count
    where[1][rows, 1] = count
    others = np.setdiff1d(np.arange(num_rows, dtype=np.int32), rows)
    return CascadePlan(np.concatenate([rows, others]), *where, np.array(items, dtype=np.int32))


class CascadePlanner:
    """``plan_cascade`` for one runner: again only when other sequences decode. What rows share does not change while
    they do: their tables only grow."""

    def __init__(self, host_tables: np.ndarray, block_size: int, limits: CascadeLimits) -> None:
        self._tables, self._block_size, self.limits = host_tables, block_size, limits
        self._slots = self._generations = np.empty(0, dtype=np.int64)
        self._plan: CascadePlan | None = None

    def plan(self, batch: Batch) -> CascadePlan | None:
        """Of the batch's decodes. None: they share little, or nothing."""
        slots, generations = batch.slots[: batch.num_decodes], batch.generations[: batch.num_decodes]
        if not np.array_equal(slots, self._slots) or not np.array_equal(generations, self._generations):
            self._slots, self._generations = slots.copy(), generations.copy()
            computed = batch.num_computed[: batch.num_decodes]
            self._plan = plan_cascade(self._tables, slots, computed, self._block_size, self.limits)
        return self._plan
