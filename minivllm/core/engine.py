"""The engine loop: requests in, outputs out, two steps in flight. All its components are passed in."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from minivllm.bytecode import kept_bytecode
from minivllm.core.adapter_places import AdapterPlaces, LoadedAdapter
from minivllm.core.admission import Admission
from minivllm.core.garbage import collect_engines, uncollected
from minivllm.core.guides import Guide
from minivllm.core.interrupts import Uninterrupted
from minivllm.core.lora_request import LoRARequest
from minivllm.core.outputs import RequestOutput
from minivllm.core.requests import Prompt, Request
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence
from minivllm.core.sleeping import Sleeping, checked_level, checked_tags
from minivllm.core.unfinished import UnfinishedRequests
from minivllm.errors import (
    EngineDeadError,
    MinivllmError,
    RequestError,
    blamed,
    calling,
    described,
    place_of,
    was_shut_down,
)
from minivllm.missing import missing_method, refuse

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.batch import Batch
    from minivllm.core.interfaces import Executor, Sampler, Scheduler, StepHandle, StepObserver
    from minivllm.core.model_config import ModelConfig
    from minivllm.models.tokenizer import Tokenizer

_T = TypeVar("_T")
# vLLM's arguments of ``add_request`` that are not supported and must be None.
_NEUTRAL = dict.fromkeys(("arrival_time", "tokenization_kwargs", "trace_headers"))
_PATIENCE = 10.0  # seconds that a scheduler may have requests without scheduling a step


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine started. Times in seconds."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0  # verified
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of these
    host_time: float = 0.0  # of steps, without waiting for the device
    wait_time: float = 0.0  # for the device
    launch_time: float = 0.0  # part of host_time: in Executor.launch (on a CPU, the model itself)


@dataclass(slots=True)
class _UnderWay:
    """A step that is launched and not yet committed."""

    batch: Batch
    handle: StepHandle
    scored: list[Request]  # of the rows of ``Batch.scored``
    guided: list[tuple[int, Guide]]  # rows, and the guides that need all earlier tokens before the step can sample


class LLMEngine:
    """Takes requests, runs steps, returns outputs. Not thread-safe: one thread calls it.

    Make one with ``LLMEngine.from_config``; use it as a context manager, or call ``shutdown``.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        max_model_len: int,
        *,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        sampler_class: type[Sampler],
        executor: Executor,
        num_blocks: int,
    ) -> None:
        self.config, self.model_config, self.max_model_len = config, model_config, max_model_len
        self.tokenizer, self.scheduler, self.executor, self.num_blocks = tokenizer, scheduler, executor, num_blocks
        self._admission = Admission(
            config, model_config, max_model_len, tokenizer=tokenizer, scheduler=scheduler, sampler_class=sampler_class,
            executor=executor, num_blocks=num_blocks,
        )  # fmt: skip
        self.stats = EngineStats()
        self.observer: StepObserver | None = None  # called at each step if set
        # While true, outputs other than a request's first and last may wait for a later step: a caller that is busy
        # with many outputs gets fewer and longer ones. Any thread may set it.
        self.hold_outputs = False
        self.served = False  # true while an AsyncEngine runs it
        self._depth = 2 if config.scheduler.async_scheduling else 1
        self._under_way: deque[_UnderWay] = deque()
        self._requests = UnfinishedRequests(config, scheduler, self.stats)
        self.num_requests_added = 0
        self._prompt_tokens_since_step = 0
        self._dead: BaseException | None = None
        self._stuck_since: float | None = None
        self._unreturned: list[RequestOutput] = []  # not yet returned: the step ended with Ctrl-C
        self._uninterrupted = Uninterrupted()
        self._sleeping = Sleeping()
        self._adapters = AdapterPlaces(config, self._requests.adapter_ids, self._find_adapter)
        self._closed = False

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLMEngine:
        """Load and start everything in ``config``."""
        collect_engines()
        with kept_bytecode(), uncollected():
            from minivllm.assemble import build_engine

            return build_engine(config)

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        number: int | None = None,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> None:
        """Queue a request.

        ``prompt``: text, token ids, or vLLM's mapping with ``prompt`` or ``prompt_token_ids`` (and ``cache_salt``).
        Requests with different ``cache_salt`` share no cached prefix. A smaller ``priority`` is served earlier by
        schedulers that have priorities; others accept only 0. ``number``: the request's index, which determines its
        random numbers if it has no seed; default: ``num_requests_added``. ``lora_request``: its LoRA adapter, which is
        loaded here unless it is. vLLM's other arguments are accepted only at values that change nothing.

        If no step is in flight and the requests added since the last ``step`` fill one, it is launched here, so that
        the device need not wait for later requests.

        Raises:
            RequestError: the request can never run, or, if it is a BusyError, not now; the engine is unchanged.
            EngineDeadError: as in ``step``.
        """
        self.check_health()
        self._sleeping.refuse_requests()
        if others:
            refuse(others, _NEUTRAL)
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r} is not a string")
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is already waiting or running; choose another")
        number = self.num_requests_added if number is None else number
        request = self._admission.request(request_id, prompt, params, cache_salt, priority, number)
        if lora_request is not None:
            if getattr(lora_request, "load_inplace", False):
                raise RequestError("load_inplace=True is for add_lora: call that, and leave it out of requests")
            request.give_adapter(self._adapter(lora_request))
        with self._uninterrupted:  # else the scheduler might have a sequence that cannot be aborted
            self._take_on(request)
        full = self._prompt_tokens_since_step >= self.config.scheduler.max_num_batched_tokens
        if full and not self._under_way and self._depth > 1 and not self.scheduler.uses_priority:
            began = time.perf_counter()
            self._uninterruptedly(self._launch)
            self.stats.host_time += time.perf_counter() - began

    def _take_on(self, request: Request) -> None:
        added: list[Sequence] = []
        try:
            with calling("scheduler", self.config.scheduler.name, self.scheduler, "add"):
                for completion in request.completions:
                    self.scheduler.add(completion.seq)
                    added.append(completion.seq)
        except BaseException:
            for seq in added:
                self.scheduler.abort(seq.request_id)
            raise
        self._requests.add(request)
        self.num_requests_added += 1
        self.stats.prompt_tokens += len(request.prompt_token_ids)
        self._prompt_tokens_since_step += len(request.prompt_token_ids)

    def abort(self, request_id: str | list[str]) -> None:
        """End requests in any state; ids that are unknown or already finished are ignored.

        Raises:
            EngineDeadError: a scheduler's ``abort`` failed.
        """
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        self._unreturned = [output for output in self._unreturned if output.request_id not in names]
        self._uninterruptedly(partial(self._requests.abort, names), "an abort")

    abort_request = abort  # vLLM's name

    def has_request(self, request_id: str) -> bool:
        """Whether a request with this id is waiting or running."""
        return request_id in self._requests

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests or self._unreturned)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def get_num_unfinished_requests(self) -> int:
        """vLLM's name for ``num_unfinished_requests``."""
        return self.num_unfinished_requests

    @property
    def num_steps_under_way(self) -> int:
        """Steps that are launched and not yet committed."""
        return len(self._under_way)

    @property
    def decodes_next(self) -> bool:
        """Whether the next step is decode-only unless a request is added: none waits, and no prompt is unfinished."""
        if not self._under_way:
            return False
        batch = self._under_way[-1].batch
        running = sum(self.scheduler.sequences[slot] is not None for slot in set(batch.slots.tolist()))
        return bool(batch.samples.all()) and self._requests.num_sequences == running

    # ------------------------------------------------------------------ a step

    def step(self) -> list[RequestOutput]:
        """Launch the next step and commit the oldest in flight; returns the outputs of requests with new tokens.

        Ctrl-C raises KeyboardInterrupt at the end of the step; the next call returns the step's outputs.

        Raises:
            EngineDeadError: a rank failed; all requests of this engine are lost.
        """
        self.check_health()
        self._uninterruptedly(self._step)
        outputs, self._unreturned = self._unreturned, []
        return outputs

    def _uninterruptedly(self, act: Callable[[], _T], what: str = "a step") -> _T:
        """Call ``act``. If it fails the engine is dead, as the state it left is unknown."""
        with self._uninterrupted:
            try:
                return act()
            except (Exception, SystemExit) as error:
                self._dead = error
                if isinstance(error, MinivllmError):
                    raise
                why = f"{type(error).__name__}: {error}"
                raise EngineDeadError(f"{what} failed: {why} ({place_of(error)})") from error
            except BaseException as error:  # a second Ctrl-C
                self._dead = error
                raise

    def _step(self) -> None:
        began, self._prompt_tokens_since_step = time.perf_counter(), 0
        while len(self._under_way) < self._depth and self._launch():
            pass
        if not self._under_way:
            self._check_progress(began)
            return
        self._stuck_since = None
        oldest = self._under_way.popleft()
        batch, waited = oldest.batch, time.perf_counter()
        result = oldest.handle.result()
        done = time.perf_counter()
        self._requests.watch(batch.admitted_slots)  # before commit: a request may end with its first token
        committed = self.scheduler.commit(batch, result.token_ids)
        sequences = self.scheduler.sequences
        if self._depth > 1 and not self._under_way and not self._requests.guided:
            # The device would wait: for drafts, mostly.
            sequences = [*sequences]  # the next step may start others in their slots
            self._launch()
        if batch.scored is not None:
            self._requests.take_scores(batch, batch.scored, oldest.scored, result.prompt_logprobs)
        ended = self._requests.take_in(committed, result.logprobs, sequences)
        self._unreturned += self._requests.outputs(ended, self._may_hold())
        self._guide_first()
        if self.observer is not None:
            self.observer.committed(batch, committed, done)
        self.stats.steps += 1
        self.stats.wait_time += done - waited
        self.stats.host_time += time.perf_counter() - began - (done - waited)

    def _check_progress(self, now: float) -> None:
        """Raise MinivllmError if the scheduler has requests, or has lost some, and schedules nothing for too long with
        no step in flight."""
        if not self._requests.num_sequences and not self.scheduler.has_work:
            self._stuck_since = None
            return
        self._stuck_since = now if self._stuck_since is None else self._stuck_since
        if now - self._stuck_since > _PATIENCE:
            raise MinivllmError(
                f"scheduler={self.config.scheduler.name} has requests, no step is under way, and for {_PATIENCE:g} s "
                "schedule() has given none"
            )

    def _launch(self) -> bool:
        """Schedule and launch a step; False if none can run until a step in flight is committed."""
        planned = time.perf_counter()
        batch = self.scheduler.ask_for_drafts()
        if batch is None and (batch := self.scheduler.schedule()) is None:
            return False
        if self.config.enable_lora and len(batch.admitted_slots):
            batch = self._with_adapters(batch)
        # find out now whose rows these are: slots may be reassigned before the step is committed
        scored: list[Request] = []
        if batch.scored is not None:
            scored = [self._requests.of(seq) for _, seq in self._sequences(batch, batch.scored.rows)]
        guided: list[tuple[int, Guide]] = []
        if self._requests.guided:
            pairs = self._sequences(batch, np.nonzero(batch.samples)[0])
            guided = [(row, seq.guide) for row, seq in pairs if seq.guide is not None]
        if self.observer is not None:
            self.observer.scheduled(batch, planned)
        launched = time.perf_counter()
        handle = self.executor.launch(replace(batch, guided=True) if guided else batch)
        self._under_way.append(_UnderWay(batch, handle, scored, guided))
        if len(self._under_way) == 1:
            self._guide_first()
        self.stats.launch_time += time.perf_counter() - launched
        if self.observer is not None:
            self.observer.launched(batch)
        return True

    def _with_adapters(self, batch: Batch) -> Batch:
        """With the adapters of the sequences that start, if any has one."""
        begun = [self.scheduler.sequences[slot] for slot in batch.admitted_slots.tolist()]
        places = [0 if seq is None or seq.adapter is None else seq.adapter.place for seq in begun]
        return replace(batch, admitted_adapters=np.array(places, dtype=np.int32)) if any(places) else batch

    def _sequences(self, batch: Batch, rows: np.ndarray) -> list[tuple[int, Sequence]]:
        """The sequences in these rows of the batch just scheduled, each with its row."""
        found = [self.scheduler.sequences[slot] for slot in batch.slots[rows].tolist()]
        return [(row, seq) for row, seq in zip(rows.tolist(), found, strict=True) if seq is not None]

    def _guide_first(self) -> None:
        """Let the oldest step in flight sample if it waits for masks: all earlier tokens are known now."""
        if self._under_way and (guided := self._under_way[0].guided):
            self._under_way[0].guided = []
            self.executor.guide(self._admission.guides.masks(self._under_way[0].batch, guided))

    def _may_hold(self) -> bool:
        """Whether outputs other than first and last ones may wait: the caller wants it, and the step in flight has one
        token a row, so the wait is short."""
        if not self.hold_outputs or not self._under_way:
            return False
        batch = self._under_way[0].batch
        return batch.num_tokens == len(batch.slots)

    # ------------------------------------------------------------------ LoRA adapters

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter ahead of the requests that have it. Returns True. An adapter may have to leave later, as
        another needs its place, and is then loaded again by the next request that has it.

        Raises:
            RequestError: it cannot be used, or has no place (BusyError), or the engine sleeps; it runs on as it was.
            EngineDeadError: as in ``step``.
        """
        self.check_health()
        self._sleeping.refuse_requests()
        self._adapter(lora_request, again=getattr(lora_request, "load_inplace", False))
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter, so that its ``lora_int_id`` may be another's. Returns whether it was loaded. Raises
        RequestError if an unfinished request has it."""
        return self._adapters.remove(lora_id)

    def fitting_loras(self, lora_requests: Iterable[LoRARequest]) -> set[int]:
        """The ``lora_int_id`` of those whose requests may be added now: unfinished ones leave others no place."""
        return self._adapters.fitting(lora_requests)

    def list_loras(self) -> set[int]:
        """The ``lora_int_id`` of each adapter that is loaded."""
        return self._adapters.ids

    def _adapter(self, request: LoRARequest, *, again: bool = False) -> LoadedAdapter:
        """A request's adapter, loaded unless it is, or ``again``. Raises RequestError."""
        if (its := self._adapters.find(request)) is not None and not again:
            return its
        place, folder = self._adapters.make_room(request)
        with self._telling_ranks("an adapter is being loaded", "make a new engine: loading an adapter failed"):
            self.executor.load_adapter(place, folder)
            return self._adapters.enter(request, place)

    def _find_adapter(self, request: LoRARequest) -> Path:
        from minivllm.assemble import find_adapter

        return find_adapter(self.config, self.model_config, request.path)

    # ------------------------------------------------------------------ life and death

    def describe(self) -> dict[str, Any]:
        """What is running: ``model``, ``device``, ``attention``, ``dtype``, ``weights``, ``num_blocks`` …"""
        runs = self.executor.describe()
        about = {
            "weights": f"{runs['dtype']} weights",  # unless the executor says more
            "model": self.config.model.path or self.config.model.name,
            "num_blocks": self.num_blocks,
            "block_size": self.config.cache.block_size,
            "max_model_len": self.max_model_len,
            "scheduler": self.config.scheduler.name,
            "tp": self.config.tp,
        }
        return about | runs

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes; running requests keep their blocks."""
        self.scheduler.blocks.reset_prefix_cache()

    def reload_weights(
        self, weights_path: str | Path | None = None, weights_iterator: Iterable[tuple[str, Tensor]] | None = None
    ) -> None:
        """Replace the weights in place, and forget what was computed with the former ones; not while requests run.

        ``weights_path``: a checkpoint's folder, which must describe the model that runs. ``weights_iterator``: all
        tensors of one, by name, on any device; only for executors whose rank runs in this process. With neither, the
        engine's own checkpoint is read again.

        Raises:
            RequestError, CheckpointError: refused before anything was written; the engine runs on as it was.
            EngineDeadError: it failed later, so that weights may be mixed: make a new engine.
        """
        self.check_health()
        self._refuse_under_requests("weights cannot be replaced")
        self._sleeping.refuse_weights()
        weights = self._find_weights(weights_path, weights_iterator)
        failed = "some weights may be old and some new, make a new engine: loading failed"
        with self._between_steps("its weights are being replaced", failed):
            self.executor.reload_weights(weights)
            self._sleeping.weights_lost = False
            self._adapters.clear()  # they belonged to the former weights: they are read again
            self.reset_prefix_cache()

    def check_weights(self, weights_path: str | Path | None = None) -> None:
        """Raise what ``reload_weights`` of that folder would refuse, whether requests run or not.

        Raises:
            RequestError, CheckpointError: as there.
        """
        self._find_weights(weights_path)

    def _find_weights(self, path: Any, iterator: Any = None) -> Path | Iterable[tuple[str, Tensor]] | None:
        from minivllm.assemble import find_weights

        return find_weights(self.config, self.model_config, path, iterator)

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the weights and the cache back, until ``wake_up``; not while requests run. An engine that
        sleeps takes no requests, and has no cached prefixes afterwards.

        ``level``: 1 keeps the weights in the host's memory; 2 gives them up, so that others have to be loaded
        (``reload_weights``) once they are awake. What sleeps already is left as it is.

        Raises:
            RequestError: refused, as the engine was made without ``enable_sleep_mode``; it runs on as it was.
            EngineDeadError: it failed: make a new engine.
        """
        self.check_health()
        self.check_sleep(level)
        self._refuse_under_requests("the engine cannot sleep")
        with self._between_steps("it is falling asleep", "make a new engine: falling asleep failed"):
            self.executor.sleep(level)
            self._sleeping.begun(level)
            self.reset_prefix_cache()

    def check_sleep(self, level: int = 1) -> None:
        """Raise what ``sleep`` would refuse, whether requests run or not.

        Raises:
            RequestError: as there.
        """
        checked_level(level)
        if not self.config.enable_sleep_mode:
            raise RequestError("sleep: the engine was made without it; type enable_sleep_mode=true (in Python: True)")

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Have the memory again that ``sleep`` gave back. ``tags``: some of ``weights`` and ``kv_cache``, as where
        weights are loaded before there is room for the cache; None: all. What is awake stays as it is.

        Raises:
            RequestError: there is no room for it, in one process; what sleeps sleeps on.
            EngineDeadError: as ``sleep``.
        """
        self.check_health()
        asleep = [tag for tag in checked_tags(tags) if tag in self._sleeping.tags]
        for tag in asleep:
            with self._between_steps("it is waking up", "make a new engine: waking up failed"):
                try:
                    self.executor.wake_up([tag])
                except RequestError as error:
                    raise RequestError(f"{error}; free memory and call wake_up again") from error
                self._sleeping.tags.remove(tag)

    def is_sleeping(self) -> bool:
        """Whether some of its memory is given back."""
        return bool(self._sleeping.tags)

    @property
    def takes_requests(self) -> bool:
        """False while it sleeps, and until other weights are loaded if it gave its own up."""
        return self._sleeping.takes_requests

    def _refuse_under_requests(self, what: str) -> None:
        if self._requests:
            raise RequestError(
                f"{what} under {len(self._requests)} unfinished requests; step until they finish, or abort them"
            )

    @contextmanager
    def _between_steps(self, doing: str, failed: str) -> Iterator[None]:
        """For what concerns every rank. If it fails, with no RequestError, the engine is dead: ``failed`` says why.
        Ctrl-C is raised at its end: what is to be noted has to be noted within."""
        while self._under_way:  # rows of sequences that have ended
            self._uninterruptedly(self._step)
        with self._telling_ranks(doing, failed):
            yield

    @contextmanager
    def _telling_ranks(self, doing: str, failed: str) -> Iterator[None]:
        """``_between_steps``, but steps may be in flight."""
        with self._uninterrupted:
            self._dead = EngineDeadError(doing)  # for who calls meanwhile, as an iterator of weights may
            try:
                yield
            except RequestError:
                self._dead = None
                raise
            except BaseException as error:
                why = error if isinstance(error, MinivllmError) else described(error)
                self._dead = EngineDeadError(f"{failed}: {why}")
                if not isinstance(error, Exception | SystemExit):
                    raise
                raise self._dead from error
            self._dead = None

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine was shut down, or if it or one of its ranks is dead."""
        if self._closed:
            raise was_shut_down()
        if self._dead is not None:
            why = str(self._dead) or type(self._dead).__name__
            raise EngineDeadError(f"the engine stopped earlier: {why}") from self._dead
        try:
            self.executor.check_health()
        except Exception as error:
            self._dead = blamed(error, "executor", self.config.executor.name, self.executor, "check_health")
            if self._dead is error:
                raise
            raise self._dead from error

    def shutdown(self) -> None:
        """Drop all requests and release processes and memory; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._under_way.clear()
        self._requests.clear()
        self._unreturned.clear()
        with calling("executor", self.config.executor.name, self.executor, "shutdown"):
            self.executor.shutdown()

    def get_tokenizer(self) -> Any:
        """The checkpoint's transformers tokenizer, as in vLLM."""
        return self.tokenizer.hf_tokenizer

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_method(self, name)

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()
