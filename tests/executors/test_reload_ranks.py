"""Other weights on several ranks: all have them when the call returns, or one error says which rank failed, and how."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from faults import FAULTY_LOADER
from helpers import edit_json, save_adapter
from zygote import Zygote

from minivllm import LLM, SamplingParams
from minivllm.errors import CheckpointError, EngineDeadError, RequestError
from minivllm.plugins.manager import default_registry

Checkpoints = Callable[..., Path]
FakePlugin = Callable[..., Path]
PROMPTS = [[1, 5, 300], list(range(40, 80))]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def say(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def make(folder: Path, *overrides: str, tp: int = 2) -> LLM:
    return LLM(str(folder), device="cpu", tp=tp, overrides=list(overrides), num_gpu_blocks_override=64)


def pids_of(llm: LLM) -> list[int]:
    return [rank.process.pid for rank in llm.engine.executor._ranks.ranks]  # type: ignore[attr-defined]


def alone(folder: Path, *overrides: str) -> list[list[int]]:
    with make(folder, *overrides, tp=1) as llm:
        return say(llm)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_two_ranks_say_what_one_new_engine_says(
    quantization: str, tiny_checkpoint: Checkpoints, forked_ranks: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", seed=1, shards=3)
    kept = f"quantization={quantization}"
    with make(old, kept) as llm:
        first, pids = say(llm), pids_of(llm)
        for folder in (new, old, new):
            llm.reload_weights(folder)
            with make(folder, kept) as fresh:
                assert say(llm) == say(fresh)
        assert say(llm) != first
        monkeypatch.chdir(new.parent)  # where the ranks are not
        llm.reload_weights()
        assert say(llm) == first
        llm.reload_weights(new.name)
        assert say(llm) != first and pids_of(llm) == pids
        with pytest.raises(RequestError, match=r"executor=multiproc: .* save the weights as .* weights_path=DIR"):
            llm.reload_weights(weights_iterator=[("a", torch.ones(1))])
        with pytest.raises(CheckpointError, match="does not exist"):
            llm.reload_weights("nowhere")
        assert say(llm) != first
    if quantization == "none":
        assert alone(new) != first == alone(old)


def test_two_ranks_merge_an_adapter_as_one_does(
    tiny_checkpoint: Checkpoints, forked_ranks: Zygote, tmp_path: Path
) -> None:
    """Of parts of stacked weights, cut along either dimension; and again what is in its folder when they reload."""
    folder, key = tiny_checkpoint("qwen3"), f"model.lora={tmp_path / 'adapter'}"
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    save_adapter(tmp_path / "adapter", folder, modules)
    with make(folder, key) as llm:
        first = say(llm)
        assert first == alone(folder, key) != alone(folder)
        save_adapter(tmp_path / "adapter", folder, modules, seed=1)
        llm.reload_weights()
        assert say(llm) == alone(folder, key) != first
        llm.reload_weights(folder)
        assert say(llm) == alone(folder)
        edit_json(tmp_path / "adapter/adapter_config.json", r=5)
        with pytest.raises(CheckpointError, match=r"28 misshapen: .*lora_A.weight \[4, 64\] where .* rank 5"):
            llm.reload_weights()
        assert say(llm) == alone(folder)
    with pytest.raises(CheckpointError, match="28 misshapen"):
        make(folder, key)


# --------------------------------------------------------------------------- ranks that fail


@pytest.fixture
def folder(tiny_checkpoint: Checkpoints, fake_plugin: FakePlugin, tmp_path: Path) -> Iterator[Path]:
    """A checkpoint whose model loads as its options say when it loads again."""
    fake_plugin("minivllm-faulty-loader", FAULTY_LOADER)
    default_registry.cache_clear()
    shutil.copytree(tiny_checkpoint("qwen3"), tmp_path / "faulty")
    edit_json(tmp_path / "faulty/config.json", architectures=["FaultyForCausalLM"])
    yield tmp_path / "faulty"
    default_registry.cache_clear()


@pytest.mark.parametrize(("fault", "message"), [
    ("raise", r"rank 1 failed while loading weights: ArithmeticError: the numbers ran out \(.*at_fault"),
    ("exit", r"rank 1 \(process \d+\) ended with exit code 7 before it was ready"),
    ("stop", r"rank 1 \(process \d+\) has not answered for 6 s \(it is stopped\)"),
    ("hang", r"loading weights made no progress for 3 s \(.*start_timeout\): rank 1 for \d+ s in at_fault"),
])  # fmt: skip
def test_a_rank_that_fails_ends_the_engine(fault: str, message: str, folder: Path, forked_ranks: Zygote) -> None:
    limit = ["+executor.options.start_timeout=3"] if fault == "hang" else []
    with make(folder, f"+model.options.fault={fault}", "executor=multiproc", *limit) as llm:
        first, pids, began = say(llm), pids_of(llm), time.monotonic()
        with pytest.raises(EngineDeadError, match=f"some weights may be old and some new.*{message}"):
            llm.reload_weights()
        assert time.monotonic() - began < 12 and first
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        with pytest.raises(EngineDeadError, match=f"stopped earlier: .*{message}"):
            say(llm)


def test_what_a_rank_finds_wrong_with_the_weights_is_told(tiny_checkpoint: Checkpoints, forked_ranks: Zygote) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_checkpoint("qwen3", seed=2)
    with make(folder, "quantization=fp8") as llm:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.mlp.down_proj.weight"][0, -1] = float("nan")  # rank 1's part
        try:
            shutil.copy(folder / "model.safetensors", folder / "kept")
            save_file(tensors, folder / "model.safetensors")
            with pytest.raises(EngineDeadError, match=r"down_proj\.weight holds what is no finite number") as caught:
                llm.reload_weights()
        finally:
            (folder / "kept").rename(folder / "model.safetensors")
    cause = caught.value.__cause__
    assert isinstance(cause, CheckpointError) and "on rank 1" in "".join(cause.__notes__)


def test_loading_may_take_longer_than_a_step_or_a_start_without_progress(folder: Path, forked_ranks: Zygote) -> None:
    limits = [f"+executor.options.{name}_timeout=2" for name in ("step", "start")]
    with make(folder, "+model.options.fault=slow", "executor=multiproc", *limits) as llm:
        first, began = say(llm), time.monotonic()
        llm.reload_weights()
        assert time.monotonic() - began > 3 and say(llm) == first
        time.sleep(2.5)  # idle: no progress, either
        llm.reload_weights()
        assert say(llm) == first
