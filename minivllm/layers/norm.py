"""Root-mean-square normalization."""

from __future__ import annotations

import torch
from torch import nn

from minivllm.kernels.rms_norm import rms_norm
from minivllm.layers.parameter import Piece, sharded_parameter


class RMSNorm(nn.Module):
    """x * weight / rms(x) over the last dimension, of ``size`` elements."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = sharded_parameter((size,), {None: Piece((size,))})
        self.weight.dummy_value = 1.0  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (t, size); returns the same shape."""
        return rms_norm(x, self.weight, self.eps)
