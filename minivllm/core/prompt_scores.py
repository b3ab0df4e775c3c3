"""Log-probabilities of prompts: what the model gives to tokens that are there already.

The layers' output is multiplied with the LM head a part at a time, as many rows as decode at most: of 8,192 tokens all
logits would be 2.5 GB. These are the model's own, whatever a request samples with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from minivllm.core.interfaces import DeviceLogprobs
from minivllm.core.landing import Packed, PendingStep
from minivllm.core.staging import PinnedRing, Staging
from minivllm.kernels.logprobs import Found, logprobs

if TYPE_CHECKING:
    from minivllm.core.batch import Batch, Scored
    from minivllm.core.model_runner import ModelRunner

_FEWEST_ROWS = 64  # at once


class PromptScores:
    """Of one runner, with a staging and a ring of its own: what the step itself was told is still to be read."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self._staging, self._landing = runner, Staging(runner.device), PinnedRing()
        self._at_once = max(runner.num_slots, _FEWEST_ROWS)
        self._slots = torch.zeros(self._at_once, dtype=torch.int64, device=runner.device)
        self._asked = torch.zeros(1, dtype=torch.int32, device=runner.device)  # of the one slot that they all have

    def launch(self, batch: Batch, scored: Scored, hidden: torch.Tensor) -> PendingStep:
        """On their way to the host. hidden (t, hidden_size): of every token of the batch."""
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
