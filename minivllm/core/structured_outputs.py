"""What text a request's answer has to be: vLLM's ``StructuredOutputsParams``. No torch in here, and no llguidance."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass, fields
from typing import Any

from minivllm.errors import RequestError, shown
from minivllm.plugins.naming import did_you_mean

_KINDS = "json", "regex", "choice", "grammar", "json_object"
_NOT_YET: dict[str, Any] = {"disable_additional_properties": False, "structural_tag": None}


@dataclass(slots=True)
class StructuredOutputsParams:
    """One of ``json``, a JSON schema; ``regex``, that the whole answer matches; ``choice``, strings of which it is one;
    ``grammar``, in Lark's or llama.cpp's (GBNF) notation; and ``json_object=True``, any JSON object.

    In JSON there may be white space between tokens, up to 20 characters, unless ``disable_any_whitespace`` says that
    there is none, or ``whitespace_pattern``, a regular expression, what there is.

    Raises:
        RequestError: none of them, or several; of another type; or not supported.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    @classmethod
    def of(cls, given: Any) -> StructuredOutputsParams:
        """``given``, or the same as a mapping."""
        if isinstance(given, cls):
            given.verify()  # its fields may have been set since
            return given
        if not isinstance(given, dict):
            raise RequestError(
                f"structured_outputs={shown(given)} is no StructuredOutputsParams; type "
                "StructuredOutputsParams(json={...})"
            )
        names = [f.name for f in fields(cls)]
        for name in given:
            if name not in names:
                raise RequestError(f"structured_outputs: there is no {shown(name)}.{did_you_mean(name, names)}")
        return cls(**given)

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Raise RequestError for the first value that cannot be used."""
        for name, only in _NOT_YET.items():
            if (value := getattr(self, name)) != only:
                raise _wrong(name, value, f"is not supported yet; leave it at {only!r}")
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs takes one of {', '.join(_KINDS)}, not {' and '.join(given) or 'none of them'}"
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            if (value := getattr(self, name)) is not None and not (isinstance(value, str) and value):
                raise _wrong(name, value, "is not a string of one character or more")
        if self.json is not None and not isinstance(self.json, str | dict):
            raise _wrong("json", self.json, "is not a JSON schema, as a mapping or as text")
        if self.json_object not in (None, False, True):
            raise _wrong("json_object", self.json_object, "is neither True nor False")
        if self.disable_any_whitespace not in (False, True):
            raise _wrong("disable_any_whitespace", self.disable_any_whitespace, "is neither True nor False")
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, name) and given[0] not in ("json", "json_object"):
                raise RequestError(f"structured_outputs: {name} belongs to json and json_object, not to {given[0]}")
        choice = self.choice
        if choice is not None and not (
            isinstance(choice, list | tuple) and choice and all(isinstance(one, str) and one for one in choice)
        ):
            raise _wrong("choice", choice, "is not a list of strings, each of one character or more")

    def schema(self) -> str | None:
        """The JSON schema as text, if it is one that an answer has to fit. Raises RequestError if it cannot be."""
        if self.json_object:
            return '{"type": "object"}'
        if not isinstance(self.json, dict):
            return self.json
        try:
            return json_module.dumps(self.json)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"structured_outputs: json cannot be written as JSON: {error}") from None


def _wrong(name: str, value: Any, why: str) -> RequestError:
    return RequestError(f"structured_outputs: {name}={shown(value)} {why}")
