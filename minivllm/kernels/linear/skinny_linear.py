"""Linear layers over few rows (1 to 8, or 16): the weight is read once, with the norm before, and the residual addition
or SiLU * up after, in the same kernel. ``products.py`` chooses between this and other kernels.

Bytes moved: the weight, n * k elements. Qwen3-0.6B's four products per layer in bf16: 8.4 + 4.2 + 12.6 + 6.3 MB, so 7.3
µs at 4.3 TB/s; the LM head's 311 MB 72 µs. A kernel exceeds the time of its stream only by what comes after
``gdc_wait``: a program's first weights, mostly all of them, are in flight before the kernel that makes its input ends.

Two kernels. ``_vector_kernel``: a warp owns ``per_warp`` output features and multiplies and adds in float32; warps
share nothing. ``_matrix_kernel``, for more rows: a program owns 16 features, each warp a slice of k, on the tensor
cores. Both apply the norm's scale after the product, rms_norm(x) @ w.T = ((x * norm_weight) @ w.T) / rms(x), so that
statistics and product take one pass over x.
"""

# In a Triton kernel, tuples grow by + only.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from minivllm.kernels._triton import next_power_of_2, num_sms, tl, triton
from minivllm.kernels.linear.cluster_config import LARGE_WEIGHT
from minivllm.kernels.pdl import use_pdl
from minivllm.kernels.rms_norm import rms_norm
from minivllm.kernels.silu_mul import silu_mul
from minivllm.rounding import cdiv

MAX_ROWS = 16
_LANES = 32
_FEATURES = tl.constexpr(16)  # per program of the matrix kernel: MMA's M


# --------------------------------------------------------------------------- shared by both kernels


@triton.jit
def _piece(base, k, K: tl.constexpr, WHOLE: tl.constexpr):
    """One load of ``base + k``; WHOLE: no k exceeds K."""
    if WHOLE:
        return tl.load(base + k)
    else:
        return tl.load(base + k, mask=k < K, other=0)


@triton.jit
def _pieces(bases, k, K: tl.constexpr, STEP: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr):
    """DEPTH steps of each base, all in flight together."""
    out = ()
    for s in tl.static_range(DEPTH):
        for b in tl.static_range(len(bases)):
            out = out + (_piece(bases[b], k + s * STEP, K, WHOLE),)
    return out


