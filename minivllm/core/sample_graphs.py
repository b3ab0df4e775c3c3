"""Sampling of a few rows as one CUDA graph, after layers that were launched in any way: the end of a step with a few
prompts.

Launched eagerly, the LM head, sampling and copying to the host would keep the host busy for as long as a small model's
layers keep the GPU; the next step would be launched late, and these tokens read late.

Static buffers, shared by all sizes (which use their first rows); N is the most rows:
# rows (3, N) int64: slots, positions sampled for, positions computed last   hidden (N, hidden_size)
Rows past the batch hold the padding slot.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from minivllm.core.batch import Batch
from minivllm.core.cuda_graphs import capture_graph
from minivllm.errors import MinivllmError

if TYPE_CHECKING:
    from minivllm.core.cuda_graphs import DecodeGraphs
    from minivllm.core.interfaces import StepHandle
    from minivllm.core.model_runner import ModelRunner

FEW_ROWS = 8  # with more rows of prompts the layers take longer than the host
DRAFTED_ROWS = 64  # with drafts the host cannot run ahead


class SampleGraphs:
    """For the sizes of the decode graphs up to a number of rows."""

    def __init__(self, runner: ModelRunner, decodes: DecodeGraphs, most: int = FEW_ROWS) -> None:
        """``most``: rows. ``decodes`` must be captured: that has loaded what sampling this many rows needs."""
        self.runner, self._decodes, self.landing = runner, decodes, decodes.landing
        self.sizes = [size for size in decodes.sizes if size <= most]
        top = self.sizes[-1]
        self.rows = torch.full((3, top), decodes.padding, dtype=torch.int64, device=runner.device)
        self.hidden = torch.zeros_like(decodes.hidden(top))
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._tokens: dict[int, torch.Tensor] = {}

    def size_for(self, batch: Batch) -> int | None:
        """The size of the graph for this step, whose new sequences the sampler must already have. None: there are too
        many rows, none samples, or one needs more than a token (``ModelRunner.needs_refine``)."""
        size = next((size for size in self.sizes if size >= len(batch.slots)), None)
        if size is None or not batch.samples.any() or self.runner.needs_refine(batch.slots, size):
            return None
        return size

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, and verify it.

        Raises:
            MinivllmError: a replay samples other tokens than sampling without the graph.
        """
        self.hidden.normal_()
        same = []
        for size in reversed(self.sizes):
            expected = self._sample(size)
            self._graphs[size], self._tokens[size] = capture_graph(partial(self._run, size), self._decodes.pool)
            self.landing.replay(self._graphs[size])
            same.append((expected == self._tokens[size]).all())
        if not bool(torch.stack(same).all()):
            raise MinivllmError(
                "the CUDA graph that samples finds other tokens than sampling without; run with enforce_eager=true and "
                "report it"
            )

    def launch(self, size: int, hidden: torch.Tensor, ends: torch.Tensor, batch: Batch) -> StepHandle:
        """``hidden``: of each row's last token (n or more, hidden_size). ``ends``: from ``prompt_inputs``, (4, n or
        more), with the padding slot after the batch's."""
        n, rows = len(batch.slots), min(size, ends.shape[1])  # up to ``FEW_ROWS`` those beyond always hold padding
        self.hidden[:n] = hidden[:n]
        self.rows[:, :rows] = ends[:3, :rows]
        if rows < size and size > FEW_ROWS:
            self.rows[:, rows:size] = self._decodes.padding
        self.landing.replay(self._graphs[size])
        return self.landing.step(n, self.runner.done(), None if batch.samples.all() else batch.samples)

    def _sample(self, size: int) -> torch.Tensor:
        slots, after, _ = self.rows[:, :size]
        return self.runner.sample(self.hidden[:size], slots, after)[0]

    def _run(self, size: int) -> torch.Tensor:
        """What is captured."""
        run, tokens, (slots, _, ends) = self.runner, self._sample(size), self.rows[:, :size]
        self.landing.finish(tokens, slots, ends, run.last_token, run.num_computed, self._decodes.padding)
        return tokens
