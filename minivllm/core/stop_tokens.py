"""Which tokens end which running sequences, compared for a whole step at a time.

Slot arrays, one row per running sequence, owned by the scheduler's ``StopTokens`` (S = max_num_seqs):
# ids (S, k) int32: its first stop ids, padded with -1   min_len (S,) int32: the length before which none ends it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from minivllm.core.sequence import Sequence

_FEW = 16  # stop ids of a sequence that are compared in one vectorized operation


class StopTokens:
    """The stop tokens of running sequences, by slot."""

    def __init__(self, size: int) -> None:
        self.ids = np.full((size, 1), -1, dtype=np.int32)
        self.min_len = np.zeros(size, dtype=np.int32)
        self._more: dict[int, frozenset[int]] = {}  # by slot: those past ``_FEW``

    def start(self, slot: int, seq: Sequence) -> None:
        self.min_len[slot] = seq.prompt_len + seq.params.min_tokens
        few, more = seq.stop_ids[:_FEW], seq.stop_ids[_FEW:]
        if more:
            self._more[slot] = frozenset(more)
        if len(few) > self.ids.shape[1]:
            wider = np.full((len(self.ids), len(few)), -1, dtype=np.int32)
            wider[:, : self.ids.shape[1]] = self.ids
            self.ids = wider
        self.ids[slot] = -1
        self.ids[slot, : len(few)] = few

    def stop(self, slot: int) -> None:
        self._more.pop(slot, None)

    def find(self, slots: np.ndarray, tokens: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Which of these rows' tokens end their sequences. ``at``: their places there; all (n,)."""
        found = (tokens[:, None] == self.ids[slots]).nonzero()[0]
        if self._more:
            pairs = zip(slots.tolist(), tokens.tolist(), strict=True)
            others = [row for row, (slot, token) in enumerate(pairs) if token in self._more.get(slot, ())]
            found = np.append(found, np.array(others, dtype=np.int64))
        return found[at[found] >= self.min_len[slots[found]]] if len(found) else found
