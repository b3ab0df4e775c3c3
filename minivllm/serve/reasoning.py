"""Reasoning: what a thinking model writes between ``<think>`` and ``</think>`` before its answer."""

from __future__ import annotations

from enum import Enum
from typing import Any

from minivllm.serve.errors import ClientError
from minivllm.serve.held_back import tail_of

OPEN, CLOSE = "<think>", "</think>"


class Thinking(Enum):
    """Whether an answer has reasoning before it, by how its prompt ends."""

    NEVER = "never"
    MAYBE = "maybe"  # if it begins with the tag
    ALWAYS = "always"  # the prompt has the tag, or the model leaves it out


def parser_of(wanted: str, chat_template: str | None) -> str | None:
    """``reasoning_parser`` of a server; ``auto``: qwen3 if the chat template mentions the tag. None: no parser."""
    if wanted != "auto":
        return None if wanted == "none" else wanted
    return "qwen3" if CLOSE in (chat_template or "") else None


def variables_of(effort: str, chat_template: str | None, parser: str | None) -> dict[str, Any]:
    """The chat template's variables for OpenAI's ``reasoning_effort``. Raises ClientError if it has none for it, unless
    the effort is none and there is no ``parser``: a model that does not think."""
    template = chat_template or ""
    found: dict[str, Any] = {}
    if "reasoning_effort" in template:
        found["reasoning_effort"] = effort
    if "enable_thinking" in template:
        found["enable_thinking"] = effort != "none"
    if not found and (effort != "none" or parser is not None):
        said = "the model's chat template has neither reasoning_effort nor enable_thinking; leave it out"
        raise ClientError(f"reasoning_effort={effort}: {said}", param="reasoning_effort")
    return found


def thinking_of(parser: str | None, prompt: str, begun: str = "") -> Thinking:
    """``prompt``: as text. ``begun``: the part of the answer that it ends with (``continue_final_message``)."""
    ends = prompt.rstrip()
    if parser is None or ends.endswith(CLOSE):  # a template may close it at once, to turn it off
        return Thinking.NEVER
    if begun.strip():
        thinks = begun.lstrip().startswith(OPEN) and CLOSE not in begun
        return Thinking.ALWAYS if thinks else Thinking.NEVER
    return Thinking.ALWAYS if parser == "deepseek_r1" or ends.endswith(OPEN) else Thinking.MAYBE


class ReasoningReader:
    """Parses the reasoning of one answer incrementally. White space around it is dropped."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._held = ""
        self._within: bool | None = False if thinking is Thinking.NEVER else None  # None: not known yet
        self._begins = False  # whether white space before what comes next is to be dropped

    @property
    def is_done(self) -> bool:
        """Whether all that follows is the answer."""
        return self._within is False and not self._begins

    def read(self, text: str, *, last: bool) -> tuple[str, str]:
        """The reasoning and the answer in ``text`` and what was held back. ``last``: nothing follows."""
        if self._within is None:
            self._held += text
            text = self._held.lstrip()
            if not last and len(text) < len(OPEN) and OPEN.startswith(text):
                return "", ""
            begun = text.startswith(OPEN)
            self._within = self._begins = begun or self._thinking is Thinking.ALWAYS
            text = text.removeprefix(OPEN) if begun else self._held
            self._held = ""
        reasoning = ""
        if self._within:
            reasoning, text = self._split(text, last=last)
        return reasoning, self._without_space(text)

    def _split(self, text: str, *, last: bool) -> tuple[str, str]:
        text = self._without_space(self._held + text)
        end = text.find(CLOSE)
        if end < 0:
            held = 0 if last else tail_of(text, CLOSE)
            self._held = text[len(text) - held :]
            return text[: len(text) - held], ""
        self._within, self._begins, self._held = False, True, ""
        return text[:end].rstrip(), text[end + len(CLOSE) :]

    def _without_space(self, text: str) -> str:
        if self._begins:
            text = text.lstrip()
            self._begins = not text
        return text
