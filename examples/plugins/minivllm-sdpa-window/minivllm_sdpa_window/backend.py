"""Attention by torch.nn.functional.scaled_dot_product_attention, one call a sequence, with or without a sliding window.

The whole contract in one file: ``capabilities`` say what it can do, ``plan`` works out where the keys of each sequence
lie, once a step, ``decode`` and ``prefill`` attend, once a layer. Writing the cache is inherited.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend, AttentionLayer, AttentionSpec, Capabilities, CudaGraphs


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a step: its ``count`` queries see the tokens at ``slots``."""

    count: int
    slots: torch.Tensor  # (length,) int64: where in the cache they lie
    mask: torch.Tensor | None  # (count, length) bool, True where seen; None: all are


class SdpaWindow(AttentionBackend):
    # Each step gathers keys in shapes of its own, which a captured graph, whose shapes are fixed, cannot.
    capabilities = Capabilities(sliding_window=True, cuda_graphs=CudaGraphs.NEVER)
    plans_on_host = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.rows: list[Row] = []  # of the step, decodes first

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = batch
        size, device = self.spec.block_size, batch.block_tables.device
        slots: list[np.ndarray] = []
        for table, count, end in zip(batch.host_block_tables, batch.host_query_lens, batch.host_seq_lens, strict=True):
            at = np.arange(self._first_seen(end - count), end)
            slots.append(table[at // size].astype(np.int64) * size + at % size)
        on_device = torch.from_numpy(np.concatenate(slots)).to(device).split([len(s) for s in slots])
        self.rows = [
            Row(count, s, self._mask(count, len(s), device))
            for count, s in zip(batch.host_query_lens.tolist(), on_device, strict=True)
        ]

    def decode(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        assert self.batch is not None
        self._attend(self.rows[: self.batch.num_decodes], q, layer, out)

    def prefill(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        assert self.batch is not None
        self._attend(self.rows[self.batch.num_decodes :], q, layer, out)

    def _attend(self, rows: list[Row], q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        """q, out: (tokens of these rows, num_heads, head_dim)."""
        cache = self.kv_cache[layer.index].flatten(1, 2)  # (2, num_blocks * block_size, num_kv_heads, head_dim)
        counts = [row.count for row in rows]
        for row, queries, into in zip(rows, q.split(counts), out.split(counts), strict=True):
            k, v = cache[:, row.slots].transpose(1, 2).unsqueeze(1)  # (1, num_kv_heads, length, head_dim) each
            attended = F.scaled_dot_product_attention(
                queries.transpose(0, 1).unsqueeze(0), k, v, row.mask, scale=self.spec.scale, enable_gqa=True
            )  # (1, num_heads, count, head_dim)
            into.copy_(attended[0].transpose(0, 1))

    def _first_seen(self, position: int) -> int:
        """The first token that a query at ``position`` sees: itself and ``sliding_window - 1`` before it, or all."""
        window = self.spec.sliding_window
        return 0 if window is None else max(0, position - window + 1)

    def _mask(self, count: int, length: int, device: torch.device) -> torch.Tensor | None:
        """What the last ``count`` of ``length`` tokens see of these."""
        if count == 1:
            return None
        behind = torch.arange(length - count, length, device=device)[:, None] - torch.arange(length, device=device)
        seen = behind >= 0
        return seen if self.spec.sliding_window is None else seen & (behind < self.spec.sliding_window)
