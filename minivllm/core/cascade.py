"""Cascade attention: finds prefixes that decode rows share, so that they are read once for all of these rows.

Without it, rows whose block tables start with the same blocks (a system prompt, examples, samples of one prompt) each
read them. Here rows are sorted by block table, so that rows with a common prefix are adjacent. The shared prefixes form
a tree; each node is a range of blocks shared by a range of rows. Nodes are cut into items of about equal work. A
backend computes an item for all its rows at once and writes one partial result per row; each row then merges its
partial results with its own keys'. After Hydragen (Juravsky et al., 2024) and FlashInfer's cascades (Ye et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minivllm.core.batch import Batch
from minivllm.rounding import cdiv

ITEM = 6  # numbers of an item, see ``Cascade``
_MANY_ALONE = 4  # from this ratio of unshared to shared keys on, both are read concurrently (``Cascade.beside``)


@dataclass(frozen=True, slots=True)
class CascadeLimits:
    """A backend's limits, and from when on cascade attention pays off."""

    rows: int  # most rows in an item
    keys: int  # items begin at multiples of this many keys in their node
    beside: int  # number of items to cut shared keys into if rows read their own keys concurrently
    alone: int  # number of items if they have the device to themselves
    items: int  # most items in a step
    parts: int  # most partial results in a step, over all rows
    saved_keys: int  # fewest key reads that a step must save
    node_keys: int = 64  # fewest keys in a node; a smaller node is merged into those below it
    node_saved: int = 256  # fewest key reads that a node must save: (rows - 1) * its keys


@dataclass(frozen=True, slots=True, eq=False)
class CascadePlan:
    """``Cascade`` on the host; see there."""

    order: np.ndarray
    skips: np.ndarray
    parts: np.ndarray
    items: np.ndarray
    beside: bool

    def padded(self, rows: int, items: int) -> np.ndarray:
        """One int32 array for ``Cascade.of``, padded to this many rows and items (sharing nothing, without rows)."""
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
    """Plan how decode rows read what they share. Row i has block table ``tables[slots[i]]`` and ``computed[i]`` tokens
    in the cache. tables (num_slots, max_blocks) int32; slots, computed (n,) int32. None: they share too little.
    """
    whole = computed // block_size
    first = np.where(whole > 0, tables[slots, 0], 0)
    order = np.argsort(first, kind="stable")
    alike = np.diff(first[order], prepend=-1, append=-1) == 0
    rows = order[(alike[1:] | alike[:-1]) & (first[order] > 0)].astype(np.int32)
    if not len(rows):
        return None
    order, common = _sorted_by_prefix(tables[slots[rows], : int(whole[rows].max())], whole[rows])
    tree = _tree(common, block_size, limits)
    saved = ((tree.last - tree.first - 1) * (tree.end - tree.begin)).sum() * block_size
    if not len(tree.first) or saved < limits.saved_keys:
        return None
    keys = (tree.end - tree.begin).sum() * block_size
    beside = bool(_MANY_ALONE * keys <= computed.sum() - saved - keys)
    return _cut(tree, rows[order], len(slots), block_size, limits, beside)


