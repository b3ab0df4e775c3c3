"""From tokens to text: stop strings, streaming, characters in pieces. A scripted executor says what we choose."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import byte_level_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm import LLM, RequestOutput, SamplingParams
from minivllm.core.batch import Batch
from minivllm.core.interfaces import StepResult
from minivllm.core.sampling_params import RequestOutputKind

KINDS = list(RequestOutputKind)
PROMPT = [5, 6, 7]


class Script:
    """Stands in for the model: request number i (its seed) says ``lines[i]``, then spaces."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.inner = llm.engine.executor
        self.lines: list[list[int]] = []
        llm.engine.executor = self  # type: ignore[assignment]

    def launch(self, batch: Batch) -> Any:
        tokens = np.full(len(batch.slots), -1, dtype=np.int32)
        for i in np.nonzero(batch.samples)[0]:
            seq = self.engine.scheduler.sequences[batch.slots[i]]
            assert seq is not None and seq.params.seed is not None
            line, at = self.lines[seq.params.seed], batch.num_computed[i] + batch.num_new[i] - seq.prompt_len
            tokens[i] = line[at] if at < len(line) else self.blank
        return Step(StepResult(tokens))

    @property
    def blank(self) -> int:
        return byte_level_tokenizer().encode(" ")[0]

    def check_health(self) -> None: ...

    def shutdown(self) -> None:
        self.inner.shutdown()


class Step:
    def __init__(self, value: StepResult) -> None:
        self.value = value

    def result(self) -> StepResult:
        return self.value


Say = Callable[..., list[RequestOutput]]


@pytest.fixture
def script(engine: Callable[..., LLM]) -> Script:
    return Script(engine(**{"cache.num_blocks": 256, "max_model_len": 256}))


def pieces(*words: str) -> list[int]:
    """Tokens whose borders lie where the words' do."""
    return [token for word in words for token in byte_level_tokenizer().encode(word)]


def say(
    script: Script, lines: Sequence[list[int]], held: Sequence[bool] = (), **values: Any
) -> list[list[RequestOutput]]:
    """Each line as a request of its own, all at once; returns every output of each, in order. ``held``: whether they
    are, step for step."""
    script.lines = list(lines)
    engine, got = script.engine, [[] for _ in lines]
    for i, line in enumerate(lines):
        params = SamplingParams(**{"max_tokens": max(len(line), 1), "seed": i} | values)
        engine.add_request(str(i), PROMPT, params)
    steps = itertools.chain(held, itertools.repeat(False))
    while engine.has_unfinished_requests():
        engine.hold_outputs = next(steps)
        for output in engine.step():
            got[int(output.request_id)].append(output)
    engine.hold_outputs = False
    engine.scheduler.check()
    assert engine.scheduler.blocks.num_free == engine.num_blocks
    return got


def whole(outputs: list[RequestOutput], kind: RequestOutputKind) -> tuple[str, list[int], str | None, Any]:
    """A request's text, tokens and end, put together from what came of it."""
    last = outputs[-1].outputs[0]
    assert outputs[-1].finished and not any(o.finished for o in outputs[:-1])
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(outputs) == 1
    if kind is RequestOutputKind.DELTA:
        parts = [o.outputs[0] for o in outputs]
        text, tokens = "".join(p.text for p in parts), [t for p in parts for t in p.token_ids]
    else:
        text, tokens = last.text, list(last.token_ids)
        for before, after in itertools.pairwise(outputs):  # nothing that was shown is taken back
            assert after.outputs[0].text.startswith(before.outputs[0].text)
            assert after.outputs[0].token_ids[: len(before.outputs[0].token_ids)] == before.outputs[0].token_ids
    return text, tokens, last.finish_reason, last.stop_reason


def told(script: Script, line: list[int], **values: Any) -> tuple[str, list[int], str | None, Any]:
    """One line, the same through all three kinds of output."""
    through = [whole(say(script, [line], output_kind=kind, **values)[0], kind) for kind in KINDS]
    assert through[0] == through[1] == through[2]
    return through[0]


