"""The sparse MLP of a few tokens, pair by pair: nothing is sorted, and every weight streams through once a pair.

Three kernels behind the router's product. ``pick`` takes a token's top-k and norms its hidden state. ``pair_gate_up``:
a program is some features of one (token, expert) pair. ``pair_down``: a program is some features of one token, summed
over its experts onto the residual stream. In both a warp owns a feature and adds up its own product; all loads of a
program are in flight at once.

In float8, ``pick`` makes its rows of float8, one more kernel (``quantize``) those of ``pair_down``, and products are
added up in float32 and multiplied by both scales.

Bytes moved: 9.4 MB a pair in bf16 at Qwen3-30B-A3B's shape; one token 75 MB, 17.6 µs at 4.3 TB/s; in float8 half.
``pair_down``'s third of it is under way before ``pair_gate_up`` ends, see there.
"""

# In a Triton kernel, tuples grow by + only.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, no-untyped-def"

import torch

from minivllm.kernels._triton import next_power_of_2, tl, triton
from minivllm.kernels.linear.fp8_linear import Fp8Rows
from minivllm.kernels.pdl import use_pdl
from minivllm.rounding import cdiv
from minivllm_qwen3_moe.kernels.routing import choose

MAX_TOKENS = 2  # beyond, pairs share experts, and reading a weight once for all of its rows is faster
MAX_FP8_TOKENS = 4
_LANES = 32
_GATE_UP_WARPS, _DOWN_WARPS = 2, 4
_AHEAD = 12  # loads a lane of ``down``, of whole experts, that are under way before what they multiply is there
_FP8_AHEAD = 24  # smaller ones
_MOST, _SOME = tl.constexpr(448.0), tl.constexpr(1e-12)  # of float8; that counts as the largest of a row, as elsewhere


