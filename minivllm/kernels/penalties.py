"""Presence, frequency and repetition penalties, as vLLM has them, by counts of each slot's tokens.

counts (slots, vocab) int16: 2 for each time that the answer has the token, to 32,766, and 1 if the prompt has it.

Bytes moved: of a row with penalties 8 a token, logits, counts and float32 scores; 6 of others.
"""

from typing import NamedTuple

import torch

from minivllm.kernels._triton import cdiv, tl, triton

_BLOCK = 4096
_MOST = 32766
_M = tl.constexpr(_MOST)


class Penalties(NamedTuple):
    """Of each slot, on the device: (slots,) float32. 0, 0 and 1: none."""

    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _penalize_kernel(
    logits, counts, presence, frequency, repetition, slots, out, stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    once, each, factor = tl.load(presence + slot), tl.load(frequency + slot), tl.load(repetition + slot)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * stride + token, mask=token < VOCAB, other=0.0).to(tl.float32)
    if (once != 0) | (each != 0) | (factor != 1):
        count = tl.load(counts + slot * VOCAB + token, mask=token < VOCAB, other=0).to(tl.int32)
        said = count >> 1
        score = tl.where(count != 0, tl.where(score > 0, score / factor, score * factor), score)
        score = score - each * said.to(tl.float32) - tl.where(said > 0, once, 0.0)
    tl.store(out + row * VOCAB + token, score, mask=token < VOCAB)


@triton.jit(do_not_specialize_on_alignment=["slots", "tokens"])
def _count_kernel(counts, presence, frequency, repetition, slots, tokens, VOCAB: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (tl.load(presence + slot) != 0) | (tl.load(frequency + slot) != 0) | (tl.load(repetition + slot) != 1):
        at = counts + slot * VOCAB + tl.load(tokens + row)
        count = tl.load(at).to(tl.int32)
        tl.store(at, tl.where(count < _M, count + 2, count).to(tl.int16))


def penalize_triton(
    logits: torch.Tensor, counts: torch.Tensor, penalties: Penalties, slots: torch.Tensor
) -> torch.Tensor:
    n, vocab = logits.shape
    out = torch.empty((n, vocab), dtype=torch.float32, device=logits.device)
    if n:
        _penalize_kernel[(n, cdiv(vocab, _BLOCK))](
            logits, counts, *penalties, slots, out, logits.stride(0), VOCAB=vocab, BLOCK=_BLOCK
        )
    return out


def penalize_reference(
    logits: torch.Tensor, counts: torch.Tensor, penalties: Penalties, slots: torch.Tensor
) -> torch.Tensor:
    once, each, factor = (of_slot[slots][:, None] for of_slot in penalties)
    scores, count = logits.float(), counts[slots].int()
    scores = torch.where(count != 0, torch.where(scores > 0, scores / factor, scores * factor), scores)
    said = count >> 1
    return scores - each * said - once * (said > 0)


def penalize(logits: torch.Tensor, counts: torch.Tensor, penalties: Penalties, slots: torch.Tensor) -> torch.Tensor:
    """logits (n, vocab) any float; slots (n,) int64: each row's in ``counts`` and ``penalties``. Returns (n, vocab)
    float32."""
    run = penalize_triton if logits.is_cuda else penalize_reference
    return run(logits, counts, penalties, slots)


def count_triton(counts: torch.Tensor, penalties: Penalties, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    if len(slots):
        _count_kernel[(len(slots),)](counts, *penalties, slots, tokens, VOCAB=counts.shape[1], num_warps=1)


def count_reference(counts: torch.Tensor, penalties: Penalties, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    once, each, factor = (of_slot[slots] for of_slot in penalties)
    more = ((once != 0) | (each != 0) | (factor != 1)) & (counts[slots, tokens] < _MOST)
    counts[slots, tokens] += 2 * more.short()


def count(counts: torch.Tensor, penalties: Penalties, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Each slot's token (n,) int64 once more, of those that have penalties; no slot comes twice."""
    run = count_triton if counts.is_cuda else count_reference
    run(counts, penalties, slots, tokens)


def count_known(counts: torch.Tensor, slot: int, prompt: torch.Tensor, said: torch.Tensor) -> None:
    """A slot's row, anew: its prompt's tokens, and those of its answer so far, both integers."""
    row = counts[slot]
    times = torch.zeros(row.shape, dtype=torch.int32, device=row.device)
    times.scatter_add_(0, said.long(), torch.full_like(said, 2, dtype=torch.int32))
    row.copy_(times.clamp(max=_MOST))
    row[prompt.long()] |= 1