# --------------------------------------------------------------------------- stop strings


def test_a_stop_string_ends_the_answer_before_it(script: Script) -> None:
    line = pieces("the fox", " jumps", " over", " the dog")
    text, tokens, reason, stop = told(script, line, stop=" over")
    assert (text, reason, stop) == ("the fox jumps", "stop", " over")
    assert tokens == pieces("the fox", " jumps", " over"), "the tokens keep what the text does not show"


def test_a_stop_string_may_be_kept(script: Script) -> None:
    line = pieces("the fox", " jumps", " over", " the dog")
    assert told(script, line, stop=[" ov"], include_stop_str_in_output=True)[0] == "the fox jumps ov"


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "words", [("a", "b", "S", "T", "O", "P", "c"), ("abS", "TOPc"), ("ab", "STOP", "c"), ("abST", "OPc")]
)
def test_a_stop_string_across_tokens(script: Script, words: tuple[str, ...], keep: bool) -> None:
    text, tokens, reason, stop = told(script, pieces(*words), stop="STOP", include_stop_str_in_output=keep)
    assert (text, reason, stop) == ("abSTOP" if keep else "ab", "stop", "STOP")
    assert byte_level_tokenizer().decode(tokens).startswith("abSTOP")


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_known(script: Script) -> None:
    outputs = say(script, [pieces("x", "S", "T", "O", "x", "S")], stop="STOP")[0]
    shown = [o.outputs[0].text for o in outputs]
    assert shown[-1] == "xSTOxS" and outputs[-1].outputs[0].finish_reason == "length"
    assert all("xSTOxS".startswith(text) for text in shown)
    assert shown[3] != "xSTO", "it could have been the stop string still"


def test_the_first_of_several_stop_strings_wins(script: Script) -> None:
    line = pieces("one", " two", " three")
    for stops, expected in ((["three", "wo", "two"], ("one t", "wo")), (["two", "wo"], ("one ", "two"))):
        text, _, _, stop = told(script, line, stop=stops)
        assert (text, stop) == expected, "of those that end at once the one that was given first"
    text, _, _, stop = told(script, line, stop=[" two", "tw"])
    assert (text, stop) == ("one ", "tw"), "the one that ends first, though a token brings both"
    assert told(script, line, stop=["nowhere"])[0] == "one two three"


def test_a_stop_string_in_the_last_token_is_a_stop(script: Script) -> None:
    text, _, reason, stop = told(script, pieces("ab", "cd"), stop="cd")
    assert (text, reason, stop) == ("ab", "stop", "cd")


def test_a_stop_string_of_the_prompt_is_no_stop(script: Script) -> None:
    script.lines = [pieces("b", "c")]
    script.engine.add_request("x", pieces("a", "a"), SamplingParams(seed=0, max_tokens=2, stop=["aab", "a"]))
    outputs: list[RequestOutput] = []
    while script.engine.has_unfinished_requests():
        outputs += script.engine.step()
    assert outputs[-1].outputs[0].text == "bc"


def test_min_tokens_reads_past_stop_strings(script: Script) -> None:
    line = pieces("a", "STOP", "b", "STOP", "c")
    first, second = len(pieces("a", "STOP")), len(pieces("a", "STOP", "b"))
    assert told(script, line, stop="STOP", min_tokens=first - 1)[0] == "a"
    assert told(script, line, stop="STOP", min_tokens=first)[0] == "aSTOPb"
    assert told(script, line, stop="STOP", min_tokens=second)[0] == "aSTOPb"


def test_one_that_stops_harms_no_other(script: Script) -> None:
    lines = [
        pieces("a", "b", "STOP", "c"),
        pieces("no", "thing", " here", " and", " on"),
        pieces("STOP"),
        pieces("S", "T"),
    ]
    got = [whole(outputs, RequestOutputKind.CUMULATIVE) for outputs in say(script, lines, stop="STOP")]
    assert [g[0] for g in got] == ["ab", "nothing here and on", "", "ST"]
    assert [g[2] for g in got] == ["stop", "length", "stop", "length"]


