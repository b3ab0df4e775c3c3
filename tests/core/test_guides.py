"""Guides: which tokens may come next, token by token, whatever is drawn of them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import byte_level_tokenizer

from minivllm.core import guides as guides_module
from minivllm.core.guides import Guide, Guides
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.structured_outputs import StructuredOutputsParams
from minivllm.errors import RequestError
from minivllm.models.tokenizer import ByteTokenizer, CheckpointTokenizer, Tokenizer

VOCAB = 512
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level_tokenizer().save_pretrained(folder)
    return CheckpointTokenizer(folder)


@dataclass
class One:
    """A guide, asked as an engine asks."""

    guides: Guides
    guide: Guide

    def allowed(self) -> set[int]:
        twin, free = copy(self.guide), Guide(None, None, frozenset())  # the masks of several are found side by side
        twin.matcher = twin.matcher and twin.matcher.deep_copy()
        bits, all_ones, again = self.guides.bits([self.guide, free, twin])
        assert (all_ones == -1).all() and (again == bits).all() and bits.shape == (VOCAB // 32,)
        return set(np.nonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))[0].tolist())

    def take(self, *tokens: int) -> None:
        for token in tokens:
            self.guide.take(token)


def one(tokenizer: Tokenizer, **params: Any) -> One:
    guides = Guides(tokenizer, VOCAB, tokenizer.eos_token_ids)
    (guide,) = guides.of(SamplingParams(**params))
    assert guide is not None
    return One(guides, guide)


def walk(one: One, tokenizer: Tokenizer, rng: random.Random, limit: int = 400) -> tuple[str, bool]:
    """Draw of what is allowed until it ends; the text, and whether it did."""
    said: list[int] = []
    for _ in range(limit):
        if one.guide.ended:
            return tokenizer.decode(said), True
        may = one.allowed()
        assert may and max(may) < VOCAB
        ends = may & set(tokenizer.eos_token_ids)
        token = rng.choice(sorted(ends or may))
        one.take(token)
        assert not one.guide.failed
        if token in ends:
            return tokenizer.decode(said), True
        said.append(token)
    return tokenizer.decode(said), False


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    assert set(value) == {"name", "age", "tags"} and len(value["name"]) <= 6
    assert type(value["age"]) is int and 0 <= value["age"] <= 120
    return len(value["tags"]) <= 3 and set(value["tags"]) <= {"a", "b"}


def tagged(kind: str = "triggered_tags", *, schema: Any = True, end: str = "</f>", **more: Any) -> dict[str, Any]:
    """A structural tag of one function's calls."""
    tag = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": end}
    return {"type": "structural_tag", "format": {"type": kind, "tags": [tag]} | more}


ONE_OR_TWO: dict[str, Any] = {
    "schema": {"enum": [1, 2]},
    "end": "</f>\n",
    "at_least_one": True,
    "stop_after_first": True,
}


def one_or_two_or(schema: Any, **more: Any) -> dict[str, Any]:
    """A tag, or JSON and no tag."""
    call = tagged("tags_with_separator", separator=";", **ONE_OR_TWO | more)["format"]
    elements = [{"type": "json_schema", "json_schema": schema}, call]
    return {"type": "structural_tag", "format": {"type": "or", "elements": elements}}


KINDS: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"json": SCHEMA}, fits_schema),
    ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, lambda text: not re.search(r"\s(?=[\"{}:,])", text)),
    ({"json": SCHEMA, "whitespace_pattern": "-"}, lambda text: fits_schema(text.replace("-", ""))),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"regex": "[A-Z][a-z]{2,5} [0-9]{3}"}, lambda text: re.fullmatch("[A-Z][a-z]{2,5} [0-9]{3}", text)),
    ({"choice": ["yes", "no", 'a "b" é']}, lambda text: text in ("yes", "no", 'a "b" é')),
    ({"grammar": 'start: "x" | "y" start'}, lambda text: re.fullmatch("y*x", text)),  # Lark's
    ({"grammar": 'root ::= "x" | "y" root'}, lambda text: re.fullmatch("y*x", text)),  # llama.cpp's
    (
        {"structural_tag": tagged("tags_with_separator", separator=";", **ONE_OR_TWO)},
        lambda text: re.fullmatch("<f>[12]</f>\n", text),
    ),
    (
        {"structural_tag": json.dumps(tagged(triggers=["<"], **ONE_OR_TWO))},
        lambda text: re.fullmatch("<f>[12]</f>\n", text),
    ),
    ({"structural_tag": one_or_two_or({"const": "a"})}, lambda text: re.fullmatch('<f>[12]</f>\n|"a"', text)),
    (
        {"regex": "[ab]{1,3}", "reasoning": "maybe"},
        lambda text: re.fullmatch("(<think>.*?</think>\\s*)?[ab]{1,3}", text, re.DOTALL),
    ),
]


