"""The whole engine on a GPU: every backend, graphs on and off, says what the CPU says in float32."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from minivllm import LLM, RequestOutput, SamplingParams
from minivllm.core import mixed_graphs, prompt_graphs
from minivllm.core.batch import Batch
from minivllm.core.cascade import CascadePlanner
from minivllm.core.interfaces import AttentionSpec, Capabilities, CudaGraphs, StepHandle
from minivllm.core.landing import PendingStep, StepApart
from minivllm.core.mixed_graphs import MixedGraphs
from minivllm.core.model_runner import ModelRunner
from minivllm.errors import ConfigError, MinivllmError
from minivllm.kernels import nvrtc
from minivllm.kernels.linear.packed_chain import packed_chain
from minivllm.kernels.linear.packed_linear import packed_linear
from minivllm.kernels.megakernel.megakernel import megakernel
from minivllm.layers import embedding, fused, whole
from minivllm.plugins.manager import load_plugins
from minivllm.testing.checkpoints import random_checkpoint
from minivllm.testing.outputs import NEAR, common_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

llguidance = find_spec("llguidance") is not None
has_all_memory = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="other workers use this GPU's memory, too"
)
REQUESTS = int(os.environ.get("MINIVLLM_RANDOM_REQUESTS", 200))  # 2000 before a release
PROMPTS = ["Once upon a time", "The engine", "In a small village", "The sea was", "My favourite animal is", "Hello"]
GREEDY = SamplingParams(
    temperature=0, max_tokens=64, logprobs=20
)  # the demo often has more than five equally good words


def usable(dtype: str = "bfloat16") -> list[str]:
    """The attention backends that can run the demo model here."""
    spec = AttentionSpec("cuda", dtype, 4, 2, 64, 16, 6, 256, 8192, 2048, 0.125)
    registry = load_plugins()
    found = []
    for component in registry.by_priority("attention"):
        if not registry.why_not(component) and not registry.resolve("attention", component.name).unsupported(spec):
            found.append(component.name)
    return found


BACKENDS = usable() if torch.cuda.is_available() else ["triton"]


def graphs_of(attention: str) -> str:
    """Which steps the backend of that name, a plugin's perhaps, lets be captured."""
    capabilities: Capabilities = load_plugins().resolve("attention", attention).capabilities
    return capabilities.cuda_graphs