def test_the_slot_of_a_stopped_request_serves_the_next(engine: Callable[..., LLM]) -> None:
    script = Script(engine(**{"cache.num_blocks": 8, "max_model_len": 64, "scheduler.max_num_seqs": 1}))
    lines = [pieces("a", "b", "STOP", "c", "d"), pieces("what", " comes", " then"), pieces("x", "STOP", "y")]
    got = [whole(outputs, RequestOutputKind.CUMULATIVE) for outputs in say(script, lines, stop="STOP")]
    assert [g[0] for g in got] == ["ab", "what comes then", "x"]


# --------------------------------------------------------------------------- stop and end tokens


def test_a_stop_tokens_own_text_is_not_part_of_the_answer(script: Script) -> None:
    [dot] = pieces(".")
    line = [*pieces("a", "b"), dot, *pieces("c")]
    text, tokens, reason, stop = told(script, line, stop_token_ids=[dot])
    assert (text, tokens, reason, stop) == ("ab", line[:3], "stop", dot)
    assert told(script, line, stop_token_ids=[dot], include_stop_str_in_output=True)[0] == "ab."


@pytest.mark.parametrize("special", [True, False])
def test_the_end_tokens_text_is_never_part_of_the_answer(script: Script, special: bool) -> None:
    """As in vLLM: what ends an answer is not in its text, whether or not special tokens are shown."""
    end = byte_level_tokenizer().eos_token_id
    line = [*pieces("a", "b"), end, *pieces("c")]
    text, tokens, reason, stop = told(script, line, skip_special_tokens=special)
    assert (text, tokens, reason, stop) == ("ab", line[:3], "stop", None)
    shown = told(script, line, skip_special_tokens=special, ignore_eos=True)
    assert shown[0] == ("abc" if special else "ab<|end|>c") and shown[2] == "length"


def test_detokenize_false_gives_tokens_only(script: Script) -> None:
    line = pieces("a", "b", "c")
    assert told(script, line, detokenize=False) == ("", line, "length", None)


@pytest.mark.parametrize("values", [{}, {"stop": "zz"}, {"stop_token_ids": [67]}])
def test_an_answer_of_one_token_is_read(script: Script, values: dict[str, Any]) -> None:
    """It ends in the step that admits it."""
    assert told(script, [64], **values)[:3] == ("a", [64], "length")
    assert told(script, [64, 65], stop="a")[1:] == ([64], "stop", "a")


# --------------------------------------------------------------------------- characters in pieces


def test_a_character_is_shown_when_it_is_whole(script: Script) -> None:
    line = pieces("a") + pieces("é😀") + pieces("!")
    assert len(line) > 6, "one token a byte"
    outputs = say(script, [line])[0]
    assert outputs[-1].outputs[0].text == "aé😀!"
    assert all("\ufffd" not in o.outputs[0].text for o in outputs)
    assert told(script, line)[0] == "aé😀!"


def test_a_character_that_is_never_completed_comes_out_as_a_replacement(script: Script) -> None:
    line = pieces("a") + pieces("😀")[:2]
    assert told(script, line)[0] == "a\ufffd" == byte_level_tokenizer().decode(line)


def test_a_stop_string_of_several_bytes(script: Script) -> None:
    line = pieces("a") + pieces("é😀") + pieces("!")
    assert told(script, line, stop="😀")[0] == "aé"


def test_unknown_ids_and_special_tokens_have_no_text(script: Script) -> None:
    line = [*pieces("a"), 511, byte_level_tokenizer().convert_tokens_to_ids("<|user|>"), *pieces("b")]
    assert told(script, line)[0] == "ab"
    assert told(script, line, skip_special_tokens=False)[0] == "a<|user|>b"


