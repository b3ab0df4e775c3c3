"""Ranks and replicas that Ray places on GPUs say what one process says, and give the memory back."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from minivllm import LLM, RequestOutput, SamplingParams

ray = pytest.importorskip("ray")
data = pytest.importorskip("ray.data")
GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")]
PROMPTS = ["Once upon a time", "The engine", "In the morning the fox"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
OPTIONS = {"dtype": "float32", "attention": "triton", "max_num_seqs": 8, "gpu_memory_utilization": 0.3}


@pytest.fixture(scope="module")
def app() -> Iterator[None]:
    ray.init("local", num_gpus=GPUS, include_dashboard=False, log_to_driver=False)
    data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def alone() -> list[RequestOutput]:
    with LLM("demo", **OPTIONS) as llm:
        return llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def free() -> list[int]:
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]


@pytest.mark.parametrize("noset", [False, True], ids=["ray hides GPUs", "all GPUs visible"])
def test_actors_take_a_gpu_each(app: None, alone: list[RequestOutput], noset: bool) -> None:
    from minivllm.executors import ray as executor
    from minivllm.executors.ray_actor import OPTIONS as ACTOR
    from minivllm.executors.ray_actor import RankActor

    before = free()
    with pytest.MonkeyPatch.context() as patch:
        if noset:  # what trainers set, to let their processes see all GPUs
            env = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
            patch.setattr(executor, "RemoteRank", ray.remote(**ACTOR, runtime_env=env)(RankActor))
        with LLM("demo", tp=2, overrides=["executor=ray"], **OPTIONS) as llm:
            assert llm.engine.describe()["cuda_graphs"]
            assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(alone)
            assert min(b - f for b, f in zip(before, free(), strict=True)) > 1 << 30  # on both GPUs
    end = time.monotonic() + 10
    while max(b - f for b, f in zip(before, free(), strict=True)) > 64 << 20:
        assert time.monotonic() < end, (before, free())
        time.sleep(0.2)


@pytest.mark.parametrize("tp,concurrency", [(1, 2), (2, 1)])
def test_replicas_take_tp_gpus_each(app: None, alone: list[RequestOutput], tp: int, concurrency: int) -> None:
    from minivllm.data import map_batches

    dataset = data.from_items([{"prompt": p, "i": i} for i, p in enumerate(PROMPTS)], override_num_blocks=2)
    said = map_batches(
        dataset, "demo", sampling_params=GREEDY, tp=tp, concurrency=concurrency, batch_size=1, **OPTIONS
    ).take_all()
    said.sort(key=lambda row: row["i"])
    assert [list(row["generated_token_ids"]) for row in said] == tokens(alone)
