"""Runs the draft model of ``core/draft_model.py`` on one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from minivllm.core.batch import NO_INTS, Batch
from minivllm.core.landing import Packed
from minivllm.core.staging import PinnedRing, Staging

if TYPE_CHECKING:
    from minivllm.core.interfaces import StepHandle
    from minivllm.core.model_runner import ModelRunner
    from minivllm.core.parallel import TensorParallel


class Drafter:
    """Has the draft model write drafts. ``runner``: the draft model's, which each rank of ``tp`` has for itself."""

    def __init__(self, runner: ModelRunner, tp: TensorParallel) -> None:
        self.runner, self._tp = runner, tp
        self._staging = Staging(runner.device)
        self._landing = PinnedRing()  # as each token of a draft may land in the runner's own, and nobody waits for it

    def replays(self, rows: int) -> bool:
        """Whether so many decodes are one graph, whose input is on the device already."""
        return self.runner.graphs is not None and rows <= self.runner.graphs.sizes[-1]

    @torch.inference_mode()
    def launch(self, batch: Batch) -> StepHandle:
        """A step with ``num_drafts``: the tokens that it brings, then, for each further token of the drafts, the one
        before."""
        run, ends = self.runner, batch.samples
        step = self._read(batch)
        if not ends.any():
            return step
        decodes = _decodes(batch, ends, (batch.num_computed + batch.num_new)[ends])
        (slots,) = self._staging.send(decodes.slots.astype(np.int64))
        found = torch.empty((batch.num_drafts, len(decodes.slots)), dtype=torch.int64, device=run.device)
        # What the host writes for each step, if it does, has buffers for as many steps as an engine has in flight.
        waits, last = run.attention.plans_on_host or not self.replays(len(decodes.slots)), step
        for i in range(batch.num_drafts):
            if i:
                step = run.launch(replace(decodes, num_computed=decodes.num_computed + (i - 1)))
                if waits:
                    last.result()
                last = step
            torch.index_select(run.last_token, 0, slots, out=found[i])
        # Where each rank has a scheduler (executor=torchrun) all need the same: roundings may differ from GPU to GPU.
        found = self._tp.broadcast(found.view(-1))
        return run.land(len(found), np.arange(len(found)), Packed.of(found, None), self._landing)

    def _read(self, batch: Batch) -> StepHandle:
        """Compute the batch's tokens; the draft's first is sampled after them."""
        run, ends, longest = self.runner, batch.num_computed + batch.num_new, int(batch.num_new.max())
        # After a draft there is one token to read, or two: as decodes, if these are graphs.
        few = 2 if self.replays(len(batch.slots)) else 1
        if longest > few or not batch.samples.all():
            return run.launch(replace(batch, num_drafts=0))
        behind = np.cumsum(batch.num_new)
        for left in reversed(range(longest)):  # in the first turn only rows of two tokens
            rows = batch.num_new > left
            decodes = _decodes(batch, rows, ends[rows] - left - 1)
            if left == longest - 1:
                names = ("block_slots", "block_indices", "block_ids")
                decodes = replace(decodes, **{name: getattr(batch, name) for name in names})
            tokens = batch.token_ids[behind[rows] - left - 1]
            slots, tokens_, computed = self._staging.send(
                *(x.astype(np.int64) for x in (decodes.slots, tokens, decodes.num_computed))
            )
            run.last_token.index_copy_(0, slots, tokens_)
            run.num_computed.index_copy_(0, slots, computed)
            step = run.launch(decodes)
        return step


def _decodes(batch: Batch, rows: np.ndarray, computed: np.ndarray) -> Batch:
    """A step that decodes these rows (n,) bool, of whose sequences so many tokens are ``computed``."""
    n = len(computed)
    return replace(
        batch, slots=batch.slots[rows], generations=batch.generations[rows], num_computed=computed,
        num_new=np.ones(n, dtype=np.int32), samples=np.ones(n, dtype=bool), num_decodes=n, token_ids=NO_INTS,
        block_slots=NO_INTS, block_indices=NO_INTS, block_ids=NO_INTS, num_drafts=0,
    )  # fmt: skip
