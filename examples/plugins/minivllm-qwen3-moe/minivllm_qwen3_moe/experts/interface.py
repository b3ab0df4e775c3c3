"""What a backend for the experts promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch

from minivllm.layers.norm import RMSNorm


class Weights(NamedTuple):
    """The router, gate (experts, hidden); gate_up (experts, 2 * inner, hidden), gate's rows first; down (experts,
    hidden, inner). With ``quantization=fp8`` the latter two are float8_e4m3fn, and each of their rows is still to be
    multiplied by its scale, float32."""

    gate: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor | None = None  # (experts, 2 * inner)
    down_scale: torch.Tensor | None = None  # (experts, hidden)

    @property
    def in_float8(self) -> bool:
        return self.gate_up_scale is not None


class Experts(ABC):
    """Routes tokens and computes their experts. It owns no weights, and its calls can be captured in a CUDA graph."""

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")  # where ``auto`` takes it

    def __init__(self, top_k: int, renormalize: bool) -> None:
        """``renormalize``: a token's weights are divided by their sum (``norm_topk_prob``)."""
        self.top_k, self.renormalize = top_k, renormalize

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Why it cannot run there: one sentence a reason, empty if it can."""
        return []

    @abstractmethod
    def __call__(self, x: torch.Tensor, norm: RMSNorm, weights: Weights, *, add: bool) -> torch.Tensor:
        """x (t, hidden), the residual stream, contiguous; norm, what stands before the router and the experts.

        Returns the weighted sum over each token's experts, (t, hidden): added to x in place if ``add``, else alone. If
        the weights are in float8, the inputs of both products are, too, with a scale per row.
        """
