"""A large step's sums over the ranks go half by half through the layers: in which order, and that nobody reads a row
whose sum is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PagedRun, attention_spec
from torch import nn
from torch.nn import functional as F

from minivllm.backends.torch import TorchBackend
from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend
from minivllm.core.parallel import TensorParallel
from minivllm.kernels.rotary import Heads, qk_norm_rope_store
from minivllm.kernels.skinny_linear import linear_into
from minivllm.layers.attention import Attention
from minivllm.layers.linear import QKVParallelLinear, RowParallelLinear
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.norm import RMSNorm
from minivllm.models.loader import build_model, iterate_safetensors, read_model_config
from minivllm.models.qwen3 import Qwen3ForCausalLM, Qwen3Layer

Checkpoints = Callable[..., Path]
Log = list[tuple[str, int]]  # what was called, and of how many rows
PROMPT = list(range(7, 7 + 31 * 9, 31))  # 9 tokens: halves of 5 and 4


class Sum:
    """What its rows hold is nobody's to read before ``wait``, which comes once."""

    def __init__(self, log: Log, x: torch.Tensor) -> None:
        self.log, self.x, self.value = log, x, x.clone()
        x.fill_(float("nan"))
        log.append(("sum", len(x)))

    def wait(self) -> None:
        assert self.x.isnan().all(), "somebody wrote to it, or waited for it before"
        self.x.copy_(self.value)
        self.log.append(("wait", len(self.x)))


@dataclass(frozen=True, slots=True)
class Alone(TensorParallel):
    """Rank 0 of 2, which gets its own parts back."""

    log: Log = field(default_factory=list)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def start_all_reduce(self, x: torch.Tensor) -> Sum:
        return Sum(self.log, x)


