"""Paged prefill attention: prompt chunks of any length after a cached prefix, causal, as in flash attention.

Work: 4 * head_dim * num_heads floating-point operations per (query, visible key) pair. 8 prompts of 1024 with 16 heads
of 128: 34 GFLOP, 57 µs at 600 TFLOP/s (keys and values come mostly from L2). One program handles a tile of query tokens
and all q heads of one kv head (so that a key is loaded once for all of them), and loops over the keys through the block
table: first the tiles that every row sees, without a mask, then those at the diagonal.

The mask is aligned to the bottom right: query token j of a row sees keys up to seq_len - query_len + j.
"""

from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch

from minivllm.kernels._triton import LOG2E, next_power_of_2, tl, triton
from minivllm.rounding import cdiv


@triton.jit
def page_ids(table, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block ids of keys [start, start + BLOCK_N): one id, or one per key. Keys past the end read as the last."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table + tl.minimum(start, end - 1) // BLOCK_SIZE)
    else:
        return tl.load(table + tl.minimum(start + tl.arange(0, BLOCK_N), end - 1) // BLOCK_SIZE)


@triton.jit
def as_multiplied(query, cache):
    """The query in the dtype in which it is multiplied: float16 for keys in float8, which become that in one
    instruction."""
    if (cache.dtype.element_ty == tl.float8e4nv) & (query.dtype == tl.bfloat16):
        return query.to(tl.float16)
    else:
        return query


@triton.jit
def attend_keys(
    acc,
    m,
    total,
    query,
    table,
    k_head,
    v_head,
    scale,
    begin,
    stop,  # this pass takes keys [begin, stop)
    end,  # keys from here on do not exist
    position,  # (BLOCK_M,): the last key that each row sees
    k_stride_block,
    k_stride_slot,
    v_stride_block,
    v_stride_slot,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    page = page_ids(table, begin, end, BLOCK_SIZE, BLOCK_N)
    for start in range(begin, stop, BLOCK_N):
        slot = tl.minimum(start + n, end - 1) % BLOCK_SIZE
        k_rows = page.to(tl.int64) * k_stride_block + slot * k_stride_slot
        v_rows = page.to(tl.int64) * v_stride_block + slot * v_stride_slot
        page = page_ids(table, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)  # prefetch for the next tile
        if BLOCK_D == D:
            key = tl.load(k_head + k_rows[:, None] + d[None, :])
            value = tl.load(v_head + v_rows[:, None] + d[None, :])
        else:
            key = tl.load(k_head + k_rows[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
            value = tl.load(v_head + v_rows[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
        key = key.to(query.dtype)  # from a cache in float8
        value = value.to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if MASKED:
            seen = (start + n)[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & ((start + n)[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
            new_m = tl.maximum(m, tl.max(score, 1) * scale)
            floor = tl.where(new_m == float("-inf"), 0.0, new_m)  # a row may see no key yet
        else:
            new_m = tl.maximum(m, tl.max(score, 1) * scale)
            floor = new_m
        p = tl.exp2(score * scale - floor[:, None])
        fade = tl.exp2(m - floor)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
        m = new_m
    return acc, m, total


@triton.jit(
    do_not_specialize=["first_row", "scale", "table_stride"],
    do_not_specialize_on_alignment=["query_start", "seq_lens", "tiles"],
)
def _prefill_kernel(
    q,  # (tokens, KV * G, D): the prompt rows' tokens only
    k_cache,  # (blocks, BLOCK_SIZE, KV, D)
    v_cache,
    block_tables,  # (rows, table_stride) int32
    query_start,  # (rows + 1,) int32
    seq_lens,  # (rows,) int32
    tiles,  # (grid, 2) int32: row relative to first_row (-1: none), the tile's first query token
    out,  # as q
    first_row,
    scale,  # times log2(e)
    table_stride,
    q_stride,
    out_stride,
    k_stride_block,
    k_stride_slot,
    k_stride_head,
    v_stride_block,
    v_stride_slot,
    v_stride_head,
    G: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # query tokens per program
    BLOCK_M: tl.constexpr,  # at least BLOCK_Q * G: a tile's rows are (token, head of the group)
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.load(tiles + tl.program_id(1) * 2)
    if row < 0:  # a captured step's grid has room for more tiles
        return
    row += first_row
    first = tl.load(tiles + tl.program_id(1) * 2 + 1)
    q_begin = tl.load(query_start + row)
    q_len = tl.load(query_start + row + 1) - q_begin
    seq_len = tl.load(seq_lens + row)
    q_begin = q_begin - tl.load(query_start + first_row)
    before = seq_len - q_len + first  # keys before the tile's first token

    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = r // G
    live = (token < BLOCK_Q) & (first + token < q_len)
    mask = live[:, None] & (d < D)[None, :]
    q_row = (q_begin + first + token).to(tl.int64)
    within = (head * G + r % G)[:, None] * D + d[None, :]
    query = as_multiplied(tl.load(q + q_row[:, None] * q_stride + within, mask=mask, other=0.0), k_cache)
    position = before + tl.minimum(token, BLOCK_Q - 1)

    table = block_tables + row.to(tl.int64) * table_stride
    k_head = k_cache + head * k_stride_head
    v_head = v_cache + head * v_stride_head
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = tl.maximum(tl.minimum(before + BLOCK_Q, seq_len), 0)  # queries before the first key see nothing
    if WINDOW > 0:
        begin = tl.maximum(before - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        middle = begin
    else:
        begin = 0
        middle = tl.maximum(before + 1, 0) // BLOCK_N * BLOCK_N  # every row sees the keys before this
        acc, m, total = attend_keys(
            acc,
            m,
            total,
            query,
            table,
            k_head,
            v_head,
            scale,
            begin,
            middle,
            end,
            position,
            k_stride_block,
            k_stride_slot,
            v_stride_block,
            v_stride_slot,
            D,
            WINDOW,
            False,
            BLOCK_SIZE,
            BLOCK_N,
            BLOCK_D,
            PRECISION,
        )
    acc, m, total = attend_keys(
        acc,
        m,
        total,
        query,
        table,
        k_head,
        v_head,
        scale,
        middle,
        end,
        end,
        position,
        k_stride_block,
        k_stride_slot,
        v_stride_block,
        v_stride_slot,
        D,
        WINDOW,
        True,
        BLOCK_SIZE,
        BLOCK_N,
        BLOCK_D,
        PRECISION,
    )
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + q_row[:, None] * out_stride + within, acc.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_config(head_dim: int, group: int, dtype: torch.dtype) -> PrefillConfig:
    padded = next_power_of_2(head_dim)
    if dtype == torch.float32:  # for tests and small models: no tensor cores, little shared memory
        return PrefillConfig(max(next_power_of_2(group), 16), 32 if padded <= 128 else 16, 4, 1)
    block_m = max(128, next_power_of_2(group))
    if padded <= 64:
        return PrefillConfig(block_m, 64, 4, 3)
    if padded <= 128:
        return PrefillConfig(block_m, 64, 8, 3)
    return PrefillConfig(block_m, 32, 8, 2)


def query_tiles(query_lens: np.ndarray, seq_lens: np.ndarray, block_q: int) -> np.ndarray:
    """(m, 2) int32: (row, first query token) of each tile of ``block_q`` tokens, the most work first."""
    tiles = longest_first(query_lens, seq_lens, block_q)
    return np.array([number for *_, row, first in tiles for number in (row, first)], dtype=np.int32).reshape(-1, 2)


def longest_first(query_lens: np.ndarray, seq_lens: np.ndarray, block_q: int) -> list[tuple[int, int, int, int]]:
    """The data of ``query_tiles``: (keys before the tile, keys that its last token sees, row, first query token). In
    plain Python: most steps have few tiles, for which numpy calls take longer."""
    rows = query_lens.nonzero()[0]
    lens = zip(rows.tolist(), query_lens[rows].tolist(), seq_lens[rows].tolist(), strict=True)
    tiles = [
        (seq - query + first, min(seq - query + first + block_q, seq), row, first)
        for row, query, seq in lens
        for first in range(0, query, block_q)
    ]
    return sorted(tiles, key=itemgetter(0), reverse=True)


def paged_prefill_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    config: PrefillConfig,
    first_row: int = 0,
    window: int | None = None,
) -> None:
    """``tiles``: ``query_tiles(…, block_q)`` with ``block_q = config.block_m // (heads // kv heads)``, on the device.
    Rows [0, first_row) of block_tables, query_start and seq_lens are decodes, whose tokens are not in q and out."""
    heads, dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    if not len(tiles):
        return
    group = heads // kv_heads
    _prefill_kernel[(kv_heads, len(tiles))](
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start,
        seq_lens,
        tiles,
        out,
        first_row,
        scale * LOG2E,
        block_tables.stride(0),
        q.stride(0),
        out.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        G=group,
        D=dim,
        WINDOW=window or 0,
        BLOCK_SIZE=block_size,
        BLOCK_Q=config.block_m // group,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=next_power_of_2(dim),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """q (t, heads, head_dim), sequences concatenated -> the same shape and dtype, computed in float32. A query before
    the first key (padding: a row with more query tokens than keys) gives zeros."""
    out, block_size = torch.zeros_like(q), k_cache.shape[1]
    group = q.shape[1] // k_cache.shape[2]
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for row, length in enumerate(lengths):
        tokens = slice(starts[row], starts[row + 1])
        count = tokens.stop - tokens.start
        if not length or not count:
            continue
        blocks = block_tables[row, : cdiv(length, block_size)].long()
        k = k_cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
        v = v_cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
        score = torch.einsum("qhd,khd->hqk", q[tokens].float(), k) * scale
        key = torch.arange(length, device=q.device)
        position = torch.arange(length - count, length, device=q.device)[:, None]
        hidden = key > position
        if window:
            hidden |= key <= position - window
        score = score.masked_fill(hidden, float("-inf"))
        weight = score.softmax(-1).masked_fill(position < 0, 0.0)
        out[tokens] = torch.einsum("hqk,khd->qhd", weight, v).to(q.dtype)
    return out


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """One call that plans for itself (it synchronizes to read the lengths). The ``triton`` backend plans once per step
    from the host's copies."""
    if not q.is_cuda:
        return paged_attention_reference(q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, window)
    group = q.shape[1] // k_cache.shape[2]
    config = prefill_config(q.shape[2], group, q.dtype)
    lens = seq_lens.cpu().numpy()
    tiles = query_tiles(query_start.diff().cpu().numpy(), lens, config.block_m // group)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    on_device = torch.from_numpy(tiles).to(q.device)
    paged_prefill_triton(
        q, k_cache, v_cache, block_tables, query_start, seq_lens, on_device, scale, out, config, 0, window
    )
    return out
