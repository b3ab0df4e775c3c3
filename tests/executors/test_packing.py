"""Whether weights are packed: what keeps a model from it, what is said then, and what is left for the cache. As if
every CUDA device were a Hopper GPU, and no layer too small."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from minivllm import LLM
from minivllm.config.compose import compose_engine_config
from minivllm.config.engine_config import CacheOptions, EngineConfig
from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import ConfigError
from minivllm.executors import packing
from minivllm.executors.packing import compile_for_packing, pack_weights
from minivllm.kernels.linear import packed_chain, packed_weights
from minivllm.kernels.linear.packed_chain import packed_chain_config, packed_kernel, packed_rows
from minivllm.kernels.linear.packed_linear import linear_config, linear_kernel
from minivllm.kernels.linear.packed_weights import Order, packed_bytes
from minivllm.kernels.megakernel import megakernel
from minivllm.kernels.megakernel.megakernel import megakernel_config, megakernel_of
from minivllm.layers.fused import chain_shape, dense_shape
from minivllm.layers.linear import LinearBase
from minivllm.layers.packed import packed_ways
from minivllm.models.checkpoint import read_model_config
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.loader import build_model, norm_pairs
from minivllm.models.qwen3 import Qwen3ForCausalLM

Checkpoints = Callable[..., Path]
_Config = TypeVar("_Config")
SHAPE = {"num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
SIZES = (256, 256), (768, 256), (256, 384), (512, 256)  # of o, gate and up, down, and qkv
NEEDED = 3 * sum(packed_bytes(*size) for size in SIZES)
ROWS = packed_chain._ROWS
ALONE = TensorParallel()
CUDA, BF16 = torch.device("cuda", 0), torch.bfloat16

MEMORY: Any = None  # a MemoryShare, by the fixture ``gpu``


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What it says of itself; tests change that."""
    its = SimpleNamespace(free=100 * NEEDED, hopper=True, runs=True, compiled=[])
    monkeypatch.setattr(packing.nvrtc, "available", lambda device: its.hopper and device.type == "cuda")
    monkeypatch.setattr(packing, "use_packed", lambda rows, shape, dtype, device: its.runs)
    monkeypatch.setattr(packing, "use_megakernel", lambda shape, rows, dtype, device, packed: its.runs and packed)
    monkeypatch.setattr(packing, "use_packed_linear", lambda rows, lines, k, dtype, device: its.runs)
    monkeypatch.setattr(packing, "compile_ahead", its.compiled.append)
    monkeypatch.setattr(packed_weights, "loads", lambda kernel, device: False)
    monkeypatch.setattr(sys.modules[__name__], "MEMORY", SimpleNamespace(left=lambda: its.free))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(packed_chain, "_ROWS", ((0, range(1, 65)),))
    return its


@pytest.fixture
def model(tiny_checkpoint: Checkpoints) -> Any:
    return build(tiny_checkpoint)


def build(tiny_checkpoint: Checkpoints, fold: bool = True, **changes: Any) -> Any:
    config = read_model_config(tiny_checkpoint("llama", **SHAPE | changes))
    model: Any = build_model(LlamaForCausalLM, config, TensorParallel(), "cpu", BF16, 0, 256)
    for norm, product in norm_pairs(model) if fold else ():
        product.fold(norm)
    return model


def packed(model: nn.Module) -> int:
    return sum(isinstance(module, LinearBase) and module.packed_weight is not None for module in model.modules())


def ask(
    model: Any, asked: str = "auto", *, dtype: torch.dtype = BF16, device: torch.device = CUDA, needs: float = 0,
    plain: bool = True, tp: Any = ALONE, **config: Any,
) -> bool:  # fmt: skip
    """``needs``: of the cache, in packed models."""
    engine_config = EngineConfig(packed_weights=asked, **config)
    return pack_weights(model, engine_config, tp, dtype, device, MEMORY, int(needs * NEEDED), plain)


@pytest.mark.parametrize("asked", ["auto", "true", "false"])
def test_it_is_done_unless_it_is_not_wished(gpu: SimpleNamespace, model: Any, asked: str) -> None:
    assert ask(model, asked) == (asked != "false")
    assert packed(model) == (0 if asked == "false" else 12)
    copies = [module.packed_weight for module in model.modules() if isinstance(module, LinearBase)]
    assert sum(copy.data.numel() for copy in copies if copy) == (0 if asked == "false" else NEEDED)


