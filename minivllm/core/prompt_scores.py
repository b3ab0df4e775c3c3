"""Log-probabilities of prompt tokens.

The LM head is applied to part of the rows at a time, about as many as can decode: all logits of 8,192 tokens would be
2.5 GB. The log-probabilities are the model's own, whatever the sampling parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from minivllm.core.interfaces import DeviceLogprobs
from minivllm.core.landing import Packed, PendingStep
from minivllm.core.staging import PinnedRing, Staging
from minivllm.kernels.sampling.logprobs import Found, logprobs

if TYPE_CHECKING:
    from minivllm.core.batch import Batch, Scored
    from minivllm.core.model_runner import ModelRunner

_FEWEST_ROWS = 64  # at a time


class PromptScores:
    """For one runner. Has its own staging and ring, as the step's are still in use."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self._staging, self._landing = runner, Staging(runner.device), PinnedRing()
        self._at_once = max(runner.num_slots, _FEWEST_ROWS)
        self._slots = torch.zeros(self._at_once, dtype=torch.int64, device=runner.device)
        self._asked = torch.zeros(1, dtype=torch.int32, device=runner.device)  # one slot, which all rows share

    def launch(self, batch: Batch, scored: Scored, hidden: torch.Tensor) -> PendingStep:
        """Compute them and start copying them to the host. hidden (t, hidden_size): of all tokens of the batch."""
        rows, ids = self._staging.send(scored.places(batch), scored.ids)
        tokens, every, best = ids.long(), np.arange(len(ids)), max(scored.best, 1)
        pairs = zip(rows.split(self._at_once), tokens.split(self._at_once), strict=True)
        parts = zip(*(self._find(hidden.index_select(0, some), own, best) for some, own in pairs), strict=True)
        sampled, rank, top, top_ids = map(torch.cat, parts)
        found = Packed.of(tokens, DeviceLogprobs(every, sampled, rank, top_ids, top))
        return self.runner.land(len(every), every, found, self._landing)

    def _find(self, hidden: torch.Tensor, tokens: torch.Tensor, best: int) -> Found:
        logits = self.runner.model.compute_logits(hidden)
        return logprobs(logits, tokens, min(best, logits.shape[1]), self._slots[: len(tokens)], self._asked)
