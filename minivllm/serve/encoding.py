"""Serializes messages between a server's two processes. No pickle.

They are msgpack. Values that msgpack cannot hold (integers of more than 64 bits, lone surrogates), which a client or
checkpoint may contain, are embedded as JSON.
"""

from __future__ import annotations

import json
import os
import struct
import traceback
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from minivllm.core.lora_request import LoRARequest
from minivllm.core.model_config import FrozenDict, frozen
from minivllm.core.outputs import CompletionOutput, Logprob, RequestOutput
from minivllm.core.sampling_params import RequestOutputKind, SamplingParams
from minivllm.core.structured_outputs import StructuredOutputsParams
from minivllm.errors import MinivllmError, RequestError, SchemaError, by_name, printable, shown
from minivllm.serve.handshake import Handshake
from minivllm.serve.messages import (
    Abort,
    Add,
    AskMetrics,
    Change,
    Changed,
    Delivered,
    Died,
    FromEngine,
    Metrics,
    News,
    ToEngine,
)

T = TypeVar("T")
_LEVELS = 200  # of nested lists and mappings: fewer than Python's parser accepts at any call depth

# --------------------------------------------------------------------------- JSON

_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_KEYS = frozenset((str,))
_SCALARS = frozenset((str, int, float, bool, type(None)))


def _dumped(value: Any) -> bytes:
    return _json.encode(value).encode(errors="surrogatepass")


def _loaded(data: bytes) -> Any:
    return json.loads(data.decode(errors="surrogatepass"))


def _check(name: str, value: Any, levels: int = _LEVELS) -> None:
    """Check that the value survives the round trip. Raises RequestError."""
    if type(value) in _SCALARS:
        return
    if not levels:
        raise RequestError(f"{name}: this is nested too deeply")
    if type(value) is not list and (type(value) is not dict or not _KEYS.issuperset(map(type, value))):
        raise RequestError(f"{name}: {shown(value)} cannot be written as JSON")
    for one in value.values() if type(value) is dict else value:
        if type(one) not in _SCALARS:
            _check(name, one, levels - 1)


# --------------------------------------------------------------------------- before requests


def encode_handshake(message: Handshake) -> bytes:
    return _dumped(msgspec.to_builtins(message, enc_hook=os.fspath))


def decode_handshake(data: bytes) -> Handshake:
    found: Handshake = msgspec.convert(_loaded(data), Handshake, dec_hook=_special)
    return found


def _special(kind: type, value: Any) -> Any:
    if kind is FrozenDict:
        return frozen(value)
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)


# --------------------------------------------------------------------------- to the engine

_SPECIAL = "output_kind", "logit_bias", "structured_outputs", "extra_args"
_PLAIN = [f.name for f in fields(SamplingParams) if f.name not in _SPECIAL]
_GUIDE = [f.name for f in fields(StructuredOutputsParams)]
_plain_of, _guide_of = attrgetter(*_PLAIN), attrgetter(*_GUIDE)


class _Add(msgspec.Struct, array_like=True, tag="Add"):
    request_ids: tuple[str, ...]
    prompts: tuple[Any, ...]  # bytes of int64; JSON text if an id is larger
    arrived: float
    rest: Any  # or JSON bytes, if msgpack cannot hold it


_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(_Add | Abort | Delivered | AskMetrics | Change)


def encode_to_engine(message: ToEngine) -> bytes:
    """Raises RequestError for parameters that neither format can hold; of those that came as JSON, only ones nested too
    deeply."""
    if not isinstance(message, Add):
        return _encoder.encode(message)
    p = message.params
    _check("vllm_xargs", p.extra_args)
    if (guide := p.structured_outputs) is not None:
        _check("structured_outputs", guide.json)
        _check("structured_outputs", guide.structural_tag)
    biases = None if p.logit_bias is None else (list(p.logit_bias), list(p.logit_bias.values()))  # JSON keys are text
    special = p.output_kind.value, biases, None if guide is None else _guide_of(guide), p.extra_args
    lora = message.lora_request
    adapter = None if lora is None else (lora.lora_name, lora.lora_int_id, lora.path, lora.load_inplace)
    rest = _plain_of(p), special, message.cache_salt, message.priority, adapter
    add = _Add(message.request_ids, tuple(map(_tokens_of, message.prompts)), message.arrived, rest)
    try:
        try:
            return _encoder.encode(add)
        except (OverflowError, UnicodeEncodeError):
            add.rest = _dumped(rest)
            return _encoder.encode(add)
    except (TypeError, ValueError) as error:
        raise RequestError(f"sampling parameters that cannot be written as JSON: {error}") from None


