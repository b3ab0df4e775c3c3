"""Paged decode attention: one query token per sequence, split over the keys (flash-decoding), one launch per layer.

Bytes moved: the context's keys and values, once: 2 * context * num_kv_heads * head_dim elements per sequence. 256
sequences of 128 to 1024 tokens (576 on average) with 8 kv heads of 128 in bf16: 604 MB, 140 µs at 4.3 TB/s.

Work is assigned on the device, so that a CUDA graph fixes only the grid. Once per step ``schedule_decode`` splits all
contexts into items (row, first key, last key) of about equal length, at most ``rows + extra`` of them for any lengths;
the grid is (kv heads, rows + extra), and programs without an item exit at once. Long items come first, so that short
ones fill the tail. A program handles all q heads of one kv head (padded to 16 rows for the tensor cores). A row with
one item writes its output directly; otherwise each item writes a partial result, and the last to finish merges them,
without a second launch.

With ``new``, q is the packed projection: each program norms and rotates its q heads. The one whose item ends a context
also prepares its new key, which it writes to the cache with the value, and uses from registers.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minivllm.kernels._triton import LOG2E, next_power_of_2, num_sms, tl, triton
from minivllm.kernels.attention.paged_prefill import as_multiplied, page_ids, paged_attention_reference
from minivllm.kernels.attention.rotary import normed_rotated
from minivllm.kernels.pdl import use_pdl
from minivllm.kernels.rms_norm import RowScale
from minivllm.rounding import cdiv

ITEM = 8  # int32 per work item: row (-1: none), first key, end, items of the row, the row's first item
MAX_SPLITS = 64  # items per row at most: the last to finish merges them alone


@triton.jit
def _keys(seq_lens, row, num_seqs, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first key that rows read, the end, and the tiles between; missing rows have none."""
    end = tl.load(seq_lens + row, mask=row < num_seqs, other=0).to(tl.int32)
    begin = tl.zeros_like(end)
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW, 0) // BLOCK_N * BLOCK_N
    return begin, end, (end - begin + BLOCK_N - 1) // BLOCK_N


