"""Ranks started from outside say what one process says; ranks that differ are told so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError
from minivllm.executors.torchrun import read_environment

Checkpoints = Callable[..., Path]
ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}

SAME = """
    import json, os, sys
    from minivllm import LLM, SamplingParams
    with LLM(sys.argv[1], device="cpu", tp=2, overrides=["executor=torchrun"]) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
    path = os.path.join(sys.argv[2], os.environ["RANK"])
    open(path, "w").write(json.dumps([o.outputs[0].token_ids for o in outputs]))
"""
DIFFERENT = """
    import os, sys
    from minivllm import LLM, SamplingParams
    from minivllm.errors import EngineDeadError
    rank = int(os.environ["RANK"])
    llm = LLM(sys.argv[1], device="cpu", tp=2, overrides=["executor=torchrun"])
    try:
        llm.generate([[1, 2, 3 + rank]], use_tqdm=False)
    except EngineDeadError as error:
        open(os.path.join(sys.argv[2], str(rank)), "w").write(str(error))
    llm.shutdown()
"""


def torchrun(folder: Path, tmp_path: Path, script: str) -> list[str]:
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
    return [(tmp_path / str(rank)).read_text() for rank in range(2)]


def test_ranks_of_torchrun_say_the_same_as_one_process(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3")
    said = torchrun(folder, tmp_path, SAME)
    with LLM(str(folder), device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        alone = [o.outputs[0].token_ids for o in llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)]
    assert json.loads(said[0]) == json.loads(said[1]) == alone


def test_ranks_that_make_different_requests_are_told_so(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    said = torchrun(tiny_checkpoint("qwen3"), tmp_path, DIFFERENT)
    for rank, text in enumerate(said):
        assert f"rank {1 - rank} computes another step 0" in text and "the same requests" in text


def test_outside_torchrun_the_message_says_how_to_start(tiny_checkpoint: Checkpoints) -> None:
    with pytest.raises(ConfigError, match=r"RANK, WORLD_SIZE.*torchrun --nproc-per-node 2 script.py"):
        LLM(str(tiny_checkpoint("qwen3")), device="cpu", tp=2, overrides=["executor=torchrun"])


def test_ranks_form_replicas_of_tp() -> None:
    assert read_environment(ENVIRONMENT, 2) == (1, 4)
    with pytest.raises(ConfigError, match="tp=3 does not divide torchrun's 4 ranks"):
        read_environment(ENVIRONMENT, 3)
