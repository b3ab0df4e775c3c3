"""The engine's side of a server: handles its inbox, steps while there are requests, sends the results."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import generate_latest

from minivllm.core.lora_request import LoRARequest
from minivllm.core.sampling_params import RequestOutputKind
from minivllm.errors import EngineDeadError, RequestError, of_prompt
from minivllm.serve.generation import joined
from minivllm.serve.messages import (
    Abort,
    Add,
    AddLora,
    AskMetrics,
    Change,
    Changed,
    Delivered,
    Died,
    FromEngine,
    ListLoras,
    Metrics,
    News,
    Reload,
    RemoveLora,
    Sleep,
    ToEngine,
    WakeUp,
)
from minivllm.serve.metrics import EngineCollector
from minivllm.serve.pace import Pace
from minivllm.serve.timings import Timings, request_of

if TYPE_CHECKING:
    from minivllm.core.engine import LLMEngine
    from minivllm.core.outputs import RequestOutput

_HEALTH = 1.0  # seconds between health checks of the ranks while idle
_MANY = 64  # outputs
_LOOK = 5e-4  # seconds between checks of the inbox before a launch
# Seconds spent accepting prompts between two steps, which delay running requests, as does one prompt beyond. Half a
# step, within bounds; with less, a request behind many prompts would wait for many steps.
_SLICE, _SLICE_SHARE, _LONGEST_SLICE = 5e-3, 0.5, 0.1


class Inbox(Protocol):
    """``queue.SimpleQueue``, or anything with its ``get``; None is the end."""

    def get(self, block: bool, timeout: float, /) -> ToEngine | None: ...  # raises queue.Empty


@dataclass(slots=True)
class _Adding:
    """An ``Add`` accepted prompt by prompt. ``outputs``: of those already running, held until all are accepted."""

    add: Add
    done: int = 0  # prompts
    prompt_tokens: int = 0  # theirs
    dropped: set[str] = field(default_factory=set)  # aborted before their turn
    outputs: dict[str, RequestOutput] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """How many requests are not accepted yet."""
        return sum(name not in self.dropped for name in self.add.request_ids[self.done :])

    def keep(self, output: RequestOutput) -> None:
        before = self.outputs.get(output.request_id) if self.add.params.output_kind is RequestOutputKind.DELTA else None
        self.outputs[output.request_id] = output if before is None else joined(before, output)


class EngineLoop:
    """Runs ``engine.step`` in the thread that calls ``run``; other threads may read ``timings`` and the counts.

    While many outputs are not ``Delivered`` yet, the engine holds back what can wait
    (``LLMEngine.hold_outputs``), so that readers slower than its steps get fewer and longer pieces.
    """

    def __init__(self, engine: LLMEngine, inbox: Inbox, tell: Callable[[FromEngine], None]) -> None:
        self.engine, self.timings, self._pace = engine, Timings(engine), Pace(engine)
        self.error: BaseException | None = None  # what killed the engine
        self._inbox, self._tell = inbox, tell
        self._undelivered: deque[int] = deque()  # number of outputs in each unacknowledged ``News``
        self._adds: deque[_Adding] = deque()  # the first may be partly accepted
        self._placeless: list[_Adding] = []  # until unfinished requests leave a place to their adapter
        self._overtaken = 0  # requests with adapters that were accepted since the first of these began to wait
        self._changes: deque[Change] = deque()
        self._ready: list[RequestOutput] = []  # to be sent with the next ones
        self._slice = _SLICE

    @property
    def num_running(self) -> int:
        """Requests with a running completion."""
        running = {request_of(seq) for seq in self.engine.scheduler.sequences if seq is not None}
        return sum(map(self.engine.has_request, running))

    @property
    def num_waiting(self) -> int:
        """Requests without a running completion, those included that are not accepted yet, as for a reload."""
        adds = *self._adds, *self._placeless
        return self.engine.num_unfinished_requests - self.num_running + sum(one.left for one in adds)

    def metrics(self, model_name: str) -> bytes:
        """Metrics in Prometheus text format."""
        adding = sum(one.prompt_tokens for one in tuple(self._adds))  # they may still be refused
        running, waiting = self.num_running, self.num_waiting
        return generate_latest(EngineCollector(self.engine, self.timings, running, waiting, model_name, adding))

    def run(self) -> None:
        """Run until the inbox ends, or the engine dies, which its last message reports."""
        engine = self.engine
        engine.observer = self.timings
        try:
            while (taken := self._take()) is not None:
                steps, began = engine.stats.steps, time.perf_counter()
                stepped = engine.step() if engine.has_unfinished_requests() else []
                took = time.perf_counter() - began
                self._slice = min(max(_SLICE, _SLICE_SHARE * took), _LONGEST_SLICE)
                if engine.stats.steps > steps:
                    self._pace.ended(self.timings.now, came=bool(taken) or self._may_add)
                outputs = self._to_tell(stepped)
                finished = [output for output in outputs if output.finished]
                for output in finished:
                    self.timings.finished(output)
                if finished:
                    self._bring_back()
                if taken or outputs:
                    self._tell(News(taken, outputs))
                if outputs:
                    self._undelivered.append(len(outputs))
                    self._hold_if_many()
        except BaseException as error:
            self.error = error
            self._tell(Died.of(error))
        engine.hold_outputs = False

    def _to_tell(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """All outputs except those of an incomplete add, which may still be refused."""
        ready, self._ready = self._ready, []
        if not self._has_begun_add:
            return ready + outputs
        first = self._adds[0]
        names = set(first.add.request_ids[: first.done])
        for output in outputs:
            if output.request_id in names:
                first.keep(output)
            else:
                ready.append(output)
        return ready

    def _take(self) -> list[tuple[str, Exception | None]] | None:
        """Handle the inbox, waiting for messages if there is nothing else to do yet; None at the end.

        Long work continues after the next step. Returns the first request of each completed add, with its error if it
        was refused.
        """
        taken: list[tuple[str, Exception | None]] = []
        spent, added = 0.0, False
        while spent < self._slice:
            busy = self.engine.has_unfinished_requests()
            idle = not (taken or self._may_add or self._changes or busy)
            began = time.perf_counter()
            try:
                message = self._inbox.get(idle, _HEALTH)
            except queue.Empty:
                if self._changes and not (taken or busy or self._has_begun_add):
                    self._change(self._changes.popleft())
                elif self._may_add:
                    added = True
                    taken += self._add_next()
                elif idle:
                    self.engine.check_health()
                elif not taken and (left := self._pace.left(time.perf_counter())):
                    time.sleep(min(left, _LOOK))
                    continue
                else:
                    return taken
            else:
                if message is None:
                    return None
                self._do(message)
            if not idle:
                spent += time.perf_counter() - began
        return taken if added or not self._may_add else taken + self._add_next()

    @property
    def _has_begun_add(self) -> bool:
        """Whether the first add is partly accepted."""
        return bool(self._adds) and self._adds[0].done > 0

    @property
    def _may_add(self) -> bool:
        """Whether there is something to add that need not wait for a change, or for an engine that sleeps."""
        return self._has_begun_add if self._changes or not self.engine.takes_requests else bool(self._adds)

    def _do(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            self._adds.append(_Adding(message))
            for name in message.request_ids:
                self.timings.arrived(name, message.arrived, message.params.n)
        elif isinstance(message, Abort):
            self._abort(message.request_ids)
        elif isinstance(message, Delivered):
            if self._undelivered:  # empty: this is for news from before a restart
                self._undelivered.popleft()
            self._hold_if_many()
        elif isinstance(message, AskMetrics):
            self._tell(Metrics(self.metrics(message.model_name)))
        elif self._is_done_at_once(message):
            self._change(message)
        else:
            self._changes.append(message)

    def _is_done_at_once(self, message: Change) -> bool:
        """Whether it need not wait for requests that run: adapters are theirs, there are none of an engine that sleeps,
        and one that is awake has nothing to do to wake up."""
        if isinstance(message, WakeUp):
            return not self._changes  # in front of it may be what it is to be woken from
        if isinstance(message, Reload):
            return message.only_checks
        return isinstance(message, AddLora | RemoveLora | ListLoras)

    def _change(self, message: Change) -> None:
        value, failed = None, None
        try:
            value = self._carry_out(message)
        except EngineDeadError:
            raise
        except Exception as error:  # nothing was done
            failed = error
        self._tell(Changed(message.number, failed, self.engine.is_sleeping(), value))

    def _carry_out(self, message: Change) -> Any:
        engine = self.engine
        if isinstance(message, AddLora):
            return engine.add_lora(message.lora_request)
        if isinstance(message, RemoveLora):
            waiting = (one.add.lora_request for one in (*self._adds, *self._placeless))
            if any(isinstance(its, LoRARequest) and its.lora_int_id == message.lora_id for its in waiting):
                raise RequestError(f"lora_int_id={message.lora_id} is not removed under waiting requests that have it")
            return engine.remove_lora(message.lora_id)
        if isinstance(message, ListLoras):
            return list(engine.list_loras())
        if isinstance(message, Sleep):
            return engine.sleep(message.level)
        if isinstance(message, WakeUp):
            return engine.wake_up(message.tags)
        if message.only_checks:
            return engine.check_weights(message.weights_path)
        return engine.reload_weights(message.weights_path, message.weights_iterator)

    def _hold_if_many(self) -> None:
        self.engine.hold_outputs = sum(self._undelivered) >= _MANY

    def _abort(self, request_ids: tuple[str, ...]) -> None:
        self.engine.abort(list(request_ids))
        self.timings.aborted(request_ids)
        gone = set(request_ids)
        self._ready = [output for output in self._ready if output.request_id not in gone]
        for one in (*self._adds, *self._placeless):
            one.dropped |= gone.intersection(one.add.request_ids)
            one.outputs = {name: output for name, output in one.outputs.items() if name not in gone}
        self._adds = deque(one for one in self._adds if one.done or one.left)  # else they stay as long as it sleeps
        self._placeless = [one for one in self._placeless if one.left]
        self._bring_back()

    def _set_aside(self, adding: _Adding, full: set[int]) -> bool:
        """Whether there is no place for its adapter. It then waits apart, so that others need not wait for it: at most
        as many as run at once, from when on only its own adapter's go before it. ``full``: adapters without a place."""
        adapter = adding.add.lora_request
        if not isinstance(adapter, LoRARequest) or adding.done:  # the engine refuses what is neither one nor None
            return False
        its, first = adapter.lora_int_id, self._placeless[0].add.lora_request if self._placeless else adapter
        assert first is not None
        waits = its != first.lora_int_id and self._overtaken >= self.engine.config.scheduler.max_num_seqs
        if waits or its in full or not self.engine.fitting_loras([adapter]):
            full.add(its)
            self._placeless.append(adding)
            return True
        self._overtaken += adding.left if self._placeless else 0
        return False

    def _bring_back(self) -> None:
        """Let those who may have a place now go first."""
        if not self._placeless:
            return
        waited, self._placeless, full = self._placeless, [], set[int]()
        back = [one for one in waited if not self._set_aside(one, full)]
        if not self._placeless or self._placeless[0] is not waited[0]:
            self._overtaken = 0
        begun = [self._adds.popleft()] if self._has_begun_add else []
        self._adds.extendleft([*back[::-1], *begun])

    def _add_next(self) -> list[tuple[str, Exception | None]]:
        """Accept the next prompt; returns the outcome of its add, if that is now complete or refused."""
        first = self._adds[0]
        add = first.add
        if self._set_aside(first, set()):
            self._adds.popleft()
            return []
        if len(first.dropped) < len(add.request_ids):
            if (error := self._add(first)) is not None:
                self._adds.popleft()
                self._bring_back()  # its first prompts may have had a place
                return [(add.request_ids[0], error)]
            if first.done < len(add.request_ids):
                return []
        self._adds.popleft()
        self._ready += first.outputs.values()
        return [(add.request_ids[0], None)]

    def _add(self, adding: _Adding) -> Exception | None:
        """Accept the add's next prompt. An error refuses the whole add."""
        add, i, before = adding.add, adding.done, self.engine.stats.prompt_tokens
        name, prompt = add.request_ids[i], add.prompts[i]
        adding.done += 1
        if name in adding.dropped:
            return None
        try:
            self.engine.add_request(
                name, prompt, add.params, cache_salt=add.cache_salt, priority=add.priority,
                lora_request=add.lora_request,
            )  # fmt: skip
        except EngineDeadError:
            raise
        except Exception as error:  # the request's fault, or a bug that it hit: the others continue
            self.engine.abort(list(add.request_ids[:i]))
            self.engine.stats.prompt_tokens -= adding.prompt_tokens
            self.timings.forget(add.request_ids)
            if isinstance(error, RequestError) and not error.whole_request:
                return of_prompt(error, add.prompts, i)
            return error
        adding.prompt_tokens += self.engine.stats.prompt_tokens - before
        return None
