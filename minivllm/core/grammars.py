"""Turns ``structured_outputs`` into llguidance matchers, which compute the allowed next tokens: an Earley parser over a
lexer of regular expression derivatives, run for all tokens at once along the trie of the vocabulary
(https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.structural_tags import StructuralTag
from minivllm.errors import RequestError, SchemaError, shown

if TYPE_CHECKING:
    from minivllm.core.structured_outputs import StructuredOutputsParams

_SPACES = r"[ \n\r\t]{1,20}"  # between JSON tokens; limited, as small models may never stop adding white space
_LINES, _WIDTH = 4, 200  # most lines and columns quoted of llguidance's error messages
# Limits of a grammar: enough items for objects with thousands of properties, and half of llguidance's default fuel for
# repeats in regular expressions, which is 0.4 s that all requests wait.
_ROW, _ITEMS, _FUEL = 20_000, 200_000, 100_000
_MOST_REMAINDERS = 1 << 16  # of all ``multipleOf``, whose automaton has a state for each: 0.2 s
_MOST_PROPERTIES = 2000  # of an object: 0.4 s, quadratic in their number
# What llguidance knows of the formats of strings; others are annotations, as JSON Schema has it.
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_OF_NAMES = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_DATA = frozenset(("const", "enum", "default", "examples"))  # which hold no schemas
_START = re.compile(r"^\s*[?!]?start\s*(\.\d+)?\s*:(?!:=)", re.MULTILINE)  # of Lark's grammars


def matcher_of(grammar: str, tokenizer: Any) -> Any:
    """llguidance's matcher for a grammar of ``grammars_of``; ``tokenizer`` is llguidance's too. Raises RequestError:
    the grammar is invalid, matches no text, or exceeds the limits."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_items_in_row=_ROW, step_max_items=_ITEMS, step_lexer_fuel=_FUEL, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        why = few_lines(matcher.get_error())
        if why.startswith("panic"):  # it counts symbols in 16 bits
            raise RequestError("structured_outputs: the grammar is too large; simplify it")
        raise RequestError(f"structured_outputs: this grammar is not supported: {why}")
    trial = matcher.deep_copy()
    for place in ("begin", "go on"):  # grammars that exceed the limits mostly do so at once
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
    """bits (words,) int32: clear the bits of these tokens; tokens beyond the row are ignored."""
    words = bits.view(np.uint32)
    for token in tokens:
        if token // 32 < len(words):
            words[token // 32] &= ~np.uint32(1 << token % 32)


def grammars_of(asked: StructuredOutputsParams) -> list[str]:
    """Grammars in llguidance's own notation (its JSON, or Lark), any of which an answer has to match; without the
    ``reasoning`` before it. Raises RequestError."""
    if asked.structural_tag is None:
        return [_grammar_of(asked)]
    from llguidance import LLMatcher

    tags, spaces = StructuralTag.of(asked.structural_tag), _spaces_of(asked)
    _check_cost([tag.schema for tag in tags.tags])
    followed = tuple(replace(tag, schema=without_annotations(tag.schema)) for tag in tags.tags)
    found = [LLMatcher.grammar_from_lark(replace(tags, tags=followed).lark(spaces))]
    if tags.otherwise is not None:
        try:
            found.append(_of_schema(tags.otherwise, spaces))
        except RequestError as error:
            raise _schema_error(tags, None, error) from None
    return found


def _spaces_of(asked: StructuredOutputsParams) -> Any:
    """llguidance's options for white space in JSON."""
    if asked.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": asked.whitespace_pattern or _SPACES}


def _of_schema(schema: Any, spaces: Any) -> str:
    from llguidance import LLMatcher

    _check_cost(schema)
    try:
        return LLMatcher.grammar_from_json_schema(without_annotations(schema), overrides=spaces)
    except ValueError as error:  # a number of more than 64 bits, half of a character
        raise RequestError(f"structured_outputs: json has what cannot be followed: {error}") from None


def _grammar_of(asked: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher, grammar_from

    if (schema := asked.schema()) is not None:
        return _of_schema(schema, _spaces_of(asked))
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:  # as one terminal: one rule per choice would be too many
        return LLMatcher.grammar_from_lark("start: ONE\nONE: " + " | ".join(map(json.dumps, asked.choice)))
    if "%json" in (asked.grammar or ""):
        raise RequestError("structured_outputs: grammar has a %json in it, which is not supported; use json")
    if _START.search(asked.grammar or "") and "::=" not in (asked.grammar or ""):
        return LLMatcher.grammar_from_lark(asked.grammar or "")
    try:
        return grammar_from("grammar", asked.grammar or "")
    except ValueError as error:
        said = 'grammar is neither Lark\'s nor GBNF, as start: "a" | "b" is, or root ::= "a"'
        raise RequestError(f"structured_outputs: {said}: {few_lines(str(error))}") from None


def check_tags(asked: StructuredOutputsParams, tokenizer: Any) -> None:
    """Raise RequestError for the first schema of a structural tag that is not supported by itself. (For all together
    llguidance's error would quote its own notation.)"""
    from llguidance import LLMatcher

    if asked.structural_tag is None:
        return
    tags = StructuralTag.of(asked.structural_tag)
    schemas: list[tuple[int | None, Any]] = [(number, tag.schema) for number, tag in enumerate(tags.tags)]
    if tags.otherwise is not None:
        schemas.append((None, tags.otherwise))
    for number, schema in schemas:
        try:
            matcher_of(LLMatcher.grammar_from_json_schema(json.dumps(without_annotations(schema))), tokenizer)
        except RequestError as error:
            raise _schema_error(tags, number, error) from None


def _schema_error(tags: StructuralTag, number: int | None, error: RequestError) -> SchemaError:
    """``number``: of the tag that the schema is behind; None: it is ``otherwise``."""
    why = str(error).removeprefix("structured_outputs: ")
    place = "that answers without tags match" if number is None else f"behind {shown(tags.tags[number].begin)}"
    new = SchemaError(f"structured_outputs: structural_tag: the schema {place}: {why}")
    new.tag, new.why = number, why
    return new


def text_of(asked: StructuredOutputsParams) -> str | None:
    """All its fields as text, to recognize equal ones. None: a field is not JSON."""
    try:
        return json.dumps([getattr(asked, field.name) for field in fields(asked)], ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return None


def without_annotations(schema: Any) -> Any:
    """The same without keywords that constrain nothing and that llguidance refuses: names that are strings, and formats
    that it does not know."""
    if isinstance(schema, list):
        return [without_annotations(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "propertyNames" and value in ({"type": "string"}, {}, True):
            continue
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if key in _OF_NAMES and isinstance(value, dict):
            kept[key] = {name: without_annotations(one) for name, one in value.items()}
        else:
            kept[key] = value if key in _DATA else without_annotations(value)
    return kept


def _check_cost(schema: Any) -> None:
    """Raise RequestError for schemas that would take seconds: many properties, or ``multipleOf`` automata, whose size
    is the product of the numbers without factors of 2 and 5."""
    found, squares, follows = set(), 0, _refers_to_data(schema)
    waiting = [(schema, False)]  # each with whether its keys are names, not keywords
    while waiting:
        part, names = waiting.pop()
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
            for name, its in part.items():
                if names or follows or name not in _DATA:
                    waiting.append((its, name in _OF_NAMES and not names))
        elif isinstance(part, list):
            waiting += [(its, False) for its in part]
    product = 1
    for number in found:
        rest = Fraction(str(number)).numerator
        for factor in (2, 5):
            while rest % factor == 0:
                rest //= factor
        product *= rest
        if product > _MOST_REMAINDERS:
            raise RequestError(f"structured_outputs: multipleOf={shown(number)} is too large, or one of too many")


def _refers_to_data(schema: Any) -> bool:
    """Whether a $ref may lead to what is data elsewhere."""
    try:
        refs = re.findall(r'"\$ref": "([^"]*)"', json.dumps(schema))
    except RecursionError:
        return True
    return any("%" in ref or not _DATA.isdisjoint(ref.split("/")) for ref in refs)


def few_lines(text: str) -> str:
    lines = text.removesuffix("<non-verbose/>").strip().splitlines()[:_LINES]
    return "\n".join(line if len(line) <= _WIDTH else f"{line[:_WIDTH]}…" for line in lines)
