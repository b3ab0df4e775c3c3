"""What the suite for models does not vary: shapes, biases and rope scaling; tokens equal transformers', one for one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import PagedRun, attention_spec, edit_json, reference_model, reference_tokens

from minivllm.backends.torch import TorchBackend
from minivllm.core.interfaces import Model
from minivllm.core.parallel import TensorParallel
from minivllm.models.checkpoint import read_model_config
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.loader import build_model, iterate_safetensors
from minivllm.models.qwen3 import Qwen3ForCausalLM

Checkpoints = Callable[..., Path]
CLASSES: dict[str, type[Model]] = {c.__name__: c for c in (Qwen3ForCausalLM, LlamaForCausalLM)}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}


def load(folder: Path, max_model_len: int = 1024) -> Model:
    config = read_model_config(folder)
    model_class = CLASSES[config.architecture]
    return build_model(
        model_class, config, TensorParallel(), "cpu", torch.float32, iterate_safetensors(folder), max_model_len
    )


def prompts_of(lengths: list[int], vocab: int = 512) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def assert_equals_transformers(folder: Path, lengths: list[int], *, chunk: int = 16) -> None:
    model, prompts, tokens = load(folder), prompts_of(lengths), 12
    config = read_model_config(folder)
    run = PagedRun(model, TorchBackend(attention_spec(config)), max(lengths) + tokens, len(prompts))
    got = run.greedy(prompts, tokens, chunk)
    assert got == [reference_tokens(folder, prompt, tokens) for prompt in prompts]
    assert len({t for out in got for t in out}) > 4  # a model that says one token always would prove little


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_tied_untied_and_gqa_ratios(tiny_checkpoint: Checkpoints, architecture: str, tied: bool, kv_heads: int) -> None:
    folder = tiny_checkpoint(architecture, tie_word_embeddings=tied, num_key_value_heads=kv_heads)
    assert_equals_transformers(folder, [1, 2, 17, 40, 65])


@pytest.mark.parametrize("head_dim", [8, 16, 48])
def test_head_dim_apart_from_hidden_size(tiny_checkpoint: Checkpoints, head_dim: int) -> None:
    assert_equals_transformers(tiny_checkpoint("qwen3", head_dim=head_dim), [5, 20])


@pytest.mark.parametrize(
    "biases", [{"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}]
)
def test_llama_biases(tiny_checkpoint: Checkpoints, biases: dict[str, bool]) -> None:
    assert_equals_transformers(tiny_checkpoint("llama", **biases), [5, 20])


def test_qwen3_attention_bias(tiny_checkpoint: Checkpoints) -> None:
    assert_equals_transformers(tiny_checkpoint("qwen3", attention_bias=True), [5, 20])


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500.0},
        LINEAR,
        LLAMA3,
        YARN,
        YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 512},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
        YARN | {"original_max_position_embeddings": 8},
    ],
    ids=lambda rope: "-".join(map(str, rope.values())),
)
@pytest.mark.parametrize("style", ["new", "old"])
def test_rope_scaling_past_the_original_length(
    tiny_checkpoint: Checkpoints, tmp_path: Path, architecture: str, rope: dict[str, float], style: str
) -> None:
    folder = tiny_checkpoint(architecture, rope_parameters=rope)
    if style == "old":  # as before transformers 5
        old = tmp_path / "old"
        shutil.copytree(folder, old)
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        scaling = None if rope["rope_type"] == "default" else scaling
        edit_json(old / "config.json", "rope_parameters", rope_theta=rope["rope_theta"], rope_scaling=scaling)
        assert read_model_config(old).rope_parameters == read_model_config(folder).rope_parameters
        folder = old
    assert_equals_transformers(folder, [30, 70, 150], chunk=64)


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_with_an_index(tiny_checkpoint: Checkpoints, tied: bool) -> None:
    folder = tiny_checkpoint("qwen3", shards=4, tie_word_embeddings=tied)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert_equals_transformers(folder, [5, 20])


def test_logits_are_close_to_transformers(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("llama", rope_parameters=LLAMA3)
    prompt = prompts_of([100])[0]
    run = PagedRun(load(folder), TorchBackend(attention_spec(read_model_config(folder))), 128, 1)
    got = run.step([0], [prompt], 0)
    with torch.inference_mode():
        want = reference_model(folder)(torch.tensor([prompt])).logits[:, -1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_backend_that_takes_k_and_v_gets_them(tiny_checkpoint: Checkpoints) -> None:
    calls = []

    class Own(TorchBackend):
        def forward(self, q, k, v, layer):  # type: ignore[no-untyped-def]
            calls.append((q.shape[0], k.shape[1:], layer.index))
            return super().forward(q, k, v, layer)

    folder = tiny_checkpoint("qwen3")
    config, prompts = read_model_config(folder), prompts_of([9, 30])
    model = load(folder)
    for backend_class in (TorchBackend, Own, TorchBackend):  # one model, one backend after another
        run = PagedRun(model, backend_class(attention_spec(config)), 64, 2)
        assert run.greedy(prompts, 5, 8) == [reference_tokens(folder, p, 5) for p in prompts]
    assert calls[:2] == [(16, (2, 32), 0), (16, (2, 32), 1)]
