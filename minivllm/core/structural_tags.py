"""Text with JSON between tags, such as tool calls: XGrammar's and vLLM's ``structural_tag``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minivllm.errors import RequestError, is_text, shown
from minivllm.naming import did_you_mean

MOST_TAGS = 128  # and as many triggers: the cost grows with their product
_FORMATS = "triggered_tags", "tags_with_separator"


@dataclass(frozen=True, slots=True)
class Tag:
    """``begin``, then JSON that matches ``schema``, then ``end``."""

    begin: str
    schema: dict[str, Any]
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Free text in which each of ``triggers`` must be continued to a tag that begins with it; or, with a ``separator``,
    only tags. ``at_least_one``: starts with a tag; ``stop_after_first``: nothing follows the first tag. ``otherwise``:
    or no tags at all, but JSON that matches this schema."""

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...] = ()
    separator: str | None = None
    at_least_one: bool = False
    stop_after_first: bool = False
    otherwise: dict[str, Any] | None = None

    @classmethod
    def of(cls, given: Any) -> StructuralTag:
        """From JSON or a dict: ``{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": […],
        "tags": [{"begin", "content": {"type": "json_schema", "json_schema": {…}}, "end"}]}}``, or the older
        ``{"type": "structural_tag", "triggers": […], "structures": [{"begin", "schema", "end"}]}``. A format may also
        be ``{"type": "or", "elements": [FORMAT, {"type": "json_schema", "json_schema": {…}}]}``. Raises RequestError.
        """
        try:
            asked = json.loads(given if isinstance(given, str) else json.dumps(given))  # a copy
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong(f"it is not JSON: {error}") from None
        _check_fields("it", asked, {"type"}, {"format", "structures", "triggers"})
        if asked["type"] != "structural_tag":
            raise _wrong(f"its type is structural_tag, not {shown(asked['type'])}")
        if "format" in asked:
            _check_fields("it", asked, {"type", "format"})
            return cls._of_alternatives(asked["format"])
        _check_fields("it", asked, {"type", "structures", "triggers"})
        tags = _list_of("structures", asked["structures"])
        for tag in tags:
            _check_fields("a structure", tag, {"begin", "schema", "end"})
        return cls._checked([(tag["begin"], tag["schema"], tag["end"]) for tag in tags], triggers=asked["triggers"])

    @classmethod
    def _of_alternatives(cls, asked: Any) -> StructuralTag:
        if not isinstance(asked, dict) or asked.get("type") != "or":
            return cls._of_format(asked, (*_FORMATS, "or"))
        _check_fields("format", asked, {"type", "elements"})
        elements = _list_of("elements", asked["elements"])
        schemas = [one for one in elements if isinstance(one, dict) and one.get("type") == "json_schema"]
        others = [one for one in elements if one not in schemas]
        if not len(schemas) == len(others) == 1:
            raise _wrong("elements are two, of which one has the type json_schema; others are not supported")
        return replace(cls._of_format(others[0]), otherwise=_schema(_schema_of(schemas[0])))

    @classmethod
    def _of_format(cls, asked: Any, kinds: Sequence[str] = _FORMATS) -> StructuralTag:
        kind = asked.get("type") if isinstance(asked, dict) else None
        if kind not in _FORMATS:
            raise _wrong(f"format has a type, one of {', '.join(kinds)}, not {shown(kind)}")
        how = "triggers" if kind == "triggered_tags" else "separator"
        _check_fields("format", asked, {"type", "tags", how}, {"at_least_one", "stop_after_first"})
        tags = []
        for tag in _list_of("tags", asked["tags"]):
            _check_fields("a tag", tag, {"begin", "content", "end"}, {"type"})
            content = tag["content"]
            if not isinstance(content, dict) or content.get("type") != "json_schema":
                raise _wrong(f"a tag's content has the type json_schema; {shown(content)} is not supported")
            tags.append((tag["begin"], _schema_of(content), tag["end"]))
        switches = {name: asked.get(name, False) for name in ("at_least_one", "stop_after_first")}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise _wrong(f"{name} is true or false, not {shown(value)}")
        return cls._checked(tags, **{how: asked[how]}, **switches)

    @classmethod
    def _checked(cls, tags: list[tuple[Any, Any, Any]], **how: Any) -> StructuralTag:
        if len(tags) > MOST_TAGS:
            raise _wrong(f"{len(tags)} tags are more than {MOST_TAGS}")
        for begin, _, end in tags:
            if not (is_text(begin) and (end == "" or is_text(end))):
                raise _wrong("begin and end are texts, and begin has a character or more")
        made = tuple(Tag(begin, _schema(schema), end) for begin, schema, end in tags)
        if "separator" in how:
            if not (how["separator"] == "" or is_text(how["separator"])):
                raise _wrong(f"separator is a text, not {shown(how['separator'])}")
            return cls(made, **how)
        triggers = _list_of("triggers", how.pop("triggers"))
        if len(triggers) > MOST_TAGS:
            raise _wrong(f"{len(triggers)} triggers are more than {MOST_TAGS}")
        if not all(map(is_text, triggers)):
            raise _wrong("triggers are texts of one character or more")
        for tag in made:
            if sum(tag.begin.startswith(trigger) for trigger in triggers) != 1:
                raise _wrong(f"begin={shown(tag.begin)} begins with none of the triggers, or with several")
        for trigger in triggers:
            if not any(tag.begin.startswith(trigger) for tag in made):
                raise _wrong(f"no tag begins with the trigger {shown(trigger)}")
        return cls(made, tuple(triggers), **how)

    def lark(self, guidance: Mapping[str, Any]) -> str:
        """The grammar of tags, without ``otherwise``, in llguidance's notation. ``guidance``: options, set as
        ``x-guidance`` in each schema."""
        rules, tags = ["%llguidance {}"], range(len(self.tags))
        for i, tag in enumerate(self.tags):
            schema = json.dumps({**tag.schema, "x-guidance": dict(guidance)})
            rules.append(f"behind_{i}: %json {schema} {_text(tag.end)}")
        rules.append("tag: " + " | ".join(f"{_text(tag.begin)} behind_{i}" for i, tag in enumerate(self.tags)))
        if self.separator is not None:
            tags_alone = "tag" if self.stop_after_first else f"tag ({_text(self.separator)} tag)*"
            return "\n".join([*rules, f"start: {tags_alone}" if self.at_least_one else f"start: ({tags_alone})?"])
        for t, trigger in enumerate(self.triggers):
            begun = [i for i in tags if self.tags[i].begin.startswith(trigger)]
            ways = [f"{_text(self.tags[i].begin[len(trigger) :])} behind_{i}" for i in begun]
            rules += [f"text_{t}[lazy]: TEXT {_text(trigger)}", f"part_{t}: text_{t} ({' | '.join(ways)})"]
        parts = " | ".join(f"part_{t}" for t in range(len(self.triggers)))
        rules += ["TEXT: /(.|\\n)*/", "last: TEXT", f"part: {parts}"]
        if self.at_least_one:
            return "\n".join([*rules, "start: tag" if self.stop_after_first else "start: tag part* last"])
        return "\n".join([*rules, "start: part | last" if self.stop_after_first else "start: part* last"])


def _schema_of(content: dict[str, Any]) -> Any:
    _check_fields("a content", content, {"type", "json_schema"})
    return content["json_schema"]


def _schema(given: Any) -> dict[str, Any]:
    if given is True:
        return {}
    if not isinstance(given, dict):
        raise _wrong(f"{shown(given)} is not a JSON schema, which is an object")
    return given


def _text(text: str) -> str:
    return json.dumps(text) if text else ""


def _list_of(name: str, given: Any) -> list[Any]:
    if not isinstance(given, list) or not given:
        raise _wrong(f"{name} is a list of one or more, not {shown(given)}")
    return given


def _check_fields(what: str, given: Any, needed: set[str], may: set[str] | frozenset[str] = frozenset()) -> None:
    if not isinstance(given, dict) or not needed <= given.keys():
        raise _wrong(f"{what} is an object with {', '.join(sorted(needed))}, not {shown(given)}")
    for name in given.keys() - needed - may:
        raise _wrong(f"{what} has no {shown(name)}.{did_you_mean(str(name), sorted(needed | may))}")


def _wrong(why: str) -> RequestError:
    return RequestError(f"structured_outputs: structural_tag: {why}")
