"""Speculative decoding changes no token: whatever is asked for, answers are those of one token after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_llm import SMALL, run, usable

from minivllm import LLM, RequestOutput, SamplingParams
from minivllm.backends.torch import TorchBackend
from minivllm.bench.recorder import StepRecorder
from minivllm.core.batch import Batch
from minivllm.core.drafter import Drafter
from minivllm.core.guides import Guide
from minivllm.core.interfaces import StepHandle, StepResult
from minivllm.core.landing import PendingStep
from minivllm.core.model_runner import ModelRunner
from minivllm.core.sampler import DefaultSampler
from minivllm.core.scheduler import MixedScheduler
from minivllm.errors import CheckpointError, ConfigError

Engine = Callable[..., LLM]
Checkpoints = Callable[..., Path]
PEOPLE: dict[str, Any] = {
    "type": "array",
    "minItems": 3,
    "maxItems": 4,
    "items": {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
DRAFTS = {"scheduler.num_speculative_tokens": 4, "scheduler.prompt_lookup_min": 1}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.4, "seed": 1},
    {"temperature": 0.3, "seed": 2, "top_k": 5, "top_p": 0.9, "logprobs": 1},
    {"temperature": 0, "n": 2},
    {"temperature": 0.2, "seed": 3, "min_tokens": 9, "logit_bias": {5: 1.5}, "prompt_logprobs": 1},
    {"temperature": 0, "presence_penalty": 0.5},
    {"temperature": 0, "bad_words": ["e"], "max_tokens": 12},
]


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that go round, and one that does not, with all kinds of parameters."""
    rng = np.random.default_rng(0)
    prompts = [(rng.integers(0, 512, 2 + i).tolist() * 8)[: 12 + i] for i in range(len(KINDS))]
    return prompts, [SamplingParams(**({"max_tokens": 40, "ignore_eos": True} | kind)) for kind in KINDS]


def told(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens and reasons, and the log-probabilities beside them."""
    return [
        (c.token_ids, c.finish_reason, c.text, [sorted(at) for at in c.logprobs or []], len(c.token_ids))
        for output in outputs
        for c in output.outputs
    ]


def values(outputs: list[RequestOutput]) -> list[float]:
    return [lp.logprob for o in outputs for c in o.outputs for at in c.logprobs or [] for lp in at.values()]


@pytest.mark.parametrize("how", [
    {"cache.num_blocks": 200},
    {"cache.num_blocks": 200, "scheduler.async_scheduling": "false", "scheduler": "prefill_first"},
    {"cache.num_blocks": 26, "scheduler.max_num_batched_tokens": 24},
], ids=["pipelined", "step by step", "preempted"])  # fmt: skip
def test_any_request_gets_the_tokens_that_it_gets_without(how: dict[str, Any], engine: Engine) -> None:
    expected = run(engine(**SMALL), *requests())
    llm = engine(**SMALL | DRAFTS | how)
    outputs = run(llm, *requests())
    assert told(outputs) == told(expected)
    assert values(outputs) == pytest.approx(values(expected), abs=1e-4)
    stats = llm.engine.stats
    assert 0 < stats.accepted_tokens < stats.draft_tokens and stats.drafts <= stats.draft_tokens / 2
    assert (stats.preemptions > 0) == (how["cache.num_blocks"] == 26)
    usable(llm)


@pytest.mark.parametrize("how", [
    {"cache.num_blocks": 200},
    {"cache.num_blocks": 200, "scheduler.async_scheduling": "false", "scheduler": "prefill_first"},
    {"cache.num_blocks": 26, "scheduler.max_num_batched_tokens": 24},
], ids=["pipelined", "step by step", "preempted"])  # fmt: skip
@pytest.mark.parametrize("right", [True, False])
def test_a_draft_model_changes_no_token(
    how: dict[str, Any], right: bool, engine: Engine, tiny_checkpoint: Checkpoints
) -> None:
    """The model itself, which is always right, at any temperature; and another, which hardly ever is."""
    expected = run(engine(**SMALL), *requests())
    draft = tiny_checkpoint("qwen3") if right else tiny_checkpoint("llama", seed=5)
    llm = engine(**SMALL | {"scheduler.num_speculative_tokens": 3, "scheduler.draft_model": draft} | how)
    outputs = run(llm, *requests())
    assert told(outputs) == told(expected)
    assert values(outputs) == pytest.approx(values(expected), abs=1e-4)
    stats = llm.engine.stats
    share = stats.accepted_tokens / stats.draft_tokens
    assert share > 0.95 if right else share < 0.2
    assert (stats.preemptions > 0) == (how["cache.num_blocks"] == 26)
    assert ("drafts of" in llm.engine.describe()["weights"]) and llm.engine.config.draft_model is not None
    usable(llm)


def guided_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Answers that repeat themselves, and end in all the ways in which a guided one can: with their grammar, with a
    token or a string amid a draft, with their length."""
    asked: list[dict[str, Any]] = [
        {"regex": "(ab, ){9}(x|y)"},
        {"regex": "([ab]{3} ){5,9}"},
        {"json": PEOPLE, "disable_any_whitespace": True},
        {"choice": ["no no no no no no yes", "no no no no no no no no"]},
        {"grammar": 'start: ("one" | "two")+'},
        {"regex": "(ab){12}", "reasoning": "maybe"},
        {"regex": "(ab){12}", "reasoning": "always"},
    ]
    more: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "logprobs": 2},
        {"temperature": 0.3, "n": 2, "stop": ["ab, ab, ab, ab", "b a", "nono no", "eo"]},
        {"temperature": 0, "ignore_eos": True, "bad_words": ["aba", "one two", "no no no no"]},
        {"temperature": 0, "max_tokens": 17},
    ]
    params = [
        SamplingParams(**{"max_tokens": 60, "seed": i, "structured_outputs": one} | its)
        for i, its in enumerate(more)
        for one in asked
    ]
    return [[i + 1, 5] for i in range(len(params))], params


