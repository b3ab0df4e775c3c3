"""Weights in float8: which layers keep them so, what they are loaded from, on one rank and several."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from minivllm.core.model_config import FrozenDict, ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError, ConfigError
from minivllm.kernels.linear.fp8_linear import FP8, quantize
from minivllm.layers.fp8 import keep_weights_in_fp8
from minivllm.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    goes_with,
)
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.norm import RMSNorm
from minivllm.layers.parameter import Piece, load_piece, scales_of, sharded_parameter
from minivllm.models.loader import build_model, dummy_weights, load_weights, materialize, refuse_unscaled
from minivllm.models.qwen3 import Qwen3ForCausalLM

CPU = torch.device("cpu")


def config(**changes):
    sizes = {
        "architecture": "Qwen3ForCausalLM", "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96,
        "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
        "max_position": 256, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "hidden_act": "silu", "rope_parameters": FrozenDict(rope_type="default", rope_theta=1e4), "dtype": "float32",
    }  # fmt: skip
    return ModelConfig(**(sizes | changes))


def kept(make, device=CPU):
    """The module, on the meta device while it is decided, then with memory of its own."""
    with torch.device("meta"):
        module = make()
    keep_weights_in_fp8(module, device, torch.float32)
    materialize(module, device, torch.float32)
    return module


def floats(product):
    return product.weight.float() * product.weight_scale[:, None]


def in_float8(weight):
    values, scales, _ = quantize(weight)
    return values.float() * scales[:, None]


def test_linear_layers_are_kept_in_float8_and_nothing_else():
    model = build_model(Qwen3ForCausalLM, config(), TensorParallel(), CPU, torch.float32, 0, 64, "fp8")
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            assert module.weight.dtype == FP8 and module.weight_scale.shape == module.weight.shape[:1], name
        elif (weight := getattr(module, "weight", None)) is not None:
            assert weight.dtype == torch.float32, name
    assert not any(module.folded for module in model.modules() if hasattr(module, "folded"))


def test_a_model_with_weights_in_float8_is_the_one_without_nearly():
    plain, small = (
        build_model(Qwen3ForCausalLM, config(), TensorParallel(), CPU, torch.float32, 0, 64, how)
        for how in ("none", "fp8")
    )
    for ours, its in zip(plain.model.layers, small.model.layers, strict=True):
        torch.testing.assert_close(floats(its.mlp.down_proj), in_float8(ours.mlp.down_proj.weight))
    load_weights(small, ((n, p) for n, p in unstacked(plain)), Qwen3ForCausalLM.packed)  # again, over what is there
    torch.testing.assert_close(floats(small.model.layers[1].self_attn.o_proj), in_float8(
        plain.model.layers[1].self_attn.o_proj.weight))  # fmt: skip


def unstacked(model):
    """A checkpoint's tensors of a model on one rank whose norms are ones (nothing was folded on a CPU)."""
    for name, param in model.named_parameters():
        for shard, part in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), (0, "gate_proj"), (1, "up_proj")):
            pieces = getattr(param, "pieces", {})
            if shard in pieces:
                stack = "qkv_proj" if isinstance(shard, str) else "gate_up_proj"
                piece = pieces[shard]
                yield name.replace(stack, part), param.data[piece.offset : piece.offset + piece.length]
        if None in getattr(param, "pieces", {None: None}):
            yield name, param.data


class Rank(TensorParallel):
    def all_reduce(self, x):
        return x


