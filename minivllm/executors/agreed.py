"""Why every rank samples for itself, and where that is not enough.

The all-gather behind the LM head gives every rank the same bytes of logits, and ``Sampler.sample`` is a function of
logits, seed and position: every rank gets the same token, and ``last_token`` stays in step with no broadcast in the
graph. ``sample_shard`` ends in a sum over the ranks, which is the same on all. Who chooses again in ``refine`` may sum
in an order that changes from run to run (a cumulative sum of one long row does, on a GPU), and a token at the border of
top-p would differ between ranks; so there rank 0's choice counts.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch

from minivllm.core.interfaces import DeviceLogprobs, Sampler
from minivllm.core.parallel import TensorParallel
from minivllm.core.sequence import Sequence
from minivllm.kernels.sampling import Shard


class AgreedSampler(Sampler):
    """A sampler whose refined tokens are rank 0's on all ranks."""

    def __init__(self, inner: Sampler, tp: TensorParallel) -> None:
        self.inner, self.tp = inner, tp
        self.row = inner.row  # type: ignore[misc]  # of the instance: it wraps any sampler

    @classmethod
    def encode(cls, seq: Sequence, seed: int) -> np.ndarray:
        raise NotImplementedError("requests are encoded where they arrive, by the sampler itself")

    def prepare(
        self, slots: np.ndarray, rows: np.ndarray, device_slots: torch.Tensor, device_rows: torch.Tensor
    ) -> None:
        self.inner.prepare(slots, rows, device_slots, device_rows)

    def take_tokens(self, slots: np.ndarray, lens: np.ndarray, ids: torch.Tensor) -> None:
        self.inner.take_tokens(slots, lens, ids)

    def take_masks(self, slots: torch.Tensor, bits: torch.Tensor) -> None:
        self.inner.take_masks(slots, bits)

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.inner.sample(logits, slots, positions)

    def samples_shards(self) -> bool:
        return self.inner.samples_shards()

    def sample_shard(
        self, logits: torch.Tensor, shard: Shard, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return self.inner.sample_shard(logits, shard, slots, positions)

    def needs_refine(self, host_slots: np.ndarray) -> bool:
        return self.inner.needs_refine(host_slots)

    def refines_shards(self, host_slots: np.ndarray) -> bool:
        return self.inner.refines_shards(host_slots)

    def refine(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor,
        host_slots: np.ndarray,
    ) -> tuple[torch.Tensor, DeviceLogprobs | None]:  # fmt: skip
        chosen, logprobs = self.inner.refine(logits, slots, positions, tokens, host_slots)
        return self._agreed(tokens, chosen), logprobs

    def captures_refine(self) -> bool:
        return self.inner.captures_refine()

    def refinement(self, host_slots: np.ndarray) -> Hashable | None:
        return self.inner.refinement(host_slots)

    def refine_captured(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, kind: Hashable
    ) -> tuple[torch.Tensor, DeviceLogprobs | None]:
        chosen, logprobs = self.inner.refine_captured(logits, slots, positions, tokens, kind)
        return self._agreed(tokens, chosen), logprobs

    def launch_all_kinds(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        self.inner.launch_all_kinds(logits, slots, positions)

    def _agreed(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return chosen if chosen is tokens else self.tp.broadcast(chosen)