def decode_to_engine(data: bytes) -> ToEngine:
    """Prompts' token ids are int64 arrays, unless one is larger."""
    message = _to_engine.decode(data)
    if not isinstance(message, _Add):
        return message
    rest = _loaded(message.rest) if isinstance(message.rest, bytes) else message.rest
    plain, (kind, biases, guide, extra), cache_salt, priority, adapter = rest
    params = _made(SamplingParams, _PLAIN, plain)
    params.output_kind, params.extra_args = RequestOutputKind(kind), extra
    params.logit_bias = None if biases is None else dict(zip(*biases, strict=True))
    params.structured_outputs = None if guide is None else _made(StructuredOutputsParams, _GUIDE, guide)
    prompts = tuple({"prompt_token_ids": _tokens_in(tokens)} for tokens in message.prompts)
    lora_request = None if adapter is None else LoRARequest(*adapter)
    return Add(message.request_ids, prompts, params, cache_salt, priority, message.arrived, lora_request)


def _tokens_of(prompt: Any) -> bytes | str:
    ids = prompt["prompt_token_ids"]
    try:
        return struct.pack(f"{len(ids)}q", *ids)
    except struct.error:
        return json.dumps(ids)


def _tokens_in(tokens: bytes | str) -> Any:
    return np.frombuffer(tokens, np.int64) if isinstance(tokens, bytes) else json.loads(tokens)


def _made(kind: type[T], names: list[str], values: list[Any]) -> T:
    """An instance with these values, without validation: the sender has validated them."""
    made = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        setattr(made, name, value)
    return made


# --------------------------------------------------------------------------- from the engine


class _Failure(msgspec.Struct, array_like=True):
    error: str  # the class's name
    message: str
    traceback: str
    tag: int | None = None  # of a SchemaError
    why: str = ""

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        text = "" if isinstance(error, MinivllmError) else "".join(traceback.format_exception(error))
        failure = cls(type(error).__name__, printable(str(error)), printable(text))
        if isinstance(error, SchemaError):
            failure.tag, failure.why = error.tag, printable(error.why)
        return failure

    def as_error(self) -> Exception:
        """The exception, of its original class if that is minivllm's or a builtin."""
        error = by_name(self.error, self.message)
        if isinstance(error, SchemaError):
            error.tag, error.why = self.tag, self.why
        if self.traceback:
            error.add_note(f"in the engine:\n{self.traceback}")
        return error


class _Output(msgspec.Struct, array_like=True, gc=False):
    """A ``RequestOutput`` without its prompt, which the receiver has."""

    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class _News(msgspec.Struct, array_like=True, tag=True):
    taken: list[tuple[str, _Failure | None]]
    outputs: list[_Output]


class _Changed(msgspec.Struct, array_like=True, tag=True):
    number: int
    failure: _Failure | None
    sleeps: bool
    value: Any = None


_from_engine = msgspec.msgpack.Decoder(_News | Metrics | _Changed | Died)


def encode_from_engine(message: FromEngine) -> bytes:
    if isinstance(message, Changed):
        failure = None if message.error is None else _Failure.of(message.error)
        return _encoder.encode(_Changed(message.number, failure, message.sleeps, message.value))
    if not isinstance(message, News):
        return _encoder.encode(message)
    taken = [(name, None if error is None else _Failure.of(error)) for name, error in message.taken]
    outputs = [
        _Output(o.request_id, o.outputs, o.finished, o.num_cached_tokens, o.prompt_logprobs) for o in message.outputs
    ]
    return _encoder.encode(_News(taken, outputs))


def decode_from_engine(data: bytes) -> FromEngine:
    """Outputs have no prompt."""
    message = _from_engine.decode(data)
    if isinstance(message, _Changed):
        error = None if message.failure is None else message.failure.as_error()
        return Changed(message.number, error, message.sleeps, message.value)
    if not isinstance(message, _News):
        return message
    taken = [(name, None if failure is None else failure.as_error()) for name, failure in message.taken]
    outputs = [
        RequestOutput(o.request_id, None, [], o.outputs, o.finished, o.num_cached_tokens, o.prompt_logprobs)
        for o in message.outputs
    ]
    return News(taken, outputs)
