"""Tool calls: the formats in which models write them, and what a chat's tools make of its answers: their constraint and
their reader."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm.serve.call_readers import CLOSE, OPEN, BareCalls, CallReader, CallsOrJson, GuidedCalls, TaggedCalls
from minivllm.serve.errors import ClientError

if TYPE_CHECKING:
    from minivllm.serve.conversation import Function
    from minivllm.serve.protocol import ChatBody


@dataclass(frozen=True, slots=True)
class Dialect:
    """How models of a kind write calls. A call: ``begin % NAME`` with the name as JSON, the arguments as JSON, ``end``;
    several with ``separator`` between them, or one alone where that is None. In text a call begins with ``trigger``."""

    begin: str
    end: str
    trigger: str
    separator: str | None
    reader: type[CallReader]
    special: bool  # whether its tags may be special tokens, which are left out of text otherwise


DIALECTS = {  # under vLLM's names
    "hermes": Dialect(f'{OPEN}\n{{"name": %s, "arguments": ', f"}}\n{CLOSE}", OPEN, "\n", TaggedCalls, True),
    "llama3_json": Dialect('{"name": %s, "parameters": ', "}", '{"name": ', None, BareCalls, False),
}


def dialect_of(wanted: str, chat_template: str | None) -> Dialect | None:
    """``tool_call_parser`` of a server; with ``auto`` what the template shows a model, None if it is none of these."""
    if wanted != "auto":
        return DIALECTS[wanted]
    if OPEN in (chat_template or ""):
        return DIALECTS["hermes"]
    if '"parameters": dictionary of argument name' in (chat_template or ""):
        return DIALECTS["llama3_json"]
    return None


class ToolUse:
    """The effect of a chat's tools on its answers. Raises ClientError."""

    def __init__(self, body: ChatBody, dialect: Dialect | None) -> None:
        """``body`` has tools, and a choice other than none."""
        functions = {tool.function.name: tool.function for tool in body.tools or ()}
        if dialect is None and body.choice == "auto":
            raise ClientError(
                "tools: how this model writes calls is not known; ask with tool_choice=required, or start the server "
                f"with tool_call_parser={' or '.join(DIALECTS)}",
                param="tools",
            )
        self.dialect = dialect or DIALECTS["llama3_json"]
        self.one_alone = not body.parallel_tool_calls
        self.named = isinstance(body.choice, tuple)
        self._alone = self.named or body.choice == "required"  # calls, and no text
        self._names = list(functions)
        schema = body.schema_of_text()
        self._schema = None if self._alone else schema
        self.tag: dict[str, Any] | None = None  # that answers have to fit, as ``structural_tag``
        if (of_answers := self._format(body, functions)) is not None:
            self.tag = {"type": "structural_tag", "format": of_answers}

    def _format(self, body: ChatBody, functions: Mapping[str, Function]) -> dict[str, Any] | None:
        if self.named:
            return self._tags_alone([functions[body.choice[0]]], one=True)
        if body.choice == "required":
            return self._tags_alone(list(functions.values()), one=self.one_alone)
        held = [f if f.strict else f.model_copy(update={"parameters": None}) for f in functions.values()]
        if self._schema is not None:
            text = {"type": "json_schema", "json_schema": self._schema}
            return {"type": "or", "elements": [self._tags_alone(held, one=self.one_alone), text]}
        if any(function.strict for function in held):
            kind = {"type": "triggered_tags", "triggers": [self.dialect.trigger], "stop_after_first": self.one_alone}
            return kind | {"tags": self._tags(held)}
        return None

    def _tags_alone(self, functions: Sequence[Function], *, one: bool) -> dict[str, Any]:
        between = self.dialect.separator
        kind = {"type": "tags_with_separator", "separator": between or "", "at_least_one": True}
        return kind | {"stop_after_first": one or between is None, "tags": self._tags(functions)}

    def _tags(self, functions: Sequence[Function]) -> list[dict[str, Any]]:
        return [
            {
                "begin": self.dialect.begin % json.dumps(function.name),
                "content": {"type": "json_schema", "json_schema": function.schema_of_arguments()},
                "end": self.dialect.end,
            }
            for function in functions
        ]

    def reader(self) -> CallReader:
        if self.tag is None:
            return self.dialect.reader()
        if self._schema is not None:
            return CallsOrJson(self.dialect, self._names)
        return GuidedCalls(self.dialect, alone=self._alone)
