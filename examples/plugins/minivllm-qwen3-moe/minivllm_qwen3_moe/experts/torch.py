"""The reference: one expert after another, on any device."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from minivllm.layers.norm import RMSNorm
from minivllm_qwen3_moe.experts.interface import Experts


class TorchExperts(Experts):
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
        h = norm(x)
        logits = F.linear(h, gate)
        weights, ids = route(logits, self.top_k, self.renormalize)
        share = torch.zeros(logits.shape, dtype=torch.float32, device=h.device).scatter_(1, ids, weights)
        total = torch.zeros(h.shape, dtype=torch.float32, device=h.device)
        rows: torch.Tensor | slice = slice(None)  # on a GPU all: a graph cannot wait for how many chose an expert
        for e in range(logits.shape[1]):
            if not h.is_cuda:
                rows = share[:, e].nonzero()[:, 0]
                if not len(rows):
                    continue
            wide, up = F.linear(h[rows], gate_up[e]).chunk(2, dim=-1)
            total[rows] += share[rows, e, None] * F.linear(F.silu(wide) * up, down[e]).float()
        return x.add_(total) if add else total.to(x.dtype)


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """logits (t, experts); returns weights (t, top_k) float32, largest first, and expert ids (t, top_k) int64."""
    weights, ids = logits.float().softmax(-1).topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids
