"""Triton kernels: few tokens pair by pair, more of them sorted by expert, so that a tile of rows shares a weight."""

from __future__ import annotations

import os

import torch

from minivllm.kernels._triton import HAVE_TRITON
from minivllm.kernels.linear.products import linear, norm_linear
from minivllm.layers.norm import RMSNorm
from minivllm_qwen3_moe.experts.interface import Experts
from minivllm_qwen3_moe.kernels.grouped_linear import combine, grouped_down, grouped_gate_up
from minivllm_qwen3_moe.kernels.pairs import MAX_TOKENS, pair_down, pair_gate_up, pick
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

    def __call__(
        self,
        x: torch.Tensor,
        norm: RMSNorm,
        gate: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        add: bool,
    ) -> torch.Tensor:
        tokens, residual = x.shape[0], x if add else None
        if not tokens:
            return x
        if tokens <= MAX_TOKENS:
            logits = norm_linear(x, norm.weight, norm.eps, gate)
            h, weights, ids = pick(logits, x, norm.weight, norm.eps, self.top_k, self.renormalize)
            return pair_down(pair_gate_up(h, gate_up, ids), down, ids, weights, residual)
        h = norm(x)
        tiles = tiles_for(tokens, self.top_k, gate.shape[0], x.dtype)
        routing = route(linear(h, gate), self.top_k, self.renormalize, tiles.rows)
        up = grouped_gate_up(h, gate_up, routing, tiles.gate_up)
        return combine(grouped_down(up, down, routing, tiles.down), tokens, residual)
