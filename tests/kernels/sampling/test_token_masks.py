"""Tokens that may not come: kernel and reference agree with a plain loop, and write nothing else."""

import numpy as np
import pytest
import torch

from minivllm.kernels.sampling.token_masks import mask_tokens_reference, mask_tokens_triton


@pytest.mark.parametrize("vocab", [7, 32, 4096, 5003])
@pytest.mark.parametrize("mask", [mask_tokens_triton, mask_tokens_reference])
def test_what_may_not_come_is_minus_infinity(where, vocab, mask):
    device, _ = where
    rng = np.random.default_rng(vocab)
    words = -(-vocab // 32)
    bits = torch.from_numpy(rng.integers(-(2**31), 2**31, (5, words)).astype(np.int32))
    bits[2], bits[4] = -1, 0
    scores = torch.randn(4, vocab).to(device)
    slots, before = torch.tensor([3, 2, 4, 0], device=device), scores.tolist()
    mask(scores, bits.to(device), slots)
    for row, slot in enumerate(slots.tolist()):
        may = [(int(bits[slot, token // 32]) >> (token % 32)) & 1 for token in range(vocab)]
        expected = [x if m else float("-inf") for x, m in zip(before[row], may, strict=True)]
        assert scores[row].tolist() == expected
    mask(scores[:0], bits.to(device), slots[:0])