@pytest.mark.parametrize("kind", ["checkpoint", "checkpoint without end", "bytes", "bytes without end"])
@pytest.mark.parametrize(("asked", "fits"), KINDS, ids=lambda x: next(iter(x), None) if isinstance(x, dict) else "")
def test_whatever_is_drawn_fits(
    asked: dict[str, Any], fits: Callable[[str], Any], kind: str, tokenizer: CheckpointTokenizer
) -> None:
    its: Tokenizer = tokenizer
    if kind == "checkpoint without end":
        its = copy(tokenizer)
        its.eos_token_ids = ()
    elif kind != "checkpoint":
        its = ByteTokenizer(VOCAB, (300, 301) if kind == "bytes" else ())
    ended = 0
    for seed in range(12):
        text, its_end = walk(one(its, structured_outputs=asked), its, random.Random(seed))
        if its_end:
            assert fits(text), text
        ended += its_end
    assert ended >= 4, f"{ended} of 12 came to an end"


@pytest.mark.parametrize(("asked", "fits"), KINDS, ids=lambda x: next(iter(x), None) if isinstance(x, dict) else "")
def test_a_draft_is_allowed_as_far_as_its_tokens_one_by_one(
    asked: dict[str, Any], fits: Callable[[str], Any], tokenizer: CheckpointTokenizer
) -> None:
    rng, ends, cut = random.Random(0), set(tokenizer.eos_token_ids), 0
    draft: list[int]
    masks: list[set[int]]
    for _ in range(20):
        real, draft, masks = one(tokenizer, structured_outputs=asked, bad_words=["ab", "9"]), [], []
        for _ in range(rng.randint(0, 6)):
            real.take(rng.choice(sorted(real.allowed() - ends or ends)))
            if real.guide.matcher is None:
                break
        guide, before = real.guide, real.allowed()
        ahead, right = One(real.guides, guide), 5
        for at in range(5):
            may = sorted(ahead.allowed() - ends)
            if not may or rng.random() < 0.15:
                draft += [rng.choice(sorted({*range(VOCAB)} - ahead.allowed() - ends))]
                right = at
                break
            draft.append(rng.choice(may))
            ahead = One(real.guides, ahead.guide.then(draft[-1]))
            masks.append(ahead.allowed())
        if guide.matcher is not None:
            assert guide.allowed(draft) == right
            assert right == 5 or One(real.guides, ahead.guide.then(draft[-1])).allowed() == ahead.allowed()
        cut += right < 5
        assert real.allowed() == before, "nothing was taken"
        for token, its in zip(draft, masks, strict=False):
            real.take(token)
            assert real.allowed() == its
    assert cut


