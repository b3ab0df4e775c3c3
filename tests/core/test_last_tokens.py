"""Behind its attention the last layer computes only the tokens that are sampled from: what it sees, and that nobody can
tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.core.batch import Batch
from minivllm.core.interfaces import AttentionBackend
from minivllm.core.model_runner import ModelRunner
from minivllm.layers.decoder import SelfAttention
from minivllm.layers.linear import RowParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.models.qwen3 import Qwen3ForCausalLM, Qwen3Layer

Checkpoints = Callable[..., Path]
Said = list[tuple[list[int], list[float]]]
Steps = list[tuple[Batch, list[int]]]  # with the rows that each attention and each MLP added to the residual stream
PROMPTS = [list(range(start, start + n)) for start, n in ((300, 44), (3, 9), (40, 30), (100, 1), (200, 26))]


def say(folder: Path) -> tuple[Said, Steps]:
    """Tokens and their log-probabilities, in steps of at most 24 tokens; and what the steps were."""
    steps: Steps = []
    add_to, launch = RowParallelLinear.add_to, ModelRunner._launch_eager

    def logged(product: RowParallelLinear, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert len(residual) == len(x)
        steps[-1][1].append(len(x))
        return add_to(product, residual, x)

    def launched(runner: ModelRunner, batch: Batch) -> Any:
        steps.append((batch, []))
        return launch(runner, batch)

    overrides = ["scheduler.max_num_batched_tokens=24", "cache.block_size=4"]
    params = [
        SamplingParams(temperature=0, max_tokens=13 - i, ignore_eos=True, logprobs=0 if i % 2 else None)
        for i in range(len(PROMPTS))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowParallelLinear, "add_to", logged)
        patch.setattr(ModelRunner, "_launch_eager", launched)
        with LLM(str(folder), device="cpu", max_num_seqs=4, overrides=overrides) as llm:
            outputs = [o.outputs[0] for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    return [(list(o.token_ids), [next(iter(at.values())).logprob for at in o.logprobs or []]) for o in outputs], steps


def assert_same(got: Said, expected: Said) -> None:
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(got, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.fixture
def all_rows(tiny_checkpoint: Checkpoints) -> Said:
    """What is said where every layer computes every token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3Layer, "pick_last_tokens", lambda layer: None)
        said, steps = say(tiny_checkpoint("qwen3"))
    assert all(rows == [batch.num_tokens] * 4 for batch, rows in steps)
    return said


def test_the_last_layer_computes_what_is_sampled_from(
    tiny_checkpoint: Checkpoints, all_rows: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    normed: list[int] = []
    norm = RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: normed.append(len(x)) or norm(self, x))
    said, steps = say(tiny_checkpoint("qwen3"))
    assert_same(said, all_rows)
    picked = []
    for batch, rows in steps:
        t, n = batch.num_tokens, max(len(batch.slots), 9)  # fewer rows would need kernels of their own
        picked.append(n if t > n else t)
        assert rows == [t, t, picked[-1], picked[-1]]
    assert normed == picked and max(picked) == 9
    batches = [batch for batch, _ in steps]
    assert any(b.num_decodes == len(b.slots) for b in batches), "no step of decodes alone"
    assert any(not b.samples.any() for b in batches), "no step that samples nothing"
    mixed = [b for b in batches if b.num_decodes and b.samples[b.num_decodes :].any() and not b.samples.all()]
    assert mixed, "no step of decodes, a chunk that samples and one that does not"


class OwnLayer(Qwen3Layer):
    """It may need all tokens behind attention."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        assert len(x) == len(positions)
        x = self.self_attn(x, self.input_layernorm, positions, attention)
        assert len(x) == len(positions)
        return self.mlp(x, self.post_attention_layernorm)


class OwnAttention(SelfAttention):
    def forward(self, x: torch.Tensor, norm: RMSNorm, positions: torch.Tensor, attention: Any) -> torch.Tensor:
        x = super().forward(x, norm, positions, attention)
        assert len(x) == len(positions)
        return x


class WithOwnAttention(Qwen3Layer):
    def __init__(self, config: Any, tp: Any, index: int, rotary: Any) -> None:
        super().__init__(config, tp, index, rotary)
        self.self_attn = OwnAttention(config, tp, index, rotary, qk_norm=True)


class OwnForward(Qwen3ForCausalLM):
    """A plugin's model that knows of no step but whole ones."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        hidden = super().forward(input_ids, positions, attention)
        assert len(hidden) == len(positions)
        return hidden


@pytest.mark.parametrize("own", [OwnLayer, WithOwnAttention, OwnForward])
def test_a_forward_of_ones_own_is_left_alone(
    tiny_checkpoint: Checkpoints, all_rows: Said, own: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = own if issubclass(own, Qwen3ForCausalLM) else type("Mine", (Qwen3ForCausalLM,), {"layer": own})
    monkeypatch.setattr("minivllm.models.qwen3.Qwen3ForCausalLM", model)
    said, steps = say(tiny_checkpoint("qwen3"))
    assert_same(said, all_rows)
    assert all(rows == [batch.num_tokens] * 4 for batch, rows in steps)


def test_a_model_of_any_make_may_pick(
    tiny_checkpoint: Checkpoints, all_rows: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picks(Qwen3ForCausalLM):
        def forward(self, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
            hidden = self.model(ids, positions, attention)
            assert attention.batch is not None
            last = attention.batch.last_tokens
            return hidden if last is None else hidden[last]

    monkeypatch.setattr("minivllm.models.qwen3.Qwen3ForCausalLM", Picks)
    said, steps = say(tiny_checkpoint("qwen3"))
    assert_same(said, all_rows)
    assert all(rows == [batch.num_tokens] * 4 for batch, rows in steps)
