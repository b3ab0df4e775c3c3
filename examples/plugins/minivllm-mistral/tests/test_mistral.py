"""Tokens equal transformers' with and without a window, with contexts several times as long as the window."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.errors import CheckpointError, ConfigError
from minivllm.plugins import default_registry
from minivllm.testing import ModelConformance
from minivllm.testing.checkpoints import random_checkpoint, reference_tokens

PROMPTS = [list(range(5, 30)), [7], list(range(100, 160))]


class TestWithoutWindow(ModelConformance):
    """As Mistral-7B-v0.3."""

    architecture = "MistralForCausalLM"
    config = {"sliding_window": None, "head_dim": 32}


class TestWindow(ModelConformance):
    """As Mistral-7B-v0.1, but with a window shorter than most prompts and most prefix hits."""

    architecture = "MistralForCausalLM"
    config = {"sliding_window": 8, "num_hidden_layers": 3, "head_dim": 32}
    prompt_lengths = (1, 7, 8, 9, 40, 65)


class TestWindowOfTwoTokens(ModelConformance):
    architecture = "MistralForCausalLM"
    config = {"sliding_window": 2, "head_dim": 32}
    prompt_lengths = (1, 2, 20)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import MistralForCausalLM

    folder = tmp_path_factory.mktemp("windowed")
    return random_checkpoint(folder, MistralForCausalLM, {"sliding_window": 8, "head_dim": 64})


def without_window(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    return to


def say(folder: Path, **options: str) -> list[list[int]]:
    settings = ["cache.num_blocks=64", "scheduler.max_num_seqs=8", "max_model_len=128"]
    with LLM(str(folder), overrides=settings, **options) as llm:  # type: ignore[arg-type]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_the_window_matters(windowed: Path, tmp_path: Path) -> None:
    """Else the suites above would pass without one."""
    whole = say(without_window(windowed, tmp_path / "whole"), device="cpu")
    assert [a == b for a, b in zip(whole, say(windowed, device="cpu"), strict=True)] == [False, True, False]


def test_the_triton_backend_has_the_window(windowed: Path) -> None:
    """On a CPU in Triton's interpreter, which conftest.py chooses."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter must be chosen before Triton is imported; test_backends_on_a_gpu covers it")
    pytest.importorskip("triton")
    assert say(windowed, device="cpu", attention="triton") == [reference_tokens(windowed, p, 6) for p in PROMPTS]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
@pytest.mark.parametrize("attention", ["torch", "triton", "flash", "flashinfer"])
def test_backends_on_a_gpu(windowed: Path, tmp_path: Path, attention: str) -> None:
    """In bfloat16, which rounds: most tokens are those of float32, and few are without the window."""
    try:
        said = say(windowed, attention=attention, dtype="bfloat16")
    except ConfigError as refused:
        pytest.skip(str(refused))
    wrong = say(without_window(windowed, tmp_path / "whole"), attention=attention, dtype="bfloat16")
    right = [reference_tokens(windowed, p, 6) for p in PROMPTS]

    def agreement(answers: list[list[int]]) -> int:
        return sum(a == b for one, other in zip(answers, right, strict=True) for a, b in zip(one, other, strict=True))

    assert agreement(said) > 12 > agreement(wrong)


def test_a_config_that_leaves_the_window_open_is_refused(windowed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(windowed, tmp_path / "open")
    config = json.loads((folder / "config.json").read_text())
    del config["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no sliding_window"):
        LLM(str(folder), device="cpu")


@pytest.mark.parametrize(("name", "window"), [("mistral-7b", None), ("mistral-7b-v0.1", 4096), ("mistral", 4096)])
def test_options_carry_their_shape(name: str, window: int | None) -> None:
    shape = default_registry().config_options("model")[name].option.node["hf_config"]
    assert shape["sliding_window"] == window
    assert shape["hidden_size"] // shape["num_attention_heads"] == 128
    assert shape["num_attention_heads"] == 4 * shape["num_key_value_heads"]


@pytest.mark.slow
def test_the_command_of_the_readme(tmp_path: Path) -> None:
    """From another folder, with no tokenizer and no network; it leaves nothing behind."""
    command = "-m minivllm model=mistral load_format=dummy device=cpu max_tokens=4 ignore_eos=true"
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "12 tokens" in done.stdout
    assert not list(tmp_path.iterdir())