def _sorted_by_prefix(tables: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An order in which rows with equal prefixes are adjacent, and the number of blocks that adjacent rows share,
    (n - 1,). tables (n, width), of which the first ``whole`` entries of each row count."""
    width = tables.shape[1]
    order = np.argsort(tables.view(np.dtype((np.void, width * tables.itemsize))).ravel(), kind="stable")
    ordered, whole = tables[order], whole[order]
    differ = ordered[1:] != ordered[:-1]
    common = np.where(differ.any(1), differ.argmax(1), width)
    return order, np.minimum(common, np.minimum(whole[1:], whole[:-1]))


@dataclass(frozen=True, slots=True)
class _Tree:
    """Nodes, parents first: blocks [begin, end) of the sorted rows [first, last); (k,) each."""

    first: np.ndarray
    last: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    above: np.ndarray  # (k,): each node's parent; -1: none
    deepest: np.ndarray  # (rows,): the deepest node of each row; -1: none


def _tree(common: np.ndarray, block_size: int, limits: CascadeLimits) -> _Tree:
    """Build the tree from the block counts that adjacent rows share, without nodes that do not pay off."""
    found: list[tuple[int, int, int]] = []
    open_: list[tuple[int, int]] = []  # first row, blocks: each deeper than the one before
    for i, depth in enumerate([*common.tolist(), 0]):
        first = i
        while open_ and open_[-1][1] > depth:
            first, blocks = open_.pop()
            found.append((first, i + 1, blocks))
        if depth and (not open_ or open_[-1][1] < depth):
            open_.append((first, depth))
    nodes: list[tuple[int, int, int, int, int]] = []
    deepest = np.full(len(common) + 1, -1)
    for first, last, end in reversed(found):
        above = int(deepest[first])
        begin = nodes[above][3] if above >= 0 else 0
        keys = (end - begin) * block_size
        if keys >= limits.node_keys and (last - first - 1) * keys >= limits.node_saved:
            deepest[first:last] = len(nodes)
            nodes.append((first, last, begin, end, above))
    first_, last_, begin_, end_, above_ = np.array(nodes, dtype=np.int64).reshape(-1, 5).T
    return _Tree(first_, last_, begin_, end_, above_, deepest)


def _cut(
    tree: _Tree, rows: np.ndarray, num_rows: int, block_size: int, limits: CascadeLimits, beside: bool
) -> CascadePlan | None:
    step, blocks, members = max(limits.keys // block_size, 1), tree.end - tree.begin, tree.last - tree.first
    tiles = cdiv(members, limits.rows)
    share = max(int(cdiv((tiles * blocks).sum(), limits.beside if beside else limits.alone)), step)
    while True:
        even = cdiv(cdiv(blocks, cdiv(blocks, share)), step) * step  # blocks of an item
        pieces = cdiv(blocks, even)
        if (tiles * pieces).sum() <= limits.items and (members * pieces).sum() <= limits.parts:
            break
        if share >= blocks.max():
            return None  # too many nodes; each would save little
        share *= 2
    before = np.zeros_like(pieces)  # a row's partial results from the nodes above
    for i, above in enumerate(tree.above.tolist()):
        if above >= 0:
            before[i] = before[above] + pieces[above]

    node = np.repeat(np.arange(len(pieces)), tiles * pieces)
    index = np.arange(len(node)) - np.repeat(np.cumsum(tiles * pieces) - tiles * pieces, tiles * pieces)
    tile, piece = index // pieces[node], index % pieces[node]
    first, begin = tree.first[node] + tile * limits.rows, tree.begin[node] + piece * even[node]
    count, end = np.minimum(limits.rows, tree.last[node] - first), np.minimum(begin + even[node], tree.end[node])
    items = np.stack(
        [first, count, rows[first], begin * block_size, end * block_size, before[node] + piece], axis=1
    ).astype(np.int32)

    has = tree.deepest >= 0
    skips, parts = np.zeros(num_rows, dtype=np.int32), np.zeros((num_rows, 2), dtype=np.int32)
    skips[rows] = np.where(has, tree.end[tree.deepest], 0)
    its_parts = np.where(has, (before + pieces)[tree.deepest], 0)
    parts[rows, 0], parts[rows, 1] = np.cumsum(its_parts) - its_parts, its_parts
    others = np.ones(num_rows, dtype=bool)
    others[rows] = False
    return CascadePlan(np.concatenate([rows, np.nonzero(others)[0].astype(np.int32)]), skips, parts, items, beside)


class CascadePlanner:
    """``plan_cascade`` for one runner; plans again only when different sequences decode. What the same rows share does
    not change: their tables only grow."""

    def __init__(self, host_tables: np.ndarray, block_size: int, limits: CascadeLimits) -> None:
        self._tables, self._block_size, self.limits = host_tables, block_size, limits
        self._planned = b"", b""
        self._plan: CascadePlan | None = None

    def plan(self, batch: Batch) -> CascadePlan | None:
        """The plan of the batch's decodes; None if they share too little."""
        if batch.num_decodes < 2:
            return None
        slots, generations = batch.slots[: batch.num_decodes], batch.generations[: batch.num_decodes]
        decodes = slots.tobytes(), generations.tobytes()
        if decodes != self._planned:
            self._planned = decodes
            computed = batch.num_computed[: batch.num_decodes]
            self._plan = plan_cascade(self._tables, slots, computed, self._block_size, self.limits)
        return self._plan
