"""Answers that have to be something: engines, pipelines, preemption, and everybody else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import reference_model, reference_tokens

from minivllm import LLM, SamplingParams, StructuredOutputsParams
from minivllm.core.guides import Guide, Guides
from minivllm.core.sampler import DefaultSampler
from minivllm.core.sampling_params import RequestOutputKind
from minivllm.errors import RequestError

Engine = Callable[..., LLM]
SMALL = {"cache.block_size": 4, "cache.num_blocks": 64, "scheduler.max_num_seqs": 32, "max_model_len": 128}
CHOICES = ["once upon a time", "once more", "the lazy dog", "thequick", "q"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=30)


def guided(**asked: Any) -> SamplingParams:
    return GREEDY.clone(structured_outputs=StructuredOutputsParams(**asked))


def run(llm: LLM, prompts: Any, params: Any) -> Any:
    return llm.generate(prompts, params, use_tqdm=False)


def chosen(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """What transformers' logits choose, greedily, among the tokens that a guide allows."""
    model, said, ends = (
        reference_model(Path(llm.engine.config.model.path or "")),
        [],
        llm.engine.tokenizer.eos_token_ids,
    )
    guides = Guides(llm.engine.tokenizer, 512, ends)
    (guide,) = guides.of(params)
    assert guide is not None
    while not said or said[-1] not in ends:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + said])).logits[0, -1]
        (bits,) = guides.bits([guide])
        may = np.nonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))[0]
        said.append(int(may[logits[may].argmax()]))
        guide.take(said[-1])
    return said


@pytest.mark.parametrize("deep", ["true", "false"], ids=["pipelined", "one step at a time"])
@pytest.mark.parametrize("scheduler", ["mixed", "prefill_first"])
def test_each_token_is_the_best_of_those_that_may_come(engine: Engine, scheduler: str, deep: str) -> None:
    llm = engine(**SMALL, scheduler=scheduler, **{"scheduler.async_scheduling": deep})
    prompts = [[i, 7, 9 * i, *range(i)] for i in range(1, 9)]
    outputs = run(llm, prompts, [guided(choice=CHOICES) if i % 3 else GREEDY for i in range(8)])
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        said, (one,) = list(output.outputs[0].token_ids), output.outputs
        if i % 3:
            assert said == chosen(llm, prompt, guided(choice=CHOICES)) and one.text in CHOICES
            assert one.finish_reason == "stop" and one.stop_reason is None
        else:  # who shares a batch with them says what they say alone
            assert said == reference_tokens(llm.engine.config.model.path, prompt, 30)[: len(said)]
    assert llm.engine.scheduler.blocks.num_free == 64 and not llm.engine._requests.guided
    llm.engine.scheduler.check()


def test_under_preemption_and_in_chunks_they_are_what_they_are_alone(engine: Engine) -> None:
    prompts = [[(3 * i + j) % 500 for j in range(4 + 3 * i)] for i in range(8)]
    params = [
        guided(json=SCHEMA, disable_any_whitespace=True), guided(regex="[ab]{24}"),
        GREEDY.clone(ignore_eos=True, max_tokens=24),
        GREEDY.clone(bad_words=["e", "th"], ignore_eos=True, max_tokens=24),
    ] * 2  # fmt: skip
    roomy = engine(**SMALL)
    alone = [run(roomy, prompt, param)[0].outputs[0] for prompt, param in zip(prompts, params, strict=True)]
    tight = {"cache.num_blocks": 18, "scheduler.max_num_batched_tokens": 11}
    llm = engine(**SMALL | tight)
    outputs = [output.outputs[0] for output in run(llm, prompts, params)]
    assert [(o.token_ids, o.text, o.finish_reason) for o in outputs] == [
        (o.token_ids, o.text, o.finish_reason) for o in alone
    ]
    assert llm.engine.stats.preemptions > 0
    for one, param in zip(outputs, params, strict=True):
        if param.structured_outputs is not None and param.structured_outputs.json:
            value = json.loads(one.text)
            assert 0 <= value["a"] <= 99 and value["b"] in ("x", "yy")
        if param.bad_words:
            assert not {"e", " e", "th", " th"} & {roomy.engine.tokenizer.decode([token]) for token in one.token_ids}


def test_draws_do_not_depend_on_who_shares_the_batch(engine: Engine) -> None:
    llm = engine(**SMALL)
    drawn = SamplingParams(max_tokens=12, seed=5, n=3, top_p=0.9, structured_outputs={"regex": "[a-z ]{10}"})
    alone = [one.text for one in run(llm, [1, 2, 3], drawn)[0].outputs]
    assert len(set(alone)) == 3 and all(re.fullmatch("[a-z ]{10}", text) for text in alone)
    others = [SamplingParams(max_tokens=20, temperature=1.0, presence_penalty=1.0, min_tokens=3)] * 6
    together = run(llm, [[4, i] for i in range(6)] + [[1, 2, 3]], [*others, drawn])[-1]
    assert [one.text for one in together.outputs] == alone


