"""Adjusts logits before a draw: penalties from counts of each slot's tokens, and min_tokens, as in vLLM.

counts (slots, vocab) int16: 2 for each occurrence in the answer, up to 32,766, plus 1 if the token is in the prompt.

Bytes moved: 8 per token for rows with penalties (logits, counts, float32 scores), 6 for others.
"""

from typing import NamedTuple

import torch

from minivllm.kernels._triton import tl, triton
from minivllm.rounding import cdiv

_BLOCK = 4096
_MOST = 32766
_M = tl.constexpr(_MOST)


class Adjustments(NamedTuple):
    """Per slot, on the device: (slots,) float32, 0, 0 and 1 mean none; (slots,) int64; (slots, held) int64: tokens (or
    -1) that may not be drawn before that position."""

    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    min_position: torch.Tensor
    suppress: torch.Tensor


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _adjust_kernel(
    logits, counts, presence, frequency, repetition, min_position, suppress, slots, positions, out, stride,
    VOCAB: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    once, each, factor = tl.load(presence + slot), tl.load(frequency + slot), tl.load(repetition + slot)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * stride + token, mask=token < VOCAB, other=0.0).to(tl.float32)
    if tl.load(positions + row) < tl.load(min_position + slot):
        for i in tl.static_range(HELD):
            score = tl.where(token == tl.load(suppress + slot * HELD + i), float("-inf"), score)
    if (once != 0) | (each != 0) | (factor != 1):
        count = tl.load(counts + slot * VOCAB + token, mask=token < VOCAB, other=0).to(tl.int32)
        generated = count >> 1
        score = tl.where(count != 0, tl.where(score > 0, score / factor, score * factor), score)
        score = score - each * generated.to(tl.float32) - tl.where(generated > 0, once, 0.0)
    tl.store(out + row * VOCAB + token, score, mask=token < VOCAB)


@triton.jit(do_not_specialize_on_alignment=["slots", "tokens"])
def _count_kernel(counts, presence, frequency, repetition, slots, tokens, VOCAB: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (tl.load(presence + slot) != 0) | (tl.load(frequency + slot) != 0) | (tl.load(repetition + slot) != 1):
        at = counts + slot * VOCAB + tl.load(tokens + row)
        count = tl.load(at).to(tl.int32)
        tl.store(at, tl.where(count < _M, count + 2, count).to(tl.int16))


def adjust_logits_triton(
    logits: torch.Tensor, counts: torch.Tensor, adjustments: Adjustments, slots: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    n, vocab = logits.shape
    out = torch.empty((n, vocab), dtype=torch.float32, device=logits.device)
    if n:
        _adjust_kernel[(n, cdiv(vocab, _BLOCK))](
            logits, counts, *adjustments, slots, positions, out, logits.stride(0), VOCAB=vocab,
            HELD=adjustments.suppress.shape[1], BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def adjust_logits_reference(
    logits: torch.Tensor, counts: torch.Tensor, adjustments: Adjustments, slots: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    once, each, factor = (of_slot[slots][:, None] for of_slot in adjustments[:3])
    ids, count = adjustments.suppress[slots], counts[slots].int()
    early = (positions < adjustments.min_position[slots])[:, None] & (ids >= 0)
    scores = logits.to(torch.float32, copy=True)
    held = torch.where(early, float("-inf"), float("inf"))
    scores.scatter_reduce_(1, ids.clamp(min=0), held, "amin")
    scores = torch.where(count != 0, torch.where(scores > 0, scores / factor, scores * factor), scores)
    generated = count >> 1
    return scores - each * generated - once * (generated > 0)


def adjust_logits(
    logits: torch.Tensor, counts: torch.Tensor, adjustments: Adjustments, slots: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """logits (n, vocab) any float; slots (n,) int64: each row's in ``counts`` and ``adjustments``; positions (n,)
    int64: the new token's. Returns (n, vocab) float32."""
    run = adjust_logits_triton if logits.is_cuda else adjust_logits_reference
    return run(logits, counts, adjustments, slots, positions)


def count_triton(counts: torch.Tensor, adjustments: Adjustments, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    if len(slots):
        _count_kernel[(len(slots),)](counts, *adjustments[:3], slots, tokens, VOCAB=counts.shape[1], num_warps=1)


def count_reference(counts: torch.Tensor, adjustments: Adjustments, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    once, each, factor = (of_slot[slots] for of_slot in adjustments[:3])
    more = ((once != 0) | (each != 0) | (factor != 1)) & (counts[slots, tokens] < _MOST)
    counts[slots, tokens] += 2 * more.short()


def count(counts: torch.Tensor, adjustments: Adjustments, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Count a token (n,) int64 for each slot that has penalties; of these none may occur twice."""
    run = count_triton if counts.is_cuda else count_reference
    run(counts, adjustments, slots, tokens)


def count_known(counts: torch.Tensor, slot: int, prompt: torch.Tensor, generated: torch.Tensor) -> None:
    """Set a slot's counts from its prompt's tokens and those of its answer so far, both integers."""
    row = counts[slot]
    times = torch.zeros(row.shape, dtype=torch.int32, device=row.device)
    times.scatter_add_(0, generated.long(), torch.full_like(generated, 2, dtype=torch.int32))
    row.copy_(times.clamp(max=_MOST))
    row[prompt.long()] |= 1
