"""Requests in, outputs out: the loop that keeps two steps under way. It is handed all its parts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from minivllm.bytecode import kept_bytecode
from minivllm.core.admission import Admission
from minivllm.core.garbage import collect_engines, uncollected
from minivllm.core.guides import Guide
from minivllm.core.interrupts import Uninterrupted
from minivllm.core.outputs import RequestOutput
from minivllm.core.requests import Completion, Prompt, Request
from minivllm.core.sampling_params import RequestOutputKind, SamplingParams
from minivllm.core.sequence import FinishReason, Sequence
from minivllm.errors import EngineDeadError, MinivllmError, RequestError, blamed, calling, place_of
from minivllm.missing import refuse

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.batch import Batch, Scored
    from minivllm.core.interfaces import Committed, Executor, Logprobs, Sampler, Scheduler, StepHandle, StepObserver
    from minivllm.core.model_config import ModelConfig
    from minivllm.models.tokenizer import Tokenizer

_T = TypeVar("_T")
# vLLM's arguments of ``add_request`` that are not supported; None asks for what happens anyway.
_NEUTRAL = dict.fromkeys(("arrival_time", "lora_request", "tokenization_kwargs", "trace_headers"))
_PATIENCE = 10.0  # seconds that a scheduler may have work and give no step


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine started. Times in seconds."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    host_time: float = 0.0  # of steps, less the time they waited for the device
    wait_time: float = 0.0
    launch_time: float = 0.0  # of host_time: in Executor.launch (on a CPU, the model itself)


@dataclass(slots=True)
class _UnderWay:
    """A step that is launched and not taken in."""

    batch: Batch
    handle: StepHandle
    scored: list[Request]  # of ``Batch.scored``
    guided: list[tuple[int, Guide]]  # of rows that it samples for when all that came before is known


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
        self.observer: StepObserver | None = None  # told of each step while somebody looks
        # While true, what requests that have begun and go on have to say may wait for the next step: a caller that is
        # busy with many outputs gets fewer and longer ones. Any thread may set it.
        self.hold_outputs = False
        self._touched: dict[str, Request] = {}  # those with something to say
        self._depth = 2 if config.scheduler.async_scheduling else 1
        self._under_way: deque[_UnderWay] = deque()
        self._unscored: set[Request] = set()  # they wait for their prompts' log-probabilities before they say anything
        self._guided: set[Request] = set()  # those whose sequences have guides
        self._requests: dict[str, Request] = {}
        self._by_sequence: dict[str, tuple[Request, Completion]] = {}
        self._watched = np.zeros(config.scheduler.max_num_seqs, dtype=bool)  # slots whose tokens are read each step
        self.num_requests_added = 0
        self._prompt_tokens_since_step = 0
        self._dead: BaseException | None = None
        self._stuck_since: float | None = None
        self._untold: list[RequestOutput] = []  # of a step that a Ctrl-C ended
        self._uninterrupted = Uninterrupted()
        self._closed = False

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLMEngine:
        """Load and start everything that ``config`` names."""
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
        **others: Any,
    ) -> None:
        """Queue a request.

        ``prompt``: text, token ids, or vLLM's mapping with ``prompt`` or ``prompt_token_ids`` (and ``cache_salt``).
        Requests with different ``cache_salt`` share no cached prefix. A smaller ``priority`` is served earlier, by
        schedulers that have priorities; with others only 0 is allowed. ``number``: its place among all
        requests, from which it draws if it names no seed; ``num_requests_added`` unless it is given. vLLM's other
        arguments are taken where they ask for nothing.

        Where nothing is under way and the requests since the last ``step`` fill one, it is launched here: the device
        need not wait for the requests behind.

        Raises:
            RequestError: it can never run; the engine is as before.
            EngineDeadError: as ``step``.
        """
        self.check_health()
        if others:
            refuse(others, _NEUTRAL)
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r} is not a string")
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is already waiting or running; choose another")
        number = self.num_requests_added if number is None else number
        request = self._admission.request(request_id, prompt, params, cache_salt, priority, number)
        with self._uninterrupted:  # or the scheduler would know a sequence that nobody can abort
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
        for completion in request.completions:
            self._by_sequence[completion.seq.request_id] = request, completion
        self.num_requests_added += 1
        self._requests[request.request_id] = request
        if not request.scored:
            self._unscored.add(request)
        if request.params.guided:
            self._guided.add(request)
        self.stats.prompt_tokens += len(request.prompt_token_ids)
        self._prompt_tokens_since_step += len(request.prompt_token_ids)

    def abort(self, request_id: str | list[str]) -> None:
        """End requests wherever they are; ids that are not known (any more) are passed over.

        Raises:
            EngineDeadError: a scheduler's ``abort`` failed.
        """
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        self._untold = [output for output in self._untold if output.request_id not in names]
        self._uninterruptedly(partial(self._abort, names), "an abort")

    def _abort(self, names: list[str]) -> None:
        for name in names:
            request = self._requests.pop(name, None)
            self._touched.pop(name, None)
            if request is None:
                continue
            self._unscored.discard(request)
            self._guided.discard(request)
            for completion in request.completions:
                if completion.finish_reason is None:  # else its name may be another request's by now
                    self.scheduler.abort(completion.seq.request_id)
                    self._by_sequence.pop(completion.seq.request_id, None)

    abort_request = abort  # vLLM's name

    def has_request(self, request_id: str) -> bool:
        """Whether a request of that name waits or runs."""
        return request_id in self._requests

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests or self._untold)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def get_num_unfinished_requests(self) -> int:
        """vLLM's name for ``num_unfinished_requests``."""
        return self.num_unfinished_requests

    @property
    def num_steps_under_way(self) -> int:
        """Steps that are launched and not taken in."""
        return len(self._under_way)

    @property
    def decodes_next(self) -> bool:
        """Whether the next step is of decodes alone, unless a request comes: none waits, and no prompt is left over."""
        if not self._under_way:
            return False
        batch = self._under_way[-1].batch
        running = sum(self.scheduler.sequences[slot] is not None for slot in batch.slots.tolist())
        return bool(batch.samples.all()) and len(self._by_sequence) == running

    # ------------------------------------------------------------------ a step

    def step(self) -> list[RequestOutput]:
        """Launch the next step, take in the oldest under way; returns the outputs of requests with new tokens.

        A Ctrl-C is raised at the end of the step, whose outputs the next call returns.

        Raises:
            EngineDeadError: a rank failed; every request of this engine is lost.
        """
        self.check_health()
        self._uninterruptedly(self._step)
        outputs, self._untold = self._untold, []
        return outputs

    def _uninterruptedly(self, act: Callable[[], _T], what: str = "a step") -> _T:
        """Nobody knows how far an act came that failed: the engine is dead then."""
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
        for slot in batch.admitted_slots.tolist():  # before commit: a request may end with its first token
            self._watch(slot)
        committed = self.scheduler.commit(batch, result.token_ids)
        if batch.scored is not None:
            self._take_scores(batch, batch.scored, oldest.scored, result.prompt_logprobs)
        self._untold += self._take_in(committed, result.logprobs)
        self._guide_first()
        if self.observer is not None:
            self.observer.committed(batch, committed, done)
        self.stats.steps += 1
        self.stats.wait_time += done - waited
        self.stats.host_time += time.perf_counter() - began - (done - waited)

    def _check_progress(self, now: float) -> None:
        """Of a scheduler that has work and gives no step, although none is under way. Raises MinivllmError."""
        if not self.scheduler.has_work:
            self._stuck_since = None
            return
        self._stuck_since = now if self._stuck_since is None else self._stuck_since
        if now - self._stuck_since > _PATIENCE:
            raise MinivllmError(
                f"scheduler={self.config.scheduler.name} has work, no step is under way, and for {_PATIENCE:g} s "
                "schedule() has given none"
            )

    def _launch(self) -> bool:
        """Schedule and launch a step; False if none can run before one under way is taken in."""
        planned = time.perf_counter()
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        # whose rows these are, while it is known: slots may change hands until the step comes back
        scored: list[Request] = []
        if batch.scored is not None:
            scored = [self._by_sequence[seq.request_id][0] for _, seq in self._sequences(batch, batch.scored.rows)]
        guided: list[tuple[int, Guide]] = []
        if self._guided:
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

    def _sequences(self, batch: Batch, rows: np.ndarray) -> list[tuple[int, Sequence]]:
        """Those that run in these rows of a step that was just scheduled, each with its row."""
        found = [self.scheduler.sequences[slot] for slot in batch.slots[rows].tolist()]
        return [(row, seq) for row, seq in zip(rows.tolist(), found, strict=True) if seq is not None]

    def _guide_first(self) -> None:
        """Let the oldest step under way sample, if it waits for that: all that came before it is known now."""
        if self._under_way and (guided := self._under_way[0].guided):
            rows, batch = [row for row, _ in guided], self._under_way[0].batch
            self._under_way[0].guided = []
            masks = self._admission.guides.masks(
                batch.slots[rows], batch.generations[rows], [guide for _, guide in guided]
            )
            self.executor.guide(masks)

    def _take_scores(self, batch: Batch, scored: Scored, requests: list[Request], found: Logprobs | None) -> None:
        """Hand each row's to its request, which may be gone. Raises MinivllmError: there are none."""
        if found is None:
            name = self.config.executor.name
            raise MinivllmError(f"executor={name} returned a step without the prompt_logprobs that it was asked for")
        values = found.lists()
        begins = batch.num_computed[scored.rows].tolist()
        for request, begin, count in zip(requests, begins, scored.lens.tolist(), strict=True):
            request.add_prompt_logprobs(begin + 1, list(islice(values, count)))
            if request.scored:
                self._unscored.discard(request)

    def _take_in(self, committed: Committed, logprobs: Logprobs | None) -> list[RequestOutput]:
        self.stats.output_tokens += len(committed.slots)
        ended = self._read_tokens(committed, logprobs) if np.count_nonzero(self._watched) else {}
        for seq, reason in committed.finished:
            request, completion = self._by_sequence.pop(seq.request_id)
            if not request.needs_tokens:  # nobody watched it grow: it has no stop strings
                completion.token_ids = seq.output_token_ids
            if seq.guide is not None and (seq.guide.failed or seq.guide.cut_by(int(seq.known[-1]))):
                reason = FinishReason.LENGTH
            completion.end(reason)
            self._account(completion)
            self._touched[request.request_id] = ended[request.request_id] = request
        ended = {name: request for name, request in ended.items() if request.finished}
        for name, request in ended.items():
            self._requests.pop(name, None)
            self._guided.discard(request)
            if request in self._unscored:
                scheduler = self.config.scheduler.name
                raise MinivllmError(f"scheduler={scheduler} left out log-probabilities of the prompt of {name!r}")
        telling, self._touched, hold = self._touched, {}, self._may_hold()
        if hold or self._unscored:  # of several completions one may be ahead of that which computes the prompt
            self._touched = {
                name: request
                for name, request in telling.items()
                if name not in ended and ((hold and request.told) or request in self._unscored)
            }
            telling = {name: request for name, request in telling.items() if name not in self._touched}
        return [
            request.output()
            for name, request in telling.items()
            if name in ended or request.params.output_kind is not RequestOutputKind.FINAL_ONLY
        ]

    def _may_hold(self) -> bool:
        """Whether all but beginnings and ends may be said later: it is wanted, and later is soon, as the step under way
        is one of decodes alone."""
        return self.hold_outputs and bool(self._under_way) and not len(self._under_way[0].batch.token_ids)

    def _read_tokens(self, committed: Committed, logprobs: Logprobs | None) -> dict[str, Request]:
        """Hand each watched slot's new token to its completion, and end those whose stop string is complete; returns
        the requests of these."""
        stopped: dict[str, Request] = {}
        finished = {seq.request_id for seq, _ in committed.finished}
        of_row: dict[int, tuple[float, int, list[int], list[float]]] = {}
        if logprobs is not None:
            of_row = dict(zip(logprobs.rows.tolist(), logprobs.lists(), strict=True))
        ended = {seq.slot: seq for seq, _ in committed.finished}
        watched = self._watched[committed.slots]
        columns = (committed.slots[watched], committed.token_ids[watched], committed.rows[watched])
        for slot, token, row in zip(*(column.tolist() for column in columns), strict=True):
            seq = ended.get(slot) or self.scheduler.sequences[slot]
            if seq is None:
                raise MinivllmError(
                    f"scheduler={self.config.scheduler.name} committed a token in slot {slot}, where no sequence is: "
                    "one that runs is in sequences, and one that has just ended keeps its slot"
                )
            request, completion = self._by_sequence[seq.request_id]
            self._touched[request.request_id] = request
            if completion.logprobs is not None and (values := of_row.get(row)) is not None:
                completion.add_logprobs(token, *values)
            stopped_here = completion.add(token)
            if seq.request_id in finished:
                continue
            if stopped_here or (seq.guide is not None and _ended_by(seq.guide, completion, token)):
                self.scheduler.finish(seq)
                del self._by_sequence[seq.request_id]
                self._account(completion)
                stopped[request.request_id] = request
        return stopped

    def _watch(self, slot: int) -> None:
        seq = self.scheduler.sequences[slot]
        pair = self._by_sequence.get(seq.request_id) if seq is not None else None
        self._watched[slot] = pair is not None and pair[0].needs_tokens

    def _account(self, completion: Completion) -> None:
        self.stats.cached_tokens += completion.seq.num_cached_tokens
        self.stats.preemptions += completion.seq.num_preemptions

    # ------------------------------------------------------------------ life and death

    def describe(self) -> dict[str, Any]:
        """What runs where: ``model``, ``device``, ``attention``, ``dtype``, ``num_blocks``, ``block_size`` …"""
        about = {
            "model": self.config.model.path or self.config.model.name,
            "num_blocks": self.num_blocks,
            "block_size": self.config.cache.block_size,
            "max_model_len": self.max_model_len,
            "scheduler": self.config.scheduler.name,
            "tp": self.config.tp,
        }
        return about | self.executor.describe()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; running requests keep what they hold."""
        self.scheduler.blocks.reset_prefix_cache()

    def check_health(self) -> None:
        """Raises EngineDeadError: the engine was shut down, or it or one of its ranks is dead."""
        if self._closed:
            raise EngineDeadError("the engine was shut down; make a new one")
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
        """Drop all requests and give back processes and memory; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._under_way.clear()
        self._requests.clear()
        self._touched.clear()
        self._by_sequence.clear()
        self._unscored.clear()
        self._guided.clear()
        with calling("executor", self.config.executor.name, self.executor, "shutdown"):
            self.executor.shutdown()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()


def _ended_by(guide: Guide, completion: Completion, token: int) -> bool:
    """Tell a guide of its completion's newest token; returns whether that was the last one."""
    guide.take(token)
    if not guide.failed and not guide.ended:
        return False
    completion.end(FinishReason.LENGTH if guide.failed else FinishReason.STOP)
    completion.stop_reason = None
    return True
