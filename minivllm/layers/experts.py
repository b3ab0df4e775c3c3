"""How a mixture-of-experts MLP describes itself, so that a decode step may run all layers in one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """All experts, on one rank. router (experts, hidden); gate_up (experts, 2 * inner, hidden), gate's rows first; down
    (experts, hidden, inner); none in float8. They read x after the MLP's norm, whose weight must not be folded in. Each
    expert is down(silu(gate(x)) * up(x)); a token uses the ``top_k`` experts of the largest logits, weighted by the
    softmax over all, or, if ``renormalize``, over those ``top_k``."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    top_k: int
    renormalize: bool


class RoutedMLP(Protocol):
    """What an MLP may define in addition to ``forward``, in the same class; a subclass that overrides only ``forward``
    is called like any module."""

    def routed_experts(self) -> RoutedExperts | None:
        """The weights that ``forward`` uses in this step. None: no kernel may replace it."""
        ...
