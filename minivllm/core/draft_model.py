"""Drafts of a smaller model (Leviathan et al., 2022, https://arxiv.org/abs/2211.17192).

The draft model reads what a sequence has and writes the tokens that it would go on with; the model verifies them, as it
does the drafts of ``core/speculation.py``. It has a cache of its own, in the same blocks, and samples with the
sequence's own parameters and random numbers: where both models find the same tokens likely they also draw the same
ones, at any temperature.

``DraftModelSpeculation`` decides who gets drafts, on the scheduler's side; ``core/drafter.py`` runs the draft model, on
each rank. Between them goes a ``Batch`` with ``num_drafts``: the tokens that it has not seen yet, as prompt rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.batch import NO_INTS
from minivllm.core.speculation import DECODES, DRAFTS, MOST_RUNNING, PAUSE, WAITS, Speculation
from minivllm.rounding import cdiv

if TYPE_CHECKING:
    from minivllm.config.engine_config import SchedulerOptions
    from minivllm.core.batch import Batch
    from minivllm.core.interfaces import BlockManager
    from minivllm.core.sequence import Sequence

ASKS = 3  # ``Speculation.state``: for a draft, which ``ask`` asks for with the next step; then it WAITS for it


class DraftModelSpeculation(Speculation):
    """Asks the draft model where ``Speculation`` looks tokens up. For guided sequences it looks them up, too, as the
    draft model does not see their masks."""

    def __init__(self, options: SchedulerOptions, blocks: BlockManager) -> None:
        super().__init__(options)
        # What is drafted needs rows to be verified in.
        rows = min(options.max_num_seqs, options.max_num_batched_tokens)
        self._most_running = min(MOST_RUNNING, rows // (1 + self.most))
        self.drafts_now = False  # a step of the draft model is in flight; there is one at a time
        self._blocks = blocks
        self._looks_up = np.zeros(options.max_num_seqs, dtype=bool)
        self._whole: dict[int, bytes] = {}  # blocks that it has seen all of: the hash of what is in them
        self._seen = np.zeros(options.max_num_seqs, dtype=np.int32)  # tokens that the draft model has in its cache
        self._ends = np.zeros(options.max_num_seqs, dtype=np.int32)  # with so many tokens there is no room for a draft

    def start(self, slot: int, seq: Sequence, computed: int) -> None:
        super().start(slot, seq, computed)
        self._looks_up[slot] = seq.guide is not None
        size, seen = self._blocks.block_size, 0
        shared = self._blocks.tables[slot, : computed // size].tolist()
        while seen < len(shared) and self._whole.get(shared[seen]) == seq.block_hashes[seen]:
            seen += 1
        self._seen[slot], self._ends[slot] = seen * size, seq.max_len - self.most

    def worth(self, slot: int, num_running: int) -> float:
        """With Qwen3-0.6B as the draft model, each of whose tokens takes a step."""
        if self._looks_up[slot]:
            return super().worth(slot, num_running)
        return 0.2 + self.most * (0.1 + num_running / 100)

    def look(
        self, slots: np.ndarray, num_running: int, tokens: np.ndarray, committed: np.ndarray, computed: np.ndarray
    ) -> None:
        looks_up = self._looks_up[slots]
        super().look(slots[looks_up], num_running, tokens, committed, computed)
        slots = slots[self._may[slots] & ~looks_up]
        lengths = committed[slots]
        self._seen[slots] = np.minimum(self._seen[slots], lengths - 1)  # it has drafts there that were rejected
        asks = (lengths >= self._from[slots]) & (lengths < self._ends[slots]) & (num_running <= self._most_running)
        changes = asks | (self.state[slots] != DECODES)
        for slot, its in dict(zip(slots[changes].tolist(), asks[changes].tolist(), strict=True)).items():
            if computed[slot] < committed[slot]:
                self._go_on(slot, its)
            elif its:  # a step is in flight
                self.state[slot] = WAITS

    def _go_on(self, slot: int, asks: bool) -> None:
        if asks:
            self.state[slot] = ASKS
        elif slot in self._behind:
            self.state[slot], self.drafts[slot] = DRAFTS, NO_INTS
        else:
            self._decode(slot)

    def ask(
        self, most: int, tokens: np.ndarray, committed: np.ndarray, sequences: list[Sequence | None]
    ) -> list[tuple[int, int, np.ndarray, bool]]:
        """The rows of a step of the draft model, of ``most`` tokens at most, each a slot, how many tokens it has seen,
        those that it has not, and whether these are all that there are, so that a draft follows. The last
        three arguments are the scheduler's."""
        rows, blocks = [], self._blocks
        for slot in (self.state == ASKS).nonzero()[0].tolist():
            n, seen = int(committed[slot]), int(self._seen[slot])
            lacks = cdiv(n + self.most, blocks.block_size) - int(blocks.held[slot])
            if lacks > blocks.num_free:
                self._from[slot] = n + PAUSE
                self._go_on(slot, False)
            elif most > 0:
                for _ in range(lacks):
                    blocks.append(np.array([slot]))
                count = min(n - seen, most)
                most -= count
                self.state[slot], self._seen[slot] = WAITS, seen + count
                if ends := seen + count == n:
                    # It will have read its draft, but for the last token; ``look`` takes back what is not accepted.
                    self._seen[slot] += self.most - 1
                self._note(slot, seen, seen + count, sequences[slot])
                rows.append((slot, seen, tokens[slot, seen : seen + count], ends))
        self.drafts_now = bool(rows)
        return rows

    def _note(self, slot: int, start: int, stop: int, seq: Sequence | None) -> None:
        """It computes these tokens of a slot, and a draft behind them."""
        assert seq is not None
        size, hashes = self._blocks.block_size, seq.block_hashes
        first = max(start - self.most, 0) // size  # drafts that were accepted may have filled a block
        for i, block in enumerate(self._blocks.tables[slot, first : cdiv(stop + self.most, size)].tolist(), first):
            if i < min(stop // size, len(hashes)):
                self._whole[block] = hashes[i]
            else:
                self._whole.pop(block, None)

    def take(self, batch: Batch, token_ids: np.ndarray, there: np.ndarray) -> None:
        """The drafts that a step brought: token_ids (num_drafts * rows that sample,), the first token of each, then the
        second. ``there`` (n,) bool: whether a row's sequence still is."""
        self.drafts_now = False
        drafts = iter(token_ids.reshape(batch.num_drafts, -1).T if batch.samples.any() else ())
        for slot, samples, its in zip(batch.slots.tolist(), batch.samples.tolist(), there.tolist(), strict=True):
            draft = next(drafts) if samples else None
            if not its:
                continue
            if draft is None:
                self.state[slot] = ASKS
            else:
                self.state[slot], self.drafts[slot] = DRAFTS, draft.astype(np.int32)
