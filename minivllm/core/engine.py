"""Requests in, outputs out: the loop that keeps two steps under way. It is handed all its parts."""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from minivllm.bytecode import kept_bytecode
from minivllm.core.guides import Guide, Guides
from minivllm.core.interrupts import Uninterrupted
from minivllm.core.outputs import RequestOutput
from minivllm.core.requests import Completion, Request, TextPrompt, TokensPrompt, TokenTexts
from minivllm.core.sampling_params import RequestOutputKind, SamplingParams
from minivllm.core.sequence import FinishReason, Sequence
from minivllm.errors import EngineDeadError, MinivllmError, RequestError, place_of

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.batch import Batch, Scored
    from minivllm.core.interfaces import Committed, Executor, Logprobs, Sampler, Scheduler, StepHandle, StepObserver
    from minivllm.core.model_config import ModelConfig
    from minivllm.models.tokenizer import Tokenizer

Prompt = str | list[int] | dict[str, Any] | TextPrompt | TokensPrompt
_T = TypeVar("_T")
_PATIENCE = 10.0  # seconds that a scheduler may have work and give no step


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine started. Times in seconds."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    max_batch_size: int = 0
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
        self._token_texts = TokenTexts(tokenizer)
        self.stats = EngineStats()
        self.observer: StepObserver | None = None  # told of each step while somebody looks
        # While true, what requests that have begun and go on have to say may wait for the next step: a caller that is
        # busy with many outputs gets fewer and longer ones. Any thread may set it.
        self.hold_outputs = False
        self._touched: dict[str, Request] = {}  # those with something to say
        self._params = SamplingParams()  # a copy of the newest request's
        self._sampler_class = sampler_class
        self._depth = 2 if config.scheduler.async_scheduling else 1
        self._under_way: deque[_UnderWay] = deque()
        self._unscored: set[Request] = set()  # they wait for their prompts' log-probabilities before they say anything
        self._guided: set[Request] = set()  # those whose sequences have guides
        self._requests: dict[str, Request] = {}
        self._by_sequence: dict[str, tuple[Request, Completion]] = {}
        self._watched = np.zeros(config.scheduler.max_num_seqs, dtype=bool)  # slots whose tokens are read each step
        self.num_requests_added = 0
        self._prompt_tokens_since_step = 0
        ends = dict.fromkeys((*model_config.eos_token_ids, *tokenizer.eos_token_ids))
        self._eos = tuple(token for token in ends if 0 <= token < model_config.vocab_size)  # of others none is sampled
        self._guides = Guides(tokenizer, model_config.vocab_size, self._eos)
        self._dead: BaseException | None = None
        self._stuck_since: float | None = None
        self._uninterrupted = Uninterrupted()
        self._closed = False

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLMEngine:
        """Load and start everything that ``config`` names."""
        with kept_bytecode():
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
    ) -> None:
        """Queue a request.

        ``prompt``: text, token ids, or vLLM's mapping with ``prompt`` or ``prompt_token_ids`` (and ``cache_salt``).
        Requests with different ``cache_salt`` share no cached prefix. A smaller ``priority`` is served earlier, by
        schedulers that have priorities; with others only 0 is allowed. ``number``: its place among all
        requests, from which it draws if it names no seed; ``num_requests_added`` unless it is given.

        Where nothing is under way and the requests since the last ``step`` fill one, it is launched here: the device
        need not wait for the requests behind.

        Raises:
            RequestError: it can never run; the engine is as before.
            EngineDeadError: as ``step``.
        """
        self.check_health()
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters are SamplingParams(...), not {type(params).__name__}")
        if not _alike(params, self._params):
            self._params = params.clone()  # the caller may change theirs
        params = self._params
        self._check_for_sampler(params)
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r} is not a string")
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is already waiting or running; choose another")
        self._check_priority(priority)
        if params.prompt_logprobs is not None and not self.scheduler.scores_prompts:
            raise RequestError(
                f"prompt_logprobs={params.prompt_logprobs} is not supported by "
                f"scheduler={self.config.scheduler.name}; leave it out"
            )
        text, ids, tokens = self._tokens(prompt)
        if isinstance(prompt, dict):
            cache_salt = prompt.get("cache_salt", cache_salt)
        _check_salt(cache_salt)
        request = Request(request_id, text, ids, params)
        stop_ids = self._stop_ids(params)
        max_len = self._max_len(len(ids), params)
        guides = self._guides.of(params)  # a grammar may take long: behind what is refused at once
        number = self.num_requests_added if number is None else number
        added: list[Sequence] = []
        try:
            for index in range(params.n):
                name = request_id if params.n == 1 else f"{index}_{request_id}"
                seq = Sequence(
                    name, tokens, params, max_len=max_len, stop_ids=stop_ids, cache_salt=cache_salt, priority=priority,
                    prompt_logprobs=params.prompt_logprobs if index == 0 else None,
                )  # fmt: skip
                base = params.seed if params.seed is not None else self._seed_of(number)
                seq.sampler_row = self._sampler_class.encode(seq, base + index)
                seq.sampler_words = self._sampler_class.words(seq)
                seq.guide = guides[index]
                seq.tells_tokens = self._sampler_class.wants_tokens(seq)
                self.scheduler.add(seq)
                added.append(seq)
                completion = Completion(index, seq, self.tokenizer, self._eos, self._token_texts)
                request.completions.append(completion)
                self._by_sequence[name] = request, completion
        except BaseException:
            for seq in added:
                self.scheduler.abort(seq.request_id)
                self._by_sequence.pop(seq.request_id, None)
            raise
        self.num_requests_added += 1
        self._requests[request_id] = request
        if not request.scored:
            self._unscored.add(request)
        if params.guided:
            self._guided.add(request)
        self.stats.prompt_tokens += len(ids)
        self._prompt_tokens_since_step += len(ids)
        full = self._prompt_tokens_since_step >= self.config.scheduler.max_num_batched_tokens
        if full and not self._under_way and self._depth > 1 and not self.scheduler.uses_priority:
            began = time.perf_counter()
            self._uninterruptedly(self._launch)
            self.stats.host_time += time.perf_counter() - began

    def abort(self, request_id: str | list[str]) -> None:
        """End requests wherever they are; ids that are not known (any more) are passed over."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
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

    def has_request(self, request_id: str) -> bool:
        """Whether a request of that name waits or runs."""
        return request_id in self._requests

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

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
        """Launch the next step, take in the oldest under way; returns the requests that have something to say.

        Raises:
            EngineDeadError: a rank failed; every request of this engine is lost.
        """
        self.check_health()
        return self._uninterruptedly(self._step)

    def _uninterruptedly(self, act: Callable[[], _T]) -> _T:
        """Nobody knows how far an act came that failed: the engine is dead then."""
        with self._uninterrupted:
            try:
                return act()
            except Exception as error:
                self._dead = error
                if isinstance(error, MinivllmError):
                    raise
                why = f"{type(error).__name__}: {error}"
                raise EngineDeadError(f"a step failed: {why} ({place_of(error)})") from error
            except BaseException as error:  # a second Ctrl-C
                self._dead = error
                raise

    def _step(self) -> list[RequestOutput]:
        began, self._prompt_tokens_since_step = time.perf_counter(), 0
        while len(self._under_way) < self._depth and self._launch():
            pass
        if not self._under_way:
            self._check_progress(began)
            return []
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
        outputs = self._take_in(committed, result.logprobs)
        self._guide_first()
        if self.observer is not None:
            self.observer.committed(batch, committed, done)
        self.stats.steps += 1
        self.stats.wait_time += done - waited
        self.stats.host_time += time.perf_counter() - began - (done - waited)
        return outputs

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
        self.stats.max_batch_size = max(self.stats.max_batch_size, len(batch.slots))
        scored: list[Request] = []
        if batch.scored is not None:  # slots may change hands until these come back
            seqs = [self.scheduler.sequences[slot] for slot in batch.slots[batch.scored.rows].tolist()]
            scored = [self._by_sequence[seq.request_id][0] for seq in seqs if seq is not None]
        guided: list[tuple[int, Guide]] = []
        if self._guided:
            rows = np.nonzero(batch.samples)[0]
            seqs = [self.scheduler.sequences[slot] for slot in batch.slots[rows].tolist()]
            pairs = [(row, seq.guide) for row, seq in zip(rows.tolist(), seqs, strict=True) if seq is not None]
            guided = [(row, guide) for row, guide in pairs if guide is not None]
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

    def _guide_first(self) -> None:
        """Let the oldest step under way sample, if it waits for that: all that came before it is known now."""
        if self._under_way and (guided := self._under_way[0].guided):
            rows, batch = [row for row, _ in guided], self._under_way[0].batch
            self._under_way[0].guided = []
            masks = self._guides.masks(batch.slots[rows], batch.generations[rows], [guide for _, guide in guided])
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
            if not request.needs_tokens:
                completion.add_all(seq.output_token_ids)
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
        telling, self._touched = self._touched, {}
        if self._may_hold():  # all but beginnings and ends
            self._touched = {name: request for name, request in telling.items() if request.told and name not in ended}
            telling = {name: request for name, request in telling.items() if name not in self._touched}
        if self._unscored:  # of several completions one may be ahead of that which computes the prompt
            self._touched |= {name: request for name, request in telling.items() if request in self._unscored}
            telling = {name: request for name, request in telling.items() if name not in self._touched}
        return [
            request.output()
            for name, request in telling.items()
            if name in ended or request.params.output_kind is not RequestOutputKind.FINAL_ONLY
        ]

    def _may_hold(self) -> bool:
        """Whether to say it later is wanted, and soon: the step under way is one of decodes alone."""
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
                continue
            request, completion = self._by_sequence[seq.request_id]
            self._touched[request.request_id] = request
            if completion.logprobs is not None and (values := of_row.get(row)) is not None:
                completion.add_logprobs(token, *values)
            stopped_here = completion.add([token])
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

    # ------------------------------------------------------------------ what a prompt is

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int], np.ndarray]:
        """The text if there is one, the token ids, and these as an array (t,), of whatever kind of whole numbers."""
        text: str | None = None
        ids: Any = prompt
        if isinstance(prompt, dict):
            if unknown := set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}:
                raise RequestError(
                    f"a prompt's mapping has prompt, prompt_token_ids and cache_salt, not {', '.join(sorted(unknown))}"
                )
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            ids = text if ids is None else ids
        if isinstance(ids, str):
            text, ids = ids, self.tokenizer.encode(ids)
        if not isinstance(text, str | None):
            raise RequestError(f"prompt={text!r} is not text; token ids are prompt_token_ids")
        if not isinstance(ids, list | tuple | np.ndarray) or getattr(ids, "ndim", 1) == 0:
            raise RequestError(f"a prompt is text or a list of token ids, not {type(ids).__name__}")
        try:
            tokens = _array_of(ids) if len(ids) else np.empty(0, dtype=np.int64)
        except ValueError:  # lists of different lengths
            tokens = np.empty((0, 0))
        vocab = self.model_config.vocab_size
        if tokens.dtype == object and (large := [t for t in ids if type(t) is int and not 0 <= t < vocab]):
            raise RequestError(f"token id {large[0]} is outside the vocabulary: 0 to {vocab - 1}")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise RequestError("a prompt given as token ids is one flat list of whole numbers")
        if not len(tokens):
            raise RequestError("the prompt is empty; give at least one token")
        wrong = np.nonzero((tokens < 0) | (tokens >= vocab))[0]
        if len(wrong):
            raise RequestError(
                f"token id {tokens[wrong[0]]} at place {wrong[0]} is outside the vocabulary: 0 to {vocab - 1}"
            )
        return text, list(ids) if type(ids[0]) is int and isinstance(ids, list) else tokens.tolist(), tokens

    def _check_priority(self, priority: Any) -> None:
        if isinstance(priority, bool) or not isinstance(priority, Integral):
            raise RequestError(f"priority={priority!r} is not a whole number")
        if priority and not self.scheduler.uses_priority:
            raise RequestError(
                f"priority={priority} is not supported by scheduler={self.config.scheduler.name}; leave it 0, or use a "
                "scheduler that has priorities"
            )

    def _check_for_sampler(self, params: SamplingParams) -> None:
        named = {"logit_bias": params.logit_bias, "allowed_token_ids": params.allowed_token_ids}
        for name, tokens in named.items():
            if tokens and not self._sampler_class.takes_biases:
                raise RequestError(f"sampler={self.config.sampler.name} takes no {name}; leave it out")
            self._check_vocabulary(name, tokens or ())
        name = "bad_words" if params.structured_outputs is None else "structured_outputs"
        if params.guided and not self._sampler_class.takes_masks:
            raise RequestError(f"sampler={self.config.sampler.name} takes no {name}; leave it out")
        if params.guided and not self.executor.takes_masks:
            raise RequestError(f"executor={self.config.executor.name} takes no {name}; leave it out")
        taken = self._sampler_class.extra_args
        if unknown := set(params.extra_args or ()) - taken:
            raise RequestError(
                f"extra_args has {', '.join(sorted(unknown))}, and sampler={self.config.sampler.name} takes "
                f"{', '.join(sorted(taken)) or 'none'}"
            )

    def _max_len(self, prompt_len: int, params: SamplingParams) -> int:
        if prompt_len >= self.max_model_len:
            raise RequestError(
                f"the prompt has {prompt_len} tokens, and max_model_len={self.max_model_len} leaves no room for an "
                "answer; shorten the prompt or raise max_model_len"
            )
        if params.max_tokens is not None:
            return prompt_len + params.max_tokens
        whole_cache = self.num_blocks * self.config.cache.block_size + 1
        longest = max(min(self.max_model_len, whole_cache), prompt_len + 1)
        if params.min_tokens > longest - prompt_len:
            raise RequestError(
                f"min_tokens={params.min_tokens} with a {prompt_len}-token prompt exceeds the {longest} tokens that "
                "max_model_len and the cache leave for one request; lower min_tokens"
            )
        return longest

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        self._check_vocabulary("stop_token_ids", params.stop_token_ids or ())
        own = () if params.ignore_eos else self._eos
        return tuple(dict.fromkeys((*own, *(params.stop_token_ids or ()))))

    def _check_vocabulary(self, name: str, tokens: Iterable[int]) -> None:
        vocab = self.model_config.vocab_size
        for token in tokens:
            if token >= vocab:
                raise RequestError(f"{name}: {token} is outside the vocabulary: 0 to {vocab - 1}")

    def _seed_of(self, number: int) -> int:
        """A seed for a request that names none: the engine's seed and the request's number, mixed (splitmix64)."""
        x = (self.config.seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        return (x ^ (x >> 31)) >> 1

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
            self._dead = error
            raise

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


def _alike(one: SamplingParams, other: SamplingParams) -> bool:
    """As many requests are. False where that cannot be told, as of arrays."""
    try:
        return one == other
    except (ValueError, RuntimeError):
        return False


def _check_salt(salt: Any) -> None:
    """It is hashed in a step, which must not fail."""
    if salt is None:
        return
    if salt == "":
        raise RequestError("cache_salt is empty; leave it out to share cached prefixes with those that have none")
    try:
        salt.encode()
    except (AttributeError, UnicodeEncodeError):
        raise RequestError(f"cache_salt={salt!r} is not Unicode text") from None


def _array_of(ids: Any) -> np.ndarray:
    """``np.asarray``, of a list of Python's own integers in a third of the time: 15 µs for 1,024."""
    if type(ids) is list and type(ids[0]) is int:
        try:
            return np.frombuffer(struct.pack(f"{len(ids)}q", *ids), dtype=np.int64)
        except struct.error:  # something else is among them, or a number too large
            pass
    return np.asarray(ids)