@pytest.mark.parametrize(("how", "end", "fails"), [
    ({}, True, False),
    ({"scheduler.max_num_batched_tokens": 24, "cache.num_blocks": 40}, True, False),
    ({"scheduler.async_scheduling": "false"}, False, False),
    ({}, True, True),
], ids=["roomy", "preempted", "no end tokens", "some grammars fail"])  # fmt: skip
def test_guided_requests_get_the_tokens_that_they_get_without(
    how: dict[str, Any], end: bool, fails: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Guide.take

    def taken(guide: Guide, token: int) -> None:
        take(guide, token)
        counts[id(guide)] = counts.get(id(guide), 0) + 1
        if guide in mine and counts[id(guide)] == 11 and guide.matcher is not None:
            guide.matcher.consume_token(0)  # which no grammar here allows: an error, as if it exceeded the limits

    found = []
    for drafts in ({}, DRAFTS):
        llm = engine(**SMALL | {"cache.num_blocks": 300} | how | drafts)
        guides = llm.engine._admission.guides
        if not end:
            guides._ends = frozenset()
        counts: dict[int, int] = {}
        mine: list[Guide] = []
        if fails:
            of = guides.of

            def kept(params: SamplingParams, of: Callable[..., Any] = of, mine: list[Guide] = mine) -> list[Any]:
                made = of(params)
                mine += made if (params.seed or 0) == 0 else []
                return made

            monkeypatch.setattr(guides, "of", kept)
            monkeypatch.setattr(Guide, "take", taken)
        prompts, params = guided_requests()
        found.append([o for i in range(0, 35, 7) for o in run(llm, prompts[i : i + 7], params[i : i + 7])])
        stats = replace(llm.engine.stats)
        monkeypatch.undo()
        usable(llm)
    assert told(found[1]) == told(found[0])
    assert values(found[1]) == pytest.approx(values(found[0]), abs=1e-4)
    assert [c.stop_reason for o in found[1] for c in o.outputs] == [c.stop_reason for o in found[0] for c in o.outputs]
    assert stats.output_tokens == sum(len(c.token_ids) for o in found[1] for c in o.outputs), (
        "tokens behind do not count"
    )
    assert stats.accepted_tokens > 0.3 * stats.draft_tokens > 0
    assert (stats.preemptions > 0) == ("cache.num_blocks" in how)
    assert any(c.finish_reason == "stop" for o in found[1] for c in o.outputs)


@pytest.mark.parametrize("right", [True, False])
def test_beside_a_draft_model_guided_requests_are_looked_up_for(
    engine: Engine, tiny_checkpoint: Checkpoints, right: bool
) -> None:
    prompts, params = guided_requests()
    free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts, params = prompts[:7] + [[9, 8, 7]] * 2, params[:7] + [free] * 2
    expected = run(engine(**SMALL | {"cache.num_blocks": 300}), prompts, params)
    draft = tiny_checkpoint("qwen3") if right else tiny_checkpoint("llama", seed=5)
    llm = engine(**SMALL | DRAFTS | {"cache.num_blocks": 300, "scheduler.draft_model": draft})
    assert told(run(llm, prompts, params)) == told(expected)
    before = replace(llm.engine.stats)
    assert told(run(llm, prompts[:7], params[:7])) == told(expected[:7])
    stats = llm.engine.stats
    looked_up = stats.draft_tokens - before.draft_tokens
    assert stats.accepted_tokens - before.accepted_tokens > 0.5 * looked_up > 20
    usable(llm)


def test_what_ends_twice_in_a_step_ends_where_it_does_without_drafts(engine: Engine) -> None:
    """A grammar that nothing can follow, or a stop string, and ``max_tokens`` right behind."""
    plain, llm = engine(**SMALL), engine(**SMALL | DRAFTS)
    for its in (plain, llm):
        its.engine._admission.guides._ends = frozenset()
    for most in range(18, 30):
        for more in ({}, {"stop": ["babababababababababa"]}):
            params = SamplingParams(temperature=0, max_tokens=most, structured_outputs={"regex": "(ab){12}"}, **more)
            found, expected = run(llm, [7, 8], params), run(plain, [7, 8], params)
            assert told(found) == told(expected)
            assert found[0].outputs[0].stop_reason == expected[0].outputs[0].stop_reason
    assert llm.engine.stats.output_tokens == plain.engine.stats.output_tokens
    assert llm.engine.stats.accepted_tokens > 100


def test_a_sampler_with_one_mask_per_slot_has_no_drafts_of_guided_requests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DefaultSampler, "masks_drafts", False)
    llm = engine(**SMALL | DRAFTS)
    run(llm, [5], SamplingParams(temperature=0, max_tokens=60, structured_outputs={"regex": "(ab){20}"}))
    assert llm.engine.stats.draft_tokens == 0


