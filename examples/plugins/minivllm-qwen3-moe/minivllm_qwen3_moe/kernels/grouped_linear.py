"""Products over rows sorted by expert, each tile of rows with its own expert's weight; and the sum over the choices.

``gate_up`` gathers its rows from the tokens and multiplies SiLU(gate) by up before it stores; ``down`` takes the sorted
rows as they lie, scales each by its router's weight and stores it where its pair belongs; ``combine`` adds a token's
pairs to the residual stream, always in the same order.

In float8, weights have a scale per feature and rows of x one each; the sums, in float32, are multiplied by both.

Bytes moved, Qwen3-30B-A3B in bf16: 9.4 MB for each expert that any token chose (32 tokens: about 111 experts, 1.05 GB,
244 µs at 4.3 TB/s); in float8 half of that. Many tokens are bound by arithmetic: 75.5 MFLOP a token, 8192 tokens
618 GFLOP, 0.78 ms at 790 TFLOP/s.
"""

# mypy: disable-error-code="assignment, no-untyped-def"

from typing import Any, cast

import torch

from minivllm.kernels._triton import next_power_of_2, tl, triton
from minivllm.kernels.linear.fp8_linear import Fp8Rows
from minivllm.kernels.pdl import use_pdl
from minivllm.rounding import cdiv
from minivllm_qwen3_moe.kernels.routing import Routing
from minivllm_qwen3_moe.tiles import Tile


@triton.jit
def _load(at, k, K: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of ``at + k``; WHOLE: no k is past K."""
    if WHOLE:
        return tl.load(at + k)
    else:
        return tl.load(at + k, mask=k < K, other=0.0)


@triton.jit(do_not_specialize=["bound"])
def _grouped_kernel(
    x,  # GATED: (tokens, K); else (pairs, K), rows sorted by expert
    weight,  # GATED: (experts, 2 * N, K); else (experts, N, K)
    out,  # GATED: (pairs, N), sorted by expert; else (pairs, N), by token
    pairs,
    tiles,
    shares,  # (pairs,) float32, the router's weights; read if not GATED
    row_scales,  # one per row of x, float32; read if SCALED
    feature_scales,  # one per row of weight, float32; the same
    bound,
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,  # x and weight are in float8
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    columns = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // columns
    expert = tl.load(tiles + tile)
    if expert < 0:
        return
    row = tl.load(tiles + bound + tile) + tl.arange(0, BLOCK_M)
    end = tl.load(tiles + 2 * bound + tile)
    live = row < end
    row = tl.minimum(row, end - 1)  # rows past the end repeat the last: no masks in the loop
    pair = tl.load(pairs + row)
    n = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    feature = tl.minimum(n, N - 1)
    if GATED:
        x_row = pair // TOP_K
        line = expert.to(tl.int64) * (2 * N) + feature
    else:
        x_row = row
        line = expert.to(tl.int64) * N + feature
    x_rows = x + x_row.to(tl.int64)[:, None] * K
    w_rows = weight + line[None, :] * K
    k = tl.arange(0, BLOCK_K)
    WHOLE: tl.constexpr = K % BLOCK_K == 0
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        h = _load(x_rows, (start + k)[None, :], K, WHOLE)
        y = tl.dot(h, _load(w_rows, (start + k)[:, None], K, WHOLE), y, input_precision=PRECISION)
        if GATED:
            w = _load(w_rows + N * K, (start + k)[:, None], K, WHOLE)
            up = tl.dot(h, w, up, input_precision=PRECISION)
    if SCALED:
        by_row = tl.load(row_scales + x_row)[:, None]
        y *= by_row * tl.load(feature_scales + line)[None, :]
        if GATED:
            up *= by_row * tl.load(feature_scales + line + N)[None, :]
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * up
        to = out + row.to(tl.int64)[:, None] * N
    else:
        y = y * tl.load(shares + pair)[:, None]
        to = out + pair.to(tl.int64)[:, None] * N
    tl.store(to + n[None, :], y.to(out.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])


@triton.jit
def _combine_kernel(
    x,  # (tokens, TOP_K, N)
    residual,  # (tokens, N), read if ADD
    out,  # (tokens, N)
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        total += tl.load(x + (token * TOP_K + j) * N + n, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual + token * N + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------- launchers


def prepare(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor,
    routing: Routing,
    tile: Tile,
    gated: bool,
    scale: torch.Tensor | None = None,
) -> tuple[Any, tuple[int], tuple[Any, ...], dict[str, Any]]:
    """(kernel, grid, args, keywords), to launch or to compile ahead (``kernel.warmup``); the third argument is the
    output."""
    values = x.values if isinstance(x, Fp8Rows) else x
    assert values.is_contiguous() and weight.is_contiguous() and values.dtype == weight.dtype
    n, k = weight.shape[1] // 2 if gated else weight.shape[1], weight.shape[2]
    out = torch.empty((len(routing.pairs), n), dtype=x.dtype, device=weight.device)
    scales = (routing.weights,) * 2  # not read
    if isinstance(x, Fp8Rows):
        assert scale is not None and scale.is_contiguous()
        scales = x.scales, scale
    bound, pdl = routing.tiles.shape[1], use_pdl(weight.device)
    args = values, weight, out, routing.pairs, routing.tiles, routing.weights, *scales, bound, n
    shape = {"K": k, "TOP_K": routing.weights.shape[1], "GATED": gated, "SCALED": scale is not None, "PDL": pdl,
             "BLOCK_M": routing.block, "BLOCK_N": tile.n, "BLOCK_K": tile.k,
             "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32"}  # fmt: skip
    launch = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": pdl}
    return _grouped_kernel, (bound * cdiv(n, tile.n),), args, shape | launch


def _launch(*args: Any, **keywords: Any) -> torch.Tensor:
    kernel, grid, tensors, options = prepare(*args, **keywords)
    kernel[grid](*tensors, **options)
    return cast(torch.Tensor, tensors[2])


def grouped_gate_up(
    h: torch.Tensor | Fp8Rows, weight: torch.Tensor, routing: Routing, tile: Tile, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """h (t, hidden), weight (experts, 2 * inner, hidden); returns (t * top_k, inner), rows sorted by expert. In float8,
    ``scale`` is (experts, 2 * inner)."""
    return _launch(h, weight, routing, tile, gated=True, scale=scale)


def grouped_down(
    x: torch.Tensor | Fp8Rows, weight: torch.Tensor, routing: Routing, tile: Tile, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """x as ``grouped_gate_up`` returns it, weight (experts, hidden, inner); returns (t * top_k, hidden) by token,
    each row times its router's weight. In float8, ``scale`` is (experts, hidden)."""
    return _launch(x, weight, routing, tile, gated=False, scale=scale)


def combine(x: torch.Tensor, tokens: int, residual: torch.Tensor | None) -> torch.Tensor:
    """Sums x (t * top_k, n) over each token's pairs, into a new (t, n), or onto ``residual`` in place."""
    n, pdl = x.shape[1], use_pdl(x.device)
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device) if residual is None else residual
    assert out.is_contiguous()
    block = min(next_power_of_2(n), 1024)
    _combine_kernel[(tokens, cdiv(n, block))](
        x, out, out, N=n, TOP_K=len(x) // tokens, ADD=residual is not None, BLOCK=block, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out
