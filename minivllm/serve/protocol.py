"""The endpoints' request bodies: OpenAI's, with vLLM's additions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from minivllm.core.grammars import text_of
from minivllm.core.sampling_params import MAX_LOGPROBS, NO_LIMIT, RequestOutputKind, SamplingParams
from minivllm.core.structured_outputs import StructuredOutputsParams
from minivllm.errors import RequestError, SchemaError, no_room, shown, which_of
from minivllm.serve.body import Body, Unicode, Whole, at_most, unicode_text
from minivllm.serve.conversation import Conversation, Message
from minivllm.serve.errors import ClientError, asked_wrongly

_SAMPLING = frozenset(f.name for f in fields(SamplingParams))
_ID = r"^[\x21-\x7e]{1,200}$"  # a client's own request id

_OF_MAX_TOKENS = re.compile(r"(^|(?:with|than|lower) )max_tokens\b")  # elsewhere it may be the client's own text
_OF_EXTRA_ARGS = re.compile(r"^extra_args\b")

TokenIds = list[int]
MAX_COMPLETIONS, MAX_PROMPTS = 128, 2048  # per request, as in OpenAI's API; other requests wait while these are read
MAX_SEQUENCES = 8192  # completions of all prompts of a request: 0.2 s
MAX_SCORES = 1 << 20  # prompt log-probabilities in one answer: some 50 MB, while all others wait half a second
MAX_STOPS = 128  # strings that each token's text is searched for while other requests wait
MAX_BAD_WORDS = 4096  # tokenized while other requests wait, 0.1 s
MAX_IDS = 1 << 20  # per /detokenize request
MAX_TEXT = 1 << 22  # characters per /tokenize request, during which other texts wait: a few seconds
MAX_GRAMMAR = 1 << 18  # characters, as JSON, of an answer's constraint; others wait while it is compiled, up to 0.3 s


class StreamOptions(Body):
    part_of = "stream_options"

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's

    @model_validator(mode="after")
    def _one_needs_the_other(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise ClientError("continuous_usage_stats needs include_usage=true", param="stream_options")
        return self


class GenerationBody(Body):
    """Fields of both endpoints. Those of ``SamplingParams`` are passed on unchanged, with its defaults and limits."""

    prompt_is: ClassVar[str]  # the name of the prompt's field

    model: str | None = None
    n: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Whole | None = None
    truncate_prompt_tokens: Whole | None = None
    structured_outputs: Any = None
    response_format: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None  # vLLM's name for SamplingParams.extra_args
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Whole = 0
    cache_salt: Unicode | None = None
    request_id: Annotated[str, Field(pattern=_ID)] | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ClientError("stream_options belongs to stream=true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            said = f"prompt_logprobs={self.prompt_logprobs} is not supported with stream=true; leave one of them out"
            raise ClientError(said, param="prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _within_limits(self) -> Self:
        if self.n is not None and self.n > MAX_COMPLETIONS:
            raise ClientError(f"n={self.n} is more than {MAX_COMPLETIONS}; send several requests", param="n")
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise ClientError(f"stop: {len(self.stop)} strings are more than {MAX_STOPS}", param="stop")
        if self.bad_words is not None and len(self.bad_words) > MAX_BAD_WORDS:
            raise ClientError(f"bad_words: {len(self.bad_words)} are more than {MAX_BAD_WORDS}", param="bad_words")
        return self

    def sampling_params(self) -> SamplingParams:
        """Raises RequestError for invalid parameters."""
        return SamplingParams(**self._given())

    @contextmanager
    def in_its_words(self) -> Iterator[None]:
        """A context in which a RequestError becomes a ClientError that names the client's field."""
        try:
            yield
        except RequestError as error:
            said, fields = self._as_asked(error), type(self).model_fields
            raise asked_wrongly(error, fields, message=said, prompt=self.prompt_is) from None

    def _as_asked(self, error: RequestError) -> str:
        message = str(error).replace("structured_outputs", self._asks_by, 1).replace("leave it at None", "leave it out")
        message = _OF_EXTRA_ARGS.sub("vllm_xargs", message)
        return message.replace(f" ({NO_LIMIT})", self._no_limit)

    _no_limit: ClassVar[str] = ""  # what ``max_tokens=null`` does

    @property
    def _asks_by(self) -> str:
        """The field that constrains the answer's format."""
        own = self.structured_outputs is not None or self.response_format is None
        return "structured_outputs" if own else "response_format"

    def _given(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _SAMPLING & type(self).model_fields.keys()}
        given["extra_args"] = self.vllm_xargs
        if self.response_format is not None and (asked := _structure(self.response_format)) is not None:
            if self.structured_outputs is not None:
                said = "response_format and structured_outputs are one thing; leave one out"
                raise ClientError(said, param="response_format")
            given["structured_outputs"] = asked
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return {name: value for name, value in given.items() if value is not None} | {"output_kind": kind}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt_is = "prompt"

    prompt: Any  # text, token ids, or a list of either
    logprobs: Whole | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def only_echo(self) -> bool:
        """Whether only the prompt is to be returned."""
        return self.echo and self.max_tokens == 0

    def sampling_params(self) -> SamplingParams:
        """With ``echo``, also the prompt's log-probabilities; one token if none is wanted, as zero is not possible."""
        given, logprobs = self._given(), self.logprobs
        if self.echo and logprobs is not None and 0 <= given.get("prompt_logprobs", 0) <= logprobs:
            given["prompt_logprobs"] = logprobs
        if self.only_echo:
            given |= {"max_tokens": 1, "min_tokens": 0}
        return SamplingParams(**given)

    def prompts(self, max_model_len: int) -> list[str | TokenIds]:
        """One or more prompts. Raises ContextLengthError for too many token ids before it checks each of them."""
        given = self.prompt
        many = given if isinstance(given, list) and not (given and type(given[0]) is int) else [given]
        for i, ids in enumerate(many):
            if isinstance(ids, list) and len(ids) >= max_model_len and type(ids[0]) is int:
                raise no_room(f"{which_of(many, i)}the prompt has {len(ids)} tokens", max_model_len)
        if not (many and all(isinstance(p, str) or _is_token_ids(p) for p in many)):
            raise ClientError(
                "prompt is a string, a list of token ids, or a list of strings or of lists of token ids; none is empty",
                param="prompt",
            )
        if len(many) > MAX_PROMPTS:
            raise ClientError(
                f"prompt: {len(many)} prompts are more than {MAX_PROMPTS}; send several requests", param="prompt"
            )
        if len(many) * (self.n or 1) > MAX_SEQUENCES:
            said = f"{len(many)} prompts with n={self.n} are more than {MAX_SEQUENCES} completions"
            raise ClientError(f"prompt: {said}; send several requests", param="prompt")
        try:
            return [unicode_text(prompt) if isinstance(prompt, str) else prompt for prompt in many]
        except ValueError as error:
            raise ClientError(f"prompt: {error}", param="prompt") from error


