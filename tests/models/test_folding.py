"""The norms' weights folded into the products behind them, as on a GPU: the same tokens, whoever loads what again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PagedRun, attention_spec, reference_tokens
from torch import nn

from minivllm.backends.torch import TorchBackend
from minivllm.core.parallel import TensorParallel
from minivllm.layers.attention import Attention
from minivllm.layers.decoder import DecoderLayer
from minivllm.layers.linear import ColumnParallelLinear, QKVParallelLinear, _StackedLinear
from minivllm.layers.norm import RMSNorm
from minivllm.models.checkpoint import read_model_config
from minivllm.models.llama import LlamaForCausalLM, LlamaLayer
from minivllm.models.loader import build_model, iterate_safetensors, norm_pairs
from minivllm.models.qwen3 import Qwen3ForCausalLM

Checkpoints = Callable[..., Path]
CLASSES = {"qwen3": Qwen3ForCausalLM, "llama": LlamaForCausalLM}
PROMPTS = [list(range(7, 7 + 31 * n, 31)) for n in (1, 5, 15)] + [list(range(40, 90)), list(range(300, 340))]


def build(model_class: type[Any], folder: Path, tp: TensorParallel | None = None, weights: Any = None) -> Any:
    config, weights = read_model_config(folder), iterate_safetensors(folder) if weights is None else weights
    return build_model(model_class, config, tp or TensorParallel(), "cpu", torch.float32, weights, 256)


def say(model: nn.Module, folder: Path, backend: type[TorchBackend] = TorchBackend) -> list[list[int]]:
    """In chunks of 24: steps of more than 16 rows, with their norms left out, and at last of fewer."""
    run = PagedRun(model, backend(attention_spec(read_model_config(folder))), 96, len(PROMPTS))  # type: ignore[arg-type]
    return run.greedy(PROMPTS, 8, 24)


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, too."""
    monkeypatch.setattr(_StackedLinear, "foldable", property(_StackedLinear._may_fold))


class OwnWrite(TorchBackend):
    """Is handed q, k and v."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any) -> torch.Tensor:
        return super().forward(q, k, v, layer)


@pytest.mark.usefixtures("folds")
@pytest.mark.parametrize("backend", [TorchBackend, OwnWrite])
@pytest.mark.parametrize("architecture", CLASSES)
def test_tokens_equal_transformers(
    tiny_checkpoint: Checkpoints, architecture: str, backend: type[TorchBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(architecture)
    model, normed = build(CLASSES[architecture], folder), set()
    for layer in model.model.layers:
        assert layer.self_attn.qkv_proj.folded and layer.mlp.gate_up_proj.folded
        assert torch.equal(layer.input_layernorm.weight, torch.ones(64))
        assert torch.equal(layer.post_attention_layernorm.weight, torch.ones(64))
    assert not torch.equal(model.model.norm.weight, torch.ones(64))
    after_norm = _StackedLinear.after_norm
    monkeypatch.setattr(
        _StackedLinear, "after_norm", lambda self, x, norm: normed.add(len(x)) or after_norm(self, x, norm)
    )
    expected = [reference_tokens(folder, prompt, 8) for prompt in PROMPTS]
    assert say(model, folder, backend) == expected
    assert len({token for said in expected for token in said}) > 4
    assert not normed, "a folded product asks for its norm"


class FusedDecode(TorchBackend):
    """Takes decodes before q, k and v are finished, by default not those whose rows are still to be scaled."""

    fused_decode_rows = 64

    def decode_qkv(self, *args: Any) -> torch.Tensor:
        raise AssertionError("it was handed rows that are not scaled")


@pytest.mark.usefixtures("folds")
def test_a_backend_that_fuses_decodes_gets_no_unscaled_rows(tiny_checkpoint: Checkpoints) -> None:
    folder, logits = tiny_checkpoint("qwen3"), []
    model, rows = build(Qwen3ForCausalLM, folder), range(20)
    for backend in (TorchBackend, FusedDecode):
        run = PagedRun(model, backend(attention_spec(read_model_config(folder))), 8, len(rows))
        run.step(rows, [[row, row + 1] for row in rows], 0)
        logits.append(run.step(rows, [[row + 50] for row in rows], len(rows)))
    torch.testing.assert_close(logits[0], logits[1])


class TakesScaledDecodes(FusedDecode):
    def takes_qkv(self, rows: int, scaled: bool, rotary_dim: int) -> bool:
        return True


@pytest.mark.usefixtures("folds")
def test_a_bias_comes_behind_the_scale(tiny_checkpoint: Checkpoints) -> None:
    """Of decodes, too, which no backend gets with a bias that is still to be added."""
    folder, logits = tiny_checkpoint("llama", attention_bias=True), []
    model, rows = build(LlamaForCausalLM, folder), range(20)
    assert all(x.self_attn.qkv_proj.folded and x.mlp.gate_up_proj.folded for x in model.model.layers)
    assert say(model, folder) == [reference_tokens(folder, prompt, 8) for prompt in PROMPTS]
    for backend in (TorchBackend, TakesScaledDecodes):
        run = PagedRun(model, backend(attention_spec(read_model_config(folder))), 8, len(rows))
        run.step(rows, [[row, row + 1] for row in rows], 0)
        logits.append(run.step(rows, [[row + 50] for row in rows], len(rows)))
    torch.testing.assert_close(logits[0], logits[1])


@pytest.mark.usefixtures("folds")
def test_a_bias_of_gate_and_up_keeps_its_norm(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("llama", attention_bias=True, mlp_bias=True)
    model = build(LlamaForCausalLM, folder)
    assert all(x.self_attn.qkv_proj.folded and not x.mlp.gate_up_proj.folded for x in model.model.layers)
    assert say(model, folder) == [reference_tokens(folder, prompt, 8) for prompt in PROMPTS]


@pytest.mark.usefixtures("folds")
def test_weights_loaded_again_are_folded_again(tiny_checkpoint: Checkpoints) -> None:
    first, second = tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", seed=1)
    model = build(Qwen3ForCausalLM, first)
    for folder in (second, first, first):
        model.load_weights(iterate_safetensors(folder))
        fresh = build(Qwen3ForCausalLM, folder).state_dict()
        assert all(torch.equal(fresh[name], value) for name, value in model.state_dict().items())


@pytest.mark.usefixtures("folds")
def test_dummy_norms_are_ones_and_change_nothing(tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("qwen3")
    folded = build(Qwen3ForCausalLM, folder, weights=3)
    assert folded.model.layers[0].mlp.gate_up_proj.folded
    monkeypatch.undo()
    plain = build(Qwen3ForCausalLM, folder, weights=3)
    assert not plain.model.layers[0].mlp.gate_up_proj.folded
    assert all(torch.equal(value, folded.state_dict()[name]) for name, value in plain.state_dict().items())


@pytest.mark.usefixtures("folds")
def test_each_rank_folds_its_slice(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("qwen3")
    whole, *ranks = (build(Qwen3ForCausalLM, folder, tp) for tp in (None, TensorParallel(0, 2), TensorParallel(1, 2)))
    for i, layer in enumerate(whole.model.layers):
        parts = [rank.model.layers[i].mlp.gate_up_proj.weight.chunk(2) for rank in ranks]
        assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat([p[0] for p in parts] + [p[1] for p in parts]))


class NormsTwice(LlamaLayer):
    """Attention and MLP side by side, behind one norm."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: Any) -> torch.Tensor:
        y = self.mlp(x.clone(), self.input_layernorm)
        return self.self_attn(x.clone(), self.input_layernorm, positions, attention) + y - x


