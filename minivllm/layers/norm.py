"""Root-mean-square normalization."""

from __future__ import annotations

import torch
from torch import nn

from minivllm.kernels.rms_norm import rms_norm
from minivllm.layers.parameter import Piece, sharded_parameter


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = sharded_parameter((size,), {None: Piece((size,))})
        self.weight.dummy_value = 1.0  # type: ignore[attr-defined]
        self._offered: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (t, size); returns the same shape."""
        normed = self.taken(x)
        return rms_norm(x, self.weight, self.eps) if normed is None else normed

    def offer(self, x: torch.Tensor, normed: torch.Tensor | None) -> None:
        """Say what this norm of ``x`` is, found while x was made, before it is asked for; None: it is not known."""
        self._offered = None if normed is None else (x, normed)

    def taken(self, x: torch.Tensor) -> torch.Tensor | None:
        """What was offered for this very ``x``, once."""
        offered, self._offered = self._offered, None
        return offered[1] if offered is not None and offered[0] is x else None
