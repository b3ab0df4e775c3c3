"""Several GPUs say what one says, graphs on and off; what is killed leaves no memory behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from test_engine import GREEDY, PROMPTS, assert_close

from minivllm import LLM, RequestOutput, SamplingParams
from minivllm.errors import EngineDeadError

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")]
SIZES = [tp for tp in (2, 4) if tp <= max(GPUS, 2)]


@pytest.fixture(scope="module")
def on_one() -> Iterator[list[RequestOutput]]:
    with LLM("demo", attention="triton", max_num_seqs=16, gpu_memory_utilization=0.3) as llm:
        yield llm.generate(PROMPTS, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("tp", SIZES)
def test_the_demo_says_the_same_on_several(tp: int, eager: bool, on_one: list[RequestOutput]) -> None:
    with LLM("demo", attention="triton", tp=tp, enforce_eager=eager, max_num_seqs=16) as llm:
        about = llm.engine.describe()
        assert about["ranks"] == tp and about["cuda_graphs"] is not eager
        for _ in range(2):
            for ours, reference in zip(llm.generate(PROMPTS, GREEDY, use_tqdm=False), on_one, strict=True):
                assert_close(ours, reference)


def test_graphs_change_no_token_in_float32() -> None:
    params = [SamplingParams(temperature=t, seed=i, max_tokens=48) for i, t in enumerate([0, 0, 0.8, 0.8, 1.0, 0.5])]
    texts = []
    for eager in (True, False):
        with LLM("demo", attention="triton", tp=2, dtype="float32", enforce_eager=eager, max_num_seqs=11) as llm:
            texts.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("tp", SIZES)
def test_dummy_qwen3_says_the_same_on_several(tp: int) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(10000) for _ in range(rng.randint(5, 300))] for _ in range(8)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=5)
    options = {"load_format": "dummy", "max_num_seqs": 16, "max_model_len": 1024, "gpu_memory_utilization": 0.3}
    said = []
    for size in (1, tp):
        with LLM("qwen3", attention="triton", tp=size, **options) as llm:
            said.append(llm.generate(prompts, params, use_tqdm=False))
    for ours, reference in zip(said[1], said[0], strict=True):
        assert_close(ours, reference)


def test_500_random_requests_with_aborts_end_and_leak_nothing() -> None:
    rng = random.Random(0)
    prefix = [rng.randrange(1000) for _ in range(70)]
    blocks = 180
    overrides = ["scheduler.max_num_batched_tokens=512"]
    with LLM("demo", tp=2, max_num_seqs=48, num_gpu_blocks_override=blocks, overrides=overrides) as llm:
        engine, done, aborted = llm.engine, set(), set()
        for i in range(500):
            prompt = (prefix[: rng.choice([16, 40, 70])] if i % 2 else []) + [
                rng.randrange(1000) for _ in range(1 + i % 60)
            ]
            params = SamplingParams(
                temperature=rng.choice([0, 0.7]), seed=i, max_tokens=rng.randint(1, 60), ignore_eos=True,
                top_k=rng.choice([0, 0, 20]), top_p=rng.choice([1.0, 0.9]), logprobs=rng.choice([None, None, 3]),
            )  # fmt: skip
            engine.add_request(str(i), prompt, params)
        while engine.has_unfinished_requests():
            done |= {int(o.request_id) for o in engine.step() if o.finished}
            if rng.random() < 0.1 and (victim := rng.randrange(500)) not in done:
                engine.abort(str(victim))
                aborted.add(victim)
        engine.scheduler.check()
        assert engine.stats.preemptions > 0 and engine.stats.cached_tokens > 0
        assert engine.scheduler.blocks.num_free == blocks
        assert done | aborted == set(range(500))


def free() -> list[int]:
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]


def test_a_killed_rank_leaves_no_memory_and_a_new_engine_starts() -> None:
    before = free()
    llm = LLM("demo", tp=2, max_num_seqs=8, gpu_memory_utilization=0.5)
    llm.engine.add_request("a", "Once upon a time", SamplingParams(max_tokens=1500, ignore_eos=True))
    for _ in range(5):
        llm.engine.step()
    assert min(b - f for b, f in zip(before, free(), strict=True)) > 1 << 30
    os.kill(llm.engine.executor._ranks.ranks[1].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1"):
        while True:
            llm.engine.step()
    assert time.monotonic() - began < 5
    after = free()
    assert max(b - a for b, a in zip(before, after, strict=True)) < 64 << 20, (before, after)
    with LLM("demo", tp=2, max_num_seqs=8, gpu_memory_utilization=0.5) as new:
        assert new.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_a_stopped_rank_is_named_within_ten_seconds() -> None:
    llm = LLM("demo", tp=2, max_num_seqs=8, gpu_memory_utilization=0.5)
    llm.engine.add_request("a", "Once upon a time", SamplingParams(max_tokens=1500, ignore_eos=True))
    llm.engine.step()
    os.kill(llm.engine.executor._ranks.ranks[1].process.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 1 .* has not answered"):
        while True:
            llm.engine.step()
    assert time.monotonic() - began < 10
