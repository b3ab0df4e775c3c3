"""Linear layers in float8 (e4m3): weights have a scale per output feature, inputs one per row, found as they come
("dynamic per-token" quantization: FP8 Formats for Deep Learning, Micikevicius et al. 2022, arXiv:2209.05433, for the
format). Products of few rows are ``cluster_linear``'s, which applies the scales and does what follows. The others are
the library's; around them stand kernels that make rows of float8, and apply scales.

Up to ``MAX_SCALED_LATER`` rows the library multiplies without scales, which it does at twice the pace of its kernel
that takes them, and whatever follows applies them: SiLU * up, which also makes the next rows of float8, or
``_scale_kernel``, with or without the residual addition.

Bytes moved: a product reads n * k bytes of weight, half of bfloat16's. Making rows of float8 reads 2 * k bytes a row
and writes k: 8192 rows of 5120, 126 MB, 29 µs at 4.3 TB/s; of SiLU * up it reads 4 * k: 8192 rows of 17,408, 713 MB,
166 µs.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional as F

from minivllm.kernels._triton import next_power_of_2, tl, triton
from minivllm.kernels.linear.cluster_linear import (
    Scales,
    cluster_gate_up,
    cluster_linear,
    cluster_linear_add,
    use_cluster,
)
from minivllm.kernels.pdl import use_pdl
from minivllm.kernels.rms_norm import row_factors_reference
from minivllm.kernels.silu_mul import silu_mul
from minivllm.rounding import cdiv

FP8 = torch.float8_e4m3fn
MULTIPLE = 16  # of both sizes of a weight: the library takes no others
MAX_SCALED_LATER = 512
_LARGEST = 448.0  # of e4m3
_LEAST = 1e-12  # that counts as the largest of a row, so that no scale is zero
_MOST, _SOME = tl.constexpr(_LARGEST), tl.constexpr(_LEAST)
_BLOCK = 1024  # columns per program of the kernel that scales


class Fp8Rows(NamedTuple):
    """Rows of numbers of ``dtype``, as float8 times a scale: values (t, k) float8_e4m3fn, scales (t,) float32."""

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def empty(cls, rows: int, n: int, like: torch.Tensor) -> "Fp8Rows":
        """With the dtype and on the device of ``like``."""
        values = torch.empty((rows, n), dtype=FP8, device=like.device)
        return cls(values, torch.empty(rows, device=like.device), like.dtype)


# --------------------------------------------------------------------------- rows of float8


@triton.jit
def _store_float8(out, h, top, mask):
    every: tl.constexpr = tl.PropagateNan.ALL
    h = tl.minimum(tl.maximum(h * (_MOST / top), -_MOST, every), _MOST, every)
    tl.store(out, h.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["eps"])
def _quantize_kernel(
    x,  # (t, N)
    norm_weight,  # (N,), read if NORM
    out,  # (t, N) float8
    scales,  # (t,)
    x_stride,
    eps,
    N: tl.constexpr,
    FIRST: tl.constexpr,  # columns in one tile
    REST: tl.constexpr,  # and in another one behind it, or 0
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    first, rest = tl.arange(0, FIRST), FIRST + tl.arange(0, REST if REST else 1)
    x += row * x_stride
    if NORM:
        w = tl.load(norm_weight + first)
        if REST:
            w_rest = tl.load(norm_weight + rest, mask=rest < N, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    h = tl.load(x + first).to(tl.float32)  # FIRST <= N
    square = tl.sum(h * h, 0)
    if NORM:
        h *= w.to(tl.float32)
    top = tl.max(tl.abs(h), 0)
    if REST:
        h_rest = tl.load(x + rest, mask=rest < N, other=0.0).to(tl.float32)
        square += tl.sum(h_rest * h_rest, 0)
        if NORM:
            h_rest *= w_rest.to(tl.float32)
        top = tl.maximum(top, tl.max(tl.abs(h_rest), 0))
    top = tl.maximum(top, _SOME)
    by = 1.0 / tl.sqrt(square / N + eps) if NORM else 1.0
    tl.store(scales + row, top / _MOST * by)
    _store_float8(out + row * N + first, h, top, first < N)
    if REST:
        _store_float8(out + row * N + rest, h_rest, top, rest < N)


def _tiles(n: int) -> tuple[int, int]:
    """Columns of one or two tiles for a row of n, powers of two: 17,408 are 16,384 and 1,024."""
    first = 1 << (n.bit_length() - 1)
    return first, next_power_of_2(n - first) if n > first else 0


def _num_warps(columns: int) -> int:
    return min(max(columns // 256, 1), 32)


def quantize_triton(x: torch.Tensor, norm_weight: torch.Tensor | None = None, eps: float = 0.0) -> Fp8Rows:
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, n = x.shape
    out = Fp8Rows.empty(rows, n, x)
    if rows:
        (first, rest), pdl = _tiles(n), use_pdl(x.device)
        _quantize_kernel[(rows,)](
            x, x if norm_weight is None else norm_weight, out.values, out.scales, x.stride(0), eps, N=n, FIRST=first,
            REST=rest, NORM=norm_weight is not None, PDL=pdl, num_warps=_num_warps(first), launch_pdl=pdl,
        )  # fmt: skip
    return out


def quantize_reference(x: torch.Tensor, norm_weight: torch.Tensor | None = None, eps: float = 0.0) -> Fp8Rows:
    h = x.float() if norm_weight is None else x.float() * norm_weight.float()
    top = h.abs().amax(1).clamp_min(_LEAST)
    scaled = (h * (_LARGEST / top)[:, None]).clamp(-_LARGEST, _LARGEST)
    scales = top / _LARGEST
    return Fp8Rows(scaled.to(FP8), scales if norm_weight is None else scales * row_factors_reference(x, eps), x.dtype)


def quantize(x: torch.Tensor, norm_weight: torch.Tensor | None = None, eps: float = 0.0) -> Fp8Rows:
    """x (t, k), or ``rms_norm`` of it by ``norm_weight`` (k,), in float8, each row by its largest number. 1 / rms is
    part of the row's scale, so that nothing is rounded twice."""
    return (quantize_triton if x.is_cuda else quantize_reference)(x, norm_weight, eps)


