"""One attention step by hand, for the tests of backends: a paged cache, a batch, and what must come out."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend, AttentionSpec
from minivllm.kernels.paged_prefill import paged_attention_reference

LAYER = SimpleNamespace(index=1)


def spec_of(heads: int, kv_heads: int, head_dim: int, block_size: int, **options: object) -> AttentionSpec:
    usual = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 300, "max_model_len": 8192, "sliding_window": None}
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_layers=2,
        max_num_batched_tokens=8192,
        scale=head_dim**-0.5,
        **(usual | options),  # type: ignore[arg-type]
    )


@dataclass
class Step:
    """(query tokens, context) of each row, decodes first; keys and values in a cache of two layers."""

    spec: AttentionSpec
    lens: list[tuple[int, int]]
    num_decodes: int
    poison: bool = False  # what no context holds is NaN, table entries past a context are junk
    seed: int = 0

    def __post_init__(self) -> None:
        s, rng = self.spec, np.random.default_rng(self.seed)
        dtype, self.device = getattr(torch, s.dtype), torch.device(s.device)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        query, seq = (np.array(x, dtype=np.int32) for x in zip(*self.lens, strict=True))
        counts = -(-seq // s.block_size)
        blocks = int(counts.sum()) + 3
        shape = (2, 2, blocks, s.block_size, s.num_kv_heads, s.head_dim)
        self.cache = torch.randn(shape, device=self.device, generator=generator, dtype=torch.float32).to(dtype)
        ids = rng.permutation(np.arange(1, blocks))[: counts.sum()]
        tables = np.full((len(seq), int(counts.max()) + 1), 2**30 if self.poison else 0, dtype=np.int32)
        tables[np.arange(tables.shape[1]) < counts[:, None]] = ids
        if self.poison:
            held = np.zeros((blocks, s.block_size), dtype=bool)
            for row in range(len(seq)):
                at = np.arange(seq[row])
                held[tables[row, at // s.block_size], at % s.block_size] = True
            self.cache[:, :, torch.from_numpy(~held).to(self.device)] = float("nan")
        self.q = torch.randn((int(query.sum()), s.num_heads, s.head_dim), device=self.device, generator=generator).to(
            dtype
        )
        start = np.concatenate(([0], np.cumsum(query))).astype(np.int32)
        position = np.arange(start[-1]) + np.repeat(seq - query - start[:-1], query)
        row = np.repeat(np.arange(len(seq)), query)
        slots = tables[row, position // s.block_size].astype(np.int64) * s.block_size + position % s.block_size
        packed = torch.from_numpy(np.concatenate((start, seq))).to(self.device)  # as the runner: not aligned
        self.batch = AttentionBatch(
            num_decodes=self.num_decodes,
            query_start=packed[: len(start)],
            seq_lens=packed[len(start) :],
            block_tables=torch.from_numpy(tables).to(self.device),
            slot_mapping=torch.from_numpy(slots).to(self.device),
            host_query_lens=query,
            host_seq_lens=seq,
            host_block_tables=tables,
        )

    def expected(self) -> torch.Tensor:
        """In float32."""
        k, v = self.cache[LAYER.index].float()
        b, s = self.batch, self.spec
        return paged_attention_reference(
            self.q.float(), k, v, b.block_tables, b.query_start, b.seq_lens, s.scale, s.sliding_window
        )

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """Plan and attend, into poisoned memory."""
        backend.bind(self.cache)
        backend.plan(self.batch)
        out, d = torch.full_like(self.q, float("nan")), self.num_decodes
        if d:
            backend.decode(self.q[:d], LAYER, out[:d])
        if d < len(self.q):
            backend.prefill(self.q[d:], LAYER, out[d:])
        return out


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    assert out.isfinite().all(), "not every element was written, or garbage was read"
    return float((out.double() - expected.double()).norm() / expected.double().norm())
