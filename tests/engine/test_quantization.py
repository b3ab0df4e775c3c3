"""``quantization=fp8`` end to end, against transformers whose linear layers round to float8 as ours do."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import reference_model
from torch import nn

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError

PROMPTS = [[random.Random(n).randrange(512) for _ in range(n)] for n in (1, 3, 17, 40, 90)]
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen3": {"architecture": "qwen3"},
    "qwen3-tied": {"architecture": "qwen3", "tie_word_embeddings": True, "shards": 3},
    "llama-biased": {"architecture": "llama", "attention_bias": True, "mlp_bias": True},
}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of three bits behind the leading one, each row's largest being 448 of a scale."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
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


def test_ranks_scale_their_own_parts(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = str(tiny_checkpoint("qwen3"))
    said = []
    for tp in (1, 2):
        with LLM(folder, device="cpu", tp=tp, quantization="fp8", max_model_len=128) as llm:
            outputs = llm.generate(PROMPTS, PARAMS.clone(max_tokens=1), use_tqdm=False)
            said.append([{t: its.logprob for t, its in o.outputs[0].logprobs[0].items()} for o in outputs])
    alone, together = said
    for one, two in zip(alone, together, strict=True):
        shared = one.keys() & two.keys()
        assert shared
        assert all(one[token] == pytest.approx(two[token], abs=1.0) for token in shared)
    assert alone != together  # inputs of o and down have a scale on each rank


def test_it_is_told_and_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = str(tiny_checkpoint("qwen3"))
    with LLM(folder, device="cpu", quantization="fp8") as llm:
        assert llm.engine.describe()["weights"] == "fp8 weights"
    with LLM(folder, device="cpu", quantization=None) as llm:
        assert llm.engine.describe()["weights"] == "float32 weights"
    for wrong in ("awq", "int8", 8):
        with pytest.raises(ConfigError, match=r"quantization.*none, fp8"):
            LLM(folder, device="cpu", quantization=wrong)
