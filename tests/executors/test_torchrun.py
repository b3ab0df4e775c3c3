"""Ranks started from outside say what one process says; ranks that differ are told so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import save_adapter

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.errors import ConfigError
from minivllm.executors.torchrun import read_environment

Checkpoints = Callable[..., Path]
ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}

# One script, as to start two ranks takes longer than all that they do then: HEAD, BENCH, TOKENS, RELOAD.
HEAD = """
    import json, os, sys
    from pathlib import Path
    from minivllm import LLM, LoRARequest, SamplingParams
    from minivllm.cli import main
    from minivllm.errors import EngineDeadError
    from minivllm.models.loader import iterate_safetensors
    old, new, folder, rank = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(os.environ["RANK"])

    def write(name, what):
        Path(folder, f"{name}.{rank}").write_text(json.dumps(what))
"""

TOKENS = """
    said = {}
    drafts = {"model": (old, new)[rank], "num_speculative_tokens": 2}  # all take those of the first
    with LLM(
        old, device="cpu", tp=2, enable_lora=True, overrides=["executor=torchrun"], speculative_config=drafts
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        adapters = [None, None, LoRARequest("a", 1, folder + "/adapter")]
        outputs = llm.generate([[1, 2, 3], [4, 5], [4, 5]], params, use_tqdm=False, lora_request=adapters)
        said["drafts"] = llm.engine.stats.draft_tokens, llm.engine.stats.accepted_tokens
    said["tokens"] = [o.outputs[0].token_ids for o in outputs]
    llm = LLM(old, device="cpu", tp=2, overrides=["executor=torchrun"])
    try:
        llm.generate([[1, 2, 3 + rank]], use_tqdm=False)
    except EngineDeadError as error:
        said["error"] = str(error)
    llm.shutdown()
    write("tokens", said)
"""


@dataclass
class Ranks:
    """Two of torchrun, which have run the script."""

    folder: Path
    null: int  # the device that os.devnull was before

    def wrote(self, name: str) -> list[Any]:
        return [json.loads((self.folder / f"{name}.{rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def ranks(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    ran = Ranks(tmp_path_factory.mktemp("torchrun"), os.stat(os.devnull).st_rdev)
    save_adapter(ran.folder / "adapter", tiny_checkpoint("qwen3"), ["q_proj", "o_proj", "up_proj", "down_proj"])
    file = ran.folder / "script.py"
    file.write_text("".join(map(textwrap.dedent, (HEAD, BENCH, TOKENS, RELOAD))))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    given = [tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", seed=1), ran.folder]
    process = subprocess.Popen(
        [*command, *map(str, given)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its ranks
        raise
    assert process.returncode == 0, said
    return ran


def test_ranks_of_torchrun_say_the_same_as_one_process_and_are_told_if_they_differ(
    ranks: Ranks, tiny_checkpoint: Checkpoints
) -> None:
    said = ranks.wrote("tokens")
    with LLM(str(tiny_checkpoint("qwen3")), device="cpu", enable_lora=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        prompts, adapter = [[1, 2, 3], [4, 5], [4, 5]], LoRARequest("a", 1, str(ranks.folder / "adapter"))
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=[None, None, adapter])
    alone = [output.outputs[0].token_ids for output in outputs]
    assert said[0]["tokens"] == said[1]["tokens"] == alone and alone[1] != alone[2]
    assert said[0]["drafts"] == said[1]["drafts"] and said[0]["drafts"][1] > 3
    for rank in range(2):
        assert f"rank {1 - rank} computes another step 0" in said[rank]["error"]
        assert "the same requests" in said[rank]["error"]


RELOAD = """
    said = {"tokens": []}
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
    write("reload", said)
"""


def test_ranks_of_torchrun_get_other_weights_together(ranks: Ranks, tiny_checkpoint: Checkpoints) -> None:
    old, new = tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", seed=1)
    both = ranks.wrote("reload")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    alone = []
    for folder in (old, new):
        with LLM(str(folder), device="cpu") as llm:
            outputs = llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
            alone.append([o.outputs[0].token_ids for o in outputs])
    for said in both:
        assert said["tokens"] == [*alone, *alone] and alone[0] != alone[1]
        assert "some weights may be old and some new" in said["failed"] and "stopped earlier" in said["again"]
    assert "rank 1 failed to load its weights" in both[0]["failed"]
    assert "weights_iterator raised ArithmeticError: no more" in both[1]["failed"]
    assert "rank 1 computes a step where this one loads weights" in both[0]["apart"]
    assert "rank 0 computes another step 0" in both[1]["apart"]


def test_outside_torchrun_the_message_says_how_to_start(tiny_checkpoint: Checkpoints) -> None:
    with pytest.raises(ConfigError, match=r"RANK, WORLD_SIZE.*torchrun --nproc-per-node 2 script.py"):
        LLM(str(tiny_checkpoint("qwen3")), device="cpu", tp=2, overrides=["executor=torchrun"])


def test_ranks_form_replicas_of_tp() -> None:
    assert read_environment(ENVIRONMENT, 2) == (1, 4)
    with pytest.raises(ConfigError, match="tp=3 does not divide torchrun's 4 ranks"):
        read_environment(ENVIRONMENT, 3)


BENCH = """
    files = {key: os.path.join(folder, f"{key}.json") for key in ("profile", "trace")}
    code = main(["bench", f"model.path={old}", "load_format=dummy", "device=cpu", "tp=2", "executor=torchrun",
        "workload=mixed", "workload.num_requests=3", "workload.input_len=[4,8]", "workload.output_len=[9,9]",
        "profile_steps=2", f"output={folder}/out.jsonl", *(f"{key}={file}" for key, file in files.items())])
    write("bench", code)
"""


def test_what_a_bench_writes_is_rank_0s_and_no_device_is_replaced(ranks: Ranks) -> None:
    assert ranks.wrote("bench") == [0, 0]
    assert os.stat(os.devnull).st_rdev == ranks.null != 0
    assert len((ranks.folder / "out.jsonl").read_text().splitlines()) == 1
    for key in ("profile", "trace"):
        assert json.loads((ranks.folder / f"{key}.json").read_text())["traceEvents"]
    assert not list(ranks.folder.glob("*.part"))
