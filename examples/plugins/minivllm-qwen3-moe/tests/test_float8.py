"""Experts with ``quantization=fp8``: what is kept, from which checkpoints, on one rank and two, and what is said."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from minivllm_qwen3_moe.model import Qwen3MoeForCausalLM
from safetensors.torch import save_file

from minivllm import LLM, SamplingParams
from minivllm.core.parallel import TensorParallel
from minivllm.errors import ConfigError
from minivllm.kernels.linear.fp8_linear import quantize
from minivllm.models.checkpoint import read_model_config
from minivllm.models.fp8_checkpoint import float_weights
from minivllm.models.loader import build_model, iterate_safetensors
from minivllm.models.reloading import reload_model
from minivllm.testing.checkpoints import random_checkpoint, reference_model
from minivllm.testing.outputs import common_tokens

ONE, FP8 = TensorParallel(), torch.float8_e4m3fn
CONFIG = {
    "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True,
}  # fmt: skip
PROMPTS = [[random.Random(n).randrange(512) for _ in range(n)] for n in (1, 2, 9, 40)]
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
BLOCK = 24  # of a checkpoint's scales: neither size is a multiple


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeForCausalLM as Reference

    return random_checkpoint(tmp_path_factory.mktemp("moe"), Reference, CONFIG)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Each row in float8, and back."""
    values, scales, _ = quantize(x.flatten(0, -2))
    return (values.float() * scales[:, None]).view(x.shape)


def build(folder: Path, weights: Iterable[tuple[str, torch.Tensor]] | int, tp: TensorParallel = ONE) -> Any:
    return build_model(Qwen3MoeForCausalLM, read_model_config(folder), tp, "cpu", torch.float32, weights, 64, "fp8")


