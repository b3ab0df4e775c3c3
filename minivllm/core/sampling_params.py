"""Sampling parameters of one request, with vLLM's names and defaults. Must not import torch."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from types import NoneType
from typing import Any

from minivllm.core.keywords import refusing_by_name
from minivllm.core.structured_outputs import StructuredOutputsParams
from minivllm.errors import RequestError, lone_surrogate, shown
from minivllm.naming import did_you_mean

# vLLM's fields that are refused when set, each with the values that are allowed.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "logits_processors": (None, [], {}),
    "truncate_prompt_tokens": (None,),
    "flat_logprobs": (False,),
    "spaces_between_special_tokens": (True,),
}
# vLLM's keywords, current or former, that are not fields here: the values besides None that change nothing, and what
# to do instead of any other.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "early_stopping": ((False,), "there is no beam search"),
    "guided_decoding": ((), "type structured_outputs=StructuredOutputsParams(...)"),
    "length_penalty": ((1.0,), "there is no beam search"),
    "logprob_token_ids": ((), "logprobs=N returns the N most likely tokens"),
    "repetition_detection": ((), "repetition_penalty and frequency_penalty make repetitions rarer"),
    "skip_clone": ((False, True), "it is True or False"),  # permits skipping a copy, which is made anyway
    "skip_reading_prefix_cache": ((False,), "give the prompt a cache_salt of its own"),
    "stream_interval": ((), "each step's tokens are returned at once"),
    "thinking_token_budget": ((), "max_tokens limits the whole answer"),
    "use_beam_search": ((False,), "there is no beam search; n draws several answers"),
}
_ELSEWHERE = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "num_return_sequences": "n"}
NO_LIMIT = "for no limit: None in Python, null elsewhere"  # of ``max_tokens``
MAX_LOGPROBS, MAX_N = 20, 16384  # vLLM's limits as well
_SWITCHES = "ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"
_LOGPROBS = "logprobs", "prompt_logprobs"
_INTEGERS = "n", "top_k", "max_tokens", "min_tokens", *_LOGPROBS, "seed"
_LARGEST = 3.4e38  # of float32, which samplers keep temperatures in
_MOST_BIAS = 1e30  # so that float32 can still divide it by a temperature
_DIGITS = 20  # a token id has fewer
_GREEDY = 1e-5  # a temperature below this is greedy, as in vLLM


class RequestOutputKind(Enum):
    """What ``step`` returns for a request: all its text so far, only the new part, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _check_other(name: str, value: Any, args: tuple[Any, ...], others: Mapping[str, Any]) -> None:
    """Raise RequestError for a keyword that is not a field, unless its value changes nothing."""
    if name == "best_of":
        n = others.get("n", args[0] if args else 1)
        if value is not None and value != n:
            raise RequestError(f"best_of={shown(value)} is not supported; leave it out, all n={shown(n)} are returned")
    elif name in _NEUTRAL:
        neutral, why = _NEUTRAL[name]
        if value is not None and value not in neutral:
            raise RequestError(f"{name}={shown(value)} is not supported: {why}")
    else:
        meant = f" Did you mean {_ELSEWHERE[name]}?" if name in _ELSEWHERE else did_you_mean(name, _FIELDS)
        raise RequestError(f"SamplingParams({name}={shown(value)}): there is no such keyword.{meant}")


