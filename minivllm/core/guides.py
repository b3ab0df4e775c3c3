"""Guided decoding: which tokens are allowed next, given the output so far, by a grammar or by ``bad_words``.

The host computes the masks, one bit per token, while the layers of the step that will sample with them run: like any
step it is launched before the newest token is known, and it samples once the masks arrive (``Executor.guide``). A step
that verifies a draft has a mask for each of its tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.batch import Batch, TokenMasks, mask_words
from minivllm.core.grammars import check_tags, clear_bits, few_lines, grammars_of, matcher_of, text_of
from minivllm.core.matchers import BEGIN, THOUGHTS, AfterReasoning, AnyOf, Spaces, parts_of
from minivllm.cores import usable_cores
from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.config.engine_config import SchedulerOptions
    from minivllm.core.interfaces import Sampler
    from minivllm.core.sampling_params import SamplingParams
    from minivllm.core.structured_outputs import StructuredOutputsParams
    from minivllm.models.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_BYTES = 4  # per word
# Making a matcher takes 1 ms or more with 150,000 tokens. Copies of one share its resource limits and run one at a
# time. A matcher that took longer to make is copied more often, so that making costs each request at most 1 ms.
_KEPT, _COPIES, _OF_EACH = 64, 16, 1e-3  # matchers, copies of each at least, seconds per copy
_THREADS = 12  # that compute masks, at most: for 256 sequences 12 take 0.8 ms, 8 take 1.0 ms, one takes 6 ms


def masks_per_slot(sampler_class: type[Sampler], options: SchedulerOptions) -> int:
    """``Sampler.masks_per_slot``: one for each token that a step may sample for a guided sequence."""
    return 1 + options.num_speculative_tokens if sampler_class.masks_drafts else 1


class BadWords:
    """A request's ``bad_words`` as tokens."""

    def __init__(self, words: Iterable[Sequence[int]], num_words: int) -> None:
        """``num_words``: int32 words in a row of bits."""
        longer: dict[int, list[tuple[list[int], int]]] = {}  # by last token but one: all but the last, and the last
        single: set[int] = set()
        for *start, last in dict.fromkeys(map(tuple, words)):
            if start:
                longer.setdefault(start[-1], []).append((start, last))
            else:
                single.add(last)
        self.reach = max((len(start) for ends in longer.values() for start, _ in ends), default=0)
        self._longer, self.num_words = longer, num_words
        self._others = np.full(num_words, -1, dtype=np.int32)
        clear_bits(self._others, single)

    def hold_back(self, bits: np.ndarray, said: list[int]) -> None:
        """Clear the bits of tokens that would complete a bad word. said: at least the last ``reach`` tokens, or all."""
        bits[: len(self._others)] &= self._others  # a row may be wider than the model's vocabulary
        ends = self._longer.get(said[-1], ()) if said else ()
        clear_bits(bits, (last for start, last in ends if said[-len(start) :] == start))


class Guide:
    """The guided decoding state of one completion."""

    def __init__(
        self, matcher: Any, bad_words: BadWords | None, ends: frozenset[int], stand_ins: Iterable[int] = (),
        drafts: bool = False,
    ) -> None:  # fmt: skip
        """``matcher``: a fresh llguidance matcher, or None; ``ends``: the model's end tokens; ``stand_ins``: the
        matcher's end tokens that are not the model's, which must not be sampled; ``drafts``: whether the sequence may
        have drafts."""
        self.matcher, self.drafts = matcher, drafts
        self._stand_ins = tuple(stand_ins)
        self._bad_words = bad_words
        self._ends = ends
        self._said: list[int] = []  # the last tokens, as many as bad words need
        self._sent: dict[tuple[int, int], bytes] = {}  # the masks on the device, by row there and slot's generation

    @property
    def ended(self) -> bool:
        """Whether the grammar allows nothing more and there is no end token to sample."""
        return self.matcher is not None and not self._ends and self.matcher.is_stopped()

    @property
    def failed(self) -> bool:
        """Whether its grammar can no longer be followed because it exceeds llguidance's limits. Then only an end token
        is allowed."""
        return self.matcher is not None and self.matcher.is_error()

    def is_new(self, place: tuple[int, int], bits: np.ndarray) -> bool:
        """Whether this mask differs from the one last sent to this place, a row and its slot's generation. Records
        it."""
        before, now = self._sent.get(place), bits.tobytes()
        self._sent[place] = now
        return before != now

    def allowed(self, tokens: list[int]) -> int:
        """How many of a draft's tokens the grammar allows; they follow the newest token."""
        return len(tokens) if self.matcher is None else int(self.matcher.validate_tokens(tokens))

    def then(self, token: int) -> Guide:
        """A copy that has taken the token, a draft's, unless it is not allowed."""
        other = copy(self)
        other.matcher = None if self.matcher is None else self.matcher.deep_copy()
        if other.allowed([token]):
            other.take(token)
        return other

    def cut_by(self, token: int) -> bool:
        """Whether output that ends with ``token`` (not yet taken) is incomplete under the grammar."""
        return self.matcher is not None and token in self._ends and not self.matcher.is_accepting()

    def take(self, token: int) -> None:
        """Record a sampled token."""
        if self._bad_words is not None and self._bad_words.reach:
            self._said = [*self._said, token][-self._bad_words.reach :]
        if self.matcher is None:
            return
        if token in self._ends and self.matcher.is_accepting():
            self.matcher = None  # what follows an end token (``ignore_eos``) is unconstrained
        elif not self.matcher.consume_token(token):
            _log_failure(self.matcher)

    def hold_back(self, bits: np.ndarray) -> None:
        """Clear from the matcher's mask, (words,) int32, the tokens that are not allowed for other reasons."""
        if isinstance(self.matcher, AfterReasoning):
            self.matcher.widen(bits)
        if self._stand_ins and self.matcher is not None:
            clear_bits(bits, self._stand_ins)
        if self._bad_words is None:
            return
        before = None if self.matcher is None else bits.copy()
        self._bad_words.hold_back(bits, self._said)
        if before is not None and not bits[: self._bad_words.num_words].any():  # the grammar allows nothing else
            bits[:] = before


