"""``quantization=fp8`` and ``cache.dtype=fp8`` end to end, against transformers that rounds to float8 where we do."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import reference_model
from torch import nn

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError
from minivllm.kernels.attention.cache_write import write_cache

PROMPTS = [[random.Random(n).randrange(512) for _ in range(n)] for n in (1, 3, 17, 40, 90)]
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen3": {"architecture": "qwen3"},
    "qwen3-tied": {"architecture": "qwen3", "tie_word_embeddings": True, "shards": 3},
    "llama-biased": {"architecture": "llama", "attention_bias": True, "mlp_bias": True},
}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


def rounded(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The nearest numbers of three bits behind the leading one, times a scale, of which each row's largest is 448."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448 if scale is None else scale
    exponent = torch.frexp(x / scale).exponent.clamp_min(-5)  # subnormals are multiples of 2**-9
    step = torch.ldexp(scale, exponent - 4)
    return torch.round(x / step) * step


@pytest.fixture(scope="module")
def oracle() -> Callable[[Path], Any]:
    """transformers' model, its linear layers but the head of rounded weights, each on rounded inputs."""

    def make(folder: Path) -> Any:
        model = copy.deepcopy(reference_model(folder))
        for layer in model.model.layers:
            for linear in layer.modules():
                if isinstance(linear, nn.Linear):
                    linear.weight.data = rounded(linear.weight.data)
                    linear.register_forward_pre_hook(lambda module, args: (rounded(args[0]),))
        return model

    return make


