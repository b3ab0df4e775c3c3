"""Brings a step's results to the host. Each kind is a ``StepHandle``:

- ``PendingStep``, from ``ModelRunner.land``: copied in one piece (``Packed``); for eager steps, and steps with more
  results than tokens.
- ``ReplayedStep``, from ``Landing.step``: only tokens, which the CUDA graph (decode, sampling or mixed) itself writes
  to pinned host memory.
- Wrappers of these: ``StepApart``, launched as two (``ModelRunner.launch``); ``GuidedStep``, which has yet to sample
  (``sample_when_guided``); ``ScoredStep``, with log-probabilities of prompts (``_launch_eager``).

What graphs write (``Landing``):
# ring (IN_FLIGHT, 1 + width) int64: a step's number, then its tokens   steps (1,) int64, on the device

The device counts steps in ``steps`` and writes i and the tokens of step i to row i % IN_FLIGHT. The host, which counts
the replays, uses the number to check that it reads the right step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from minivllm.core.batch import NO_INTS
from minivllm.core.interfaces import Logprobs, StepResult
from minivllm.errors import MinivllmError
from minivllm.kernels.decode_inputs import finish_decode

if TYPE_CHECKING:
    from minivllm.core.interfaces import DeviceLogprobs, StepHandle

IN_FLIGHT = 4  # host buffers; the engine keeps two steps in flight, so each is free long before it is reused


class Layout(NamedTuple):
    """Of a step's words, int32: tokens (n,) int64 and, if log-probabilities are requested, for l rows: sampled (l,)
    float32, rank (l,) int32, top (l, k) float32, top_ids (l, k) int32."""

    tokens: int  # n; the last ones may be padding
    rows: np.ndarray  # (l,): which of the n
    best: int  # k


class Packed(NamedTuple):
    """A step's results in one piece on the device."""

    words: torch.Tensor
    layout: Layout

    @classmethod
    def of(cls, tokens: torch.Tensor, logprobs: DeviceLogprobs | None) -> Packed:
        token_words = tokens.contiguous().view(torch.int32)
        if logprobs is None:
            return cls(token_words, Layout(len(tokens), NO_INTS, 0))
        floats, whole = (logprobs.sampled, logprobs.top), (logprobs.rank, logprobs.top_ids)
        sampled, top = (x.float().view(torch.int32).reshape(-1) for x in floats)
        rank, top_ids = (x.int().reshape(-1) for x in whole)
        words = torch.cat([token_words, sampled, rank, top, top_ids])
        return cls(words, Layout(len(tokens), logprobs.rows, logprobs.top.shape[1]))


