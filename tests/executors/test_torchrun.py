"""Ranks started from outside say what one process says; ranks that differ are told so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError
from minivllm.executors.torchrun import read_environment

Checkpoints = Callable[..., Path]
ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}

SCRIPT = """
    import json, os, sys
    from minivllm import LLM, SamplingParams
    from minivllm.errors import EngineDeadError
    rank, said = int(os.environ["RANK"]), {}
    with LLM(sys.argv[1], device="cpu", tp=2, overrides=["executor=torchrun"]) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
    said["tokens"] = [o.outputs[0].token_ids for o in outputs]
    llm = LLM(sys.argv[1], device="cpu", tp=2, overrides=["executor=torchrun"])
    try:
        llm.generate([[1, 2, 3 + rank]], use_tqdm=False)
    except EngineDeadError as error:
        said["error"] = str(error)
    llm.shutdown()
    open(os.path.join(sys.argv[2], str(rank)), "w").write(json.dumps(said))
"""


def torchrun(folder: Path, tmp_path: Path, script: str) -> list[dict[str, Any]]:
    """What each rank wrote."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*command, str(file), str(folder), str(tmp_path)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its ranks
        raise
    assert process.returncode == 0, said
    return [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]


def test_ranks_of_torchrun_say_the_same_as_one_process_and_are_told_if_they_differ(
    tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("qwen3")
    said = torchrun(folder, tmp_path, SCRIPT)
    with LLM(str(folder), device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        alone = [o.outputs[0].token_ids for o in llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)]
    assert said[0]["tokens"] == said[1]["tokens"] == alone
    for rank in range(2):
        assert f"rank {1 - rank} computes another step 0" in said[rank]["error"]
        assert "the same requests" in said[rank]["error"]


RELOAD = """
    import json, os, sys
    from pathlib import Path
    from minivllm import LLM, SamplingParams
    from minivllm.errors import EngineDeadError
    from minivllm.models.loader import iterate_safetensors
    old, new = sys.argv[1], Path(sys.argv[2], "new")
    rank, said = int(os.environ["RANK"]), {"tokens": []}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def say():
        outputs = llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
        said["tokens"].append([o.outputs[0].token_ids for o in outputs])

    def weights(last):
        for number, item in enumerate(iterate_safetensors(new)):
            if number == last:
                raise ArithmeticError("no more")
            yield item

    def fails(call):
        try:
            call()
        except EngineDeadError as error:
            return str(error)

    with LLM(old, device="cpu", tp=2, overrides=["executor=torchrun", "enable_sleep_mode=true"]) as llm:
        say()
        llm.sleep(level=2)
        llm.wake_up()
        llm.reload_weights(new)
        say()
        llm.reload_weights()
        say()
        llm.reload_weights(weights_iterator=weights(None))
        say()
        said["failed"] = fails(lambda: llm.reload_weights(weights_iterator=weights(3 if rank else None)))
        said["again"] = fails(say)
    with LLM(old, device="cpu", tp=2, overrides=["executor=torchrun"]) as llm:
        said["apart"] = fails(say if rank else llm.reload_weights)
    open(os.path.join(sys.argv[2], str(rank)), "w").write(json.dumps(said))
"""


def test_ranks_of_torchrun_get_other_weights_together(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    old, new = tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", seed=1)
    (tmp_path / "new").symlink_to(new)
    ranks = torchrun(old, tmp_path, RELOAD)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    alone = []
    for folder in (old, new):
        with LLM(str(folder), device="cpu") as llm:
            outputs = llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
            alone.append([o.outputs[0].token_ids for o in outputs])
    for said in ranks:
        assert said["tokens"] == [*alone, *alone] and alone[0] != alone[1]
        assert "some weights may be old and some new" in said["failed"] and "stopped earlier" in said["again"]
    assert "rank 1 failed to load its weights" in ranks[0]["failed"]
    assert "weights_iterator raised ArithmeticError: no more" in ranks[1]["failed"]
    assert "rank 1 computes a step where this one loads weights" in ranks[0]["apart"]
    assert "rank 0 computes another step 0" in ranks[1]["apart"]


def test_outside_torchrun_the_message_says_how_to_start(tiny_checkpoint: Checkpoints) -> None:
    with pytest.raises(ConfigError, match=r"RANK, WORLD_SIZE.*torchrun --nproc-per-node 2 script.py"):
        LLM(str(tiny_checkpoint("qwen3")), device="cpu", tp=2, overrides=["executor=torchrun"])


def test_ranks_form_replicas_of_tp() -> None:
    assert read_environment(ENVIRONMENT, 2) == (1, 4)
    with pytest.raises(ConfigError, match="tp=3 does not divide torchrun's 4 ranks"):
        read_environment(ENVIRONMENT, 3)


BENCH = """
    import os, sys
    from minivllm.cli import main
    files = {key: os.path.join(sys.argv[2], f"{key}.json") for key in ("profile", "trace")}
    code = main(["bench", f"model.path={sys.argv[1]}", "load_format=dummy", "device=cpu", "tp=2", "executor=torchrun",
        "workload=mixed", "workload.num_requests=3", "workload.input_len=[4,8]", "workload.output_len=[9,9]",
        "profile_steps=2", f"output={sys.argv[2]}/out.jsonl", *(f"{key}={file}" for key, file in files.items())])
    open(os.path.join(sys.argv[2], os.environ["RANK"]), "w").write(str(code))
"""


def test_what_a_bench_writes_is_rank_0s_and_no_device_is_replaced(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    null = os.stat(os.devnull)
    assert torchrun(tiny_checkpoint("qwen3"), tmp_path, BENCH) == [0, 0]
    assert os.stat(os.devnull).st_rdev == null.st_rdev != 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1
    for key in ("profile", "trace"):
        assert json.loads((tmp_path / f"{key}.json").read_text())["traceEvents"]
    assert not list(tmp_path.glob("*.part"))
