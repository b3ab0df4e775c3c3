"""Layers whose products go in one kernel between two attentions: the same comes out, and a layer with anything of its
own in it is left alone. With the reference in the kernel's place; the kernel itself: ``tests/kernels``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PagedRun, attention_spec
from torch import nn
from torch.nn import functional as F

from minivllm.backends.torch import TorchBackend
from minivllm.core.parallel import TensorParallel
from minivllm.kernels.linear.chain_config import ChainShape
from minivllm.kernels.rms_norm import RowScale
from minivllm.layers.attention import Attention
from minivllm.layers.decoder import SelfAttention
from minivllm.layers.fused import chain_shape
from minivllm.layers.linear import MergedColumnParallelLinear
from minivllm.models.checkpoint import read_model_config
from minivllm.models.loader import build_model, iterate_safetensors, norm_pairs
from minivllm.models.qwen3 import Qwen3ForCausalLM

Checkpoints = Callable[..., Path]
PROMPT = list(range(7, 7 + 31 * 9, 31))


class World:
    """A model of one rank on the CPU, its norms folded into the products behind them."""

    def __init__(self, folder: Path, fold: bool = True, biased: bool = False) -> None:
        config = read_model_config(folder)
        self.model: Any = build_model(
            Qwen3ForCausalLM, config, TensorParallel(), "cpu", torch.float32, iterate_safetensors(folder), 256
        )
        self.layers: Any = list(self.model.model.layers)
        self.backend = TorchBackend(attention_spec(config))
        torch.manual_seed(0)
        for layer in self.layers if biased else ():
            qkv = layer.self_attn.qkv_proj
            qkv.bias = nn.Parameter(torch.randn(len(qkv.weight)), requires_grad=False)
        for norm, product in norm_pairs(self.model) if fold else ():
            product.fold(norm)

    def step(self) -> torch.Tensor:
        """Logits behind a prompt (1, vocab), then behind a token more."""
        run = PagedRun(self.model, self.backend, 16, 1)
        return torch.cat([run.step([0], [PROMPT], 0), run.step([0], [[5]], 1)])


@pytest.fixture
def folder(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3", num_hidden_layers=3)


@pytest.fixture(params=[False, True], ids=["rows to be scaled", "rows scaled"])
def chained(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of the kernel, which is for any number of them, and faster."""
    calls: list[int] = []

    def reference(
        heads: torch.Tensor, o: torch.Tensor, x: torch.Tensor, gate_up: torch.Tensor, eps: float, down: torch.Tensor,
        qkv: torch.Tensor, eps_behind: float, bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, RowScale | None]:  # fmt: skip
        calls.append(len(x))
        x += heads @ o.T
        gate, up = (F.rms_norm(x, (x.shape[1],), eps=eps) @ gate_up.T).chunk(2, dim=1)
        x += (F.silu(gate) * up) @ down.T
        if request.param:
            return F.linear(F.rms_norm(x, (x.shape[1],), eps=eps_behind), qkv, bias), None
        return x @ qkv.T, RowScale(x, eps_behind, bias)

    monkeypatch.setattr("minivllm.layers.fused.use_chain", lambda rows, shape, dtype, device: True)
    monkeypatch.setattr("minivllm.layers.fused.chain_linear", reference)
    return calls


@pytest.mark.parametrize("biased", [False, True])
def test_the_same_comes_out_of_layers_that_are_chained(folder: Path, chained: list[int], biased: bool) -> None:
    expected = World(folder, fold=False, biased=biased).step()
    assert not chained, "its norms are not folded"
    torch.testing.assert_close(World(folder, biased=biased).step(), expected)
    assert chained == [9, 9, 1, 1], "between each two layers of three, at each step"


def test_the_shape_is_that_of_the_weights(folder: Path) -> None:
    world = World(folder)
    config = world.model.config
    width = config.num_heads * config.head_dim
    qkv = width + 2 * config.num_kv_heads * config.head_dim
    shape = ChainShape(config.hidden_size, width, config.intermediate_size, qkv)
    assert chain_shape(list(world.layers)) == shape


class OwnGateUp(MergedColumnParallelLinear):
    pass


class OwnAttention(Attention):
    def __call__(self, *args: Any) -> torch.Tensor:
        return super().__call__(*args)


def unfold(world: World) -> None:
    world.layers[1].mlp.gate_up_proj.folded = False


def hook(world: World) -> None:
    world.layers[1].register_forward_hook(lambda module, inputs, output: None)


def activate(world: World) -> None:
    own = world.layers[1].mlp.activation
    world.layers[1].mlp.activation = lambda *args: own(*args)


def replace_product(world: World) -> None:
    world.layers[1].mlp.gate_up_proj.__class__ = OwnGateUp


def replace_attention(world: World) -> None:
    world.layers[1].self_attn.attention.__class__ = OwnAttention


class OwnAdd(SelfAttention):
    def add(self, x: torch.Tensor, heads: torch.Tensor, attention: Any) -> torch.Tensor:
        return x.add_(self.o_proj(heads), alpha=0.3)


def add_less(world: World) -> None:
    world.layers[1].self_attn.__class__ = OwnAdd


def norm_otherwise(world: World) -> None:
    world.layers[1].post_attention_layernorm.register_forward_hook(lambda module, inputs, output: 2 * output)


def project_otherwise(world: World) -> None:
    world.layers[1].self_attn.qkv_proj.register_forward_hook(lambda module, inputs, output: output + 1)


def add_otherwise(world: World) -> None:
    world.layers[1].mlp.down_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def pick_early(world: World) -> None:
    world.layers[1].pick_last_tokens()


OWN = [unfold, hook, activate, replace_product, replace_attention, pick_early]
OWN += [add_less, norm_otherwise, project_otherwise, add_otherwise]


@pytest.mark.parametrize("change", OWN)
def test_one_layer_with_something_of_its_own_leaves_all_as_they_are(
    folder: Path, chained: list[int], change: Callable[[World], None]
) -> None:
    world = World(folder)
    change(world)
    if change is unfold:  # what the weights hold is left as it is: only the answer is asked for
        assert chain_shape([world.layers[1]]) is None and chain_shape([world.layers[0]]) is not None
        return
    if change is not pick_early:  # of a layer that is not the last one nothing sensible comes
        plain = World(folder, fold=False)
        change(plain)
        torch.testing.assert_close(world.step(), plain.step())
    assert not chained and chain_shape(list(world.layers)) is None
