"""Step observers: one that notes when each request got its first token, one that records all that charts need.

Clock values are ``time.perf_counter``'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.core.batch import Batch
    from minivllm.core.engine import LLMEngine
    from minivllm.core.interfaces import Committed, Scheduler


class FirstTokens:
    """``at[request_id]``: when its first token arrived. Cheap enough for measured runs: a decode step costs two
    comparisons."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.at: dict[str, float] = {}
        self._scheduler = scheduler
        self._names: dict[int, dict[int, str]] = {}  # by step, ``prompt_rows`` of those under way

    def scheduled(self, batch: Batch, began: float) -> None:
        if batch.num_decodes < len(batch.slots):  # the others have their first token
            self._names[batch.step] = prompt_rows(self._scheduler, batch)

    def launched(self, batch: Batch) -> None:
        pass

    def committed(self, batch: Batch, committed: Committed, done: float) -> None:
        if batch.num_decodes < len(batch.slots):
            for name in after_prompts(self._names.pop(batch.step), batch, committed):
                self.at.setdefault(name, done)


def prompt_rows(scheduler: Scheduler, batch: Batch) -> dict[int, str]:
    """The sequences of which a batch that was just scheduled computes the prompt (or computes it again), by slot. When
    its tokens come, others may have their slots."""
    slots = batch.slots[batch.num_decodes :].tolist()
    return {slot: seq.request_id for slot in slots if (seq := scheduler.sequences[slot]) is not None}


def after_prompts(names: Mapping[int, str], batch: Batch, committed: Committed) -> list[str]:
    """Those of ``prompt_rows`` that got a token."""
    return [names[slot] for slot in committed.slots[committed.rows >= batch.num_decodes].tolist()]


@dataclass(slots=True)
class Step:
    """One step: four moments of the host, when the device worked on it, and what was in it."""

    number: int
    began: float  # of scheduling
    planned: float  # scheduling is over, the launch begins
    launched: float
    done: float = 0.0  # its tokens are there, the commit begins
    ended: float = 0.0  # of the commit
    device: tuple[float, float] = (0.0, 0.0)
    decode_tokens: int = 0  # neither has any in a step of a draft model
    prefill_tokens: int = 0
    sequences: int = 0
    running: int = 0
    waiting: int = 0
    blocks: int = 0  # in use; cached ones that nobody holds are free
    admitted: list[str] = field(default_factory=list)  # requests that start, or start again, in this step
    chunks: list[str] = field(default_factory=list)  # requests of which it computes a part of the prompt
    first: list[str] = field(default_factory=list)  # requests that got their first token
    finished: dict[str, str] = field(default_factory=dict)  # request -> why it ended


class StepRecorder:
    """Everything about each step, for ``trace=`` and ``timeline=``. Attach it as ``engine.observer``; then ``finish``.

    If this process runs a GPU, a step's time on the device is from CUDA events before and after its launch. Otherwise
    it is estimated from when the host launched the step and when it had the tokens; ``clock`` says which.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.steps: list[Step] = []
        self.began = time.perf_counter()
        self.num_blocks = engine.num_blocks
        self._engine, self._scheduler = engine, engine.scheduler
        self._launching: dict[int, Step] = {}
        self._names: dict[int, dict[int, str]] = {}  # by step, ``prompt_rows`` of those under way
        self._seen: set[str] = set()
        self._events: list[tuple[Any, Any]] = []
        self._zero = self._cuda_event()
        about = engine.describe()
        self._in_launch = about["device"] == "cpu" and "ranks" not in about  # then the host computes there
        without = "the launch itself" if self._in_launch else "from launch until its tokens came"
        self.clock = "CUDA events" if self._zero else without
        if self._zero:
            self._zero.synchronize()
            self._zero_at = time.perf_counter()

    def _cuda_event(self) -> Any:
        """An event on the current stream, or None where this process runs no GPU."""
        import torch

        if not torch.cuda.is_initialized():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def scheduled(self, batch: Batch, began: float) -> None:
        sequences, draft_model = self._scheduler.sequences, batch.num_drafts > 0
        rows = batch.joined()  # a draft, and the token behind a rejected one, are no part of a prompt
        prompts = [
            (seq.request_id, new)
            for slot, at, new in zip(
                *(x[batch.num_decodes :].tolist() for x in (rows.slots, rows.num_computed, rows.num_new)), strict=True
            )
            if (seq := sequences[slot]) is not None and at < len(seq.known) and not draft_model
        ]
        of_prompts = sum(new for _, new in prompts)
        admitted = [seq.request_id for slot in batch.admitted_slots.tolist() if (seq := sequences[slot])]
        running = sum(seq is not None for seq in sequences)
        blocks = self._scheduler.blocks
        step = Step(
            number=batch.step,
            began=began,
            planned=0.0,
            launched=0.0,
            decode_tokens=0 if draft_model else batch.num_tokens - of_prompts,
            prefill_tokens=of_prompts,
            sequences=len(rows.slots),
            running=running,
            waiting=max(self._engine.num_unfinished_requests - running, 0),
            blocks=blocks.num_blocks - blocks.num_free,
            admitted=admitted,
            chunks=[name for name, _ in prompts],
        )
        self.steps.append(step)
        self._launching[batch.step], self._names[batch.step] = step, prompt_rows(self._scheduler, batch)
        if self._zero:
            self._events.append((self._cuda_event(), None))
        step.planned = time.perf_counter()

    def launched(self, batch: Batch) -> None:
        self._launching[batch.step].launched = time.perf_counter()
        if self._zero:
            self._events[-1] = (self._events[-1][0], self._cuda_event())

    def committed(self, batch: Batch, committed: Committed, done: float) -> None:
        step = self._launching.pop(batch.step)
        step.done = done
        for name in after_prompts(self._names.pop(batch.step), batch, committed):
            if name not in self._seen:
                self._seen.add(name)
                step.first.append(name)
        step.finished = {seq.request_id: reason.value for seq, reason in committed.finished}
        step.ended = time.perf_counter()

    def finish(self) -> None:
        """Compute the device's times, and drop steps that were never committed."""
        if self._zero and self._events:
            self._events[-1][1].synchronize()
            for step, (start, end) in zip(self.steps, self._events, strict=True):
                step.device = self._at(start), self._at(end)
        self.steps = [step for step in self.steps if step.ended]
        if self._zero:
            return
        free = 0.0
        for step in self.steps:
            step.device = (step.planned, step.launched) if self._in_launch else (max(step.launched, free), step.done)
            free = step.device[1]

    def _at(self, event: Any) -> float:
        return self._zero_at + self._zero.elapsed_time(event) / 1e3
