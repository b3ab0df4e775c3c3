"""The router's choice and where its rows go: top-k, softmax, and the (token, expert) pairs sorted by expert.

Each expert's rows are cut into tiles of ``block`` rows, the last one short. Nothing waits for the host: the number of
tiles has a bound that follows from the number of tokens, and tiles past the last are marked as such. Up to ``FEW``
tokens one program does it all; more take three kernels: choose and count, add up, place.

Bytes moved are few (8192 tokens of 128 experts in bf16: 2 MB of logits); what counts is the latency, 3 µs a kernel.
"""

# mypy: disable-error-code="assignment, no-untyped-def"

from dataclasses import dataclass

import torch

from minivllm.kernels._triton import next_power_of_2, tl, triton
from minivllm.kernels.pdl import use_pdl
from minivllm.rounding import cdiv

FEW = 32  # tokens that one program routes
_SCAN = tl.constexpr(64)  # blocks of tokens that the adding-up takes at once


@dataclass(frozen=True, slots=True)
class Routing:
    """# weights (t, top_k) float32   pairs (t * top_k,) int32: token * top_k + choice, sorted by expert, then by token
    # tiles (3, bound) int32: expert (-1: no tile), first row in ``pairs``, end of that expert's rows"""

    weights: torch.Tensor
    pairs: torch.Tensor
    tiles: torch.Tensor
    block: int


