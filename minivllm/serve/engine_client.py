"""The event loop's side of a server's engine, wherever that runs: routes outputs to their requests' readers."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from minivllm.core.sleeping import checked_level, checked_tags
from minivllm.errors import EngineDeadError
from minivllm.serve.generation import Generation, Interrupted
from minivllm.serve.messages import (
    Abort,
    Add,
    AddLora,
    Change,
    Changed,
    Delivered,
    Died,
    FromEngine,
    ListLoras,
    News,
    Reload,
    RemoveLora,
    Sleep,
    ToEngine,
    WakeUp,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from minivllm.core.engine import LLMEngine
    from minivllm.core.lora_request import LoRARequest
    from minivllm.core.requests import Prompt
    from minivllm.core.sampling_params import SamplingParams
    from minivllm.models.tokenizer import Tokenizer

T = TypeVar("T")
_MOST_REST = 0.05  # seconds
_NOT_STARTED = (
    "the engine is not started: the application's lifespan starts it, which nobody runs of an application that is "
    "mounted in another one; within that one's lifespan write: async with app.router.lifespan_context(app): yield"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """An engine's limits, which a server reports or checks itself."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    enable_lora: bool = False

    @classmethod
    def of(cls, engine: LLMEngine) -> Limits:
        config, vocab_size = engine.config, engine.model_config.vocab_size
        return cls(engine.max_model_len, config.scheduler.max_num_seqs, vocab_size, config.enable_lora)