@pytest.mark.parametrize("size", [1, 2])
def test_each_rank_scales_its_own_slice(size):
    """Column-parallel ranks hold the rows that one rank would; row-parallel ones find scales of their columns."""
    q, k, v = torch.randn(64, 32), torch.randn(32, 32), torch.randn(32, 32)
    gate, up, down, wide = torch.randn(96, 32), torch.randn(96, 32), torch.randn(32, 96), torch.randn(64, 32)
    down[:, 50] *= 100  # in the second rank's part alone
    for rank in range(size):
        tp = Rank(rank, size)

        def block(tp=tp):
            return nn.ModuleDict({
                "qkv": QKVParallelLinear(32, 4, 2, 16, tp), "up": MergedColumnParallelLinear(32, [96, 96], tp),
                "down": RowParallelLinear(96, 32, tp), "wide": ColumnParallelLinear(32, 64, tp),
            })  # fmt: skip

        module = kept(block)
        for shard, part in zip("qkv", (q, k, v), strict=True):
            load_piece(module["qkv"].weight, part, shard)
        load_piece(module["up"].weight, torch.cat([gate, up]))  # stacked as they are here
        load_piece(module["down"].weight, down.bfloat16())
        load_piece(module["wide"].weight, wide)

        def mine(t, dim=0, rank=rank):
            return in_float8(t.chunk(size, dim)[rank])

        torch.testing.assert_close(floats(module["qkv"]), torch.cat([mine(q), mine(k), mine(v)]))
        torch.testing.assert_close(floats(module["up"]), torch.cat([mine(gate), mine(up)]))
        torch.testing.assert_close(floats(module["down"]), mine(down.bfloat16().float(), 1))
        torch.testing.assert_close(floats(module["wide"]), mine(wide))


def test_a_checkpoint_with_a_scale_a_row_keeps_its_numbers():
    values, scales, _ = quantize(torch.randn(64, 96) * torch.logspace(-3, 3, 64)[:, None])
    product = kept(lambda: RowParallelLinear(96, 64, TensorParallel()))
    load_piece(product.weight, values.float() * scales[:, None])
    assert torch.equal(product.weight.view(torch.uint8), values.view(torch.uint8))
    torch.testing.assert_close(product.weight_scale, scales)


@pytest.mark.parametrize("bias", [False, True])
def test_products_with_norms_and_sums_are_those_of_their_weights(bias):
    torch.manual_seed(1)
    its = config(mlp_bias=bias)
    mlp = kept(lambda: GatedMLP(its, TensorParallel()))
    dummy_weights(mlp, 0, {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)})
    norm = RMSNorm(64, 1e-6)
    norm.weight.data = torch.rand(64) + 0.5
    x = torch.randn(5, 64)
    up, down = mlp.gate_up_proj, mlp.down_proj
    gate_up = in_float8(norm(x)) @ floats(up).t() + (up.bias if bias else 0)
    gate, other = gate_up.chunk(2, 1)
    expected = x + in_float8(nn.functional.silu(gate) * other) @ floats(down).t() + (down.bias if bias else 0)
    stream = x.clone()
    assert mlp(stream, norm) is stream
    torch.testing.assert_close(stream, expected)
    torch.testing.assert_close(up.after_norm(x, norm), gate_up)
    torch.testing.assert_close(up(norm(x)), gate_up)

    def doubled(module, args, out):
        return 2 * out

    hook = up.register_forward_hook(doubled)
    torch.testing.assert_close(up.after_norm(x, norm), 2 * gate_up)
    hook.remove()
    down.register_forward_hook(doubled)
    torch.testing.assert_close(mlp(x.clone(), norm), x + 2 * (expected - x))


class Own(RowParallelLinear):
    """Reads its weight itself."""

    def forward(self, x):
        return x @ self.weight.t()


class Adds(RowParallelLinear):
    """The same, elsewhere."""

    def add_to(self, residual, x):
        return residual.addmm_(x, self.weight.t())


def test_layers_that_read_their_weight_themselves_keep_it():
    tp = TensorParallel()

    def own_loader():
        product = ColumnParallelLinear(64, 64, tp)
        product.weight.weight_loader = lambda param, loaded, shard_id: param.data.copy_(loaded)
        return product

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.usual = MergedColumnParallelLinear(64, [1024], tp)
            self.router, self.own, self.loader = ReplicatedLinear(64, 8), Own(64, 64, tp), own_loader()
            self.odd, self.row = ColumnParallelLinear(64, 40, tp), RowParallelLinear(64, 64, tp)
            self.adds, self.mlp = Adds(64, 64, tp), GatedMLP(config(), tp)
            self.mlp.activation = gelu_gate_up

    module = kept(Mixed)
    dtypes = {name: child.weight.dtype for name, child in module.named_modules() if hasattr(child, "weight")}
    whole = "router", "own", "loader", "odd", "adds", "mlp.gate_up_proj"
    assert dtypes == dict.fromkeys(whole, torch.float32) | dict.fromkeys(("usual", "row", "mlp.down_proj"), FP8)