@refusing_by_name(_check_other)
@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters, as in vLLM.

    ``temperature=0`` is greedy; ``top_k=0`` or ``-1`` and ``top_p=1`` keep every token; ``max_tokens=None`` continues
    up to ``max_model_len``. ``presence_penalty`` is subtracted from the logits of tokens in the output,
    ``frequency_penalty`` once per occurrence; for tokens in the prompt or output, ``repetition_penalty`` divides
    positive logits and multiplies negative ones. ``logit_bias`` (token id -> number) is added before these penalties.
    Never sampled: tokens outside ``allowed_token_ids`` (if given), tokens that would complete one of ``bad_words``, and
    tokens that ``structured_outputs`` (a ``StructuredOutputsParams`` or the same as a mapping) rules out.
    ``seed=None``: the seed follows from the engine's seed and the request's number. The ``n`` completions use the seeds
    ``seed, seed + 1, …``. Output ends at the ``stop`` string that is complete first in its text, whatever the token
    boundaries; no stop or end token is sampled before ``min_tokens``, even with ``ignore_eos``. ``logprobs`` and
    ``prompt_logprobs``: how many top tokens' log-probabilities to return besides each output or prompt token's own;
    prompt log-probabilities do not use the prefix cache. ``extra_args``: for plugin samplers, see
    ``Sampler.extra_args``.

    Raises:
        RequestError: a value is out of range, or a field is not supported.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: Any = None
    truncate_prompt_tokens: int | None = None
    extra_args: dict[str, Any] | None = None
    flat_logprobs: bool = False

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else _as_list("stop", self.stop)
        self.stop_token_ids = _as_list("stop_token_ids", self.stop_token_ids)
        self.bad_words = _as_list("bad_words", self.bad_words)
        self.logit_bias = _as_biases(self.logit_bias)
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _as_list("allowed_token_ids", self.allowed_token_ids)
        self.extra_args = dict(self.extra_args) if isinstance(self.extra_args, dict) else self.extra_args
        for name in _LOGPROBS:
            if getattr(self, name) is True:  # as in vLLM, for both
                setattr(self, name, 1)
        for name in _INTEGERS:  # numpy's numbers become Python's
            value = getattr(self, name)
            if type(value) in (int, NoneType, bool):
                continue  # nearly all of them
            with contextlib.suppress(TypeError):  # not a whole number: refused below
                setattr(self, name, operator.index(value))
        self.verify()
        if self.seed == -1:
            self.seed = None

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Like vLLM's: None means the default, except for ``max_tokens`` (no limit); biases are clamped to ±100."""
        params = cls(**{k: v for k, v in given.items() if v is not None or k == "max_tokens" or k not in _FIELDS})
        if params.logit_bias:
            params.logit_bias = {token: min(max(bias, -100.0), 100.0) for token, bias in params.logit_bias.items()}
        return params

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY

    @property
    def guided(self) -> bool:
        """Whether the tokens allowed next depend on the output so far."""
        return self.structured_outputs is not None or bool(self.bad_words)

    def verify(self) -> None:
        """Raise RequestError for the first invalid value."""
        self._check_numbers()
        self._check_token_ids()
        self._check_texts()
        self._check_together()
        self._check_kinds()

    def _check_numbers(self) -> None:
        _integer("n", self.n, 1)
        if self.n > MAX_N:
            raise RequestError(f"n={self.n} is more than {MAX_N}, the most completions of one request; make several")
        _number("temperature", self.temperature, 0.0, _LARGEST, "0 is greedy")
        _number("top_p", self.top_p, 0.0, 1.0, "1 keeps every token", open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0, "0 keeps every token")
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "0 is none")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "0 is none")
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "1 is none", open_low=True)
        _integer("top_k", self.top_k, -1, why="0 or -1 keeps every token")
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, why=NO_LIMIT)
            if self.min_tokens > self.max_tokens:
                raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        for name in _LOGPROBS:
            if (count := getattr(self, name)) is not None:
                _integer(name, count, 0, f"0 to {MAX_LOGPROBS}; -1, all of the vocabulary, is not supported")
                if count > MAX_LOGPROBS:
                    raise RequestError(f"{name}={count} is more than {MAX_LOGPROBS}, the most that is returned")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63))
            if self.seed >= 2**64:
                raise RequestError(f"seed={shown(self.seed)} is more than {2**64 - 1}, the largest seed")

    def _check_token_ids(self) -> None:
        for token in self.stop_token_ids or ():
            _integer("stop_token_ids", token, 0)
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise RequestError("allowed_token_ids=[] leaves no token at all; leave it out to allow all")
        for token in self.allowed_token_ids or ():
            _integer("allowed_token_ids", token, 0, "token ids begin there")
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias: token id", token, 0, "its keys are token ids, as {42: -100.0}")
            _number(f"logit_bias: {token}", bias, -_MOST_BIAS, _MOST_BIAS, "it is added to the token's logit")

    def _check_texts(self) -> None:
        if self.stop and not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError(f"stop={shown(self.stop)}: each is text of at least one character")
        if self.bad_words and not all(isinstance(word, str) and word.strip() for word in self.bad_words):
            raise RequestError(f"bad_words={shown(self.bad_words)}: each is text with more than white space")
        for name in ("stop", "bad_words"):
            for text in getattr(self, name) or ():
                if (half := lone_surrogate(text)) is not None:
                    raise RequestError(
                        f"{name}: {shown(text)} contains {half}, half of a character, which no answer contains; leave "
                        "it out"
                    )

    def _check_together(self) -> None:
        """Values that contradict each other."""
        guide = "bad_words" if self.structured_outputs is None else "structured_outputs"
        if self.guided and self.allowed_token_ids:  # together they may leave no token at all
            said = f"allowed_token_ids={shown(self.allowed_token_ids)} is not supported with {guide}"
            raise RequestError(f"{said}; leave one of them out")
        if self.structured_outputs is not None and self.min_tokens:  # neither may these
            raise RequestError(f"min_tokens={self.min_tokens} is not supported with structured_outputs; leave it out")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need the text: leave detokenize=True, or use stop_token_ids")

    def _check_kinds(self) -> None:
        """What is neither a number nor text, and what is not supported."""
        for name in _SWITCHES:
            if not _is_switch(getattr(self, name)):
                raise RequestError(f"{name}={shown(getattr(self, name))} is neither True nor False")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind={shown(self.output_kind)} is not a RequestOutputKind")
        extra = self.extra_args
        if extra is not None and (not isinstance(extra, dict) or any(not isinstance(key, str) for key in extra)):
            raise RequestError(f"extra_args={shown(extra)} is not a mapping of names")
        for name, allowed in _NOT_YET.items():
            if (value := getattr(self, name)) not in allowed:
                raise RequestError(f"{name}={shown(value)} is not supported yet; leave it at {allowed[0]!r}")

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed."""
        return SamplingParams(**({name: getattr(self, name) for name in _FIELDS} | changes))


_FIELDS = [f.name for f in fields(SamplingParams)]


def _as_list(name: str, values: Any) -> list[Any]:
    try:
        if isinstance(values, str | Mapping):
            raise TypeError
        return [] if values is None else list(values)
    except TypeError:
        meant = list(values) if isinstance(values, Mapping) else [values]
        raise RequestError(f"{name}={shown(values)} is not a list; type {shown(meant)}") from None


def _as_biases(biases: Any) -> dict[int, float] | None:
    """A copy with integer keys; JSON's keys are strings."""
    if biases is None:
        return None
    if not isinstance(biases, dict):
        raise RequestError(f"logit_bias={shown(biases)} is not a mapping from token ids to numbers, as {{42: -100.0}}")
    of_token = {
        int(key) if isinstance(key, str) and key.isdecimal() and len(key) < _DIGITS else key: bias
        for key, bias in biases.items()
    }
    if len(of_token) < len(biases):
        raise RequestError(f"logit_bias={shown(biases)} names a token twice")
    return of_token