def assert_close(ours: RequestOutput, reference: RequestOutput, *, told: bool = True) -> None:
    """The same tokens; or where they first differ, each has the other's among its best, nearly as likely: within two
    steps of a bfloat16 logit near 16. ``told``: whether ours has log-probabilities; the reference does.
    """
    a, b = ours.outputs[0], reference.outputs[0]
    for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
        if x != y:
            assert b.logprobs is not None and (a.logprobs is not None) == told
            assert x in b.logprobs[i] and (a.logprobs is None or y in a.logprobs[i]), (i, x, y, a.text, b.text)
            assert abs(b.logprobs[i][x].logprob - b.logprobs[i][y].logprob) < NEAR, (i, x, y, a.text, b.text)
            return
    assert len(a.token_ids) == len(b.token_ids)


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[list[RequestOutput]]:
    with LLM("demo", device="cpu") as llm:
        yield llm.generate(PROMPTS, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("attention", BACKENDS)
def test_every_backend_says_what_the_cpu_says(attention: str, eager: bool, on_cpu: list[RequestOutput]) -> None:
    with LLM("demo", attention=attention, enforce_eager=eager or None, max_num_seqs=16) as llm:
        about = llm.engine.describe()
        assert about["attention"] == attention
        assert about["cuda_graphs"] == (not eager and graphs_of(attention) != CudaGraphs.NEVER)
        for ours, reference in zip(llm.generate(PROMPTS, GREEDY, use_tqdm=False), on_cpu, strict=True):
            assert_close(ours, reference)


@pytest.mark.parametrize("attention", BACKENDS)
def test_drafts_change_no_token(attention: str) -> None:
    """Of one sequence, whose rows are all drafts', and of some, of which a few have drafts."""
    prompts = [*PROMPTS, *(f"What is the {what}? " * 4 for what in ("capital of France", "opposite of wet", "sun"))]
    greedy = GREEDY.clone(max_tokens=160, ignore_eos=True)
    with LLM("demo", attention=attention, max_num_seqs=16) as llm:
        expected = llm.generate(prompts, greedy, use_tqdm=False)
    drafts = {"num_speculative_tokens": 6, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    with LLM("demo", attention=attention, max_num_seqs=16, speculative_config=drafts) as llm:
        together = llm.generate(prompts, greedy, use_tqdm=False)
        alone = [llm.generate(prompt, greedy.clone(logprobs=None), use_tqdm=False)[0] for prompt in prompts]
        stats = llm.engine.stats
    for reference, ours, lone in zip(expected, together, alone, strict=True):
        assert_close(ours, reference)
        assert_close(lone, reference, told=False)
    assert stats.accepted_tokens > 100


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("attention", BACKENDS)
def test_a_draft_model_changes_no_token(attention: str, eager: bool) -> None:
    """The model itself, whose drafts are right but where roundings differ, also of tokens that are drawn."""
    greedy = GREEDY.clone(max_tokens=120, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, seed=1, top_p=0.9, max_tokens=120, ignore_eos=True)
    how: dict[str, Any] = {"attention": attention, "max_num_seqs": 16, "enforce_eager": eager or None}
    with LLM("demo", **how) as llm:
        expected = llm.generate(PROMPTS, greedy, use_tqdm=False)
    drafts = {"model": "demo", "num_speculative_tokens": 4}
    with LLM("demo", **how, speculative_config=drafts) as llm:
        together = llm.generate(PROMPTS, greedy, use_tqdm=False)
        alone = [llm.generate(prompt, greedy.clone(logprobs=None), use_tqdm=False)[0] for prompt in PROMPTS]
        llm.generate(PROMPTS, drawn, use_tqdm=False)
        stats = llm.engine.stats
        assert llm.engine.describe()["cuda_graphs"] == (not eager and graphs_of(attention) != CudaGraphs.NEVER)
    for reference, ours, lone in zip(expected, together, alone, strict=True):
        assert_close(ours, reference)
        assert_close(lone, reference, told=False)
    assert stats.accepted_tokens > 0.9 * stats.draft_tokens > 0


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6, 7])
def test_few_slots_say_the_same(slots: int, on_cpu: list[RequestOutput]) -> None:
    """Graphs have more rows than there are slots."""
    with LLM("demo", max_num_seqs=slots) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    for ours, reference in zip(outputs, on_cpu, strict=True):
        assert_close(ours, reference, told=False)


def test_graphs_change_no_token_in_float32() -> None:
    params = [SamplingParams(temperature=t, seed=i, max_tokens=48) for i, t in enumerate([0, 0, 0.8, 0.8, 1.0, 0.5])]
    texts = []
    for eager in (True, False):
        with LLM("demo", attention="triton", dtype="float32", enforce_eager=eager or None, max_num_seqs=11) as llm:
            texts.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("attention", BACKENDS)
def test_prompt_logprobs_are_those_of_the_cpu(attention: str) -> None:
    """Of whole prompts and of chunks, beside decodes, with more rows than the LM head takes at once."""
    rng = random.Random(0)
    prompts = [[rng.randrange(5, 3000) for _ in range(n)] for n in (1, 2, 700, 30, 90, 257, 64, 5, 40)]
    params = [
        SamplingParams(temperature=0, max_tokens=4 + 5 * i, ignore_eos=True, prompt_logprobs=i % 4 if i % 5 else None)
        for i in range(len(prompts))
    ]
    found = []
    for where in ({"device": "cpu", "attention": "torch", "dtype": "float32"}, {"attention": attention}):
        with LLM("demo", max_num_seqs=4, max_num_batched_tokens=300, **where) as llm:  # type: ignore[arg-type]
            found.append(llm.generate(prompts, params, use_tqdm=False))
    for one, reference, ours in zip(params, *found, strict=True):
        if one.prompt_logprobs is None:
            assert ours.prompt_logprobs is None
            continue
        assert ours.prompt_logprobs is not None and reference.prompt_logprobs is not None
        assert ours.prompt_logprobs[0] is None and len(ours.prompt_logprobs) == len(ours.prompt_token_ids)
        entries = list(zip(ours.prompt_logprobs[1:], reference.prompt_logprobs[1:], strict=True))
        off = [abs(next(iter(a.values())).logprob - next(iter(b.values())).logprob) for a, b in entries if a and b]
        assert [next(iter(a)) for a, _ in entries if a] == ours.prompt_token_ids[1:]
        sure = [(a, token) for a, b in entries if a and b for token, lp in b.items() if lp.logprob > -0.3]
        assert all(token in a and a[token].rank == 1 for a, token in sure), "the best tokens are others"
        assert max(off, default=0.0) < 1.0 and sum(off) <= 0.15 * len(off), (len(off), max(off), sum(off))