@triton.jit
def _cut(tiles, live, share, min_tiles, MAX_SPLITS: tl.constexpr):
    """Tiles per item, equal within a row, and items per row, for rows of ``tiles`` if an item has about ``share``."""
    count = tl.minimum((tiles + share - 1) // share, tl.minimum(tiles // min_tiles, MAX_SPLITS))
    count = tl.maximum(count, 1)
    even = tl.maximum((tiles + count - 1) // count, 1)
    return even, tl.where(live, tl.maximum((tiles + even - 1) // even, 1), 0)


@triton.jit(
    do_not_specialize=["num_seqs", "max_items", "extra", "min_tiles"], do_not_specialize_on_alignment=["seq_lens"]
)
def _schedule_kernel(
    seq_lens,  # (num_seqs,) int32
    items,  # (max_items, ITEM) int32, written
    num_seqs,
    max_items,
    extra,
    min_tiles,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, BLOCK_B)
    begin, end, tiles = _keys(seq_lens, row, num_seqs, WINDOW, BLOCK_N)
    share = tl.maximum((tl.sum(tiles, 0) + extra - 1) // extra, 1)
    even, count = _cut(tiles, row < num_seqs, share, min_tiles, MAX_SPLITS)
    first = tl.cumsum(count, 0) - count
    for j in range(tl.max(count, 0)):
        item = items + (first + j) * ITEM
        mask = j < count
        key = begin + j * even * BLOCK_N
        tl.store(item, row, mask=mask)
        tl.store(item + 1, key, mask=mask)
        tl.store(item + 2, tl.minimum(key + even * BLOCK_N, end), mask=mask)
        tl.store(item + 3, count, mask=mask)
        tl.store(item + 4, first, mask=mask)
    total = tl.sum(count, 0)
    for start in range(0, max_items, BLOCK_B):
        i = start + row
        tl.store(items + i * ITEM, tl.full([BLOCK_B], -1, tl.int32), mask=(i >= total) & (i < max_items))


@triton.jit
def _gather(
    top,  # the largest log-sum-exp so far
    weight,  # (MERGE_G,), and (MERGE_G, BLOCK_D), relative to it
    merged,
    partial,  # (n, G, D) float32
    partial_lse,  # (n, G) float32, base 2
    base,  # the first partial result; the others are ``step`` apart
    step,
    count,
    G: tl.constexpr,
    D: tl.constexpr,
    MERGE_G: tl.constexpr,  # G padded to a power of two
    MERGE_S: tl.constexpr,  # partial results merged at once
    BLOCK_D: tl.constexpr,
):
    """Add normalized partial outputs, weighted by their log-sum-exps; all must have been written before."""
    mg = tl.arange(0, MERGE_G)
    s = tl.arange(0, MERGE_S)
    d = tl.arange(0, BLOCK_D)
    for start in range(0, count, MERGE_S):
        i = start + s
        live = (i < count)[:, None] & (mg < G)[None, :]
        at = (base + i * step)[:, None] * G + mg[None, :]
        lse = tl.load(partial_lse + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial + at[:, :, None] * D + d[None, None, :],
            mask=live[:, :, None] & (d < D)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(tl.where(mg[None, :] < G, lse, 0.0), 0))
        w = tl.exp2(lse - new_top[None, :])
        fade = tl.exp2(top - new_top)
        weight = weight * fade + tl.sum(w, 0)
        merged = merged * fade[:, None] + tl.sum(w[:, :, None] * part, 0)
        top = new_top
    return top, weight, merged


@triton.jit
def _tile(m, total, acc, query, key, value, seen, scale, PRECISION: tl.constexpr):
    """Process a tile of keys; returns the maximum (BLOCK_G,), sums (BLOCK_G, BLOCK_N), outputs (BLOCK_G, BLOCK_D)."""
    key = key.to(query.dtype)  # from a cache in float8
    value = value.to(query.dtype)
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    score = tl.where(seen[None, :], score, float("-inf"))
    new_m = tl.maximum(m, tl.max(score, 1))
    p = tl.exp2(score - new_m[:, None])
    fade = tl.exp2(m - new_m)
    total = total * fade[:, None] + p
    acc = tl.dot(p.to(value.dtype), value, acc * fade[:, None], input_precision=PRECISION)
    return new_m, total, acc


@triton.jit(
    do_not_specialize=["scale", "table_stride", "eps"],
    do_not_specialize_on_alignment=["seq_lens", "positions", "slot_mapping"],
)
def _decode_kernel(
    q,  # (rows, KV * G, D); if FUSED (rows, (KV * G + 2 * KV) * D): q, k and v
    k_cache,  # (blocks, BLOCK_SIZE, KV, D)
    v_cache,
    block_tables,  # (rows, table_stride) int32
    seq_lens,  # (rows,) int32
    items,  # (max_items, ITEM) int32
    partial,  # (max_items, KV, G, D) float32
    partial_lse,  # (max_items, KV, G) float32, base 2
    arrived,  # (rows, KV) int32: zero, and left zero
    out,  # (rows, KV * G, D)
    shared,  # (rows, 2) int32, or None: first of each row's parts in ``shared_partial``, number of parts
    shared_partial,  # (parts, KV, G, D) float32
    shared_lse,  # (parts, KV, G) float32, base 2
    q_weight,  # (D,) or None; this and all up to slot_mapping are read if FUSED
    k_weight,
    cos_sin,  # (positions, ROT) float32
    positions,  # (rows,)
    slot_mapping,  # (rows,): where the new key and value go
    eps,
    cos_sin_stride,
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
    KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK_G: tl.constexpr,  # G padded to the tensor core's 16 rows
    MERGE_G: tl.constexpr,
    MERGE_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    FUSED: tl.constexpr,
    ROT: tl.constexpr,
    EARLY: tl.constexpr,  # all but q and the new token is complete when this starts
    PEEL: tl.constexpr,  # with EARLY and FUSED: load the first tile before q is ready
    PDL: tl.constexpr,
):
    if PDL:
        if FUSED:
            tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    index = tl.program_id(1)
    item = items + index * ITEM
    row = tl.load(item, cache_modifier=".cg")
    begin = tl.load(item + 1, cache_modifier=".cg")
    end = tl.load(item + 2, cache_modifier=".cg")
    count = tl.load(item + 3, cache_modifier=".cg")
    first_item = tl.load(item + 4, cache_modifier=".cg")

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    q_mask = (g < G)[:, None] & (d < D)[None, :]
    table = block_tables + tl.maximum(row, 0).to(tl.int64) * table_stride
    k_head = k_cache + head * k_stride_head
    v_head = v_cache + head * v_stride_head
    n = tl.arange(0, BLOCK_N)
    if FUSED:
        final = first_item + count - 1  # the item that ends the context has the new key, in registers
        end -= tl.where(index == final, 1, 0)
    if PEEL:
        there = begin + n < tl.where(row >= 0, end, begin)
        first = tl.where(row >= 0, begin, 0)  # without an item, begin is an older step's, perhaps past these tables
        page = page_ids(table, first, tl.maximum(end, first + 1), BLOCK_SIZE, BLOCK_N)
        slot = (begin + n) % BLOCK_SIZE
        mask = there[:, None] & (d < D)[None, :]
        k_rows = page.to(tl.int64) * k_stride_block + slot * k_stride_slot
        v_rows = page.to(tl.int64) * v_stride_block + slot * v_stride_slot
        first_key = tl.load(k_head + k_rows[:, None] + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        first_value = tl.load(v_head + v_rows[:, None] + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        if not FUSED:
            tl.extra.cuda.gdc_launch_dependents()  # late: the next kernel may be this one, early
    if row < 0:
        return

    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)  # columns are summed at the end: no reduction per tile
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    q_row = q + row.to(tl.int64) * q_stride
    if FUSED:
        last = tl.full([1, 1], final, tl.int32) == index
        angles = cos_sin + tl.load(positions + row).to(tl.int64) * cos_sin_stride
        q_heads = q_row + (head * G + g)[:, None] * D
        query = normed_rotated(q_heads, (g < G)[:, None], q_weight, angles, eps, D, ROT, BLOCK_D)
        new_head = q_row + (KV * G + head + tl.zeros([1, 1], tl.int32)) * D
        new_key = normed_rotated(new_head, last, k_weight, angles, eps, D, ROT, BLOCK_D).to(k_cache.dtype.element_ty)
        new_mask = last & (d[None, :] < D)
        new_value = tl.load(new_head + KV * D + d[None, :], mask=new_mask, other=0.0).to(v_cache.dtype.element_ty)
        place = tl.load(slot_mapping + row).to(tl.int64)
        new_k = k_head + place // BLOCK_SIZE * k_stride_block + place % BLOCK_SIZE * k_stride_slot
        new_v = v_head + place // BLOCK_SIZE * v_stride_block + place % BLOCK_SIZE * v_stride_slot
        tl.store(new_k + d[None, :], new_key, mask=new_mask)
        tl.store(new_v + d[None, :], new_value, mask=new_mask)
        m = tl.where(index == final, tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1) * scale, m)
        total += tl.where(last & (n == 0)[None, :], 1.0, 0.0)
        acc += new_value.to(tl.float32)
    else:
        query = tl.load(q_row + (head * G + g)[:, None] * D + d[None, :], mask=q_mask, other=0.0)
    if WINDOW > 0:
        oldest = tl.load(seq_lens + row) - WINDOW
    query = as_multiplied(query, k_cache)

    if PEEL:  # noqa: SIM102 (compile-time conditions stand alone)
        if begin < end:
            seen = begin + n < end
            if WINDOW > 0:
                seen = seen & (begin + n >= oldest)
            m, total, acc = _tile(m, total, acc, query, first_key, first_value, seen, scale, PRECISION)
            begin += BLOCK_N
    if begin < end:
        page = page_ids(table, begin, end, BLOCK_SIZE, BLOCK_N)
        for start in range(begin, end, BLOCK_N):
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
            seen = start + n < end
            if WINDOW > 0:
                seen = seen & (start + n >= oldest)
            m, total, acc = _tile(m, total, acc, query, key, value, seen, scale, PRECISION)

    total = tl.sum(total, 1)
    normed = acc / tl.where(total > 0, total, 1.0)[:, None]
    if (count == 1) & (shared is None):
        to = out + row.to(tl.int64) * out_stride + (head * G + g)[:, None] * D + d[None, :]
        tl.store(to, normed.to(out.dtype.element_ty), mask=q_mask)
    else:
        base = (index * KV + head) * G
        tl.store(partial + (base + g)[:, None] * D + d[None, :], normed, mask=q_mask)
        tl.store(partial_lse + base + g, m + tl.log2(total), mask=g < G)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + row * KV + head, 1, sem="acq_rel", scope="gpu")
        if before == count - 1:
            tl.store(arrived + row * KV + head, 0)
            mg = tl.arange(0, MERGE_G)
            top = tl.full([MERGE_G], float("-inf"), tl.float32)
            weight = tl.zeros([MERGE_G], tl.float32)
            merged = tl.zeros([MERGE_G, BLOCK_D], tl.float32)
            base = first_item * KV + head
            top, weight, merged = _gather(
                top, weight, merged, partial, partial_lse, base, KV, count, G, D, MERGE_G, MERGE_S, BLOCK_D
            )
            if shared is not None:
                base = tl.load(shared + row * 2) * KV + head
                count = tl.load(shared + row * 2 + 1)
                top, weight, merged = _gather(
                    top, weight, merged, shared_partial, shared_lse, base, KV, count, G, D, MERGE_G, MERGE_S, BLOCK_D
                )
            merged = merged / tl.where(weight > 0, weight, 1.0)[:, None]
            to = out + row.to(tl.int64) * out_stride + (head * G + mg)[:, None] * D + d[None, :]
            tl.store(to, merged.to(out.dtype.element_ty), mask=(mg < G)[:, None] & (d < D)[None, :])


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    block_n: int
    num_warps: int
    num_stages: int
    programs: int  # about how many programs the contexts are split into, beyond one per row and kv head
    min_tiles: int = 2  # minimum of block_n tiles per item of a split row: merging costs more than a few
    peel: bool = False  # if possible, load the first tile into registers while the previous kernel still runs


_ROWS = 4, 16, 192  # up to these numbers of rows the first, second, third configuration is used; beyond, the last


def decode_config(head_dim: int, dtype: torch.dtype, num_sms: int, rows: int = 16) -> DecodeConfig:
    """What measured best on an H200 (docs/performance-log.md): tiles of 32 KiB of keys and as much of values; a quarter
    of that for many rows, whose contexts may be short. Few rows are split into little more than two programs per SM:
    otherwise parts of a long context wait for a free SM, and there are more to merge.
    """
    padded = next_power_of_2(head_dim) * dtype.itemsize  # bytes per key
    if dtype == torch.float8_e4m3fn and rows > _ROWS[0]:  # more time goes into arithmetic
        return DecodeConfig(64, num_warps=2, num_stages=3, programs=4 * num_sms)
    if rows > _ROWS[2]:
        return DecodeConfig(min(max((8 << 10) // padded, 16), 64), num_warps=4, num_stages=3, programs=4 * num_sms)
    block_n = min(max((32 << 10) // padded, 16), 128)
    small = block_n * padded < 32 << 10
    programs = 2 if rows <= _ROWS[0] or (rows <= _ROWS[1] and not small) else 4
    return DecodeConfig(
        block_n,
        num_warps=4,
        num_stages=3 if small else 2,
        programs=programs * num_sms,
        min_tiles=1,
        peel=rows <= _ROWS[1],
    )


class DecodeWorkspace:
    """The static buffers of paged decode for at most ``max_seqs`` rows: allocated once, shared by all layers.

    items (max_items, ITEM) int32; partial (max_items, heads, head_dim) and lse (max_items, heads) float32; arrived
    (max_seqs, kv heads) int32, zero between launches.
    """

    def __init__(
        self,
        max_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        window: int | None = None,
        config: DecodeConfig | None = None,
        max_len: int | None = None,
    ) -> None:
        device = torch.device(device)
        sms = num_sms(device)
        self._configs = [config or decode_config(head_dim, dtype, sms, n + 1) for n in (0, *_ROWS)]
        self.window, self._kv_heads, self._max_len = window or 0, num_kv_heads, max_len
        self.block_b = max(next_power_of_2(max_seqs), 16)
        ends = {1, max_seqs, *_ROWS, *(n + 1 for n in _ROWS)}
        most = max(n + self.extra(n) for n in ends if n <= max_seqs)
        self.items = torch.zeros((most, ITEM), dtype=torch.int32, device=device)
        self.partial = torch.zeros((most, num_heads, head_dim), dtype=torch.float32, device=device)
        self.lse = torch.zeros((most, num_heads), dtype=torch.float32, device=device)
        self.arrived = torch.zeros((max_seqs, num_kv_heads), dtype=torch.int32, device=device)
        self.pdl = use_pdl(device)

    def config(self, rows: int) -> DecodeConfig:
        return self._configs[bisect_left(_ROWS, rows)]

    def extra(self, rows: int) -> int:
        """How many items there may be beyond one per row."""
        c = self.config(rows)
        tiles = MAX_SPLITS if self._max_len is None else self._max_len // (c.block_n * c.min_tiles)
        splits = max(min(MAX_SPLITS, tiles), 2)  # items per row at most
        return min(max(cdiv(c.programs, self._kv_heads), 1), rows * (splits - 1))


def schedule_decode(workspace: DecodeWorkspace, seq_lens: torch.Tensor, rows: int) -> None:
    """Split the first ``rows`` contexts into items. Once per step, in the graph: all layers share the result."""
    extra, config = workspace.extra(rows), workspace.config(rows)
    _schedule_kernel[(1,)](
        seq_lens,
        workspace.items,
        rows,
        rows + extra,
        extra,
        config.min_tiles,
        WINDOW=workspace.window,
        BLOCK_N=config.block_n,
        MAX_SPLITS=MAX_SPLITS,
        ITEM=ITEM,
        BLOCK_B=16 if rows <= 16 else workspace.block_b,
        PDL=workspace.pdl,
        num_warps=1 if rows <= 16 else 8,
        launch_pdl=workspace.pdl,
    )


@dataclass(frozen=True, slots=True)
class NewTokens:
    """How to make q, k and v from a packed projection, as for ``rotary.qk_norm_rope_store``."""

    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    cos_sin: torch.Tensor  # (positions, rot_dim) float32
    positions: torch.Tensor  # (rows,) int64
    slot_mapping: torch.Tensor  # (rows,) int64
    scale: RowScale | None = None  # of the projection's rows; ``stream_decode`` only


class SharedParts(NamedTuple):
    """Attention over shared keys that rows have computed together (``cascade.py``)."""

    of_rows: torch.Tensor  # (rows, 2) int32: first of each row's parts, number of parts
    partial: torch.Tensor  # (parts, heads, head_dim) float32, normalized
    lse: torch.Tensor  # (parts, heads) float32, log-sum-exps in base 2


def paged_decode_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    workspace: DecodeWorkspace,
    new: NewTokens | None = None,
    early: bool = False,
    shared: SharedParts | None = None,
) -> None:
    """Call after ``schedule_decode`` with the same seq_lens. With ``new``, q is the packed projection. With ``shared``,
    contexts exclude the keys that these parts cover.

    ``early``: the previous kernel triggers this one late (``pdl``), and of what this one reads it writes only q
    (without ``new``, also the new tokens' keys and values): block tables, items and older keys are read while it runs.
    """
    rows, heads, dim = out.shape
    block_size, kv_heads = k_cache.shape[1:3]
    group, block_d, c = heads // kv_heads, next_power_of_2(dim), workspace.config(rows)
    merge_g = next_power_of_2(group)
    _decode_kernel[(kv_heads, rows + workspace.extra(rows))](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        workspace.items,
        workspace.partial,
        workspace.lse,
        workspace.arrived,
        out,
        *(shared or (None, None, None)),
        new and new.q_weight,
        new and new.k_weight,
        new and new.cos_sin,
        new and new.positions,
        new and new.slot_mapping,
        new.eps if new else 0.0,
        new.cos_sin.stride(0) if new else 0,
        scale * LOG2E,
        block_tables.stride(0),
        q.stride(0),
        out.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        KV=kv_heads,
        G=group,
        D=dim,
        WINDOW=workspace.window,
        BLOCK_SIZE=block_size,
        ITEM=ITEM,
        BLOCK_G=max(merge_g, 16),
        MERGE_G=merge_g,
        MERGE_S=max(min(4096 // (merge_g * block_d), 16), 1),
        BLOCK_D=block_d,
        BLOCK_N=c.block_n,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        FUSED=new is not None,
        ROT=new.cos_sin.shape[1] if new else 0,
        EARLY=early,
        PEEL=early and new is not None and c.peel,
        PDL=workspace.pdl,
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        launch_pdl=workspace.pdl,
    )


def paged_decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """q (rows, heads, head_dim) -> the same shape; a row of length 0 gives zeros."""
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return paged_attention_reference(q, k_cache, v_cache, block_tables, starts, seq_lens, scale, window)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """One call with its own workspace. The ``triton`` backend keeps the workspace and schedules once per step."""
    if not q.is_cuda:
        return paged_decode_reference(q, k_cache, v_cache, block_tables, seq_lens, scale, window)
    rows, heads, dim = q.shape
    workspace = DecodeWorkspace(rows, heads, k_cache.shape[2], dim, q.dtype, q.device, window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    schedule_decode(workspace, seq_lens, rows)
    paged_decode_triton(q, k_cache, v_cache, block_tables, seq_lens, scale, out, workspace)
    return out