class Guides:
    """Makes an engine's guides and computes their masks."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Iterable[int], masks_per_slot: int = 1) -> None:
        self._masks_per_slot = masks_per_slot
        self._tokenizer, self._vocab, self._ends = tokenizer, vocab_size, frozenset(ends)
        self._words = mask_words(vocab_size)
        self._width = self._words  # of a row; larger if the tokenizer has more tokens than the model
        self._bits = np.empty((0, self._width), dtype=np.int32)  # reused for all masks
        self._for_grammars: Any = None  # llguidance's tokenizer and its threads, made when first needed
        self._threads: Any = None
        self._refused = ""  # why there is no such tokenizer
        self._known_ends: frozenset[int] = frozenset()  # the model's end tokens that grammars know
        self._stand_ins: frozenset[int] = frozenset()
        self._matchers: dict[str, tuple[Any, int]] = {}  # by grammar: the last used ones, and how many copies are left
        self._spaces: Spaces | None = None  # found when first needed
        # Results for the newest request: the next one often has another prompt and the same parameters.
        self._newest_words: tuple[list[str], BadWords] | None = None
        self._newest_grammars: tuple[str, list[str]] | None = None  # by their text

    def of(self, params: SamplingParams) -> list[Guide | None]:
        """One per completion. Raises RequestError for a grammar that is invalid or too large for llguidance."""
        if not params.guided:
            return [None] * params.n
        words = self._bad_words(params.bad_words) if params.bad_words else None
        asked, ends, drafts = params.structured_outputs, self._ends, self._masks_per_slot > 1
        if asked is None:
            return [Guide(None, words, ends, drafts=drafts) for _ in range(params.n)]
        if self._for_grammars is None:
            self._make_ready()
        grammars, stand_ins = self._grammars(asked), self._stand_ins
        try:
            matchers = [self._answers(grammars, asked.reasoning) for _ in range(params.n)]
            return [Guide(matcher, words, self._known_ends, stand_ins, drafts) for matcher in matchers]
        except RequestError:
            check_tags(asked, self._for_grammars)
            raise

    def masks(self, batch: Batch, guided: Sequence[tuple[int, Guide]]) -> TokenMasks:
        """The allowed next tokens of these rows of the batch, whose guides have taken all tokens but a draft's; only
        where they have changed. Valid until the next call."""
        guides: list[Guide] = []
        for row, guide in guided:
            prompt_row = row - batch.num_decodes
            if prompt_row > 0 and batch.slots[row] == batch.slots[row - 1]:  # of a draft
                guide = guides[-1].then(int(batch.token_ids[prompt_row]))
            guides.append(guide)
        bits, rows = self.bits(guides), [row for row, _ in guided]
        slots, per = batch.slots[rows], self._masks_per_slot
        if per > 1:
            slots = slots * per + (batch.num_computed[rows] + batch.num_new[rows]) % per
        places = zip(slots.tolist(), batch.generations[rows].tolist(), strict=True)
        new = np.array([g.is_new(at, its) for at, g, its in zip(places, guides, bits, strict=True)], dtype=bool)
        return TokenMasks(slots, bits) if new.all() else TokenMasks(slots[new], bits[new])

    def bits(self, guides: Sequence[Guide]) -> np.ndarray:
        """(m, words) int32: the allowed next tokens of each guide. Valid until the next call."""
        words = self._width
        parts = [() if guide.matcher is None else parts_of(guide.matcher) for guide in guides]
        rows = len(guides) + sum(len(its) - 1 for its in parts if its)
        if rows > len(self._bits) or words > self._bits.shape[1]:
            self._bits = np.empty((2 * rows, words), dtype=np.int32)
        bits, found = self._bits[:rows], self._bits[: len(guides)]
        asked: list[tuple[Any, int]] = []
        joined: list[tuple[int, int]] = []  # rows of guides, and of their matchers' other parts
        for row, its in enumerate(parts):
            if its:
                asked.append((its[0], row))
            else:
                found[row].fill(-1)
            for other in its[1:]:
                joined.append((row, len(guides) + len(joined)))
                asked.append((other, joined[-1][1]))
        if len(asked) == 1:
            ((matcher, row),) = asked
            matcher.unsafe_compute_mask_ptr(bits[row].ctypes.data, words * _BYTES)
        elif asked:
            self._threads.unsafe_compute_mask_ptr(asked, bits.ctypes.data, words * _BYTES, rows)
        for matcher, _ in asked:
            if matcher.is_error():
                _log_failure(matcher)
        for row, other in joined:
            bits[row] |= bits[other]
        for guide, its in zip(guides, found, strict=True):
            guide.hold_back(its)
        return found[:, : self._words]

    def _make_ready(self) -> None:
        """Make llguidance's tokenizer and threads for the first grammar; takes a second with 150,000 tokens.

        Raises RequestError: the tokenizer does not support it, or llguidance is not installed.
        """
        if self._refused:
            raise RequestError(self._refused)
        try:
            from llguidance import LLExecutor
        except ImportError as error:
            raise RequestError(f"structured_outputs needs llguidance ({error}); type: pip install llguidance") from None
        try:
            self._for_grammars = self._tokenizer.for_grammars(self._vocab, self._ends)
        except RequestError as error:
            self._refused = str(error)
            raise
        self._threads = LLExecutor(max(1, min(_THREADS, usable_cores() * 3 // 4)))
        own = frozenset(self._for_grammars.eos_tokens)
        self._known_ends, self._stand_ins = self._ends & own, own - self._ends
        self._width = mask_words(self._for_grammars.vocab_size)

    def _answers(self, grammars: Sequence[str], reasoning: str | None) -> Any:
        """A fresh matcher of answers that match any of these grammars, after reasoning if there may be some."""
        answer, *others = (self._matcher(grammar) for grammar in grammars)
        if others:
            answer = AnyOf([answer, *others])
        if reasoning is None:
            return answer
        if self._spaces is None:
            self._spaces = self._find_spaces()
        begin = self._matcher(BEGIN) if reasoning == "maybe" else None
        return AfterReasoning(answer, self._matcher(THOUGHTS), begin, self._spaces)

    def _find_spaces(self) -> Spaces:
        decode, size = self._for_grammars.decode_bytes, self._for_grammars.vocab_size
        tokens = frozenset(token for token in range(size) if (text := decode([token])) and not text.strip())
        bits = np.full(self._width, -1, dtype=np.int32)
        clear_bits(bits, tokens)
        return Spaces(tokens, ~bits)

    def _matcher(self, grammar: str) -> Any:
        """A copy of the cached matcher. Copies share their caches, and compute one at a time."""
        matcher, left = self._matchers.pop(grammar, (None, 0))
        if not left:
            began = time.thread_time()
            matcher = matcher_of(grammar, self._for_grammars)
            left = max(_COPIES, int((time.thread_time() - began) / _OF_EACH))
        self._matchers[grammar] = matcher, left - 1
        if len(self._matchers) > _KEPT:
            del self._matchers[next(iter(self._matchers))]
        return matcher.deep_copy()

    def _grammars(self, asked: StructuredOutputsParams) -> list[str]:
        text = text_of(asked)
        if text is None or self._newest_grammars is None or self._newest_grammars[0] != text:
            grammars = grammars_of(asked)
            self._newest_grammars = None if text is None else (text, grammars)
            return grammars
        return self._newest_grammars[1]

    def _bad_words(self, words: Sequence[str]) -> BadWords:
        if self._newest_words is None or self._newest_words[0] != words:
            self._newest_words = list(words), BadWords(self._as_tokens(words), self._words)
        return self._newest_words[1]

    def _as_tokens(self, words: Sequence[str]) -> list[list[int]]:
        """Each word's tokens at the start of a text and, if they differ, after a space. vLLM keeps the latter only if
        there are equally many, so a word that is one token after a space and two without is not blocked there."""
        bare = [word.lstrip() for word in dict.fromkeys(words)]
        found = self._tokenizer.encode_batch([*bare, *(" " + word for word in bare)], add_special_tokens=False)
        plain, spaced = found[: len(bare)], found[len(bare) :]
        return [ids for ids in plain if ids] + [b for a, b in zip(plain, spaced, strict=True) if b and b != a]


def _log_failure(matcher: Any) -> None:
    _LOG.warning("a grammar cannot be followed any further: %s", few_lines(matcher.get_error()))