# --------------------------------------------------------------------------- scales behind a product


@triton.jit
def _scale_kernel(
    y,  # (t, N)
    row_scales,  # (t,)
    column_scales,  # (N,)
    bias,  # (N,), read if BIAS
    residual,  # (t, N), read if ADD; may be ``out``
    out,  # (t, N)
    residual_stride,
    out_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    scale = tl.load(column_scales + cols, mask=mask, other=0.0)
    if BIAS:
        b = tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    h = tl.load(y + row * N + cols, mask=mask, other=0.0).to(tl.float32) * (scale * tl.load(row_scales + row))
    if BIAS:
        h += b
    if ADD:
        h += tl.load(residual + row * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + cols, h.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _silu_mul(gate_up, column_scales, row_scale, cols, N: tl.constexpr, SCALED: tl.constexpr):
    mask = cols < N
    gate = tl.load(gate_up + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + N + cols, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        gate *= tl.load(column_scales + cols, mask=mask, other=0.0) * row_scale
        up *= tl.load(column_scales + N + cols, mask=mask, other=0.0) * row_scale
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_quantize_kernel(
    gate_up,  # (t, 2 * N)
    row_scales,  # (t,), read if SCALED
    column_scales,  # (2 * N,), likewise
    out,  # (t, N) float8
    scales,  # (t,)
    N: tl.constexpr,
    FIRST: tl.constexpr,  # columns in one tile
    REST: tl.constexpr,  # and in another one behind it, or 0
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    first, rest = tl.arange(0, FIRST), FIRST + tl.arange(0, REST if REST else 1)
    gate_up += row * 2 * N
    scale = tl.load(row_scales + row) if SCALED else 1.0
    h = _silu_mul(gate_up, column_scales, scale, first, N, SCALED)
    top = tl.max(tl.abs(h), 0)
    if REST:
        h_rest = _silu_mul(gate_up, column_scales, scale, rest, N, SCALED)
        top = tl.maximum(top, tl.max(tl.abs(h_rest), 0))
    top = tl.maximum(top, _SOME)
    tl.store(scales + row, top / _MOST)
    _store_float8(out + row * N + first, h, top, first < N)
    if REST:
        _store_float8(out + row * N + rest, h_rest, top, rest < N)


def scale_triton(
    y: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    out = y if residual is None else residual
    (rows, n), pdl = y.shape, use_pdl(y.device)
    assert y.is_contiguous() and out.stride(1) == 1
    if rows:
        _scale_kernel[(rows, cdiv(n, _BLOCK))](
            y, row_scales, column_scales, y if bias is None else bias, out, out, out.stride(0), out.stride(0), N=n,
            BLOCK=_BLOCK, BIAS=bias is not None, ADD=residual is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out


def scale_reference(
    y: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """y (t, n), in place, times a scale per row (t,) and column (n,), plus bias (n,); or that added to ``residual`` (t,
    n) in place. Returns what was written to."""
    wide = y.float() * row_scales[:, None] * column_scales
    if bias is not None:
        wide += bias.float()
    return y.copy_(wide) if residual is None else residual.copy_(residual.float() + wide)


def silu_quantize_triton(
    gate_up: torch.Tensor, row_scales: torch.Tensor | None = None, column_scales: torch.Tensor | None = None
) -> Fp8Rows:
    (rows, n), pdl = (gate_up.shape[0], gate_up.shape[1] // 2), use_pdl(gate_up.device)
    out = Fp8Rows.empty(rows, n, gate_up)
    assert gate_up.is_contiguous() and (row_scales is None) == (column_scales is None)
    if rows:
        first, rest = _tiles(n)
        _silu_quantize_kernel[(rows,)](
            gate_up, row_scales, column_scales, out.values, out.scales, N=n, FIRST=first, REST=rest,
            SCALED=row_scales is not None, PDL=pdl, num_warps=_num_warps(first), launch_pdl=pdl,
        )  # fmt: skip
    return out


def silu_quantize_reference(
    gate_up: torch.Tensor, row_scales: torch.Tensor | None = None, column_scales: torch.Tensor | None = None
) -> Fp8Rows:
    """SiLU(gate) * up of gate_up (t, 2 * i), which is still to be multiplied by a scale per row (t,) and column (2 *
    i,), if given, as rows of float8 (t, i). Rounded once."""
    wide = gate_up.float()
    if row_scales is not None:
        assert column_scales is not None
        wide = wide * row_scales[:, None] * column_scales
    gate, up = wide.chunk(2, 1)
    return quantize_reference(F.silu(gate) * up)._replace(dtype=gate_up.dtype)


# --------------------------------------------------------------------------- what layers call


def fp8_linear_reference(rows: Fp8Rows, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``fp8_linear`` of the same float8 numbers in float32, rounded to the rows' dtype at the end."""
    floats = rows.values.float() * rows.scales[:, None]
    return (floats @ (weight.float() * scale[:, None]).t()).to(rows.dtype)


def _product(rows: Fp8Rows, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The product (t, n), and whether the scales are still to be applied: bfloat16 can hold the numbers without."""
    if not len(rows.values):
        return torch.empty((0, len(weight)), dtype=rows.dtype, device=weight.device), False
    recipe = F.ScalingType
    unscaled = len(rows.values) <= MAX_SCALED_LATER
    if unscaled:
        of_rows = of_columns = _one(weight.device)
        kind = recipe.TensorWise
    else:
        of_rows, of_columns, kind = rows.scales[:, None], scale[None, :], recipe.RowWise
    y = F.scaled_mm(
        rows.values, weight.t(), of_rows, kind, of_columns, kind, output_dtype=rows.dtype, use_fast_accum=True
    )
    return y, unscaled


def _clusters(rows: Fp8Rows, weight: torch.Tensor, gated: bool = False) -> bool:
    n, k = weight.shape
    return use_cluster(len(rows.values), n, k, rows.dtype, weight.device, gated=gated, float8=True)


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


def fp8_linear(
    rows: Fp8Rows,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """rows (t, k) @ weight (n, k).T + bias (n,): weight is float8_e4m3fn, times ``scale`` (n,) float32. Returns (t, n),
    or adds it to ``residual`` (t, n) in place and returns that.

    On a GPU the rows' dtype is bfloat16, and n and k are multiples of ``MULTIPLE``. Elsewhere the reference runs.
    """
    if not weight.is_cuda:
        y = fp8_linear_reference(rows, weight, scale)
    elif bias is None and (residual is None or residual.is_contiguous()) and _clusters(rows, weight):
        scales = Scales(rows.scales, scale)
        if residual is None:
            return cluster_linear(rows.values, weight, scales)
        return cluster_linear_add(rows.values, weight, residual, scales)
    else:
        y, unscaled = _product(rows, weight, scale)
        if unscaled:
            return scale_triton(y, rows.scales, scale, bias, residual)
    if bias is not None:
        y += bias
    return y if residual is None else residual.add_(y)


def fp8_gate_up(
    rows: Fp8Rows, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """SiLU(gate) * up of ``fp8_linear``: weight (2 * i, k), gate's rows first; returns (t, i)."""
    if weight.is_cuda and bias is None and _clusters(rows, weight, gated=True):
        return cluster_gate_up(rows.values, weight, scales=Scales(rows.scales, scale))
    return silu_mul(fp8_linear(rows, weight, scale, bias))


def fp8_gate_up_rows(
    rows: Fp8Rows, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> Fp8Rows:
    """``quantize`` of ``fp8_gate_up``, for a product in float8 behind it. Where the library multiplies, one kernel does
    the rest, and rounds once."""
    if not weight.is_cuda or bias is not None or _clusters(rows, weight, gated=True):
        return quantize(fp8_gate_up(rows, weight, scale, bias))
    y, unscaled = _product(rows, weight, scale)
    return silu_quantize_triton(y, rows.scales, scale) if unscaled else silu_quantize_triton(y)