@dataclass(slots=True)
class PendingStep:
    """A step in flight whose results are being copied to the host."""

    num_rows: int
    rows: np.ndarray  # (m,) the rows that sampled, in the order of the first tokens
    words: np.ndarray  # memory that the device writes
    layout: Layout
    done: torch.cuda.Event | None  # completes when they are on the host; None: they are

    def result(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        token_ids = np.full(self.num_rows, -1, dtype=np.int32)
        n = 2 * self.layout.tokens
        token_ids[self.rows] = self.words[:n].view(np.int64)[: len(self.rows)]
        return StepResult(token_ids, self._logprobs(self.words[n:]) if self.layout.best else None)

    def _logprobs(self, words: np.ndarray) -> Logprobs | None:
        rows, k = self.layout.rows, self.layout.best
        n = len(rows)
        sampled, top = (words[at].view(np.float32) for at in (slice(n), slice(2 * n, (2 + k) * n)))
        rank, top_ids = words[n : 2 * n], words[(2 + k) * n :]
        asked = np.nonzero((rank > 0) & (rows < len(self.rows)))[0]
        if not len(asked):
            return None
        return Logprobs(
            self.rows[rows[asked]], sampled[asked], rank[asked], top_ids.reshape(n, k)[asked],
            top.reshape(n, k)[asked],
        )  # fmt: skip


@dataclass(slots=True)
class ReplayedStep:
    """A step in flight whose graph writes its tokens to the host."""

    number: int
    written: np.ndarray  # (1,) int64, written by the device: the number of the step that the tokens are from
    tokens: np.ndarray  # (n,) int64, written by the device
    samples: np.ndarray | None  # (n,) bool: which of them count; None: all
    done: torch.cuda.Event | None

    def result(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        if self.written[0] != self.number:
            raise MinivllmError(
                f"the tokens of replay {self.number} are not on the host, those of replay {self.written[0]} are; "
                "run with enforce_eager=true and report it"
            )
        tokens = self.tokens.astype(np.int32)
        return StepResult(tokens if self.samples is None else np.where(self.samples, tokens, np.int32(-1)))


class Landing:
    """Shared by all graphs of a runner that write tokens to the host; ``width``: the most tokens that one writes."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.steps = torch.zeros(1, dtype=torch.int64, device=device)
        self.ring = torch.zeros((IN_FLIGHT, 1 + width), dtype=torch.int64, pin_memory=device.type == "cuda")
        self.rows = self.ring.numpy()
        self.replays = 0  # the value of ``steps`` when all launched work is done

    def finish(
        self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, last_token: torch.Tensor,
        num_computed: torch.Tensor, padding: int,
    ) -> None:  # fmt: skip
        """The last kernel of a captured step, see ``finish_decode``."""
        finish_decode(tokens, slots, positions, last_token, num_computed, self.steps, self.ring, padding)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay a graph that ends with ``finish``, and count it."""
        graph.replay()
        self.replays += 1

    def forget(self) -> None:
        """Restart the count."""
        self.steps.zero_()
        self.replays = 0

    def last(self) -> np.ndarray:
        """The row of the last replay."""
        row: np.ndarray = self.rows[self.replays % IN_FLIGHT]
        return row

    def step(self, n: int, done: torch.cuda.Event | None, samples: np.ndarray | None = None) -> ReplayedStep:
        """The first n tokens of the last replay, once ``done`` completes."""
        row = self.last()
        return ReplayedStep(self.replays, row[:1], row[1 : n + 1], samples, done)


@dataclass(slots=True)
class StepApart:
    """A step launched as two: its decodes and its prompts."""

    decodes: StepHandle
    prompts: StepHandle

    def result(self) -> StepResult:
        first, second = self.decodes.result(), self.prompts.result()
        tokens = np.concatenate([first.token_ids, second.token_ids])
        both = ((first.logprobs, 0), (second.logprobs, len(first.token_ids)))
        asked = [(logprobs, at) for logprobs, at in both if logprobs is not None]
        return StepResult(tokens, _stacked(asked) if asked else None)


class GuidedStep:
    """A step with ``Batch.guided``: everything but sampling is launched."""

    def __init__(self, sample: Callable[[], StepHandle]) -> None:
        self._sample: Callable[[], StepHandle] | None = sample
        self._step: StepHandle | None = None

    def go_on(self) -> None:
        assert self._sample is not None
        self._step, self._sample = self._sample(), None

    def result(self) -> StepResult:
        assert self._step is not None, "it was not told which tokens may come"
        return self._step.result()


@dataclass(slots=True)
class ScoredStep:
    """A step with ``Batch.scored``."""

    step: StepHandle
    scores: PendingStep

    def result(self) -> StepResult:
        return replace(self.step.result(), prompt_logprobs=self.scores.result().logprobs)


def _stacked(parts: list[tuple[Logprobs, int]]) -> Logprobs:
    """Concatenate parts, each given with its batch's first row; a part with fewer top tokens is padded with zeros."""
    k = max(part.top.shape[1] for part, _ in parts)

    def wide(x: np.ndarray) -> np.ndarray:
        return np.pad(x, ((0, 0), (0, k - x.shape[1])))

    return Logprobs(
        np.concatenate([part.rows + at for part, at in parts]),
        np.concatenate([part.sampled for part, _ in parts]),
        np.concatenate([part.rank for part, _ in parts]),
        np.concatenate([wide(part.top_ids) for part, _ in parts]),
        np.concatenate([wide(part.top) for part, _ in parts]),
    )