def test_guided_answers_fit_beside_others_that_say_what_they_say_alone(on_cpu: list[RequestOutput]) -> None:
    if not llguidance:
        pytest.skip("needs llguidance")
    asked = [{"regex": "[A-Z][a-z]{2,5} [0-9]{3}"}, {"choice": ["yes", "no", "perhaps"]}, {"json_object": True}]
    guided = [GREEDY.clone(structured_outputs=one) for one in asked] + [GREEDY.clone(bad_words=["the", "a"])]
    drawn = SamplingParams(n=4, seed=1, top_p=0.9, max_tokens=24, structured_outputs={"regex": "[a-z ]{16}"})
    params = [*[GREEDY] * len(PROMPTS), *guided, drawn]
    said: list[list[list[int]]] = []
    for eager in (False, True):
        with LLM("demo", dtype="float32", device="cuda", enforce_eager=eager, max_num_seqs=16) as llm:
            for _ in range(2):  # the second time what refines is captured
                outputs = llm.generate([*PROMPTS, *PROMPTS[:5]], params, use_tqdm=False)
                said.append([list(one.token_ids) for output in outputs for one in output.outputs])
            for ours, reference in zip(outputs, on_cpu, strict=False):
                assert_close(ours, reference)
            texts = [output.outputs[0].text for output in outputs[len(PROMPTS) :]]
            assert re.fullmatch(asked[0]["regex"], texts[0]) and texts[1] in asked[1]["choice"]
            assert texts[2].lstrip().startswith("{") and not re.search(r"(^| )(the|a)\b", texts[3])
            assert all(re.fullmatch("[a-z ]{16}", one.text) for one in outputs[-1].outputs)
            assert llm.engine.scheduler.blocks.num_free == llm.engine.num_blocks
    assert said[0] == said[1] == said[2] == said[3]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_drafts_change_no_guided_answer(eager: bool) -> None:
    if not llguidance:
        pytest.skip("needs llguidance")
    person = {"type": "object", "properties": {"name": {"enum": ["Ann", "Bob"]}}, "required": ["name"]}
    people = {"type": "array", "minItems": 5, "maxItems": 6, "items": person | {"additionalProperties": False}}
    asked = [{"json": people, "disable_any_whitespace": True}, {"regex": "([a-c]{3} ){9}"}, {"regex": "(one, ){9}two"}]
    greedy = SamplingParams(temperature=0, max_tokens=90)
    params = [greedy.clone(structured_outputs=one) for one in asked] + [greedy.clone(bad_words=["the", "a"])]
    params += [params[0].clone(logprobs=2), params[1].clone(temperature=0.8, seed=1, n=3), greedy]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    said = []
    for drafts in (None, {"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 1}):
        with LLM(
            "demo", dtype="float32", device="cuda", enforce_eager=eager, max_num_seqs=40, speculative_config=drafts
        ) as llm:
            rounds = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
            rounds += [[llm.generate(p, its, use_tqdm=False)[0] for p, its in zip(prompts, params, strict=True)]]
            said += [[(one.text, one.finish_reason) for o in outputs for one in o.outputs] for outputs in rounds]
            assert llm.engine.scheduler.blocks.num_free == llm.engine.num_blocks
    assert said == [said[0]] * 6
    assert llm.engine.stats.accepted_tokens > 200


@pytest.mark.parametrize("pipeline", ["true", "false"])
def test_graphs_leave_every_token_on_the_host(pipeline: str) -> None:
    """Answers end at different lengths and others come in, so that graphs of all sizes, steps with prompts, filters
    and, as long as a request for log-probabilities or one with penalties or biases runs, refined and resampled ones
    alternate."""
    prompts = [p for p in PROMPTS for _ in range(5)]
    params = [
        SamplingParams(
            temperature=0.8 if i % 3 else 0, seed=i, max_tokens=3 + 11 * i % 50, ignore_eos=True,
            logprobs=1 if i % 8 == 0 and i < 24 else None, top_k=20 if i % 5 == 1 else 0, top_p=0.9 if i % 4 else 1,
            frequency_penalty=0.3 if i % 7 == 0 else 0, min_tokens=2 if i % 9 == 0 else 0,
            logit_bias={7: 2.5, 300: -4.0} if i % 6 == 2 else None, allowed_token_ids=[*range(99)] if i == 9 else None,
        )
        for i in range(len(prompts))
    ]  # fmt: skip
    params[-1] = params[-1].clone(max_tokens=300)  # alone at the end
    told = []
    for eager in (True, None):
        options = {"enforce_eager": eager, "max_num_seqs": 19, "overrides": [f"scheduler.async_scheduling={pipeline}"]}
        with LLM("demo", attention="triton", dtype="float32", **options) as llm:
            outputs = [o for _ in range(2) for o in llm.generate(prompts, params, use_tqdm=False)]
            told.append([o.outputs[0].token_ids for o in outputs])
            if not eager:
                graphs = llm.engine.executor._worker.runner.graphs  # type: ignore[attr-defined]
                assert graphs.landing.replays == int(graphs.landing.steps) > 500
    assert told[0] == told[1]


@pytest.mark.parametrize("often", [4, 10**9], ids=["one", "two"])
def test_many_decodes_and_the_prompts_beside_them_are_one_graph_or_two(
    often: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One where such steps are frequent; with requests for log-probabilities, chunks of prompts and filters."""
    taken: set[str] = set()
    launch, launch_one = ModelRunner.launch, MixedGraphs.launch

    def noted(self: ModelRunner, batch: Batch) -> StepHandle:
        step = launch(self, batch)
        if isinstance(step, StepApart):
            assert batch.num_decodes > 32 and len(batch.token_ids)
            taken.add("two")
        return step

    def one_noted(self: MixedGraphs, key: Any, batch: Batch) -> StepHandle:
        step = launch_one(self, key, batch)
        taken.update({"one", "refined" if isinstance(step, PendingStep) else "landed"})
        return step

    monkeypatch.setattr(ModelRunner, "launch", noted)
    monkeypatch.setattr(MixedGraphs, "launch", one_noted)
    monkeypatch.setattr(mixed_graphs, "_OFTEN", often)
    # As they come: those with log-probabilities at the end.
    monkeypatch.setattr("minivllm.llm.longest_first", lambda engine, sizes, params: range(len(params)))
    prompts = [[5 + (i + j) % 900 for j in range(1 + 37 * i % 200)] for i in range(150)]
    params = [
        SamplingParams(
            temperature=0.8 if i % 3 else 0, seed=i, max_tokens=5 + 7 * i % 40, ignore_eos=True,
            logprobs=i % 4 if i > 110 else None, top_k=20 if i % 5 == 1 else 0,
            bad_words=["the", "a"] if i > 130 and i % 3 == 0 else None,  # their steps sample late
        )
        for i in range(len(prompts))
    ]  # fmt: skip
    said = []
    for eager in (True, None):
        options = {"enforce_eager": eager, "max_num_seqs": 72, "overrides": ["scheduler.max_num_batched_tokens=300"]}
        with LLM("demo", attention="triton", dtype="float32", **options) as llm:
            outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
            said.append(
                [(o.token_ids, [{t: lp.rank for t, lp in at.items()} for at in o.logprobs or []]) for o in outputs]
            )
        assert bool(taken) == (not eager)
    assert said[0] == said[1]
    assert taken == ({"one", "two", "refined", "landed"} if often == 4 else {"two"})


@pytest.mark.parametrize("attention", BACKENDS)
def test_mixed_graphs_say_what_eager_steps_say(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each backend, in its own precision."""
    monkeypatch.setattr(mixed_graphs, "_OFTEN", 1)
    prompts = [PROMPTS[i % 6] + f" {i}" * (i % 30) for i in range(200)]
    params = [GREEDY.clone(max_tokens=5 + 7 * i % 40, ignore_eos=True) for i in range(len(prompts))]
    said = []
    for eager in (True, None):
        with LLM("demo", attention=attention, enforce_eager=eager, max_num_seqs=90) as llm:
            for steps_of in (params, [p.clone(logprobs=None) for p in params]):
                said.append(llm.generate(prompts, steps_of, use_tqdm=False))
            if not eager and (graphs := llm.engine.executor._worker.runner.mixed_graphs) is not None:  # type: ignore[attr-defined]
                assert len(graphs._graphs) > 1
    for ours, reference in zip(said[2], said[0], strict=True):
        assert_close(ours, reference)
    same = [ours.outputs[0].token_ids == ref.outputs[0].token_ids for ours, ref in zip(said[3], said[2], strict=True)]
    assert sum(same) > 150, "without log-probabilities the same words, but for ties"


@pytest.mark.parametrize("attention", BACKENDS)
def test_heads_of_128_say_the_same_with_graphs_and_without(
    attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For which backends have other kernels than for the demo's: prompts, chunks of them, and decodes beside both."""
    monkeypatch.setattr(mixed_graphs, "_OFTEN", 1)
    folder = random_checkpoint(tmp_path, transformers.Qwen3ForCausalLM, {"head_dim": 128})
    rng = random.Random(0)
    prompts = [[rng.randrange(500) for _ in range(rng.choice((3, 30, 100, 400)))] for _ in range(150)]
    params = [GREEDY.clone(max_tokens=9 + 5 * i % 43, ignore_eos=True) for i in range(len(prompts))]
    options: dict[str, Any] = {"attention": attention, "dtype": "bfloat16", "max_num_seqs": 60}
    said = []
    for eager in (True, None):
        with LLM(
            str(folder), **options, enforce_eager=eager, overrides=["scheduler.max_num_batched_tokens=256"]
        ) as llm:
            for steps_of in (params, [p.clone(logprobs=None) for p in params]):
                said.append(llm.generate(prompts, steps_of, use_tqdm=False))
            runner = llm.engine.executor._worker.runner  # type: ignore[attr-defined]
            captured = (runner.prompt_graphs is not None, runner.mixed_graphs is not None)
            captures = not eager and graphs_of(attention) == CudaGraphs.ALWAYS
            assert captured == (captures, captures)
            assert runner.mixed_graphs is None or len(runner.mixed_graphs._graphs) > 1
    for ours, reference in zip(said[2], said[0], strict=True):
        assert_close(ours, reference)
    for ours, reference in zip(said[3], said[2], strict=True):
        assert_close(ours, reference, told=False)


@pytest.mark.parametrize("attention", BACKENDS)
def test_random_requests_with_aborts_preemption_and_prefixes_equal_their_lone_runs(attention: str) -> None:
    rng = random.Random(0)
    prefix = [rng.randrange(1000) for _ in range(70)]
    requests = []
    for i in range(REQUESTS):
        own = [rng.randrange(1000) for _ in range(rng.randint(1, 60))]
        prompt = (prefix[: rng.choice([16, 40, 70])] if rng.random() < 0.5 else []) + own
        temperature = rng.choice([0, 0, 0.7])
        params = SamplingParams(
            temperature=temperature, seed=i, max_tokens=rng.randint(1, 60), ignore_eos=True, logprobs=20,
            top_k=rng.choice([0, 0, 20]), top_p=rng.choice([1.0, 0.9]),
            frequency_penalty=0.5 if temperature and i % 3 == 0 else 0,
        )  # fmt: skip
        requests.append((prompt, params))
    options = {"attention": attention, "max_num_seqs": 48, "overrides": ["scheduler.max_num_batched_tokens=512"]}
    with LLM("demo", **options, num_gpu_blocks_override=180) as llm:
        engine, done = llm.engine, {}
        for i, (prompt, params) in enumerate(requests):
            engine.add_request(str(i), prompt, params)
        aborted = set()
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done[int(output.request_id)] = output
            if rng.random() < 0.05:
                victim = rng.randrange(REQUESTS)
                if victim not in done:
                    engine.abort(str(victim))
                    aborted.add(victim)
        engine.scheduler.check()
        assert engine.stats.preemptions > 0 and engine.stats.cached_tokens > 0
        assert engine.scheduler.blocks.num_free == 180
        assert set(done) | aborted == set(range(REQUESTS))
        engine.reset_prefix_cache()
        different = 0
        compared = rng.sample(sorted(done), REQUESTS // 5)
        for i in compared:
            alone = llm.generate([requests[i][0]], requests[i][1], use_tqdm=False)[0]
            engine.reset_prefix_cache()
            if requests[i][1].greedy:
                assert_close(done[i], alone)
            different += alone.outputs[0].token_ids != done[i].outputs[0].token_ids
        assert different <= len(compared) // 4, (
            f"{different} of {len(compared)} differ from their lone runs: more than ties in bfloat16 explain"
        )


@has_all_memory
def test_a_few_sequences_say_the_same_through_one_kernel_as_through_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights, of the smallest model that goes so: what is nearly as likely as the best differs now and then,
    and then all that follows."""
    if not nvrtc.available(torch.device("cuda")):
        pytest.skip("no Hopper GPU, or no cuda-bindings")
    rng, used = random.Random(0), []
    prompts = [[rng.randrange(1000, 100_000) for _ in range(n)] for n in (1, 14, 15, 16, 31, 60, 127, 128, 250, 900)]
    together = [*([prompt] for prompt in prompts), prompts[:2], prompts[2:5], prompts[3:]]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    told = []

    def noted(*args: Any) -> torch.Tensor:
        used.append(args)
        return megakernel(*args)

    for kernel in (True, False):
        with monkeypatch.context() as patch:
            if kernel:
                patch.setattr(whole, "megakernel", noted)
            else:
                patch.setattr(whole, "use_megakernel", lambda *args: False)
            with LLM("qwen3", attention="triton", load_format="dummy", max_model_len=2048, max_num_seqs=8) as llm:
                outputs = [out.outputs[0] for some in together for out in llm.generate(some, params, use_tqdm=False)]
        told.append(outputs)
    assert {len(x) for x, *_ in used} == {1, 2, 4, 8}, "when their graphs were captured"
    same = sum(common_tokens(*both) for both in zip(*told, strict=True))
    assert same > 0.75 * 8 * sum(map(len, together))


@pytest.mark.parametrize("eager", [None, True], ids=["graphs", "eager"])
def test_packed_weights_say_what_the_others_do(eager: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights of a large model's layers and its LM head: decodes of some sequences, prompts, and both in one
    step."""
    if not nvrtc.available(torch.device("cuda")):
        pytest.skip("no Hopper GPU, or no cuda-bindings")
    rng, used, whole_rows, heads, told = random.Random(0), [], [], [], []
    prompts = [[rng.randrange(1000, 100_000) for _ in range(n)] for n in (1, 14, 31, 60, 127, 250, 900)]
    together = [*([prompt] for prompt in prompts), prompts[:2], prompts[2:5], prompts * 3]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)

    def noted(*args: Any) -> torch.Tensor:
        used.append(len(args[2]))
        return packed_chain(*args)

    def noted_whole(*args: Any) -> torch.Tensor:
        if args[1].weights[0].packed is not None:
            whole_rows.append(len(args[0]))
        return megakernel(*args)

    def noted_head(*args: Any) -> torch.Tensor:
        heads.append(len(args[0]))
        return packed_linear(*args)

    monkeypatch.setattr(fused, "packed_chain", noted)
    monkeypatch.setattr(whole, "megakernel", noted_whole)
    monkeypatch.setattr(embedding, "packed_linear", noted_head)
    for packed in ("true", "false"):
        overrides = ["model.hf_config.num_hidden_layers=3", f"packed_weights={packed}"]
        with LLM(
            "qwen3-8b", attention="triton", load_format="dummy", max_model_len=2048, max_num_seqs=64,
            gpu_memory_utilization=0.5, enforce_eager=eager, overrides=overrides,
        ) as llm:  # fmt: skip
            assert llm.engine.describe()["packed_weights"] == (packed == "true")
            told.append([out.outputs[0] for some in together for out in llm.generate(some, params, use_tqdm=False)])
            assert used and max(used) <= 48 and set(whole_rows) == {1, 2, 3 if eager else 4}
            assert heads and max(heads) <= 64
        if packed == "true":
            number = len(used), len(whole_rows), len(heads)
    assert (len(used), len(whole_rows), len(heads)) == number, "where nothing is packed"
    same = sum(common_tokens(*both) for both in zip(*told, strict=True))
    assert same > 0.75 * 8 * sum(map(len, together))


@pytest.mark.parametrize("attention", BACKENDS)
def test_weights_in_float8_change_as_much_here_as_on_the_cpu(attention: str) -> None:
    """With graphs and without, in steps of many tokens, which the library scales, and of few. (The same numbers are not
    to be expected: what bfloat16 rounds away decides how float8 rounds.)"""
    params = GREEDY.clone(prompt_logprobs=0, max_tokens=24)
    prompts = [*PROMPTS, "Once upon a time there was a small house by the sea. " * 40]
    found = {}
    for name, options in {
        "cpu": {"device": "cpu"},
        "whole on the cpu": {"device": "cpu", "quantization": None},
        "graphs": {"attention": attention},
        "eager": {"attention": attention, "enforce_eager": True},
        "chunks": {"attention": attention, "max_num_batched_tokens": 48},
        "whole": {"attention": attention, "quantization": None},
    }.items():
        keys: dict[str, Any] = {"quantization": "fp8", "max_num_seqs": 16, **options}
        with LLM("demo", **keys) as llm:
            assert llm.engine.describe()["weights"].startswith("fp8") == (keys["quantization"] == "fp8")
            found[name] = llm.generate(prompts, params, use_tqdm=False)

    def likely(output: RequestOutput) -> np.ndarray:
        told = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
        return np.array([entry[token].logprob for token, entry in told if entry is not None])

    def apart(one: str, other: str) -> float:
        pairs = zip(found[one], found[other], strict=True)
        return float(np.mean(np.concatenate([np.abs(likely(a) - likely(b)) for a, b in pairs])))

    error = apart("cpu", "whole on the cpu")
    assert apart("whole", "whole on the cpu") < error / 2
    for name in ("graphs", "eager", "chunks"):
        assert 0.5 * error < apart(name, "whole") < 1.5 * error, name


@pytest.mark.parametrize("eager", [None, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefixes_that_are_read_once_change_no_token(
    dtype: str, eager: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree of prefixes, sequences that come and go, and prompts beside them; in bfloat16 by the stream of pages."""
    monkeypatch.setattr("minivllm.backends.triton._CASCADE_BYTES", 1 << 16)
    rng, used = random.Random(0), []
    plan = CascadePlanner.plan

    def noted(self: CascadePlanner, batch: Batch) -> Any:
        found = plan(self, batch)
        used.append(0 if found is None else int((found.skips > 0).sum()))
        return found

    monkeypatch.setattr(CascadePlanner, "plan", noted)

    def ids(n: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(n)]

    system, branches = ids(200), [ids(n) for n in (0, 300, 64)]
    prompts = [[*(system if i % 7 else []), *branches[i % 3], *ids(1 + i % 40)] for i in range(70)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=4 + i % 37, ignore_eos=True, logprobs=20)
        for i in range(len(prompts))
    ]
    told = []
    for cascade in ("false", "true"):
        options: dict[str, Any] = {"attention": "triton", "max_num_seqs": 40, "enforce_eager": eager, "dtype": dtype}
        with LLM("demo", **options, overrides=[f"attention.cascade={cascade}"]) as llm:
            told.append(llm.generate(prompts, params, use_tqdm=False))
            told.append(llm.generate(prompts, params, use_tqdm=False))
        assert (max(used, default=0) > 20) == (cascade == "true")
    for outputs in told[1:]:
        for mine, its, wanted in zip(outputs, told[0], params, strict=True):
            if dtype == "float32":
                assert mine.outputs[0].token_ids == its.outputs[0].token_ids
            elif wanted.greedy:
                assert_close(mine, its)


@has_all_memory
def test_shutdown_gives_the_memory_back() -> None:
    free = []
    for _ in range(3):
        with LLM("demo", attention="triton", max_num_seqs=32, gpu_memory_utilization=0.5) as llm:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        free.append(torch.cuda.mem_get_info()[0])
    assert abs(free[2] - free[0]) <= 64 << 20, [f >> 20 for f in free]


def test_padding_rows_leave_the_cache_alone() -> None:
    """A batch of 3 runs in the graph of 4: its fourth row may write to block 0 only."""
    with LLM("demo", attention="triton", max_num_seqs=8, num_gpu_blocks_override=64) as llm:
        cache = llm.engine.executor._worker.runner.attention.kv_cache  # type: ignore[attr-defined]
        llm.generate(PROMPTS[:3], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
        written = (cache[:, :, 1:] != 0).flatten(3).any(-1).any(0).any(0)
        used = sum(-(-(len(llm.get_tokenizer().encode(p)) + 19) // 16) for p in PROMPTS[:3])
        assert int(written.sum()) <= used + 3  # the pipeline writes one row past an answer that ended


def test_too_little_memory_says_how_many_tokens_fit() -> None:
    with pytest.raises(ConfigError, match=r"tokens of cache fit into .* max_model_len=2048 needs more"):
        LLM("demo", attention="triton", max_model_len=2048, gpu_memory_utilization=0.0001)


def test_a_capture_that_went_wrong_is_noticed() -> None:
    with LLM("demo", attention="triton", max_num_seqs=8, num_gpu_blocks_override=64) as llm:
        runner = llm.engine.executor._worker.runner  # type: ignore[attr-defined]
        runner.graphs.verify(64, 1000)
        weight = runner.model.model.layers[0].mlp.down_proj.weight
        weight.data = weight.data * 3 + 1  # the graphs go on reading the old memory
        with pytest.raises(MinivllmError, match="graph of 1 rows with attention=TritonBackend differs"):
            runner.graphs.verify(64, 1000)


@pytest.mark.parametrize("attention", BACKENDS)
def test_a_capture_of_prompts_that_went_wrong_is_noticed(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full step that is captured twice, as a larger model's is. What is proven serves requests as before."""
    monkeypatch.setattr(prompt_graphs, "_LAYER_FLOP", 8e8)
    with LLM("demo", attention=attention, max_num_seqs=8, num_gpu_blocks_override=64) as llm:
        runner = llm.engine.executor._worker.runner  # type: ignore[attr-defined]
        graphs = runner.prompt_graphs
        if graphs is None:
            pytest.skip(f"{attention} has no graphs of prompts")
        assert graphs.full and {(graphs.full, "any"), (32, "few")} <= set(graphs._graphs)
        before = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.reset_prefix_cache()
        graphs.verify(64, 1000)
        for ours, reference in zip(llm.generate(PROMPTS, GREEDY, use_tqdm=False), before, strict=True):
            assert_close(ours, reference)
        weight = runner.model.model.layers[0].mlp.down_proj.weight
        with torch.inference_mode():
            weight.data = weight.data * 3 + 1  # the graphs go on reading the old memory
        with pytest.raises(MinivllmError, match=r"graph of 32 tokens of prompts with attention=\w+ differs"):
            graphs.verify(64, 1000)


LATE_KERNELS = """
from contextlib import contextmanager
import triton
from minivllm import LLM, SamplingParams
from minivllm.core.prompt_graphs import PromptGraphs
from minivllm.executors import worker

late, compile_only = [], worker.compile_only

@contextmanager
def then_listen():
    with compile_only():
        yield
    triton.knobs.compilation.listener = lambda src, **_: late.append(src.name)

worker.compile_only = then_listen
PromptGraphs.takes_apart = lambda self, batch: False  # but eager
params = [SamplingParams(max_tokens=3 + i % 30, ignore_eos=True) for i in range(230)]
with LLM("demo", attention="triton", max_num_seqs=200, num_gpu_blocks_override=1000) as llm:
    llm.generate(["Once upon a time"] * 230, params, use_tqdm=False)
print(late)
"""


def test_every_kernel_of_a_start_is_compiled_before_a_step_is_run() -> None:
    if not hasattr(pytest.importorskip("triton"), "AsyncCompileMode"):
        pytest.skip("this Triton compiles when it launches")
    done = subprocess.run([sys.executable, "-c", LATE_KERNELS], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr


def test_auto_takes_the_fastest_for_prompts_and_for_decodes() -> None:
    with LLM("demo", max_num_seqs=8, num_gpu_blocks_override=64) as llm:
        without = "flash+triton" if "flash" in BACKENDS else "triton"
        expected = "hopper" if "hopper" in BACKENDS else without
        assert llm.engine.describe()["attention"] == expected
        assert llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].text
