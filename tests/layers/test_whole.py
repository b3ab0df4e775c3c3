"""Decode steps whose layers go in one kernel: the same comes out, and a layer or a backend with
anything of its own is left alone. With the reference in the kernel's place; the kernel itself: ``tests/kernels``."""

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
from minivllm.core.interfaces import AttentionBackend
from minivllm.core.parallel import TensorParallel
from minivllm.kernels.megakernel.megakernel import MAX_MEGAKERNEL_ROWS, DecoderShape, Routing, megakernel_reference
from minivllm.layers.attention import Attention
from minivllm.layers.experts import RoutedExperts
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryTable
from minivllm.models.checkpoint import read_model_config
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.loader import build_model, iterate_safetensors, norm_pairs
from minivllm.models.qwen3 import Qwen3ForCausalLM

Checkpoints = Callable[..., Path]
Calls = list[tuple[DecoderShape, int]]
MODELS = {"qwen3": Qwen3ForCausalLM, "llama": LlamaForCausalLM}


class World:
    """A model of one rank on the CPU, its norms folded into the products behind them, and a plain backend."""

    def __init__(
        self, folder: Path, model: str = "qwen3", block_size: int = 16, biased: bool = False, quantization: str = "none"
    ) -> None:
        self.config = read_model_config(folder)
        weights = iterate_safetensors(folder)
        self.model: Any = build_model(
            MODELS[model], self.config, TensorParallel(), "cpu", torch.float32, weights, 256, quantization
        )
        self.layers: Any = list(self.model.model.layers)
        self.backend: AttentionBackend = TorchBackend(attention_spec(self.config, block_size=block_size))
        self.backend.plain_decode = True
        torch.manual_seed(0)
        for layer in self.layers if biased else ():
            qkv = layer.self_attn.qkv_proj
            qkv.bias = nn.Parameter(torch.randn(len(qkv.weight)), requires_grad=False)
        for norm, product in norm_pairs(self.model) if quantization == "none" else ():
            product.fold(norm)

    def steps(self) -> torch.Tensor:
        """Logits behind two prompts, behind a token more of both, and behind three of the first alone."""
        run = PagedRun(self.model, self.backend, 48, 2)
        prompts = [[(7 + 31 * i) % 250 for i in range(n)] for n in (29, 18)]
        logits = [run.step([0, 1], prompts, 0), run.step([0, 1], [[5], [6]], 2)]
        return torch.cat(logits + [run.step([0], [[token]], 1) for token in (8, 9, 3)])


