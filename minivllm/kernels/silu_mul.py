"""SiLU(gate) * up over the packed projection (t, 2 * i): gate first, then up.

Bytes moved: 3 * t * i elements. 8192 tokens of i = 3072 in bf16: 151 MB, 35 µs at 4.3 TB/s.
"""

import torch

from minivllm.kernels._triton import cdiv, next_power_of_2, tl, triton
from minivllm.kernels.pdl import use_pdl


@triton.jit
def _silu_mul_kernel(gate_up, out, stride, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    gate = tl.load(gate_up + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + N + cols, mask=mask, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + row * N + cols, (silu * up).to(out.dtype.element_ty), mask=mask)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    n = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * n)
    out = torch.empty((*gate_up.shape[:-1], n), dtype=gate_up.dtype, device=gate_up.device)
    if rows.shape[0]:
        block, pdl = min(next_power_of_2(n), 1024), use_pdl(out.device)
        _silu_mul_kernel[(rows.shape[0], cdiv(n, block))](
            rows, out, rows.stride(0), N=n, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl
        )
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """(…, 2 * i) -> (…, i)."""
    return silu_mul_triton(gate_up) if gate_up.is_cuda else silu_mul_reference(gate_up)
