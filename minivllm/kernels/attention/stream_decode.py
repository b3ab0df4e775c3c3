"""Paged decode attention on Hopper that reads the pages of all sequences as one stream, in equal shares without gaps.

Bytes moved: the context's keys and values, once, as in ``paged_decode``. There each program reads one head of a part of
a sequence, and an SM with room for few programs reads nothing while one ends and the next begins. Here one program per
SM reads whole pages, all heads; its TMA loads (64 KiB for a page of 8 heads of 128) run ahead across sequences and may
begin before the previous kernel ends (``early``, see pdl.py). It also accepts the packed projection instead of q, and
norms, rotates and stores it in separate warps beside the loads.

Once per step ``schedule_stream`` computes where each sequence's pages start and each program's share, including the
blocks of its first pages, so that one read suffices to start loading. The kernel is CUDA C++ (``stream_decode.cu``).
Shares follow Stream-K (Osama et al., 2023), combining parts follows flash-decoding (Dao et al., 2023).
"""

import ctypes
from dataclasses import replace
from functools import cache

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import LOG2E, compiling, next_power_of_2, num_sms, tl, triton
from minivllm.kernels.attention.paged_decode import NewTokens, SharedParts
from minivllm.kernels.hopper import FIXED_BYTES, SHARED_BYTES, Kernel, launch_kernel, load, loads
from minivllm.kernels.pdl import use_pdl

_PAGE, _MAX_STAGES = 16, 24
_WARPS, _HELPERS = 8, 3  # process pages; prepare queries. One more warp loads pages
_LEAST = 2  # pages of a program whose share spans several sequences
_PART = 0.6  # cost of adding a part of a sequence, in pages of bfloat16
_SHARE, _NAMED = 8, 32  # fields of a program's share; blocks of its first pages
_MAX_GROUP = 8  # query heads per key head: columns of an MMA tile
_BESIDE = 68 << 10  # bytes of an SM's shared memory left to the kernel that makes shared parts
MAX_ROWS = 1024


