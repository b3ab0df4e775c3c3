"""Parses tool calls from what a model writes, piece by piece: a reader for each form that answers with calls have."""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from minivllm.errors import is_text
from minivllm.serve.held_back import tail_of
from minivllm.serve.responses import Call, CalledFunction

if TYPE_CHECKING:
    from minivllm.serve.tool_calls import Dialect

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class CallReader(ABC):
    """Parses the calls of one answer incrementally."""

    within = False  # whether a call has been returned whose arguments are incomplete

    @abstractmethod
    def read(self, text: str, *, last: bool) -> tuple[str, list[Call]]:
        """The plain text and the calls in ``text`` and what was held back; a call without an id continues the previous
        one. ``last``: nothing follows, and nothing is held back."""


class TextBesideCalls(CallReader):
    """For answers with text beside calls; white space around calls is dropped."""

    def __init__(self) -> None:
        self._held, self._called = "", False  # whether what came last was a call

    def _text(self, text: str, *, before_call: bool) -> str:
        if before_call:
            text = text.rstrip()
        if self._called and not text.strip():
            return ""
        self._called = False
        return text

    def _rest(self, tag: str = "") -> str:
        """Take what is held, except a possible beginning of ``tag`` and the white space before it."""
        done = self._held[: len(self._held) - tail_of(self._held, tag)] if tag else self._held
        self._held = self._held[len(done) :]
        return self._text(done, before_call=False)


class GuidedCalls(TextBesideCalls):
    """For an answer that a grammar constrains to a dialect's calls: whatever begins like a call is one, and its
    arguments are streamed. Of a truncated call, what arrived is returned, but nothing before its arguments begin.
    ``alone``: the answer has no text."""

    def __init__(self, dialect: Dialect, *, alone: bool) -> None:
        super().__init__()
        self._alone, self._trigger = alone, dialect.trigger
        self._before, behind = dialect.begin.split("%s")  # a function's name as JSON
        self._begin = re.compile(f'{re.escape(self._before)}"([^"]*)"{re.escape(behind)}')
        self._end, self._ending = dialect.end, False  # whether a call's arguments are complete, but not its end
        self._named = ""  # of a call that has no arguments yet
        self._depth, self._quoted, self._escaped = 0, False, False  # at the end of the arguments so far

    def read(self, text: str, *, last: bool) -> tuple[str, list[Call]]:
        self._held += text
        said = ""
        calls: list[Call] = []
        while True:
            if self.within:
                new = self._arguments()
                if new and self._named:
                    calls.append(_new_call(self._named, new))
                    self._named = ""
                elif new:
                    calls.append(Call(function=CalledFunction(arguments=new)))
            if self._ending and (last or len(self._held) >= len(self._end)):
                self._held, self._ending = self._held[len(self._end) :], False
            if self.within or self._ending:
                return said, calls
            begun = self._held.find(self._before)
            if begun < 0:
                said += self._rest(self._before)
                if last and not self._held.lstrip().startswith(self._trigger):
                    said += self._rest()
                return said, calls
            said += self._text(self._held[:begun], before_call=True)
            self._held = self._held[begun:]
            if (begin := self._begin.match(self._held)) is None:
                return said, calls
            self._held = self._held[begin.end() :]
            self._named = begin[1]
            self.within = self._called = True

    def _text(self, text: str, *, before_call: bool) -> str:
        return "" if self._alone else super()._text(text, before_call=before_call)

    def _arguments(self) -> str:
        """What of them is held, taken out. They end before the first brace that closes none of theirs."""
        for at, character in enumerate(self._held):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
            elif character == "}" and not self._depth:
                new, self._held = self._held[:at], self._held[at:]
                self.within, self._ending = False, True
                return new
            else:
                self._quoted = character == '"'
                self._depth += (character in "{[") - (character in "]}")
        new, self._held = self._held, ""
        return new