@triton.jit(do_not_specialize=["eps"])
def _pick_kernel(
    logits,  # (tokens, E)
    x,  # (tokens, N)
    norm_weight,  # (N,)
    h,  # (tokens, N): out, the normed x, in float8 if SCALED
    scales,  # (tokens,) float32: out, if SCALED
    weights,  # (tokens, K) float32: out
    ids,  # (tokens, K) int32: out
    eps,
    E,
    N: tl.constexpr,
    K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.arange(0, BLOCK_N)
    g = tl.load(norm_weight + n, mask=n < N, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    row = tl.load(x + token.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)
    t, e = token + tl.arange(0, 1), tl.arange(0, BLOCK_E)
    chosen, choice = choose(logits, weights, t, e, t >= 0, E, K, RENORMALIZE, 1, BLOCK_E, BLOCK_K)
    tl.store(ids + t[:, None] * K + choice, e[None, :], mask=chosen > 0)
    scale = 1.0 / tl.sqrt(tl.sum(row * row, 0) / N + eps)
    if SCALED:  # as ``quantize`` does: 1 / rms is part of the row's scale
        row = row * g.to(tl.float32)
        top = tl.maximum(tl.max(tl.abs(row), 0), _SOME)
        tl.store(scales + token, top / _MOST * scale)
        every: tl.constexpr = tl.PropagateNan.ALL
        normed = tl.minimum(tl.maximum(row * (_MOST / top), -_MOST, every), _MOST, every)
    else:
        normed = (row * scale).to(h.dtype.element_ty) * g
    tl.store(h + token.to(tl.int64) * N + n, normed.to(h.dtype.element_ty), mask=n < N)


@triton.jit
def _row(base, k, K: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr):
    """STEPS loads of ``base + k``, all in flight at once."""
    out = ()
    for s in tl.static_range(STEPS):
        if K % STEP == 0:
            out = out + (tl.load(base + k + s * STEP),)
        else:
            out = out + (tl.load(base + k + s * STEP, mask=k + s * STEP < K, other=0.0),)
    return out


@triton.jit
def _add_products(total, a, b):
    for s in tl.static_range(len(a)):
        total += a[s].to(tl.float32) * b[s].to(tl.float32)
    return total


@triton.jit
def _pair_gate_up_kernel(
    h,  # (tokens, K)
    weight,  # (experts, 2 * N, K): gate, then up
    row_scales,  # (tokens,) float32, read if SCALED
    feature_scales,  # (experts, 2 * N) float32, the same
    ids,  # (tokens * TOP_K,) int32
    out,  # (tokens * TOP_K, N)
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SCALED: tl.constexpr,  # h and weight are in float8
    WARPS: tl.constexpr,
    STEP: tl.constexpr,  # elements of a row that a warp takes in one load
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:  # in this order: whoever depends on this kernel may count on all before it being complete
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0)
    expert = tl.load(ids + pair).to(tl.int64)
    n = tl.program_id(1) * WARPS + tl.arange(0, WARPS)[:, None]
    k = tl.arange(0, STEP)[None, :]
    line = expert * 2 * N + tl.minimum(n, N - 1)
    base = weight + line * K
    x = h + pair // TOP_K * K + tl.zeros((WARPS, 1), tl.int32)
    y = tl.zeros((WARPS, STEP), tl.float32)
    up = tl.zeros((WARPS, STEP), tl.float32)
    for start in range(0, K, STEP * STEPS):
        gate_row = _row(base, start + k, K, STEP, STEPS)
        up_row = _row(base + N * K, start + k, K, STEP, STEPS)
        x_row = _row(x, start + k, K, STEP, STEPS)
        y = _add_products(y, gate_row, x_row)
        up = _add_products(up, up_row, x_row)
    y = tl.sum(y, 1)[:, None]
    up = tl.sum(up, 1)[:, None]
    if SCALED:
        by_row = tl.load(row_scales + pair // TOP_K)
        y *= by_row * tl.load(feature_scales + line)
        up *= by_row * tl.load(feature_scales + line + N)
    y = y / (1.0 + tl.exp(-y)) * up
    tl.store(out + pair * N + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _pair_down_kernel(
    x,  # (tokens * TOP_K, K)
    weight,  # (experts, N, K)
    row_scales,  # (tokens * TOP_K,) float32, read if SCALED
    feature_scales,  # (experts, N) float32, the same
    ids,
    weights,  # (tokens * TOP_K,) float32
    residual,  # (tokens, N), read if ADD
    out,  # (tokens, N)
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SCALED: tl.constexpr,  # x and weight are in float8
    ADD: tl.constexpr,
    AHEAD: tl.constexpr,  # experts whose weights are loaded before the wait
    WARPS: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """It reads ``ids`` before it waits, though a kernel of this step wrote them: the gate_up kernel lets its successor
    (this, or the one that makes float8 of its output, behind which this starts) start only after its own wait, and so
    after ``pick`` was complete. Past L1, which may be of another step."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    n = tl.program_id(1) * WARPS + tl.arange(0, WARPS)[:, None]
    k = tl.arange(0, STEP)[None, :]
    feature = tl.minimum(n, N - 1)
    held = ()
    held_scales = ()
    for j in tl.static_range(AHEAD):
        expert = tl.load(ids + token * TOP_K + j, cache_modifier=".cg").to(tl.int64)
        held = held + _row(weight + (expert * N + feature) * K, k, K, STEP, STEPS)
        if SCALED:
            held_scales = held_scales + (tl.load(feature_scales + expert * N + feature),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((WARPS, STEP), tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        if j < AHEAD:
            row = ()
            for s in tl.static_range(STEPS):
                row = row + (held[j * STEPS + s],)
            if SCALED:
                scale = held_scales[j]
        else:
            expert = tl.load(ids + pair, cache_modifier=".cg").to(tl.int64)
            row = _row(weight + (expert * N + feature) * K, k, K, STEP, STEPS)
            if SCALED:
                scale = tl.load(feature_scales + expert * N + feature)
        x_row = _row(x + pair * K + tl.zeros((WARPS, 1), tl.int32), k, K, STEP, STEPS)
        product = _add_products(tl.zeros((WARPS, STEP), tl.float32), row, x_row)
        if SCALED:
            total += product * (scale * (tl.load(weights + pair) * tl.load(row_scales + pair)))
        else:
            total += product * tl.load(weights + pair)
    y = tl.sum(total, 1)[:, None]
    at = token * N + n
    if ADD:
        y += tl.load(residual + at, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=n < N)


# --------------------------------------------------------------------------- launchers


def pick(
    logits: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    top_k: int,
    renormalize: bool,
    float8: bool = False,
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor, torch.Tensor]:
    """logits (t, experts), x (t, n); returns the normed x, weights (t, top_k) float32, experts (t, top_k) int32."""
    (tokens, n), experts, pdl = x.shape, logits.shape[1], use_pdl(x.device)
    assert x.is_contiguous() and logits.is_contiguous()
    rows = Fp8Rows.empty(tokens, n, x) if float8 else None
    h = torch.empty((tokens, n), dtype=x.dtype, device=x.device) if rows is None else rows.values
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=x.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=x.device)
    _pick_kernel[(tokens,)](
        logits, x, norm_weight, h, weights if rows is None else rows.scales, weights, ids, eps, experts, N=n, K=top_k,
        RENORMALIZE=renormalize, SCALED=float8, BLOCK_E=next_power_of_2(experts), BLOCK_K=next_power_of_2(top_k),
        BLOCK_N=next_power_of_2(n), PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
    return h if rows is None else rows, weights, ids


def _steps(k: int, dtype: torch.dtype, most: int) -> dict[str, int]:
    """A lane takes 16 bytes a load, in float8 fewer where that leaves no lane idle; at most ``most`` loads of a row are
    in flight."""
    widths = (16, 8, 4) if dtype.itemsize == 1 else (16,)
    steps = [_LANES * width // dtype.itemsize for width in widths]
    step = next((step for step in steps if k % step == 0), steps[0])
    return {"STEP": step, "STEPS": min(cdiv(k, step), most)}


def _operands(
    x: torch.Tensor | Fp8Rows, weight: torch.Tensor, scale: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, ...], bool]:
    """x and weight, and their scales, and whether there are any; else tensors that are not read."""
    if not isinstance(x, Fp8Rows):
        assert scale is None
        return (x, weight, weight, weight), False
    assert scale is not None and scale.is_contiguous()
    return (x.values, weight, x.scales, scale), True


def pair_gate_up(
    h: torch.Tensor | Fp8Rows, weight: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """h (t, hidden), weight (experts, 2 * inner, hidden), ids (t, top_k); returns (t * top_k, inner). In float8,
    ``scale`` is (experts, 2 * inner)."""
    operands, scaled = _operands(h, weight, scale)
    pairs, n, k = ids.numel(), weight.shape[1] // 2, weight.shape[2]
    warps, pdl = _GATE_UP_WARPS, use_pdl(weight.device)
    out = torch.empty((pairs, n), dtype=h.dtype, device=weight.device)
    _pair_gate_up_kernel[(pairs, cdiv(n, warps))](
        *operands, ids, out, n, K=k, TOP_K=ids.shape[1], SCALED=scaled, WARPS=warps, **_steps(k, weight.dtype, 8),
        PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def pair_down(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """x as ``pair_gate_up`` returns it, weight (experts, hidden, inner), ids and weights (t, top_k); returns the
    weighted sum, (t, hidden), or adds it to ``residual`` in place. To be launched right after ``pair_gate_up``, or, in
    float8, where ``scale`` is (experts, hidden), after ``quantize`` of its output."""
    operands, scaled = _operands(x, weight, scale)
    (tokens, top_k), n, k = ids.shape, weight.shape[1], weight.shape[2]
    warps, pdl = _DOWN_WARPS, use_pdl(weight.device)
    out = torch.empty((tokens, n), dtype=x.dtype, device=weight.device) if residual is None else residual
    assert out.is_contiguous()
    shape = _steps(k, weight.dtype, k)  # a whole row
    ahead = (_FP8_AHEAD if scaled else _AHEAD) // shape["STEPS"]
    _pair_down_kernel[(tokens, cdiv(n, warps))](
        *operands, ids, weights, out, out, n, K=k, TOP_K=top_k, SCALED=scaled, ADD=residual is not None,
        AHEAD=min(top_k, ahead), WARPS=warps, **shape, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
