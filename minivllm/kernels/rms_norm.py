"""RMSNorm. The residual addition before it is part of the product that makes the addend (``products.linear_add``).

Bytes moved per row of n: 2n elements, read and written; the weight stays in L2. 8192 rows of 1024 in bf16: 34 MB, 8 µs
at 4.3 TB/s. A sum over ranks that also computes its rows' factors (``add_rows_factors``) reads a row and its addends
and writes the sum: 4096 rows of 5120, each with one addend, 126 MB, 29 µs.
"""

from typing import NamedTuple

import torch

from minivllm.kernels._triton import next_power_of_2, tl, triton
from minivllm.kernels.pdl import use_pdl
from minivllm.rounding import cdiv


@triton.jit
def inverse_rms(h, eps, N: tl.constexpr, AXIS: tl.constexpr = 0):
    """1 / rms of a row ``h``, or of several along AXIS: float32, N elements padded with zeros."""
    return 1.0 / tl.sqrt(tl.sum(h * h, AXIS) / N + eps)


@triton.jit(do_not_specialize=["eps"])
def _rms_norm_kernel(
    x, weight, out, x_stride, out_stride, eps, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    w = tl.load(weight + cols, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    h = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    scale = inverse_rms(h, eps, N)
    normed = (h * scale).to(out.dtype.element_ty) * w
    tl.store(out + row * out_stride + cols, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["eps", "rows"])
def _row_factors_kernel(
    x, out, rows, x_stride, eps, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (cols < N)[None, :]
    h = tl.load(x + row.to(tl.int64)[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row, inverse_rms(h, eps, N, 1), mask=row < rows)


@triton.jit(do_not_specialize=["eps", "rows"])
def _add_rows_factors_kernel(
    x, addends, factors, rows, x_stride, addend_stride, eps,
    ADDENDS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (cols < N)[None, :]
    at = row.to(tl.int64)[:, None] * x_stride + cols[None, :]
    addend = addends + row.to(tl.int64)[:, None] * N + cols[None, :]
    h = tl.load(x + at, mask=mask, other=0.0)
    for _ in tl.static_range(ADDENDS):
        h = (h.to(tl.float32) + tl.load(addend, mask=mask, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        addend += addend_stride
    tl.store(x + at, h, mask=mask)
    tl.store(factors + row, inverse_rms(h.to(tl.float32), eps, N, 1), mask=row < rows)


class RowScale(NamedTuple):
    """A factor per row, 1 / rms(x), still to be applied to the product of an x that was not normed; then its bias, if
    it has one, is added."""

    x: torch.Tensor  # (t, n)
    eps: float
    bias: torch.Tensor | None = None  # (m,)

    def applied_to(self, product: torch.Tensor) -> torch.Tensor:
        """product: (t, m); returns the same shape, in its dtype."""
        scaled = product * row_factors_reference(self.x, self.eps)[:, None]
        return (scaled if self.bias is None else scaled + self.bias).to(product.dtype)


def _num_warps(n: int) -> int:
    return min(max(n // 512, 1), 16)


def _rows(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, n = _rows(x), x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        block, pdl = next_power_of_2(n), use_pdl(x.device)
        _rms_norm_kernel[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), n, eps, N=n, BLOCK=block, PDL=pdl, num_warps=_num_warps(block),
            launch_pdl=pdl,
        )  # fmt: skip
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x.float() * row_factors_reference(x, eps)[..., None]).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * x / rms(x)`` over the last dimension; statistics in float32, the product in x's dtype."""
    return rms_norm_triton(x, weight, eps) if x.is_cuda else rms_norm_reference(x, weight, eps)


def row_factors_triton(x: torch.Tensor, eps: float) -> torch.Tensor:
    rows, n = _rows(x), x.shape[-1]
    out = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    block, pdl = next_power_of_2(n), use_pdl(x.device)
    at_once = max(4096 // block, 1)
    if rows.shape[0]:
        _row_factors_kernel[(cdiv(rows.shape[0], at_once),)](
            rows, out, rows.shape[0], rows.stride(0), eps, N=n, BLOCK=block, ROWS=at_once, PDL=pdl,
            num_warps=_num_warps(block * at_once), launch_pdl=pdl,
        )  # fmt: skip
    return out


def row_factors_reference(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(x.float().square().mean(-1) + eps)


def row_factors(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / rms of each row: x (t, n); returns (t,) float32. A row is read once: half the bytes of ``rms_norm``."""
    return row_factors_triton(x, eps) if x.is_cuda else row_factors_reference(x, eps)


def add_rows_factors_triton(x: torch.Tensor, addends: torch.Tensor, factors: torch.Tensor, eps: float) -> None:
    """Does not use ``pdl``: it starts when all before it is complete."""
    (rows, n), block = x.shape, next_power_of_2(x.shape[1])
    assert x.stride(1) == 1 and addends.stride()[1:] == (n, 1)
    at_once = max(4096 // block, 1)
    if rows:
        _add_rows_factors_kernel[(cdiv(rows, at_once),)](
            x, addends, factors, rows, x.stride(0), addends.stride(0), eps,
            ADDENDS=len(addends), N=n, BLOCK=block, ROWS=at_once, num_warps=_num_warps(block * at_once),
        )  # fmt: skip


def add_rows_factors_reference(x: torch.Tensor, addends: torch.Tensor, factors: torch.Tensor, eps: float) -> None:
    for addend in addends:
        x.add_(addend[: len(x)])
    factors.copy_(row_factors_reference(x, eps))


def add_rows_factors(x: torch.Tensor, addends: torch.Tensor, factors: torch.Tensor, eps: float) -> None:
    """x (t, n) += each of ``addends`` (m, t or more, n), one after another, rounded each time; then write the result's
    ``row_factors`` to ``factors`` (t,) float32."""
    run = add_rows_factors_triton if x.is_cuda else add_rows_factors_reference
    run(x, addends, factors, eps)
