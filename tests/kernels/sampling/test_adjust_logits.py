"""Penalties and min_tokens: kernels and references agree, and both with a loop over a row's tokens."""

import pytest
import torch

from minivllm.kernels.sampling.adjust_logits import (
    Adjustments,
    adjust_logits_reference,
    adjust_logits_triton,
    count_known,
    count_reference,
    count_triton,
)

KINDS = [(0.0, 0.0, 1.0), (0.7, 0.0, 1.0), (0.0, -0.4, 1.0), (0.0, 0.0, 1.3), (1.5, 0.3, 0.8), (0.0, 0.0, 1.0)]


def adjustments_of(kinds, device):
    """Slot 3 holds back tokens 0, 5 and 6 before position 9."""
    min_position = torch.zeros(len(kinds), dtype=torch.int64, device=device)
    suppress = torch.full((len(kinds), 4), -1, device=device)
    if len(kinds) > 3:
        min_position[3], suppress[3, :3] = 9, torch.tensor([0, 5, 6], device=device)
    return Adjustments(*torch.tensor(kinds, device=device).T.contiguous(), min_position, suppress)


def world(device, dtype, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(4, vocab, generator=generator) * 3).to(device, dtype)
    adjustments = adjustments_of(KINDS, device)
    counts = torch.zeros(len(KINDS), vocab, dtype=torch.int16, device=device)
    slots = torch.tensor([4, 0, 3, 2], device=device)
    ids = torch.randint(0, vocab, (len(KINDS), 40), generator=generator)
    return logits, adjustments, counts, slots, ids


@pytest.mark.parametrize("vocab", [7, 4096, 5003])
@pytest.mark.parametrize("position", [8, 9])
@pytest.mark.parametrize("adjust", [adjust_logits_triton, adjust_logits_reference])
def test_adjusted_logits_equal_a_plain_loop(where, vocab, adjust, position):
    device, dtype = where
    logits, adjustments, counts, slots, ids = world(device, dtype, vocab)
    prompts, said = ids[:, :25], [ids[slot, 25:].tolist() for slot in range(len(KINDS))]
    for slot in slots.tolist():
        known = ids[slot].to(device, torch.int32)
        count_known(counts, slot, known[:25], known[25:])
    count = count_triton if adjust is adjust_logits_triton else count_reference
    for step in range(3):
        tokens = torch.tensor([(7 * step + slot) % vocab for slot in slots.tolist()], device=device)
        count(counts, adjustments, slots, tokens)
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            said[slot].append(token)
    out = adjust(logits, counts, adjustments, slots, torch.full_like(slots, position))
    assert out.dtype == torch.float32
    for row, slot in enumerate(slots.tolist()):
        expected, (once, each, factor) = logits[row].double().tolist(), KINDS[slot]
        for token in (0, 5, 6) if slot == 3 and position < 9 else ():
            expected[token] = float("-inf")
        for token in {*prompts[slot].tolist(), *said[slot]}:
            expected[token] = expected[token] / factor if expected[token] > 0 else expected[token] * factor
            times = said[slot].count(token)
            expected[token] -= each * times + once * (times > 0)
        assert torch.allclose(out[row].double().cpu(), torch.tensor(expected, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize("count", [count_triton, count_reference])
def test_a_count_stays_at_the_most_that_it_can_be(where, count):
    device, _ = where
    adjustments = adjustments_of([(0.0, 0.1, 1.0)] * 2, device)
    counts = torch.zeros(2, 3, dtype=torch.int16, device=device)
    counts[0, 1], counts[0, 2] = 32766, 32765
    slot, prompt = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([1], device=device)
    for token in (1, 2, 2):
        count(counts, adjustments, slot, torch.tensor([token], device=device))
    assert counts.tolist() == [[0, 32766, 32767], [0, 0, 0]]
    count_known(counts, 1, prompt, torch.full((20_000,), 2, device=device))
    assert counts[1].tolist() == [0, 1, 32766]


def test_slots_without_penalties_count_nothing(where):
    device, dtype = where
    logits, adjustments, counts, slots, _ = world(device, dtype, 50)
    count_triton(counts, adjustments, slots[1:2], torch.tensor([3], device=device))
    assert not counts.any()
    assert torch.equal(adjust_logits_triton(logits[:1], counts, adjustments, slots[1:2], slots[:1]), logits[:1].float())


def test_no_rows(where):
    device, dtype = where
    logits, adjustments, counts, slots, _ = world(device, dtype, 50)
    assert adjust_logits_triton(logits[:0], counts, adjustments, slots[:0], slots[:0]).shape == (0, 50)
    count_triton(counts, adjustments, slots[:0], slots[:0])