class PlusOne(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class OtherNorm(LlamaLayer):
    """A norm that is not what its weight says."""

    def __init__(self, config: Any, *args: Any) -> None:
        super().__init__(config, *args)
        self.input_layernorm = PlusOne(config.hidden_size, config.rms_norm_eps)


class Gate(Attention):
    def of_stream(self, x: torch.Tensor, norm: RMSNorm, *args: Any) -> torch.Tensor:
        return super().of_stream(x, norm, *args) * norm(x).mean()


class OtherOfStream(LlamaLayer):
    """Attention that reads the norm twice."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.self_attn.attention.__class__ = Gate


class Clipped(Attention):
    def __call__(self, qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().__call__(qkv.clamp(-1, 1), *rest)


class OtherCall(LlamaLayer):
    """Attention that reads rows before anybody scales them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.self_attn.attention.__class__ = Clipped


class OtherMLP(LlamaLayer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.mlp = type("Sparse", (nn.Module,), {})()


@pytest.mark.parametrize(
    ("own", "pairs"),
    [(LlamaLayer, 2), (NormsTwice, 0), (OtherMLP, 1), (OtherNorm, 1), (OtherOfStream, 1), (OtherCall, 1)],
)
def test_a_layer_of_ones_own_is_left_alone(tiny_checkpoint: Checkpoints, own: type[DecoderLayer], pairs: int) -> None:
    class Mine(LlamaForCausalLM):
        layer = own

    config = read_model_config(tiny_checkpoint("llama"))
    with torch.device("meta"):
        model = Mine(config, TensorParallel())
    found = list(norm_pairs(model))
    assert len(found) == 2 * pairs
    assert all(isinstance(norm, RMSNorm) for norm, _ in found)


def test_shared_weights_are_left_alone(tiny_checkpoint: Checkpoints) -> None:
    config = read_model_config(tiny_checkpoint("llama"))
    with torch.device("meta"):
        model = LlamaForCausalLM(config, TensorParallel())
    first, second = model.model.layers
    second.mlp.gate_up_proj.weight = first.mlp.gate_up_proj.weight
    assert [product for _, product in norm_pairs(model)] == [first.self_attn.qkv_proj, second.self_attn.qkv_proj]
    model.model.layers[1] = first
    assert not list(norm_pairs(model))


@pytest.mark.parametrize(
    ("size", "dtype", "bias", "device", "foldable"),
    [
        (64, torch.bfloat16, False, "cuda", True),
        (5120, torch.bfloat16, False, "cuda", True),
        (64, torch.float32, False, "cuda", True),
        (64, torch.float16, False, "cuda", False),
        (64, torch.bfloat16, True, "cuda", False),
        (64, torch.bfloat16, False, "cpu", False),
    ],
)
def test_where_it_is_sound_and_pays(size: int, dtype: torch.dtype, bias: bool, device: str, foldable: bool) -> None:
    with torch.device("meta"):
        product = ColumnParallelLinear(size, 8, TensorParallel(), bias=bias).to(dtype)
    weight = type("Weight", (), {"is_cuda": device == "cuda", "dtype": dtype, "shape": product.weight.shape})()
    product.__dict__["weight"] = weight  # there need not be a GPU here
    assert product.foldable is foldable


def test_a_projection_of_heads_folds_with_a_bias() -> None:
    with torch.device("meta"):
        product = QKVParallelLinear(64, 2, 1, 16, TensorParallel(), bias=True).bfloat16()
    product.__dict__["weight"] = type("Weight", (), {"is_cuda": True, "dtype": torch.bfloat16})()
    assert product.foldable
