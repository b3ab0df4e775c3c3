"""The reference: one expert after another, on any device. Of float8 it multiplies the numbers in float32."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from minivllm.kernels.linear.fp8_linear import Fp8Rows, quantize
from minivllm.layers.norm import RMSNorm
from minivllm_qwen3_moe.experts.interface import Experts, Weights


class TorchExperts(Experts):
    def __call__(self, x: torch.Tensor, norm: RMSNorm, its: Weights, *, add: bool) -> torch.Tensor:
        h = norm(x)
        logits = F.linear(h, its.gate)
        inputs = _floats(quantize(x, norm.weight, norm.eps)) if its.in_float8 else h
        weights, ids = route(logits, self.top_k, self.renormalize)
        share = torch.zeros(logits.shape, dtype=torch.float32, device=h.device).scatter_(1, ids, weights)
        total = torch.zeros(h.shape, dtype=torch.float32, device=h.device)
        rows: torch.Tensor | slice = slice(None)  # on a GPU all: a graph cannot wait for how many chose an expert
        for e in range(logits.shape[1]):
            if not h.is_cuda:
                rows = share[:, e].nonzero()[:, 0]
                if not len(rows):
                    continue
            wide, up = F.linear(inputs[rows], _expert(its.gate_up, its.gate_up_scale, e)).to(x.dtype).chunk(2, dim=-1)
            y = F.silu(wide) * up
            if its.in_float8:
                y = _floats(quantize(y))
            total[rows] += share[rows, e, None] * F.linear(y, _expert(its.down, its.down_scale, e)).float()
        return x.add_(total) if add else total.to(x.dtype)


def _expert(weight: torch.Tensor, scale: torch.Tensor | None, expert: int) -> torch.Tensor:
    """One expert's matrix; of float8, its numbers in float32."""
    return weight[expert] if scale is None else weight[expert].float() * scale[expert][:, None]


def _floats(rows: Fp8Rows) -> torch.Tensor:
    return rows.values.float() * rows.scales[:, None]


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """logits (t, experts); returns weights (t, top_k) float32, largest first, and expert ids (t, top_k) int64."""
    weights, ids = logits.float().softmax(-1).topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids
