"""Combines llguidance matchers: alternative kinds of answers, and reasoning before an answer.

A single grammar could express this, but llguidance's lexer is greedy: where one alternative continues with a long
literal, another's short token would never end. So each alternative has its own matcher, and a token is allowed if any
of them allows it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

THOUGHTS = r"start: up_to_end" + "\n" + r"up_to_end[lazy]: /(.|\n)*<\/think>/"
BEGIN = 'start: "<think>"'
_MOST_SPACES = 4  # tokens between reasoning and answer, which otherwise might never begin


@dataclass(frozen=True, slots=True)
class Spaces:
    """The tokens that are white space."""

    tokens: frozenset[int]
    bits: np.ndarray  # (words,) int32: as in ``TokenMasks.bits``


class CompositeMatcher(ABC):
    """The part of a matcher's interface that guides use, on several of llguidance's matchers."""

    @abstractmethod
    def parts(self) -> list[Any]:
        """llguidance's matchers whose masks together are this one's."""

    @abstractmethod
    def deep_copy(self) -> CompositeMatcher: ...

    @abstractmethod
    def consume_token(self, token: int) -> bool:
        """Advance by a token; returns whether it was allowed."""

    def validate_tokens(self, tokens: list[int]) -> int:
        """How many of them may follow, as llguidance's method."""
        trial = self.deep_copy()
        return next((i for i, token in enumerate(tokens) if not trial.consume_token(token)), len(tokens))

    @abstractmethod
    def is_accepting(self) -> bool: ...

    @abstractmethod
    def is_stopped(self) -> bool: ...

    def is_error(self) -> bool:
        return all(part.is_error() for part in self.parts())

    def get_error(self) -> str:
        return str(self.parts()[0].get_error())


class AnyOf(CompositeMatcher):
    """An answer that may fit any of several grammars."""

    def __init__(self, matchers: list[Any]) -> None:
        """``matchers``: fresh ones of llguidance."""
        self._alive = matchers

    def parts(self) -> list[Any]:
        return self._alive

    def deep_copy(self) -> AnyOf:
        return AnyOf([matcher.deep_copy() for matcher in self._alive])

    def validate_tokens(self, tokens: list[int]) -> int:
        return max(matcher.validate_tokens(tokens) for matcher in self._alive)

    def consume_token(self, token: int) -> bool:
        alive = [matcher for matcher in self._alive if matcher.validate_tokens([token])]
        taken = [matcher.consume_token(token) for matcher in alive or self._alive]
        self._alive = alive or self._alive
        return any(taken)

    def is_accepting(self) -> bool:
        return any(matcher.is_accepting() for matcher in self._alive)

    def is_stopped(self) -> bool:
        return all(matcher.is_stopped() for matcher in self._alive)


class AfterReasoning(CompositeMatcher):
    """Reasoning, which may be any text, then an answer."""

    def __init__(self, answer: Any, thoughts: Any, begin: Any, spaces: Spaces) -> None:
        """Fresh matchers of the answer and of ``THOUGHTS``. ``begin``: of ``BEGIN``, if the output has reasoning only
        if it begins with that; None: the output starts within reasoning."""
        self._answer, self._thoughts, self._begin = answer, thoughts, begin
        self._at_once = None if begin is None else answer.deep_copy()  # the answer, if there is no reasoning
        self._thinks = begin is None
        self._spaces, self._may_follow = spaces, 0  # how many tokens of white space may come before the answer

    def parts(self) -> list[Any]:
        if self._thinks:
            return [self._thoughts]
        now = (self._at_once, self._begin) if self._begin is not None else (self._answer,)
        return [part for matcher in now if matcher is not None for part in parts_of(matcher)]

    def deep_copy(self) -> AfterReasoning:
        other = copy(self)
        other._answer, other._thoughts = self._answer.deep_copy(), self._thoughts.deep_copy()
        other._begin = None if self._begin is None else self._begin.deep_copy()
        other._at_once = None if self._at_once is None else self._at_once.deep_copy()
        return other

    def widen(self, bits: np.ndarray) -> None:
        """Add what is allowed besides ``parts`` to their mask, (words,) int32."""
        if self._may_follow:
            bits |= self._spaces.bits

    def consume_token(self, token: int) -> bool:
        if self._thinks:
            taken = bool(self._thoughts.consume_token(token))
            if taken and self._thoughts.is_accepting():
                self._thinks, self._may_follow = False, _MOST_SPACES
            return taken
        if self._begin is not None:
            return self._consume_first(token)
        if self._may_follow and token in self._spaces.tokens and not self._answer.validate_tokens([token]):
            self._may_follow -= 1
            return True
        self._may_follow = 0
        return bool(self._answer.consume_token(token))

    def _consume_first(self, token: int) -> bool:
        """Advance by a token while it is open whether the output begins with reasoning or with the answer."""
        if not self._begin.validate_tokens([token]):
            if self._at_once is None:
                return False
            self._answer, self._at_once, self._begin = self._at_once, None, None
            return bool(self._answer.consume_token(token))
        self._begin.consume_token(token)
        if self._begin.is_accepting():
            self._thinks, self._at_once, self._begin = True, None, None
        elif self._at_once is not None:
            if self._at_once.validate_tokens([token]):
                self._at_once.consume_token(token)
            else:
                self._at_once = None
        return True

    def is_accepting(self) -> bool:
        if self._thinks:
            return False
        if self._begin is not None:
            return self._at_once is not None and self._at_once.is_accepting()
        return bool(self._answer.is_accepting())

    def is_stopped(self) -> bool:
        return not self._thinks and self._begin is None and bool(self._answer.is_stopped())


def parts_of(matcher: Any) -> list[Any]:
    """llguidance's matchers whose masks together are ``matcher``'s."""
    return matcher.parts() if isinstance(matcher, CompositeMatcher) else [matcher]
