"""The embedding gather: one row of the table per token.

Bytes moved: 2 * t * n elements. 8192 tokens of 1024 in bf16: 34 MB, 8 µs at 4.3 TB/s.
"""

import torch

from minivllm.kernels._triton import next_power_of_2, tl, triton
from minivllm.kernels.pdl import use_pdl
from minivllm.rounding import cdiv


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _embedding_kernel(ids, weight, out, stride, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    token = tl.load(ids + row).to(tl.int64)
    tl.store(out + row * N + cols, tl.load(weight + token * stride + cols, mask=mask, other=0.0), mask=mask)


def embedding_triton(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    n, ids = weight.shape[1], ids.contiguous()
    out = torch.empty((*ids.shape, n), dtype=weight.dtype, device=weight.device)
    if ids.numel():
        block, pdl = min(next_power_of_2(n), 2048), use_pdl(weight.device)
        _embedding_kernel[(ids.numel(), cdiv(n, block))](
            ids,
            weight,
            out,
            weight.stride(0),
            N=n,
            BLOCK=block,
            PDL=pdl,
            num_warps=max(min(block // 256, 8), 1),
            launch_pdl=pdl,
        )
    return out


def embedding_reference(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(ids, weight)


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """ids (…) of any integer dtype, weight (vocabulary, n); returns (…, n)."""
    return embedding_triton(ids, weight) if ids.is_cuda else embedding_reference(ids, weight)
