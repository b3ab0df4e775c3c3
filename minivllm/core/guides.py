"""What a request's next token may be, where that follows from what it has said: a grammar, words that must not come.

The host finds it, as one bit a token, while the layers of a step that is to sample for such a request run: that step is
launched before the newest token is known, as any other is, and samples when it is (``Executor.guide``). Grammars are
llguidance's: an Earley parser over a lexer of derivatives of regular expressions, asked for all tokens at once along
the trie of the vocabulary (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.core.sampling_params import SamplingParams
    from minivllm.core.structured_outputs import StructuredOutputsParams
    from minivllm.models.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_BITS, _BYTES = 32, 4  # of a word
_SPACES = r"[ \n\r\t]{1,20}"  # in JSON, between its tokens: small models go on and on
_LINES = 4  # of what llguidance says of a grammar, at most


class Guide:
    """Of one completion."""

    def __init__(
        self, matcher: Any, bad_words: Sequence[Sequence[int]], ends: frozenset[int], stand_ins: Iterable[int] = ()
    ) -> None:
        """``matcher``: llguidance's, of whose grammar nothing is said yet, or None; ``ends``: the model's end tokens;
        ``stand_ins``: what the matcher has in their place, which is not to be said."""
        self.matcher = matcher
        self._stand_ins = tuple(stand_ins)
        self._bad_words = bad_words
        self._ends = ends
        self._said: list[int] = []  # as much as bad words need
        self._reach = max((len(word) for word in bad_words), default=1) - 1

    @property
    def ended(self) -> bool:
        """Whether nothing can follow, and there is no token to say so."""
        return self.matcher is not None and not self._ends and self.matcher.is_stopped()

    @property
    def failed(self) -> bool:
        """Whether its grammar cannot be followed any further: it takes more than llguidance allows. All that may come
        then is an end token."""
        return self.matcher is not None and self.matcher.is_error()

    def take(self, token: int) -> None:
        """It was said."""
        if self._reach:
            self._said = [*self._said, token][-self._reach :]
        if self.matcher is None:
            return
        if token in self._ends and self.matcher.is_accepting():
            self.matcher = None  # whoever goes on behind an end token (``ignore_eos``) is free to
        elif not self.matcher.consume_token(token):
            _LOG.warning("a grammar cannot be followed any further: %s", _few_lines(self.matcher.get_error()))

    def hold_back(self, bits: np.ndarray) -> None:
        """Of tokens that may come as far as the matcher goes, (words,) int32, those that may not for other reasons."""
        if self._stand_ins and self.matcher is not None:
            _clear(bits, self._stand_ins)
        if not self._bad_words:
            return
        before, said = None if self.matcher is None else bits.copy(), self._said
        _clear(bits, (last for *start, last in self._bad_words if not start or said[-len(start) :] == start))
        if before is not None and not bits.any():  # a grammar that has no other way
            bits[:] = before


class Guides:
    """Makes an engine's guides, and finds what they allow."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Iterable[int]) -> None:
        self._tokenizer, self._vocab, self._ends = tokenizer, vocab_size, frozenset(ends)
        self._words = -(-vocab_size // _BITS)
        self._bits = np.empty((0, self._words), dtype=np.int32)  # to be written to; wider if the tokenizer is
        self._for_grammars: Any = None  # llguidance's tokenizer, and its threads, made when they are first needed
        self._threads: Any = None
        self._stand_ins: frozenset[int] = frozenset()

    def of(self, params: SamplingParams) -> list[Guide | None]:
        """For each completion. Raises RequestError: a grammar that is none, or more than llguidance can follow."""
        if params.structured_outputs is None and not params.bad_words:
            return [None] * params.n
        matcher = None if params.structured_outputs is None else self._matcher(params.structured_outputs)
        words = self._bad_words(params.bad_words or [])
        copies = (None if matcher is None else matcher.deep_copy() for _ in range(params.n))
        return [Guide(copy, words, self._ends, self._stand_ins) for copy in copies]

    def bits(self, guides: Sequence[Guide]) -> np.ndarray:
        """(m, words) int32: which tokens may come next, of each. They stand until they are asked for again."""
        if len(guides) > len(self._bits):
            self._bits = np.empty((2 * len(guides), self._bits.shape[1]), dtype=np.int32)
        found, words = self._bits[: len(guides)], self._bits.shape[1]
        asked = [(guide.matcher, row) for row, guide in enumerate(guides) if guide.matcher is not None]
        for row, guide in enumerate(guides):
            if guide.matcher is None:
                found[row].fill(-1)
        if len(asked) == 1:
            ((matcher, row),) = asked
            matcher.unsafe_compute_mask_ptr(found[row].ctypes.data, words * _BYTES)
        elif asked:
            self._threads.unsafe_compute_mask_ptr(asked, found.ctypes.data, words * _BYTES, len(found))
        for guide, its in zip(guides, found, strict=True):
            guide.hold_back(its)
        return found[:, : self._words]

    def _matcher(self, asked: StructuredOutputsParams) -> Any:
        try:
            from llguidance import LLExecutor, LLMatcher
        except ImportError as error:
            raise RequestError(f"structured_outputs needs llguidance ({error}); type: pip install llguidance") from None
        if self._for_grammars is None:
            self._for_grammars, self._threads = self._tokenizer.for_grammars(self._vocab, self._ends), LLExecutor()
            self._stand_ins = frozenset(self._for_grammars.eos_tokens) - self._ends
            self._bits = np.empty((0, -(-self._for_grammars.vocab_size // _BITS)), dtype=np.int32)
        matcher = LLMatcher(self._for_grammars, _grammar(asked), log_level=0)
        if matcher.is_error():
            raise RequestError(f"structured_outputs: {_few_lines(matcher.get_error())}")
        return matcher

    def _bad_words(self, words: Iterable[str]) -> list[list[int]]:
        """Each as its tokens, as vLLM finds them: as a text's first, and behind a space where that is a token more
        than the same ones."""
        found: list[list[int]] = []
        for word in words:
            plain, spaced = self._tokenizer.encode_batch([word, " " + word.lstrip()], add_special_tokens=False)
            found.append(plain)
            if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
                found.append(spaced)
        return [ids for ids in found if ids]


def _clear(bits: np.ndarray, tokens: Iterable[int]) -> None:
    words = bits.view(np.uint32)
    for token in tokens:
        if token // _BITS < len(words):
            words[token // _BITS] &= ~np.uint32(1 << token % _BITS)


def _grammar(asked: StructuredOutputsParams) -> str:
    """In llguidance's own notation. Raises RequestError."""
    from llguidance import LLMatcher, grammar_from

    try:
        if (schema := asked.schema()) is not None:
            if asked.disable_any_whitespace:
                return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
            spaces = asked.whitespace_pattern or _SPACES
            return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": spaces})
        if asked.regex is not None:
            return grammar_from("regex", asked.regex)
        if asked.choice is not None:
            return grammar_from("choice", json.dumps(list(asked.choice)))
        return grammar_from("grammar", asked.grammar or "")
    except ValueError as error:
        raise RequestError(f"structured_outputs: {_few_lines(str(error))}") from None


def _few_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[:_LINES])