# --------------------------------------------------------------------------- outputs that are held


@pytest.fixture
def speaking(script: Script) -> Callable[..., list[RequestOutput]]:
    """``speaking(add=None)``: one more step, before it another request of six tokens, of which each is told."""
    script.lines = [pieces("a", "b", "c", "d", "e", "f")] * 3

    def step(add: int | None = None) -> list[RequestOutput]:
        if add is not None:
            params = SamplingParams(max_tokens=6, seed=add, output_kind=RequestOutputKind.DELTA)
            script.engine.add_request(str(add), PROMPT, params)
        return script.engine.step()

    return step


def texts(outputs: list[RequestOutput]) -> dict[str, str]:
    return {output.request_id: output.outputs[0].text for output in outputs}


def test_what_is_held_is_said_at_the_end_or_when_it_is_not_held_any_more(
    script: Script, speaking: Callable[..., list[RequestOutput]]
) -> None:
    script.engine.hold_outputs = True
    assert [texts(speaking(add)) for add in (0, None, None)] == [{"0": "a"}, {}, {}], "a first token does not wait"
    script.engine.hold_outputs = False
    assert texts(speaking()) == {"0": "bcd"}
    script.engine.hold_outputs = True
    assert texts(speaking()) == {}
    last = speaking()
    assert texts(last) == {"0": "ef"} and last[0].finished and not script.engine.has_unfinished_requests()


def test_nothing_is_held_while_a_prompt_is_under_way(
    script: Script, speaking: Callable[..., list[RequestOutput]]
) -> None:
    """It may take long. The step that is taken in meanwhile is said."""
    script.engine.hold_outputs = True
    assert [texts(speaking(add)) for add in (0, None)] == [{"0": "a"}, {}]
    assert texts(speaking(add=1)) == {"0": "bc"}
    assert texts(speaking()) == {"1": "a"}
    assert texts(speaking()) == {}


def test_what_was_held_of_an_aborted_request_is_not_said(
    script: Script, speaking: Callable[..., list[RequestOutput]]
) -> None:
    script.engine.hold_outputs = True
    assert [texts(speaking(add)) for add in (0, None)] == [{"0": "a"}, {}]
    script.engine.abort("0")
    script.engine.hold_outputs = False
    said = [texts(speaking(add)) for add in (1, None, None, None)]
    assert "0" not in {name for one in said for name in one} and any(said)


# --------------------------------------------------------------------------- anything


def expected(words: list[str], stops: list[str], least: int, keep: bool) -> tuple[str, int, str]:
    """Read the words one by one: the text, how many were read, and why it ended."""
    text = ""
    for count, word in enumerate(words, 1):
        before, text = len(text), text + word
        found = [at for s in stops for at in range(len(text)) if text.startswith(s, at) and at + len(s) > before]
        if found and count > least:
            places = [(text.find(s, max(before - len(s) + 1, 0)), s) for s in stops]
            at, stop = min((one for one in places if one[0] >= 0), key=lambda one: one[0] + len(one[1]))
            return text[: at + len(stop) if keep else at], count, "stop"
    return text, len(words), "length"


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cases=st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=14), min_size=1, max_size=4),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    least=st.integers(0, 4),
    keep=st.booleans(),
    kind=st.sampled_from(KINDS),
    held=st.lists(st.booleans(), max_size=16),
)
def test_stop_strings_anywhere(
    script: Script,
    cases: list[list[str]],
    stops: list[str],
    least: int,
    keep: bool,
    kind: RequestOutputKind,
    held: list[bool],
) -> None:
    least = min(least, *map(len, cases))
    lines = [pieces(*words) for words in cases]
    outputs = say(script, lines, held, stop=stops, min_tokens=least, include_stop_str_in_output=keep, output_kind=kind)
    for words, line, got in zip(cases, lines, outputs, strict=True):
        text, count, reason = expected(words, stops, least, keep)
        assert whole(got, kind)[:3] == (text, line[:count], reason)
