"""The reference attention backend, in pure torch: any device, dtype, head size and block size.

Tests compare the other backends with it. It gathers the keys and values that each query may see token by token, so that
unused cache slots (which may hold anything, even NaN) are never read, and computes in float32 or wider.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend, AttentionLayer, AttentionSpec, Capabilities, CudaGraphs

MAX_GATHERED = 1 << 25  # elements of k gathered for one matmul: decode rows are split to stay below
MAX_SCORES = 1 << 26  # scores of one matmul: a chunk's queries are split to stay below
SLACK = 4096  # this many padding tokens are cheaper than another matmul


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Decode rows of similar context length, computed together."""

    rows: torch.Tensor | None  # (r,) int64: which decode rows; None for all of them, in order
    slots: torch.Tensor  # (r * length,) int64: the cache slot of each visible token; padding repeats a row's first
    length: int
    mask: torch.Tensor | None  # (r, 1, 1, length), -inf at padding; None without padding


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some query tokens of one sequence's prompt chunk."""

    first: int  # rows [first, last) of the prompt part of q
    last: int
    slots: torch.Tensor  # (length,) int64: the cache slot of each token that any of them sees
    mask: torch.Tensor | None  # (rows, length) bool, True where seen; None where plain causal


class TorchBackend(AttentionBackend):
    """The reference: pure torch, on any device, in float32 or wider."""

    capabilities = Capabilities(
        dtypes=("float32", "bfloat16", "float16", "float64"),
        sliding_window=True,
        cuda_graphs=CudaGraphs.NEVER,
        fp8_cache=True,
    )

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.dtype = torch.float64 if spec.dtype == "float64" else torch.float32  # of the arithmetic
        self._attend = attend_fused if spec.device == "cpu" else attend_plainly
        self._decodes: list[_Decodes] = []
        self._chunks: list[_Chunk] = []
        self._scratch = torch.empty(2, 0)  # on a CPU, page faults of fresh memory cost more than the copy into it

    # ------------------------------------------------------------------ planning: once a step

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = batch
        self._decodes = self._plan_decodes(batch) if batch.num_decodes else []
        self._chunks = []
        start = 0
        for i in range(batch.num_decodes, batch.num_seqs):
            count = int(batch.host_query_lens[i])
            self._chunks += self._plan_chunk(batch, i, start, count)
            start += count

    def _plan_decodes(self, batch: AttentionBatch) -> list[_Decodes]:
        ends = batch.host_seq_lens[: batch.num_decodes].astype(np.int64)
        window = self.spec.sliding_window
        lengths = ends if window is None else np.minimum(ends, window)
        groups = _group(lengths, MAX_GATHERED // (self.spec.num_kv_heads * self.spec.head_dim))
        device = batch.block_tables.device
        plans = []
        for rows in groups:
            whole = len(groups) == 1
            rows = np.arange(len(lengths)) if whole else rows  # one matmul takes all rows as they are
            size = torch.from_numpy(lengths[rows]).to(device)[:, None]  # (r, 1)
            begin = torch.from_numpy(ends[rows] - lengths[rows]).to(device)[:, None]
            length = int(lengths[rows].max())
            column = torch.arange(length, device=device)  # (length,)
            padding = column >= size  # (r, length)
            index = None if whole else torch.from_numpy(rows).to(device)
            tables = batch.block_tables[: batch.num_decodes] if index is None else batch.block_tables[index]
            slots = self._slots(tables, begin + column.masked_fill(padding, 0))
            mask = None
            if bool((lengths[rows] < length).any()):
                mask = torch.zeros(padding.shape, dtype=self.dtype, device=device).masked_fill_(padding, -torch.inf)
                mask = mask[:, None, None]
            plans.append(_Decodes(index, slots.flatten(), length, mask))
        return plans

    def _plan_chunk(self, batch: AttentionBatch, i: int, start: int, count: int) -> list[_Chunk]:
        """Sequence i's ``count`` queries, from row ``start`` of the prompt part, split into as few chunks as fit."""
        end, window, device = int(batch.host_seq_lens[i]), self.spec.sliding_window, batch.block_tables.device
        step = max(1, MAX_SCORES // (self.spec.num_heads * end))
        chunks = []
        for first in range(0, count, step):
            last = min(first + step, count)
            low, high = end - count + first, end - count + last  # positions of these queries: [low, high)
            begin = 0 if window is None else max(0, low - window + 1)
            seen = torch.arange(begin, high, device=device)  # (length,)
            slots = self._slots(batch.block_tables[i : i + 1], seen[None]).flatten()
            mask = None
            if begin != low or (window is not None and high - low > window):
                at = torch.arange(low, high, device=device)[:, None]
                mask = seen <= at if window is None else (seen <= at) & (seen > at - window)
            chunks.append(_Chunk(start + first, start + last, slots, mask))
        return chunks

    def _slots(self, tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The cache slots of tokens. tables: (r, max_blocks); positions, result: (r, length) int64."""
        size = self.spec.block_size
        return tables.long().gather(1, positions // size) * size + positions % size

    # ------------------------------------------------------------------ attending: once a layer

    def decode(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        heads, kv, dim = q.shape[1], self.spec.num_kv_heads, q.shape[2]
        for plan in self._decodes:
            rows = q if plan.rows is None else q[plan.rows]
            k, v = self._gather(layer, plan.slots)  # (r * length, kv, dim)
            # Heads that share a kv head take the place of queries, so that k and v need not be repeated.
            attended = self._attend(
                rows.view(-1, kv, heads // kv, dim).to(self.dtype),
                k.view(-1, plan.length, kv, dim).transpose(1, 2),
                v.view(-1, plan.length, kv, dim).transpose(1, 2),
                plan.mask,
                False,
                self.spec.scale,
            ).reshape(-1, heads, dim)
            if plan.rows is None:
                out.copy_(attended)
            else:
                out[plan.rows] = attended.to(out.dtype)

    def prefill(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        heads, kv, dim = q.shape[1], self.spec.num_kv_heads, q.shape[2]
        group = heads // kv
        for plan in self._chunks:
            k, v = self._gather(layer, plan.slots)  # (length, kv, dim)
            shape = (kv, group, len(plan.slots), dim)
            attended = self._attend(
                q[plan.first : plan.last].view(-1, kv, group, dim).permute(1, 2, 0, 3).to(self.dtype),
                k.transpose(0, 1).unsqueeze(1).expand(shape),
                v.transpose(0, 1).unsqueeze(1).expand(shape),
                plan.mask,
                plan.mask is None,
                self.spec.scale,
            )  # (kv, group, rows, dim)
            out[plan.first : plan.last] = attended.permute(2, 0, 1, 3).reshape(-1, heads, dim).to(out.dtype)

    def _gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values at ``slots``, in scratch memory that the next call overwrites. (n, kv, dim) each."""
        cache = self.kv_cache[layer.index].flatten(1, 2)  # (2, num_blocks * block_size, kv, dim)
        n = len(slots)
        if self._scratch.shape[1] < n:
            with torch.inference_mode(False):  # usable inside and outside inference mode
                self._scratch = cache.new_empty((2, n + n // 4, *cache.shape[2:]))
        for part, out in zip(cache, self._scratch, strict=True):
            torch.index_select(part, 0, slots, out=out[:n])
        return self._scratch[0, :n].to(self.dtype), self._scratch[1, :n].to(self.dtype)


def attend_fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    """q (a, b, queries, dim), k and v (a, b, tokens, dim), mask broadcast to (a, b, queries, tokens)."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)


def attend_plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    """``attend_fused`` in three operations, because a GPU's fused float32 kernels may round to TF32."""
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril_()
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
    return scores.softmax(-1) @ v


def _group(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Rows grouped so that padding at most doubles the work and no group gathers more than ``budget`` tokens."""
    if len(lengths) * int(lengths.max()) <= min(budget, 2 * int(lengths.sum()) + SLACK):
        return [np.arange(len(lengths))]
    order = np.argsort(-lengths, kind="stable")
    groups, start = [], 0
    for i in range(1, len(order) + 1):
        longest = int(lengths[order[start]])
        if i == len(order) or 2 * int(lengths[order[i]]) < longest or (i + 1 - start) * longest > budget:
            groups.append(order[start:i])
            start = i
    return groups