@triton.jit
def _finish(
    y, up, square, bias, residual, out, row, n, live, N, eps,
    K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Epilogue: from sums over k to stored outputs. All arguments but the scalars have one shape."""
    if NORM:
        scale = 1.0 / tl.sqrt(square / K + eps)
        y = y * scale
        up = up * scale
    if BIAS:
        y += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + N + n, mask=live, other=0.0).to(tl.float32)
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * up
    at = row * N + n
    if ADD:
        y += tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=live)


# --------------------------------------------------------------------------- one to eight rows


@triton.jit
def _floats(piece, PACKED: tl.constexpr):
    """A piece as float32; two tensors if it is int32, each with two bfloat16 (one instruction each, not two)."""
    if PACKED:
        return (piece << 16).to(tl.float32, bitcast=True), (piece & -65536).to(tl.float32, bitcast=True)
    else:
        return (piece.to(tl.float32),)


@triton.jit
def _multiply(
    sums, squares, x, x_stride, rows, norm_weight, w, k,
    K: tl.constexpr, STEP: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """DEPTH steps of sums[row * W + b] += x[row] * w[b], squares[row] += x[row]²; every tensor is (warps, STEP)."""
    W: tl.constexpr = len(sums) // ROWS
    for s in tl.static_range(DEPTH):
        if NORM:
            g = _floats(_piece(norm_weight, k + s * STEP, K, WHOLE), PACKED)
        new_sums = ()
        new_squares = ()
        for i in tl.static_range(ROWS):
            h = _floats(_piece(x + tl.minimum(i, rows - 1) * x_stride, k + s * STEP, K, WHOLE), PACKED)
            square = squares[i]
            factors = ()
            for p in tl.static_range(len(h)):
                if NORM:
                    square += h[p] * h[p]
                    factors = factors + (h[p] * g[p],)
                else:
                    factors = factors + (h[p],)
            new_squares = new_squares + (square,)
            for b in tl.static_range(W):
                f = _floats(w[s * W + b], PACKED)
                total = sums[i * W + b]
                for p in tl.static_range(len(f)):
                    total += factors[p] * f[p]
                new_sums = new_sums + (total,)
        sums = new_sums
        squares = new_squares
    return sums, squares


@triton.jit(do_not_specialize=["rows", "eps"])
def _vector_kernel(
    x,  # (rows, k)
    weight,  # (N, k); (2 * N, k) if GATED: gate, then up
    norm_weight,  # (k,), read if NORM
    bias,  # (N,) or (2 * N,), read if BIAS
    residual,  # (rows, N), read if ADD
    out,  # (rows, N)
    x_stride,
    rows,
    N,
    eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,  # at least ``rows``
    PER_WARP: tl.constexpr,  # features; ROWS * PER_WARP is at most 32
    WARPS: tl.constexpr,
    STEP: tl.constexpr,  # loaded elements per warp and row: 16 bytes per lane
    DEPTH: tl.constexpr,  # steps in flight
    PACKED: tl.constexpr,  # bfloat16 loaded in pairs
    LATE: tl.constexpr,  # the next kernel starts only when all before this one are complete
    PDL: tl.constexpr,
):
    if PDL and not LATE:
        tl.extra.cuda.gdc_launch_dependents()
    L: tl.constexpr = K // 2 if PACKED else K  # loaded elements of a row
    CHUNK: tl.constexpr = STEP * DEPTH
    CHUNKS: tl.constexpr = (L + CHUNK - 1) // CHUNK
    WHOLE: tl.constexpr = L % CHUNK == 0
    xs, weights, norms, xs_stride = x, weight, norm_weight, x_stride
    if PACKED:
        xs = x.to(tl.pointer_type(tl.int32))
        weights = weight.to(tl.pointer_type(tl.int32))
        norms = norm_weight.to(tl.pointer_type(tl.int32))
        xs_stride = x_stride // 2

    # Tiles are (WARPS, STEP), a warp per row. x and the norm's weight are addressed alike, a copy per warp, so that
    # they have the weight's layout and no data crosses warps.
    first = (tl.program_id(0) * WARPS + tl.arange(0, WARPS)[:, None]) * PER_WARP
    k = tl.arange(0, STEP)[None, :]
    k_x = k + tl.zeros((WARPS, 1), tl.int32)
    bases = ()
    for f in tl.static_range(PER_WARP):
        feature = tl.minimum(first + f, N - 1).to(tl.int64)
        bases = bases + (weights + feature * L,)
        if GATED:
            bases = bases + (weights + (feature + N) * L,)
    w = _pieces(bases, k, L, STEP, DEPTH, WHOLE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if LATE:
            tl.extra.cuda.gdc_launch_dependents()

    sums = ()
    squares = ()
    for i in tl.static_range(ROWS):
        squares = squares + (tl.zeros((WARPS, STEP), tl.float32),)
        for b in tl.static_range(len(bases)):
            sums = sums + (tl.zeros((WARPS, STEP), tl.float32),)
    if CHUNKS > 1:
        for c in range(CHUNKS - 1):
            coming = _pieces(bases, k + (c + 1) * CHUNK, L, STEP, DEPTH, WHOLE)
            sums, squares = _multiply(
                sums, squares, xs, xs_stride, rows, norms, w, k_x + c * CHUNK,
                L, STEP, DEPTH, ROWS, NORM, PACKED, WHOLE,
            )  # fmt: skip
            w = coming
    sums, squares = _multiply(
        sums, squares, xs, xs_stride, rows, norms, w, k_x + (CHUNKS - 1) * CHUNK,
        L, STEP, DEPTH, ROWS, NORM, PACKED, WHOLE,
    )  # fmt: skip

    # One lane per output: lane i * PER_WARP + f of a warp has row i, feature f.
    lane = tl.arange(0, 32)[None, :]
    row, n = lane // PER_WARP, first + lane % PER_WARP
    y = tl.zeros((WARPS, 32), tl.float32)
    up = tl.zeros((WARPS, 32), tl.float32)
    square = tl.zeros((WARPS, 32), tl.float32)
    for i in tl.static_range(ROWS):
        if NORM:
            square = tl.where(row == i, tl.sum(squares[i], 1)[:, None], square)
        for f in tl.static_range(PER_WARP):
            mine = lane == i * PER_WARP + f
            if GATED:
                y = tl.where(mine, tl.sum(sums[(i * PER_WARP + f) * 2], 1)[:, None], y)
                up = tl.where(mine, tl.sum(sums[(i * PER_WARP + f) * 2 + 1], 1)[:, None], up)
            else:
                y = tl.where(mine, tl.sum(sums[i * PER_WARP + f], 1)[:, None], y)
    live = (row < tl.minimum(rows, ROWS)) & (n < N)
    _finish(y, up, square, bias, residual, out, row, n, live, N, eps, K, NORM, GATED, BIAS, ADD)


# --------------------------------------------------------------------------- up to sixteen rows


@triton.jit
def _tensor_cores(
    y, up, square, x_rows, norm_weight, w, k,
    K: tl.constexpr, STEP: tl.constexpr, DEPTH: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """DEPTH steps of y (and up) += w @ x.T, a product per warp; square (warps, rows) += x²."""
    for s in tl.static_range(DEPTH):
        h = _piece(x_rows, k + s * STEP, K, WHOLE)
        if NORM:
            g = _piece(norm_weight, k + s * STEP, K, WHOLE).to(tl.float32)
            wide = h.to(tl.float32)
            square += tl.sum(wide * wide, 2)
            h = (wide * g).to(h.dtype)
        h = tl.permute(h, (0, 2, 1))
        if GATED:
            y = tl.dot(w[2 * s], h, y, input_precision=PRECISION)
            up = tl.dot(w[2 * s + 1], h, up, input_precision=PRECISION)
        else:
            y = tl.dot(w[s], h, y, input_precision=PRECISION)
    return y, up, square


@triton.jit(do_not_specialize=["rows", "eps"])
def _matrix_kernel(
    x,
    weight,
    norm_weight,
    bias,
    residual,
    out,
    x_stride,
    rows,
    N,
    eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,  # 8 or 16
    WARPS: tl.constexpr,
    SLICE: tl.constexpr,  # of k, per warp and step
    DEPTH: tl.constexpr,  # steps loaded into registers before gdc_wait, at most all
    STAGES: tl.constexpr,  # later steps in flight
    PRECISION: tl.constexpr,
    LATE: tl.constexpr,  # the next kernel starts only when all before this one are complete
    PDL: tl.constexpr,
):
    if PDL and not LATE:
        tl.extra.cuda.gdc_launch_dependents()
    STEP: tl.constexpr = WARPS * SLICE
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    WHOLE: tl.constexpr = K % STEP == 0

    # Tiles are (WARPS, features or rows, SLICE): a batch of products, one per warp, summed at the end.
    n = tl.program_id(0) * _FEATURES + tl.arange(0, _FEATURES)
    feature = tl.minimum(n, N - 1).to(tl.int64)[None, :, None]
    k = tl.arange(0, WARPS)[:, None, None] * SLICE + tl.arange(0, SLICE)[None, None, :]
    bases = (weight + feature * K,)
    if GATED:
        bases = bases + (weight + (feature + N) * K,)
    w = _pieces(bases, k, K, STEP, DEPTH, WHOLE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if LATE:
            tl.extra.cuda.gdc_launch_dependents()

    i = tl.arange(0, ROWS)
    x_rows = x + tl.minimum(i, rows - 1)[None, :, None] * x_stride
    y = tl.zeros((WARPS, _FEATURES, ROWS), tl.float32)
    up = tl.zeros((WARPS, _FEATURES, ROWS), tl.float32)
    square = tl.zeros((WARPS, ROWS), tl.float32)
    if STEPS > DEPTH:  # later steps first: their loads start at once, while the first wait in registers
        for c in tl.range(DEPTH, STEPS, num_stages=STAGES):
            at = k + c * STEP
            y, up, square = _tensor_cores(
                y, up, square, x_rows, norm_weight, _pieces(bases, at, K, STEP, 1, WHOLE), at,
                K, STEP, 1, NORM, GATED, PRECISION, WHOLE,
            )  # fmt: skip
    y, up, square = _tensor_cores(
        y, up, square, x_rows, norm_weight, w, k, K, STEP, DEPTH, NORM, GATED, PRECISION, WHOLE
    )
    live = (n < N)[:, None] & (i < rows)[None, :]
    _finish(
        tl.sum(y, 0), tl.sum(up, 0), tl.sum(square, 0)[None, :], bias, residual, out, i[None, :], n[:, None], live, N,
        eps, K, NORM, GATED, BIAS, ADD,
    )  # fmt: skip


# --------------------------------------------------------------------------- choosing a kernel and its shape


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """A launch's shape. Per step of k a warp takes ``slice`` in the matrix kernel, 16 bytes per lane in the vector
    one."""

    per_warp: int  # features; 0: the matrix kernel
    warps: int
    depth: int  # steps of k in registers
    slice: int = 128
    stages: int = 3  # the matrix kernel: steps past ``depth`` in flight


def use_skinny(rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this is faster for (rows, k) @ (n, k).T than the library; the only place that decides."""
    if rows > MAX_ROWS or device.type != "cuda" or not rows or k % 8:
        return False
    if rows <= 2:
        return rows == 1 or (k <= 8192 and n * k <= LARGE_WEIGHT)
    if rows > 4 and dtype != torch.bfloat16:
        return False
    return n * k <= LARGE_WEIGHT and (rows <= 8 or n <= 4096)  # larger ones hide the library's launches


@cache
def skinny_config(rows: int, n: int, k: int, dtype: torch.dtype, gated: bool, num_sms: int) -> SkinnyConfig:
    """n: features of the output, so half the weight's rows if gated."""
    width = 2 if gated else 1
    tensor_cores = dtype != torch.float16  # with it, x * norm_weight may overflow
    if tensor_cores and rows > (2 if dtype == torch.bfloat16 else 4):
        slice_ = 64 if gated else 128
        return SkinnyConfig(0, 4, min(cdiv(k, 4 * slice_), 4), slice=slice_)
    steps = cdiv(k * dtype.itemsize, 16 * _LANES)  # one load per lane each
    if not gated and (steps > 16 or n * k > 12 << 20):  # two features per warp, a few loads of each at a time
        return SkinnyConfig(2, 4, 5 if steps % 5 == 0 and 16 < steps < 32 else 4)
    per_warp = 1
    while (
        per_warp < 4
        and 2 * per_warp * width * steps <= 16  # loads in flight per lane: 64 registers
        and 2 * per_warp * width * next_power_of_2(rows) <= 16  # sums per lane
        and cdiv(n, 4 * 2 * per_warp) >= 2 * num_sms
    ):
        per_warp *= 2
    most = 20 // (per_warp * width)
    if steps > most:  # in chunks, two of which are held at a time
        most = next(d for d in range(max(most // 2, 1), 0, -1) if steps % d == 0)
    return SkinnyConfig(per_warp, 4, min(steps, most))


# --------------------------------------------------------------------------- launchers


def _launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
    kernel, grid, args, keywords = prepare(x, weight, out, **options)
    kernel[grid](*args, **keywords)
    return out


def prepare(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    config: SkinnyConfig | None = None,
    late: bool = False,
    pdl: bool | None = None,
) -> tuple[Any, tuple[int], tuple[Any, ...], dict[str, Any]]:
    """(kernel, grid, args, keywords), to launch or to compile ahead: ``kernel.warmup(*args, grid=grid, **keywords)``.

    x (rows, k), weight (n or 2 * n, k), out (rows, n) contiguous; 1 to 16 rows.
    """
    assert weight.is_contiguous() and out.is_contiguous()
    x = x if x.stride(-1) == 1 else x.contiguous()
    (rows, k), n = x.shape, out.shape[1]
    config = config or skinny_config(rows, n, k, x.dtype, gated, num_sms(x.device))
    pdl = use_pdl(x.device) if pdl is None else pdl
    tensors = (
        x,
        weight,
        weight if norm_weight is None else norm_weight,
        weight if bias is None else bias,
        out if residual is None else residual,
        out,
    )
    flags: dict[str, Any] = {"K": k, "NORM": norm_weight is not None, "GATED": gated, "BIAS": bias is not None,
             "ADD": residual is not None, "WARPS": config.warps, "DEPTH": config.depth, "LATE": late,
             "PDL": pdl}  # fmt: skip
    options = {"num_warps": config.warps, "num_stages": 1, "enable_fp_fusion": True, "launch_pdl": pdl}
    if config.per_warp:
        packed = x.dtype == torch.bfloat16 and k % 2 == 0 and x.stride(0) % 2 == 0
        kernel, features = _vector_kernel, config.warps * config.per_warp
        flags |= {"ROWS": next_power_of_2(rows), "PER_WARP": config.per_warp, "PACKED": packed,
                  "STEP": _LANES * (4 if packed else 16 // x.dtype.itemsize)}  # fmt: skip
    else:
        kernel, features = _matrix_kernel, 16
        flags |= {"ROWS": 8 if rows <= 8 else 16, "SLICE": config.slice, "STAGES": config.stages,
                  "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32"}  # fmt: skip
    return kernel, (cdiv(n, features),), (*tensors, x.stride(0), rows, n, eps), flags | options


def linear_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, config: SkinnyConfig | None = None
) -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, bias=bias, config=config)


def norm_linear_triton(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    config: SkinnyConfig | None = None,
) -> torch.Tensor:
    """Triggers late, for the attention that follows: before its own wait it reads all but what its predecessor
    wrote."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, norm_weight=norm_weight, eps=eps, bias=bias, config=config, late=True)


def norm_gate_up_triton(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    config: SkinnyConfig | None = None,
) -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, norm_weight=norm_weight, eps=eps, bias=bias, gated=True, config=config)


def linear_add_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    config: SkinnyConfig | None = None,
) -> torch.Tensor:
    """In place: each element is read and written by one thread, after ``gdc_wait``."""
    return _launch(x, weight, residual, bias=bias, residual=residual, config=config)


# --------------------------------------------------------------------------- references


def norm_linear_reference(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return F.linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_gate_up_reference(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return silu_mul(norm_linear_reference(x, norm_weight, eps, weight, bias))


def linear_add_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """The addition happens in the product's epilogue: accumulated in float32, rounded once, no copy."""
    if bias is None:
        return residual.addmm_(x, weight.t())
    return residual.add_(F.linear(x, weight, bias))