class AddsOnly(nn.Module):
    """What stands in a product's place need not be one."""

    def __init__(self, product):
        super().__init__()
        self.product = product

    def add_to(self, residual, x):
        return self.product.add_to(residual, x)


def test_a_module_in_a_products_place_gets_numbers_not_rows_of_float8():
    mlp, x = kept(lambda: GatedMLP(config(), TensorParallel())), torch.randn(5, 64)
    dummy_weights(mlp, 0, {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)})
    norm = RMSNorm(64, 1e-6)
    norm.weight.data.fill_(1.0)
    expected = mlp(x.clone(), norm)
    mlp.down_proj = AddsOnly(mlp.down_proj)
    torch.testing.assert_close(mlp(x.clone(), norm), expected)


def gelu_gate_up(x, norm_weight, eps, weight, bias=None, folded=False):
    gate, up = nn.functional.linear(nn.functional.rms_norm(x, x.shape[1:], norm_weight, eps), weight, bias).chunk(2, 1)
    return nn.functional.gelu(gate) * up


def test_an_activation_of_ones_own_gets_the_weight_as_it_is():
    def block():
        mlp = GatedMLP(config(intermediate_size=512), TensorParallel())
        mlp.activation = gelu_gate_up
        return nn.ModuleDict({"mlp": mlp, "more": ColumnParallelLinear(64, 1024, TensorParallel())})

    mlp = kept(block)["mlp"]
    dummy_weights(mlp, 0, {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)})
    norm, x = RMSNorm(64, 1e-6), torch.randn(5, 64)
    norm.weight.data = torch.rand(64) + 0.5
    y = in_float8(gelu_gate_up(x, norm.weight, norm.eps, mlp.gate_up_proj.weight))
    torch.testing.assert_close(mlp(x.clone(), norm), x + y @ floats(mlp.down_proj).t())
    late = kept(lambda: GatedMLP(config(), TensorParallel()))
    late.activation = gelu_gate_up
    with pytest.raises(TypeError, match="gets the weight of gate and up, which quantization=fp8 changes"):
        late(x, norm)


def test_a_weight_that_is_written_past_its_loader_is_refused():
    class Writes(Qwen3ForCausalLM):
        def load_weights(self, weights):
            for param in self.parameters():
                param.data.copy_(torch.ones_like(param, dtype=torch.float32))

    with pytest.raises(CheckpointError, match=r"quantization=fp8: model\.layers\.0\.self_attn\.qkv_proj\.weight holds"):
        build_model(Writes, config(), TensorParallel(), CPU, torch.float32, iter(()), 64, "fp8")


def test_memory_is_counted_as_it_is_kept(monkeypatch):
    """A model that fits in float8 only."""
    sizes = {"num_layers": 8, "vocab_size": 16}
    whole = sum(p.numel() for p in Qwen3ForCausalLM(config(**sizes), TensorParallel()).parameters()) * 4
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": whole // 2}.__getitem__)
    args = Qwen3ForCausalLM, config(**sizes), TensorParallel(), CPU, torch.float32, 0, 64
    build_model(*args, "fp8")
    with pytest.raises(ConfigError, match="GiB in float32, more than"):
        build_model(*args)
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": whole // 8}.__getitem__)
    with pytest.raises(ConfigError, match="GiB in float32 and float8_e4m3fn, more than"):
        build_model(*args, "fp8")


def test_large_vocabularies_do_not_count_and_inputs_may_have_more_dimensions():
    model = build_model(Qwen3ForCausalLM, config(vocab_size=5000), TensorParallel(), CPU, torch.float32, 0, 64, "fp8")
    product, x = model.model.layers[0].mlp.down_proj, torch.randn(2, 3, 96)
    torch.testing.assert_close(product(x), torch.stack([product(x[0]), product(x[1])]))
    assert not goes_with(product, model.model.norm)
    again = copy.deepcopy(product)
    torch.testing.assert_close(again(x), product(x))