def test_a_slot_that_changes_hands_holds_nothing_back(engine: Engine) -> None:
    llm = engine(**SMALL | {"scheduler.max_num_seqs": 1})
    outputs = run(llm, [[5]] * 4, [guided(choice=["q"]), GREEDY, guided(choice=["the"]), GREEDY.clone(min_tokens=2)])
    assert [outputs[0].outputs[0].text, outputs[2].outputs[0].text] == ["q", "the"]
    plain = reference_tokens(llm.engine.config.model.path, [5], 30)
    for output in (outputs[1], outputs[3]):
        said = list(output.outputs[0].token_ids)
        assert said == plain[: len(said)]


def test_a_scheduler_gets_its_own_batches_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(**SMALL)
    scheduler, given, back = llm.engine.scheduler, [], []
    schedule, commit = scheduler.schedule, scheduler.commit
    monkeypatch.setattr(scheduler, "schedule", lambda: (given.append(schedule()), given[-1])[1])
    monkeypatch.setattr(scheduler, "commit", lambda batch, ids: (back.append(batch), commit(batch, ids))[1])
    run(llm, [[5], [6]], [guided(choice=["q"]), GREEDY.clone(max_tokens=4)])
    assert [id(batch) for batch in given if batch is not None][: len(back)] == [id(batch) for batch in back]


def test_a_prompts_logprobs_come_with_a_guided_answer(engine: Engine) -> None:
    llm, prompt = engine(**SMALL | {"scheduler.max_num_batched_tokens": 7}), [*range(30, 50)]
    plain, both = run(
        llm, [prompt] * 2, [GREEDY.clone(prompt_logprobs=2), guided(choice=["q"]).clone(prompt_logprobs=2)]
    )
    assert both.outputs[0].text == "q"
    for a, b in zip(plain.prompt_logprobs[1:], both.prompt_logprobs[1:], strict=True):
        assert a.keys() == b.keys() and all(a[t].logprob == pytest.approx(b[t].logprob, abs=1e-4) for t in a)


def test_only_what_changed_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, told = engine(**SMALL | {"scheduler.max_num_seqs": 2}), []
    guide = llm.engine.executor.guide
    monkeypatch.setattr(
        llm.engine.executor, "guide", lambda masks: (told.append(masks.slots.tolist()), guide(masks))[1]
    )
    constant = GREEDY.clone(bad_words=["q"], max_tokens=5, ignore_eos=True)
    first = run(llm, [5], constant)[0].outputs[0].token_ids
    assert told == [[0], [], [], [], []]
    told.clear()
    changing = guided(regex="abab").clone(max_tokens=4)
    outputs = run(llm, [[5], [5], [5]], [constant, changing, constant])  # the third in a slot of another's
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [first, first] and outputs[1].outputs[0].text == "abab"
    assert sum(0 in slots for slots in told) + sum(1 in slots for slots in told) == 1 + 4 + 1