@pytest.mark.parametrize("budget", [8, 512])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_answers_are_those_of_rounded_weights_and_inputs(
    name: str, budget: int, tiny_checkpoint: Callable[..., Path], oracle: Callable[[Path], Any]
) -> None:
    folder = tiny_checkpoint(**CHECKPOINTS[name])
    overrides = [f"scheduler.max_num_batched_tokens={budget}", "scheduler.max_num_seqs=8"]
    with LLM(str(folder), device="cpu", quantization="fp8", max_model_len=128, overrides=overrides) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    model, plain, others = oracle(folder), reference_model(folder), 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.inference_mode():
            logits, its = (which(ids).logits[0, len(prompt) - 1 :] for which in (model, plain))
        assert logits.argmax(-1).tolist() == answer
        others += int((its.argmax(-1) != torch.tensor(answer)).sum())
        for entry, expected in zip(output.outputs[0].logprobs or [], logits.log_softmax(-1), strict=True):
            for token, logprob in entry.items():
                assert logprob.logprob == pytest.approx(
                    expected[token].item(), abs=2e-2
                )  # what is near a tie rounds apart
    assert others, "without rounding the answers are the same, so this proves nothing"


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_answers_are_those_of_rounded_keys_and_values(
    architecture: str, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of whole prompts, of chunks and of decodes; with prefixes from the cache, the second time."""
    folder = tiny_checkpoint(architecture)
    overrides = ["scheduler.max_num_batched_tokens=24", "scheduler.max_num_seqs=8", "cache.num_blocks=100"]
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "overrides": overrides}
    with LLM(str(folder), kv_cache_dtype="fp8", **options) as llm:
        outputs, again = (llm.generate(PROMPTS, PARAMS, use_tqdm=False) for _ in range(2))
        assert llm.engine.stats.cached_tokens > 0
    module = sys.modules[type(reference_model(folder)).__module__]
    plainly: Any = module.eager_attention_forward  # type: ignore[attr-defined]

    def roundly(layer: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        key, value = (rounded(its, torch.ones(())) for its in (key, value))
        return plainly(layer, query, key, value, *args, **kwargs)

    others = 0
    for prompt, output, second in zip(PROMPTS, outputs, again, strict=True):
        answer = list(output.outputs[0].token_ids)
        assert answer == list(second.outputs[0].token_ids)
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        found = []
        for how in (plainly, roundly):
            monkeypatch.setattr(module, "eager_attention_forward", how)
            with torch.inference_mode():
                found.append(reference_model(folder)(ids, use_cache=False).logits[0, len(prompt) - 1 :].log_softmax(-1))
        whole, expected = found
        assert expected.argmax(-1).tolist() == answer
        others += int(((whole - expected).abs().amax(-1) > 0.01).sum())
        for entry, its in zip(output.outputs[0].logprobs or [], expected, strict=True):
            for token, logprob in entry.items():
                assert logprob.logprob == pytest.approx(its[token].item(), abs=2e-2)  # near ties
    assert others > 10, "rounding changed nothing, so this proves nothing"


def test_other_caches_are_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"cache.dtype is one of auto, fp8"):
        LLM(str(tiny_checkpoint("qwen3")), device="cpu", kv_cache_dtype="int8")


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_scale_their_own_parts(tiny_checkpoint: Callable[..., Path]) -> None:
    """o and down have the columns of a half on each rank: weights and inputs are rounded by halves, and added up."""
    folder = tiny_checkpoint("qwen3")
    with LLM(str(folder), device="cpu", tp=2, quantization="fp8", max_model_len=128) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    model = copy.deepcopy(reference_model(folder))

    def by_halves(module: nn.Module, args: Any, out: Any) -> torch.Tensor:
        halves = zip(args[0].chunk(2, -1), module.weight.chunk(2, 1), strict=True)  # type: ignore[operator]
        return sum(rounded(x) @ rounded(weight).t() for x, weight in halves)  # type: ignore[return-value]

    for layer in model.model.layers:
        for name, linear in layer.named_modules():
            if name.endswith(("o_proj", "down_proj")):
                linear.register_forward_hook(by_halves)
            elif isinstance(linear, nn.Linear):
                linear.weight.data = rounded(linear.weight.data)
                linear.register_forward_pre_hook(lambda module, args: (rounded(args[0]),))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
        for entry, expected in zip(output.outputs[0].logprobs or [], logits.log_softmax(-1), strict=True):
            for token, logprob in entry.items():
                assert logprob.logprob == pytest.approx(expected[token].item(), abs=2e-2)


def test_a_cache_in_float8_holds_more_and_what_is_too_large_becomes_the_largest() -> None:
    blocks = []
    for dtype in ("auto", "fp8"):
        with LLM("demo", device="cpu", dtype="bfloat16", kv_cache_dtype=dtype) as llm:
            blocks.append(llm.engine.num_blocks)
            about = llm.engine.describe()
            assert about["kv_cache_dtype"] == ("float8_e4m3fn" if dtype == "fp8" else "bfloat16")
            assert about["weights"] == "bfloat16 weights" + (", fp8 cache" if dtype == "fp8" else "")
    assert blocks[1] == 2 * blocks[0] or abs(blocks[1] - 2 * blocks[0]) == 1
    rows = torch.tensor([[[500.0, -1e9, 1.0, 0.3]]])
    k, v = torch.zeros(2, 1, 1, 1, 4, dtype=torch.float8_e4m3fn)
    write_cache(rows, -rows, k, v, torch.zeros(1, dtype=torch.int64))
    assert k.float().flatten().tolist() == [448, -448, 1, 0.3125]
    assert v.float().flatten().tolist() == [-448, 448, -1, -0.3125]


def test_it_is_told_and_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = str(tiny_checkpoint("qwen3"))
    with LLM(folder, device="cpu", quantization="fp8") as llm:
        assert llm.engine.describe()["weights"] == "fp8 weights"
    with LLM(folder, device="cpu", quantization=None) as llm:
        assert llm.engine.describe()["weights"] == "float32 weights"
    for wrong in ("awq", "int8", 8):
        with pytest.raises(ConfigError, match=r"quantization.*none, fp8"):
            LLM(folder, device="cpu", quantization=wrong)
