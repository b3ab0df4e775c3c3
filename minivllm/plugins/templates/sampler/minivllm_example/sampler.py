"""The built-in sampler over logits in which some tokens are masked out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minivllm.core.sampler import DefaultSampler
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from minivllm.core.interfaces import DeviceLogprobs
    from minivllm.core.model_config import FrozenDict


class ExampleSampler(DefaultSampler):
    """Raises ConfigError if ``sampler.options.banned`` is not a list of token ids."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, options: FrozenDict) -> None:
        super().__init__(num_slots, vocab_size, device, options)
        banned = options.get("banned", ())
        if not isinstance(banned, tuple) or any(type(t) is not int or not 0 <= t < vocab_size for t in banned):
            raise ConfigError(f"sampler.options.banned={banned}: a list of token ids from 0 to {vocab_size - 1}: [3,5]")
        self.banned = torch.tensor(banned, dtype=torch.int64, device=device)

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The common path; it is captured in CUDA graphs, so it must not wait for the device."""
        return super().sample(self._without_banned(logits), slots, positions)

    def refine(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor,
        host_slots: np.ndarray,
    ) -> tuple[torch.Tensor, DeviceLogprobs | None]:  # fmt: skip
        """Called after ``sample``: penalties, min_tokens and log-probabilities, for rows that ask for them."""
        return super().refine(self._without_banned(logits), slots, positions, tokens, host_slots)

    def _without_banned(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: (n, vocab_size)."""
        return logits.index_fill(1, self.banned, -torch.inf)
