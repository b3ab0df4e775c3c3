"""Sets logits of tokens that are not allowed to minus infinity, by one bit per token in each row's slot.

Bytes moved per row: 8 per token for scores in and out, and an eighth for bits.
"""

import torch

from minivllm.kernels._triton import tl, triton
from minivllm.rounding import cdiv

_BLOCK = 4096


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _mask_kernel(scores, bits, slots, WORDS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + slot * WORDS + token // 32, mask=token < VOCAB, other=-1)
    score = tl.load(scores + row * VOCAB + token, mask=token < VOCAB, other=0.0)
    may = (word >> (token % 32)) & 1
    tl.store(scores + row * VOCAB + token, tl.where(may != 0, score, float("-inf")), mask=token < VOCAB)


def mask_tokens_triton(scores: torch.Tensor, bits: torch.Tensor, slots: torch.Tensor) -> None:
    n, vocab = scores.shape
    if n:
        _mask_kernel[(n, cdiv(vocab, _BLOCK))](scores, bits, slots, WORDS=bits.shape[1], VOCAB=vocab, BLOCK=_BLOCK)


def mask_tokens_reference(scores: torch.Tensor, bits: torch.Tensor, slots: torch.Tensor) -> None:
    each = bits[slots][:, :, None] >> torch.arange(32, dtype=torch.int32, device=bits.device)
    may = (each & 1).flatten(1)[:, : scores.shape[1]]
    scores.masked_fill_(may == 0, -torch.inf)


def mask_tokens(scores: torch.Tensor, bits: torch.Tensor, slots: torch.Tensor) -> None:
    """scores (n, vocab) float32, contiguous, changed in place; bits (slots, words) int32: bit t % 32 of word t // 32 is
    1 if token t is allowed; slots (n,) int64: each row's index into ``bits``."""
    run = mask_tokens_triton if scores.is_cuda else mask_tokens_reference
    run(scores, bits, slots)