def test_a_model_of_which_little_would_be_in_float8_is_refused():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = RowParallelLinear(64, 64, TensorParallel())
            self.experts = sharded_parameter((8, 64, 64), {})

    told = r"keep 11% of the weights of Experts's layers in float8, and not \.experts \[8, 64, 64\].* may_be_fp8; leave"
    with pytest.raises(ConfigError, match=told):
        kept(Experts)


class Stack(nn.Module):
    """Three matrices, each rank with its rows (dim 0) or columns (dim 1) of them. The module multiplies one of them."""

    weight_scale = None

    def __init__(self, tp, dim, **options):
        super().__init__()
        whole = [96, 64]
        shape = [size // (tp.size if i == dim else 1) for i, size in enumerate(whole)]
        pieces = {e: Piece(tuple(whole), dim, tp.rank * shape[dim], shape[dim], item=e) for e in range(3)}
        self.weight = sharded_parameter((3, *shape), pieces, **options)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [1, 2])
def test_a_module_that_says_so_has_its_stack_in_float8(size, dim):
    whole = torch.randn(3, 96, 64)
    for rank in range(size):
        module = kept(lambda rank=rank: Stack(TensorParallel(rank, size), dim, may_be_fp8=True))
        assert module.weight.dtype == FP8 and module.weight_scale.shape == module.weight.shape[:2]
        with pytest.raises(CheckpointError, match=r"quantization=fp8: weight holds what is no finite number"):
            refuse_unscaled(module)
        for item in (2, 0, 1):
            load_piece(module.weight, whole[item], item)
        mine = whole.chunk(size, 1 + dim)[rank]
        torch.testing.assert_close(
            module.weight.float() * module.weight_scale[..., None], torch.stack([in_float8(its) for its in mine])
        )
        refuse_unscaled(module)
        (told,) = scales_of(nn.ModuleDict({"mlp": copy.deepcopy(module)}))
        assert told[0] == "mlp.weight" and torch.equal(told[1], module.weight_scale)


def test_what_else_has_such_a_name_is_no_scale():
    module = Stack(TensorParallel(), 0)
    module.weight_scale = 0.5
    assert list(scales_of(module)) == []
    refuse_unscaled(module)


def test_a_stack_is_loaded_as_it_is_without_quantization():
    with torch.device("meta"):
        module = Stack(TensorParallel(1, 2), 1, may_be_fp8=True)
    materialize(module, CPU, torch.bfloat16)
    whole = torch.randn(3, 96, 64)
    for item in range(3):
        load_piece(module.weight, whole[item], item)
    assert torch.equal(module.weight, whole[:, :, 32:].bfloat16()) and module.weight_scale is None


@pytest.mark.parametrize("how", ["says nothing", "loads itself", "has part of a row", "lacks an item"])
def test_stacks_that_cannot_be_in_float8_are_not(how):
    def make():
        stack = Stack(TensorParallel(), 1, may_be_fp8=how != "says nothing")
        if how == "loads itself":
            stack.weight.weight_loader = lambda param, loaded, shard_id: param.data.copy_(loaded)
        elif how == "has part of a row":
            stack.weight.pieces[1] = Piece((96, 32), 1, item=1)
        elif how == "lacks an item":
            del stack.weight.pieces[1]
        return stack

    with pytest.raises(ConfigError, match=r"keep 0% of .* and not \.weight \[3, 96, 64\]"):
        kept(make)


@pytest.mark.parametrize(
    ("capability", "dtype", "message"),
    [
        ((8, 0), torch.bfloat16, r"quantization=fp8: Some GPU has no float8, an H100"),
        ((9, 0), torch.float16, r"computes in dtype=bfloat16, not float16; type dtype=bfloat16"),
        ((9, 0), torch.float32, r"computes in dtype=bfloat16, not float32; type dtype=bfloat16"),
    ],
)
def test_gpus_and_dtypes_without_such_products_are_refused(monkeypatch, capability, dtype, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    with pytest.raises(ConfigError, match=message):
        keep_weights_in_fp8(RowParallelLinear(64, 64, TensorParallel()), torch.device("cuda", 0), dtype)