@triton.jit(do_not_specialize=["rows", "table_stride"], do_not_specialize_on_alignment=["seq_lens", "tables"])
def _shares_kernel(
    seq_lens,  # (rows,) int32
    tables,  # (rows, …) int32
    table_stride,
    starts,  # (rows + 1,) int32, written
    shares,  # (programs, _SHARE + _NAMED) int32, written
    rows,
    PAGE: tl.constexpr,
    LEAST: tl.constexpr,
    PART: tl.constexpr,
    SHARE: tl.constexpr,
    NAMED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program writes one program's share of the stream. All count the pages; the first writes where sequences
    start. Shares are of one sequence each unless that makes them much longer: queries of a second one cost three
    pages."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, program, grid = tl.arange(0, BLOCK), tl.program_id(0), tl.num_programs(0)
    live = row < rows
    pages = (tl.load(seq_lens + row, mask=live, other=0) + PAGE - 1) // PAGE
    pages = tl.where(live, tl.maximum(pages, 1), 0)
    ends, all_pages = tl.cumsum(pages, 0), tl.sum(pages)
    if program == 0:
        tl.store(starts + 1 + row, ends, mask=live)
        tl.store(starts + row, tl.zeros([BLOCK], tl.int32), mask=row == 0)
    # At least so many pages that the longest sequence's parts cost no more than its pages; fewer if memory would idle.
    fewest = tl.ceil(tl.sqrt(tl.max(pages).to(tl.float32) * PART)).to(tl.int32)
    fewest = tl.minimum(fewest, tl.maximum(tl.cdiv(4 * all_pages, 3 * grid), 4))
    each = tl.maximum(tl.cdiv(all_pages, grid), fewest)
    each += (tl.sum(tl.cdiv(pages, each)) > grid).to(tl.int32)
    splits = tl.cdiv(pages, each)
    split_ends, all_splits = tl.cumsum(splits, 0), tl.sum(splits)
    if all_splits <= grid:
        first_row = tl.sum((live & (split_ends <= program)).to(tl.int32))
        last_row = first_row
        own = row == first_row
        start, its_pages = tl.sum(tl.where(own, ends - pages, 0)), tl.sum(tl.where(own, pages, 0))
        its_splits = tl.maximum(tl.sum(tl.where(own, splits, 0)), 1)
        begins = tl.sum(tl.where(own, split_ends - splits, 0))
        first = start + tl.cdiv((program - begins) * its_pages, its_splits)
        last = start + tl.cdiv((program + 1 - begins) * its_pages, its_splits)
    else:
        programs = tl.minimum(grid, tl.maximum(all_pages // LEAST, 1))
        first = tl.minimum(program, programs) * all_pages // programs
        last = tl.minimum(program + 1, programs) * all_pages // programs
        first_row = tl.sum((live & (ends <= first)).to(tl.int32))
        last_row = tl.sum((live & (ends < last)).to(tl.int32))
        start = tl.sum(tl.where(row == first_row, ends - pages, 0))
        begins = ((start + 1) * programs - 1) // all_pages
    end = tl.sum(tl.where(row == last_row, ends, 0))
    begin = tl.sum(tl.where(row == last_row, ends - pages, 0))
    page = tl.maximum(begin, first)
    some = tl.minimum(tl.maximum(tl.minimum(end, last) - page, 0), NAMED)
    to = shares + program * (SHARE + NAMED)
    tl.store(to, first)
    tl.store(to + 1, last)
    tl.store(to + 2, first_row)
    tl.store(to + 3, last_row)
    tl.store(to + 4, some)  # its first sequence's pages, whose blocks follow
    tl.store(to + 5, (page + some == end).to(tl.int32))  # whether the last of them holds the new token
    tl.store(to + 6, begins)  # the program with its first row's first pages
    name = tl.arange(0, NAMED)
    blocks = tl.load(tables + last_row * table_stride + page - begin + name, mask=name < some, other=0)
    tl.store(to + SHARE + name, blocks)


def fits_stream(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    device: torch.device,
    window: int | None,
    max_rows: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> bool:
    """Whether the kernel supports such attention, if it loads. ``dtype``: of queries and outputs."""
    pages = num_kv_heads in (2, 4, 8) and head_dim in (64, 128) and block_size == _PAGE
    rows = max_rows <= MAX_ROWS and num_heads // num_kv_heads <= _MAX_GROUP
    dtypes = dtype == torch.bfloat16 and cache_dtype in (torch.bfloat16, torch.float8_e4m3fn)
    return pages and rows and dtypes and window is None and nvrtc.available(device)


@cache
def _kernel(
    num_kv_heads: int, group: int, head_dim: int, qkv: bool = False, shared: bool = False, float8: bool = False
) -> Kernel:
    macros = {"KV": num_kv_heads, "G": group, "D": head_dim, "QKV": int(qkv), "SHARED": int(shared),
              "FLOAT8": int(float8), "WARPS": _WARPS, "HELPERS": _HELPERS, "MAX_STAGES": _MAX_STAGES, "SHARE": _SHARE,
              "NAMED": _NAMED}  # fmt: skip
    return Kernel("stream_decode", (), tuple(macros.items()))


_POINTERS = ("x", "query_norm", "key_norm", "angles", "positions", "slots", "keys", "values")


class _NewArgument(ctypes.Structure):
    """``New`` of stream_decode.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_longlong) for name in ("x_stride", "angles_stride")),
        ("size", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("eps", "x_eps")),
    ]


def _new_argument(new: NewTokens | None, k_cache: torch.Tensor, v_cache: torch.Tensor) -> _NewArgument:
    if new is None:
        return _NewArgument()
    assert new.positions.dtype == new.slot_mapping.dtype == torch.int64 and new.cos_sin.dtype == torch.float32
    assert new.cos_sin.shape[1] == k_cache.shape[3] and new.cos_sin.stride(0) % 4 == 0  # all of a head rotates
    assert all(t is None or t.data_ptr() % 16 == 0 for t in (new.q_weight, new.k_weight, new.cos_sin))
    x, x_eps = (None, 0.0) if new.scale is None else (new.scale.x, new.scale.eps)
    assert x is None or _in_eights(x)
    tensors = (x, new.q_weight, new.k_weight, new.cos_sin, new.positions, new.slot_mapping, k_cache, v_cache)
    return _NewArgument(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        0 if x is None else x.stride(0), new.cos_sin.stride(0), 0 if x is None else x.shape[1], new.eps, x_eps,
    )  # fmt: skip


class _SharedArgument(ctypes.Structure):
    """``Shared`` of stream_decode.cu."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("of_rows", "outs", "tops")]


def _in_eights(x: torch.Tensor) -> bool:
    """Whether the kernel, which reads 16 bytes at a time, can read its rows."""
    return x.stride(1) == 1 and x.shape[1] % 8 == x.stride(0) % 8 == x.data_ptr() % 16 == 0


class StreamWorkspace:
    """The static buffers of ``stream_decode`` for at most ``max_rows`` rows: allocated once, shared by all layers.
    ``float8``: the cache is in float8_e4m3fn.

    starts (max_rows + 1,) int32: pages before each sequence's; shares: see ``_shares_kernel``; parts: of sequences
    split between programs, float32; all bits set means absent, as everything is between launches.
    """

    def __init__(
        self,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        float8: bool = False,
    ) -> None:
        self.device = device = torch.device(device)
        shape = (num_kv_heads, num_heads // num_kv_heads, head_dim)
        self.kernel, self.kernel_qkv, self.kernel_shared = (
            _kernel(*shape, qkv, shared, float8) for qkv, shared in ((False, False), (True, False), (False, True))
        )
        itemsize = 1 if float8 else 2
        self.part_cost = _PART * 2 / itemsize
        self.programs = num_sms(device)
        self.block = max(next_power_of_2(max_rows), 16)
        tiles = head_dim * num_kv_heads // _WARPS // 16
        self.starts = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.shares = torch.zeros((self.programs, _SHARE + _NAMED), dtype=torch.int32, device=device)
        parts = torch.full((self.programs, _WARPS, tiles + 1, 32, 4), -1, dtype=torch.int32, device=device)
        self.parts = parts.view(torch.float32)
        self.pdl = use_pdl(device)
        page_bytes = 2 * _PAGE * num_kv_heads * head_dim * itemsize
        other_bytes = (num_heads + 2 * num_kv_heads) * head_dim * 2 + 4 * (max_rows + 1)  # a row of q, starts

        def stages(room: int) -> tuple[int, nvrtc.LaunchShape]:
            number = min((room - FIXED_BYTES - other_bytes) // page_bytes, _MAX_STAGES)
            threads, size = 32 * (_WARPS + 1 + _HELPERS), number * page_bytes + 1024 + other_bytes
            return number, nvrtc.LaunchShape((self.programs, 1, 1), (1, 1, 1), threads, size, self.pdl)

        self.stages, self.shape = stages(SHARED_BYTES)
        self.stages_shared, self.shape_shared = stages(SHARED_BYTES - _BESIDE)

    def takes_heads(self) -> bool:
        """Whether the kernel for separate queries, keys and values loads."""
        return loads(self.kernel, self.device)

    def takes_qkv(self) -> bool:
        """Whether the kernel for the packed projection loads."""
        return loads(self.kernel_qkv, self.device)

    def takes_shared(self) -> bool:
        """Whether the kernel for rows with shared parts loads."""
        return loads(self.kernel_shared, self.device)


def schedule_stream(workspace: StreamWorkspace, block_tables: torch.Tensor, seq_lens: torch.Tensor, rows: int) -> None:
    """Assign the pages of the first ``rows`` contexts to programs. Once per step, in the graph: all layers share it."""
    _shares_kernel[(workspace.programs,)](
        seq_lens, block_tables, block_tables.stride(0), workspace.starts, workspace.shares, rows, PAGE=_PAGE,
        LEAST=_LEAST, PART=workspace.part_cost, SHARE=_SHARE, NAMED=_NAMED, BLOCK=workspace.block, PDL=workspace.pdl,
        num_warps=4, launch_pdl=workspace.pdl,
    )  # fmt: skip


def stream_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    workspace: StreamWorkspace,
    new: NewTokens | None = None,
    early: bool = False,
    shared: SharedParts | None = None,
) -> None:
    """Call after ``schedule_stream`` with the same tables and lengths. q, out: (rows, heads, head_dim); caches (blocks,
    16, kv heads, head_dim) contiguous, of the dtype that the workspace is for; block_tables (rows, …) int32; seq_lens
    (rows,) int32. ``early`` as in ``paged_decode``. With ``new``, q is the packed projection, (rows, (heads + 2 * kv
    heads) * head_dim), whose rows need not start this late."""
    if compiling():
        return
    if new is not None and new.scale is not None and (new.scale.bias is not None or not _in_eights(new.scale.x)):
        q, new = new.scale.applied_to(q), replace(new, scale=None)
    rows, _, dim = out.shape
    blocks, size, kv_heads = k_cache.shape[:3]
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and block_tables.stride(1) == 1
    assert q.stride(-1) == 1 and (new is not None or q.stride(1) == dim) and out.stride(1) == dim
    assert k_cache.itemsize > 1 or out.stride(0) % 4 == out.data_ptr() % 8 == 0  # then four outputs are written at once
    if q.stride(0) % 8 or q.data_ptr() % 16:  # a row is copied whole
        q = q.contiguous()
    assert new is None or shared is None
    kernel, stages, shape = workspace.kernel, workspace.stages, workspace.shape
    if new is not None:
        kernel = workspace.kernel_qkv
    elif shared is not None:
        kernel, stages, shape = workspace.kernel_shared, workspace.stages_shared, workspace.shape_shared
    function = load(kernel, workspace.device)
    width = kv_heads * dim * k_cache.itemsize // 2  # as if of bfloat16
    maps = [nvrtc.page_map(cache.data_ptr(), blocks, size, width) for cache in (k_cache, v_cache)]
    tensors = (q, out, block_tables, seq_lens, workspace.starts, workspace.shares, workspace.parts)
    launch_kernel(
        function, shape, maps, tensors,
        ctypes.c_longlong(block_tables.stride(0)),
        (ctypes.c_int * 5)(q.stride(0), out.stride(0), rows, stages, int(early)),
        ctypes.c_float(scale * LOG2E),
        _new_argument(new, k_cache, v_cache),
        _SharedArgument(*(tensor.data_ptr() for tensor in shared or ())),
    )  # fmt: skip
