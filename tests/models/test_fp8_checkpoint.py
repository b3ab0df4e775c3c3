"""Checkpoints in FP8: the model gets what the written scales say, in every format, order and file; the rest is refused.

Tensors are written as each format's makers do. By block: transformers' ``Fp8Quantize``, and ``block_structure`` of
compressed-tensors. By row: (rows, 1) of compressed-tensors and of transformers' ``FbgemmFp8Linear``. By tensor: (1,) of
compressed-tensors; a number of ModelOpt, of transformers' ``FP8Linear`` (``weight_scale_inv``, ``activation_scale``),
and of what vLLM reads as fp8 without blocks (``weight_scale``, ``input_scale``). ModelOpt's older checkpoints have a
hf_quant_config.json instead of a quantization_config. transformers 5.24 with compressed-tensors 0.20 read such files,
where blocks divide the weights and scales are float32, into the parameters that are expected here; but for fbgemm's,
ModelOpt's and fp8 with ``weight_scale``, which it does not read on a CPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PagedRun, attention_spec, edit_json, reference_model, reference_tokens
from safetensors.torch import load_file, save_file

from minivllm import LLM, SamplingParams
from minivllm.backends.torch import TorchBackend
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError
from minivllm.models.checkpoint import read_model_config, read_quantization
from minivllm.models.fp8_checkpoint import dequantized, float_weights
from minivllm.models.fp8_config import Fp8Config
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.loader import build_model, iterate_safetensors
from minivllm.models.qwen3 import Qwen3ForCausalLM
from minivllm.models.upload import PinnedUpload

Checkpoints = Callable[..., Path]
FP8 = torch.float8_e4m3fn
PROMPTS = [[1, 5, 300], list(range(40, 70))]


# --------------------------------------------------------------------------- writing them


@dataclass(frozen=True)
class Format:
    """How a checkpoint is written. ``block``: rows and columns that share a scale; 0: all of them."""

    config: dict[str, Any]
    block: tuple[int, int] = (0, 0)
    scale: str = "weight_scale"
    shape: tuple[int, ...] | None = None  # of the scales, if it is not (blocks of rows, blocks of columns)
    dtype: torch.dtype = torch.float32  # of the scales
    beside: tuple[str, ...] = ()  # scales of activations, in each module
    cache: tuple[str, ...] = ()  # scales of keys and values, by module
    file: str = "config.json"


def compressed(**weights: Any) -> dict[str, Any]:
    """As llm-compressor's: ``ignore`` lists what has no scale."""
    args = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None} | weights
    group = {"targets": ["Linear"], "weights": args, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip


def fp8(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": None} | changes


KV = ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")
FORMATS = {
    "fp8 by block": Format(fp8(weight_block_size=[64, 64]), (64, 64), "weight_scale_inv"),
    "fp8 by oblong block": Format(fp8(weight_block_size=[40, 24]), (40, 24), "weight_scale_inv"),
    "fp8 by block of more than all": Format(fp8(weight_block_size=[128, 128]), (128, 128), "weight_scale_inv"),
    "fp8 in powers of two": Format(
        fp8(weight_block_size=[32, 48], scale_fmt="ue8m0"), (32, 48), "weight_scale_inv", dtype=torch.float8_e8m0fnu
    ),
    "fp8 by tensor": Format(fp8(activation_scheme="static"), shape=(), beside=("input_scale",)),
    "fp8 by tensor, transformers": Format(
        fp8(activation_scheme="static"), scale="weight_scale_inv", shape=(), beside=("activation_scale",)
    ),
    "compressed by tensor": Format(
        compressed(strategy="tensor"), shape=(1,), dtype=torch.bfloat16, beside=("input_scale",),
        cache=("self_attn.k_scale", "self_attn.v_scale"),
    ),
    "compressed by row": Format(compressed(strategy="channel"), (1, 0), dtype=torch.bfloat16),
    "compressed by block": Format(compressed(strategy="block", block_structure=[64, 48]), (64, 48)),
    "fbgemm": Format({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, (1, 0)),
    "modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        shape=(), beside=("input_scale",), cache=KV,
    ),
    "modelopt, older": Format(
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        shape=(), beside=("input_scale",), cache=KV, file="hf_quant_config.json",
    ),
}  # fmt: skip


def quantized(weight: torch.Tensor, how: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weight in FP8, its scales, and their product: block by block, for the scales to differ everywhere."""
    rows, columns = (of or size for of, size in zip(how.block, weight.shape, strict=True))
    values, product = torch.empty(weight.shape, dtype=FP8), torch.empty(weight.shape)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns), dtype=how.dtype)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            part = weight[place] * float(torch.empty(()).uniform_(0.2, 1.0))
            scales[i, j] = part.abs().max().div(200).to(how.dtype)  # 200: what is rounded up still fits
            scale = scales[i, j].float()
            values[place] = (part / scale).to(FP8)
            product[place] = values[place].float() * scale
    return values, scales if how.shape is None else scales.reshape(how.shape), product


def write(
    source: Path, folder: Path, how: Format, *, wanted: str = "_proj.weight", scales_first: bool = False
) -> tuple[Path, Path]:
    """(the checkpoint in FP8, in three files of which one holds the scales; the same dequantized, in float32)"""
    whole, parts = folder / "whole", folder / "fp8"
    for to in (whole, parts):
        shutil.copytree(source, to)
    tensors = load_file(source / "model.safetensors")
    scales, stored = {}, dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(wanted):
            stored[name], scale, tensors[name] = quantized(tensor, how)
            module = name.removesuffix(".weight")
            scales[f"{module}.{how.scale}"] = scale
            scales |= {f"{module}.{leaf}": torch.tensor(0.02) for leaf in how.beside}
    scales |= {f"model.layers.{layer}.{leaf}": torch.tensor(1.5) for layer in range(2) for leaf in how.cache}
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    (parts / "model.safetensors").unlink()
    names = list(stored)
    files = [{name: stored[name] for name in names[i::2]} for i in range(2)]
    files.insert(0 if scales_first else 2, scales)
    named = {f"model-{i}-of-3.safetensors": part for i, part in enumerate(files, 1)}
    for file, part in named.items():
        save_file(part, parts / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in named.items() for name in part}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    if how.file == "config.json":
        edit_json(parts / "config.json", quantization_config=how.config)
    else:
        (parts / how.file).write_text(json.dumps(how.config))
    return parts, whole


def build(folder: Path, *, dtype: torch.dtype = torch.float32, tp: TensorParallel | None = None) -> Any:
    config = read_model_config(folder)
    model_class = {c.__name__: c for c in (Qwen3ForCausalLM, LlamaForCausalLM)}[config.architecture]
    return build_model(model_class, config, tp or TensorParallel(), "cpu", dtype, float_weights(folder, "cpu"), 256)


def assert_same_parameters(one: torch.nn.Module, other: torch.nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert not [name for name, value in ours.items() if not torch.equal(value, theirs[name])]


# --------------------------------------------------------------------------- reading them


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scales_first", [False, True])
def test_every_format_gives_the_dequantized_checkpoint(
    tiny_checkpoint: Checkpoints, tmp_path: Path, name: str, scales_first: bool
) -> None:
    architecture = "llama" if scales_first else "qwen3"
    folder, whole = write(tiny_checkpoint(architecture), tmp_path, FORMATS[name], scales_first=scales_first)
    for dtype in (torch.float32, torch.bfloat16):
        assert_same_parameters(build(folder, dtype=dtype), build(whole, dtype=dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_and_logits_equal_transformers_on_the_dequantized_checkpoint(
    tiny_checkpoint: Checkpoints, tmp_path: Path, name: str
) -> None:
    folder, whole = write(tiny_checkpoint("qwen3"), tmp_path, FORMATS[name])
    model, config = build(folder), read_model_config(folder)
    said = PagedRun(model, TorchBackend(attention_spec(config)), 64, 2).greedy(PROMPTS, 8, 16)
    assert said == [reference_tokens(whole, prompt, 8) for prompt in PROMPTS]
    got = PagedRun(model, TorchBackend(attention_spec(config)), 64, 1).step([0], PROMPTS[1:], 0)
    with torch.inference_mode():
        want = reference_model(whole)(torch.tensor(PROMPTS[1:])).logits[:, -1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_says_the_tokens_of_the_dequantized_checkpoint(
    tiny_checkpoint: Checkpoints, tmp_path: Path, tp: int
) -> None:
    source = tiny_checkpoint("qwen3")
    folder, whole = write(source, tmp_path, FORMATS["fp8 by oblong block"])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), device="cpu", dtype="float32", tp=tp) as llm:
        said = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    assert said == [reference_tokens(whole, prompt, 8) for prompt in PROMPTS]
    assert said != [reference_tokens(source, prompt, 8) for prompt in PROMPTS], "the quantized weights differ"


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_get_their_slices(tiny_checkpoint: Checkpoints, tmp_path: Path, rank: int) -> None:
    folder, whole = write(tiny_checkpoint("llama"), tmp_path, FORMATS["fp8 by oblong block"])
    tp = TensorParallel(rank, 2)
    assert_same_parameters(build(folder, tp=tp), build(whole, tp=tp))


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_the_head_may_be_in_fp8(tiny_checkpoint: Checkpoints, tmp_path: Path, tied: bool) -> None:
    source = tiny_checkpoint("qwen3", tie_word_embeddings=tied)
    wanted = "embed_tokens.weight" if tied else "lm_head.weight"
    folder, whole = write(source, tmp_path, FORMATS["fp8 by oblong block"], wanted=wanted)
    model = build(folder)
    assert_same_parameters(model, build(whole))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_tied_embeddings_with_layers_in_fp8(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder, whole = write(tiny_checkpoint("llama", tie_word_embeddings=True), tmp_path, FORMATS["fbgemm"])
    assert_same_parameters(build(folder), build(whole))


def test_biases_are_left_as_they_are(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", attention_bias=True, mlp_bias=True)
    folder, whole = write(source, tmp_path, FORMATS["compressed by row"])
    assert_same_parameters(build(folder), build(whole))


# --------------------------------------------------------------------------- the stream


def test_a_weight_is_yielded_as_soon_as_its_scale_is_there() -> None:
    """In between other tensors, of experts, too; what has no scale is the very tensor that was read."""
    weight, norm = torch.randn(6, 4).to(FP8), torch.ones(4)
    expert, read = "model.layers.0.mlp.experts.3.up_proj", []
    stream = [
        ("a.weight", weight), (f"{expert}.weight_scale_inv", torch.tensor([[2.0], [3.0]])), ("norm.weight", norm),
        ("a.weight_scale", torch.tensor([0.5])), (f"{expert}.weight", weight), ("b.k_scale", torch.ones(1)),
    ]  # fmt: skip

    def reading() -> Any:
        for name, tensor in stream:
            read.append(name)
            yield name, tensor

    got = []
    for name, tensor in dequantized(reading(), Fp8Config((4, 4)), "cpu"):
        assert tensor is norm or tensor.dtype == torch.float32
        got.append((name, tensor, len(read)))
    assert [(name, after) for name, _, after in got] == [("norm.weight", 3), ("a.weight", 4), (f"{expert}.weight", 5)]
    factors = torch.tensor([2.0, 2, 2, 2, 3, 3])[:, None]
    assert got[0][1] is norm
    assert torch.equal(got[1][1], weight.float() * 0.5) and torch.equal(got[2][1], weight.float() * factors)


def test_without_a_quantization_config_every_tensor_is_left_as_it_is(tiny_checkpoint: Checkpoints) -> None:
    """Also those whose names would be scales' of activations."""
    folder = tiny_checkpoint("qwen3")
    assert read_quantization(folder) is None
    given = [*iterate_safetensors(folder), ("x.k_scale", torch.ones(1)), ("x.weight_scale", torch.ones(1))]
    got = list(dequantized(given, None, "cpu"))
    assert all(a is b for a, b in zip(got, given, strict=True) if a != b) and len(got) == len(given)


@pytest.mark.parametrize("scale", [torch.ones(()), torch.ones(6, 1), torch.ones(2, 2)])
def test_products_are_made_on_the_device(scale: torch.Tensor) -> None:
    weight = torch.randn(6, 10).to(FP8)
    [(_, got)] = dequantized([("a.weight", weight), ("a.weight_scale", scale)], Fp8Config((4, 8)), "meta")
    assert got.is_meta and got.dtype == torch.float32 and got.shape == (6, 10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
@pytest.mark.parametrize("shape", [(), (1000, 1), (8, 5)])
def test_a_gpu_multiplies_as_the_cpu_does(shape: tuple[int, ...]) -> None:
    tensors = {"a.weight": torch.randn(1000, 600).to(FP8), "a.weight_scale": torch.rand(shape)}
    [(_, want)] = dequantized(tensors.items(), Fp8Config((128, 128)), "cpu")
    with PinnedUpload():
        [(_, got)] = dequantized(tensors.items(), Fp8Config((128, 128)), "cuda")
    assert got.is_cuda and torch.equal(got.cpu(), want)


# --------------------------------------------------------------------------- what does not fit

W, S = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight_scale"  # (96, 64)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("modelopt", lambda t: t.pop(S), rf"1 in FP8 without a scale: {W}\. Are all its files there"),
        ("modelopt", lambda t: t.pop(W), rf"1 without a weight in FP8: {S}\."),
        ("modelopt", lambda t: t.update({W: t[W].float()}), rf"1 without a weight in FP8: {S}\."),
        ("modelopt", lambda t: t.update({W: t[W].view(torch.int8)}), rf"1 without a weight in FP8: {S}\."),
        ("modelopt", lambda t: t.update({W: t[W].to(torch.float8_e5m2)}), rf"e4m3: {W} of .*_e5m2; 1 without"),
        ("modelopt", lambda t: t.update({f"{S}_inv": t[S] * 2}), rf"1 misshapen: {S}_inv beside {S}\."),
        ("modelopt", lambda t: t.update({S: torch.ones(1, dtype=torch.uint8)}), rf"misshapen: {S} of dtype uint8"),
        (
            "modelopt",
            lambda t: t.update({S: torch.ones(64)}),
            rf"{S} \[64\] where {W} \[96, 64\] takes \[1\] or \[96, 1\]\.",
        ),
        ("fbgemm", lambda t: t.update({S: t[S].T.contiguous()}), rf"{S} \[1, 96\] where {W} \[96, 64\] takes"),
        (
            "compressed by block",
            lambda t: t.update({S: t[S].T.contiguous()[:1]}),
            rf"{S} \[1, 2\] where {W} \[96, 64\] takes \[1\] or \[96, 1\] or \[2, 2\] \(blocks of \[64, 48\]\)\.",
        ),
        ("compressed by block", lambda t: t.update({S: t[S][:1, :1]}), rf"1 misshapen: {S} \[1, 1\] where"),
    ],
)  # fmt: skip
def test_weights_and_scales_that_do_not_fit_are_named(
    tiny_checkpoint: Checkpoints, tmp_path: Path, name: str, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    folder, _ = write(tiny_checkpoint("qwen3"), tmp_path, FORMATS[name])
    tensors = {key: value.clone() for key, value in iterate_safetensors(folder)}
    for file in (*folder.glob("model-*"), folder / "model.safetensors.index.json"):
        file.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        build(folder)


def test_all_that_do_not_fit_are_named_at_once() -> None:
    weight = torch.ones(4, 4).to(FP8)
    stream = {"a.weight": weight, "b.weight": weight, "b.weight_scale": torch.ones(3), "c.weight_scale": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"misshapen: b\..*; 1 in FP8 .*: a\.weight; 1 without .*: c\."):
        list(dequantized(stream.items(), Fp8Config(), "cpu"))


def test_fp8_without_a_quantization_config_is_refused(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder, _ = write(tiny_checkpoint("qwen3"), tmp_path, FORMATS["fbgemm"])
    edit_json(folder / "config.json", "quantization_config")
    message = r"has 14 tensors in FP8, and its config.json no quantization_config: .*_proj.weight of .*_e4m3fn"
    with pytest.raises(CheckpointError, match=message):
        build(folder)


MIXED = compressed(strategy="block", block_structure=[128, 128])["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": ["fp8"]}, r"\['fp8'\]"),
        ({"bits": 4}, r"\{'bits': 4\}"),
        ("fp8", "'fp8'"),
        (fp8(fmt="e5m2"), "fp8 with fmt='e5m2'"),
        (fp8(expert_dtype="fp4"), "fp8 with expert_dtype='fp4'"),
        (fp8(weight_block_size=[128]), r"fp8 with weight_block_size=\[128\]"),
        (fp8(weight_block_size=[0, 128]), r"fp8 with weight_block_size=\[0, 128\]"),
        (fp8(weight_block_size=128), "fp8 with weight_block_size=128"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt with quant_algo='NVFP4'"),
        (compressed(type="int", strategy="channel"), "with weights of type='int', num_bits=8 .config_groups.group_0"),
        (compressed(num_bits=4, strategy="tensor_group"), "with weights of type='float', num_bits=4"),
        (compressed(strategy="group", group_size=128), "with strategy='group'"),
        (compressed(strategy="block"), "with block_structure=None"),
        (compressed(strategy="tensor", symmetric=False), "with symmetric=False"),
        (compressed() | {"format": "int-quantized"}, "with format='int-quantized' .config_groups.group_0"),
        (compressed() | {"format": "mixed-precision"}, "with format='mixed-precision'"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format='sparse-24"),
        (compressed() | {"transform_config": {"config_groups": {"R1": {}}}}, "with a transform_config"),
        (
            {**compressed(strategy="block", block_structure=[64, 64]), "config_groups": {
                "a": MIXED, "b": MIXED | {"weights": MIXED["weights"] | {"block_structure": [64, 64]}}}},
            r"with blocks of several sizes: \(64, 64\), \(128, 128\)",
        ),
    ],
)  # fmt: skip
def test_other_quantizations_are_refused_by_name(
    tiny_checkpoint: Checkpoints, tmp_path: Path, config: Any, named: str
) -> None:
    folder = shutil.copytree(tiny_checkpoint("qwen3"), tmp_path / "checkpoint")
    edit_json(folder / "config.json", quantization_config=config)
    with pytest.raises(CheckpointError, match=rf"config\.json says .* quantized by .*{named}.* reads those with FP8"):
        read_model_config(folder)


def test_modelopts_own_file_is_refused_by_its_name(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint("qwen3"), tmp_path / "checkpoint")
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A16_AWQ"}}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json says .* modelopt with quant_algo='W4A16_AWQ'"):
        read_model_config(folder)


def test_a_group_has_the_last_word_on_its_format(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """In a checkpoint of several formats; groups of activations or of the cache say nothing of the weights."""
    groups = {"a": MIXED | {"format": "float-quantized"}, "b": {"targets": ["LlamaAttention"], "weights": None}}
    groups["c"] = compressed(strategy="channel")["config_groups"]["group_0"] | {"format": "naive-quantized"}
    how = replace(FORMATS["compressed by row"], config=compressed() | {"format": "mixed", "config_groups": groups})
    folder, whole = write(tiny_checkpoint("llama"), tmp_path, how)
    assert read_quantization(folder) == Fp8Config((128, 128))
    assert_same_parameters(build(folder), build(whole))


def test_only_the_cache_quantized_leaves_the_weights_as_they_are(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    how = replace(FORMATS["modelopt"], config={"quant_method": "modelopt", "quant_algo": None})
    folder, whole = write(tiny_checkpoint("qwen3"), tmp_path, how, wanted="none")
    assert_same_parameters(build(folder), build(whole))
