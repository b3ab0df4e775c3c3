"""Log-probabilities of sampled tokens and of the best ones, from one pass over the logits.

Each program handles a part of a row: its maximum, sum of exponentials, number of tokens above the sampled one, and best
tokens. A second kernel combines a row's parts. Rows whose slot asks for nothing are skipped.

Bytes moved: the logits once, 2 per token; besides some 300 per row and part.
"""

import torch

from minivllm.kernels._triton import next_power_of_2, tl, triton
from minivllm.rounding import cdiv

MOST = 32  # the most best tokens that the kernels support
_BLOCK = 4096


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["tokens", "slots"])
def _parts_kernel(
    logits, tokens, slots, asked, maxima, sums, aboves, best, best_ids, stride, k,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(asked + tl.load(slots + row)) < 0:
        return
    lane = tl.arange(0, BLOCK)
    token = part * BLOCK + lane
    x = tl.load(logits + row * stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    own = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
    largest = tl.max(x, 0)
    at = row * PARTS + part
    tl.store(maxima + at, largest)
    tl.store(sums + at, tl.sum(tl.exp(x - tl.where(largest == float("-inf"), 0.0, largest)), 0))
    tl.store(aboves + at, tl.sum((x > own).to(tl.int32), 0))
    for i in range(k):
        value, index = tl.max(x, 0, return_indices=True)  # among equals the first
        tl.store(best + at * HELD + i, value)
        tl.store(best_ids + at * HELD + i, part * BLOCK + index)
        x = tl.where(lane == index, float("-inf"), x)


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["tokens", "slots"])
def _whole_kernel(
    logits, tokens, slots, asked, maxima, sums, aboves, best, best_ids, sampled, rank, top, top_ids, stride, k,
    PARTS: tl.constexpr, PADDED: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(asked + tl.load(slots + row)) < 0:
        tl.store(rank + row, 0)
        return
    part = tl.arange(0, PADDED)
    at, there = row * PARTS + part, part < PARTS
    largest = tl.load(maxima + at, mask=there, other=float("-inf"))
    all_largest = tl.max(largest, 0)
    total = tl.sum(tl.load(sums + at, mask=there, other=0.0) * tl.exp(largest - all_largest), 0)
    log_total = all_largest + tl.log(total)
    own = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(sampled + row, own - log_total)
    tl.store(rank + row, 1 + tl.sum(tl.load(aboves + at, mask=there, other=0), 0))
    place = tl.arange(0, PADDED * HELD)
    held = row * PARTS * HELD + place
    value = tl.load(best + held, mask=(place < PARTS * HELD) & (place % HELD < k), other=float("-inf"))
    for i in range(k):
        found, index = tl.max(value, 0, return_indices=True)
        tl.store(top + row * k + i, found - log_total)
        tl.store(top_ids + row * k + i, tl.load(best_ids + row * PARTS * HELD + index))
        value = tl.where(place == index, float("-inf"), value)


Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def logprobs_triton(
    logits: torch.Tensor, tokens: torch.Tensor, k: int, slots: torch.Tensor, asked: torch.Tensor
) -> Found:
    n, vocab = logits.shape
    parts = cdiv(vocab, _BLOCK)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    found = empty(n), empty(n, dtype=torch.int32), empty(n, k), empty(n, k, dtype=torch.int32)
    maxima, sums, aboves = empty(n, parts), empty(n, parts), empty(n, parts, dtype=torch.int32)
    best, best_ids = empty(n, parts, MOST), empty(n, parts, MOST, dtype=torch.int32)
    if n:
        of_parts = (maxima, sums, aboves, best, best_ids)
        _parts_kernel[(n, parts)](
            logits, tokens, slots, asked, *of_parts, logits.stride(0), k, VOCAB=vocab, PARTS=parts, HELD=MOST,
            BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        _whole_kernel[(n,)](
            logits, tokens, slots, asked, *of_parts, *found, logits.stride(0), k, PARTS=parts,
            PADDED=next_power_of_2(parts), HELD=MOST,
        )  # fmt: skip
    return found


def logprobs_reference(
    logits: torch.Tensor, tokens: torch.Tensor, k: int, slots: torch.Tensor, asked: torch.Tensor
) -> Found:
    values = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    sampled = values.gather(1, tokens[:, None])
    rank = (values > sampled).sum(dim=-1, dtype=torch.int32) + 1
    top_ids = _best(values, k)
    return sampled[:, 0], rank * (asked[slots] >= 0), values.gather(1, top_ids), top_ids.int()


def _best(values: torch.Tensor, k: int) -> torch.Tensor:
    """The indices of each row's ``k`` largest values, in descending order, among equals the first: ``topk`` may return
    any of these, and different ones for another ``k``. values (n, m) float32; returns (n, k) int64."""
    top, ids = values.topk(k, dim=-1)
    ids = ids.sort(dim=-1).values
    ids = ids.gather(1, values.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices)
    unsure = (values >= top[:, -1:]).sum(dim=-1) != k  # more values equal the last
    if unsure.any():
        ids[unsure] = _best_by_keys(values[unsure], k)
    return ids


def _best_by_keys(values: torch.Tensor, k: int) -> torch.Tensor:
    """The same, by distinct integer keys; takes five times as long."""
    bits = values.view(torch.int32).long()
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
    last = values.shape[1] - 1
    keys = (rising << 32) + (last - torch.arange(last + 1, device=values.device))
    return last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int, slots: torch.Tensor, asked: torch.Tensor) -> Found:
    """logits (n, vocab) any float; tokens (n,) int64; k: 1 to ``vocab``; slots (n,) int64; asked (s,) int32 per slot,
    negative if nothing is asked for. Returns the tokens' log-probabilities (n,) float32 and ranks (n,) int32, 1 for the
    best; and the k best tokens' log-probabilities (n, k) float32 and ids (n, k) int32, best first. A row that did not
    ask has rank 0 and undefined values elsewhere."""
    run = logprobs_triton if logits.is_cuda and k <= MOST else logprobs_reference
    return run(logits, tokens, k, slots, asked)
