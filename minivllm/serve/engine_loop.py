"""The engine's side of a server: does what its inbox says, steps while there are requests, tells what came of it."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from minivllm.errors import EngineDeadError, RequestError
from minivllm.serve.messages import Abort, Add, AskMetrics, Died, FromEngine, Metrics, News, ToEngine, Told
from minivllm.serve.metrics import text_of
from minivllm.serve.pace import Pace
from minivllm.serve.timings import Timings, request_of

if TYPE_CHECKING:
    from minivllm.core.engine import LLMEngine

_HEALTH = 1.0  # seconds between two looks at the ranks while there is nothing to do
_MANY = 64  # outputs
_LOOK = 5e-4  # seconds between two looks into the inbox before a launch


class Inbox(Protocol):
    """``queue.SimpleQueue``, or what reads as one; None is the end."""

    def get(self, block: bool, timeout: float, /) -> ToEngine | None: ...  # raises queue.Empty


class EngineLoop:
    """Runs ``engine.step`` in whatever thread ``run`` is called in; others may read ``timings`` and the counts.

    While many outputs are under way whose readers are not ``Told`` yet, the engine holds back what can wait
    (``LLMEngine.hold_outputs``): readers that are slower than its steps get fewer and longer pieces.
    """

    def __init__(self, engine: LLMEngine, inbox: Inbox, tell: Callable[[FromEngine], None]) -> None:
        self.engine, self.timings, self._pace = engine, Timings(engine), Pace(engine)
        self.error: BaseException | None = None  # what the engine died of
        self._inbox, self._tell = inbox, tell
        self._untold: deque[int] = deque()  # outputs of each news

    @property
    def num_running(self) -> int:
        """Requests of which something runs."""
        running = {request_of(seq) for seq in self.engine.scheduler.sequences if seq is not None}
        return sum(map(self.engine.has_request, running))

    @property
    def num_waiting(self) -> int:
        """Requests of which nothing runs yet, or for the moment."""
        return self.engine.num_unfinished_requests - self.num_running

    def metrics(self, model_name: str) -> bytes:
        """Prometheus' text."""
        return text_of(self.engine, self.timings, self.num_running, self.num_waiting, model_name)

    def run(self) -> None:
        """Until the inbox ends, or the engine does: its last message says so then."""
        engine = self.engine
        engine.observer = self.timings
        try:
            while (taken := self._take()) is not None:
                steps = engine.stats.steps
                outputs = engine.step() if engine.has_unfinished_requests() else []
                if engine.stats.steps > steps:
                    self._pace.ended(self.timings.now, came=bool(taken))
                for output in outputs:
                    if output.finished:
                        self.timings.finished(output)
                if taken or outputs:
                    self._tell(News(taken, outputs))
                if outputs:
                    self._untold.append(len(outputs))
                    self._hold_if_many()
        except BaseException as error:
            self.error = error
            self._tell(Died.of(error))
        engine.hold_outputs = False

    def _take(self) -> list[tuple[str, Exception | None]] | None:
        """Do what the inbox says, waiting for it if there is nothing else to do, or not yet; None at the end.

        Returns the first request of each add, with the error that it was refused with.
        """
        taken: list[tuple[str, Exception | None]] = []
        while True:
            idle = not taken and not self.engine.has_unfinished_requests()
            try:
                message = self._inbox.get(idle, _HEALTH)
            except queue.Empty:
                if idle:
                    self.engine.check_health()
                elif not taken and (left := self._pace.left(time.perf_counter())):
                    time.sleep(min(left, _LOOK))
                    continue
                return taken
            if message is None:
                return None
            if isinstance(message, Add):
                taken.append((message.request_ids[0], self._add(message)))
            elif isinstance(message, Abort):
                self.engine.abort(list(message.request_ids))
                self.timings.aborted(message.request_ids)
            elif isinstance(message, Told):
                self._untold.popleft()
                self._hold_if_many()
            elif isinstance(message, AskMetrics):
                self._tell(Metrics(self.metrics(message.model_name)))

    def _hold_if_many(self) -> None:
        self.engine.hold_outputs = sum(self._untold) >= _MANY

    def _add(self, add: Add) -> Exception | None:
        accepted = self.engine.stats.prompt_tokens
        for i, (name, prompt) in enumerate(zip(add.request_ids, add.prompts, strict=True)):
            self.timings.arrived(name, add.arrived, add.params.n)  # before: it may be scheduled at once
            try:
                self.engine.add_request(name, prompt, add.params, cache_salt=add.cache_salt, priority=add.priority)
            except EngineDeadError:
                raise
            except Exception as error:  # the request's fault, or a bug that it came upon: the others go on
                self.engine.abort(list(add.request_ids[:i]))
                self.engine.stats.prompt_tokens = accepted
                self.timings.forget(add.request_ids[: i + 1])
                if isinstance(error, RequestError) and len(add.prompts) > 1:
                    return RequestError(f"prompt {i}: {error}")
                return error
        return None
