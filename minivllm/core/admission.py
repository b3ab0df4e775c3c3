"""Request admission: each request is validated and turned into sequences, or refused before any of it runs."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.grammars import text_of
from minivllm.core.guides import Guides, masks_per_slot
from minivllm.core.requests import COMPLETION, Completion, Prompt, Request, TokenTexts
from minivllm.core.sampler_overrides import finds_logprobs
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence
from minivllm.errors import PluginError, RequestError, blamed, is_text, named, no_room, of_whole_request, shown

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.interfaces import Executor, Sampler, Scheduler
    from minivllm.core.model_config import ModelConfig
    from minivllm.models.tokenizer import Tokenizer

_KEYS = frozenset(("prompt", "prompt_token_ids", "cache_salt"))
# Other keys of vLLM's prompts; accepted only if empty.
_NOT_HERE = frozenset(("mm_processor_kwargs", "multi_modal_data", "multi_modal_uuids", "prompt_embeds"))


class Admission:
    """Makes requests from prompts and parameters. Raises RequestError, with the numbers, for what can never run."""

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
        self.config, self.max_model_len, self.num_blocks = config, max_model_len, num_blocks
        self.tokenizer, self.scheduler, self.executor = tokenizer, scheduler, executor
        self.sampler_class = sampler_class
        self._vocab = model_config.vocab_size
        ends = dict.fromkeys((*model_config.eos_token_ids, *tokenizer.eos_token_ids))
        self._eos = tuple(token for token in ends if 0 <= token < self._vocab)  # others are never sampled
        self.guides = Guides(tokenizer, self._vocab, self._eos, masks_per_slot(sampler_class, config.scheduler))
        self._token_texts = TokenTexts(tokenizer)
        self._params = SamplingParams()  # a copy of the newest request's

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        cache_salt: str | None,
        priority: int,
        number: int,
    ) -> Request:
        """A request with its completions; their sequences are not yet added to the scheduler. ``number``: seeds the
        request if it has no seed. Other arguments as in ``LLMEngine.add_request``.

        Raises RequestError.
        """
        with of_whole_request():
            params = self._own(params if params is not None else SamplingParams())
            self._check_for_sampler(params)
            self._check_for_scheduler(params, priority)
            _check_salt(cache_salt)
            stops = self._stops(params)
        text, ids, tokens = self._tokens(prompt)
        if isinstance(prompt, Mapping) and "cache_salt" in prompt:
            cache_salt = prompt["cache_salt"]
            _check_salt(cache_salt)
        request = Request(request_id, text, ids, params)
        max_len = self._max_len(len(ids), params)
        held_ids = tuple(dict.fromkeys((*self._eos, *stops)))  # also with ignore_eos, as in vLLM
        stop_ids = stops if params.ignore_eos else held_ids
        with of_whole_request():
            guides = self.guides.of(params)  # last, as compiling a grammar may take long
        seed = params.seed if params.seed is not None else self._seed_of(number)
        for index, guide in enumerate(guides):
            seq = Sequence(
                request_id if params.n == 1 else f"{request_id}{COMPLETION}{index}", tokens, params, max_len=max_len,
                stop_ids=stop_ids, held_ids=held_ids, cache_salt=cache_salt, priority=priority,
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            )  # fmt: skip
            seq.guide = guide
            self._encode(seq, seed + index)
            request.completions.append(Completion(index, seq, self.tokenizer, self._token_texts))
        return request

    def _encode(self, seq: Sequence, seed: int) -> None:
        """Fill in the sequence's sampler fields. Raises RequestError; PluginError if a plugin's sampler is broken."""
        sampler, name, method = self.sampler_class, self.config.sampler.name, "encode"
        try:
            with of_whole_request():
                seq.sampler_row = row = sampler.encode(seq, seed)
            if getattr(row, "dtype", None) != sampler.row or row.shape:
                who = named("sampler", name, sampler)
                raise PluginError(f"{who}: encode returned {shown(row)}, not one item of its row")
            method = "words"
            seq.sampler_words = sampler.words(seq)
            method = "wants_tokens"
            seq.tells_tokens = sampler.wants_tokens(seq)
        except Exception as error:
            if (new := blamed(error, "sampler", name, sampler, method)) is error:
                raise
            raise new from error

    def _own(self, params: SamplingParams) -> SamplingParams:
        """A copy, as the caller may modify theirs; successive requests with equal parameters share one."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters are SamplingParams(...), not {type(params).__name__}")
        if not _alike(params, self._params):
            self._params = params.clone()
        return self._params

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int], np.ndarray]:
        """The text if there is one, the token ids, and the ids as an array (t,) of any integer type."""
        text: str | None = None
        ids: Any = prompt
        if isinstance(prompt, Mapping):
            _check_keys(prompt)
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if isinstance(ids, str):
                raise RequestError("prompt_token_ids is a str, not a list; text is prompt")
            if text is None and ids is None:
                raise RequestError(
                    "a prompt is text or a list of token ids, or a mapping with prompt or prompt_token_ids"
                )
            ids = text if ids is None else ids
        if isinstance(ids, str):
            text, ids = ids, self.tokenizer.encode(ids)
        elif isinstance(ids, Mapping):
            raise RequestError(f"prompt_token_ids is a {type(ids).__name__}, not a list; {_its_ids(ids)}")
        elif hasattr(ids, "tolist") and not isinstance(ids, np.ndarray) and getattr(ids, "ndim", None) != 0:
            ids = ids.tolist()  # tensors
        if not isinstance(text, str | None):
            raise RequestError(f"prompt={text!r} is not text; token ids are prompt_token_ids")
        if not isinstance(ids, list | tuple | np.ndarray) or getattr(ids, "ndim", 1) == 0:
            raise RequestError(f"a prompt is text or a list of token ids, not {type(ids).__name__}")
        tokens = self._checked(ids)
        usual = isinstance(ids, list) and set(map(type, ids)) == {int}  # then the caller's numbers serve for both
        return text, list(ids) if usual else tokens.tolist(), tokens

    def _checked(self, ids: list[Any] | tuple[Any, ...] | np.ndarray) -> np.ndarray:
        """Token ids as an array (t,) of any integer type. Raises RequestError if there are none, or for any that is
        outside the vocabulary."""
        try:
            tokens = _array_of(ids) if len(ids) else np.empty(0, dtype=np.int64)
        except ValueError:  # lists of different lengths
            tokens = np.empty((0, 0))
        vocab = self._vocab
        if tokens.dtype == object and (large := [t for t in ids if type(t) is int and not 0 <= t < vocab]):
            raise RequestError(f"token id {large[0]} is outside the vocabulary: 0 to {vocab - 1}")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise RequestError("a prompt given as token ids is one flat list of whole numbers")
        if not len(tokens):
            raise RequestError("the prompt is empty; give at least one token")
        wrong = np.nonzero((tokens < 0) | (tokens >= vocab))[0]
        if len(wrong):
            raise RequestError(
                f"token id {tokens[wrong[0]]} at index {wrong[0]} is outside the vocabulary: 0 to {vocab - 1}"
            )
        return tokens

    def _check_for_scheduler(self, params: SamplingParams, priority: Any) -> None:
        if isinstance(priority, bool) or not isinstance(priority, Integral):
            raise RequestError(f"priority={priority!r} is not a whole number")
        if priority and not self.scheduler.uses_priority:
            raise RequestError(
                f"priority={priority} is not supported by scheduler={self.config.scheduler.name}; leave it 0, or use a "
                "scheduler that has priorities"
            )
        if params.prompt_logprobs is not None and not self.scheduler.scores_prompts:
            raise RequestError(
                f"prompt_logprobs={params.prompt_logprobs} is not supported by "
                f"scheduler={self.config.scheduler.name}; leave it out"
            )

    def _check_for_sampler(self, params: SamplingParams) -> None:
        for name in ("logit_bias", "allowed_token_ids"):
            tokens = getattr(params, name)
            if tokens and not self.sampler_class.takes_biases:
                raise RequestError(f"sampler={self.config.sampler.name} does not support {name}; leave it out")
            self._check_vocabulary(name, tokens or ())
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > (most := self.config.max_logprobs):
                raise RequestError(
                    f"{name}={getattr(params, name)} is more than max_logprobs={most}, the most that this engine "
                    "returns; ask for fewer"
                )
        if params.logprobs is not None and not finds_logprobs(self.sampler_class):
            raise RequestError(f"sampler={self.config.sampler.name} returns no logprobs; leave it out")
        name = "bad_words" if params.structured_outputs is None else "structured_outputs"
        if params.guided and not self.sampler_class.takes_masks:
            raise RequestError(f"sampler={self.config.sampler.name} does not support {name}; leave it out")
        if params.guided and not self.executor.takes_masks:
            raise RequestError(f"executor={self.config.executor.name} does not support {name}; leave it out")
        taken = self.sampler_class.extra_args
        if unknown := set(params.extra_args or ()) - taken:
            raise RequestError(
                f"extra_args has {', '.join(sorted(unknown))}, and sampler={self.config.sampler.name} takes "
                f"{', '.join(sorted(taken)) or 'none'}"
            )

    def _max_len(self, prompt_len: int, params: SamplingParams) -> int:
        if prompt_len >= self.max_model_len:
            raise no_room(f"the prompt has {prompt_len} tokens", self.max_model_len)
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

    def _stops(self, params: SamplingParams) -> tuple[int, ...]:
        self._check_vocabulary("stop_token_ids", params.stop_token_ids or ())
        return tuple(dict.fromkeys(params.stop_token_ids or ()))

    def _check_vocabulary(self, name: str, tokens: Iterable[int]) -> None:
        for token in tokens:
            if token >= self._vocab:
                raise RequestError(f"{name}: {token} is outside the vocabulary: 0 to {self._vocab - 1}")

    def _seed_of(self, number: int) -> int:
        """The seed of a request without one: the engine's seed and the request's number, mixed (splitmix64)."""
        x = (self.config.seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        return (x ^ (x >> 31)) >> 1


def _alike(one: SamplingParams, other: SamplingParams) -> bool:
    """Whether they are equal, as is common in successive requests. False if that cannot be decided (for arrays)."""
    try:
        if one != other:
            return False
    except (ValueError, RuntimeError):
        return False
    asked, before = one.structured_outputs, other.structured_outputs
    if asked is None or before is None:
        return True
    text = text_of(asked)  # Python's True equals 1, a schema's does not
    return text is not None and text == text_of(before)


def _check_keys(prompt: Mapping[str, Any]) -> None:
    """Validate the keys of a prompt that is a mapping."""
    if "input_ids" in prompt and prompt.keys().isdisjoint(_KEYS):
        raise RequestError(f"a prompt is not a tokenizer's {type(prompt).__name__}; {_its_ids(prompt)}")
    for name in prompt.keys() - _KEYS:
        if name not in _NOT_HERE:
            raise RequestError(f"a prompt's mapping has prompt, prompt_token_ids and cache_salt, not {name}")
        value = prompt[name]
        if value is not None and not (isinstance(value, Mapping | list | tuple) and not value):
            raise RequestError(f"{name} is not supported: a prompt is text or token ids; leave it out")


def _its_ids(encoding: Mapping[str, Any]) -> str:
    return 'pass its token ids, ["input_ids"]' if "input_ids" in encoding else "pass token ids"


def _check_salt(salt: Any) -> None:
    """Validate it here, as it is hashed during a step, which must not fail."""
    if salt is None:
        return
    if salt == "":
        raise RequestError("cache_salt='' is empty; leave it out to share cached prefixes with those that have none")
    if not is_text(salt):
        raise RequestError(f"cache_salt={salt!r} is not Unicode text")


def _array_of(ids: Any) -> np.ndarray:
    """``np.asarray``, but three times as fast for a list of Python integers: 15 µs for 1,024."""
    if type(ids) is list and type(ids[0]) is int:
        try:
            return np.frombuffer(struct.pack(f"{len(ids)}q", *ids), dtype=np.int64)
        except struct.error:  # an element of another type, or a number that is too large
            pass
    return np.asarray(ids)