def num_tiles(pairs: int, experts: int, block: int) -> int:
    """The most tiles of ``block`` rows that ``pairs`` rows can make over ``experts`` experts."""
    return min(pairs, (pairs + experts * (block - 1)) // block)


# --------------------------------------------------------------------------- pieces


@triton.jit
def _keys(x, e, E):
    """Integers that order logits as their values do, and equal ones by expert, first one first; -2^31 past E."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    if x.dtype == tl.bfloat16:  # the value's 16 bits and the expert fit into one integer
        keys = (order & -65536) | (65535 - e)
    else:
        keys = (order.to(tl.int64) << 32) | (0x7FFFFFFF - e).to(tl.int64)
    return tl.where(e < E, keys, -0x80000000 if x.dtype == tl.bfloat16 else -0x8000000000000000)


@triton.jit
def _value(key, BF16: tl.constexpr):
    """The logit of a key."""
    if BF16:
        order = key & -65536
        bits = tl.where(order < 0, (order ^ 0x7FFFFFFF) & -65536, order)
    else:
        order = (key >> 32).to(tl.int32)
        bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def choose(
    logits, weights, t, e, live, E, K: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each token's K largest logits, the first of equal ones: stores their weights; returns two (tokens, experts)
    int32: 1 where chosen, and as which."""
    x = tl.load(logits + t[:, None] * E + e[None, :], mask=live[:, None] & (e < E)[None, :], other=float("-inf"))
    BF16: tl.constexpr = x.dtype == tl.bfloat16
    keys = _keys(x, e[None, :], E)
    lowest = -0x80000000 if BF16 else -0x8000000000000000
    j = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros([BLOCK_T, BLOCK_E], tl.int32)
    choice = tl.zeros([BLOCK_T, BLOCK_E], tl.int32)
    kept = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for i in tl.static_range(K):
        best = tl.max(keys, 1)
        if i == 0:
            top = _value(best, BF16)
        mine = (keys == best[:, None]) & live[:, None]
        chosen = tl.where(mine, 1, chosen)
        choice = tl.where(mine, i, choice)
        kept = tl.where(j == i, tl.exp(_value(best, BF16) - top)[:, None], kept)
        keys = tl.where(mine, lowest, keys)
    if RENORMALIZE:
        total = tl.sum(tl.where(j < K, kept, 0.0), 1)
    else:
        total = tl.sum(tl.exp(x.to(tl.float32) - top[:, None]), 1)
    tl.store(weights + t[:, None] * K + j, kept / total[:, None], mask=live[:, None] & (j < K))
    return chosen, choice


@triton.jit
def _place(pairs, base, chosen, choice, t, K: tl.constexpr):
    """Pair (t, e) goes to ``base[e]`` plus how many of these tokens before t chose e."""
    rank = tl.cumsum(chosen, 0) - chosen
    tl.store(pairs + base[None, :] + rank, t[:, None] * K + choice, mask=chosen > 0)


@triton.jit
def _cut(tiles, counts, e, E, bound, M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_FILL: tl.constexpr):
    """Write the tiles of experts with ``counts`` rows each; returns each expert's first row."""
    first = tl.cumsum(counts, 0) - counts
    own = (counts + M - 1) // M
    place = tl.cumsum(own, 0) - own
    for i in range(tl.max(own, 0)):
        mine = i < own
        tl.store(tiles + place + i, e, mask=mine)
        tl.store(tiles + bound + place + i, first + i * M, mask=mine)
        tl.store(tiles + 2 * bound + place + i, first + counts, mask=mine)
    used = tl.sum(own, 0)
    for start in range(0, bound, BLOCK_FILL):
        at = start + tl.arange(0, BLOCK_FILL)
        tl.store(tiles + at, tl.full([BLOCK_FILL], -1, tl.int32), mask=(at >= used) & (at < bound))
    return first


# --------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["tokens", "bound"])
def _route_few_kernel(
    logits,  # (tokens, E)
    weights,  # (tokens, K) float32
    pairs,  # (tokens * K,) int32
    tiles,  # (3, bound) int32
    tokens,
    bound,
    E,
    K: tl.constexpr,
    M: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t, e = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
    chosen, choice = choose(logits, weights, t, e, t < tokens, E, K, RENORMALIZE, BLOCK_T, BLOCK_E, BLOCK_K)
    first = _cut(tiles, tl.sum(chosen, 0), e, E, bound, M, BLOCK_E, 256)
    _place(pairs, first, chosen, choice, t, K)


@triton.jit(do_not_specialize=["tokens"])
def _choose_kernel(
    logits,
    weights,
    picks,  # (tokens, E) int8: 0, or 1 + which choice of the token it is
    counts,  # (blocks, E) int32: how many of a block's tokens chose each expert
    tokens,
    E,
    K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    t, e = block * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
    live = t < tokens
    chosen, choice = choose(logits, weights, t, e, live, E, K, RENORMALIZE, BLOCK_T, BLOCK_E, BLOCK_K)
    tl.store(counts + block * E + e, tl.sum(chosen, 0), mask=e < E)
    pick = tl.where(chosen > 0, choice + 1, 0).to(tl.int8)
    tl.store(picks + t[:, None] * E + e[None, :], pick, mask=live[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=["blocks", "bound"])
def _add_up_kernel(
    counts,  # (blocks, E) int32: in, counts; out, where each block's first row of each expert goes
    tiles,
    blocks,
    bound,
    E,
    M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, e = tl.arange(0, _SCAN), tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, blocks, _SCAN):
        at = counts + (start + b)[:, None] * E + e[None, :]
        total += tl.sum(tl.load(at, mask=(start + b < blocks)[:, None] & (e < E)[None, :], other=0), 0)
    base = _cut(tiles, total, e, E, bound, M, BLOCK_E, 1024)
    for start in range(0, blocks, _SCAN):
        at = counts + (start + b)[:, None] * E + e[None, :]
        there = (start + b < blocks)[:, None] & (e < E)[None, :]
        count = tl.load(at, mask=there, other=0)
        tl.store(at, base[None, :] + tl.cumsum(count, 0) - count, mask=there)
        base += tl.sum(count, 0)


@triton.jit(do_not_specialize=["tokens"])
def _place_kernel(
    picks, counts, pairs, tokens, E, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    t, e = block * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
    there = (t < tokens)[:, None] & (e < E)[None, :]
    pick = tl.load(picks + t[:, None] * E + e[None, :], mask=there, other=0).to(tl.int32)
    base = tl.load(counts + block * E + e, mask=e < E, other=0)
    _place(pairs, base, tl.where(pick > 0, 1, 0), pick - 1, t, K)


# --------------------------------------------------------------------------- launcher


def route(logits: torch.Tensor, top_k: int, renormalize: bool, block: int) -> Routing:
    """logits (t, experts) contiguous, t > 0; ``block``: rows of a tile."""
    (tokens, experts), device = logits.shape, logits.device
    bound, pdl = num_tiles(tokens * top_k, experts, block), use_pdl(device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    pairs = torch.empty(tokens * top_k, dtype=torch.int32, device=device)
    tiles = torch.empty((3, bound), dtype=torch.int32, device=device)
    experts_up = next_power_of_2(experts)
    shape = {"K": top_k, "RENORMALIZE": renormalize, "BLOCK_E": experts_up, "BLOCK_K": next_power_of_2(top_k)}
    launch = {"PDL": pdl, "launch_pdl": pdl}
    if tokens <= FEW:
        block_t = next_power_of_2(tokens)
        warps = max(min(block_t * experts_up // 512, 8), 1)
        _route_few_kernel[(1,)](
            logits, weights, pairs, tiles, tokens, bound, experts, M=block, BLOCK_T=block_t, num_warps=warps, **shape,
            **launch,
        )  # fmt: skip
        return Routing(weights, pairs, tiles, block)
    blocks = cdiv(tokens, FEW)
    picks = torch.empty((tokens, experts), dtype=torch.int8, device=device)
    counts = torch.empty((blocks, experts), dtype=torch.int32, device=device)
    _choose_kernel[(blocks,)](
        logits, weights, picks, counts, tokens, experts, BLOCK_T=FEW, num_warps=8, **shape, **launch
    )
    _add_up_kernel[(1,)](
        counts, tiles, blocks, bound, experts, M=block, BLOCK_E=experts_up, num_warps=8, **launch
    )  # fmt: skip
    _place_kernel[(blocks,)](
        picks, counts, pairs, tokens, experts, K=top_k, BLOCK_T=FEW, BLOCK_E=experts_up, num_warps=8, **launch
    )
    return Routing(weights, pairs, tiles, block)
