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
        start = max(len(prompt_ids) - CONTEXT, 0)
        while start and decode(list(prompt_ids[start:])).startswith(_NO_TEXT):
            start -= 1
        self._ids = list(prompt_ids[start:])
        self._read = len(self._ids)
        self._before = decode(self._ids)  # the text of _ids[:_read], whose end may be the beginning of a character

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
        if not text.startswith(self._before):  # its last character has become whole
            end = len(self._before)
            while self._before[:end].endswith(_NO_TEXT) and len(self._before) - end < _UNFINISHED:
                end -= 1
            self._before = self._before[:end]
        waits = len(text) <= len(self._before) or text.endswith(_NO_TEXT)
        if waits and not final and len(self._ids) - self._read < self.WINDOW:
            return ""
        new = text[len(self._before) :]
        del self._ids[: self._read]  # what is new now is the next tokens' neighbour
        self._read = len(self._ids)
        self._before = self._decode(self._ids)
        return new
