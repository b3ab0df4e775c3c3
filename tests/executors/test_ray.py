"""Ranks on two nodes of a Ray cluster say what one process says; however one ends, the engine ends soon and clearly."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_plugins import write_package
from faults import FAULTY, Talker, fault_on

from minivllm import LLM, SamplingParams, assemble
from minivllm.core.batch import Batch
from minivllm.errors import EngineDeadError, RequestError
from minivllm.executors.step_bytes import pack_batch
from minivllm.executors.taking import StepTaker
from minivllm.plugins.manager import default_registry

ray = pytest.importorskip("ray")
from minivllm.executors import ray_health
from minivllm.executors.messages import Failed, decode
from minivllm.executors.ray_actor import RankActor, own_gpu
from minivllm.executors.ray_health import Hearts

Checkpoints = Callable[..., Path]
RAY = ["executor=ray"]  # a start, or a first step, may take long beside other tests
STEPS = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with sampler=faulty, which is on every worker's path."""
    site = tmp_path_factory.mktemp("site")
    write_package(site, "minivllm-faulty", FAULTY)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        default_registry.cache_clear()
        yield site
    default_registry.cache_clear()


@pytest.fixture(scope="module")
def cluster(plugins: Path) -> Iterator[Any]:
    """Two nodes with a CPU each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    path = os.pathsep.join([str(plugins), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": env})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def pids(llm: LLM) -> list[int]:
    return [heart.last.pid for heart in hearts(llm).hearts if heart.last is not None]


def hearts(llm: LLM) -> Hearts:
    return llm.engine.executor._hearts  # type: ignore[attr-defined]


def dies(llm: LLM, within: float) -> str:
    if not llm.engine.has_unfinished_requests():
        llm.engine.add_request("a", [1, 2, 3], STEPS)
    began = time.monotonic()
    with pytest.raises(EngineDeadError) as caught:
        while True:
            llm.engine.step()
    assert time.monotonic() - began < within
    return str(caught.value)


def gone(pid: int, within: float = 5) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_two_nodes_say_what_one_process_says(cluster: Any, tiny_checkpoint: Checkpoints) -> None:
    folder = str(tiny_checkpoint("qwen3"))
    prompts = [[1, 2, 3], [4, 5], list(range(100))]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    said = []
    with LLM(folder, device="cpu") as llm:
        said.append(llm.generate(prompts, params, use_tqdm=False))
    with LLM(folder, device="cpu", tp=2, overrides=RAY) as llm:
        assert llm.engine.describe()["nodes"] == 2
        said.append(llm.generate(prompts, params, use_tqdm=False))
        llm.engine.add_request("a", [1, 2, 3], STEPS)
        llm.engine.step()
        os.kill(pids(llm)[1], signal.SIGKILL)
        assert re.match(r"rank 1 \(a Ray actor\) is gone", dies(llm, 5))
    tokens = [[o.outputs[0].token_ids for o in outputs] for outputs in said]
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_two_nodes_get_other_weights(cluster: Any, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Also after they slept for longer than a start may make no progress; and one whose file is gone."""
    old, new = tiny_checkpoint("qwen3"), tmp_path / "new"
    shutil.copytree(tiny_checkpoint("qwen3", seed=1), new)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def say(llm: LLM) -> Any:
        return [o.outputs[0].token_ids for o in llm.generate([[1, 2, 3], [4, 5]], greedy, use_tqdm=False)]

    with LLM(str(new), device="cpu") as llm:
        expected = say(llm)
    overrides = [*RAY, "+executor.options.start_timeout=20", "enable_sleep_mode=true"]
    with LLM(str(old), device="cpu", tp=2, overrides=overrides) as llm:
        first = say(llm)
        llm.engine.executor._hearts.start_timeout = 1.5  # type: ignore[attr-defined]
        llm.sleep(level=2)
        time.sleep(3)
        llm.wake_up()
        llm.reload_weights(new)
        assert say(llm) == expected != first
        llm.reload_weights()
        assert say(llm) == first
        with pytest.raises(RequestError, match=r"executor=ray: .* save the weights as a checkpoint"):
            llm.reload_weights(weights_iterator=[("a", torch.ones(1))])
        (new / "model.safetensors").unlink()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assemble, "find_weights", lambda *_: new)  # it was there when the driver looked
            with pytest.raises(EngineDeadError, match=r"loading failed: .*has no \.safetensors file") as caught:
                llm.reload_weights(new)
        assert "on rank " in "".join(caught.value.__cause__.__notes__)  # type: ignore[union-attr]
        with pytest.raises(EngineDeadError, match="stopped earlier: some weights"):
            say(llm)