@pytest.fixture
def folder(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3", num_hidden_layers=3)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The shape and the rows of each call of the kernel, which runs here."""
    calls: Calls = []

    def reference(*args: Any) -> torch.Tensor:
        calls.append((args[1].shape, len(args[0])))
        return megakernel_reference(*args)

    monkeypatch.setattr("minivllm.layers.whole.use_megakernel", lambda *args: True)
    monkeypatch.setattr("minivllm.layers.whole.megakernel", reference)
    return calls


@pytest.mark.parametrize(("model", "biased"), [*((model, False) for model in MODELS), ("llama", True)])
def test_the_same_comes_out(
    tiny_checkpoint: Checkpoints, whole: Calls, monkeypatch: pytest.MonkeyPatch, model: str, biased: bool
) -> None:
    folder = tiny_checkpoint(model, num_hidden_layers=3)
    world = World(folder, model, biased=biased)
    got, calls, c = world.steps(), list(whole), world.config
    shape = DecoderShape(c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim, biased=biased)
    assert calls == [(shape, rows) for rows in (2, 1, 1, 1)], "decodes, not the prompts"
    monkeypatch.setattr("minivllm.layers.whole.use_megakernel", lambda *args: False)
    torch.testing.assert_close(got, World(folder, model, biased=biased).steps())
    assert len(whole) == 4


@pytest.mark.parametrize("biased", [False, True])
def test_the_same_comes_out_of_weights_in_float8(
    folder: Path, whole: Calls, monkeypatch: pytest.MonkeyPatch, biased: bool
) -> None:
    world = World(folder, biased=biased, quantization="fp8")
    got, calls = world.steps(), list(whole)
    assert [(shape.float8, shape.biased, rows) for shape, rows in calls] == [(True, biased, n) for n in (2, 1, 1, 1)]
    monkeypatch.setattr("minivllm.layers.whole.use_megakernel", lambda *args: False)
    expected = World(folder, biased=biased, quantization="fp8").steps()
    assert len(whole) == 4
    assert (got - expected).norm() < 0.02 * expected.norm(), "but for what is rounded otherwise to float8"


def some_in_float8(world: World) -> None:
    del world.layers[1].mlp.down_proj.weight_scale
    world.layers[1].mlp.down_proj.weight.data = world.layers[1].mlp.down_proj.weight.data.float()


def test_a_layer_of_which_some_is_in_float8_is_left_alone(
    folder: Path, whole: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_left_alone(lambda its: World(its, quantization="fp8"), folder, whole, monkeypatch, some_in_float8)


def check_left_alone(
    make: Callable[[Path], World],
    folder: Path,
    whole: Calls,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[World], None],
) -> None:
    world, apart = make(folder), make(folder)
    change(world)
    change(apart)
    got = world.steps()
    assert not whole
    monkeypatch.setattr("minivllm.layers.whole.use_megakernel", lambda *args: False)
    torch.testing.assert_close(got, apart.steps())


class Experts(nn.Module):
    """Three experts of four, of random weights; what it says of itself is all that the kernel needs."""

    def __init__(self, hidden: int, inner: int, renormalize: bool) -> None:
        super().__init__()
        sizes = (4, hidden), (4, 2 * inner, hidden), (4, hidden, inner)
        self.weights = [torch.randn(size) / size[-1] ** 0.5 for size in sizes]
        self.renormalize, self.told = renormalize, True

    def routed_experts(self) -> RoutedExperts | None:
        return RoutedExperts(*self.weights, 3, self.renormalize) if self.told else None

    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        router, gate_up, down = self.weights
        h = norm(x)
        shares, chosen = (h @ router.T).softmax(dim=1).topk(3)
        if self.renormalize:
            shares = shares / shares.sum(dim=1, keepdim=True)
        gate, up = torch.einsum("th,tcih->tci", h, gate_up.float()[chosen]).chunk(2, dim=2)
        return x.add_(torch.einsum("tc,tchi,tci->th", shares, down[chosen], F.silu(gate) * up))


class OtherExperts(Experts):
    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        return super().forward(x, norm).mul_(1.01)


def routed_world(folder: Path, kind: type[Experts] = Experts, renormalize: bool = True) -> World:
    torch.manual_seed(0)
    world = World(folder)
    for layer in world.layers:
        layer.mlp = kind(world.config.hidden_size, 24, renormalize)
        norm = layer.post_attention_layernorm  # was folded into what stood here
        norm.weight.data.copy_(torch.linspace(0.5, 2, world.config.hidden_size))
    return world


@pytest.mark.parametrize("renormalize", [True, False])
def test_layers_of_experts_say_the_same(
    folder: Path, whole: Calls, monkeypatch: pytest.MonkeyPatch, renormalize: bool
) -> None:
    world = routed_world(folder, renormalize=renormalize)
    got, c = world.steps(), world.config
    shape = DecoderShape(c.hidden_size, 24, c.num_heads, c.num_kv_heads, c.head_dim, Routing(4, 3, renormalize))
    assert whole == [(shape, rows) for rows in (2, 1, 1, 1)]
    monkeypatch.setattr("minivllm.layers.whole.use_megakernel", lambda *args: False)
    torch.testing.assert_close(got, routed_world(folder, renormalize=renormalize).steps())


def test_steps_of_many_tokens_do_not_ask_for_experts(folder: Path, whole: Calls) -> None:
    world = routed_world(folder)
    for layer in world.layers:
        layer.mlp.routed_experts = None  # cannot be called
    run = PagedRun(world.model, world.backend, 48, 2)
    run.step([0, 1], [[7] * (MAX_MEGAKERNEL_ROWS - 1), [3, 4]], 0)
    with pytest.raises(TypeError, match="not callable"):
        run.step([0, 1], [[5], [6]], 2)
    assert not whole


def silent(world: World) -> None:
    world.layers[1].mlp.told = False


def other_share(world: World) -> None:
    world.layers[1].mlp.renormalize = False


def experts_in_float8(world: World) -> None:
    weights = world.layers[1].mlp.weights
    weights[1] = weights[1].to(torch.float8_e4m3fn)


def hook_of_experts(world: World) -> None:
    world.layers[1].mlp.register_forward_hook(lambda module, inputs, output: None)


def own_forward(world: World) -> None:
    for layer in world.layers:
        layer.mlp.__class__ = OtherExperts


def unfolded(world: World) -> None:
    world.layers[1].self_attn.qkv_proj.folded = False


def one_dense(world: World) -> None:
    world.layers[1].mlp = GatedMLP(world.config, TensorParallel())
    for parameter in world.layers[1].mlp.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 8


EXPERTS = [silent, other_share, experts_in_float8, hook_of_experts, own_forward, unfolded, one_dense]


@pytest.mark.parametrize("change", EXPERTS)
def test_experts_of_their_own_are_left_alone(
    folder: Path, whole: Calls, monkeypatch: pytest.MonkeyPatch, change: Callable[[World], None]
) -> None:
    check_left_alone(routed_world, folder, whole, monkeypatch, change)


class OwnWrite(TorchBackend):
    def write(self, *args: Any) -> None:
        super().write(*args)


class OwnAttention(Attention):
    def __call__(self, *args: Any) -> torch.Tensor:
        return super().__call__(*args)


def not_plain(world: World) -> None:
    world.backend.plain_decode = False


def own_write(world: World) -> None:
    world.backend.__class__ = OwnWrite


def hook(world: World) -> None:
    world.layers[1].register_forward_hook(lambda module, inputs, output: None)


def replace_attention(world: World) -> None:
    world.layers[1].self_attn.attention.__class__ = OwnAttention


def another_eps(world: World) -> None:
    world.layers[1].post_attention_layernorm.eps *= 1.0001


def another_table(world: World) -> None:
    table = RotaryTable(world.config)
    table.build(256, "cpu")
    world.layers[1].self_attn.attention.rotary = table


def no_norm(world: World) -> None:
    for layer in world.layers[1:]:
        layer.self_attn.attention.k_norm = None


def one_bias(world: World) -> None:
    qkv = world.layers[1].self_attn.qkv_proj
    qkv.bias = nn.Parameter(torch.ones(len(qkv.weight)), requires_grad=False)


CHANGES = [not_plain, own_write, hook, replace_attention, another_eps, another_table, no_norm, one_bias]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_of_its_own_is_left_alone(
    folder: Path, whole: Calls, monkeypatch: pytest.MonkeyPatch, change: Callable[[World], None]
) -> None:
    check_left_alone(World, folder, whole, monkeypatch, change)


def test_too_many_sequences_and_steps_with_prompts_are_left_alone(folder: Path, whole: Calls) -> None:
    world = World(folder)
    rows = MAX_MEGAKERNEL_ROWS + 1
    run = PagedRun(world.model, world.backend, 8 * rows, rows)
    run.step(range(rows), [[7 + i, 3] for i in range(rows)], 0)
    run.step(range(rows), [[5]] * rows, rows)
    run.step([0, 1], [[9], [4, 4]], 1)
    assert not whole
    run.step(range(rows - 1), [[6]] * (rows - 1), rows - 1)
    assert [calls for _, calls in whole] == [rows - 1]


def test_where_the_chain_is_taken_it_stays(folder: Path, whole: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("minivllm.layers.fused.use_chain", lambda rows, *args: bool(asked.append(rows)) or rows == 2)
    monkeypatch.setattr("minivllm.layers.fused._chained", lambda layers, x, *args: x)
    World(folder).steps()
    assert 2 in asked and [rows for _, rows in whole] == [1, 1, 1]


def test_another_page_size_is_left_alone(folder: Path, whole: Calls) -> None:
    World(folder, block_size=32).steps()
    assert not whole


def test_norms_of_heads_are_read_where_there_are_some(folder: Path, whole: Calls) -> None:
    world = World(folder)
    for layer in world.layers:
        assert isinstance(layer.self_attn.q_norm, RMSNorm)
        layer.self_attn.q_norm.weight.data.mul_(torch.linspace(0.5, 2, world.config.head_dim))
    got = world.steps()
    assert len(whole) == 4
    apart = World(folder)
    apart.backend.plain_decode = False
    assert not torch.allclose(got[-1], apart.steps()[-1], rtol=1e-3, atol=1e-3), "the weights matter"
    for layer in apart.layers:
        layer.self_attn.q_norm.weight.data.mul_(torch.linspace(0.5, 2, world.config.head_dim))
    torch.testing.assert_close(got, apart.steps())
