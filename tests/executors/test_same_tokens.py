"""tp 2 and 4 say what tp 1 says, in float32, under preemption, shared prefixes and aborts."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from zygote import Zygote

from minivllm import LLM, SamplingParams

Checkpoints = Callable[..., Path]
Answers = dict[str, tuple[list[int], list[float]]]
BLOCKS = 40
YES_OR_NO = {"regex": "(yes|no)( (yes|no)){3}"}


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(0)
    prefix = [rng.randrange(500) for _ in range(40)]
    found = []
    for i in range(16):
        shared = prefix[: rng.choice([8, 24, 40])] if i % 2 else []
        prompt = shared + [rng.randrange(500) for _ in range(rng.randint(1, 20))]
        params = SamplingParams(
            temperature=0, max_tokens=rng.randint(4, 24), ignore_eos=True, logprobs=3 if i % 3 == 0 else None,
            presence_penalty=0.8 if i % 4 == 1 else 0, repetition_penalty=1.2 if i % 5 == 1 else 1,
            prompt_logprobs=2 if i % 5 == 3 else None,
            bad_words=["q", "the"] if i % 6 == 4 else None, structured_outputs=YES_OR_NO if i % 7 == 5 else None,
            logit_bias={i: 3.0} if i % 6 == 2 else None, allowed_token_ids=[*range(99)] if i % 8 == 3 else None,
        )  # fmt: skip
        found.append((prompt, params))
    return found


def run(folder: Path, tp: int, executor: str = "auto") -> Answers:
    overrides = [f"executor={executor}", "scheduler.max_num_batched_tokens=48", "cache.block_size=4"]
    slots = 8
    if tp > 1:  # drafts change nothing either
        who = f"draft_model={folder}" if tp == 4 else "prompt_lookup_min=1"
        overrides += ["scheduler.num_speculative_tokens=3", f"scheduler.{who}"]
        slots = 20
    with LLM(
        str(folder), device="cpu", tp=tp, overrides=overrides, num_gpu_blocks_override=BLOCKS, max_num_seqs=slots
    ) as llm:
        engine, answers, steps = llm.engine, {}, 0
        for i, (prompt, params) in enumerate(requests()):
            engine.add_request(str(i), prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    one = output.outputs[0]
                    found = [*(one.logprobs or []), *(output.prompt_logprobs or [])]
                    values = [lp.logprob for at in found for lp in (at or {}).values()]
                    answers[output.request_id] = list(one.token_ids), values
            steps += 1
            if steps in (6, 11):
                engine.abort(str(steps))
            engine.scheduler.check()
        assert engine.stats.preemptions > 0 and engine.stats.cached_tokens > 0
        assert (engine.stats.draft_tokens > 0) == (tp > 1)
        assert tp < 4 or engine.stats.accepted_tokens > 0.9 * engine.stats.draft_tokens
        assert engine.scheduler.blocks.num_free == BLOCKS
        assert engine.describe().get("ranks", 1) == tp
    return answers


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_any_number_of_ranks_says_the_same(
    tiny_checkpoint: Checkpoints, forked_ranks: Zygote, architecture: str
) -> None:
    # 2 kv heads: 4 ranks share them; 511 tokens: the vocabulary divides by neither 2 nor 4
    folder = tiny_checkpoint(architecture, vocab_size=511, tie_word_embeddings=architecture == "llama")
    one = run(folder, 1)
    assert len(one) >= 14
    shared_memory = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    for tp in (2, 4):
        many = run(folder, tp)
        assert {k: v[0] for k, v in many.items()} == {k: v[0] for k, v in one.items()}
        for name, (_, logprobs) in many.items():
            assert logprobs == pytest.approx(one[name][1], abs=1e-3)
    if shared_memory:
        assert set(os.listdir("/dev/shm")) <= shared_memory


def test_two_engines_at_once_and_sampling_that_needs_agreement(
    tiny_checkpoint: Checkpoints, forked_ranks: Zygote
) -> None:
    """Ports, names and process groups do not meet; top-p and logprobs come from all ranks alike."""
    folder, prompts = str(tiny_checkpoint("qwen3")), [[1, 2, 3], [7, 8]]
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=3, max_tokens=12, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, max_tokens=12, min_tokens=5),
    ]
    with LLM(folder, device="cpu", tp=2) as a, LLM(folder, device="cpu", tp=2) as b, LLM(folder, device="cpu") as one:
        said = [
            [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)] for llm in (a, b, one, a)
        ]
    assert said[0] == said[1] == said[2] == said[3]


def test_ranks_that_sample_together_draw_what_one_draws(tiny_checkpoint: Checkpoints, forked_ranks: Zygote) -> None:
    """A vocabulary of several groups of tokens, more rows than logits are gathered of, every kind of sampling."""
    folder = str(tiny_checkpoint("qwen3", vocab_size=2500))
    prompts = [[i + 1, 2 * i + 1] for i in range(24)]
    params = [
        SamplingParams(temperature=0.0 if i % 3 == 0 else 0.9, seed=i, max_tokens=6, ignore_eos=True) for i in range(23)
    ]
    params.append(SamplingParams(temperature=0.8, top_k=20, seed=1, max_tokens=3, ignore_eos=True))
    said = []
    for tp in (1, 2):
        with LLM(folder, device="cpu", tp=tp, max_num_seqs=32) as llm:
            said.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
    assert said[0] == said[1]
    assert len({token for tokens in said[0] for token in tokens if token >= 2048}) > 3, "the second rank never won"


@pytest.mark.skipif(torch.cuda.is_available(), reason="would take two GPUs")
def test_the_page_says_what_works(forked_ranks: Zygote, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    with LLM("demo", device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=20)
        assert capsys.readouterr().out == llm.generate("Once upon a time", params, False)[0].outputs[0].text + "\n"
