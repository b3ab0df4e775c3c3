"""Layers that read packed copies of their weights in steps of few rows: the same comes out, before any other way is
asked for, and a copy is never older than its weight. With references in the kernels' place; the kernels themselves:
``tests/kernels``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PagedRun, attention_spec
from torch.nn import functional as F

from minivllm.backends.torch import TorchBackend
from minivllm.core.interfaces import AttentionBackend
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError
from minivllm.kernels.linear.packed_weights import Order, PackedWeight, pack, unpack
from minivllm.kernels.megakernel.megakernel import (
    PAGE,
    DecoderShape,
    DecodeTokens,
    Layers,
    LayerWeights,
    megakernel_reference,
)
from minivllm.layers.decoder import Decoder
from minivllm.layers.embedding import ParallelLMHead
from minivllm.layers.packed import heads_of, pack_products, packable_decoders, products_of
from minivllm.models.checkpoint import read_model_config
from minivllm.models.loader import build_model, iterate_safetensors, norm_pairs
from minivllm.models.qwen3 import Qwen3ForCausalLM

Checkpoints = Callable[..., Path]
PROMPT = list(range(7, 7 + 31 * 9, 31))
SHAPE = {"num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
PRODUCTS = "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"
NAMES = [f"layers.{i}.{name}" for i in range(3) for name in PRODUCTS]


def pack_its_layers(model: Any, order: Order = Order.UNITS) -> str | None:
    """Returns the name of one that cannot be packed."""
    (decoder,) = packable_decoders(model)
    return pack_products(model, dict.fromkeys(products_of(decoder), order))


class World:
    """A bfloat16 model of one rank on the CPU, its norms folded into the products behind them."""

    def __init__(self, folder: Path, pack: bool = True, order: Order = Order.UNITS) -> None:
        config, bf16 = read_model_config(folder), torch.bfloat16
        self.model: Any = build_model(
            Qwen3ForCausalLM, config, TensorParallel(), "cpu", bf16, iterate_safetensors(folder), 256
        )
        self.decoder: Decoder = self.model.model
        self.backend = TorchBackend(attention_spec(config, dtype="bfloat16", block_size=PAGE))
        for norm, product in norm_pairs(self.model):
            product.fold(norm)
        assert not pack or pack_its_layers(self.model, order) is None

    def steps(self) -> torch.Tensor:
        """Logits behind a prompt (1, vocab), then behind a token more, then behind one more and another's prompt."""
        run = PagedRun(self.model, self.backend, 16, 2)
        logits = [run.step([0], [PROMPT], 0), run.step([0], [[5]], 1)]
        return torch.cat([*logits, run.step([0, 1], [[6], PROMPT[:5]], 1)])

    def packed(self) -> dict[str, PackedWeight]:
        found = ((name, getattr(module, "packed_weight", None)) for name, module in self.decoder.named_modules())
        return {name: packed for name, packed in found if packed is not None}


@pytest.fixture
def folder(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3", **SHAPE)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each call of a kernel between attentions, with its rows: both are for any number of them and compute the same."""
    calls: list[tuple[str, int]] = []

    def products(heads, o, x, gate_up, eps, down, qkv, eps_behind, bias):  # type: ignore[no-untyped-def]
        x += F.linear(heads, o)
        gate, up = F.linear(F.rms_norm(x, (x.shape[1],), eps=eps), gate_up).chunk(2, dim=1)
        x += F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(x, (x.shape[1],), eps=eps_behind), qkv, bias)

    def packed(*args: Any) -> torch.Tensor:
        calls.append(("packed", len(args[2])))
        return products(*(unpack(arg) if isinstance(arg, PackedWeight) else arg for arg in args))

    def chained(*args: Any) -> tuple[torch.Tensor, None]:
        calls.append(("chained", len(args[2])))
        return products(*args), None

    def whole(layers: Any, shape: Any, x: Any, backend: Any, packed: Order | None = None) -> bool:
        return not packed

    for name, value in {"packed_chain": packed, "chain_linear": chained, "goes_whole": whole}.items():
        monkeypatch.setattr(f"minivllm.layers.fused.{name}", value)
    for name in ("use_packed", "use_chain"):
        monkeypatch.setattr(f"minivllm.layers.fused.{name}", lambda rows, shape, dtype, device: True)
    monkeypatch.setattr("minivllm.layers.fused.packed_rows", lambda shape: range(1, 65))
    return calls


def test_the_same_comes_out_bit_for_bit(folder: Path, calls: list[tuple[str, int]]) -> None:
    expected = World(folder, pack=False).steps()
    assert {way for way, _ in calls} == {"chained"}
    calls.clear()
    assert torch.equal(World(folder).steps(), expected)
    assert {way for way, _ in calls} == {"packed"} and {rows for _, rows in calls} == {9, 1, 6}