@pytest.mark.slow
def test_a_stopped_actor_is_named_within_ten_seconds(cluster: Any, tiny_checkpoint: Checkpoints) -> None:
    with LLM(str(tiny_checkpoint("qwen3")), device="cpu", tp=2, overrides=RAY) as llm:
        llm.engine.add_request("a", [1, 2, 3], STEPS)
        llm.engine.step()
        zero, one = pids(llm)
        os.kill(one, signal.SIGSTOP)
        assert re.match(r"rank 1 \(a Ray actor\) has not answered for 6 s", dies(llm, 10))
        assert gone(zero) and gone(one)


@pytest.mark.parametrize("fault,rank,message", [
    ("raise", 1, r"^rank 1 failed in step \d+: ArithmeticError: the numbers ran out"),
    ("raise late", 0, r"^rank 0 failed in step \d+: ArithmeticError: the numbers were none"),
    ("hang", 1, r"^a step did not finish in 2 s .*: rank 0 in .*; rank 1 in sample \(site.*/minivllm_faulty.py"),
])  # fmt: skip
@pytest.mark.slow
def test_a_fault_in_a_step(cluster: Any, tiny_checkpoint: Checkpoints, fault: str, rank: int, message: str) -> None:
    limit = ["+executor.options.step_timeout=2"] if fault == "hang" else []
    overrides = [*RAY, *limit, *fault_on(rank, fault)]
    with LLM(str(tiny_checkpoint("qwen3")), device="cpu", tp=2, overrides=overrides) as llm:
        assert re.search(message, dies(llm, 8))


@pytest.mark.slow
def test_a_start_that_stops_or_hangs_is_told_from_one_that_takes_long(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On actors that hold no model."""
    monkeypatch.setattr(ray_health, "SILENT", 1.0)
    talker = ray.remote(num_cpus=0)(Talker)
    loads, moves, waits = (talker.remote(*args) for args in (("load", 99.0), ("join", 0.0), ("wait", 99.0)))

    def until(watched: Hearts, done: Callable[[], bool] = lambda: False) -> str:
        """What is said first."""
        end = time.monotonic() + 60
        while time.monotonic() < end and not done():
            if failures := watched.look():
                return str(failures[0][1])
            time.sleep(0.05)
        return ""

    stuck = until(Hearts([loads, waits], start_timeout=50))
    assert stuck.endswith("rank 0 for 99 s in load; rank 1 for 99 s in wait")
    watched = Hearts([loads, moves], start_timeout=50)
    assert until(watched, lambda: all(heart.last for heart in watched.hearts)) == ""
    os.kill(watched.hearts[1].last.pid, signal.SIGSTOP)  # type: ignore[union-attr]
    assert re.match(r"rank 1 \(a Ray actor\) has not answered for \d+ s \(it is stopped\)", until(watched))


@pytest.mark.slow
def test_a_node_that_is_removed(cluster: Any, tiny_checkpoint: Checkpoints) -> None:
    """The last test of the cluster."""
    with LLM(str(tiny_checkpoint("qwen3")), device="cpu", tp=2, overrides=RAY) as llm:
        llm.engine.add_request("a", [1, 2, 3], STEPS)
        llm.engine.step()
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        assert re.match(r"rank [01] \(a Ray actor\) is gone", dies(llm, 10))


def test_an_actor_takes_no_step_after_one_that_failed() -> None:
    """The driver has rank 0's tokens, perhaps, and has not waited for what this one said."""
    row = np.dtype([("none", "i4")])
    none, one = np.empty(0, dtype=np.int32), np.zeros(1, dtype=np.int32)
    params = np.empty(0, dtype=row)
    step = pack_batch(
        Batch(7, one, one.astype(np.int64), one, one, one > 0, 1, none, none, none, none, none, params)
    )  # fmt: skip
    steps: list[int] = []

    def launch(batch: Batch) -> None:
        steps.append(batch.step)
        if len(steps) == 2:
            raise ArithmeticError("the numbers ran out")

    actor = RankActor(b"", 1, 2)
    runner = SimpleNamespace(sampler=SimpleNamespace(row=row))
    actor.taker = StepTaker(SimpleNamespace(runner=runner, launch=launch))  # type: ignore[arg-type]
    assert actor.launch(step) == b""
    said = [actor.launch(step) for _ in range(3)]
    failed = decode(said[0])
    assert isinstance(failed, Failed) and failed.doing == "in step 7" and said[1] == said[2] == said[0]
    assert len(steps) == 2


def test_the_gpu_that_ray_gave() -> None:
    assert own_gpu("3", ["3"]) == 0  # as Ray sets it
    assert own_gpu("GPU-a,GPU-b", ["GPU-b"]) == 1 and own_gpu("4,6", ["6"]) == 1 and own_gpu(None, [5]) == 5
    assert own_gpu("", []) == 0  # on a CPU