class World:
    """A model and what it calls."""

    def __init__(
        self,
        folder: Path,
        model: type[Qwen3ForCausalLM] = Qwen3ForCausalLM,
        backend: type[AttentionBackend] = TorchBackend,
    ) -> None:
        config, self.log = read_model_config(folder), []  # type: tuple[Any, Log]
        tp = Alone(0, 2, log=self.log)
        self.model: Any = build_model(model, config, tp, "cpu", torch.float32, iterate_safetensors(folder), 256)
        self.layers = list(self.model.model.layers)
        self.backend = backend(attention_spec(config, tp=tp))
        for layer in self.layers:
            if type(layer.mlp) is GatedMLP:
                layer.mlp.activation = self.logged("up", layer.mlp.activation)

    def logged(self, name: str, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def logging(x: torch.Tensor, *args: Any) -> torch.Tensor:
            self.log.append((name, len(x)))
            return call(x, *args)

        return logging

    def step(self) -> torch.Tensor:
        """Logits behind the prompt (1, vocab of the rank), then behind a token more."""
        self.log.clear()
        run = PagedRun(self.model, self.backend, 16, 1)
        logits = run.step([0], [PROMPT], 0)
        return torch.cat([logits, run.step([0], [[5]], 1)])

    def sums(self) -> Log:
        return [call for call in self.log if call[0] in ("sum", "wait")]


@pytest.fixture
def small_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minivllm.layers.linear.SUMMED_IN_HALVES", 4)


@pytest.fixture
def folder(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3", num_hidden_layers=3, head_dim=64)


@pytest.fixture
def expected(folder: Path) -> torch.Tensor:
    world = World(folder)
    logits = world.step()
    assert not world.sums()
    return logits


O_AND_MLP = [
    ("sum", 5), ("sum", 4),
    ("wait", 5), ("up", 5), ("sum", 5), ("wait", 4), ("up", 4), ("sum", 4),
]  # fmt: skip
LAST = [("wait", 5), ("wait", 4), ("up", 1)]  # whole, and of the last token alone behind its attention
DECODE = [("up", 1)] * 3


def test_the_next_product_of_a_half_waits_for_its_sum_alone(
    folder: Path, expected: torch.Tensor, small_halves: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(folder)

    def logged(out: torch.Tensor, *args: Any) -> None:
        world.log.append(("qkv", len(out)))
        linear_into(out, *args)

    monkeypatch.setattr("minivllm.layers.attention.linear_into", logged)
    torch.testing.assert_close(world.step(), expected)
    qkv = [("wait", 5), ("qkv", 5), ("wait", 4), ("qkv", 4)]
    assert world.log == O_AND_MLP + qkv + O_AND_MLP + LAST + DECODE


class Fresh(TorchBackend):
    """Prefills from keys and values at hand: they must be those in the cache."""

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self.fresh_prompts = batch.whole_prompts

    def prefill_fresh(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, out: torch.Tensor) -> None:
        assert self.batch is not None
        for given, cache in zip((k, v), self.kv_cache[layer.index], strict=True):
            assert torch.equal(given, cache.flatten(0, 1)[self.batch.slot_mapping])
        self.prefill(q, layer, out)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("backend", [TorchBackend, Fresh])
def test_a_kernel_that_finishes_heads_does_so_half_by_half(
    folder: Path, expected: torch.Tensor, small_halves: None, backend: type[AttentionBackend], folded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    world = World(folder, backend=backend)

    def persistent_qkv(
        x: torch.Tensor, weight: torch.Tensor, heads: Heads, factors: torch.Tensor | None, *, out: Any
    ) -> None:
        world.log.append(("qkv", len(x)))
        assert (factors is not None) == folded
        assert len(x) == len(heads.positions) == len(heads.slot_mapping)
        qkv = F.linear(x, weight) * (1 if factors is None else factors[:, None])
        out[0].copy_(qk_norm_rope_store(qkv, *heads, None, True))
        if out[1] is not None:
            out[1].copy_(qkv.view(len(x), -1, heads.head_dim)[:, heads.num_heads :])

    for layer in world.layers if folded else []:
        layer.self_attn.qkv_proj.fold(layer.input_layernorm)
    monkeypatch.setattr("minivllm.layers.attention.persistent_qkv", persistent_qkv)
    monkeypatch.setattr("minivllm.layers.attention.use_persistent", lambda rows, *shape, **kind: rows == 4)
    torch.testing.assert_close(world.step(), expected)
    qkv = [("wait", 5), ("qkv", 5), ("wait", 4), ("qkv", 4)]
    assert world.log == O_AND_MLP + qkv + O_AND_MLP + LAST + DECODE


class OwnLayer(Qwen3Layer):
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        assert not x.isnan().any()
        x = self.self_attn(x, self.input_layernorm, positions, attention)
        assert not x.isnan().any()
        x = self.mlp(x, self.post_attention_layernorm)
        assert not x.isnan().any()
        return x


class OwnMLP(GatedMLP):
    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        assert not x.isnan().any()
        x = super().forward(x, norm)
        assert not x.isnan().any()
        return x


class OwnSum(RowParallelLinear):
    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert not residual.isnan().any()
        return super().add_to(residual, x)


class Other(nn.Module):
    """A sum that has nothing of ours but ``add_to``."""

    def __init__(self, product: RowParallelLinear) -> None:
        super().__init__()
        self.product = product

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert not residual.isnan().any()
        return self.product.add_to(residual, x)


class OwnProjection(QKVParallelLinear):
    pass


class OwnAttention(Attention):
    def of_stream(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        assert not x.isnan().any()
        return super().of_stream(x, *args)


def looks_on(module: Any, args: tuple[Any, ...], out: Any = None) -> None:
    assert not args[0].isnan().any()
    assert out is None or not out.isnan().any()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a layer": lambda layer: setattr(layer, "__class__", OwnLayer),
    "an MLP": lambda layer: setattr(layer.mlp, "__class__", OwnMLP),
    "a sum": lambda layer: setattr(layer.mlp.down_proj, "__class__", OwnSum),
    "a module for a sum": lambda layer: setattr(layer.self_attn, "o_proj", Other(layer.self_attn.o_proj)),
    "a projection": lambda layer: setattr(layer.self_attn.qkv_proj, "__class__", OwnProjection),
    "an attention": lambda layer: setattr(layer.self_attn.attention, "__class__", OwnAttention),
    "a forward put in place": lambda layer: setattr(layer.mlp, "forward", partial(GatedMLP.forward, layer.mlp)),
    "a hook": lambda layer: layer.self_attn.register_forward_hook(looks_on),
    "a hook in front": lambda layer: layer.mlp.register_forward_pre_hook(looks_on),
}  # fmt: skip


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_ones_own_finds_every_row_summed(
    folder: Path, expected: torch.Tensor, small_halves: None, change: str, place: int
) -> None:
    world = World(folder)
    CHANGES[change](world.layers[place])
    torch.testing.assert_close(world.step(), expected)
    assert world.sums() == [("sum", 5), ("sum", 4), ("wait", 5), ("wait", 4)] * 4


def test_one_layer_and_a_step_that_picks_nothing(tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("qwen3", num_hidden_layers=1)
    expected = World(folder).step()
    monkeypatch.setattr("minivllm.layers.linear.SUMMED_IN_HALVES", 4)
    world = World(folder)
    torch.testing.assert_close(world.step(), expected)
    assert not world.sums()
    monkeypatch.setattr(Qwen3Layer, "pick_last_tokens", lambda layer: None)
    world = World(folder)
    torch.testing.assert_close(world.step(), expected)
    assert world.sums() == [("sum", 5), ("sum", 4), ("wait", 5), ("wait", 4)] * 2


def test_the_step_behind_an_error_takes_nothing_of_its_sums(
    folder: Path, expected: torch.Tensor, small_halves: None
) -> None:
    world, calls = World(folder), 0
    mlp = world.layers[1].mlp
    activation = mlp.activation

    def fails(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ArithmeticError("the numbers ran out")
        return activation(*args)

    mlp.activation = fails
    with pytest.raises(ArithmeticError):
        world.step()
    assert world.sums()[-1] == ("wait", 4) and world.sums().count(("sum", 5)) > world.sums().count(("wait", 5))
    mlp.activation = activation
    torch.testing.assert_close(world.step(), expected)
    assert world.log[: len(O_AND_MLP)] == O_AND_MLP
