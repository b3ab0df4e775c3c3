"""Tokens equal transformers', with biases that are not zero; the options carry the published shapes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from minivllm import LLM, SamplingParams
from minivllm.plugins import default_registry
from minivllm.testing import ModelConformance
from minivllm.testing.checkpoints import random_checkpoint, reference_tokens


class TestTied(ModelConformance):
    """As the small ones."""

    architecture = "Qwen2ForCausalLM"
    config = {"tie_word_embeddings": True}


class TestGroupsOfSeven(ModelConformance):
    """As 0.5B and 7B: seven query heads a key head."""

    architecture = "Qwen2ForCausalLM"
    config = {"hidden_size": 224, "num_attention_heads": 14, "num_key_value_heads": 2}


class TestWindowInTheUpperLayers(ModelConformance):
    architecture = "Qwen2ForCausalLM"
    config = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen2ForCausalLM

    return random_checkpoint(tmp_path_factory.mktemp("qwen2"), Qwen2ForCausalLM, {})


def with_config(folder: Path, to: Path, **changes: object) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


def test_the_biases_matter(checkpoint: Path, tmp_path: Path) -> None:
    """Else the suites above would pass without them."""
    from safetensors.torch import load_file, save_file

    folder = with_config(checkpoint, tmp_path / "unbiased")
    weights = load_file(folder / "model.safetensors")
    assert sum(name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")) for name in weights) == 6
    save_file(
        {name: w.zero_() if name.endswith("_proj.bias") else w for name, w in weights.items()},
        folder / "model.safetensors", metadata={"format": "pt"},
    )  # fmt: skip
    prompt = list(range(5, 30))
    said = []
    for source in (checkpoint, folder):
        with LLM(str(source), device="cpu", overrides=["cache.num_blocks=64", "max_model_len=128"]) as llm:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            said.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
        assert said[-1] == reference_tokens(source, prompt, 8)
    assert said[0] != said[1]


def test_a_window_is_used_only_where_the_config_says_so(checkpoint: Path, tmp_path: Path) -> None:
    """An older config.json may have a window's length, and not whether it is used: then it is not."""
    prompt, said = list(range(5, 60)), []
    for name, keys in (("unsaid", {"use_sliding_window": None}), ("used", {"use_sliding_window": True})):
        folder = with_config(
            checkpoint, tmp_path / name, sliding_window=4, max_window_layers=1, layer_types=None, **keys
        )
        with LLM(str(folder), device="cpu", overrides=["cache.num_blocks=64", "max_model_len=128"]) as llm:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            said.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert said[0] == reference_tokens(checkpoint, prompt, 8) != said[1]


@pytest.mark.parametrize(
    ("name", "repo", "billions"),
    [
        ("qwen2", "Qwen/Qwen2.5-0.5B-Instruct", 0.494),
        ("qwen2-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", 1.544),
        ("qwen2-3b", "Qwen/Qwen2.5-3B-Instruct", 3.086),
        ("qwen2-7b", "Qwen/Qwen2.5-7B-Instruct", 7.616),
        ("qwen2-14b", "Qwen/Qwen2.5-14B-Instruct", 14.770),
        ("qwen2-32b", "Qwen/Qwen2.5-32B-Instruct", 32.764),
        ("qwen2-72b", "Qwen/Qwen2.5-72B-Instruct", 72.706),
    ],
)
def test_options_have_as_many_parameters_as_published(name: str, repo: str, billions: float) -> None:
    model = default_registry().config_options("model")[name].option.node
    shape = model["hf_config"]
    hidden, layers, inner = shape["hidden_size"], shape["num_hidden_layers"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * kv + hidden + 2 * kv
    layer = attention + 3 * hidden * inner + 2 * hidden
    embeddings = shape["vocab_size"] * hidden * (1 if shape["tie_word_embeddings"] else 2)
    assert model["repo"] == repo
    assert (layers * layer + embeddings + hidden) / 1e9 == pytest.approx(billions, abs=1e-3)
