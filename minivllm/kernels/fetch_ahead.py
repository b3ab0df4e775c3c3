"""Brings the weight that a later kernel reads into L2, from a kernel that leaves memory idle (Hopper and later)."""

import torch

from minivllm.kernels._triton import tl, triton

ALIGN = 16  # bytes, of addresses and sizes
_MOST = 24 << 20  # bytes: the L2 of an H200 holds 50 MB, and what the running kernels use is there, too
_PIECE = tl.constexpr(16 << 10)  # bytes that a thread asks for at once


@triton.jit
def fetch_ahead(weight, size, THREADS: tl.constexpr):
    """Ask for the first ``size`` bytes of ``weight``: every program of the grid calls this, and all their THREADS take
    pieces in turns. It belongs before ``gdc_wait``: no kernel writes weights."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, THREADS)  # an element a thread, so that none asks twice
    lanes = lanes % 32 * (THREADS // 32) + lanes // 32  # few pieces go to all warps: a warp asks for one at a time
    for turn in range(tl.cdiv(size, THREADS * _PIECE * programs)):
        start = ((turn * THREADS + lanes) * programs + pid) * _PIECE
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r", [weight.to(tl.int64) + start, tl.minimum(size - start, _PIECE)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def bytes_ahead(weight: torch.Tensor | None) -> int:
    """``size`` for ``weight``; 0 where there is nothing that could be fetched."""
    if weight is None or not weight.is_cuda or not weight.is_contiguous() or weight.data_ptr() % ALIGN:
        return 0
    return min(weight.nbytes, _MOST) // ALIGN * ALIGN
