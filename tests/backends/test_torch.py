"""The reference backend against attention written out, on random paged layouts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import attention_batch

import minivllm.backends.torch as reference
from minivllm.backends.torch import TorchBackend
from minivllm.core.interfaces import AttentionSpec

SPEC = AttentionSpec(
    device="cpu",
    dtype="float32",
    num_heads=6,
    num_kv_heads=2,
    head_dim=24,
    block_size=4,
    num_layers=2,
    max_num_seqs=64,
    max_num_batched_tokens=4096,
    max_model_len=4096,
    scale=0.17,
)
STEPS = {  # (query lengths, context lengths, decodes)
    "whole prompts": ([1, 5, 16, 33], [1, 5, 16, 33], 0),
    "chunks": ([4, 1, 16, 7], [9, 41, 17, 64], 0),
    "decodes": ([1] * 7, [1, 2, 4, 5, 33, 16, 70], 7),
    "decodes of one length": ([1] * 3, [12] * 3, 3),
    "mixed": ([1, 1, 1, 8, 3, 20], [30, 1, 7, 8, 50, 21], 3),
    "one long decode among short ones": ([1] * 20, [3000, *range(1, 20)], 20),
}


def attend_naively(q, k, v, query_lens, seq_lens, spec):  # type: ignore[no-untyped-def]
    """One query, one head at a time, in float64. k, v: one (seq_len, kv heads, head_dim) a sequence."""
    rows, out = 0, torch.empty_like(q, dtype=torch.float64)
    for i, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for j in range(count):
            end = length - count + j + 1
            start = 0 if spec.sliding_window is None else max(0, end - spec.sliding_window)
            for head in range(spec.num_heads):
                kv = head * spec.num_kv_heads // spec.num_heads
                keys, values = k[i][start:end, kv].double(), v[i][start:end, kv].double()
                weights = (keys @ q[rows, head].double() * spec.scale).softmax(0)
                out[rows, head] = weights @ values
            rows += 1
    return out


def check(spec: AttentionSpec, query_lens: list[int], seq_lens: list[int], decodes: int, tolerance: float) -> None:
    random, dtype = np.random.default_rng(3), getattr(torch, spec.dtype)
    torch.manual_seed(3)
    counts = [-(-n // spec.block_size) for n in seq_lens]
    ids = random.permutation(np.arange(1, sum(counts) + 3))[: sum(counts)]
    tables = np.split(ids, np.cumsum(counts)[:-1])
    batch = attention_batch(query_lens, seq_lens, tables, spec.block_size, decodes, spec.device)
    shape = (spec.num_layers, 2, sum(counts) + 3, spec.block_size, spec.num_kv_heads, spec.head_dim)
    cache = torch.full(shape, float("nan"), dtype=dtype, device=spec.device)
    contexts = [torch.randn(2, n, spec.num_kv_heads, spec.head_dim).to(cache) for n in seq_lens]
    layer = SimpleNamespace(index=1)
    for table, context in zip(tables, contexts, strict=True):
        for position in range(context.shape[1]):
            block, offset = table[position // spec.block_size], position % spec.block_size
            cache[layer.index, :, block, offset] = context[:, position]
    q = torch.randn(sum(query_lens), spec.num_heads, spec.head_dim).to(cache)
    new = [context[:, n - count :] for context, n, count in zip(contexts, seq_lens, query_lens, strict=True)]
    k, v = torch.cat(new, dim=1)
    for context, count, table, n in zip(contexts, query_lens, tables, seq_lens, strict=True):
        assert count <= n and len(table) * spec.block_size >= n and context.shape[1] == n
    backend = TorchBackend(spec)
    backend.bind(cache.clone())
    first = batch.slot_mapping // spec.block_size, batch.slot_mapping % spec.block_size
    backend.kv_cache[layer.index, :, first[0], first[1]] = float("nan")  # forward has to write them
    backend.plan(batch)
    want = attend_naively(q, [c[0] for c in contexts], [c[1] for c in contexts], query_lens, seq_lens, spec)
    for attend in (backend._attend, reference.attend_plainly):  # this device's, and that of a GPU
        backend._attend = attend
        got = backend.forward(q, k, v, layer)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(backend.kv_cache, cache, rtol=0, atol=0, equal_nan=True)  # nothing else was touched


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("window", [None, 1, 6, 4096])
def test_equals_attention_written_out(step: str, window: int | None) -> None:
    check(replace(SPEC, sliding_window=window), *STEPS[step], 2e-5)


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1)])
def test_block_sizes_and_group_sizes(block_size: int, heads: tuple[int, int]) -> None:
    spec = replace(SPEC, block_size=block_size, num_heads=heads[0], num_kv_heads=heads[1])
    check(spec, *STEPS["mixed"], 2e-5)


@pytest.mark.parametrize("dtype,tolerance", [("float64", 1e-12), ("bfloat16", 1e-2), ("float16", 2e-3)])
def test_dtypes(dtype: str, tolerance: float) -> None:
    check(replace(SPEC, dtype=dtype), *STEPS["mixed"], tolerance)
    check(replace(SPEC, dtype=dtype), *STEPS["decodes"], tolerance)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("window", [None, 6])
def test_work_that_does_not_fit_one_product_is_split(
    monkeypatch: pytest.MonkeyPatch, step: str, window: int | None
) -> None:
    monkeypatch.setattr(reference, "MAX_GATHERED", 100 * SPEC.num_kv_heads * SPEC.head_dim)
    monkeypatch.setattr(reference, "MAX_SCORES", 100 * SPEC.num_heads)
    check(replace(SPEC, sliding_window=window), *STEPS[step], 2e-5)


@pytest.mark.parametrize("budget", [1, 50, 10_000, 1 << 20])
def test_groups_hold_every_row_once_and_bound_the_padding(budget: int) -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        lengths = random.integers(1, 5000, size=random.integers(1, 40))
        groups = reference._group(lengths, budget)
        assert sorted(np.concatenate(groups)) == list(range(len(lengths)))
        padded = sum(len(group) * int(lengths[group].max()) for group in groups)
        assert padded <= 2 * lengths.sum() + reference.SLACK
        assert all(len(group) == 1 or len(group) * lengths[group].max() <= budget for group in groups)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("window", [None, 6])
def test_gpu(step: str, window: int | None) -> None:
    check(replace(SPEC, device="cuda", sliding_window=window), *STEPS[step], 2e-5)