def test_a_grammar_that_comes_again_is_made_again_now_and_then(
    tokenizer: CheckpointTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    matcher_of = guides_module.matcher_of
    monkeypatch.setattr(
        guides_module, "matcher_of", lambda grammar, its: (made.append(grammar), matcher_of(grammar, its))[1]
    )
    guides, yes, no = Guides(tokenizer, VOCAB, tokenizer.eos_token_ids), {"choice": ["yes"]}, {"choice": ["no"]}
    for number, asked in enumerate([yes, no] * 16):
        (guide,) = guides.of(SamplingParams(structured_outputs=asked))
        assert guide is not None
        guide.take(tokenizer.encode("y" if asked is yes else "n")[0])  # each copy goes its own way
        assert not guide.failed and len(made) == min(number + 1, 2)
    guides.of(SamplingParams(structured_outputs=yes, n=40))
    assert len(made) == 5
    for i in range(100):
        guides.of(SamplingParams(structured_outputs={"choice": [f"a{i}"]}))
    assert len(made) == 105 and len(guides._matchers) == 64


def test_what_the_request_before_asked_for_is_made_once(
    tokenizer: CheckpointTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    for name in ("BadWords", "grammars_of"):
        make = getattr(guides_module, name)
        monkeypatch.setattr(guides_module, name, lambda *of, make=make: (made.append(of), make(*of))[1])
    guides = Guides(tokenizer, VOCAB, tokenizer.eos_token_ids)
    for schema in ({"enum": [1]}, {"enum": [True]}):  # which are equal, to Python
        params = SamplingParams(bad_words=["x"], structured_outputs={"json": schema})
        for _ in range(5):
            (guide,) = guides.of(params)
            assert guide is not None
            assert One(guides, guide).allowed() == {tokenizer.encode(json.dumps(schema["enum"][0])[0])[0]}
            again = SamplingParams(bad_words=["x"], structured_outputs={"json": json.loads(json.dumps(schema))})
            assert guides.of(again)[0] is not None
    assert len(made) == 3
    schema["enum"].append(None)  # its owner may
    (guide,) = guides.of(params)
    assert guide is not None and len(One(guides, guide).allowed()) == 2 and len(made) == 4
    guides.of(SamplingParams(bad_words=["y"]))
    assert len(made) == 5


def test_of_what_took_long_there_are_more_copies(
    tokenizer: CheckpointTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    matcher_of, now = guides_module.matcher_of, [0.0]

    def slowly(grammar: str, its: Any) -> Any:
        made.append(grammar)
        now[0] += 0.1
        return matcher_of(grammar, its)

    monkeypatch.setattr(guides_module, "matcher_of", slowly)
    monkeypatch.setattr(guides_module.time, "thread_time", lambda: now[0])
    guides = Guides(tokenizer, VOCAB, tokenizer.eos_token_ids)
    for _ in range(2):
        guides.of(SamplingParams(structured_outputs={"choice": ["yes"]}, n=49))
    assert len(made) == 1
    guides.of(SamplingParams(structured_outputs={"choice": ["yes"]}, n=3))
    assert len(made) == 2


def test_what_is_no_schema_is_not_counted(tokenizer: CheckpointTokenizer) -> None:
    number, many = {"multipleOf": 999983}, {"properties": dict.fromkeys(map(str, range(2001)))}
    for asked in ({"enum": [number]}, {"const": many}, {"default": many}, {"examples": [number], "enum": ["a"]}):
        one(tokenizer, structured_outputs={"json": asked})


@pytest.mark.parametrize("name", ["a", "default", "examples", "enum", "const"])
def test_a_property_may_be_called_as_a_keyword(tokenizer: CheckpointTokenizer, name: str) -> None:
    """What it costs counts, and what $ref leads to."""
    number = {"type": "integer", "multipleOf": 999983}
    for schema in ({"properties": {name: number}}, {"$ref": f"#/{name}/0", name: [number]}):
        with pytest.raises(RequestError, match="multipleOf=999983 is too large"):
            one(tokenizer, structured_outputs={"json": {"type": "object", **schema}})


def test_what_constrains_nothing_is_no_hindrance(tokenizer: CheckpointTokenizer) -> None:
    """As zod and pydantic write it; data and names of properties stay."""
    path, names = {"type": "string", "format": "path", "maxLength": 2}, {"type": "string"}
    held = {"const": {"format": "path"}}
    schema = {
        "type": "object",
        "properties": {
            "format": path,
            "const": path | {"pattern": "^x$"},
            "propertyNames": held,
        },
        "required": ["format", "const", "propertyNames"],
        "additionalProperties": False,
        "propertyNames": names,
    }
    text, ended = walk(one(tokenizer, structured_outputs={"json": schema}), tokenizer, random.Random(1))
    assert ended
    said = json.loads(text)
    assert said["const"] == "x" and said["propertyNames"] == {"format": "path"} and isinstance(said["format"], str)
    tag = {"begin": "<a>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</a>"}
    tags = {"type": "tags_with_separator", "separator": "", "at_least_one": True, "tags": [tag]}
    one(tokenizer, structured_outputs={"structural_tag": {"type": "structural_tag", "format": tags}})
    for other in ({"propertyNames": {"pattern": "a"}}, {"uniqueItems": True}):
        with pytest.raises(RequestError, match=next(iter(other))):
            one(tokenizer, structured_outputs={"json": other})


def test_much_is_no_hindrance(tokenizer: CheckpointTokenizer) -> None:
    many = [f"x{i}y" for i in range(10_000)]
    wide = {"type": "object", "properties": {f"k{i}": {"type": "integer", "multipleOf": 500} for i in range(1000)}}
    for asked, fits in (({"choice": many}, many.__contains__), ({"json": wide}, lambda text: set(json.loads(text)))):
        text, ended = walk(one(tokenizer, structured_outputs=asked), tokenizer, random.Random(1), limit=60)
        assert not ended or fits(text)
        assert len(text) > 3


def test_a_model_may_have_fewer_tokens_than_its_tokenizer(tokenizer: CheckpointTokenizer) -> None:
    (guide,) = (guides := Guides(tokenizer, 256, ())).of(
        SamplingParams(structured_outputs={"regex": "[a-c]{3}"}, bad_words=["a", "bc", "the"])
    )
    assert guide is not None
    (bits,) = guides.bits([guide])
    assert bits.shape == (8,)
    (b,), (c,) = tokenizer.encode("b"), tokenizer.encode("c")
    assert set(np.nonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))[0]) == {b, c}


def test_a_tokenizer_whose_ids_have_holes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    model, rest = whole["model"], sorted(whole["model"]["vocab"].items(), key=lambda item: item[1])[:290]
    model["vocab"] = dict(rest) | {token["content"]: token["id"] for token in whole["added_tokens"]}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    its = CheckpointTokenizer(tmp_path)
    assert its.eos_token_ids[0] >= its.vocab_size
    guides, params = Guides(its, VOCAB, its.eos_token_ids), SamplingParams(structured_outputs={"choice": ["yes"]})
    for _ in range(2):  # the second time it is known
        with pytest.raises(RequestError, match=r"not supported with this tokenizer: .*305 is out of range"):
            guides.of(params)
        monkeypatch.setattr(its, "for_grammars", None)


def test_an_end_that_is_part_of_a_grammar_cuts_an_answer(tokenizer: CheckpointTokenizer) -> None:
    end = tokenizer.eos_token_ids[0]
    guide = one(tokenizer, structured_outputs={"grammar": f'start: "xzv" <[{end}]> "y"'})
    assert guide.guide.cut_by(end) and not guide.guide.cut_by(1)
    whole = one(tokenizer, structured_outputs={"choice": ["x"]})
    assert whole.guide.cut_by(end)
    whole.take(*tokenizer.encode("x"))
    assert not whole.guide.cut_by(end)


def test_completions_of_one_request_go_their_own_ways(tokenizer: CheckpointTokenizer) -> None:
    guides = Guides(tokenizer, VOCAB, tokenizer.eos_token_ids)
    params = SamplingParams(n=2, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    first, second = (One(guides, guide) for guide in guides.of(params) if guide is not None)
    before = first.allowed()
    first.take(*tokenizer.encode("y"))
    assert second.allowed() == before and first.allowed() != before


def test_behind_an_end_token_all_may_come(tokenizer: CheckpointTokenizer) -> None:
    """As with ``ignore_eos``."""
    guide = one(tokenizer, structured_outputs={"choice": ["y"]})
    guide.take(*tokenizer.encode("y"))
    assert guide.allowed() == set(tokenizer.eos_token_ids)
    guide.take(tokenizer.eos_token_ids[0])
    assert guide.allowed() == set(range(VOCAB)) and not guide.guide.failed


def test_what_cannot_be_followed_says_so(tokenizer: CheckpointTokenizer, caplog: pytest.LogCaptureFixture) -> None:
    guide = one(tokenizer, structured_outputs={"choice": ["y"]})
    assert not guide.guide.failed
    guide.take(*tokenizer.encode("n"))
    assert guide.guide.failed and "cannot be followed any further" in caplog.text
    assert guide.allowed() == set(tokenizer.eos_token_ids)


def test_bad_words_hold_back_what_would_complete_them(tokenizer: CheckpointTokenizer) -> None:
    a, b, c, space = (tokenizer.encode(text)[0] for text in ("z", "q", "7", " "))
    assert tokenizer.encode("zq7") == [a, b, c] and tokenizer.encode(" 7") == [space, c]
    guide, every = one(tokenizer, bad_words=["zq7", "7z"]), set(range(VOCAB))
    assert guide.allowed() == every
    for token, held in ((a, set()), (b, {c}), (c, {a}), (b, set()), (a, set()), (a, set()), (b, {c})):
        guide.take(token)
        assert every - guide.allowed() == held, token
    single = one(tokenizer, bad_words=["7"])
    assert every - single.allowed() == {c}
    single.take(a)
    assert every - single.allowed() == {c}
    led = one(tokenizer, bad_words=[" 7", "7", "\n7"])  # as vLLM: what stands in front does not count
    assert every - led.allowed() == {c}


def test_bad_words_are_bad_behind_a_space_too(tokenizer: CheckpointTokenizer) -> None:
    plain, spaced = tokenizer.encode("the"), tokenizer.encode(" the")
    assert len(plain) == len(spaced) == 1 and plain != spaced
    assert set(range(VOCAB)) - one(tokenizer, bad_words=["the"]).allowed() == {*plain, *spaced}


def test_bad_words_are_held_back_where_only_the_space_makes_them_one_token(tokenizer: CheckpointTokenizer) -> None:
    texts = {token: tokenizer.decode([token]) for token in range(VOCAB)}
    token, text = next(
        (token, text)
        for token, text in texts.items()
        if text[:1] == " " and text[1:].isalpha() and len(tokenizer.encode(text[1:])) > 1
    )
    for word in (text, text[1:]):
        assert token not in one(tokenizer, bad_words=[word]).allowed()


def test_bad_words_give_way_to_a_grammar_that_has_no_other_way(tokenizer: CheckpointTokenizer) -> None:
    def allowed(*choice: str) -> set[int]:
        return one(tokenizer, structured_outputs={"choice": choice}, bad_words=["z"]).allowed()

    (z,), (q,) = tokenizer.encode("z"), tokenizer.encode("q")
    assert allowed("z", "q") == {q} and allowed("z") == {z}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"regex": "(("}, "unclosed group"),
        ({"json": {"type": "objct"}}, "Invalid type: objct"),
        ({"json": "{"}, "json='{' is not JSON: Expecting property name"),
        ({"json": 5}, "json=5 is not a JSON schema, which is an object"),
        ({"json": "[1]"}, "is not a JSON schema, which is an object"),
        ({"json": {"type": "integer", "multipleOf": 999983}}, "multipleOf=999983 is too large"),
        ({"json": {"allOf": [{"multipleOf": 1009}, {"not": {}, "a": [{"multipleOf": 1013}]}]}}, "is too large, or one"),
        ({"json": {"anyOf": [{"properties": {str(i): {} for i in range(1500)}}] * 2}}, "too many large objects"),
        ({"json": {"properties": {str(i): {} for i in range(2001)}}}, "2001 properties of one object are more than"),
        ({"json": '{"multipleOf": 1e999}'}, "structured_outputs: "),
        (
            {"json": {"maximum": 2**64}},
            "^structured_outputs: json has the number 18446744073709551616, and whole numbers",
        ),
        ({"json": '{"minimum": -9223372036854775809}'}, "the number -9223372036854775809, and .* more than 64 bits"),
        ({"json": '{"const": %s}' % ("9" * 5000)}, "json has the number 999.*…, and whole numbers of more than 64"),
        ({"json": {"const": "\ud800"}}, "has what cannot be followed"),
        ({"json": {"multipleOf": True}}, "structured_outputs: "),
        (
            {"structural_tag": one_or_two_or({"type": "objct"})},
            "the schema that answers without tags match: this grammar is not supported: Invalid type: objct",
        ),
        ({"structural_tag": one_or_two_or({"multipleOf": 1000003})}, "multipleOf=1000003 is too large"),
        ({"grammar": 'start: %json {"multipleOf": 99999989}'}, "has a %json in it"),
        ({"json": {"$ref": "#"}}, "an answer cannot begin: there is no text that fits"),
        ({"regex": r"[^\s\S]"}, "an answer cannot begin: there is no text that fits"),
        ({"regex": "(a{1000}){1000}"}, "an answer cannot go on: "),
        ({"regex": "(" * 100_000}, "structured_outputs: "),
        ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys"),
        ({"json": {"a": {1, 2}}}, "is not JSON: Object of type set"),
        ({"grammar": "what is this"}, "structured_outputs: "),
        ({"grammar": 'root ::= "x'}, "structured_outputs: "),
        ({"grammar": "hello"}, "grammar is neither Lark's nor GBNF"),
    ],
    ids=lambda x: str(x)[:60],
)
def test_what_is_no_grammar_is_refused(tokenizer: CheckpointTokenizer, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        one(tokenizer, structured_outputs=asked)
    assert len(str(caught.value).splitlines()) <= 4 and len(str(caught.value)) < 1000


def test_a_tokenizer_that_is_neither_is_refused() -> None:
    class Other(ByteTokenizer):
        for_grammars = Tokenizer.for_grammars

    with pytest.raises(RequestError, match="structured_outputs is not supported with a Other; leave it out"):
        one(Other(VOCAB), structured_outputs={"choice": ["a"]})
    assert one(Other(VOCAB), bad_words=["a"])


def test_without_llguidance_it_says_what_to_type(
    tokenizer: CheckpointTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match="type: pip install llguidance"):
        one(tokenizer, structured_outputs={"choice": ["a"]})


# --------------------------------------------------------------------------- what may be asked for


LLAMA: dict[str, Any] = {"begin": '{"name": "f", "parameters": ', "end": "}"}
AS_JSON = LLAMA | {"content": {"type": "json_schema", "json_schema": {"type": "object"}}}
JSON_OR_JSON = {"type": "tags_with_separator", "separator": "", "at_least_one": True, "tags": [AS_JSON]}
THOUGHT = "<think>Is it <f>3 \n</think>"


@pytest.mark.parametrize(
    ("asked", "text", "fits"),
    [
        # a call that is JSON, too, or any JSON: both ways stay open until they differ
        *(
            ({"structural_tag": {"type": "structural_tag", "format": {"type": "or", "elements": [
                JSON_OR_JSON, {"type": "json_schema", "json_schema": {"type": "object"}}]}}}, text, fits)
            for text, fits in (
                ('{"a": 1}', True), ('{"name": "Paris"}', True), ('{"names": []}', True), ("{}", True), ("{ }", True),
                ('{"name": "f", "parameters": {"a": 1}}', True), ('{"name": "f", "parameters": 1, "b": 2}', True),
                ("[", False), ('{"name": "f", "parameters": {}}}', False),
            )
        ),
        *(
            ({"structural_tag": one_or_two_or(SCHEMA["properties"]["age"] | {"format": "whole"})}, text, fits)
            for text, fits in (("<f>1</f>", True), ("<f>3", False), ("100", True), ("1<", False), ("a", False))
        ),
        # reasoning is free, whatever the answer may be
        ({"structural_tag": tagged(triggers=["<f>"], schema={"enum": [1, 2]}), "reasoning": "maybe"},
         THOUGHT + "a <f>1</f>b", True),
        ({"structural_tag": tagged(triggers=["<f>"], schema={"enum": [1, 2]}), "reasoning": "maybe"},
         THOUGHT + "a <f>3", False),
        ({"structural_tag": tagged(triggers=["<f>"]), "reasoning": "maybe"}, "no thoughts <f>1</f>", True),
        ({"regex": "(.|\n){1,9}", "reasoning": "maybe"}, f"<think>{'x' * 50}</think>123456789", True),
        ({"regex": "(.|\n){1,9}", "reasoning": "maybe"}, f"<think>{'x' * 50}</think>1234567890", False),
        ({"regex": "<[a-z]+>", "reasoning": "maybe"}, "<title>", True),
        ({"regex": "<[a-z]+>", "reasoning": "maybe"}, "<think></think><title>", True),
        ({"regex": "<[a-z]+>", "reasoning": "maybe"}, "<think>", True),
        ({"regex": " +x", "reasoning": "always"}, "a</think>\n\n x", True),
        ({"regex": "x", "reasoning": "always"}, "a</think>\n \n x", True),
        ({"regex": "x", "reasoning": "always"}, "a</think> y", False),
        ({"regex": "x", "reasoning": "always"}, "</think></think>", False),
        ({"choice": ["yes"], "reasoning": "maybe"}, "ye", True),
        ({"choice": ["yes"], "reasoning": "maybe"}, "no", False),
        ({"choice": ["yes"], "reasoning": "maybe"}, "<thy", False),
        ({"grammar": 'root ::= "yes"', "reasoning": "maybe"}, "<think>no</think>yes", True),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["checkpoint", "bytes"])
def test_several_ways_do_not_stand_in_each_others_way(
    asked: Any, text: str, fits: bool, kind: str, tokenizer: CheckpointTokenizer
) -> None:
    its: Tokenizer = tokenizer if kind == "checkpoint" else ByteTokenizer(VOCAB, (300, 301))
    walker, followed = one(its, structured_outputs=asked), True
    for token in its.encode(text, add_special_tokens=False):
        followed = followed and token in walker.allowed()
        if followed:
            walker.take(token)
    assert followed == fits and not walker.guide.failed


def test_tags_in_text(tokenizer: CheckpointTokenizer) -> None:
    """What stands between them is free; once one is begun it has to fit."""
    old = {"type": "structural_tag", "triggers": ["<f"], "structures": [
        {"begin": "<f>", "schema": {"enum": [1, 2]}, "end": "</f>"},
        {"begin": "<f2>", "schema": {"const": "a"}, "end": "."},
    ]}  # fmt: skip
    new = tagged(triggers=["<f"], schema={"enum": [1, 2]})
    once = tagged(
        "tags_with_separator", separator="", schema={"enum": [1, 2]}, at_least_one=True, stop_after_first=True
    )
    for asked, text, fits in (
        (old, "a <f>2</f> b < <f2>\"a\". c", True), (old, "a <f>3", False), (old, "a <g", True), (old, "<f3", False),
        (new, "<f>1</f><f>2</f>", True), (new, "", True), (new | {"format": new["format"] | {"stop_after_first": True}},
        "b <f>1</f>a", False), (once, "<f>1</f>", True), (once, "<f>1</f><", False), (once, "a", False),
    ):  # fmt: skip
        its = one(tokenizer, structured_outputs={"structural_tag": asked})
        tokens = tokenizer.encode(text)
        assert (its.guide.matcher.validate_tokens(tokens) == len(tokens)) == fits, (asked, text)


WRONG: list[tuple[Any, str]] = [
    ({}, "structured_outputs: give one of json, regex, choice, grammar, json_object, structural_tag, not none of them"),
    ({"regex": "a", "choice": ["b"]}, "not regex and choice"),
    ({"json_object": False}, "not none of them"),
    ({"json_object": 1}, "json_object=1 is neither True nor False"),
    ({"regx": "a"}, "there is no 'regx'. Did you mean regex? Allowed: json, regex, choice, grammar, json_object, "),
    ({"foo": "a"}, "there is no 'foo'. Allowed: json, regex, choice, grammar, json_object, "),
    (
        {1: "a"},
        "there is no 1. Allowed: json, regex, choice, grammar, json_object, disable_any_whitespace, whitespace_pattern",
    ),
    ({"disable_additional_property": 1}, "there is no 'disable_additional_property'. Allowed: json, "),
    ({"regex": "a", "disable_fallback": 2}, "disable_fallback=2 is neither True nor False"),
    ({"regex": ""}, "regex='' is not text of one character or more"),
    ({"regex": 0}, "regex=0 is not text"),
    ({"regex": False}, "regex=False is not text"),
    ({"regex": "\ud800"}, "regex='\\ud800' is not text"),
    ({"choice": []}, "choice=[] is not a list of texts"),
    ({"choice": "abc"}, "type ['abc'], on a command line structured_outputs.choice=[abc]"),
    (
        {"choice": (1, 2)},
        """choice=[1, 2] is not a list of texts, each of one character or more; quote numbers: ["1","2"], """,
    ),
    ({"choice": ["a", ""]}, "is not a list of texts, each of one character or more"),
    ({"choice": np.array(["a", "b"])}, "is not a list of texts"),
    (
        {"regex": "a", "disable_any_whitespace": True},
        "disable_any_whitespace belongs to json, json_object, structural_tag",
    ),
    ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "contradict each other; leave one out"),
    ({"json": {}, "disable_any_whitespace": np.array([1, 2])}, "is neither True nor False"),
    ({"choice": ["a"], "whitespace_pattern": " "}, "whitespace_pattern belongs to json, json_object, structural_tag"),
    ({"json": {}, "disable_additional_properties": True}, "disable_additional_properties=True is not supported yet"),
    ({"structural_tag": "{"}, "structural_tag: it is not JSON"),
    ({"structural_tag": "{}"}, "structural_tag: it is an object with type, not {}"),
    ({"structural_tag": {"type": "regex"}}, "structural_tag: its type is structural_tag, not 'regex'"),
    (
        {"structural_tag": tagged("regex")},
        "format has a type, one of triggered_tags, tags_with_separator, or, not 'regex'",
    ),
    ({"structural_tag": tagged(triggers=["<g>"])}, "begin='<f>' begins with none of the triggers, or with several"),
    ({"structural_tag": tagged(triggers=["<", "<f"])}, "begins with none of the triggers, or with several"),
    ({"structural_tag": tagged(triggers=["<f>", "g"])}, "no tag begins with the trigger 'g'"),
    (
        {"structural_tag": tagged(triggers=["<f>"], stop_after_frist=True)},
        "no 'stop_after_frist'. Did you mean stop_after_first?",
    ),
    ({"structural_tag": tagged(triggers=[f"<f>{i}" for i in range(129)])}, "129 triggers are more than 128"),
    ({"structural_tag": tagged(triggers=[])}, "triggers is a list of one or more, not []"),
    ({"structural_tag": tagged(triggers=["<f>"], at_least_one=1)}, "at_least_one is true or false, not 1"),
    ({"structural_tag": tagged("tags_with_separator", separator=5)}, "separator is a text, not 5"),
    ({"structural_tag": tagged("tags_with_separator", separator="", tags=[])}, "tags is a list of one or more"),
    ({"structural_tag": tagged(triggers=["<f>"], schema=5)}, "5 is not a JSON schema"),
    ({"structural_tag": one_or_two_or(5)}, "5 is not a JSON schema"),
    ({"structural_tag": tagged("or", elements=[])}, "format has no 'tags'"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "or", "elements": [1]}}}, "elements are two, of"),
    ({"structural_tag": tagged(triggers=["<f>"], end="\ud800")}, "begin and end are texts"),
    ("json", "structured_outputs='json' is not a StructuredOutputsParams"),
]


