"""Incremental detokenization of one sequence: only text that later tokens cannot change is returned.

``WindowDetokenizer`` works for every tokenizer, ``ByteDetokenizer`` for those whose tokens are byte strings, at a
twentieth of the cost. The concatenated output of both equals decoding everything at once, except for invalid UTF-8:
each byte becomes one U+FFFD, while some tokenizers make one of a whole run.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

CONTEXT = 6  # prompt tokens decoded before the first output token; more if these start within a character
_NO_TEXT = "\ufffd"  # replaces bytes of an invalid or unfinished character
_UNFINISHED = 3  # bytes at most: a character has up to four


class Detokenizer(ABC):
    @abstractmethod
    def add(self, ids: Iterable[int]) -> str:
        """Add new tokens; returns the text that has become final."""

    @abstractmethod
    def finish(self, ids: Sequence[int] = ()) -> str:
        """Add the last tokens; returns all remaining text. A character that was never completed becomes U+FFFD."""


class ByteDetokenizer(Detokenizer):
    """For tokens that are byte strings: ``token_bytes`` maps each id to its bytes, empty if it is not text."""

    def __init__(self, token_bytes: Mapping[int, bytes], prompt_ids: Sequence[int] = ()) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.add(prompt_ids[-CONTEXT:])  # the prompt may end in mid-character

    def add(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join([self._bytes[i] for i in ids]))

    def finish(self, ids: Sequence[int] = ()) -> str:
        return self._decoder.decode(b"".join([self._bytes[i] for i in ids]), final=True)


class WindowDetokenizer(Detokenizer):
    """Decodes a window that starts a little before the new tokens, because a token's spacing depends on its neighbour.

    ``_ids[:_read]`` has been returned as text; ``_ids[_read:]`` waits until it ends on a whole character. The window
    stays a few tokens long, however long the text is.
    """

    WINDOW = 32  # tokens that may wait: a character has at most 4 bytes, so more cannot be one

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        ids = list(prompt_ids[-CONTEXT - _UNFINISHED :])
        self._ids = ids[self._beginning(ids, max(len(ids) - CONTEXT, 0)) :]
        self._read = len(self._ids)
        self._before = decode(self._ids)  # the text of _ids[:_read], which may end in mid-character
        self._cut = self._before.endswith(_NO_TEXT)  # perhaps one still to be returned

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
        start, self._cut = self._read, False  # the new tokens are the next ones' neighbours
        self._before = self._decode(self._ids[start:])
        if self._before.startswith(_NO_TEXT):  # the prompt's last character is complete now
            start = self._beginning(self._ids, start)
            self._before = self._decode(self._ids[start:])
        del self._ids[:start]
        self._read = len(self._ids)
        return new

    def _new(self, text: str) -> str:
        """The part of the text of all ``_ids`` that has not been returned yet."""
        before, ids = self._before, self._ids
        if text.startswith(before) and not self._cut:  # the usual case
            return text[len(before) :]
        if not before.endswith(_NO_TEXT):
            return self._decode(ids[self._read :])  # invalid bytes made those before them invalid, too
        for read in _back(self._read):  # where the first new character may start
            whole, rest = self._decode(ids[:read]), self._decode(ids[read:])
            if text.startswith(whole) and text[len(whole) :].lstrip(" ") == rest.lstrip(" "):
                return text[len(whole) :]
        for end in _back(len(before)):  # within a token
            if before[end:].startswith(_NO_TEXT) and text.startswith(before[:end]):
                return text[end:]
        return self._decode(ids[self._read :])

    def _beginning(self, ids: list[int], at: int) -> int:
        """``at``, or, if that is in mid-character, where the character starts."""
        for start in _back(at):
            # also try without the last tokens: if their character is unfinished, bytes before it may be invalid, too
            for end in range(len(ids), max(start, len(ids) - _UNFINISHED - 1), -1):
                if not self._decode(ids[start:end]).startswith(_NO_TEXT):
                    return start
        for start in _back(at):  # U+FFFD itself, encoded in three bytes
            if len(ids) - start >= _UNFINISHED and self._decode(ids[start : start + _UNFINISHED]) == _NO_TEXT:
                return start
        return at


def _back(at: int) -> range:
    """Where a character that reaches ``at`` may start, nearest first."""
    return range(at, max(at - _UNFINISHED, 0) - 1, -1)