class ChatBody(GenerationBody, Conversation):
    """POST /v1/chat/completions."""

    prompt_is, _no_limit = "messages", " (null goes on to max_model_len)"

    max_completion_tokens: Whole | None = None
    logprobs: bool = False
    top_logprobs: Whole | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True  # vLLM's: whether reasoning is returned

    @property
    def choice(self) -> Literal["none", "auto", "required"] | tuple[str]:
        """``tool_choice``, or the one function that must be called."""
        if self.tool_choice is None:
            return "auto" if self.tools else "none"
        if isinstance(self.tool_choice, dict):
            return (self.tool_choice["function"]["name"],)
        return self.tool_choice  # validated: one of the three

    @property
    def may_be_called(self) -> list[str]:
        """Names of functions: each is a tag of the answer's constraint, in this order."""
        return (
            list(self.choice) if isinstance(self.choice, tuple) else [tool.function.name for tool in self.tools or ()]
        )

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.choice != "none"

    @property
    def _asks_by(self) -> str:
        return "tools" if self.uses_tools else super()._asks_by

    def _as_asked(self, error: RequestError) -> str:
        if isinstance(error, SchemaError) and self.uses_tools:
            if error.tag is None:
                return f"{super()._asks_by}: {error.why}"
            return f"tools: function {self.may_be_called[error.tag]}: {error.why}"
        message = super()._as_asked(error)
        if self.max_completion_tokens is not None:
            message = _OF_MAX_TOKENS.sub(r"\1max_completion_tokens", message)
        return message

    def begun(self) -> str:
        """The part of the answer that the prompt ends with."""
        if not self.continue_final_message:
            return ""
        content = self.messages[-1].content or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)

    def options(self) -> dict[str, Any]:
        """Omits tools that must not be called."""
        return super().options() | ({} if self.uses_tools else {"tools": None})

    @model_validator(mode="after")
    def _tools_to_choose(self) -> Self:
        chosen, names = self.tool_choice, [tool.function.name for tool in self.tools or ()]
        if isinstance(chosen, dict):
            function = chosen.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if chosen != {"type": "function", "function": {"name": name}}:
                said = '{"type": "function", "function": {"name": …}}'
                raise ClientError(f"tool_choice: it is {said}, not {shown(chosen)}", param="tool_choice")
            if name not in names:
                of_these = ", ".join(names) or "none: there are no tools"
                raise ClientError(f"tool_choice: {shown(name)} is not among the tools: {of_these}", param="tool_choice")
        elif chosen not in (None, "none", "auto", "required"):
            said = 'none, auto, required, or {"type": "function", "function": {"name": …}}'
            raise ClientError(f"tool_choice: it is {said}, not {shown(chosen)}", param="tool_choice")
        elif chosen == "required" and not names:
            raise ClientError("tool_choice: required needs tools", param="tool_choice")
        return self

    def schema_of_text(self) -> dict[str, Any] | None:
        """The JSON schema that answers without calls have to match, if any. Raises ClientError for what is not
        supported with tools."""
        asked, field = self._given().get("structured_outputs"), super()._asks_by
        if asked is None:
            return None
        try:
            guide = StructuredOutputsParams.of(asked)
            schema = guide.schema()
            check_grammar(guide)
        except RequestError as error:
            raise ClientError(str(error).replace("structured_outputs", field, 1), param=field) from None
        if schema is None or guide != StructuredOutputsParams(json=guide.json, json_object=guide.json_object):
            said = f"{field} with tools may ask for json or json_object, and for nothing else"
            raise ClientError(f"{said}; change it, or set tool_choice to none", param=field)
        return schema

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if len({self.max_tokens, self.max_completion_tokens} - {None}) == 2:
            raise ClientError("max_tokens and max_completion_tokens are one thing; leave one out", param="max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise ClientError("top_logprobs needs logprobs=true", param="top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise ClientError(
                f"top_logprobs={self.top_logprobs} is out of range: 0 to {MAX_LOGPROBS}", param="top_logprobs"
            )
        return self

    def sampling_params(self) -> SamplingParams:
        """Without a limit, an answer may be as long as the context allows, as with OpenAI."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return SamplingParams(**(self._given() | {"max_tokens": limit, "logprobs": logprobs}))


class Tokenize(Conversation):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: Unicode | None = None
    add_special_tokens: bool = True
    messages: list[Message] = []

    @model_validator(mode="after")
    def _text_or_messages(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise ClientError("give prompt, a string, or messages, and not both", param="prompt")
        of_messages = [name for name in Conversation.model_fields if name != "messages"]
        idle = ("add_special_tokens",) if self.messages else of_messages
        for name in idle:
            if name in self.model_fields_set and not (name == "add_special_tokens" and not self.add_special_tokens):
                what = "a text" if self.messages else "messages"
                raise ClientError(f"{name} belongs to {what}; leave it out", param=name)
        return self


class Detokenize(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds

    @field_validator("tokens", mode="before")
    @classmethod
    def _so_many(cls, tokens: Any) -> Any:
        return at_most(MAX_IDS, "tokens", tokens)


class ReloadWeights(Body):
    """POST /reload_weights: arguments of ``EngineClient.reload_weights``."""

    weights_path: Unicode | None = None
    abort: bool = False


class LoadAdapter(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: Unicode
    lora_path: Unicode
    load_inplace: bool = False


class UnloadAdapter(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: Unicode
    lora_int_id: Whole | None = None


def check_grammar(asked: StructuredOutputsParams | None) -> None:
    """Raise RequestError for a constraint that takes too long to compile."""
    text = None if asked is None else text_of(asked)
    if text is not None and len(text) > MAX_GRAMMAR:
        raise RequestError(f"structured_outputs: {len(text)} characters are more than {MAX_GRAMMAR}; simplify it")


def _structure(response_format: dict[str, Any]) -> dict[str, Any] | None:
    """OpenAI's ``response_format`` as arguments of ``StructuredOutputsParams``."""
    response_format = {name: value for name, value in response_format.items() if value is not None}
    kind, field = response_format.get("type"), "response_format"
    if kind == "structural_tag":  # vLLM's
        return {"structural_tag": response_format}
    kinds = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
    if not isinstance(kind, str) or kind not in kinds:
        raise ClientError(f"{field}: type {shown(kind)} is not one of {', '.join(kinds)}, structural_tag", param=field)
    if more := response_format.keys() - kinds[kind]:
        raise ClientError(f"{field}: type {kind} has no {', '.join(sorted(more))}", param=field)
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    named = response_format.get("json_schema")
    if not isinstance(named, dict) or not isinstance(schema := named.get("schema"), dict):
        raise ClientError(
            f'{field}: json_schema is {{"name": ..., "schema": {{...}}}}, of which schema is a JSON schema', param=field
        )
    named = {name: value for name, value in named.items() if value is not None}
    if more := named.keys() - {"name", "description", "schema", "strict"}:
        raise ClientError(f"{field}: json_schema has no {', '.join(sorted(more))}", param=field)
    return {"json": schema}  # always enforced, so strict changes nothing


def known_id(given: str) -> str | None:
    """A client's own request id, if it is valid."""
    return given if re.fullmatch(_ID, given) else None


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