@pytest.mark.parametrize(("asked", "message"), WRONG, ids=str)
def test_what_cannot_be_asked_for_is_refused(asked: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        SamplingParams(structured_outputs=asked)


def test_what_would_leave_no_token_is_refused() -> None:
    for other in ({"min_tokens": 2}, {"allowed_token_ids": [1]}):
        with pytest.raises(RequestError, match=f"{next(iter(other))}=.* is not supported with structured_outputs"):
            SamplingParams(structured_outputs={"regex": "a"}, **other)
    with pytest.raises(RequestError, match=r"allowed_token_ids=\[67\] is not supported with bad_words"):
        SamplingParams(bad_words=["a"], allowed_token_ids=[67])
    with pytest.raises(RequestError, match=r"bad_words: '\\ud800' contains a lone surrogate"):
        SamplingParams(bad_words=["\ud800"])
    for words in ([""], [" "], [5]):
        with pytest.raises(RequestError, match="each is text with more than white space"):
            SamplingParams(bad_words=words)
    with pytest.raises(RequestError, match=r"bad_words='ab' is not a list; type \['ab'\]"):
        SamplingParams(bad_words="ab")


def test_a_mapping_is_as_good_as_an_object() -> None:
    asked = SamplingParams(structured_outputs={"choice": ["a"]}).structured_outputs
    assert asked == StructuredOutputsParams(choice=["a"])
    again = SamplingParams(structured_outputs=asked)
    asked.choice = []
    assert again.structured_outputs == StructuredOutputsParams(choice=["a"])
    with pytest.raises(RequestError, match="is not a list of texts"):
        SamplingParams(structured_outputs=asked)


def test_a_keyword_that_is_no_field_is_refused_and_vllms_may_ask_for_nothing() -> None:
    for value in (True, False, None):
        asked = StructuredOutputsParams(regex="a", disable_fallback=value)
        assert asked == SamplingParams(structured_outputs={"regex": "a", "disable_fallback": value}).structured_outputs
        assert asked == StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match=r"there is no 'regx'\. Did you mean regex\?"):
        StructuredOutputsParams(regx="a")
    with pytest.raises(RequestError, match="disable_fallback='no' is neither True nor False"):
        StructuredOutputsParams(regex="a", disable_fallback="no")


def test_a_model_of_pydantics_is_its_schema() -> None:
    pydantic = pytest.importorskip("pydantic")
    city = pydantic.create_model("City", name=(str, ...))
    asked = SamplingParams(structured_outputs={"json": city}).structured_outputs
    assert asked == StructuredOutputsParams(json=city) == StructuredOutputsParams(json=city.model_json_schema())
    assert asked.schema()["properties"]["name"]["type"] == "string"


def test_whole_numbers_of_64_bits_may_be_in_a_schema(tokenizer: CheckpointTokenizer) -> None:
    schema = {"type": "integer", "maximum": 2**64 - 1}
    assert one(tokenizer, structured_outputs={"json": schema}).allowed()
