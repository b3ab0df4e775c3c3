"""Constraints on a request's output: vLLM's ``StructuredOutputsParams``. Must not import torch or llguidance."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from minivllm.core.keywords import refusing_by_name
from minivllm.core.structural_tags import StructuralTag
from minivllm.errors import RequestError, is_text, shown
from minivllm.naming import did_you_mean

_KINDS = "json", "regex", "choice", "grammar", "json_object", "structural_tag"
_REASONING = "maybe", "always"
_JSON = "json", "json_object", "structural_tag"
_FEWEST, _MOST = -(2**63), 2**64 - 1  # whole numbers that llguidance can read


def _check_other(name: Any, value: Any, *_: Any) -> None:
    """Raise RequestError for a keyword that is not a field, unless its value changes nothing."""
    if name != "disable_fallback":  # vLLM's; there is one backend
        named = [field for field in _FIELDS if field != "disable_additional_properties"]  # not supported
        meant = did_you_mean(str(name), named)
        said = f"structured_outputs: there is no {shown(name)}.{meant} Allowed: {', '.join(named)}"
        raise RequestError(said)
    if not isinstance(value, bool | None):
        raise _wrong(name, value, "is neither True nor False")


@refusing_by_name(_check_other)
@dataclass(slots=True)
class StructuredOutputsParams:
    """Exactly one of: ``json``, a JSON schema or a pydantic model class; ``regex``, which the whole output must match;
    ``choice``, a list of allowed outputs; ``grammar``, in Lark's or llama.cpp's (GBNF) notation; ``json_object=True``,
    any JSON object; ``structural_tag``, text with JSON between tags (``StructuralTag.of``).

    JSON may have up to 20 characters of white space between tokens, or none with ``disable_any_whitespace``, or what
    the regular expression ``whitespace_pattern`` matches.

    ``reasoning``: what the output may have before that, which nothing constrains: with ``maybe``, text between
    ``<think>`` and ``</think>``; with ``always``, text up to ``</think>`` (the prompt ends with ``<think>``).

    Raises:
        RequestError: none or several are given, or one has the wrong type or is not supported.
    """

    json: str | dict[str, Any] | type | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    reasoning: str | None = None

    @classmethod
    def of(cls, given: Any) -> StructuredOutputsParams:
        """A copy of ``given``, which may also be a dict of the fields."""
        if isinstance(given, cls):
            return replace(given)  # its fields may have been set since it was verified
        if not isinstance(given, dict):
            raise RequestError(
                f"structured_outputs={shown(given)} is not a StructuredOutputsParams, nor a mapping of its fields like "
                '{"json": {...}}'
            )
        for name, value in given.items():
            if name not in _FIELDS:
                _check_other(name, value)
        return cls(**given)

    def __post_init__(self) -> None:
        if (value := self.disable_additional_properties) is not False:
            raise _wrong("disable_additional_properties", value, "is not supported yet; leave it at False")
        given = [name for name in _KINDS if getattr(self, name) is not None]  # not ``!=``: arrays compare elementwise
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            said = f"structured_outputs: give one of {', '.join(_KINDS)}, not {' and '.join(given) or 'none of them'}"
            raise RequestError(said)
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool | None):
                raise _wrong(name, getattr(self, name), "is neither True nor False")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if (value := getattr(self, name)) is not None and not is_text(value):
                raise _wrong(name, value, "is not text of one character or more")
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, name) and given[0] not in _JSON:
                raise RequestError(f"structured_outputs: {name} belongs to {', '.join(_JSON)}, not to {given[0]}")
        if self.disable_any_whitespace and self.whitespace_pattern:
            said = "disable_any_whitespace=True and whitespace_pattern contradict each other; leave one out"
            raise RequestError(f"structured_outputs: {said}")
        if self.reasoning not in (None, *_REASONING):
            raise _wrong("reasoning", self.reasoning, f"is not one of {', '.join(_REASONING)}")
        choice = self.choice
        if choice is not None and not (isinstance(choice, list | tuple) and choice and all(map(is_text, choice))):
            what = list(choice) if isinstance(choice, tuple) else choice
            how = """quote numbers: ["1","2"], on a command line structured_outputs.choice='["1","2"]'"""
            if isinstance(choice, str):
                how = f"type {shown([choice])}, on a command line structured_outputs.choice=[{choice}]"
            raise _wrong("choice", what, f"is not a list of texts, each of one character or more; {how}")

        if isinstance(self.json, type) and hasattr(self.json, "model_json_schema"):
            self.json = self.json.model_json_schema()
        if self.structural_tag is not None:
            StructuralTag.of(self.structural_tag)

    def schema(self) -> dict[str, Any] | None:
        """The JSON schema that the output must match, if any. Raises RequestError if it is not a schema."""
        if self.json_object:
            return {"type": "object"}
        if self.json is None:
            return None
        try:  # a copy, which must be representable in JSON
            schema = json.loads(self.json if isinstance(self.json, str) else json.dumps(self.json), parse_int=_integer)
        except RequestError:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong("json", self.json, f"is not JSON: {error}") from None
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise _wrong("json", self.json, "is not a JSON schema, which is an object")
        return schema


_FIELDS = [f.name for f in fields(StructuredOutputsParams)]


def _integer(digits: str) -> int:
    if len(digits) > len(str(_MOST)) or not _FEWEST <= int(digits) <= _MOST:
        number = shown(digits).strip("'")
        said = f"json has the number {number}, and whole numbers of more than 64 bits cannot be followed; leave it out"
        raise RequestError(f"structured_outputs: {said}")
    return int(digits)


def _wrong(name: str, value: Any, why: str) -> RequestError:
    return RequestError(f"structured_outputs: {name}={shown(value)} {why}")