def test_what_packs_is_compiled_while_weights_come(
    gpu: SimpleNamespace, tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "num_sms", lambda device: 4)
    tiny = read_model_config(tiny_checkpoint("llama", **SHAPE | {"vocab_size": 384}))
    compile_for_packing(EngineConfig(packed_weights="false"), tiny, BF16, CUDA)
    compile_for_packing(EngineConfig(), tiny, torch.float16, CUDA)
    compile_for_packing(EngineConfig(), tiny, BF16, torch.device("cpu"))
    assert not gpu.compiled
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 512 * 256)
    wide = read_model_config(tiny_checkpoint("llama", **SHAPE | {"vocab_size": 512}))
    mixture = replace(wide, hf_config=wide.hf_config | {"num_local_experts": 8})
    expected = (tiny, {"packed_chain"}), (wide, {"packed_chain", "packed_linear"}), (mixture, {"packed_linear"})
    for config, names in expected:
        gpu.compiled.clear()
        compile_for_packing(EngineConfig(), config, BF16, CUDA)
        assert {kernel.name for kernel in gpu.compiled} == {"pack_weights"} | names
    gpu.compiled.clear()
    compile_for_packing(EngineConfig(quantization="fp8"), wide, BF16, CUDA)
    assert {kernel.name for kernel in gpu.compiled} == {"pack_weights", "packed_linear"}


