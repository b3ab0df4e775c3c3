"""Attention in plain PyTorch: scores, softmax, sum, one sequence at a time. The KV-cache write is inherited."""

from __future__ import annotations

import numpy as np
import torch

from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend, AttentionLayer, AttentionSpec, Capabilities, CudaGraphs


class ExampleAttention(AttentionBackend):
    capabilities = Capabilities(cuda_graphs=CudaGraphs.NEVER)  # shapes differ from step to step
    plans_on_host = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        # For each sequence of the step, decodes first: its number of query tokens, and the cache slots of its context.
        self.rows: list[tuple[int, torch.Tensor]] = []

    def plan(self, batch: AttentionBatch) -> None:
        """Called once per step."""
        self.batch = batch
        size, device = self.spec.block_size, batch.block_tables.device
        self.rows = []
        for table, count, end in zip(batch.host_block_tables, batch.host_query_lens, batch.host_seq_lens, strict=True):
            at = np.arange(end)
            slots = table[at // size].astype(np.int64) * size + at % size
            self.rows.append((int(count), torch.from_numpy(slots).to(device)))

    def decode(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        """Called once per layer, for decode rows."""
        assert self.batch is not None
        self._attend(self.rows[: self.batch.num_decodes], q, layer, out)

    def prefill(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        """Called once per layer, for prompt chunks."""
        assert self.batch is not None
        self._attend(self.rows[self.batch.num_decodes :], q, layer, out)

    def _attend(
        self, rows: list[tuple[int, torch.Tensor]], q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        """q, out: (query tokens of these rows, num_heads, head_dim)."""
        cache = self.kv_cache[layer.index].flatten(1, 2)  # (2, num_blocks * block_size, num_kv_heads, head_dim)
        counts, group = [count for count, _ in rows], self.spec.num_heads // self.spec.num_kv_heads
        for (count, slots), queries, into in zip(rows, q.split(counts), out.split(counts), strict=True):
            k, v = cache[:, slots].float().repeat_interleave(group, dim=2)  # (length, num_heads, head_dim) each
            scores = torch.einsum("qhd,khd->hqk", queries.float(), k) * self.spec.scale
            # Causal mask: each of the last `count` tokens sees every token up to itself.
            seen = torch.ones(count, len(slots), dtype=torch.bool, device=q.device).tril(len(slots) - count)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            into.copy_(torch.einsum("hqk,khd->qhd", weights, v))
