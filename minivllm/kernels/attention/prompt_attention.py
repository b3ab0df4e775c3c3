"""Causal attention of prompts over a paged cache on Hopper, in CUDA C++ (``prompt_attention.cu``).

Work as in ``paged_prefill``: 4 * head_dim floating-point operations per head and (query, visible key) pair. A program
processes 128 rows (192 for small heads): query tokens of all heads that share a key head. It loops over tiles of 128
keys: scores and outputs by wgmma; queries, keys and values by TMA, a page of the cache at a time. Exponentials of one
tile overlap the product of the previous one, and those of one warpgroup the products of the others: FlashAttention-3
(Shah et al., 2024, https://arxiv.org/abs/2407.08608). One program per SM works through its share of the query tiles,
longest first, and begins each while the previous one ends. If few queries see many keys, the keys are split into parts
(``key_parts``), as in flash decoding. A float8 cache is read as such, and multiplied in float16, which has its numbers.
"""

import ctypes
import math
from functools import cache
from operator import itemgetter

import numpy as np
import torch

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import LOG2E, compiling, num_sms
from minivllm.kernels.attention.paged_prefill import longest_first
from minivllm.kernels.hopper import Kernel, compile_ahead, launch_kernel, load, loads
from minivllm.kernels.pdl import use_pdl
from minivllm.rounding import cdiv

HEAD_DIMS, PAGE = (64, 128), 16
_KEYS, _GROUPS = 128, {64: 3, 128: 2}  # keys per tile; warpgroups of 64 rows, by head dimension: limited by registers
_QUERIES, _STAGES = 2, 2  # tiles of queries, and of keys and values, in shared memory
# Of a float8 cache, by head dimension: parts in which a tile is loaded; warps that widen keys, and as many values.
_LOADS, _WIDENERS = {64: 2, 128: 4}, {64: 1, 128: 2}
_EVEN, _LEAST = 1.25, 8  # a part's most key tiles: a program's share of all times this, and at least this


@cache
def _kernel(head_dim: int, float8: bool) -> Kernel:
    macros = {"D": head_dim, "KEYS": _KEYS, "GROUPS": _GROUPS[head_dim], "STAGES": _STAGES}
    macros |= {"LOADS": _LOADS[head_dim], "WIDENERS": _WIDENERS[head_dim]} if float8 else {"LOADS": 1, "WIDENERS": 0}
    operands = "f16" if float8 else "bf16"
    return Kernel("prompt_attention", (_KEYS,), tuple(macros.items()), held=(head_dim,), operands=operands)