@pytest.mark.parametrize(
    ("name", "tp", "ways"),
    [
        ("qwen3-8b", 1, {"packed_chain", "megakernel"}), ("qwen3", 1, set()), ("llama", 1, {"megakernel"}),
        ("llama-8b", 1, {"packed_chain", "megakernel"}), ("qwen3-14b", 2, {"megakernel"}), ("qwen3", 2, set()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("float8", [False, True])  # the cache
def test_those_are_the_kernels_that_are_asked_for(
    name: str, tp: int, ways: set[str], float8: bool, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_chain, "_ROWS", ROWS)
    monkeypatch.setattr(packing, "num_sms", lambda device: 132)
    config = ModelConfig.from_hf(compose_engine_config(name, load_format="dummy").model.hf_config)
    compile_for_packing(EngineConfig(tp=tp, cache=CacheOptions(dtype="fp8" if float8 else "auto")), config, BF16, CUDA)
    model_class: Any = Qwen3ForCausalLM if name.startswith("qwen3") else LlamaForCausalLM
    words: Any = object()
    with torch.device("meta"):
        model = model_class(replace(config, num_layers=2), TensorParallel(0, tp, words=words))
    for _, product in norm_pairs(model):
        product.folded = True
    lines, k = model.lm_head.weight.shape
    asked = {packed_weights.PACK_KERNEL}
    if lines * k >= packing.MIN_WEIGHTS:
        asked.add(linear_kernel(lines, k, config_of(linear_config(1, lines, k, 132))))
    layers = list(model.model.layers)
    dense = dense_shape(layers, model.model.tp)
    assert dense is not None
    chain, whole, order = packed_ways(chain_shape(layers), replace(dense, float8_cache=float8), tp)
    if chain is not None:
        asked.add(packed_kernel(chain, config_of(packed_chain_config(packed_rows(chain)[0], chain, 132))))
    if whole is not None and (cut := megakernel_config(whole, 1, 132, order)):
        asked.add(megakernel_of(whole, cut))
    assert set(gpu.compiled) == asked
    if float8 and config.head_dim == 64:
        ways = ways - {"megakernel"}  # it reads no such cache
    assert {kernel.name for kernel in asked} - {"pack_weights", "packed_linear"} == ways


def config_of(config: _Config | None) -> _Config:
    assert config is not None
    return config


REASONS = {
    "attention": ({"plain": False}, "with this attention, layers of 0 million weights are not read packed"),
    "CPU": ({"device": torch.device("cpu")}, r"device=cpu is no Hopper GPU \(H100, H200\)"),
    "dtype": ({"dtype": torch.float16}, "dtype=bfloat16 are packed, not of dtype=float16"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_keeps_it_from_it_is_said_to_who_asks(
    gpu: SimpleNamespace, model: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_chain, "_ROWS", ())
    monkeypatch.setattr(megakernel, "_PACKED_ROWS", dict.fromkeys(Order, ((0, range(1, 3)),)))
    options, says = REASONS[reason]
    refused(model, says, **options)


def refused(model: Any, says: str, **options: Any) -> None:
    assert not ask(model, **options) and not packed(model)
    with pytest.raises(ConfigError, match=rf"^packed_weights=true, but .*{says}.*; packed_weights=auto packs where it"):
        ask(model, "true", **options)
    assert not packed(model)


def test_other_gpus_are_named(gpu: SimpleNamespace, model: Any) -> None:
    gpu.hopper = False
    refused(model, "NVIDIA A100 is no Hopper GPU")


def test_a_kernel_that_does_not_run_is_no_use(gpu: SimpleNamespace, model: Any) -> None:
    gpu.runs = False
    refused(model, "is not for the sizes of the layers of LlamaForCausalLM, or does not run here")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_is_asked_of_the_kernel_of_all_layers_with_the_cache_that_there_is(
    head_dim: int, gpu: SimpleNamespace, tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fits(shape: Any, rows: int, dtype: Any, device: Any, order: Order) -> bool:
        return shape.head_dim == 128 or not shape.float8_cache

    monkeypatch.setattr(packing, "use_megakernel", fits)
    monkeypatch.setattr(packed_chain, "_ROWS", ())  # nothing else reads packed weights
    monkeypatch.setattr(megakernel, "_PACKED_ROWS", dict.fromkeys(Order, ((0, range(1, 3)),)))
    model = build(tiny_checkpoint, head_dim=head_dim)
    assert ask(model, cache=CacheOptions(dtype="fp8")) == (head_dim == 128)
    assert ask(model)


def test_sizes_that_are_no_whole_units(gpu: SimpleNamespace, tiny_checkpoint: Checkpoints) -> None:
    refused(build(tiny_checkpoint, intermediate_size=320), "is not for the sizes of the layers")


def test_small_layers(gpu: SimpleNamespace, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_chain, "_ROWS", ((1 << 27, range(1, 65)),))
    refused(model, "in layers of 0 million weights packed ones are not faster")


def test_heads_without_layers_and_layers_without_heads(
    gpu: SimpleNamespace, tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 512 * 256)
    small = build(tiny_checkpoint, vocab_size=384)
    assert ask(small, "true") and packed(small) == 12 and small.lm_head.packed_weight is None
    model = build(tiny_checkpoint, vocab_size=512)
    assert ask(model) and model.lm_head.packed_weight is not None and packed(model) == 12
    monkeypatch.setattr(packed_chain, "_ROWS", ())
    model = build(tiny_checkpoint, vocab_size=512)
    assert ask(model) and not packed(model)
    says = "in LM heads of 0 million weights .* not faster, and in layers of 0 million weights .* not faster"
    refused(build(tiny_checkpoint, vocab_size=384), says)


def test_either_way_of_reading_layers_is_enough(
    gpu: SimpleNamespace, tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    chained, whole = ((0, range(1, 65)),), ((0, range(1, 3)),)
    for rows, at_once, plain, is_packed in (
        (chained, whole, True, True), (chained, whole, False, True), (chained, (), True, True), ((), whole, True, True),
        ((), whole, False, False), ((), (), True, False),
    ):  # fmt: skip
        monkeypatch.setattr(packed_chain, "_ROWS", rows)
        monkeypatch.setattr(megakernel, "_PACKED_ROWS", dict.fromkeys(Order, at_once))
        model = build(tiny_checkpoint)
        assert ask(model, plain=plain) == is_packed and packed(model) == 12 * is_packed
        copies = (its.packed_weight for its in model.modules() if isinstance(its, LinearBase))
        assert {copy.order for copy in copies if copy} == (
            {Order.UNITS if rows else Order.LINES} if is_packed else set()
        )


def test_each_shape_of_layers_lies_as_its_kernels_read_it(
    gpu: SimpleNamespace, tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ModuleDict({"small": build(tiny_checkpoint), "large": build(tiny_checkpoint, intermediate_size=768)})
    weights = {name: chain_shape(list(its.model.layers)).weights for name, its in model.items()}
    monkeypatch.setattr(packed_chain, "_ROWS", ((weights["large"], range(1, 65)),))
    monkeypatch.setattr(megakernel, "_PACKED_ROWS", {Order.UNITS: (), Order.LINES: ((weights["small"], range(1, 3)),)})
    assert ask(model) and packed(model) == 24
    for name, order in ("small", Order.LINES), ("large", Order.UNITS):
        copies = [its.packed_weight for its in model[name].modules() if isinstance(its, LinearBase)]
        assert {copy.order for copy in copies if copy} == {order}


def test_who_asks_is_not_given_a_part_of_what_would_be_faster(
    gpu: SimpleNamespace, tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 0)
    gpu.free = 4 * NEEDED - 8  # the head has 8 units
    model = build(tiny_checkpoint, vocab_size=512)
    assert ask(model) and not packed(model)
    gpu.free = NEEDED - 8
    with pytest.raises(ConfigError, match=r"they take 0\.0 GiB of the 0\.0 that are left"):
        ask(model, "true")
    wide = build(tiny_checkpoint, vocab_size=320)  # the head's lines are no whole blocks
    gpu.free = 100 * NEEDED
    assert ask(wide) and packed(wide) == 12 and wide.lm_head.packed_weight is None
    with pytest.raises(ConfigError, match="not for the sizes of the LM heads of LlamaForCausalLM"):
        ask(wide, "true")


@pytest.mark.parametrize("other", [True, False])
def test_ranks_agree(gpu: SimpleNamespace, model: Any, other: bool) -> None:
    """A kernel of all ranks' layers waits for the other ranks."""
    told: list[int] = []
    tp = SimpleNamespace(size=2, minimum=lambda number, device: told.append(number) or min(number, int(other)))
    assert ask(model, tp=tp) == other and packed(model) == 12 * other and told == [0, 1], "the head is too small"
    gpu.runs = False
    told.clear()
    assert not ask(model, tp=tp) and told == [0, 0], "it says so before it goes on"
    if not other:
        gpu.runs = True
        with pytest.raises(ConfigError, match="layers of LlamaForCausalLM are not packed on another rank"):
            ask(model, "true", tp=tp)


class OwnModel(nn.Module):
    """A plugin's."""


def test_layers_of_another_kind(gpu: SimpleNamespace, tiny_checkpoint: Checkpoints) -> None:
    refused(OwnModel(), "the layers of OwnModel are not of the kind")
    refused(build(tiny_checkpoint, fold=False), "the layers of LlamaForCausalLM")
    refused(build(tiny_checkpoint, num_hidden_layers=1), "the layers of LlamaForCausalLM")
    mixed = build(tiny_checkpoint)
    own = mixed.model.layers[1].mlp.down_proj
    own.weight.data = own.weight.data.float()
    refused(mixed, "the layers of LlamaForCausalLM")


def test_a_weight_that_cannot_be_packed(gpu: SimpleNamespace, model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.weight.data[5, ::2] *= 2.0**-60
    refused(model, r"model\.layers\.0\.self_attn\.o_proj\.weight has weights whose exponents lie too far apart")


# --------------------------------------------------------------------------- memory


def test_three_quarters_are_left_for_the_cache_unless_it_is_asked_for(gpu: SimpleNamespace, model: Any) -> None:
    gpu.free = 4 * NEEDED - 8
    assert not ask(model) and not packed(model)
    assert ask(model, "true") and packed(model) == 12


@pytest.mark.parametrize("more", [0, 8])
def test_exactly_three_quarters_are_enough(gpu: SimpleNamespace, model: Any, more: int) -> None:
    gpu.free = 4 * NEEDED + more
    assert ask(model)


def test_a_cache_that_is_asked_for_comes_first(gpu: SimpleNamespace, model: Any) -> None:
    gpu.free = 5 * NEEDED
    refused(model, r"they take 0.0 GiB of the 0.0 that are left, .* lower cache.num_blocks", needs=3.8)
    assert ask(model, needs=3.5)


def test_there_has_to_be_room_at_all(gpu: SimpleNamespace, model: Any) -> None:
    gpu.free = NEEDED - 8
    refused(model, "raise cache.gpu_memory_utilization=0.9")


# --------------------------------------------------------------------------- an engine


def test_an_engine_tells() -> None:
    with LLM("demo", device="cpu") as llm:
        assert llm.engine.describe()["packed_weights"] is False
    with pytest.raises(ConfigError, match="packed_weights=true, but device=cpu is no Hopper GPU"):
        LLM("demo", device="cpu", overrides=["packed_weights=true"])
