"""One attention step built by hand: a paged cache, a batch and the expected output; eager, padded and captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from minivllm.core.batch import AttentionBatch, Cascade
from minivllm.core.cascade import CascadeLimits, plan_cascade
from minivllm.core.interfaces import AttentionBackend, AttentionSpec
from minivllm.kernels.attention.paged_prefill import paged_attention_reference
from minivllm.rounding import cdiv

LAYER = SimpleNamespace(index=1)  # the second of the cache's two layers
JUNK = 2**30  # a block id that must never be read


def spec_of(heads: int, kv_heads: int, head_dim: int, block_size: int, **options: Any) -> AttentionSpec:
    usual: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 300, "max_model_len": 8192}
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_layers=2,
        max_num_batched_tokens=8192,
        scale=head_dim**-0.5,
        **(usual | options),
    )


def attention_batch(
    query_lens: Sequence[int] | np.ndarray,
    seq_lens: Sequence[int] | np.ndarray,
    tables: Sequence[Sequence[int]] | np.ndarray,
    block_size: int,
    num_decodes: int,
    device: torch.device | str = "cpu",
    *,
    junk: int = JUNK,
) -> AttentionBatch:
    """Row i's last ``query_lens[i]`` of ``seq_lens[i]`` tokens are new. Table entries past a context hold ``junk``."""
    query, seq = np.asarray(query_lens, np.int32), np.asarray(seq_lens, np.int32)
    table = np.full((len(seq), max(map(len, tables))), junk, dtype=np.int32)
    for i, blocks in enumerate(tables):
        table[i, : len(blocks)] = blocks
    starts = np.concatenate(([0], np.cumsum(query))).astype(np.int32)
    position = np.arange(starts[-1]) + np.repeat(seq - query - starts[:-1], query)
    row = np.repeat(np.arange(len(seq)), query)
    slots = table[row, position // block_size].astype(np.int64) * block_size + position % block_size
    packed = torch.from_numpy(np.concatenate((starts, seq))).to(device)  # not aligned, unlike the runner's
    return AttentionBatch(
        num_decodes=num_decodes,
        query_start=packed[: len(starts)],
        seq_lens=packed[len(starts) :],
        block_tables=torch.from_numpy(table).to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        host_query_lens=query,
        host_seq_lens=seq,
        host_block_tables=table,
    )


def plan_eager(backend: AttentionBackend, batch: AttentionBatch) -> None:
    """Have a bound backend plan an eager step, as the runner does."""
    d = batch.num_decodes
    words = backend.prompt_words(batch.host_query_lens[d:], batch.host_seq_lens[d:])
    batch.prompt_words = torch.from_numpy(words.copy()).to(batch.seq_lens.device)  # some arrays are read-only
    backend.plan(batch)


@dataclass
class Step:
    """(query tokens, context) of each row, decodes first; keys and values in a cache of two layers.

    ``poison``: cache slots outside all contexts are NaN, and table entries past a context are junk. ``shared``: the
    number of leading tokens whose blocks all rows share (whole blocks, and none of a row's query tokens).
    """

    spec: AttentionSpec
    lens: list[tuple[int, int]]
    num_decodes: int
    poison: bool = False
    seed: int = 0
    shared: int = 0

    def __post_init__(self) -> None:
        s, size = self.spec, self.spec.block_size
        rng, device = np.random.default_rng(self.seed), torch.device(s.device)
        generator = torch.Generator(device).manual_seed(self.seed)
        query, seq = (np.array(x, dtype=np.int32) for x in zip(*self.lens, strict=True))
        common = self.shared // size
        assert common * size == self.shared and (seq - query >= self.shared).all()
        own = cdiv(seq, size) - common
        ids = rng.permutation(np.arange(1, common + own.sum() + 3)).tolist()
        head = [ids.pop() for _ in range(common)]
        tables = [head + [ids.pop() for _ in range(n)] for n in own]
        shape = (2, 2, common + int(own.sum()) + 3, size, s.num_kv_heads, s.head_dim)
        self.cache = torch.randn(shape, device=device, generator=generator)
        if self.poison:
            held = torch.zeros(shape[2:4], dtype=torch.bool)
            for blocks, length in zip(tables, seq, strict=True):
                at = torch.arange(int(length))
                held[torch.tensor(blocks)[at // size], at % size] = True
            self.cache[:, :, ~held.to(device)] = float("nan")
        self.cache = self.cache.to(s.cache_dtype)
        q_shape = (int(query.sum()), s.num_heads, s.head_dim)
        self.q = torch.randn(q_shape, device=device, generator=generator).to(getattr(torch, s.dtype))
        junk = JUNK if self.poison else 0
        self.batch = attention_batch(query, seq, tables, size, self.num_decodes, device, junk=junk)

    def read_once(self, limits: CascadeLimits) -> None:
        """Have the decodes read their shared prefix once (cascade). Raises AssertionError if they share too little."""
        b, d = self.batch, self.num_decodes
        computed = (b.host_seq_lens - b.host_query_lens)[:d]
        limits = replace(limits, saved_keys=1)
        plan = plan_cascade(b.host_block_tables, np.arange(d), computed, self.spec.block_size, limits)
        assert plan is not None, "the rows share too little"
        numbers = plan.padded(d, limits.items)
        b.cascade = Cascade.of(torch.from_numpy(numbers).to(self.q.device), d, plan.beside)

    def expected(self) -> torch.Tensor:
        """The attention output, computed in float32."""
        k, v = self.cache[LAYER.index].float()
        b, s = self.batch, self.spec
        return paged_attention_reference(
            self.q.float(), k, v, b.block_tables, b.query_start, b.seq_lens, s.scale, s.sliding_window
        )

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """Have the backend plan, write the new keys and values, and attend, with the output prefilled with NaN."""
        if not backend.keeps_cache_write():
            return self._run_by_forward(backend)
        b, at = self.batch, self._slots(self.batch)
        k, v = self.cache[(LAYER.index, slice(None), *at)].to(self.q)
        cache = self.cache.clone()
        cache[(LAYER.index, slice(None), *at)] = float("nan")
        backend.bind(cache)
        plan_eager(backend, b)
        backend.write(k, v, LAYER)
        out, d = torch.full_like(self.q, float("nan")), self.num_decodes
        if d:
            backend.decode(self.q[:d], LAYER, out[:d])
        if d < len(self.q):
            backend.prefill(self.q[d:], LAYER, out[d:])
        if backend.fresh_prompts:
            self._check_fresh(backend, k[d:], v[d:], out[d:])
        held, its = (which.float().nan_to_num() for which in (cache, self.cache))
        assert torch.equal(held, its), "the cache holds something else than it should"
        return out

    def _check_fresh(self, backend: AttentionBackend, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """``prefill_fresh`` must equal ``prefill``, given keys and values that are views of a packed projection."""
        d, lens = self.num_decodes, self.batch.host_query_lens
        assert (lens[d:] == self.batch.host_seq_lens[d:]).all(), "fresh_prompts is set in a step that continues one"
        q = self.q[d:]
        _, k, v = torch.cat((q, k, v), dim=1).split((q.shape[1], k.shape[1], v.shape[1]), dim=1)
        fresh = torch.full_like(q, float("nan"))
        backend.prefill_fresh(q, k, v, LAYER, fresh)
        assert relative_error(fresh, out) < (1e-5 if q.dtype == torch.float32 else 1e-2)

    def _run_by_forward(self, backend: AttentionBackend) -> torch.Tensor:
        """For a backend with its own cache layout: it writes the contexts itself, one prompt chunk per step."""
        b, size = self.batch, self.spec.block_size
        backend.bind(torch.full_like(self.cache, float("nan") if self.poison else 0.0))
        most = self.spec.max_num_batched_tokens
        for row, (query, seq) in enumerate(self.lens):
            for start in range(self.shared if row else 0, seq - query, most):
                end = min(start + most, seq - query)
                chunk = attention_batch(
                    [end - start], [end], b.host_block_tables[row : row + 1], size, 0, self.q.device
                )
                self._forward(backend, chunk, torch.zeros_like(self.q[:1]).expand(end - start, -1, -1).contiguous())
        return self._forward(backend, b, self.q)

    def _forward(self, backend: AttentionBackend, batch: AttentionBatch, q: torch.Tensor) -> torch.Tensor:
        k, v = self.cache[(LAYER.index, slice(None), *self._slots(batch))].to(self.q)
        plan_eager(backend, batch)
        return backend.forward(q, k, v, LAYER)

    def _slots(self, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.slot_mapping // self.spec.block_size, batch.slot_mapping % self.spec.block_size

    def padded(self, size: int) -> Step:
        """The same decodes padded to ``size`` rows, as in a CUDA graph: padding rows write to block 0."""
        more = size - len(self.lens)
        assert self.num_decodes == len(self.lens) and more >= 0
        step = object.__new__(Step)
        step.__dict__ |= self.__dict__
        step.lens, step.num_decodes = [*self.lens, *[(1, 1)] * more], size
        step.q = torch.cat([self.q, self.q[:1].expand(more, -1, -1)])
        b = self.batch
        tables = np.concatenate([b.host_block_tables, np.zeros((more, b.host_block_tables.shape[1]), np.int32)])
        lens = np.concatenate([b.host_seq_lens, np.ones(more, np.int32)])
        step.batch = attention_batch(np.ones(size), lens, tables, self.spec.block_size, size, self.q.device)
        step.cache = self.cache.clone()
        step.cache[:, :, 0, 0] = 1.0  # any value, the same for all padding rows
        return step


class Captured:
    """A step of ``decodes`` decode rows and ``prompts`` prompt rows (``tokens`` in all), captured as the runner does:
    static buffers, plan, warm-up, capture. The row after the last prompt is padding. ``whole``: all prompts start in
    this step."""

    def __init__(
        self, backend: AttentionBackend, cache: torch.Tensor, decodes: int, prompts: int = 0, tokens: int = 0, *,
        whole: bool = False,
    ) -> None:  # fmt: skip
        spec, device, rows = backend.spec, cache.device, decodes + prompts
        self.backend, self.decodes, self.prompts, self.tokens, self.whole = backend, decodes, prompts, tokens, whole
        self.width, self.cache = cdiv(spec.max_model_len, spec.block_size), cache
        self.query_start = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.ones(rows, dtype=torch.int32, device=device)
        self.tables = torch.zeros((rows, self.width), dtype=torch.int32, device=device)
        self.slots = torch.zeros(decodes + tokens, dtype=torch.int64, device=device)
        dtype = getattr(torch, spec.dtype)
        self.q = torch.zeros(decodes + tokens, spec.num_heads, spec.head_dim, dtype=dtype, device=device)
        self.k, self.v = self.q.new_zeros(2, decodes + tokens, spec.num_kv_heads, spec.head_dim)  # prompts' are read
        self.out = torch.empty_like(self.q)
        backend.bind(cache)
        none = np.zeros(prompts, np.int32)
        words = backend.prompt_words(none, none, tokens) if prompts else none
        self.words = torch.zeros(len(words), dtype=torch.int32, device=device)
        self._plan([1] * decodes, [], np.zeros((rows, 1), np.int32))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._attend()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._attend()

    def _plan(self, decodes: Sequence[int], prompts: Sequence[tuple[int, int]], tables: np.ndarray) -> None:
        """``decodes``: context lengths of all decode rows; ``prompts``: (query tokens, context), without padding."""
        rest = self.tokens - sum(query for query, _ in prompts)
        padded = [*prompts, (rest, 1), *[(0, 1)] * (self.prompts - len(prompts) - 1)] if self.prompts else []
        lens = np.array([(1, seq) for seq in decodes] + padded, np.int32)
        query, seq = np.ascontiguousarray(lens.T)
        self.query_start[1:].copy_(torch.from_numpy(np.cumsum(query, dtype=np.int32)))
        self.seq_lens.copy_(torch.from_numpy(seq))
        self.tables[:, : tables.shape[1]].copy_(torch.from_numpy(tables)[:, : self.width])
        if self.prompts:
            words = self.backend.prompt_words(query[self.decodes :], seq[self.decodes :], self.tokens)
            self.words.copy_(torch.from_numpy(words))
        self.backend.batch = AttentionBatch(
            num_decodes=self.decodes,
            query_start=self.query_start,
            seq_lens=self.seq_lens,
            block_tables=self.tables,
            slot_mapping=self.slots,
            host_query_lens=query,
            host_seq_lens=seq,
            host_block_tables=tables,
            graph_size=self.decodes + self.tokens,
            graph_whole=self.whole,
            prompt_words=self.words,
        )
        self.backend.plan(self.backend.batch)

    def _attend(self) -> None:
        new = (self.k, self.v) if self.backend.fresh_prompts else ()
        for index in (0, 1):  # layer 0 first, as in a model
            self.backend.attend_into(self.out, self.q, SimpleNamespace(index=index), *new)

    def replay(self, step: Step) -> torch.Tensor:
        """Run ``step``, which must fit, on the bound cache, which holds its contexts."""
        d, n, b = self.decodes, step.num_decodes, step.batch
        t = len(step.q) - n
        assert n <= d and t <= self.tokens and len(step.lens) - n < max(self.prompts, 1)
        seq_lens = np.ones(d, np.int32)
        seq_lens[:n] = b.host_seq_lens[:n]
        tables = np.zeros((d + self.prompts, b.host_block_tables.shape[1]), np.int32)
        tables[:n], tables[d : d + len(step.lens) - n] = b.host_block_tables[:n], b.host_block_tables[n:]
        self.q[:n], self.q[d : d + t] = step.q[:n], step.q[n:]
        size = self.backend.spec.block_size
        at = b.slot_mapping[n:]
        self.k[d : d + t], self.v[d : d + t] = self.cache[LAYER.index, :, at // size, at % size].to(self.q)
        self.out.fill_(float("nan"))
        self._plan(seq_lens.tolist(), step.lens[n:], tables)
        self.graph.replay()
        return torch.cat([self.out[:n], self.out[d : d + t]])


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    out, expected = out.double(), expected.double()
    assert out.isfinite().all(), "not every element was written, or garbage was read"
    return float((out - expected).norm() / expected.norm())