class EngineClient(ABC):
    """Call its methods from one event loop's thread."""

    rest = 0.0  # pause before ``Delivered``, as a multiple of the time that readers took

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self.tokenizer, self.limits = tokenizer, limits
        self.on_death: Callable[[], None] | None = None  # called once
        self.died: Died | None = None
        self._ended = self._started = False
        self._generations: dict[str, Generation] = {}
        self._changes: dict[int, asyncio.Future[Any]] = {}  # by their messages' numbers
        self._num_changes = 0
        self.is_sleeping = False

    def start(self) -> None:
        """Call in the event loop that will send requests; again only after ``stop``."""
        self._loop = asyncio.get_running_loop()
        self._started, self._ended = True, False

    def stop(self) -> None:
        """Running requests get no more outputs. Safe to call twice."""
        self._started = False
        self._generations.clear()
        self._fail_changes("the engine was stopped")

    @abstractmethod
    async def metrics(self, model_name: str) -> bytes:
        """Metrics in Prometheus text format, for a model of this name. Raises EngineDeadError if unavailable."""

    async def reload_weights(self, weights_path: str | None = None, *, abort: bool = False) -> None:
        """Replace the weights of the running engine as ``LLMEngine.reload_weights`` does, between two steps: once the
        requests that run are done, or, with ``abort``, all that came before have ended with Interrupted. Those that
        come meanwhile wait, and are answered with the new weights. It cannot be cancelled.

        Raises:
            RequestError, CheckpointError: nothing was written; the engine runs on as it was. A folder is refused at
                once, before any request waits or ends.
            EngineDeadError: the engine is dead, by this or before.
        """
        await self._reload(weights_path, abort=abort)

    async def _reload(self, path: Any, iterator: Any = None, *, abort: bool) -> None:
        if iterator is None:
            await self._ask(Reload, path, None, True)
        if abort:
            self._interrupt_all("the weights are being replaced")
        await self._ask(Reload, path, iterator)

    async def sleep(self, level: int = 1, *, abort: bool = False) -> None:
        """Have the engine sleep as ``LLMEngine.sleep`` does, once the requests that run are done, or, with ``abort``,
        all that came before have ended with Interrupted. Those that come later wait until it is awake, and has
        weights. It cannot be cancelled.

        Raises:
            RequestError: refused; the engine runs on as it was.
            EngineDeadError: the engine is dead, by this or before.
        """
        checked_level(level)
        if abort:
            self._interrupt_all("the engine goes to sleep")
        await self._ask(Sleep, level)

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """As ``LLMEngine.wake_up``. Raises as it does."""
        await self._ask(WakeUp, checked_tags(tags))

    @property
    def sleeps_on(self) -> bool:
        """Whether the engine sleeps and nobody has asked for anything that may wake it."""
        return self.is_sleeping and not self._changes

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """As ``LLMEngine.add_lora``, between two steps. Raises as it does."""
        return bool(await self._ask(AddLora, lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        """As ``LLMEngine.remove_lora``. Raises as it does, also if a request that has the adapter waits."""
        return bool(await self._ask(RemoveLora, lora_id))

    async def list_loras(self) -> set[int]:
        """As ``LLMEngine.list_loras``."""
        return set(await self._ask(ListLoras))

    async def _ask(self, change: Callable[..., Change], *arguments: Any) -> Any:
        self.check()
        self._num_changes += 1
        answer = self._changes[self._num_changes] = self._loop.create_future()
        self._post(change(self._num_changes, *arguments))
        return await answer

    def _interrupt_all(self, why: str) -> None:
        self.check()
        self._post(Abort(tuple(self._generations)))
        for generation in set(self._generations.values()):
            generation.end(Interrupted(f"the request was aborted, as {why}; send it again"))
        self._generations.clear()

    @abstractmethod
    def _post(self, message: ToEngine) -> None:
        """Put a message into the engine's inbox."""

    @property
    def num_completions(self) -> int:
        """The number of completions of unfinished requests."""
        return sum(generation.completions for generation in self._generations.values())

    def check(self) -> None:
        """Raises EngineDeadError if the engine is dead or not started, or ``end`` was called."""
        if (error := self._why_not()) is not None:
            raise error

    def end(self) -> None:
        """End every generation with an error, and refuse new ones."""
        self._ended = True
        self._post(Abort(tuple(self._generations)))
        self._fail_all()

    async def generate(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Generation:
        """Queue prompts, all or none, and return once the engine has accepted them.

        ``request_ids`` must be unused, one per prompt. ``lora_request``: the LoRA adapter of all of them.

        Raises:
            RequestError: a prompt can never run. BusyError: not now. EngineDeadError.
        """
        self.check()
        by_name = dict(zip(request_ids, prompts, strict=True))
        generation = Generation(by_name, params.output_kind, params.n, self._abort)
        self._generations |= dict.fromkeys(by_name, generation)
        try:
            now = time.perf_counter()
            self._post(Add(tuple(by_name), tuple(prompts), params, cache_salt, priority, now, lora_request))
            await generation.accepted
        except BaseException:
            generation.accepted.cancel()  # no longer awaited
            generation.abort()
            raise
        return generation

    def _abort(self, request_ids: tuple[str, ...]) -> None:
        for name in request_ids:
            self._generations.pop(name, None)
        self._post(Abort(request_ids))

    def _why_not(self) -> EngineDeadError | None:
        if self.died is not None:
            return self.died.as_error()
        if self._ended:
            return EngineDeadError("the server is shutting down")
        return None if self._started else EngineDeadError(_NOT_STARTED)

    def _fail_all(self) -> None:
        for generation in set(self._generations.values()):
            error = self._why_not()  # one per reader: each adds its own traceback
            assert error is not None
            generation.end(error)
        self._generations.clear()
        self._fail_changes(str(self._why_not()))

    def _fail_changes(self, why: str) -> None:
        fail(self._changes.values(), why)
        self._changes.clear()

    # ------------------------------------------------------------------ what the engine says

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, News):
            self._hear_news(message)
        elif isinstance(message, Changed):
            self._hear_changed(message)
        elif isinstance(message, Died):
            self._die(message)

    def _hear_news(self, news: News) -> None:
        for name, error in news.taken:
            generation = self._generations.get(name)
            if generation is None:
                continue  # aborted in the meantime
            if error is not None:
                for other in generation.prompts:
                    del self._generations[other]
                generation.end(error)
            elif not generation.accepted.done():
                generation.accepted.set_result(None)
        for output in news.outputs:
            generation = self._generations.get(output.request_id)
            if generation is not None:
                generation.take(output)
                if output.finished:
                    del self._generations[output.request_id]
        if news.outputs:
            asyncio.get_running_loop().call_soon(self._delivered, time.perf_counter())  # after all readers woken now

    def _delivered(self, began: float) -> None:
        rest = min(self.rest * (time.perf_counter() - began), _MOST_REST)
        if rest:
            asyncio.get_running_loop().call_later(rest, self._post, Delivered())
        else:
            self._post(Delivered())

    def _hear_changed(self, message: Changed) -> None:
        self.is_sleeping = message.sleeps
        answer = self._changes.pop(message.number, None)
        if answer is None or answer.done():  # whoever asked was told something else, or is gone
            return
        if message.error is None:
            answer.set_result(message.value)
        else:
            answer.set_exception(message.error)

    def _die(self, died: Died) -> None:
        if self.died is None:
            self.died = died
            self._fail_all()
            if self.on_death is not None:
                self.on_death()


def fail(answers: Iterable[asyncio.Future[T]], why: str) -> None:
    """End the wait for these answers, which do not come any more, with an EngineDeadError each: whoever reads one adds
    a traceback."""
    for answer in answers:
        if not answer.done():
            answer.set_exception(EngineDeadError(why))
