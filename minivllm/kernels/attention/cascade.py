"""The shared part of cascade attention: decode rows with a common prefix attend to it together, one item at a time.

Bytes moved: an item's keys and values once for up to ``rows`` decode rows, instead of once per row: 2 * keys *
num_kv_heads * head_dim elements. 256 rows on 2,048 common keys with 8 kv heads of 128 in bf16: 8.4 MB from memory and
67 MB from L2 instead of 2.1 GB; 4.3 GFLOP. One program handles one kv head's query heads of all of an item's rows, as
many as fill the MMA tile, and writes a normalized output and its log-sum-exp for each row and head. Decode attention
combines these with what the row attends to alone.

Which rows share which keys, and how they are split, is decided on the host when the running sequences change
(``core/cascade.py``). ``own_contexts`` then computes the rest: contexts without what items read.
"""

import torch

from minivllm.core.batch import Cascade
from minivllm.kernels._triton import LOG2E, next_power_of_2, num_sms, tl, triton
from minivllm.kernels.attention.paged_decode import SharedParts
from minivllm.kernels.attention.paged_prefill import as_multiplied, attend_keys
from minivllm.kernels.pdl import use_pdl

BLOCK_M, BLOCK_N = 64, 32  # queries and keys per tile
_WARPS, _STAGES, _REGISTERS = 4, 3, 152  # lets a program run beside one of ``stream_decode``


@triton.jit(do_not_specialize=["table_stride", "own_stride"], do_not_specialize_on_alignment=["seq_lens", "skips"])
def _own_kernel(
    tables, table_stride, seq_lens, skips, own_tables, own_stride, own_lens,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    skip = tl.load(skips + row)
    left = tl.load(seq_lens + row) - skip * BLOCK_SIZE
    tl.store(own_lens + row, left)
    used = (left + BLOCK_SIZE - 1) // BLOCK_SIZE
    for first in range(0, used, BLOCK):
        at = first + tl.arange(0, BLOCK)
        blocks = tl.load(tables + row * table_stride + skip + at, mask=at < used)
        tl.store(own_tables + row * own_stride + at, blocks, mask=at < used)


@triton.jit(
    do_not_specialize=["num_items", "scale", "table_stride"],
    do_not_specialize_on_alignment=["q", "order", "parts", "items"],
)
def _items_kernel(
    q,  # (rows, KV * G, D)
    k_cache,  # (blocks, BLOCK_SIZE, KV, D)
    v_cache,
    block_tables,  # (rows, table_stride) int32
    order,  # these three as in ``Cascade``
    parts,
    items,
    partial,  # (parts, KV * G, D) float32, written
    partial_lse,  # (parts, KV * G) float32, base 2, written
    num_items,
    scale,  # times log2(e)
    table_stride,
    q_stride,
    k_stride_block,
    k_stride_slot,
    k_stride_head,
    v_stride_block,
    v_stride_slot,
    v_stride_head,
    KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    k_head = k_cache + head * k_stride_head
    v_head = v_cache + head * v_stride_head
    index = tl.program_id(1)
    count = tl.load(items + index * ITEM + 1)
    while count > 0:  # items without rows come last
        item = items + index * ITEM
        first = tl.load(item)
        live = r // G < count
        table = block_tables + tl.load(item + 2).to(tl.int64) * table_stride
        begin = tl.load(item + 3)
        end = tl.load(item + 4)
        row = tl.load(order + first + r // G, mask=live, other=0)
        part = tl.load(parts + row * 2, mask=live, other=0) + tl.load(item + 5)
        mask = live[:, None] & (d < D)[None, :]
        at = row.to(tl.int64) * q_stride + (head * G + r % G) * D
        if PDL:  # until here only ``Cascade`` is read, which no kernel writes
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()  # late: the following decode attention reads early
        query = as_multiplied(tl.load(q + at[:, None] + d[None, :], mask=mask, other=0.0), k_cache)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        last = tl.zeros([BLOCK_M], tl.int32) + end - 1
        whole = begin + (end - begin) // BLOCK_N * BLOCK_N
        acc, m, total = attend_keys(
            acc, m, total, query, table, k_head, v_head, scale, begin, whole, end, last,
            k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
            D, 0, False, BLOCK_SIZE, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        if whole < end:
            acc, m, total = attend_keys(
                acc, m, total, query, table, k_head, v_head, scale, whole, end, end, last,
                k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
                D, 0, True, BLOCK_SIZE, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip
        to = part.to(tl.int64) * (KV * G) + head * G + r % G
        tl.store(partial + to[:, None] * D + d[None, :], acc / total[:, None], mask=mask)
        tl.store(partial_lse + to, m + tl.log2(total), mask=live)
        index += tl.num_programs(1)
        count = tl.load(items + index * ITEM + 1, mask=index < num_items, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


class CascadeWorkspace:
    """The static buffers for at most ``max_rows`` decode rows and ``max_parts`` parts, shared by all layers.

    partial (max_parts, heads, head_dim) and lse (max_parts, heads) float32; own_tables (max_rows, max_blocks) and
    own_lens (max_rows,) int32.
    """

    def __init__(
        self, max_rows: int, max_parts: int, max_blocks: int, num_heads: int, head_dim: int, device: torch.device | str,
    ) -> None:  # fmt: skip
        device = torch.device(device)
        self.partial = torch.zeros((max_parts, num_heads, head_dim), dtype=torch.float32, device=device)
        self.lse = torch.zeros((max_parts, num_heads), dtype=torch.float32, device=device)
        self.own_tables = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self.own_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.pdl = use_pdl(device)


def programs_a_head(num_kv_heads: int, device: torch.device, beside: bool) -> int:
    """One per SM, leaving room for a program of ``stream_decode``, or two. Room on only some SMs would let some of
    those start at once and all others late, although their shares are equal."""
    return max((1 if beside else 2) * num_sms(device) // num_kv_heads, 1)


def own_contexts(
    workspace: CascadeWorkspace, cascade: Cascade, block_tables: torch.Tensor, seq_lens: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables (n, …) and lengths (n,), int32, of each row's own context. Once per step: all layers share them."""
    n, w = len(cascade.skips), workspace
    _own_kernel[(n,)](
        block_tables, block_tables.stride(0), seq_lens, cascade.skips, w.own_tables, w.own_tables.stride(0), w.own_lens,
        BLOCK_SIZE=block_size, BLOCK=128, PDL=w.pdl, num_warps=1, launch_pdl=w.pdl,
    )  # fmt: skip
    return w.own_tables[:n], w.own_lens[:n]


def attend_cascade(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cascade: Cascade,
    scale: float,
    workspace: CascadeWorkspace,
) -> SharedParts:
    """Attend to what ``cascade``'s items read. q (rows, heads, head_dim); block_tables (rows, …) int32, for whole
    contexts."""
    heads, dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    w = workspace
    items, programs = cascade.items, programs_a_head(kv_heads, q.device, cascade.beside)
    _items_kernel[(kv_heads, min(len(items), programs))](
        q, k_cache, v_cache, block_tables, cascade.order, cascade.parts, items, w.partial, w.lse, len(items),
        scale * LOG2E, block_tables.stride(0), q.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
        KV=kv_heads, G=heads // kv_heads, D=dim, BLOCK_SIZE=block_size, ITEM=items.shape[1], BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N, BLOCK_D=next_power_of_2(dim), PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        PDL=w.pdl, num_warps=_WARPS, num_stages=_STAGES, maxnreg=_REGISTERS, launch_pdl=w.pdl,
    )  # fmt: skip
    return SharedParts(cascade.parts, w.partial, w.lse)