def test_two_tokens_behind_a_whole_draft_are_read_one_by_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with CUDA graphs, whose decodes take less time than a prompt of two tokens."""
    monkeypatch.setattr(Drafter, "replays", lambda self, rows: True)
    plain = engine(**SMALL)
    expected, same = run(plain, *requests()), plain.engine.config.model.path
    llm = engine(**SMALL | {"scheduler.num_speculative_tokens": 3, "scheduler.draft_model": same})
    assert told(run(llm, *requests())) == told(expected)
    stats = llm.engine.stats
    assert stats.accepted_tokens > 0.95 * stats.draft_tokens, "what it reads is what it would have read at once"


def test_no_more_steps_are_launched_ahead_than_an_engine_has_in_flight(
    engine: Engine, tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host writes for each step, as without graphs, into memory for so many."""
    launch, ahead, most = ModelRunner.launch, [], []

    def counted(runner: ModelRunner, batch: Batch) -> StepHandle:
        step = launch(runner, batch)
        if runner is llm.engine.executor._worker._drafter.runner:
            ahead.append(step)
            most.append(len(ahead))
        return step

    def read(step: PendingStep) -> StepResult:
        if step in ahead:
            del ahead[: ahead.index(step) + 1]
        return result(step)

    result = PendingStep.result
    monkeypatch.setattr(ModelRunner, "launch", counted)
    monkeypatch.setattr(PendingStep, "result", read)
    monkeypatch.setattr(PendingStep, "__eq__", object.__eq__)
    drafts = {"scheduler.num_speculative_tokens": 6, "scheduler.draft_model": tiny_checkpoint("qwen3")}
    llm = engine(**SMALL | drafts)
    run(llm, [1, 2, 3], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert len(most) == 6 and max(most) == 2


def test_a_stop_string_or_token_amid_a_draft_ends_the_answer_there(engine: Engine) -> None:
    plain, llm = engine(**SMALL), engine(**SMALL | DRAFTS)
    prompt, three = [7, 8] * 8, {"allowed_token_ids": [70, 71, 72], "seed": 4, "max_tokens": 60, "ignore_eos": True}
    text = run(plain, prompt, SamplingParams(**three))[0].outputs[0].text
    for place in range(20, 40):
        for stop in ({"stop": [text[place : place + 4]]}, {"stop_token_ids": [71], "min_tokens": place}):
            params = SamplingParams(**three, **stop)
            found = run(llm, prompt, params)
            assert told(found) == told(run(plain, prompt, params))
            assert found[0].outputs[0].finish_reason == "stop"
    assert llm.engine.stats.accepted_tokens > 200
    assert plain.engine.stats.output_tokens - 60 == llm.engine.stats.output_tokens, "tokens behind it do not count"
    usable(llm)


def test_steps_are_fewer_where_text_repeats() -> None:
    steps = []
    for drafts in ([], ["scheduler.num_speculative_tokens=5"]):
        with LLM("demo", device="cpu", overrides=drafts) as llm:
            text = "What is the capital of France? " * 4
            output = run(llm, text, SamplingParams(temperature=0, max_tokens=120, ignore_eos=True))[0]
            steps.append((llm.engine.stats.steps, output.outputs[0].text))
    assert steps[1][0] < 0.7 * steps[0][0] and steps[1][1] == steps[0][1]


def test_who_is_busy_gets_fewer_and_longer_outputs(engine: Engine) -> None:
    counts = []
    for hold in (False, True):
        llm = engine(**SMALL | DRAFTS)
        llm.engine.hold_outputs = hold
        for i in range(8):
            llm.engine.add_request(f"{i}", [i, 8] * 6, SamplingParams(temperature=0.1, seed=i, max_tokens=40))
        outputs: list[RequestOutput] = []
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()
        counts.append(len(outputs))
        assert llm.engine.stats.drafts
    assert counts[1] < 0.9 * counts[0]


def test_the_next_draft_is_under_way_while_text_is_read(engine: Engine) -> None:
    llm = engine(**SMALL | DRAFTS)
    params = SamplingParams(allowed_token_ids=[70, 71], seed=4, max_tokens=60, ignore_eos=True)
    llm.engine.add_request("one", [7, 8] * 4, params)
    idle = []
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
        idle.append(llm.engine.num_steps_under_way == 0)
    assert llm.engine.stats.drafts > 5
    assert idle.count(True) == 1 and idle[-1]


@pytest.mark.parametrize("model", [False, True], ids=["looked up", "draft model"])
def test_pictures_show_no_draft_as_a_prompt(engine: Engine, tiny_checkpoint: Checkpoints, model: bool) -> None:
    by_model = {"scheduler.num_speculative_tokens": 3, "scheduler.draft_model": tiny_checkpoint("qwen3")}
    drafts = by_model if model else DRAFTS
    llm = engine(**SMALL | drafts | {"cache.num_blocks": 200, "cache.enable_prefix_caching": "false"})
    recorder = llm.engine.observer = StepRecorder(llm.engine)
    prompts, _ = requests()
    run(llm, prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    recorder.finish()
    assert llm.engine.stats.drafts
    assert sum(step.prefill_tokens for step in recorder.steps) == sum(map(len, prompts))
    assert sum(len(step.chunks) for step in recorder.steps) == len(prompts)
    assert max(step.sequences for step in recorder.steps) == len(prompts)


def test_vllms_speculative_config(tiny_checkpoint: Callable[..., Any]) -> None:
    def options(config: Any) -> tuple[int, int, int]:
        with LLM(str(tiny_checkpoint("qwen3")), device="cpu", speculative_config=config) as llm:
            chosen = llm.engine.config.scheduler
            return chosen.num_speculative_tokens, chosen.prompt_lookup_max, chosen.prompt_lookup_min

    assert options({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}) == (3, 4, 4)
    assert options({"num_speculative_tokens": 2, "prompt_lookup_max": 4, "prompt_lookup_min": 2}) == (2, 4, 2)
    assert options({"model": "[ngram]", "num_speculative_tokens": 2, "revision": None}) == (2, 5, 3)
    assert options(None) == (0, 5, 3)
    same = str(tiny_checkpoint("qwen3"))
    assert options({"model": same, "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}) == (2, 5, 3)
    assert options({"model": same, "num_speculative_tokens": 2, "prompt_lookup_max": 4}) == (2, 4, 4)


@pytest.mark.parametrize(("config", "message"), [
    ({"method": "eagle", "num_speculative_tokens": 2}, "Allowed: ngram, draft_model"),
    ({"modle": "x"}, "has modle, which is not supported. Did you mean model"),
    ({"model": "x"}, "lacks num_speculative_tokens"),
    ({"method": "draft_model", "num_speculative_tokens": 2}, "method=draft_model lacks model, a smaller one"),
    ({"method": "ngram", "model": "demo", "num_speculative_tokens": 2}, "method=ngram has model='demo', which it does"),
    ({"model": "dmeo", "num_speculative_tokens": 2}, "scheduler.draft_model=dmeo: .*Did you mean demo"),
    ({"model": "checkpoint", "num_speculative_tokens": 2}, "draft_model=checkpoint: there is no such model"),
    ({"model": "demo", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 2}, "each GPU has all .* Allowed: 1"),
    ({"model": "demo", "num_speculative_tokens": 2, "quantization": "fp8"}, "has quantization, which is not"),
    ({"model": "/nowhere", "num_speculative_tokens": 2}, "scheduler.draft_model=/nowhere: .*no such folder"),
    ({"model": 5, "num_speculative_tokens": 2}, "model=5 is not"),
    ({"method": "ngram"}, "lacks num_speculative_tokens"),
    (5, r"speculative_config=5 is not a dict; type speculative_config=\{'method': 'ngram', 'num_spec.*: 5\}, or leave"),
    ("ngram", "speculative_config='ngram' is not a dict; type"),
    ({"num_speculative_tokens": 512}, "max_num_seqs=512"),
    ({"num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_max=2"),
    ({"num_speculative_tokens": -1}, "the least is 0"),
])  # fmt: skip
def test_what_cannot_be_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", device="cpu", speculative_config=config)


def test_a_scheduler_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixedScheduler, "speculates", False)
    with pytest.raises(ConfigError, match="not supported by scheduler=mixed"):
        LLM("demo", device="cpu", speculative_config={"num_speculative_tokens": 2})


def test_a_draft_model_must_fit(tiny_checkpoint: Checkpoints) -> None:
    def refusal(**given: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            LLM("demo", device="cpu", **given)
        return str(caught.value)

    other, short = tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", vocab_size=3072, max_position_embeddings=64)
    said = refusal(speculative_config={"model": str(other), "num_speculative_tokens": 2})
    assert (
        "a vocabulary of 512 tokens" in said and "vocab_size in config.json" in said and f"draft_model={other}" in said
    )
    said = refusal(speculative_config={"model": str(short), "num_speculative_tokens": 2})
    assert "64 positions" in said and said.endswith("type max_model_len=64")
    drafts = ["scheduler.num_speculative_tokens=2", "scheduler.draft_model=demo"]
    said = refusal(overrides=[*drafts, "scheduler.max_num_batched_tokens=2"])
    assert (
        "is not less than scheduler.max_num_batched_tokens=2: in a step each draft token takes the place of a" in said
    )
    said = refusal(overrides=["scheduler.draft_model=demo"])
    assert "add scheduler.num_speculative_tokens=5" in said


def test_a_draft_model_that_the_attention_backend_does_not_take_is_named(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchBackend, "capabilities", replace(TorchBackend.capabilities, head_dims=(16,)))
    model, draft = tiny_checkpoint("qwen3", head_dim=16), tiny_checkpoint("qwen3", head_dim=32)
    drafts = {"model": str(draft), "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=f"^scheduler.draft_model={draft}: .*head sizes 16, not 32"):
        LLM(str(model), device="cpu", attention="torch", speculative_config=drafts)


def test_a_scheduler_that_asks_no_draft_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixedScheduler, "asks_draft_models", False)
    with pytest.raises(ConfigError, match="draft_model=demo is not supported by scheduler=mixed"):
        LLM("demo", device="cpu", speculative_config={"model": "demo", "num_speculative_tokens": 2})


@pytest.mark.parametrize("name", ["speculative_model", "spec_model"])
def test_vllms_other_keywords_name_this_one(name: str) -> None:
    with pytest.raises(ConfigError, match=r"type speculative_config=\{'model': NAME, 'num_speculative_tokens': 5"):
        LLM("demo", device="cpu", **{name: "demo"})


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config.json.*pass scheduler.draft_model=DIR") as caught:
        LLM("demo", device="cpu", speculative_config={"model": str(tmp_path), "num_speculative_tokens": 2})
    assert "model.path" not in str(caught.value)