def experts_of(model: Any, layer: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up (experts, 2 * inner, hidden) and down (experts, hidden, inner) as they are multiplied."""
    weights = model.get_submodule(f"model.layers.{layer}.mlp")._weights()
    assert weights.gate_up.dtype == weights.down.dtype == FP8
    return weights.gate_up.float() * weights.gate_up_scale[..., None], weights.down.float() * weights.down_scale[
        ..., None
    ]


def of_checkpoint(tensors: dict[str, torch.Tensor], layer: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a checkpoint's tensors."""
    part = {
        name: torch.stack(
            [tensors[f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.weight"].float() for e in range(8)]
        )
        for name in ("gate", "up", "down")
    }
    return torch.cat([part["gate"], part["up"]], 1), part["down"]


def changed(folder: Path, to: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, to / "model.safetensors")
    its = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(its | config))
    return to


# --------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("dummy", [False, True])
def test_experts_are_kept_in_half_the_memory_and_routers_are_not(checkpoint: Path, dummy: bool) -> None:
    model = build(checkpoint, 7 if dummy else iterate_safetensors(checkpoint))
    kept = {name: param for name, param in model.named_parameters() if param.dtype == FP8}
    names = {".".join(name.split(".")[3:]) for name in kept}
    experts = {"mlp.gate_up_experts.weight", "mlp.down_experts.weight"}
    assert names == experts | {"self_attn.qkv_proj.weight", "self_attn.o_proj.weight"}
    mlp = model.get_submodule("model.layers.0.mlp")
    assert mlp.gate.weight.dtype == torch.float32 and mlp.routed_experts() is None
    held = [mlp.gate_up_experts.weight, mlp.down_experts.weight]
    scales = [mlp.gate_up_experts.weight_scale, mlp.down_experts.weight_scale]
    assert sum(its.nbytes for its in held) == 8 * 3 * 64 * 64
    assert sum(its.nbytes for its in scales) == 4 * 8 * 3 * 64
    assert all(its.isfinite().all() and (its > 0).all() for its in scales)
    if not dummy:
        for mine, its in zip(experts_of(model), of_checkpoint(dict(iterate_safetensors(checkpoint))), strict=True):
            torch.testing.assert_close(mine, rounded(its))


@pytest.mark.parametrize("dummy", [False, True])
def test_ranks_scale_slices_of_every_expert(checkpoint: Path, dummy: bool) -> None:
    """Of gate and up a rank has whole rows, as one rank would; of down it scales its own columns."""
    config = read_model_config(checkpoint)
    plain = build_model(
        Qwen3MoeForCausalLM, config, ONE, "cpu", torch.float32, 7 if dummy else iterate_safetensors(checkpoint), 64
    )
    whole = plain.get_submodule("model.layers.1.mlp")._weights()  # type: ignore[attr-defined]
    for rank in range(2):
        model = build(checkpoint, 7 if dummy else iterate_safetensors(checkpoint), TensorParallel(rank, 2))
        gate_up, down = experts_of(model)
        gate, up = (part.chunk(2, 1)[rank] for part in whole.gate_up.chunk(2, 1))
        torch.testing.assert_close(gate_up, rounded(torch.cat([gate, up], 1)))
        torch.testing.assert_close(down, rounded(whole.down.chunk(2, 2)[rank]))


def test_other_weights_are_as_if_they_were_the_only_ones(checkpoint: Path, tmp_path: Path) -> None:
    other = {name: tensor.flip(0).contiguous() / 2 for name, tensor in iterate_safetensors(checkpoint)}
    model = build(checkpoint, iterate_safetensors(checkpoint))
    before = [param.data_ptr() for param in model.parameters()]
    reload_model(model, other.items())
    assert [param.data_ptr() for param in model.parameters()] == before
    for mine, its in zip(experts_of(model), experts_of(build(checkpoint, other.items())), strict=True):
        assert torch.equal(mine, its)
    folder = changed(checkpoint, tmp_path / "other", other)
    said = []
    for start in (checkpoint, folder):
        with LLM(str(start), device="cpu", quantization="fp8", max_model_len=64) as llm:
            said.append(say(llm))
            if start is checkpoint:
                llm.reload_weights(folder)
                said.append(say(llm))
    assert said[1] == said[2] != said[0]


def test_a_checkpoint_in_float8_by_blocks(checkpoint: Path, tmp_path: Path) -> None:
    """As Qwen3-30B-A3B-FP8's, each expert's matrices with scales of blocks: multiplied, then rounded by rows."""
    tensors: dict[str, torch.Tensor] = {}
    products: dict[str, torch.Tensor] = {}
    for name, tensor in iterate_safetensors(checkpoint):
        products[name] = tensors[name] = tensor.clone()
        if tensor.dim() != 2 or name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
            continue
        blocks = [part.split(BLOCK, 1) for part in tensor.split(BLOCK)]
        scales = torch.tensor([[block.abs().max() / 448 for block in row] for row in blocks])
        wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: len(tensor), : tensor.shape[1]]
        tensors[name] = (tensor / wide).to(FP8)
        tensors[f"{name}_scale_inv"] = scales
        products[name] = tensors[name].float() * wide
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    folder = changed(checkpoint, tmp_path / "fp8", tensors, quantization_config=said)
    model = build(folder, float_weights(folder, "cpu"))
    for mine, its in zip(experts_of(model), of_checkpoint(products), strict=True):
        torch.testing.assert_close(mine, rounded(its))
    whole = changed(checkpoint, tmp_path / "whole", products)
    told = []
    for start in (folder, whole):
        with LLM(str(start), device="cpu", quantization="fp8", max_model_len=64) as llm:
            told.append(say(llm))
    assert told[0] == told[1]


def test_experts_that_say_nothing_are_still_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minivllm_qwen3_moe import block

    plainly = block.sharded_parameter
    monkeypatch.setattr(block, "sharded_parameter", lambda shape, pieces, may_be_fp8: plainly(shape, pieces))
    with pytest.raises(
        ConfigError, match=r"of Qwen3MoeForCausalLM's layers .* not model\.layers\.\d\.mlp\.gate_up_exp"
    ):
        build(checkpoint, 0)


# --------------------------------------------------------------------------- what is said


def say(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def oracle(folder: Path, ranks: int) -> Any:
    """transformers' model, its matrices and their inputs rounded, where ranks split the input by part."""
    model = copy.deepcopy(reference_model(folder))

    def by_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = zip(x.chunk(ranks, -1), weight.chunk(ranks, -1), strict=True)
        return cast(torch.Tensor, sum(rounded(a) @ rounded(w).T for a, w in parts))

    def experts(module: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        x, ids, shares = args
        total = torch.zeros_like(x)
        for token in range(len(x)):
            for e, share in zip(ids[token].tolist(), shares[token], strict=True):
                row = rounded(x[token : token + 1])
                gate, up = (row @ rounded(module.gate_up_proj[e]).T).chunk(2, 1)
                total[token] += share * by_parts(torch.nn.functional.silu(gate) * up, module.down_proj[e])[0]
        return total

    for layer in model.model.layers:
        for name, linear in layer.self_attn.named_modules():
            if name == "o_proj":
                linear.register_forward_hook(lambda module, args, out: by_parts(args[0], module.weight))
            elif isinstance(linear, torch.nn.Linear):
                linear.weight.data = rounded(linear.weight.data)
                linear.register_forward_pre_hook(lambda module, args: (rounded(args[0]),))
        layer.mlp.experts.register_forward_hook(experts)
    return model


class TestEveryLayerInFloat8:
    def test_answers_are_those_of_rounded_weights_and_inputs(self, checkpoint: Path) -> None:
        check_answers(checkpoint, 1)

    @pytest.mark.slow
    def test_tensor_parallel(self, checkpoint: Path) -> None:
        check_answers(checkpoint, 2)


def check_answers(checkpoint: Path, ranks: int) -> None:
    with LLM(str(checkpoint), device="cpu", tp=ranks, quantization="fp8", max_model_len=64) as llm:
        assert llm.engine.describe()["weights"] == "fp8 weights"
        said = say(llm)
    model, plain, others = oracle(checkpoint, ranks), reference_model(checkpoint), 0
    for prompt, answer in zip(PROMPTS, said, strict=True):
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.inference_mode():
            wanted, whole = (which(ids).logits[0, len(prompt) - 1 :].argmax(-1).tolist() for which in (model, plain))
        assert answer == wanted
        others += sum(a != b for a, b in zip(answer, whole, strict=True))
    assert others, "without rounding the answers are the same, so this proves nothing"


@pytest.mark.slow
def test_triton_says_the_same(checkpoint: Path) -> None:
    """In its interpreter, few tokens by pair and more by expert."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter must be chosen before Triton is imported")
    params, told = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), []
    for experts in ("torch", "triton"):
        settings = [f"model.options.experts={experts}", "cache.num_blocks=16", "max_model_len=64"]
        with LLM(str(checkpoint), device="cpu", quantization="fp8", overrides=settings) as llm:
            told.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS[:3], params, use_tqdm=False)])
    assert told[0] == told[1]


# --------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
def test_graphs_say_what_kernels_launched_one_by_one_say() -> None:
    """Two layers of the published shape, random weights: where tokens differ, which are nearly as likely, no more is
    compared."""
    rng, told = random.Random(0), []
    prompts = [[rng.randrange(1000, 100_000) for _ in range(n)] for n in (1, 15, 16, 60, 300)]
    together = [*([prompt] for prompt in prompts), prompts[:2], prompts[:3], prompts, [*prompts, *prompts, *prompts]]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    for eager in (None, True):
        settings = ["model.hf_config.num_hidden_layers=2", "cache.num_blocks=512"]
        settings += ["load_format=dummy", "max_model_len=512", "scheduler.max_num_seqs=16"]
        with LLM("qwen3-30b-a3b", quantization="fp8", enforce_eager=eager, overrides=settings) as llm:
            assert llm.engine.describe()["weights"].startswith("fp8 weights")
            told.append([out.outputs[0] for some in together for out in llm.generate(some, params, use_tqdm=False)])
    same = sum(common_tokens(*both) for both in zip(*told, strict=True))
    assert same > 0.75 * 8 * sum(map(len, together))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
@pytest.mark.parametrize("eager", [None, True], ids=["graphs", "eager"])
def test_a_gpu_says_nearly_what_the_cpu_says(checkpoint: Path, eager: bool | None) -> None:
    """Log-probabilities change by float8 on the GPU as much as on the CPU; reloaded weights are those of a new engine.
    (The same numbers are not to be expected: what bfloat16 rounds away decides how float8 rounds.)"""
    params = PARAMS.clone(prompt_logprobs=0, max_tokens=4)
    found = {}
    for name, options in {
        "cpu": {"device": "cpu", "quantization": "fp8"},
        "whole on the cpu": {"device": "cpu"},
        "gpu": {"device": "cuda", "dtype": "bfloat16", "quantization": "fp8", "enforce_eager": eager},
        "whole": {"device": "cuda", "dtype": "bfloat16", "enforce_eager": eager},
    }.items():
        options = {"max_model_len": 64, "max_num_seqs": 8, "gpu_memory_utilization": 0.2, **options}
        with LLM(str(checkpoint), **options) as llm:
            outputs = llm.generate(PROMPTS[1:], params, use_tqdm=False)
            if name == "gpu":
                llm.reload_weights(checkpoint)
                again = llm.generate(PROMPTS[1:], params, use_tqdm=False)
                assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]
        entries = (
            entry[token].logprob
            for output in outputs
            for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
            if entry is not None
        )
        found[name] = torch.tensor(list(entries))

    def apart(one: str, other: str) -> float:
        return float((found[one] - found[other]).abs().mean())

    assert 0.3 < apart("gpu", "whole") / apart("cpu", "whole on the cpu") < 3
