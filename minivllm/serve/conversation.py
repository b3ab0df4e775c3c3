"""A conversation as a request states it: messages, and the functions that the model may call."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from minivllm.errors import RequestError, shown
from minivllm.models.conversation import check_tool_calls
from minivllm.serve.body import Body, Unicode, at_most, unicode_text
from minivllm.serve.errors import ClientError

MAX_TOOLS = 128  # as in OpenAI's API
MAX_MESSAGES = 1 << 14  # per chat; each is checked while other requests wait, 5 µs
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class TextPart(Body):
    part_of = "messages"

    type: Literal["text", "input_text", "output_text"]  # the others are the Responses API's
    text: Unicode

    @field_validator("type")
    @classmethod
    def _by_one_name(cls, kind: str) -> str:
        return "text"  # the only one that templates know


class Message(Body):
    """A message of a conversation, for the template."""

    part_of = "messages"

    role: Unicode
    content: Unicode | list[TextPart] | None = None
    name: Unicode | None = None
    reasoning: Unicode | None = None
    reasoning_content: Unicode | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: Unicode | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, data: Any) -> Any:
        parts = data.get("content") if isinstance(data, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if not isinstance(part, dict):
                raise cls._wrong(f"a part of a content is an object, not {shown(part)}", "content")
            if (kind := part.get("type")) not in ("text", "input_text", "output_text"):
                raise cls._wrong(f"content of type {shown(kind)} is not supported; only text is", "content")
        if isinstance(data, dict):
            data = {name: value for name, value in data.items() if name != "parsed"}  # openai's client adds it
            if data.get("content") is None and not data.get("tool_calls"):
                if data.get("role") not in ("assistant", "tool", "function"):
                    raise cls._wrong("each needs content, a string or text parts", "content")
                data["content"] = ""
        return data

    @field_validator("tool_calls")
    @classmethod
    def _calls(cls, calls: list[Any] | None) -> list[Any] | None:
        try:
            check_tool_calls(calls or [])
        except RequestError as error:  # the error's location says so already
            raise ValueError(str(error).removeprefix("messages: ")) from None
        return calls or None

    def for_template(self) -> dict[str, Any]:
        """The message in the form that the template gets: ``reasoning`` by both of its names."""
        fields = self.model_dump(exclude_none=True)
        reasoning = self.reasoning or self.reasoning_content
        return fields | {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else fields


class Function(Body):
    part_of = "tools"

    name: str
    description: Unicode | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool = False

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if not _FUNCTION_NAME.fullmatch(name):
            said = f"a function's name has letters, digits, _ and -, 64 at most, not {shown(name)}"
            raise ClientError(f"tools: {said}", param="tools")
        return name

    @field_validator("parameters")
    @classmethod
    def _can_be_rendered(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            unicode_text(json.dumps(parameters, ensure_ascii=False))
        except (ValueError, RecursionError) as error:
            raise ClientError(f"tools: parameters cannot be rendered: {error}", param="tools") from None
        return parameters

    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments; any object if none is given."""
        return {"type": "object"} | (self.parameters or {})


class Tool(Body):
    part_of = "tools"

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _a_function(cls, data: Any) -> Any:
        if isinstance(data, dict) and "function" not in data:  # the Responses API's and Anthropic's have the name here
            said = '{"type": "function", "function": {"name": …, "parameters": {…}}}'
            raise ClientError(f"tools: each is {said}, not {shown(data)}", param="tools")
        return data


class Conversation(Body):
    """A conversation, rendered to a prompt by the tokenizer's chat template."""

    messages: list[Message]
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _so_many(cls, messages: Any) -> Any:
        return at_most(MAX_MESSAGES, "messages", messages)

    @field_validator("tools")
    @classmethod
    def _within_their_limits(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or ()]
        if len(names) > MAX_TOOLS:
            raise ClientError(f"tools: {len(names)} are more than {MAX_TOOLS}", param="tools")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ClientError(f"tools: {len(names)} functions, of which several are named {twice[0]}", param="tools")
        return tools or None

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ClientError(
                "continue_final_message: the reply either continues the last message or begins another, as "
                'add_generation_prompt has it, true by default; add "add_generation_prompt": false',
                param="continue_final_message",
            )
        return self

    def options(self) -> dict[str, Any]:
        """Options for rendering, in addition to the template's own variables."""
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]
        switches = {name: getattr(self, name) for name in ("add_generation_prompt", "continue_final_message")}
        return switches | {"tools": tools or None}
