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
from minivllm.kernels._triton import next_power_of_2
from minivllm.kernels.logprobs import logprobs

if TYPE_CHECKING:
    from minivllm.core.batch import Batch
    from minivllm.core.model_runner import ModelRunner

_FEWEST_ROWS = 64  # at once


class PromptScores:
    """Of one runner. What crosses goes ways of its own: what the step was told is still to be read."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self._staging, self._landing = runner, Staging(runner.device), PinnedRing()
        self._at_once = max(runner.num_slots, _FEWEST_ROWS)
        self._slots = torch.zeros(self._at_once, dtype=torch.int64, device=runner.device)
        self._asked = torch.zeros(1, dtype=torch.int32, device=runner.device)  # of the one slot that they all have

    def launch(self, batch: Batch, hidden: torch.Tensor) -> PendingStep:
        """Of ``batch.scored_ids``, on their way to the host. hidden (t, hidden_size): of every token of the batch."""
        rows, ids = self._staging.send(places(batch), batch.scored_ids)
        tokens, n = ids.long(), len(ids)
        best = next_power_of_2(max(int(batch.scored_best.max()), 1))  # few numbers come
        parts = []
        for some, own in zip(rows.split(self._at_once), tokens.split(self._at_once), strict=True):
            logits = self.runner.model.compute_logits(hidden.index_select(0, some))
            found = logprobs(logits, own, min(best, logits.shape[1]), self._slots[: len(some)], self._asked)
            parts.append(found)
        sampled, rank, top, top_ids = (torch.cat(values) for values in zip(*parts, strict=True))
        every = np.arange(n)
        packed = Packed.of(tokens, DeviceLogprobs(every, sampled, rank, top_ids, top))
        return self.runner.land(n, every, packed, self._landing)


def places(batch: Batch) -> np.ndarray:
    """(len(scored_ids),) int64: the token of the batch from which each comes, the one before it."""
    new, lens = batch.num_new[batch.num_decodes :].astype(np.int64), batch.scored_lens
    starts = batch.num_decodes + np.cumsum(new) - new
    before = np.cumsum(lens) - lens  # scored tokens of the rows before
    return np.repeat(starts[batch.scored_rows] - before, lens) + np.arange(len(batch.scored_ids))
