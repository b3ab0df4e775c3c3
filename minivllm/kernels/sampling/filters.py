"""Top-k, top-p and min-p: find the smallest logit that may be drawn, without sorting, and draw from there up.

All three keep the most probable tokens of a row, so they amount to a lower bound on its logits: for top-k the k-th
largest; for min-p the largest plus temperature * log(min_p); for top-p the largest bound that keeps enough probability
of what the other two keep. Top-k and top-p bounds are searched for: a pass over the row tests for three values whether
enough tokens, or enough weight, are at or above them; then the interval that contains the bound shrinks to values that
tokens have, until both ends meet, after about 6 passes for bfloat16. A pass reads only groups of tokens whose largest
logit may matter; top-k starts with the groups that have the k largest. Of what is kept, the token with the largest
logit / temperature + Gumbel noise is drawn.

Bytes moved: per pass those groups of the row, 2 * vocab at most; 132 rows of 300 KB stay in 50 MB of L2 between passes.
Arithmetic takes the time, on one SM per row: 18 instructions per token and pass, 20 µs for 151,936 tokens. Rows without
filters cost only the launch. Idea: search for a pivot instead of sorting (FlashInfer's sampling kernels, 2025), here
for the bound itself, so that a draw is never rejected.
"""

from typing import NamedTuple

import torch

from minivllm.kernels._triton import LOG2E, next_power_of_2, tl, triton
from minivllm.kernels.sampling.draws import GROUP, exp2_kernel, keys_kernel, noise_kernel

_WARPS = 8
_AT_ONCE = 8  # groups whose loads are in flight together
_RANKED = 32  # groups that all others are compared with at once
_G, _L1 = tl.constexpr(GROUP), tl.constexpr(LOG2E)
_INF = tl.constexpr(float("inf"))


class Filters(NamedTuple):
    """Per slot, on the device: (slots,). No filter: top_k <= 0, top_p >= 1, min_p 0."""

    top_k: torch.Tensor  # int32
    top_p: torch.Tensor  # float32
    min_p: torch.Tensor  # float32


@triton.jit
def _load_group_kernel(logits, order, which, groups, VOCAB: tl.constexpr):
    """The first token of group ``which`` in the order, and its (GROUP,) logits."""
    start = tl.load(order + which, mask=which < groups, other=0) * _G
    token = start + tl.arange(0, _G)
    end = tl.where(which < groups, VOCAB, 0)
    return start, tl.load(logits + token, mask=token < end, other=-_INF).to(tl.float32)


@triton.jit
def _count_kernel(best, bound, GROUPS: tl.constexpr):
    """The number of groups with a logit of at least ``bound``; they come first in the order."""
    return tl.minimum(tl.sum((best >= bound).to(tl.int32), 0), GROUPS)  # padding has -inf, too


@triton.jit
def _least_kernel(logits, order, best, VOCAB: tl.constexpr, GROUPS: tl.constexpr):
    """The smallest logit that is not -inf."""
    groups = _count_kernel(best, -_INF, GROUPS)
    least = tl.full((_G,), _INF, tl.float32)
    for which in range(groups):
        _, score = _load_group_kernel(logits, order, which, groups, VOCAB)
        least = tl.minimum(least, tl.where(score > -_INF, score, _INF))
    return tl.min(least, 0)


