# A small template language. It turns "[Once|Long ago], {name} found {a:thing}." into a sentence, with the choices
# drawn from one seeded generator. It knows nothing about stories or chats.
from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

Words = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class Slot:
    """`{thing}`; `{Thing}` capitalises, `{a:thing}` adds an article, `{x=thing}` keeps the drawn word as `x`."""

    key: str
    bind: str
    article: bool
    capital: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """`[one|two|]`: one of the options, each a template of its own."""

    options: tuple[tuple[Node, ...], ...]


Node = str | Slot | Choice


def _slot(text: str) -> Slot:
    capital = text[0].isupper()
    article = text[:2] in ("a:", "A:")
    bind, _, key = text.removeprefix("a:").removeprefix("A:").rpartition("=")
    return Slot(key[0].lower() + key[1:], bind.lower(), article, capital)


def _parse(text: str, at: int, inside: bool) -> tuple[list[list[Node]], int]:
    """Parses alternatives from `at` up to the closing bracket (or the end), and says where it stopped."""
    options: list[list[Node]] = [[]]
    literal = ""

    def flush() -> None:
        nonlocal literal
        if literal:
            options[-1].append(literal)
            literal = ""

    while at < len(text):
        char = text[at]
        if char == "{":
            end = text.index("}", at)
            flush()
            options[-1].append(_slot(text[at + 1 : end]))
            at = end
        elif char == "[":
            flush()
            inner, at = _parse(text, at + 1, inside=True)
            options[-1].append(Choice(tuple(tuple(option) for option in inner)))
        elif inside and char == "|":
            flush()
            options.append([])
        elif inside and char == "]":
            flush()
            return options, at
        else:
            literal += char
        at += 1
    if inside:
        raise ValueError(f"unclosed [ in template {text!r}")
    flush()
    return options, at


@cache
def parse(text: str) -> tuple[Node, ...]:
    return tuple(_parse(text, 0, inside=False)[0][0])


def with_article(noun: str) -> str:
    vowel = noun[0].lower() in "aeiou" and not noun.startswith(("uni", "use", "one"))
    return ("an " if vowel or noun.startswith(("honest", "hour")) else "a ") + noun


@dataclass(slots=True)
class Writer:
    """Expands templates for one document: `bound` holds its names and objects, `used` the templates already taken."""

    rng: random.Random
    words: Mapping[str, Words]
    bound: dict[str, Words] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, templates: Sequence[str]) -> str:
        """One of the templates, expanded."""
        return self.say(self._unused(templates))

    def _unused(self, options: Sequence[str]) -> str:
        """One of the options; a phrase that this document has used comes again only when the draw insists."""
        for _ in range(6):
            option = options[int(self.rng.random() * len(options))]
            if len(option) < 12:
                return option
            if option not in self.used:
                break
        self.used.add(option)
        return option

    def say(self, template: str) -> str:
        out: list[str] = []
        self._render(parse(template), out)
        return "".join(out)

    def _render(self, nodes: tuple[Node, ...], out: list[str]) -> None:
        for node in nodes:
            if isinstance(node, str):
                out.append(node)
            elif isinstance(node, Choice):
                self._render(node.options[int(self.rng.random() * len(node.options))], out)
            else:
                out.append(self._word(node))

    def _word(self, slot: Slot) -> str:
        value = self.bound.get(slot.key)
        if value is None:
            value = self.words[slot.key]
        if not isinstance(value, str):
            value = self._unused(value)
        if "{" in value or "[" in value:
            value = self.say(value)
        if slot.bind:
            self.bound[slot.bind] = value
        if slot.article:
            value = with_article(value)
        return value[0].upper() + value[1:] if slot.capital else value