class _Step(ctypes.Structure):
    """``Step`` of prompt_attention.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tiles", "starts", "lengths", "tables")),
        *((name, ctypes.c_longlong) for name in ("table_stride", "out_stride")),
        *((name, ctypes.c_int) for name in ("count", "first_row", "heads", "group")),
        *((name, ctypes.c_void_p) for name in ("left", "came")),
        ("each", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]


@cache
def _shape(head_dim: int, float8: bool, programs: int, pdl: bool) -> nvrtc.LaunchShape:
    groups = _GROUPS[head_dim]
    size = (_QUERIES * 64 * groups + 2 * _STAGES * _KEYS) * head_dim * 2 + 1024
    if float8:
        size += 2 * _KEYS * head_dim  # a tile of keys and one of values, as they come
    threads = 128 * (groups + (2 if float8 and _WIDENERS[head_dim] > 1 else 1))
    return nvrtc.LaunchShape((programs, 1, 1), (1, 1, 1), threads, size, pdl)


def loads_prompt_attention(head_dim: int, float8: bool, device: torch.device) -> bool:
    """Whether the kernel compiles here; if not, a warning has given the reason."""
    return loads(_kernel(head_dim, float8), device)


class PromptWorkspace:
    """Where parts of keys write their results; for any number of steps, one after another."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
        self.programs, self.kv_heads = num_sms(device), kv_heads
        self.tile_tokens = 64 * _GROUPS[head_dim] * kv_heads // heads  # query tokens per tile
        self.parts = 2 * self.programs // kv_heads + 1  # more than ``key_parts`` creates
        shape = self.parts, kv_heads, _GROUPS[head_dim]
        self.left = torch.empty((*shape, head_dim // 8 + 1, 128, 4), dtype=torch.float32, device=device)
        self.came = torch.zeros(shape, dtype=torch.int32, device=device)

    def key_parts(self, query_lens: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """(m, 4) int32, longest first: ``query_tiles`` with the part of the keys + 65,536 * the number of parts, and
        where the parts are written. A tile is split if its keys take longer than a program's share of the step; that
        adds at most ``programs / kv_heads`` items."""
        tiles = longest_first(query_lens, seq_lens, self.tile_tokens)
        keys = [cdiv(seen, _KEYS) if seen > 0 else 1 for _, seen, _, _ in tiles]  # padding sees none
        most = max(_EVEN * sum(keys) * self.kv_heads / self.programs, _LEAST)
        if max(keys, default=0) <= most:
            return np.array([n for *_, row, first in tiles for n in (row, first, 1 << 16, 0)], np.int32).reshape(-1, 4)
        cut, left = [], 0
        for n, (*_, row, first) in zip(keys, tiles, strict=True):
            parts = math.ceil(n / most)
            cut += [(n / parts, row, first, part + (parts << 16), left) for part in range(parts)]
            left += parts if parts > 1 else 0
        cut.sort(key=itemgetter(0), reverse=True)
        return np.array([tile[1:] for tile in cut], dtype=np.int32)

    def most_tiles(self, tokens: int, rows: int) -> int:
        """The most items that ``key_parts`` may return for so many tokens of so many rows."""
        return tokens // self.tile_tokens + rows + cdiv(self.programs, self.kv_heads)


def prompt_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    workspace: PromptWorkspace,
    first_row: int = 0,
) -> None:
    """As ``paged_prefill_triton``, for bfloat16. ``tiles``: the workspace's ``key_parts``; rows after one of -1 are not
    read. Caches (blocks, 16, kv heads, head_dim of ``HEAD_DIMS``), contiguous, of bfloat16 or float8_e4m3fn."""
    (tokens, heads, dim), (blocks, size, kv_heads), float8 = q.shape, k_cache.shape[:3], k_cache.itemsize == 1
    kernel = _kernel(dim, float8)
    if compiling():
        compile_ahead(kernel)
        return
    if not len(tiles):
        return
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and block_tables.stride(1) == 1
    assert out.stride(2) == 1 and out.stride(1) == dim and out.stride(0) % 8 == 0 and out.data_ptr() % 16 == 0
    if q.stride(2) != 1 or q.stride(1) != dim or q.stride(0) % 8 or q.data_ptr() % 16:  # TMA's alignment
        q = q.contiguous()
    group, each = heads // kv_heads, workspace.tile_tokens
    programs = min(workspace.programs, len(tiles) * kv_heads)
    maps = [nvrtc.head_map(q.data_ptr(), tokens, heads, dim, q.stride(0), group, each)]
    both, page = (k_cache.data_ptr(), v_cache.data_ptr()), (blocks, size, kv_heads * dim)
    maps += [nvrtc.plain_page_map(at, *page) if float8 else nvrtc.page_map(at, *page, 64) for at in both]
    step = _Step(
        tiles.data_ptr(), query_start.data_ptr(), seq_lens.data_ptr(), block_tables.data_ptr(), block_tables.stride(0),
        out.stride(0), len(tiles), first_row, kv_heads, group, workspace.left.data_ptr(), workspace.came.data_ptr(),
        each, scale * LOG2E,
    )  # fmt: skip
    launch_kernel(load(kernel, q.device), _shape(dim, float8, programs, use_pdl(q.device)), maps, [out], step)
