"""The server's measurements of its engine's steps: when tokens arrive, by slot, without per-token work in Python.

# slot arrays, owned by Timings: last (S,) float64, when the slot's newest token came (seconds, time.perf_counter);
# fresh (S,) bool: none has come of the sequence that has the slot
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.requests import COMPLETION

if TYPE_CHECKING:
    from minivllm.core.batch import Batch
    from minivllm.core.engine import LLMEngine
    from minivllm.core.interfaces import Committed
    from minivllm.core.outputs import RequestOutput
    from minivllm.core.sequence import Sequence

_SHORT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 5, 7.5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)


def request_of(seq: Sequence) -> str:
    """The id of a sequence's request."""
    return seq.request_id.partition(COMPLETION)[0]


class Histogram:
    """Counts of values up to each of ``bounds`` (ascending), and in total."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = np.zeros(len(bounds) + 1, dtype=np.int64)  # not cumulative; the last exceeds all bounds
        self.sum = 0.0

    def add(self, values: np.ndarray | float) -> None:
        """Values, (n,) or one."""
        place = np.searchsorted(self.bounds, np.atleast_1d(values))
        self.counts += np.bincount(place, minlength=len(self.counts))
        self.sum += float(np.sum(values))


class Timings:
    """A ``StepObserver``. All methods are called in the engine's thread; others may read the totals."""

    def __init__(self, engine: LLMEngine) -> None:
        size = engine.config.scheduler.max_num_seqs
        self.queue = Histogram(_LONG)
        self.first_token = Histogram(_LONG)
        self.between_tokens = Histogram(_SHORT)
        self.whole_request = Histogram(_LONG)
        self.ends: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0})  # completions by finish reason
        self.prefix_queries = self.prefix_hits = 0  # prompt tokens of finished requests, and those found cached
        self._engine = engine
        self.now = 0.0  # when the newest tokens came
        self._arrived: dict[str, tuple[float, int]] = {}  # when, and how many completions it asks for
        self._last = np.zeros(size)
        self._fresh = np.zeros(size, dtype=bool)
        self._request: list[str | None] = [None] * size  # whose first token a fresh slot's first one is
        # By step, the slots in which it starts sequences, with their requests: theirs from its commit on, as a step may
        # be scheduled before the tokens of earlier ones are told.
        self._starting: dict[int, list[tuple[int, str | None]]] = {}

    # ------------------------------------------------------------------ requests

    def arrived(self, request_id: str, at: float, completions: int) -> None:
        self._arrived[request_id] = at, completions

    def finished(self, output: RequestOutput) -> None:
        known = self._arrived.pop(output.request_id, None)
        if known is not None:
            self.whole_request.add(self.now - known[0])
        self.ends.update(str(completion.finish_reason) for completion in output.outputs)
        self.prefix_queries += len(output.prompt_token_ids)
        self.prefix_hits += output.num_cached_tokens

    def aborted(self, request_ids: Iterable[str]) -> None:
        """Counts all of each request's completions, even finished ones, since the client got no answer."""
        self.ends["abort"] += self.forget(request_ids)

    def forget(self, request_ids: Iterable[str]) -> int:
        """Returns the number of completions requested by those that were known."""
        return sum(self._arrived.pop(name, (0.0, 0))[1] for name in request_ids)

    # ------------------------------------------------------------------ steps

    def scheduled(self, batch: Batch, began: float) -> None:
        starting = []
        for slot in batch.admitted_slots.tolist():
            seq = self._engine.scheduler.sequences[slot]
            if seq is None:
                continue
            name = request_of(seq)
            has_first = len(seq.known) > seq.prompt_len  # it was preempted after its first token
            starting.append((slot, None if has_first else name))
            if seq.num_preemptions == 0 and (known := self._arrived.get(name)) is not None:
                self.queue.add(began - known[0])
        if starting:
            self._starting[batch.step] = starting

    def launched(self, batch: Batch) -> None:
        pass

    def committed(self, batch: Batch, committed: Committed, done: float) -> None:
        self.now = done
        for slot, name in self._starting.pop(batch.step, ()):
            self._request[slot], self._fresh[slot] = name, True
        slots = committed.slots
        fresh = self._fresh[slots]
        if fresh.any():
            for slot in slots[fresh].tolist():
                if (known := self._arrived.get(self._request[slot] or "")) is not None:
                    self.first_token.add(done - known[0])
            self._fresh[slots] = False
        later = np.unique(slots[~fresh]) if committed.drafts else slots[~fresh]  # accepted tokens come together
        if len(later):
            self.between_tokens.add(done - self._last[later])
        self._last[slots] = done
