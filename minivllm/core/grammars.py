"""What an answer has to be as llguidance's matcher, which says which tokens may come: an Earley parser over a lexer of
derivatives of regular expressions, asked for all tokens at once along the trie of the vocabulary
(https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.structural_tags import StructuralTag
from minivllm.errors import RequestError, shown

if TYPE_CHECKING:
    from minivllm.core.structured_outputs import StructuredOutputsParams

_SPACES = r"[ \n\r\t]{1,20}"  # in JSON, between its tokens: small models go on and on
_LINES, _WIDTH = 4, 200  # of what llguidance says of a grammar, at most
# What a grammar may take: as many items as objects with thousands of properties have, and half of what llguidance
# itself allows for a regular expression's repeats, 0.4 s of everybody's time.
_ROW, _ITEMS, _FUEL = 20_000, 200_000, 100_000
_MOST_REMAINDERS = 1 << 16  # of ``multipleOf``s, whose automaton has a state for each: 0.2 s
_MOST_PROPERTIES = 2000  # of an object: 0.4 s, which grow with their square


def matcher_of(grammar: str, tokenizer: Any) -> Any:
    """llguidance's matcher of a ``grammar_of``, with its own kind of ``tokenizer``. Raises RequestError: there is no
    such grammar, no answer that it allows, or it takes more than one may."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_items_in_row=_ROW, step_max_items=_ITEMS, step_lexer_fuel=_FUEL, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        why = few_lines(matcher.get_error())
        if why.startswith("panic"):  # it counts symbols in 16 bits
            raise RequestError("structured_outputs: the grammar is too large; simplify it")
        raise RequestError(f"structured_outputs: this grammar is not supported: {why}")
    trial = matcher.deep_copy()
    for place in ("begin", "go on"):  # what takes too much mostly does so at once
        bits = np.frombuffer(trial.compute_bitmask(), dtype=np.int32).copy()
        clear_bits(bits, tokenizer.eos_tokens)
        if trial.is_error() or not (trial.is_accepting() or bits.any()):
            why = few_lines(trial.get_error())
            if not why or why.startswith("NoExtension"):  # llguidance's name for that
                why = "there is no text that fits"
            raise RequestError(f"structured_outputs: an answer cannot {place}: {why}")
        if not bits.any():
            break
        word = int(bits.argmax()) if bits.max() > 0 else int(bits.argmin())
        lowest = int(bits[word]) & -int(bits[word])
        trial.consume_token(word * 32 + (lowest & 0xFFFFFFFF).bit_length() - 1)
    return matcher


def clear_bits(bits: np.ndarray, tokens: Iterable[int]) -> None:
    """bits (words,) int32: those of these tokens, as far as there are any, become 0."""
    words = bits.view(np.uint32)
    for token in tokens:
        if token // 32 < len(words):
            words[token // 32] &= ~np.uint32(1 << token % 32)


def grammar_of(asked: StructuredOutputsParams) -> str:
    """In llguidance's own notation. Raises RequestError."""
    from llguidance import LLMatcher, grammar_from

    spaces: Any = {"whitespace_pattern": asked.whitespace_pattern or _SPACES}
    if asked.disable_any_whitespace:
        spaces = {"whitespace_flexible": False}
    if asked.structural_tag is not None:
        tags = StructuralTag.of(asked.structural_tag)
        _check_cost([tag.schema for tag in tags.tags])
        return LLMatcher.grammar_from_lark(tags.lark(spaces))
    if (schema := asked.schema()) is not None:
        _check_cost(schema)
        try:
            return LLMatcher.grammar_from_json_schema(schema, overrides=spaces)
        except ValueError as error:  # a number of more than 64 bits, half of a character
            raise RequestError(f"structured_outputs: json has what cannot be followed: {error}") from None
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:  # as one terminal: as many rules they would be too many
        return LLMatcher.grammar_from_lark("start: ONE\nONE: " + " | ".join(map(json.dumps, asked.choice)))
    if "%json" in (asked.grammar or ""):
        raise RequestError("structured_outputs: grammar has a %json in it, which is not supported; use json")
    try:
        return grammar_from("grammar", asked.grammar or "")
    except ValueError as error:
        said = 'grammar is neither Lark\'s nor GBNF, as start: "a" | "b" is, or root ::= "a"'
        raise RequestError(f"structured_outputs: {said}: {few_lines(str(error))}") from None


def check_tags(asked: StructuredOutputsParams, tokenizer: Any) -> None:
    """Raise RequestError for the first of its tags whose schema cannot be followed alone. Of all together llguidance
    quotes its own notation."""
    from llguidance import LLMatcher

    for tag in StructuralTag.of(asked.structural_tag).tags if asked.structural_tag is not None else ():
        try:
            matcher_of(LLMatcher.grammar_from_json_schema(json.dumps(tag.schema)), tokenizer)
        except RequestError as error:
            why = str(error).removeprefix("structured_outputs: ")
            said = f"structural_tag: the schema behind {shown(tag.begin)}: {why}"
            raise RequestError(f"structured_outputs: {said}") from None


def text_of(asked: StructuredOutputsParams) -> str | None:
    """All that it says, by which the same is known again. None: it has what is not JSON."""
    try:
        return json.dumps([getattr(asked, field.name) for field in fields(asked)], ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return None


def _check_cost(schema: Any) -> None:
    """Raise RequestError for what would take seconds: many properties, and automata of ``multipleOf``, which grow with
    the numbers' product, but for factors of ten."""
    waiting, found, squares = [schema], set(), 0
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            number = part.get("multipleOf")
            if isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < math.inf:
                found.add(number)
            properties = part.get("properties")
            if isinstance(properties, dict) and len(properties) > _MOST_PROPERTIES:
                said = f"{len(properties)} properties of one object are more than {_MOST_PROPERTIES}"
                raise RequestError(f"structured_outputs: {said}")
            squares += len(properties) ** 2 if isinstance(properties, dict) else 0
            if squares > _MOST_PROPERTIES**2:
                raise RequestError("structured_outputs: too many large objects; ask for fewer properties")
            waiting += part.values()  # also what is data: a property may be called so, and $ref may lead there
        elif isinstance(part, list):
            waiting += part
    product = 1
    for number in found:
        rest = Fraction(str(number)).numerator
        for factor in (2, 5):
            while rest % factor == 0:
                rest //= factor
        product *= rest
        if product > _MOST_REMAINDERS:
            raise RequestError(f"structured_outputs: multipleOf={shown(number)} is too large, or one of too many")


def few_lines(text: str) -> str:
    lines = text.removesuffix("<non-verbose/>").strip().splitlines()[:_LINES]
    return "\n".join(line if len(line) <= _WIDTH else f"{line[:_WIDTH]}…" for line in lines)
