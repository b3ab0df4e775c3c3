"""Layers: this rank's slice and its place, rank by rank; the rotary table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minivllm.core.model_config import FrozenDict, ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError
from minivllm.kernels.capture import rehearsal
from minivllm.layers.attention import Attention
from minivllm.layers.decoder import Decoder
from minivllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.norm import RMSNorm
from minivllm.layers.parameter import pieces_of
from minivllm.layers.rotary import RotaryTable
from minivllm.models.checkpoint import read_model_config
from minivllm.models.llama import LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Silent(TensorParallel):
    """A rank that hands back its own part; the test adds parts up."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


@dataclass(frozen=True, slots=True)
class Told(Silent):
    """It keeps what it is asked to sum in the background."""

    begun: list[torch.Tensor] = field(default_factory=list)

    def start_all_reduce(self, x: torch.Tensor) -> Any:
        self.begun.append(x)
        return SimpleNamespace(wait=lambda: None)


def load(layer: nn.Module, **tensors: dict[object, torch.Tensor]) -> None:
    for name, shards in tensors.items():
        param = getattr(layer, name)
        for shard_id, tensor in shards.items():
            param.weight_loader(param, tensor, shard_id)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(5, 12)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_parts_side_by_side_are_the_whole(x: torch.Tensor, size: int) -> None:
    weight, bias = torch.randn(8, 12), torch.randn(8)
    parts = []
    for rank in range(size):
        layer = ColumnParallelLinear(12, 8, Silent(rank, size), bias=True)
        load(layer, weight={None: weight}, bias={None: bias})
        parts.append(layer(x))
    torch.testing.assert_close(torch.cat(parts, 1), F.linear(x, weight, bias))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_merged_columns_keep_each_weights_rows_together(x: torch.Tensor, size: int) -> None:
    first, second = torch.randn(8, 12), torch.randn(4, 12)
    parts = []
    for rank in range(size):
        layer = MergedColumnParallelLinear(12, [8, 4], Silent(rank, size))
        load(layer, weight={0: first, 1: second})
        parts.append(layer(x).split([8 // size, 4 // size], dim=1))
    torch.testing.assert_close(torch.cat([p[0] for p in parts], 1), x @ first.T)
    torch.testing.assert_close(torch.cat([p[1] for p in parts], 1), x @ second.T)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parts_add_up_to_the_whole_with_one_bias(x: torch.Tensor, size: int) -> None:
    weight, bias = torch.randn(7, 12), torch.randn(7)
    total = torch.zeros(5, 7)
    for rank in range(size):
        layer = RowParallelLinear(12, 7, Silent(rank, size), bias=True)
        load(layer, weight={None: weight}, bias={None: bias})
        total += layer(x[:, rank * 12 // size : (rank + 1) * 12 // size])
    torch.testing.assert_close(total, F.linear(x, weight, bias))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parts_add_up_on_the_residual_in_place_with_one_bias(x: torch.Tensor, size: int, bias: bool) -> None:
    weight, one, stream = torch.randn(7, 12), torch.randn(7), torch.randn(5, 7)
    total = stream.clone()
    for rank in range(size):
        layer = RowParallelLinear(12, 7, Silent(rank, size), bias=bias)
        load(layer, weight={None: weight}, **({"bias": {None: one}} if bias else {}))
        residual = stream.clone()
        out = layer.add_to(residual, x[:, rank * 12 // size : (rank + 1) * 12 // size])
        assert out is residual
        total += out - stream
    torch.testing.assert_close(total, stream + F.linear(x, weight, one if bias else None))


def test_a_norm_in_front_of_columns(x: torch.Tensor) -> None:
    norm, layer = RMSNorm(12, 1e-5), MergedColumnParallelLinear(12, [8, 4], TensorParallel(), bias=True)
    load(norm, weight={None: torch.randn(12)})
    load(layer, weight={0: torch.randn(8, 12), 1: torch.randn(4, 12)}, bias={0: torch.randn(8), 1: torch.randn(4)})
    before = x.clone()
    expected = F.linear(F.rms_norm(x, (12,), norm.weight, 1e-5), layer.weight, layer.bias)
    torch.testing.assert_close(layer.after_norm(x, norm), expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("tokens", [2, 3, 9])
def test_many_tokens_are_summed_in_halves_and_the_residual_counts_once(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minivllm.layers.linear.SUMMED_IN_HALVES", 2)
    x, weight, residual = torch.randn(tokens, 12), torch.randn(7, 12), torch.randn(tokens, 7)
    total = torch.zeros(tokens, 7)
    for rank in range(3):
        tp = Told(rank, 3)
        layer = RowParallelLinear(12, 7, tp)
        load(layer, weight={None: weight})
        mine = residual.clone()
        assert layer.add_to(mine, x[:, 4 * rank : 4 * rank + 4].contiguous()) is mine
        assert [len(part) for part in tp.begun] == [-(-tokens // 2), tokens // 2]
        assert torch.equal(torch.cat(tp.begun), mine), "what is summed is not the residual itself"
        total += mine
        with rehearsal():
            layer.add_to(mine.clone(), x[:, 4 * rank : 4 * rank + 4].contiguous())
        assert len(tp.begun) == 2, "a step that stands for a captured one sums as that does"
    torch.testing.assert_close(total, residual + x @ weight.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 8, 9, 1024, 1025])
@pytest.mark.parametrize("biased", [False, True])
def test_a_norm_folded_into_columns(rows: int, biased: bool) -> None:
    """Twice, and once more after both were loaded again: the product of many rows is left to be scaled, and to have its
    bias added."""
    x, norm = torch.randn(rows, 12) * 3, RMSNorm(12, 1e-2)
    layer = QKVParallelLinear(12, 2, 1, 3, TensorParallel(), bias=biased)
    before = x.clone()
    for _ in range(2):
        load(norm, weight={None: torch.randn(12)})
        sizes = {"q": 6, "k": 3, "v": 3}
        biases = {"bias": {name: torch.randn(n) for name, n in sizes.items()}} if biased else {}
        load(layer, weight={name: torch.randn(n, 12) for name, n in sizes.items()}, **biases)
        expected = F.linear(F.rms_norm(x, (12,), norm.weight, 1e-2), layer.weight, layer.bias)
        for _ in range(2):
            layer.fold(norm)
            assert torch.equal(norm.weight, torch.ones(12))
            torch.testing.assert_close(layer.after_norm(x, norm), expected)
            got, scale = layer.unscaled(x, norm)
            assert (scale is None) == (rows not in (9, 1024))
            torch.testing.assert_close(got if scale is None else scale.applied_to(got), expected)
    assert torch.equal(x, before)


def test_what_is_not_folded_is_left_to_no_one(x: torch.Tensor) -> None:
    norm, layer = RMSNorm(12, 1e-5), ColumnParallelLinear(12, 8, TensorParallel())
    load(norm, weight={None: torch.randn(12)})
    load(layer, weight={None: torch.randn(8, 12)})
    x = x.repeat(10, 1)
    got, scale = layer.unscaled(x, norm)
    assert scale is None and torch.equal(got, layer.after_norm(x, norm))
    with pytest.raises(ValueError, match="bias would be scaled"):
        ColumnParallelLinear(12, 8, TensorParallel(), bias=True).fold(norm)


class PlusOne(RMSNorm):
    """As Gemma's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (12,), 1 + self.weight, self.eps)


def doubled(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("own", ["norm", "norm's hook", "product", "product's hook"])
def test_a_norm_or_a_product_with_a_forward_or_a_hook_of_its_own_is_called(own: str, rows: int) -> None:
    x = torch.randn(rows, 12)
    norm = (PlusOne if own == "norm" else RMSNorm)(12, 1e-5)
    layer = MergedColumnParallelLinear(12, [8, 8], TensorParallel())
    load(norm, weight={None: torch.randn(12)})
    load(layer, weight={0: torch.randn(8, 12), 1: torch.randn(8, 12)})
    if own == "product":
        layer.__class__ = type("Own", (type(layer),), {"forward": lambda self, y: 3 * F.linear(y, self.weight)})
    if "hook" in own:
        (norm if "norm" in own else layer).register_forward_hook(doubled)
    expected = layer(norm(x))
    torch.testing.assert_close(layer.after_norm(x, norm), expected)
    got, scale = layer.unscaled(x, norm)
    assert scale is None and torch.equal(got, layer.after_norm(x, norm))
    if "norm" in own:
        with pytest.raises(ValueError, match=f"a {type(norm).__name__} with a forward or a hook of its own"):
            layer.fold(norm)
    config: Any = SimpleNamespace(hidden_act="silu", hidden_size=12, intermediate_size=8, mlp_bias=False)
    mlp = GatedMLP(config, TensorParallel())
    mlp.gate_up_proj = layer
    load(mlp.down_proj, weight={None: torch.randn(12, 8)})
    gate, up = expected.chunk(2, dim=1)
    inner = F.silu(gate) * up
    torch.testing.assert_close(mlp(x.clone(), norm), x + F.linear(inner, mlp.down_proj.weight))
    mlp.down_proj.register_forward_hook(doubled)
    torch.testing.assert_close(mlp(x.clone(), norm), x + 2 * F.linear(inner, mlp.down_proj.weight))


def test_a_hook_that_comes_behind_the_fold_is_called() -> None:
    x, norm, layer = torch.randn(20, 12), RMSNorm(12, 1e-5), QKVParallelLinear(12, 2, 1, 3, TensorParallel(), bias=True)
    load(norm, weight={None: torch.randn(12)})
    sizes = {"q": 6, "k": 3, "v": 3}
    biases = {name: torch.randn(n) for name, n in sizes.items()}
    load(layer, weight={name: torch.randn(n, 12) for name, n in sizes.items()}, bias=biases)
    expected = 2 * layer(norm(x))
    layer.fold(norm)
    layer.register_forward_hook(doubled)
    got, scale = layer.unscaled(x, norm)
    assert scale is None
    torch.testing.assert_close(got, expected)


def test_norms_of_heads_are_rms_norms_of_one_eps() -> None:
    rotary: Any = SimpleNamespace()
    foreign: Any = torch.nn.LayerNorm(8)
    with pytest.raises(TypeError, match="a norm of heads is a LayerNorm"):
        Attention(0, 2, 1, 8, rotary, q_norm=foreign)
    with pytest.raises(TypeError, match="a norm of heads is a PlusOne"):
        Attention(0, 2, 1, 8, rotary, k_norm=PlusOne(8, 1e-5))
    with pytest.raises(ValueError, match=r"different eps: 1e-05 and 0\.01"):
        Attention(0, 2, 1, 8, rotary, q_norm=RMSNorm(8, 1e-5), k_norm=RMSNorm(8, 1e-2))
    assert Attention(0, 2, 1, 8, rotary, k_norm=RMSNorm(8, 1e-2)).eps == 1e-2


def test_folded_rounds_the_weight_once() -> None:
    norm, layer = RMSNorm(64, 1e-5), ColumnParallelLinear(64, 32, TensorParallel())
    weight, g = torch.randn(32, 64).bfloat16(), torch.randn(64).bfloat16()
    layer.bfloat16(), norm.bfloat16()
    load(norm, weight={None: g})
    load(layer, weight={None: weight})
    layer.fold(norm)
    assert torch.equal(layer.weight, (weight.double() * g.double()).bfloat16())


@pytest.mark.parametrize("heads,kv_heads", [(8, 8), (8, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_each_rank_has_its_heads_and_the_kv_heads_they_read(
    x: torch.Tensor, heads: int, kv_heads: int, size: int
) -> None:
    dim = 3
    q, k, v = (torch.randn(n * dim, 12) for n in (heads, kv_heads, kv_heads))
    for rank in range(size):
        layer = QKVParallelLinear(12, heads, kv_heads, dim, Silent(rank, size))
        load(layer, weight={"q": q, "k": k, "v": v})
        mine, group = heads // size, heads // kv_heads
        own = range(rank * mine, (rank + 1) * mine)  # query heads
        read = sorted({head // group for head in own})  # kv heads that they attend to
        assert (layer.num_heads, layer.num_kv_heads) == (mine, len(read))
        rows = [w.view(-1, dim, 12)[list(idx)].flatten(0, 1) for w, idx in ((q, own), (k, read), (v, read))]
        torch.testing.assert_close(layer(x), x @ torch.cat(rows).T)


@pytest.mark.parametrize("vocab", [8, 10, 3, 1])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_vocabulary_that_does_not_divide_is_padded_with_zeros(vocab: int, size: int) -> None:
    weight, ids = torch.randn(vocab, 6), torch.arange(vocab)
    embedded, logits = torch.zeros(vocab, 6), []
    hidden = torch.randn(2, 6)
    for rank in range(size):
        tokens = VocabParallelEmbedding(vocab, 6, Silent(rank, size))
        head = ParallelLMHead(vocab, 6, Silent(rank, size))
        for layer in (tokens, head):
            load(layer, weight={None: weight})
        embedded += tokens(ids)
        logits.append(F.linear(hidden, head.weight))
        assert torch.equal(
            head.weight[max(vocab - head.first, 0) :], torch.zeros_like(head.weight)[max(vocab - head.first, 0) :]
        )
    torch.testing.assert_close(embedded, weight)
    torch.testing.assert_close(torch.cat(logits, 1)[:, :vocab], hidden @ weight.T)


@pytest.mark.parametrize(
    ("vocab", "size", "rows"), [(3000, 2, 2048), (2049, 2, 2048), (5000, 3, 2048), (2048, 2, 1024), (2000, 3, 667)]
)
def test_a_large_vocabulary_is_cut_between_groups_of_tokens(vocab: int, size: int, rows: int) -> None:
    """With something for each rank; else evenly, and no rank samples its part alone."""
    hidden, weight, logits = torch.randn(2, 6), torch.randn(vocab, 6), []
    for rank in range(size):
        head = ParallelLMHead(vocab, 6, Silent(rank, size))
        load(head, weight={None: weight})
        assert head.rows == rows and head.first == rank * rows < vocab
        part = head.shard(hidden)
        assert (part is None) == bool(rows % 1024)
        if part is not None:
            assert part[1][:2] == (head.first, vocab)
            logits.append(part[0])
    if logits:
        torch.testing.assert_close(torch.cat(logits, 1)[:, :vocab], hidden @ weight.T)


class Capped(ParallelLMHead):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).tanh()


def test_a_head_of_ones_own_is_not_passed_over(tiny_checkpoint: Callable[..., Path]) -> None:
    """Ranks sample from parts of the logits only where the usual head makes them."""
    config = read_model_config(tiny_checkpoint("llama", vocab_size=3000))
    with torch.device("meta"):
        model = LlamaForCausalLM(config, Silent(1, 2))
        assert model.compute_logits_shard(torch.empty(2, 64)) is not None
        hook = model.lm_head.register_forward_hook(lambda module, inputs, logits: logits / 2)
        assert model.compute_logits_shard(torch.empty(2, 64)) is None
        hook.remove()
        for head in (Capped(3000, 64, Silent(1, 2)), nn.Linear(64, 3000)):
            model.lm_head = head
            assert model.compute_logits_shard(torch.empty(2, 64)) is None


def test_a_tensor_of_another_shape_is_not_sliced() -> None:
    layer = RowParallelLinear(8, 4, Silent(0, 2))
    with pytest.raises(ValueError, match=r"\(4, 9\) where \(4, 8\)"):
        load(layer, weight={None: torch.zeros(4, 9)})


def test_a_plain_parameter_is_one_whole_piece() -> None:
    assert pieces_of(nn.Parameter(torch.zeros(2, 3)))[None].shape == (2, 3)


def test_replicated(x: torch.Tensor) -> None:
    layer, weight = ReplicatedLinear(12, 3), torch.randn(3, 12)
    load(layer, weight={None: weight})
    torch.testing.assert_close(layer(x), x @ weight.T)


# --------------------------------------------------------------------------- rotary


def config_with(**rope: object) -> ModelConfig:
    hf = {
        "architectures": ["X"],
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "rope_parameters": FrozenDict(rope),
    }
    return ModelConfig.from_hf(hf)


def table(positions: int = 300, **rope: object) -> torch.Tensor:
    rotary = RotaryTable(config_with(**rope))
    rotary.build(positions, "cpu")
    return rotary.cos_sin


def test_the_table_holds_cosines_then_sines_in_float32() -> None:
    cos_sin = table(rope_theta=100.0)
    assert cos_sin.shape == (300, 16) and cos_sin.dtype == torch.float32
    angles = torch.arange(300.0)[:, None] / 100.0 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(cos_sin, torch.cat((angles.cos(), angles.sin()), 1), rtol=1e-4, atol=1e-4)


def test_linear_scaling_is_the_table_of_squeezed_positions() -> None:
    torch.testing.assert_close(table(rope_type="linear", factor=4.0)[::4], table(75), rtol=1e-4, atol=1e-4)


def test_yarn_and_llama3_keep_fast_dimensions_and_squeeze_slow_ones() -> None:
    plain, squeezed = table(300), table(300, rope_type="linear", factor=4.0)
    numbers = {"factor": 4.0, "original_max_position_embeddings": 32}
    llama3 = table(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, **numbers)
    yarn = table(rope_type="yarn", attention_factor=1.0, **numbers)
    for scaled in (llama3, yarn):
        torch.testing.assert_close(scaled[:, 0], plain[:, 0])  # the fastest cosine
        torch.testing.assert_close(scaled[:, 7], squeezed[:, 7], rtol=1e-3, atol=1e-4)  # the slowest
        assert not torch.allclose(scaled, plain) and not torch.allclose(scaled, squeezed)


def test_part_of_a_head_can_turn() -> None:
    assert table(partial_rotary_factor=0.5).shape == (300, 8)
    with pytest.raises(CheckpointError, match="rotary dimension 9 must be even"):
        table(partial_rotary_factor=9 / 16)


def test_layers_that_ask_for_other_parameters_share_their_table() -> None:
    first = RotaryTable(config_with(rope_theta=100.0))
    other = first.other({"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0})
    assert first.other({"rope_theta": 7, "rope_type": "linear", "factor": 2}) is other is not first
    assert first.other({"rope_theta": 100.0}) is first
    assert [*nn.ModuleList([first]).modules()].count(other) == 1, "the loader finds and builds it"
    other.build(300, "cpu")
    torch.testing.assert_close(other.cos_sin, table(rope_theta=7.0, rope_type="linear", factor=2.0))
    for rope, message in (
        ({"rope_theta": "low"}, "rope_theta=low is not"),
        ({"rope_type": "spiral"}, "'spiral' is not"),
    ):
        with pytest.raises(CheckpointError, match=message):
            first.other(rope)


def test_kernels_are_found_without_all_layers(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []

    class Layer(nn.Module):
        def __init__(self, config: ModelConfig, tp: TensorParallel, index: int, rotary: RotaryTable) -> None:
            super().__init__()
            self.index, self.weight = index, nn.Parameter(torch.zeros(3 if index in (4, 5) else 2))

        def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: object) -> torch.Tensor:
            called.append(self.index)
            return x

    config = replace(read_model_config(tiny_checkpoint("qwen3")), num_layers=8)
    decoder, ids = Decoder(config, TensorParallel(), Layer), torch.zeros(2, dtype=torch.int64)
    for compiling, layers in ((True, [0, 1, 2, 4, 7]), (False, [*range(8)])):
        monkeypatch.setattr("minivllm.layers.decoder.compiling", lambda its=compiling: its)
        called.clear()
        decoder(ids, ids, None)
        assert called == layers
