"""One sequence's text as its tokens come: only what later tokens cannot change is given out.

``WindowDetokenizer`` works for every tokenizer, ``ByteDetokenizer`` for those whose tokens are byte strings, at a
twentieth of the cost. Both give, put together, what decoding everything at once gives, but for bytes that are no text:
these become U+FFFD one by one, where some tokenizers make one of a whole run.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

CONTEXT = 6  # prompt tokens that the first output token sees, and more if these begin within a character
_NO_TEXT = "\ufffd"  # what stands for bytes that are no character, or not yet
_UNFINISHED = 3  # bytes of a character's four at most


class Detokenizer(ABC):
    @abstractmethod
    def add(self, ids: Iterable[int]) -> str:
        """Take in new tokens; returns the text that became certain."""

    @abstractmethod
    def finish(self, ids: Sequence[int] = ()) -> str:
        """The last tokens and all that waited: a character that was never completed comes out as U+FFFD."""


class ByteDetokenizer(Detokenizer):
    """Tokens are byte strings: ``token_bytes`` has each id's, empty for those that are not text."""

    def __init__(self, token_bytes: Mapping[int, bytes], prompt_ids: Sequence[int] = ()) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.add(prompt_ids[-CONTEXT:])  # the prompt may end within a character

    def add(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join([self._bytes[i] for i in ids]))

    def finish(self, ids: Sequence[int] = ()) -> str:
        return self._decoder.decode(b"".join([self._bytes[i] for i in ids]), final=True)


class WindowDetokenizer(Detokenizer):
    """Decodes a window that starts a little before the new tokens, because a token's spacing depends on its neighbour.

    ``_ids[:_read]`` is out as text already; ``_ids[_read:]`` waits to end on a whole character. The window stays a few
    tokens long, however long the text is.
    """

    WINDOW = 32  # tokens that may wait; a character has 4 bytes at most, so that more are no character

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        ids = list(prompt_ids[-CONTEXT - _UNFINISHED :])
        self._ids = ids[self._beginning(ids, max(len(ids) - CONTEXT, 0)) :]
        self._read = len(self._ids)
        self._before = decode(self._ids)  # the text of _ids[:_read], whose end may be the beginning of a character
        self._cut = self._before.endswith(_NO_TEXT)  # perhaps of one that is to come out

    def add(self, ids: Iterable[int]) -> str:
        out = []
        for token in ids:
            self._ids.append(token)
            out.append(self._emit(final=False))
        return "".join(out)

    def finish(self, ids: Sequence[int] = ()) -> str:
        self._ids += ids
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        if self._read == len(self._ids):
            return ""
        text = self._decode(self._ids)
        final = final or len(self._ids) - self._read >= self.WINDOW
        if text.endswith(_NO_TEXT) and not final:
            return ""
        new = self._new(text)
        if not new and not final:
            return ""
        start, self._cut = self._read, False  # what is new now is the next tokens' neighbour
        self._before = self._decode(self._ids[start:])
        if self._before.startswith(_NO_TEXT):  # the prompt's last character has become whole
            start = self._beginning(self._ids, start)
            self._before = self._decode(self._ids[start:])
        del self._ids[:start]
        self._read = len(self._ids)
        return new

    def _new(self, text: str) -> str:
        """Of the text of all ``_ids``, what is not out yet."""
        before, ids = self._before, self._ids
        if text.startswith(before) and not self._cut:  # nearly always
            return text[len(before) :]
        if not before.endswith(_NO_TEXT):
            return self._decode(ids[self._read :])  # bytes that are no text made those before them none, too
        for read in _back(self._read):  # where the first new character may begin
            whole, rest = self._decode(ids[:read]), self._decode(ids[read:])
            if text.startswith(whole) and text[len(whole) :].lstrip(" ") == rest.lstrip(" "):
                return text[len(whole) :]
        for end in _back(len(before)):  # within a token
            if before[end:].startswith(_NO_TEXT) and text.startswith(before[:end]):
                return text[end:]
        return self._decode(ids[self._read :])

    def _beginning(self, ids: list[int], at: int) -> int:
        """``at``, or where the character began that goes on there."""
        for start in _back(at):
            # without the last tokens, too: if their character is unfinished, bytes before it may be no text either
            for end in range(len(ids), max(start, len(ids) - _UNFINISHED - 1), -1):
                if not self._decode(ids[start:end]).startswith(_NO_TEXT):
                    return start
        for start in _back(at):  # U+FFFD itself, of three bytes
            if len(ids) - start >= _UNFINISHED and self._decode(ids[start : start + _UNFINISHED]) == _NO_TEXT:
                return start
        return at


def _back(at: int) -> range:
    """The places at which a character may begin that reaches ``at``, the nearest first."""
    return range(at, max(at - _UNFINISHED, 0) - 1, -1)
