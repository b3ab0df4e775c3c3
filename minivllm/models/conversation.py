"""Converts OpenAI messages to the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from minivllm.errors import RequestError, is_text, shown

Message = Mapping[str, Any]  # "role", and "content" or "tool_calls"

_PROBE = "\ue000probe\ue000"  # text that no template contains


def for_template(message: Message, *, parts: bool, text_arguments: bool = False) -> dict[str, Any]:
    """Convert ``content`` (a string, text parts or None) to parts if the template iterates over them, else to one
    string, joining parts with newlines; parse each tool call's ``arguments`` from JSON. Those that are not an object
    stay text with ``text_arguments``, else they are left out."""
    made, content = dict(message), message.get("content")
    if content is None:
        content = ""
    if parts:
        made["content"] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    else:
        made["content"] = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    calls = made.pop("tool_calls", None)
    if calls:
        made["tool_calls"] = [{**call, "function": _function(call["function"], text_arguments)} for call in calls]
    return made


def takes_parts(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Whether a template iterates over content parts and omits a content that is a string."""
    for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
        try:
            if _PROBE in render([{"role": "user", "content": content}]):
                return not isinstance(content, str)
        except Exception:  # any template error; rendering will raise it again, where it is reported
            continue
    return False


def takes_text_arguments(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Whether a template writes a tool call's arguments that are text; others take only a mapping."""
    call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": _PROBE}}
    asked, called = {"role": "user", "content": ""}, {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        return _PROBE in render([asked, called])
    except Exception:  # any template error
        return False


def check_tool_calls(calls: Any) -> None:
    """Raises RequestError if these are not valid OpenAI ``tool_calls`` of a message."""
    if not isinstance(calls, list):
        raise RequestError(f"messages: tool_calls is a list, not {shown(calls)}")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not is_text(function.get("name")):
            said = '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
            raise RequestError(f"messages: a tool call is {said}, not {shown(call)}")
        if not isinstance(arguments := function.get("arguments"), str | dict | None):
            said = f"arguments of {shown(function['name'])} are JSON as text, not {shown(arguments)}"
            raise RequestError(f"messages: {said}")


def _function(function: Mapping[str, Any], text_arguments: bool) -> dict[str, Any]:
    arguments = text = function.get("arguments") or {}
    if isinstance(text, str):
        try:
            arguments = json.loads(text) or {}
        except (ValueError, RecursionError):  # it was cut off
            arguments = text
        if not isinstance(arguments, dict):
            arguments = text if text_arguments else {}
    return {**function, "arguments": arguments}
