"""Which weight a sum over the ranks brings near: the one that the model reads next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minivllm.core.parallel import TensorParallel
from minivllm.layers.linear import RowParallelLinear
from minivllm.models.checkpoint import read_model_config
from minivllm.models.qwen3 import Qwen3ForCausalLM


@dataclass(frozen=True, slots=True)
class Listening(TensorParallel):
    """A rank that hears which weights are named; it hands back its own part."""

    named: list[torch.Tensor | None] = field(default_factory=list)

    def all_reduce_add(
        self, residual: torch.Tensor, x: torch.Tensor, ahead: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.named.append(ahead)
        return residual.add_(x)


def test_every_row_product_names_the_weight_behind_it(tiny_checkpoint: Callable[..., Path]) -> None:
    config, tp = read_model_config(tiny_checkpoint("qwen3")), Listening(0, 2)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config, tp)
    model.to_empty(device="cpu")  # as loading does, after the model is built
    assert not any("_next" in name for name, _ in model.named_modules(remove_duplicate=False))
    rows = [module for module in model.modules() if isinstance(module, RowParallelLinear)]
    layers = list(model.model.layers)
    expected = []
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        expected += [layer.mlp.gate_up_proj.weight, following and following.self_attn.qkv_proj.weight]
    for row in rows:
        row.add_to(torch.zeros(1, row.weight.shape[0]), torch.zeros(1, row.weight.shape[1]))
    assert len(tp.named) == len(expected) == 2 * len(layers) > 2
    assert all(named is weight for named, weight in zip(tp.named, expected, strict=True))
    assert not any(weight is not None and weight.is_meta for weight in tp.named)


def test_one_rank_names_none(tiny_checkpoint: Callable[..., Path]) -> None:
    config = read_model_config(tiny_checkpoint("qwen3"))
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config, TensorParallel())
    assert all(module.ahead is None for module in model.modules() if isinstance(module, RowParallelLinear))
