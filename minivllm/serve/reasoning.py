"""Reasoning: what a thinking model writes between ``<think>`` and ``</think>`` before its answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from minivllm.serve.errors import ClientError
from minivllm.serve.held_back import tail_of

if TYPE_CHECKING:
    from minivllm.core.outputs import CompletionOutput, Logprob

OPEN, CLOSE = "<think>", "</think>"
Decode = Callable[[Sequence[int]], str]
_STEP, _OVERLAP = 256, 32  # tokens; a tag may span two windows


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
        # Whether what comes next is reasoning; None: not known yet.
        self.within: bool | None = False if thinking is Thinking.NEVER else None
        self._begins = False  # whether white space before what comes next is to be dropped
        self.has_ended = False  # whether the answer has had reasoning, and it is over

    @property
    def is_done(self) -> bool:
        """Whether all that follows is the answer."""
        return self.within is False and not self._begins

    def read(self, text: str, *, last: bool) -> tuple[str, str]:
        """The reasoning and the answer in ``text`` and what was held back. ``last``: nothing follows."""
        if self.within is None:
            self._held += text
            text = self._held.lstrip()
            if not last and len(text) < len(OPEN) and OPEN.startswith(text):
                return "", ""
            begun = text.startswith(OPEN)
            self.within = self._begins = begun or self._thinking is Thinking.ALWAYS
            text = text.removeprefix(OPEN) if begun else self._held
            self._held = ""
        reasoning = ""
        if self.within:
            reasoning, text = self._split(text, last=last)
        return reasoning, self._without_space(text)

    def _split(self, text: str, *, last: bool) -> tuple[str, str]:
        text = self._without_space(self._held + text)
        end = text.find(CLOSE)
        if end < 0:
            held = 0 if last else tail_of(text, CLOSE)
            self._held = text[len(text) - held :]
            return text[: len(text) - held], ""
        self.within, self._begins, self._held, self.has_ended = False, True, "", True
        return text[:end].rstrip(), text[end + len(CLOSE) :]

    def _without_space(self, text: str) -> str:
        if self._begins:
            text = text.lstrip()
            self._begins = not text
        return text


class Thoughts:
    """The reasoning of one choice, taken out of its outputs. ``tokens``: how many it has had, those of its tags
    included."""

    def __init__(self, thinking: Thinking, decode: Decode, *, hidden: bool) -> None:
        """``decode``: as the choice's text is. ``hidden``: whether it is dropped, with its log-probabilities."""
        self.tokens = 0
        self._reader, self._decode, self._hidden = ReasoningReader(thinking), decode, hidden
        self._ids: list[int] = []  # until the answer begins
        self._logprobs: list[dict[int, Logprob]] = []  # of these, if they may have to be hidden

    def split(self, new: CompletionOutput) -> tuple[str, CompletionOutput]:
        """The reasoning in ``new``, and ``new`` without it."""
        reader = self._reader
        if reader.is_done:
            return "", new
        was_answer = reader.within is False
        reasoning, text = reader.read(new.text, last=new.finished())
        new = replace(new, text=text)
        if not was_answer:
            new = self._count(new)
        return "" if self._hidden else reasoning, new

    def _count(self, new: CompletionOutput) -> CompletionOutput:
        self._ids += new.token_ids
        if self._reader.has_ended:  # text comes later than its tokens: some of these may be the answer's
            self.tokens = tokens_until(CLOSE, self._ids, self._decode)
        else:
            self.tokens = len(self._ids) if self._reader.within else 0
        if not self._hidden or new.logprobs is None:
            return new
        self._logprobs += new.logprobs
        if self._reader.within is not False:
            return replace(new, token_ids=[], logprobs=[])
        answers, self._logprobs = self._logprobs[self.tokens :], []
        return replace(new, token_ids=self._ids[self.tokens :], logprobs=answers)


def tokens_until(tag: str, ids: Sequence[int], decode: Decode) -> int:
    """The number of ``ids`` up to the one that completes the first ``tag`` in their text; all if there is none."""
    for begin in range(0, len(ids), _STEP):
        start, end = max(begin - _OVERLAP, 0), min(begin + _STEP, len(ids))
        if tag in decode(ids[start:end]):
            return bisect_left(range(end), True, lo=begin, key=lambda n: tag in decode(ids[start:n]))
    return len(ids)
