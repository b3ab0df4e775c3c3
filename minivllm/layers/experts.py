"""What an MLP of experts says about itself, so that a decode step may go through all layers in one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """One rank's, all of them. router (experts, hidden); gate_up (experts, 2 * inner, hidden), gate's rows first; down
    (experts, hidden, inner). All three read x behind the norm in front of the MLP, whose weight none has taken in; each
    expert is down(silu(gate(x)) * up(x)), and a token's are the ``top_k`` of the largest logits, counted by the softmax
    of all, or, if ``renormalize``, of those ``top_k``."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    top_k: int
    renormalize: bool


class RoutedMLP(Protocol):
    """What an MLP may have beside ``forward``, in the same class: one with a ``forward`` of its own is called as any
    module is."""

    def routed_experts(self) -> RoutedExperts | None:
        """What ``forward`` computes with in this step. None: nothing else may stand for it."""
        ...
