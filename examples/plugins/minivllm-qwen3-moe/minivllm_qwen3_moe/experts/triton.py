"""Triton kernels: few tokens pair by pair, more of them sorted by expert, so that a tile of rows shares a weight."""

from __future__ import annotations

import os

import torch

from minivllm.kernels._triton import HAVE_TRITON
from minivllm.kernels.linear.fp8_linear import quantize
from minivllm.kernels.linear.products import linear, norm_linear
from minivllm.layers.norm import RMSNorm
from minivllm_qwen3_moe.experts.interface import Experts, Weights
from minivllm_qwen3_moe.kernels.grouped_linear import combine, grouped_down, grouped_gate_up
from minivllm_qwen3_moe.kernels.pairs import MAX_FP8_TOKENS, MAX_TOKENS, pair_down, pair_gate_up, pick
from minivllm_qwen3_moe.kernels.routing import route
from minivllm_qwen3_moe.tiles import tiles_for


class TritonExperts(Experts):
    devices = ("cuda",)

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
        if not HAVE_TRITON:
            return ["the package 'triton' is not installed"]
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return ["on a CPU it runs only under TRITON_INTERPRET=1, for tests"]
        if device.type != "cuda" and dtype != torch.float32:
            return [f"under TRITON_INTERPRET=1 it takes float32, not {str(dtype).removeprefix('torch.')}"]
        return []

    def __call__(self, x: torch.Tensor, norm: RMSNorm, weights: Weights, *, add: bool) -> torch.Tensor:
        tokens = x.shape[0]
        if not tokens:
            return x
        few = MAX_FP8_TOKENS if weights.in_float8 else MAX_TOKENS
        run = self.by_pair if tokens <= few else self.by_expert
        return run(x, norm, weights, x if add else None)

    def by_pair(self, x: torch.Tensor, norm: RMSNorm, weights: Weights, residual: torch.Tensor | None) -> torch.Tensor:
        logits = norm_linear(x, norm.weight, norm.eps, weights.gate)
        h, shares, ids = pick(logits, x, norm.weight, norm.eps, self.top_k, self.renormalize, float8=weights.in_float8)
        up = pair_gate_up(h, weights.gate_up, ids, weights.gate_up_scale)
        return pair_down(
            quantize(up) if weights.in_float8 else up, weights.down, ids, shares, residual, weights.down_scale
        )

    def by_expert(
        self, x: torch.Tensor, norm: RMSNorm, weights: Weights, residual: torch.Tensor | None
    ) -> torch.Tensor:
        tiles = tiles_for(len(x), self.top_k, weights.gate.shape[0], x.dtype, weights.in_float8)
        if weights.in_float8:
            logits, h = norm_linear(x, norm.weight, norm.eps, weights.gate), quantize(x, norm.weight, norm.eps)
        else:
            h = norm(x)
            logits = linear(h, weights.gate)
        routing = route(logits, self.top_k, self.renormalize, tiles.rows)
        up = grouped_gate_up(h, weights.gate_up, routing, tiles.gate_up, weights.gate_up_scale)
        rows = grouped_down(
            quantize(up) if weights.in_float8 else up, weights.down, routing, tiles.down, weights.down_scale
        )
        return combine(rows, len(x), residual)