def test_other_numbers_of_rows_read_the_weights_themselves(
    folder: Path, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = World(folder, pack=False).steps()
    calls.clear()
    monkeypatch.setattr("minivllm.layers.fused.packed_rows", lambda shape: range(1, 5))
    assert torch.equal(World(folder).steps(), expected)
    assert set(calls) == {("chained", 9), ("packed", 1), ("chained", 6)}


def test_it_is_near_what_the_layers_compute_one_by_one(
    folder: Path, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    got = World(folder).steps()
    for name in ("use_chain", "goes_whole"):
        monkeypatch.setattr(f"minivllm.layers.fused.{name}", lambda *args: False)
    calls.clear()
    expected = World(folder, pack=False).steps().float()
    assert (got.float() - expected).norm() < 0.03 * expected.norm() and not calls


def test_while_kernels_are_found_some_layers_stand_for_all(
    tiny_checkpoint: Checkpoints, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tiny_checkpoint("qwen3", **SHAPE | {"num_hidden_layers": 6}))
    monkeypatch.setattr("minivllm.layers.decoder.compiling", lambda: True)
    PagedRun(world.model, world.backend, 16, 1).step([0], [PROMPT], 0)
    assert calls == [("packed", 9)] * 3


def test_it_is_the_products_of_all_layers_that_are_packed(folder: Path) -> None:
    world = World(folder)
    packed, modules = world.packed(), dict(world.decoder.named_modules())
    assert packed.keys() == set(NAMES)
    assert packable_decoders(world.model) == [world.decoder]
    assert set(products_of(world.decoder)) == {modules[name] for name in NAMES}
    for name, its in packed.items():
        assert torch.equal(unpack(its), modules[name].weight) and its.gated == name.endswith("gate_up_proj")
    assert not World(folder, pack=False).packed()


def drop_one(world: World) -> None:
    world.decoder.get_submodule("layers.1.mlp.down_proj").packed_weight = None  # type: ignore[assignment]


def hook(world: World) -> None:
    world.decoder.layers[1].register_forward_hook(lambda module, inputs, output: None)


@pytest.mark.parametrize("change", [drop_one, hook])
def test_all_or_none_of_the_layers_read_them(
    folder: Path, calls: list[tuple[str, int]], change: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minivllm.layers.fused.goes_whole", lambda *args: False)
    world = World(folder)
    change(world)
    world.steps()
    assert not [way for way, _ in calls if way == "packed"]


def test_a_decoder_with_a_step_of_its_own_is_left_alone(folder: Path) -> None:
    world = World(folder, pack=False)
    world.model.model.__class__ = type("Own", (Decoder,), {"forward": lambda self, *args: Decoder.forward(self, *args)})
    assert packable_decoders(world.model) == []


def test_a_weight_that_cannot_be_packed_leaves_all_as_they_are(folder: Path) -> None:
    world = World(folder, pack=False)
    world.decoder.get_submodule("layers.1.mlp.down_proj").weight.data[:, ::2] *= 2.0**-60  # type: ignore[operator]
    assert pack_its_layers(world.model) == "model.layers.1.mlp.down_proj.weight"
    assert not world.packed()


@pytest.fixture
def whole(calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """``calls``, and those of the kernel of all layers, which has a reference in its place and takes decodes."""

    def reference(x: torch.Tensor, layers: Layers, tokens: DecodeTokens) -> torch.Tensor:
        calls.append(("whole, packed" if layers.weights[0].packed else "whole", len(x)))
        weights = [replace(its, **unpacked(its)) for its in layers.weights]
        return megakernel_reference(x, replace(layers, weights=weights), tokens)

    def unpacked(its: LayerWeights) -> dict[str, torch.Tensor]:
        names = "qkv", "o", "gate_up", "down"
        return {name: unpack(packed) for name, packed in zip(names, its.packed or (), strict=False)}

    def takes(
        layers: Any, shape: DecoderShape, x: torch.Tensor, backend: AttentionBackend, packed: Order | None = None
    ) -> bool:
        assert backend.batch is not None
        return backend.batch.num_decodes == backend.batch.num_seqs == len(x)

    monkeypatch.setattr("minivllm.layers.whole.megakernel", reference)
    monkeypatch.setattr("minivllm.layers.fused.goes_whole", takes)
    return calls


@pytest.mark.parametrize("order", Order)
def test_all_layers_at_once_read_them_first(
    folder: Path, whole: list[tuple[str, int]], order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    got, others = World(folder, order=order).steps(), "packed" if order is Order.UNITS else "chained"
    assert set(whole) == {(others, 9), ("whole, packed", 1), (others, 6)}, "one kernel alone reads Order.LINES"
    whole.clear()
    monkeypatch.setattr("minivllm.layers.fused.use_chain", lambda *args: False)
    expected = World(folder, pack=False).steps().float()
    assert set(whole) == {("whole", 1)}, "prompts go layer by layer"
    assert (got.float() - expected).norm() < 0.03 * expected.norm()


# --------------------------------------------------------------------------- LM heads


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the kernel, with the reference in its place, for three rows at most."""
    calls: list[int] = []

    def packed_linear(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        calls.append(len(x))
        return F.linear(x, unpack(packed))

    monkeypatch.setattr("minivllm.layers.embedding.packed_linear", packed_linear)
    monkeypatch.setattr("minivllm.layers.embedding.use_packed_linear", lambda rows, lines, k, *its: rows < 4)
    return calls


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_reads_its_copy_for_few_rows(tiny_checkpoint: Checkpoints, products: list[int], tied: bool) -> None:
    world = World(tiny_checkpoint("qwen3", **SHAPE, vocab_size=512, tie_word_embeddings=tied), pack=False)
    (head,) = heads_of(world.model)
    assert head is world.model.lm_head and head.packed_weight is None
    hidden = [torch.randn(rows, 256).to(torch.bfloat16) for rows in (1, 3, 4)]
    expected = [world.model.compute_logits(rows) for rows in hidden]
    assert pack_products(world.model, {head: Order.UNITS}) is None and not products
    assert all(torch.equal(world.model.compute_logits(rows), one) for rows, one in zip(hidden, expected, strict=True))
    assert products == [1, 3]
    assert not world.packed(), "the embedding has none"


def test_a_rank_reads_its_part_of_the_head(products: list[int]) -> None:
    tp = TensorParallel(rank=1, size=2)
    head = ParallelLMHead(2048 + 700, 128, tp)
    head.weight.data = torch.randn(head.weight.shape).to(torch.bfloat16)
    head.weight.data[700:] = 0  # lines of no token
    head.packed_weight = pack(head.weight)
    hidden = torch.randn(2, 128).to(torch.bfloat16)
    found = head.shard(hidden)
    assert found is not None and products == [2]
    assert torch.equal(found[0], F.linear(hidden, head.weight)) and found[1].first == 2048


def test_a_head_loaded_again_is_packed_again(tiny_checkpoint: Checkpoints, products: list[int]) -> None:
    shape = SHAPE | {"vocab_size": 512, "tie_word_embeddings": True}
    world, second = World(tiny_checkpoint("qwen3", **shape), pack=False), tiny_checkpoint("qwen3", seed=1, **shape)
    head = world.model.lm_head
    pack_products(world.model, {head: Order.UNITS})
    before = head.packed_weight.data.clone()
    world.model.load_weights(iterate_safetensors(second))
    assert not torch.equal(head.packed_weight.data, before) and torch.equal(unpack(head.packed_weight), head.weight)


# --------------------------------------------------------------------------- loaded again


def test_weights_loaded_again_are_packed_again_where_graphs_read_them(
    folder: Path, tiny_checkpoint: Checkpoints, calls: list[tuple[str, int]]
) -> None:
    world, second = World(folder), tiny_checkpoint("qwen3", seed=1, **SHAPE)
    before = world.packed()
    world.model.load_weights(iterate_safetensors(second))
    after, modules = world.packed(), dict(world.decoder.named_modules())
    assert after.keys() == before.keys() and all(after[name] is its for name, its in before.items())
    assert all(torch.equal(unpack(its), modules[name].weight) for name, its in after.items())
    assert torch.equal(world.steps(), World(second).steps())


def test_weights_that_do_not_fit_there_are_refused_and_none_is_stale(
    folder: Path, calls: list[tuple[str, int]]
) -> None:
    world = World(folder)

    def apart() -> Any:
        for name, tensor in iterate_safetensors(folder):
            if name.endswith("layers.1.mlp.down_proj.weight"):
                tensor = tensor * 2.0**110
                tensor[0, 0] = 2.0**-90
            yield name, tensor

    with pytest.raises(
        CheckpointError, match=r"model.layers.1.mlp.down_proj.weight has weights .* packed_weights=false"
    ):
        world.model.load_weights(apart())
    assert not world.packed()


def test_a_model_without_packed_weights_stays_so(folder: Path) -> None:
    world = World(folder, pack=False)
    world.model.load_weights(iterate_safetensors(folder))
    assert not world.packed()