def _is_switch(value: Any) -> bool:
    try:
        return value in (True, False)
    except (ValueError, RuntimeError):  # an array of several, numpy's or torch's
        return False


def _integer(name: str, value: Any, low: int, why: str = "") -> None:
    if type(value) is int and value >= low:
        return
    why = f" ({why})" if why else ""
    try:
        whole = None if isinstance(value, bool) else operator.index(value)  # numpy integers too
    except TypeError:
        whole = None
    if whole is None:
        raise RequestError(f"{name}={shown(value)} is not a whole number{why}")
    if whole < low:
        raise RequestError(f"{name}={shown(value)} is less than {low}{why}")


def _number(name: str, value: Any, low: float, high: float, why: str, *, open_low: bool = False) -> None:
    if type(value) in (float, int) and low < value <= high and value != math.inf:
        return  # nearly all of them; the check with ``numbers`` takes 6 µs
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or value != value:
        raise RequestError(f"{name}={shown(value)} is not a number ({why})")
    value = value if isinstance(value, int) else float(value)
    if value < low or value > high or (open_low and value == low) or value == math.inf:
        bounds = f"more than {low:g}" if open_low else f"at least {low:g}"
        limit = "" if math.isinf(high) else f" and at most {high:g}"
        raise RequestError(f"{name}={shown(value)} is out of range: it must be {bounds}{limit} ({why})")
