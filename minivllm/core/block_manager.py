"""The pool of cache blocks: which slots hold which blocks, and which blocks can be shared or reused.

# ref (num_blocks + 1,) int32: how many tables list a block      tables (num_slots, max_blocks) int32: a slot's blocks
# free: blocks without content (a stack)                         held (num_slots,) int32: how many of them are valid
# evictable: blocks with content that no slot holds, least recently used first
# cached: content hash → block. Every block is in exactly one of: free, evictable, referenced.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from minivllm.core.batch import NO_INTS
from minivllm.core.interfaces import BlockManager
from minivllm.rounding import cdiv

if TYPE_CHECKING:
    from minivllm.core.sequence import Sequence


class PagedBlockManager(BlockManager):
    """Reference-counted blocks with prefix reuse.

    A full block is identified by a 128-bit hash of its tokens and its parent's hash (at the root, of
    ``Sequence.cache_root``), so equal hashes mean equal prefixes. The hash has a secret random seed: whoever could
    construct two prompts with the same hash could read another request's keys and values. Unreferenced blocks are kept
    until they are needed and evicted least recently used first; within a sequence, last blocks first.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_slots: int, max_blocks_per_slot: int, *, prefix_caching: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.tables = np.zeros((num_slots, max_blocks_per_slot), dtype=np.int32)
        self._columns = np.arange(max_blocks_per_slot, dtype=np.int32)
        self.held = np.zeros(num_slots, dtype=np.int32)
        self._ref = np.zeros(num_blocks + 1, dtype=np.int32)
        self._free = list(range(num_blocks, 0, -1))  # popped from the end: low ids first
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._digest = partial(xxhash.xxh3_128_digest, seed=secrets.randbits(64))
        self._cached: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._offered = [0] * num_slots  # how many of each slot's leading blocks are shared or registered for sharing
        self._appended: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # in the format of ``take_updates``
        self._allocated: list[tuple[int, int]] = []  # slots, and how many blocks ``allocate`` gave them

    # ------------------------------------------------------------------ asking

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._evictable)

    def blocks_for(self, num_tokens: int) -> int:
        return cdiv(num_tokens, self.block_size)

    def match(self, seq: Sequence) -> list[int]:
        if not self.prefix_caching or seq.scores_prompt:
            return []
        whole = (len(seq.known) - 1) // self.block_size  # the last token is always computed: its logits are needed
        found: list[int] = []
        hashes = seq.block_hashes
        for i in range(whole):
            if i == len(hashes):  # hash a few at a time: most prompts share few blocks or none
                self._hash(seq, seq.known, min(2 * i + 1, whole))
            block = self._cached.get(hashes[i])
            if block is None:
                break
            found.append(block)
        return found

    def missing(self, num_tokens: int, cached: SequenceOf[int]) -> int:
        revived = sum(1 for block in cached if self._ref[block] == 0)
        return self.blocks_for(num_tokens) - len(cached) + revived - self.num_free

    # ------------------------------------------------------------------ giving and taking

    def allocate(self, slot: int, num_tokens: int, cached: SequenceOf[int]) -> None:
        assert self.held[slot] == 0, f"slot {slot} already holds {self.held[slot]} blocks"
        for block in cached:
            if self._ref[block] == 0:
                del self._evictable[block]
            self._ref[block] += 1
        fresh = self._take(self.blocks_for(num_tokens) - len(cached))
        blocks = [*cached, *fresh]
        n = len(blocks)
        self.tables[slot, :n] = blocks
        self.held[slot] = n
        self._offered[slot] = len(cached)
        self._allocated.append((slot, n))

    def append(self, slots: np.ndarray) -> None:
        blocks = np.array(self._take(len(slots)), dtype=np.int32)
        index = self.held[slots]
        self.tables[slots, index] = blocks
        self.held[slots] += 1
        self._appended.append((slots.astype(np.int32), index, blocks))

    def free(self, slot: int) -> None:
        blocks = self.tables[slot, : self.held[slot]][::-1]  # the tail is evicted before the head
        left = self._ref[blocks] - 1
        self._ref[blocks] = left
        for block in blocks[left == 0].tolist():
            if self._hash_of[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None
        self.held[slot] = 0

    def register(self, slot: int, seq: Sequence, tokens: np.ndarray, num_tokens: int) -> None:
        if not self.prefix_caching:
            return
        first, whole = self._offered[slot], num_tokens // self.block_size
        if whole <= first:
            return
        self._hash(seq, tokens, whole)
        cached, hashes = self._cached, seq.block_hashes
        for i in range(first, whole):
            if (digest := hashes[i]) not in cached:  # else an equal block is cached already: this one stays private
                cached[digest] = block = self.tables.item(slot, i)
                self._hash_of[block] = digest
        self._offered[slot] = whole

    def take_updates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        new, self._appended = self._appended, []
        if self._allocated:
            slots, counts = zip(*self._allocated, strict=True)
            self._allocated = []
            rows = np.repeat(np.array(slots, dtype=np.int32), counts)
            columns = np.concatenate([self._columns[:n] for n in counts])
            new.append((rows, columns, self.tables[rows, columns]))
        if not new:
            return NO_INTS, NO_INTS, NO_INTS
        if len(new) == 1:
            return new[0]
        all_slots, indices, blocks = zip(*new, strict=True)
        return np.concatenate(all_slots), np.concatenate(indices), np.concatenate(blocks)

    def reset_prefix_cache(self) -> None:
        self._cached.clear()
        self._hash_of = [None] * (self.num_blocks + 1)
        self._free.extend(self._evictable)
        self._evictable.clear()

    def _take(self, n: int) -> list[int]:
        if n > self.num_free:
            raise RuntimeError(f"{n} cache blocks asked for, {self.num_free} free")
        plain = min(n, len(self._free))
        blocks = self._free[len(self._free) - plain :][::-1]
        del self._free[len(self._free) - plain :]
        for _ in range(n - plain):
            block, _none = self._evictable.popitem(last=False)
            digest = self._hash_of[block]
            assert digest is not None
            del self._cached[digest]
            self._hash_of[block] = None
            blocks.append(block)
        self._ref[blocks] = 1
        return blocks

    def _hash(self, seq: Sequence, tokens: np.ndarray, count: int) -> None:
        """Compute the chained hashes of at least the first ``count`` blocks; each only once per sequence."""
        hashes, size = seq.block_hashes, self.block_size
        if len(hashes) >= count:
            return
        digest = hashes[-1] if hashes else self._digest(seq.cache_root)
        data = tokens[len(hashes) * size : count * size].tobytes()  # bytes are faster to slice than an array
        step = size * tokens.itemsize
        for at in range(0, len(data), step):
            digest = self._digest(digest + data[at : at + step])
            hashes.append(digest)

    # ------------------------------------------------------------------ proving

    def check(self) -> None:
        counts = np.zeros(self.num_blocks + 1, dtype=np.int32)
        for slot, n in enumerate(self.held.tolist()):
            row = self.tables[slot, :n]
            assert len(set(row.tolist())) == n, f"slot {slot} names a block twice: {row}"
            counts[row] += 1
        assert counts[0] == 0, "block 0 was handed out"
        assert (counts == self._ref).all(), "references differ from what the tables name"
        free, evictable = set(self._free), set(self._evictable)
        held = set(np.nonzero(self._ref)[0].tolist())
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & evictable or free & held or evictable & held), "a block is in two places"
        assert len(free) + len(evictable) + len(held) == self.num_blocks, "a block is lost"
        assert all(self._hash_of[b] is None for b in free), "a free block keeps a hash"
        assert all(self._hash_of[b] is not None for b in evictable), "an evictable block has no hash"
        known = {h: b for b, h in enumerate(self._hash_of) if h is not None}
        assert known == self._cached, "the hash table and the blocks disagree"
