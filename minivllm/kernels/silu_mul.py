"""SiLU(gate) * up over the packed projection (t, 2 * i): gate first, then up.

Bytes moved: 3 * t * i elements. 8192 tokens of i = 3072 in bf16: 151 MB, 35 µs at 4.3 TB/s. With a ``RowScale``
each program also reads a row of x, so it handles the whole output row if it can.
"""

import torch

from minivllm.kernels._triton import next_power_of_2, tl, triton
from minivllm.kernels.pdl import use_pdl
from minivllm.kernels.rms_norm import RowScale, inverse_rms
from minivllm.rounding import cdiv

_BLOCK, _SCALED_BLOCK = 1024, 8192  # columns per program


@triton.jit(do_not_specialize=["eps"])
def _silu_mul_kernel(
    gate_up,  # (t, 2 * N)
    x,  # (t, K), read if K
    out,  # (t, N)
    stride,
    x_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,  # 0: gate_up needs no scale
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    if K:
        k = tl.arange(0, BLOCK_K)
        h = tl.load(x + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + N + cols, mask=mask, other=0.0)
    if K:
        scale = inverse_rms(h, eps, K)
        gate *= scale
        up = up.to(tl.float32) * scale
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + row * N + cols, (silu * up).to(out.dtype.element_ty), mask=mask)


def silu_mul_triton(gate_up: torch.Tensor, scale: RowScale | None = None) -> torch.Tensor:
    n = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * n)
    out = torch.empty((*gate_up.shape[:-1], n), dtype=gate_up.dtype, device=gate_up.device)
    if rows.shape[0]:
        x, eps = (rows, 0.0) if scale is None else (scale.x, scale.eps)
        k, pdl = 0 if scale is None else x.shape[1], use_pdl(out.device)
        block = min(next_power_of_2(n), _SCALED_BLOCK if k else _BLOCK)
        _silu_mul_kernel[(rows.shape[0], cdiv(n, block))](
            rows, x, out, rows.stride(0), x.stride(0), eps, N=n, K=k, BLOCK=block, BLOCK_K=next_power_of_2(k), PDL=pdl,
            num_warps=min(max(block // 512, 4), 16), launch_pdl=pdl,
        )  # fmt: skip
    return out


def silu_mul_reference(gate_up: torch.Tensor, scale: RowScale | None = None) -> torch.Tensor:
    if scale is not None:
        gate_up = scale.applied_to(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def silu_mul(gate_up: torch.Tensor, scale: RowScale | None = None) -> torch.Tensor:
    """(…, 2 * i) -> (…, i). ``scale``, if given, is applied first; its x must have a contiguous row for each of (t, 2 *
    i), and it must have no bias."""
    assert scale is None or scale.bias is None
    run = silu_mul_triton if gate_up.is_cuda else silu_mul_reference
    return run(gate_up, scale)