@triton.jit
def _add_group_kernel(
    logits, order, which, groups, t1, t2, t3, low, high, above, scale, sum1, sum2, sum3, lowest, highest,
    COUNT: tl.constexpr, VOCAB: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    """Add group ``which``: its tokens at or above each of three values, or their weight; and its extremes between the
    bounds. A function, because Triton parses the body of an unrolled loop again for each iteration."""
    _, score = _load_group_kernel(logits, order, which, groups, VOCAB)
    above1 = (score >= t1).to(tl.float32)
    above2 = (score >= t2).to(tl.float32)
    above3 = (score >= t3).to(tl.float32)
    if COUNT:
        sum1, sum2, sum3 = sum1 + above1, sum2 + above2, sum3 + above3
    else:
        weight = exp2_kernel((score - high) * scale, APPROX)
        sum1 = tl.fma(weight, above1, sum1)
        sum2 = tl.fma(weight, above2, sum2)
        sum3 = tl.fma(weight, above3, sum3)
    lowest = tl.minimum(lowest, tl.where(score >= low, score, _INF))
    highest = tl.maximum(highest, tl.where(score < above, score, -_INF))
    return sum1, sum2, sum3, lowest, highest


@triton.jit
def _draw_group_kernel(
    logits, order, which, groups, bound, scale, key, key2, top, at, VOCAB: tl.constexpr, APPROX: tl.constexpr
):
    """Merge group ``which`` into the best token so far at each position in a group."""
    start, score = _load_group_kernel(logits, order, which, groups, VOCAB)
    token = start + tl.arange(0, _G)
    score = tl.where(score >= bound, score * scale + noise_kernel(token, key, key2, APPROX), -_INF)
    better = (score > top) | ((score == top) & (token < at))
    return tl.where(better, score, top), tl.where(better, token, at)


@triton.jit
def _search_kernel(
    logits, order, best, floor, low, high, goal, scale, COUNT: tl.constexpr, VOCAB: tl.constexpr, GROUPS: tl.constexpr,
    AT_ONCE: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    """The largest logit at or above which there are ``goal`` tokens, or this part of the weight of all from ``floor``
    up. That is so for ``low``; none is above ``high``."""
    above = high + tl.abs(high) * 1e-6 + 1e-30  # from here up there are not enough
    least, most = low, high  # the smallest and largest token values between the two
    total, at_low, at_above = 0.0, 0.0, 0.0  # 0: unknown
    while least < most:
        # Two around the value to expect if tokens were spread evenly, one in the middle of the larger rest.
        wanted = goal if COUNT else goal * total
        guess = tl.where(at_low > 0, (at_low - wanted) / (at_low - at_above), 0.5)
        guess = tl.minimum(tl.maximum(guess, 0.125), 0.875)
        before, behind = guess - 0.0625, guess + 0.0625
        early = guess < 0.5
        t1 = least + (most - least) * tl.where(early, before, before * 0.5)
        t2 = least + (most - least) * tl.where(early, behind, before)
        t3 = least + (most - least) * tl.where(early, behind * 0.5 + 0.5, behind)
        t3 = tl.where(t3 > least, t3, most)  # the next number after ``least``
        if not COUNT:
            t1 = tl.where(total > 0, t1, floor)  # first find the total weight
        sum1 = tl.zeros((_G,), tl.float32)
        sum2, sum3, lowest, highest = sum1, sum1, sum1 + _INF, sum1 - _INF
        groups = _count_kernel(best, floor, GROUPS)
        for first in range(0, groups, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                sum1, sum2, sum3, lowest, highest = _add_group_kernel(
                    logits, order, first + i, groups, t1, t2, t3, low, high, above, scale,
                    sum1, sum2, sum3, lowest, highest, COUNT, VOCAB, APPROX
                )  # fmt: skip
        at1, at2, at3 = tl.sum(sum1, 0), tl.sum(sum2, 0), tl.sum(sum3, 0)
        enough1 = at1 >= goal
        if not COUNT:
            known = total > 0
            total = tl.where(known, total, at1)
            wanted = goal * total
            enough1 = known & (at1 >= wanted)
            at_low = tl.where(known, at_low, total)
        enough2, enough3 = at2 >= wanted, at3 >= wanted
        second = enough1 | (t1 <= low)  # whether the first is not above ``low``
        above = tl.where(enough3, above, tl.where(enough2, t3, tl.where(second, t2, t1)))
        at_above = tl.where(enough3, at_above, tl.where(enough2, at3, tl.where(second, at2, at1)))
        low = tl.where(enough3, t3, tl.where(enough2, t2, tl.where(enough1, t1, low)))
        at_low = tl.where(enough3, at3, tl.where(enough2, at2, tl.where(enough1, at1, at_low)))
        least, most = tl.maximum(low, tl.min(lowest, 0)), tl.minimum(above, tl.max(highest, 0))
        floor = low
    return most


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _filter_kernel(
    logits, temperature, seeds, slots, positions, top_k, top_p, min_p, maxima, order, bounds, out, stride,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr, RANKED: tl.constexpr, AT_ONCE: tl.constexpr,
    APPROX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    heat, k = tl.load(temperature + slot), tl.load(top_k + slot)
    p, part = tl.load(top_p + slot), tl.load(min_p + slot)
    drawn = tl.full((), -1, tl.int32)
    bound = tl.full((), -_INF, tl.float32)
    if (heat > 0) & (((k > 0) & (k < VOCAB)) | (p < 1) | (part > 0)):
        logits += row * stride
        maxima += row * GROUPS
        order += row * GROUPS
        group = tl.arange(0, PADDED)
        best = tl.load(maxima + group, mask=group < GROUPS, other=-_INF)
        high = tl.max(best, 0)
        if tl.abs(high) < _INF:
            rank = tl.zeros((PADDED,), tl.int32)
            for first in range(0, PADDED, RANKED):
                other = first + tl.arange(0, RANKED)
                than = tl.load(maxima + other, mask=other < GROUPS, other=-_INF)
                ties = (than[None, :] == best[:, None]) & (other[None, :] < group[:, None])
                rank += tl.sum(((than[None, :] > best[:, None]) | ties).to(tl.int32), 1)
            tl.store(order + rank, group, mask=group < GROUPS)
            tl.debug_barrier()  # all threads see the order
            scale = _L1 / heat
            bound = tl.where(part > 0, high + heat * tl.log(tl.maximum(part, 1e-37)), -_INF)
            if (k > 0) & (k < VOCAB):
                low = tl.max(tl.where(rank == k - 1, best, -_INF), 0)  # k groups have a logit at least this large
                if low == -_INF:
                    low = _least_kernel(logits, order, best, VOCAB, GROUPS)
                goal = k.to(tl.float32)
                kth = _search_kernel(
                    logits, order, best, low, low, high, goal, scale, True, VOCAB, GROUPS, AT_ONCE, APPROX
                )  # fmt: skip
                bound = tl.maximum(bound, kth)
            if p < 1:
                # Everything less probable than this weighs less in total than the largest one's 1 - p.
                low = tl.maximum(bound, high - heat * (tl.log(VOCAB / (1 - p)) + 0.1))
                bound = _search_kernel(
                    logits, order, best, bound, low, high, p, scale, False, VOCAB, GROUPS, AT_ONCE, APPROX
                )  # fmt: skip
            key, key2 = keys_kernel(tl.load(seeds + slot), tl.load(positions + row))
            top, at = tl.full((_G,), -_INF, tl.float32), tl.full((_G,), VOCAB, tl.int32)
            groups = _count_kernel(best, bound, GROUPS)
            for first in range(0, groups, AT_ONCE):
                for i in tl.static_range(AT_ONCE):
                    top, at = _draw_group_kernel(
                        logits, order, first + i, groups, bound, scale, key, key2, top, at, VOCAB, APPROX
                    )
            drawn = tl.min(tl.where(top == tl.max(top, 0), at, VOCAB - 1), 0)
    tl.store(bounds + row, bound)
    tl.store(out + row, drawn.to(tl.int64))


def draw_filtered(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, slots: torch.Tensor,
    positions: torch.Tensor, filters: Filters, maxima: torch.Tensor, out: torch.Tensor, approx: bool, pdl: bool,
) -> torch.Tensor:  # fmt: skip
    """Write to ``out`` (n,) int64 the tokens of rows with filters; -1 for others, for greedy rows, and for rows whose
    largest logit is infinite. Returns (n,) float32: the smallest logit that each row may draw.

    ``maxima`` (n, groups) float32: the largest logit of each group; the others as in ``sample_tokens``.
    """
    (n, vocab), groups = logits.shape, maxima.shape[1]
    order = torch.empty((n, groups), dtype=torch.int32, device=logits.device)
    bounds = torch.empty(n, dtype=torch.float32, device=logits.device)
    _filter_kernel[(n,)](
        logits, temperature, seeds, slots, positions, *filters, maxima, order, bounds, out, logits.stride(0),
        VOCAB=vocab, GROUPS=groups, PADDED=max(next_power_of_2(groups), _RANKED), RANKED=_RANKED, AT_ONCE=_AT_ONCE,
        APPROX=approx, PDL=pdl, num_warps=_WARPS, launch_pdl=pdl,
    )  # fmt: skip
    return bounds


def filter_bounds_reference(
    logits: torch.Tensor, temperature: torch.Tensor, filters: Filters, slots: torch.Tensor
) -> torch.Tensor:
    """Only the bounds, by sorting."""
    vocab, heat = logits.shape[1], temperature[slots][:, None]
    k, top_p, min_p = (of_slot[slots][:, None] for of_slot in filters)
    filtered = (heat > 0) & ((k > 0) | (top_p < 1) | (min_p > 0))
    nothing = torch.full((len(logits), 1), float("-inf"), device=logits.device)
    if not bool(filtered.any()):
        return nothing[:, 0]
    ranked = torch.sort(logits.float(), dim=-1, descending=True).values
    best = ranked[:, :1]
    kth = ranked.gather(1, k.long().clamp(1, vocab) - 1)
    least = torch.where(ranked > nothing, ranked, float("inf")).amin(dim=-1, keepdim=True)
    kth = torch.where(kth > nothing, kth, least)  # fewer than k tokens are finite
    bound = torch.maximum(best + heat * min_p.log(), torch.where((k > 0) & (k < vocab), kth, nothing))
    probs = torch.softmax(torch.where(ranked >= bound, ranked / heat, nothing), dim=-1, dtype=torch.float64)
    before = probs.cumsum(dim=-1) - probs  # of more probable ones; the token that crosses the threshold stays
    last = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    bound = torch.where(top_p < 1, torch.maximum(bound, ranked.gather(1, last)), bound)
    return torch.where(filtered & best.isfinite(), bound, nothing)[:, 0]