def test_a_guided_request_that_never_sampled_leaves_its_slot_to_others(engine: Engine) -> None:
    """The first of an engine, aborted while its prompt is computed in chunks."""
    llm = engine(**SMALL | {"scheduler.max_num_batched_tokens": 16})
    llm.engine.add_request("a", list(range(10, 50)), GREEDY.clone(bad_words=["q"]))
    llm.engine.step()
    llm.engine.abort("a")
    answer = run(llm, [[5, 6]], GREEDY.clone(max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids
    assert answer == reference_tokens(Path(llm.engine.config.model.path or ""), [5, 6], 8)


def test_what_python_calls_equal_need_not_be_the_same_answer(engine: Engine) -> None:
    llm = engine(**SMALL)
    asked = [guided(json={"const": value}) for value in (1, True, 1, True)]
    assert [run(llm, [5], one)[0].outputs[0].text for one in asked] == ["1", "true", "1", "true"]


def test_with_biases_and_penalties_and_logprobs(engine: Engine) -> None:
    llm = engine(**SMALL)
    tokenizer = llm.engine.tokenizer
    (q,), (z,) = tokenizer.encode("q"), tokenizer.encode("z")
    both = {"regex": "[qz]{6}"}
    liked = run(llm, [3], GREEDY.clone(structured_outputs=both, logit_bias={q: 50.0, 7: 1e30}, logprobs=2))[0].outputs[
        0
    ]
    assert liked.text == "qqqqqq" and len(liked.logprobs) == 7
    assert all(entry[token].rank > 1 for entry, token in zip(liked.logprobs[:-1], liked.token_ids, strict=False))
    varied = GREEDY.clone(structured_outputs=both, logit_bias={q: 50.0, z: 49.0}, frequency_penalty=2.0)
    assert "z" in run(llm, [3], varied)[0].outputs[0].text


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_streams_and_stop_strings(engine: Engine, kind: RequestOutputKind) -> None:
    llm = engine(**SMALL)
    llm.engine.add_request("a", [5], guided(regex="ab{8}c").clone(output_kind=kind, stop=["bbb"]))
    llm.engine.add_request("b", [5], guided(regex="ab{8}c").clone(output_kind=kind))
    text = {"a": "", "b": ""}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            new = output.outputs[0].text
            text[output.request_id] = text[output.request_id] + new if kind is RequestOutputKind.DELTA else new
    assert text == {"a": "a", "b": "abbbbbbbbc"}
    assert not llm.engine._requests.guided and llm.engine.scheduler.blocks.num_free == 64


def test_ends_of_all_kinds(engine: Engine) -> None:
    llm = engine(**SMALL)
    cut, on, stopped = run(
        llm,
        [[5]] * 3,
        [
            guided(regex="a{20}").clone(max_tokens=4),
            guided(regex="a").clone(ignore_eos=True, max_tokens=6),
            guided(regex="ab").clone(stop_token_ids=llm.engine.tokenizer.encode("a")),
        ],
    )
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason) == ("aaaa", "length")
    assert on.outputs[0].text.startswith("a") and len(on.outputs[0].token_ids) == 6
    assert stopped.outputs[0].finish_reason == "stop" and len(stopped.outputs[0].token_ids) == 1
    llm.engine.add_request("x", [5], guided(regex="a{50}"))
    for _ in range(5):
        llm.engine.step()
    llm.engine.abort("x")
    assert run(llm, [5], guided(choice=["q"]))[0].outputs[0].text == "q"
    assert not llm.engine._requests.guided and llm.engine.scheduler.blocks.num_free == 64


def test_where_no_token_ends_an_answer_it_ends_when_nothing_can_follow(engine: Engine) -> None:
    llm = engine(**SMALL)
    llm.engine._admission.guides = Guides(llm.engine.tokenizer, 512, ())
    one = run(llm, [5], guided(choice=["yes"]))[0].outputs[0]
    assert (one.text, one.finish_reason, one.stop_reason) == ("yes", "stop", None)
    assert llm.engine.tokenizer.decode(one.token_ids, skip_special_tokens=False) == "yes"


def test_a_grammar_that_takes_too_much_ends_as_what_is_too_long_does(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, failed = engine(**SMALL), []
    take = Guide.take

    def fail(guide: Guide, token: int) -> None:
        take(guide, token)
        failed.append(token)
        if len(failed) == 4:
            guide.matcher.consume_token(0)

    monkeypatch.setattr(Guide, "take", fail)
    for streamed in (False, True):
        kind = RequestOutputKind.CUMULATIVE if streamed else RequestOutputKind.FINAL_ONLY
        one = run(llm, [5], guided(regex="a{20}").clone(output_kind=kind))[0].outputs[0]
        assert one.finish_reason == "length" and one.text == "aaaa" and one.stop_reason is None
        failed.clear()
    monkeypatch.undo()
    assert run(llm, [5], guided(choice=["q"]))[0].outputs[0].text == "q"


def test_where_a_grammar_fails_as_tokens_are_looked_for_it_ends_so_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance allows nothing but an end then."""
    llm, bits = engine(**SMALL), Guides.bits

    def fail(guides: Guides, its: list[Guide]) -> np.ndarray:
        if len(its[0].matcher.get_error()) == 0 and its[0].matcher.validate_tokens([0]) == 0 and len(calls) == 3:
            its[0].matcher.consume_token(0)
        calls.append(len(its))
        return bits(guides, its)

    calls: list[int] = []
    monkeypatch.setattr(Guides, "bits", fail)
    one = run(llm, [5], guided(regex="a{20}"))[0].outputs[0]
    assert (one.text, one.finish_reason, one.stop_reason) == ("aaa", "length", None)


def test_an_end_within_a_grammar_is_no_success(engine: Engine) -> None:
    llm = engine(**SMALL)
    end = llm.engine.tokenizer.eos_token_ids[0]
    one = run(llm, [5], guided(grammar=f'start: "xzv" <[{end}]> "y"'))[0].outputs[0]
    assert (one.text, one.finish_reason, one.stop_reason) == ("xzv", "length", None)


def test_what_was_changed_since_is_verified_again(engine: Engine) -> None:
    llm, params = engine(**SMALL), guided(choice=["q"])
    assert run(llm, [5], params)[0].outputs[0].text == "q"
    assert params.structured_outputs is not None
    params.structured_outputs.choice = []
    with pytest.raises(RequestError, match="is not a list of texts"):
        run(llm, [5], params)


def test_who_cannot_do_it_refuses(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(**SMALL)
    with pytest.raises(RequestError, match="unclosed group"):
        run(llm, [5], guided(regex="(("))
    monkeypatch.setattr(DefaultSampler, "takes_masks", False)
    for params, name in ((guided(choice=["a"]), "structured_outputs"), (GREEDY.clone(bad_words=["a"]), "bad_words")):
        with pytest.raises(RequestError, match=f"sampler=default does not support {name}; leave it out"):
            run(llm, [5], params)
    monkeypatch.undo()
    monkeypatch.setattr(type(llm.engine.executor), "takes_masks", False)
    with pytest.raises(RequestError, match="executor=auto does not support structured_outputs; leave it out"):
        run(llm, [5], guided(choice=["a"]))
    run(llm, [5], GREEDY)
