"""Norms that the sum before them has found: who is told of them, who takes them, and that nobody takes another's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PagedRun, attention_spec
from torch import nn

from minivllm.backends.torch import TorchBackend
from minivllm.core.parallel import TensorParallel
from minivllm.kernels.rms_norm import rms_norm_reference
from minivllm.layers.decoder import DecoderLayer
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.norm import RMSNorm
from minivllm.models.loader import build_model, iterate_safetensors, read_model_config
from minivllm.models.qwen3 import Qwen3ForCausalLM, Qwen3Layer

Checkpoints = Callable[..., Path]
LAYERS = 3


@dataclass(frozen=True, slots=True)
class Alone(TensorParallel):
    """Rank 0 of 2, which gets its own parts back; ``normed`` counts the norms that its sums found."""

    normed: list[float] = field(default_factory=list)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_reduce_add_norm(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        self.all_reduce_add(residual, x)
        if len(x) == 1:
            return None  # as where no kernel does both
        self.normed.append(eps)
        return rms_norm_reference(residual, weight, eps)


def run(folder: Path, model: type[Qwen3ForCausalLM] = Qwen3ForCausalLM) -> tuple[torch.Tensor, Alone, Any]:
    """Logits behind a prompt, then behind a token more; what was summed; the model."""
    config = read_model_config(folder)
    tp = Alone(0, 2)
    built: Any = build_model(model, config, tp, "cpu", torch.float32, iterate_safetensors(folder), 256)
    paged = PagedRun(built, TorchBackend(attention_spec(config, tp=tp)), 16, 1)
    logits = [paged.step([0], [list(range(7, 250, 31))], 0), paged.step([0], [[5]], 1)]
    return torch.cat(logits), tp, built


@pytest.fixture
def folder(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3", num_hidden_layers=LAYERS)


@pytest.fixture
def expected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    with monkeypatch.context() as without:
        without.setattr(DecoderLayer, "announce_norms", lambda self, behind: None)
        logits, tp, _ = run(folder)
    assert not tp.normed
    return logits


def norms_of(model: Any) -> list[RMSNorm]:
    return [module for module in model.modules() if isinstance(module, RMSNorm)]


def test_every_norm_but_the_first_is_found_by_the_sum_before_it(
    folder: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        "minivllm.layers.norm.rms_norm", lambda x, *rest: asked.append(len(x)) or rms_norm_reference(x, *rest)
    )
    logits, tp, model = run(folder)
    torch.testing.assert_close(logits, expected)
    # of the last layer's two only its one token is left, and one row is not normed by its sum
    assert len(tp.normed) == 2 * (LAYERS - 1)
    assert asked == [1, 1], "the final norm of either step"
    assert all(norm._offered is None for norm in norms_of(model)), "something is left for later"
    assert not any("followed_by" in name for name, _ in model.named_modules())


class Own(GatedMLP):
    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """Changes the stream before it norms it."""
        x.mul_(0.5)
        return super().forward(x, norm)


class OwnMLP(Qwen3Layer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.mlp.__class__ = Own


class OwnLayer(Qwen3Layer):
    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return super().forward(x.mul_(0.5), *args)


@pytest.mark.parametrize("kind", [OwnMLP, OwnLayer])
def test_a_part_of_ones_own_norms_what_it_reads(
    folder: Path, kind: type[Qwen3Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(Qwen3ForCausalLM):
        @staticmethod
        def layer(config: Any, tp: TensorParallel, index: int, rotary: Any) -> nn.Module:
            return (kind if index == 1 else Qwen3Layer)(config, tp, index, rotary)

    logits, tp, _ = run(folder, Model)
    monkeypatch.setattr(DecoderLayer, "announce_norms", lambda self, behind: None)
    torch.testing.assert_close(logits, run(folder, Model)[0])
    assert 0 < len(tp.normed) < 2 * (LAYERS - 1)


def test_a_norm_is_taken_once_and_for_its_stream_only() -> None:
    norm, x = RMSNorm(8, 1e-6), torch.randn(3, 8)
    norm.weight.data.fill_(1.0)
    found = torch.zeros(3, 8)
    norm.offer(x, found)
    assert norm(x.clone()) is not found and norm.taken(x) is None, "it was another's, and is gone"
    norm.offer(x, found)
    assert norm(x) is found and norm(x) is not found
    norm.offer(x, None)
    assert norm.taken(x) is None