class CallsOrJson(CallReader):
    """For an answer that a grammar constrains to either calls or JSON, which is its text.

    Where calls are JSON, too, one that begins like a call is held back to its end, to see that it has nothing else.
    """

    def __init__(self, dialect: Dialect, names: Iterable[str]) -> None:
        """``names``: the functions'."""
        self._begins = tuple(dialect.begin % json.dumps(name) for name in names)
        self._like_json = dialect.begin.startswith("{")
        self._keys = re.findall(r'"(\w+)": ', dialect.begin)
        self._calls = GuidedCalls(dialect, alone=True)
        self._held: str | None = ""  # until it is known what the answer is
        self._are_calls = False

    @property
    def within(self) -> bool:  # type: ignore[override]
        return self._calls.within

    def read(self, text: str, *, last: bool) -> tuple[str, list[Call]]:
        if self._held is not None:
            text = self._held + text
            self._are_calls = text.startswith(self._begins)
            unknown = not self._are_calls and any(begin.startswith(text) for begin in self._begins)
            if not last and (unknown or (self._are_calls and self._like_json)):
                self._held = text
                return "", []
            if self._like_json:
                self._are_calls &= not self._has_other_keys(text)
            elif unknown:  # a call that was cut off
                self._are_calls = True
            self._held = None
        return self._calls.read(text, last=last) if self._are_calls else (text, [])

    def _has_other_keys(self, text: str) -> bool:
        try:
            return list(json.loads(text)) != self._keys
        except ValueError:
            return False  # it was cut off


class TaggedCalls(TextBesideCalls):
    """Text, and calls between ``<tool_call>`` and ``</tool_call>``. Anything else between the tags is text."""

    def __init__(self) -> None:
        super().__init__()
        self._tried = 0  # of what is held: no closing tag before this place ends a call

    def read(self, text: str, *, last: bool) -> tuple[str, list[Call]]:
        self._held += text
        said = ""
        calls: list[Call] = []
        while (begin := self._held.find(OPEN)) >= 0:
            end, call = self._first_call(begin + len(OPEN), last=last)
            if end is None:  # white space before it is dropped only if it is a call
                begin = len(self._held[:begin].rstrip())
                said += self._text(self._held[:begin], before_call=False)
                self._held, self._tried = self._held[begin:], self._tried - begin
                return said, calls
            if call is None:
                said += self._text(self._held[:end], before_call=False)
            else:
                said += self._text(self._held[:begin], before_call=True)
                calls.append(call)
                self._called = True
            self._held, self._tried = self._held[end:], 0
        return said + self._rest("" if last else OPEN), calls

    def _first_call(self, begin: int, *, last: bool) -> tuple[int | None, Call | None]:
        """The end of the call that begins there (None: not known yet), and the call, if it is one."""
        close = self._held.find(CLOSE, max(begin, self._tried))
        while close >= 0:
            try:
                return close + len(CLOSE), _call(json.loads(self._held[begin:close]))
            except (ValueError, RecursionError) as error:
                if not str(error).startswith("Unterminated string"):  # the tag is within one
                    return close + len(CLOSE), None
            self._tried = close + len(CLOSE)
            close = self._held.find(CLOSE, self._tried)
        if not last:
            return None, None
        try:  # some models leave the last tag out
            return len(self._held), _call(json.loads(self._held[begin:]))
        except (ValueError, RecursionError):
            return len(self._held), None


class BareCalls(CallReader):
    """An answer that is only one call, or several separated by ``;``; anything else is text."""

    def __init__(self) -> None:
        self._held: str | None = ""  # None: it is text

    def read(self, text: str, *, last: bool) -> tuple[str, list[Call]]:
        if self._held is None:
            return text, []
        self._held += text
        begins = self._held.lstrip()
        if not last and (not begins or begins.startswith("{")):
            return "", []
        held, self._held = self._held, None
        calls = _bare_calls(begins) if last else None
        return (held, []) if not calls else ("", calls)


def _bare_calls(text: str) -> list[Call] | None:
    calls: list[Call] = []
    try:
        while text:
            said, end = json.JSONDecoder().raw_decode(text)
            call = _call(said)
            if call is None:
                return None
            calls.append(call)
            text = text[end:].strip().removeprefix(";").lstrip()
    except (ValueError, RecursionError):
        return None
    return calls


def _call(said: Any) -> Call | None:
    """The parsed JSON as a call, if it has a name and an object. Raises ValueError for NaN and infinity."""
    if not isinstance(said, dict) or not is_text(said.get("name")):
        return None
    arguments = said.get("arguments", said.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not is_text(text):  # halves of characters stay spelled out
        text = json.dumps(arguments)
    return _new_call(said["name"], text)


def _new_call(name: str, arguments: str) -> Call:
    function = CalledFunction(name=name, arguments=arguments)
    return Call(id=f"call_{uuid.uuid4().hex}", type="function", function=function)
