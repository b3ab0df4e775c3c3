"""Ranks on two nodes of a Ray cluster say what one process says; one that is killed ends the engine clearly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import EngineDeadError

ray = pytest.importorskip("ray")
Checkpoints = Callable[..., Path]
OVERRIDES = ["executor=ray"]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
    yield
    ray.shutdown()
    cluster.shutdown()


def test_two_nodes_say_what_one_process_says(two_nodes: None, tiny_checkpoint: Checkpoints) -> None:
    folder = str(tiny_checkpoint("qwen3"))
    prompts = [[1, 2, 3], [4, 5], list(range(100))]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    said = []
    with LLM(folder, device="cpu") as llm:
        said.append(llm.generate(prompts, params, use_tqdm=False))
    with LLM(folder, device="cpu", tp=2, overrides=OVERRIDES) as llm:
        nodes = {
            ray.get(actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()))
            for actor in llm.engine.executor._actors  # type: ignore[attr-defined]
        }
        assert len(nodes) == 2
        said.append(llm.generate(prompts, params, use_tqdm=False))
        llm.engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=500, ignore_eos=True))
        llm.engine.step()
        ray.kill(llm.engine.executor._actors[1])  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match=r"rank 1 .* is gone"):
            while True:
                llm.engine.step()
    tokens = [[o.outputs[0].token_ids for o in outputs] for outputs in said]
    assert tokens[0] == tokens[1]
