"""An ``LLMEngine`` for asyncio: one thread steps it, and the event loop hears of each step once.

# the loop's thread owns: _generations (which request's outputs go where)     the engine's thread owns: the engine
# between them: _inbox (adds, aborts, the end) one way, ``call_soon_threadsafe`` the other
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm.core.sampling_params import RequestOutputKind
from minivllm.errors import EngineDeadError, RequestError
from minivllm.serve.timings import Timings, request_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from minivllm.core.engine import LLMEngine, Prompt
    from minivllm.core.outputs import RequestOutput
    from minivllm.core.sampling_params import SamplingParams

_HEALTH = 1.0  # seconds between two looks at the ranks while there is nothing to do
_REST = 2.0  # of the time that readers take, before they are told of more
_MOST_REST = 0.05  # seconds
_MANY = 64  # readers to be told at once, from which on the engine makes no outputs that would only wait for them
_PATIENCE = 10.0  # seconds that `stop` waits for a step under way


@dataclass(frozen=True, slots=True)
class _Add:
    request_ids: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    cache_salt: str | None
    priority: int
    arrived: float  # time.perf_counter


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: tuple[str, ...]


class Aborted(Exception):
    """Somebody called ``Generation.abort`` while its outputs were waited for."""


class Generation:
    """The outputs of one or more prompts, as they come: ``async for output in generation``.

    With ``RequestOutputKind.DELTA`` each output is what came since the one before of the same request; what nobody
    fetched yet is put together (else the newest stays), so that a slow reader costs no more than one output a prompt.

    Raises, while it is read:
        EngineDeadError: the engine died. Aborted: by ``abort``.
    """

    def __init__(
        self, engine: AsyncEngine, request_ids: tuple[str, ...], kind: RequestOutputKind, completions: int = 1
    ) -> None:
        self.request_ids = request_ids
        self._engine = engine
        self.completions = completions  # of each prompt
        self._joins = kind is RequestOutputKind.DELTA
        self._open = set(request_ids)  # not finished
        self._begun = False  # whether there was any output
        self._pending: dict[str, RequestOutput] = {}
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._pending.pop(next(iter(self._pending)))

    def abort(self) -> None:
        """End what is not finished, and give its memory back. Does nothing to a generation that has ended."""
        if self._open:
            self._engine._abort(tuple(self._open))
            self._pending.clear()
            self._end(Aborted())

    def _take(self, output: RequestOutput) -> bool:
        """Its readers hear of it with the next ``_wake``; returns whether that is urgent: a beginning or an end."""
        urgent, self._begun = output.finished or not self._begun, True
        before = self._pending.get(output.request_id) if self._joins else None
        self._pending[output.request_id] = output if before is None else _joined(before, output)
        if output.finished:
            self._open.discard(output.request_id)
        return urgent

    def _wake(self) -> None:
        self._changed.set()

    def _end(self, error: BaseException) -> None:
        self._open.clear()
        self._error = error
        self._changed.set()
        if not self.accepted.done():
            self.accepted.set_exception(error)


class AsyncEngine:
    """Runs ``engine.step`` in a thread of its own while there are requests; the thread sleeps while there are none.

    All methods but ``stop`` are for one event loop's thread. Nobody else may call ``engine`` between ``start`` and
    ``stop``; reading its counters is harmless. ``stop`` leaves the engine itself as it is: who made it shuts it down.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.timings = Timings(engine)
        self.on_death: Callable[[], None] | None = None  # called once, in the loop
        self.error: BaseException | None = None  # what the engine died of
        self._inbox: queue.SimpleQueue[_Add | _Abort | None] = queue.SimpleQueue()
        self._generations: dict[str, Generation] = {}
        self._news: set[Generation] = set()  # with outputs that nobody was told of
        self._telling = False  # or about to
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="minivllm-engine", daemon=True)

    def start(self) -> None:
        """Begin to step. Call it once, in the event loop that will ask."""
        self._loop = asyncio.get_running_loop()
        self.engine.observer = self.timings
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the step that it is in; what still runs gets no more outputs. Safe to call twice."""
        if self._thread.ident is None:
            return
        self._inbox.put(None)
        self._thread.join(_PATIENCE)
        self.engine.hold_outputs = False

    @property
    def num_requests(self) -> int:
        """Those that have not ended."""
        return len(self._generations)

    @property
    def num_completions(self) -> int:
        """Of requests that have not ended."""
        return sum(generation.completions for generation in self._generations.values())

    @property
    def num_running(self) -> int:
        """Requests of which something runs."""
        running = {request_of(seq) for seq in self.engine.scheduler.sequences if seq is not None}
        return len(running & self._generations.keys())

    @property
    def num_waiting(self) -> int:
        """Requests of which nothing runs yet, or for the moment."""
        return self.num_requests - self.num_running

    def check(self) -> None:
        """Raises EngineDeadError if the engine is dead, or ``end`` was called."""
        if (error := self._why_not()) is not None:
            raise error

    def end(self) -> None:
        """End every generation with an error, and refuse new ones."""
        self._ended = True
        self._inbox.put(_Abort(tuple(self._generations)))
        self._fail_all()

    def _why_not(self) -> EngineDeadError | None:
        if self.error is not None:
            return EngineDeadError(f"the engine has stopped: {str(self.error) or type(self.error).__name__}")
        return EngineDeadError("the server is shutting down") if self._ended else None

    def _fail_all(self) -> None:
        for generation in set(self._generations.values()):
            error = self._why_not()  # one a reader: each adds its own traceback
            assert error is not None
            generation._end(error)
        self._generations.clear()

    async def generate(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Generation:
        """Queue prompts, all or none, and return once the engine has them.

        ``request_ids`` are new ones, one a prompt, without an underscore (a sequence of several is INDEX_ID).

        Raises:
            RequestError: one of them can never run. EngineDeadError.
        """
        self.check()
        generation = Generation(self, tuple(request_ids), params.output_kind, params.n)
        for name in generation.request_ids:
            self._generations[name] = generation
        arrived = time.perf_counter()
        self._inbox.put(_Add(generation.request_ids, tuple(prompts), params, cache_salt, priority, arrived))
        try:
            await generation.accepted
        except BaseException:
            generation.abort()
            raise
        return generation

    # ------------------------------------------------------------------ in the loop

    def _abort(self, request_ids: tuple[str, ...]) -> None:
        for name in request_ids:
            self._generations.pop(name, None)
        self._inbox.put(_Abort(request_ids))

    def _deliver(self, taken: list[tuple[_Add, BaseException | None]], outputs: list[RequestOutput]) -> None:
        for add, error in taken:
            generation = self._generations.get(add.request_ids[0])
            if generation is None:
                continue  # aborted meanwhile
            if error is not None:
                for name in add.request_ids:
                    del self._generations[name]
                generation._end(error)
            elif not generation.accepted.done():
                generation.accepted.set_result(None)
        for output in outputs:
            generation = self._generations.get(output.request_id)
            if generation is not None:
                if generation._take(output):
                    generation._wake()  # it does not wait for those that go on
                else:
                    self._news.add(generation)
                if output.finished:
                    del self._generations[output.request_id]
        if self._news and not self._telling:
            self._wake_readers()

    def _wake_readers(self) -> None:
        """Then rest for twice as long as they took: many streams get more tokens at once, the engine time to make
        them."""
        self._telling, began = True, time.perf_counter()
        self.engine.hold_outputs = len(self._news) >= _MANY
        for generation in self._news:
            generation._wake()
        self._news.clear()
        self._loop.call_soon(self._rest, began)  # behind all that were woken

    def _rest(self, began: float) -> None:
        self._loop.call_later(min(_REST * (time.perf_counter() - began), _MOST_REST), self._rested)

    def _rested(self) -> None:
        self._telling = self.engine.hold_outputs = False
        if self._news:
            self._wake_readers()

    def _died(self, error: BaseException) -> None:
        self.error = error
        self._fail_all()
        if self.on_death is not None:
            self.on_death()

    # ------------------------------------------------------------------ in the engine's thread

    def _run(self) -> None:
        engine = self.engine
        try:
            while (taken := self._take()) is not None:
                outputs = engine.step() if engine.has_unfinished_requests() else []
                for output in outputs:
                    if output.finished:
                        self.timings.finished(output)
                if taken or outputs:
                    self._tell(self._deliver, taken, outputs)
        except BaseException as error:
            self._tell(self._died, error)

    def _take(self) -> list[tuple[_Add, BaseException | None]] | None:
        """Do what the inbox says, waiting for it if there is nothing else to do; None at the end.

        Returns each add with the error that it was refused with.
        """
        taken: list[tuple[_Add, BaseException | None]] = []
        while True:
            idle = not taken and not self.engine.has_unfinished_requests()
            try:
                message = self._inbox.get(idle, _HEALTH)
            except queue.Empty:
                if idle:
                    self.engine.check_health()
                return taken
            if message is None:
                return None
            if isinstance(message, _Add):
                taken.append((message, self._add(message)))
            else:
                self.engine.abort(list(message.request_ids))
                self.timings.aborted(message.request_ids)

    def _add(self, add: _Add) -> BaseException | None:
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

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *args)


def _joined(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Two deltas of one request as one."""
    for one, more in zip(first.outputs, then.outputs, strict=True):
        more.text = one.text + more.text
        more.token_ids = one.token_ids + more.token_ids
        if one.logprobs is not None and more.logprobs is not None:
            more.logprobs = one.logprobs + more.logprobs
    return then
