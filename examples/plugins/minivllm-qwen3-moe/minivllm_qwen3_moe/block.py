"""The sparse MLP: norm, router, and the experts' weights, of which every rank holds a slice of every expert.

Slicing the experts' inner dimension, and not the experts, keeps the ranks equally busy whatever the router says, and
takes one all-reduce a layer, as a dense MLP does.
"""

from __future__ import annotations

import torch
from torch import nn

from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError, ConfigError
from minivllm.layers.experts import RoutedExperts
from minivllm.layers.linear import ReplicatedLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.parameter import Piece, ShardId, sharded_parameter, split
from minivllm_qwen3_moe.experts import AUTO, BACKENDS, Experts, Weights, choose


class SparseMLP(nn.Module):
    """x + sum over each token's experts of weight * down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        hf, hidden = config.hf_config, config.hidden_size
        if config.hidden_act != "silu":
            raise CheckpointError(f"hidden_act={config.hidden_act!r} is not supported for experts; only silu is")
        self.tp = tp
        self.experts, self.top_k = num_experts(config), int(hf["num_experts_per_tok"])
        self.renormalize = bool(hf.get("norm_topk_prob", False))
        self.inner = split("moe_intermediate_size", int(hf["moe_intermediate_size"]), tp)
        self.wanted = str(config.options.get("experts", AUTO))
        if self.wanted not in (AUTO, *BACKENDS):
            raise ConfigError(
                f"model.options.experts={self.wanted}: there is no such backend. "
                f"Allowed: {', '.join((AUTO, *BACKENDS))}"
            )
        self.gate = ReplicatedLinear(hidden, self.experts)
        self.gate_up_experts = _GateUp(self.experts, hidden, self.inner, tp)
        self.down_experts = _Down(self.experts, hidden, self.inner, tp)
        self._run: Experts | None = None  # chosen where the weights are, which is known at the first call

    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """x: (t, hidden), the residual stream, to which the block's output is added in place."""
        if self._run is None:
            self._run = choose(self.wanted, x.device, x.dtype)(self.top_k, self.renormalize)
        if self.tp.size == 1:
            return self._run(x, norm, self._weights(), add=True)
        return self.tp.all_reduce_add(x, self._run(x, norm, self._weights(), add=False))

    def routed_experts(self) -> RoutedExperts | None:
        """For minivllm's kernel of all layers, where nobody has asked for a backend by name; it reads no float8."""
        weights = self._weights()
        if self.tp.size > 1 or self.wanted != AUTO or weights.in_float8:
            return None
        return RoutedExperts(weights.gate, weights.gate_up, weights.down, self.top_k, self.renormalize)

    def _weights(self) -> Weights:
        gate_up, gate_up_scale = self.gate_up_experts.stacked()
        return Weights(
            self.gate.weight, gate_up, self.down_experts.weight, gate_up_scale, self.down_experts.weight_scale
        )


class _GateUp(nn.Module):
    """(experts * 2 * inner, hidden): of each expert this rank's rows of gate, then of up."""

    weight_scale: torch.Tensor | None = None  # (experts * 2 * inner,), if the weight is in float8

    def __init__(self, experts: int, hidden: int, inner: int, tp: TensorParallel) -> None:
        super().__init__()
        self.shape = experts, 2 * inner, hidden
        whole, start = (inner * tp.size, hidden), tp.rank * inner
        pieces: dict[ShardId, Piece] = {}
        for i in range(2 * experts):
            pieces[f"{i // 2}.{'up' if i % 2 else 'gate'}"] = Piece(whole, 0, start, inner, i * inner)
        self.weight = sharded_parameter((experts * 2 * inner, hidden), pieces, may_be_fp8=True)

    def stacked(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(experts, 2 * inner, hidden) and, if that is in float8, its scales, (experts, 2 * inner)."""
        scale = self.weight_scale
        return self.weight.view(self.shape), None if scale is None else scale.view(self.shape[:2])


class _Down(nn.Module):
    """(experts, hidden, inner): of each expert this rank's columns."""

    weight_scale: torch.Tensor | None = None  # (experts, hidden), if the weight is in float8

    def __init__(self, experts: int, hidden: int, inner: int, tp: TensorParallel) -> None:
        super().__init__()
        whole, start = (hidden, inner * tp.size), tp.rank * inner
        pieces: dict[ShardId, Piece] = {f"{e}.down": Piece(whole, 1, start, inner, item=e) for e in range(experts)}
        self.weight = sharded_parameter((experts, hidden, inner), pieces, may_be_fp8=True)


def num_experts(config: ModelConfig) -> int:
    """``num_experts`` of published checkpoints; what transformers 5 saves calls it ``num_local_experts``."""
    hf = config.hf_config
    count = hf.get("num_experts") or hf.get("num_local_experts")
    missing = [key for key in ("num_experts_per_tok", "moe_intermediate_size") if not hf.get(key)]
    if not count or missing:
        names = ", ".join([*(["num_experts"] if not count else []), *missing])
        raise CheckpointError(f"config.json lacks {names}; is it the config of a Qwen3-MoE checkpoint?")
    if hf["num_experts_per_tok"] > count:
        raise CheckpointError(f"num_experts_per_tok={hf['num_experts_per_tok']} is more than the {count} experts")
    return int(count)


def packed_experts(config: ModelConfig) -> dict[str, tuple[str, ShardId]]:
    """A checkpoint's module ``mlp.experts.{e}.{part}_proj`` -> (ours, shard id)."""
    return {
        f"experts.{e}.{part}_proj": (ours, f"{e}.{part}")
        for e in range(num_experts(config))
        for part, ours in (("gate", "gate_up_experts"), ("up", "gate_up_experts"), ("down", "down_experts"))
    }
