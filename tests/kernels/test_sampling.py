"""Sampling: the launcher draws what the reference draws, for any shape, seed and company."""

import pytest
import torch

from minivllm.kernels.sampling import gumbel_noise, sample_tokens_reference, sample_tokens_triton


def world(device, dtype, rows, vocab, slots=None):
    """Logits and slot arrays: every third row is greedy, seeds of every size and sign."""
    slots = slots or rows
    generator = torch.Generator().manual_seed(rows * 100_003 + vocab)
    logits = torch.randn(rows, vocab, generator=generator).to(device, dtype)
    temperature = torch.rand(slots, generator=generator) * 2 + 0.1
    temperature[::3] = 0
    seeds = torch.randint(-(2**63), 2**63 - 1, (slots,), generator=generator)
    if slots > 3:
        seeds[:4] = torch.tensor([0, -1, 1 << 32, 2**63 - 1])
    order = torch.randperm(slots, generator=generator)[:rows]
    positions = torch.randint(0, 1 << 20, (rows,), generator=generator)
    return logits, temperature.to(device), seeds.to(device), order.to(device), positions.to(device)


def agree(tokens, logits, temperature, seeds, slots, positions):
    """The same tokens, but for ties that the last bit of a logarithm breaks."""
    expected = sample_tokens_reference(logits, temperature, seeds, slots, positions)
    heat = temperature[slots][:, None]
    noise = gumbel_noise(seeds[slots], positions, logits.shape[1])
    scores = torch.where(heat > 0, logits.float() / heat.clamp_min(1e-9) + noise, logits.float())
    assert tokens.dtype == torch.int64 and tokens.shape == expected.shape
    greedy = temperature[slots] == 0
    assert torch.equal(tokens[greedy], expected[greedy])
    behind = scores.gather(1, expected[:, None]) - scores.gather(1, tokens[:, None])
    assert (behind.abs() < 1e-4).all(), "another token than the best was drawn"
    assert (tokens != expected).float().mean() <= 0.01


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (5, 7), (3, 4096), (4, 4097), (9, 10_000), (33, 100)])
def test_sampling_equals_its_reference(where, rows, vocab):
    device, dtype = where
    args = world(device, dtype, rows, vocab, slots=rows + 5)
    agree(sample_tokens_triton(*args), *args)


def test_sampling_takes_rows_with_a_stride(where):
    device, dtype = where
    logits, *rest = world(device, dtype, 6, 300)
    wide = torch.full((6, 1000), 99.0, device=device, dtype=dtype)
    wide[:, :300] = logits
    assert torch.equal(sample_tokens_triton(wide[:, :300], *rest), sample_tokens_triton(logits, *rest))


def test_no_rows_are_no_tokens(where):
    device, dtype = where
    args = world(device, dtype, 1, 10)
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert sample_tokens_triton(args[0][:0], args[1], args[2], none, none).shape == (0,)


def test_ties_go_to_the_lowest_token_also_between_blocks(where):
    device, dtype = where
    logits = torch.zeros(3, 9000, device=device, dtype=dtype)
    logits[0, [50, 4096, 8999]] = 2
    logits[1, [4095, 4096]] = 2
    zero = torch.zeros(3, device=device)
    index = torch.arange(3, device=device)
    tokens = sample_tokens_triton(logits, zero, index, index, index)
    assert tokens.tolist() == [50, 4095, 0]
    assert torch.equal(tokens, sample_tokens_reference(logits, zero, index, index, index))


def test_tokens_that_are_ruled_out_are_never_drawn(where):
    device, dtype = where
    logits, temperature, seeds, slots, _ = world(device, dtype, 8, 5000)
    logits[:, :4998] = float("-inf")
    for position in range(20):
        tokens = sample_tokens_triton(logits, temperature, seeds, slots, torch.full_like(slots, position))
        assert (tokens >= 4998).all()


def test_a_row_draws_the_same_in_any_company(where):
    device, dtype = where
    logits, temperature, seeds, slots, positions = world(device, dtype, 12, 4500)
    together = sample_tokens_triton(logits, temperature, seeds, slots, positions)
    for some in ([3], [11, 0], [5, 1, 7, 2]):
        tokens = sample_tokens_triton(logits[some], temperature, seeds, slots[some], positions[some])
        assert torch.equal(tokens, together[some])


def test_noise_is_gumbel():
    noise = gumbel_noise(torch.arange(200), torch.full((200,), 9), 500).double().flatten()
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.5772) < 0.02
    assert abs(noise.var().item() - torch.pi**2 / 6) < 0.05


@pytest.mark.parametrize("change", ["seed_low", "seed_high", "position", "token"])
def test_noise_depends_on_every_bit_of_what_it_is_hashed_from(change):
    for bit in range(20 if change in ("position", "token") else 31):
        seeds, positions = torch.tensor([5, 5]), torch.tensor([3, 3])
        if change == "seed_low":
            seeds[1] ^= 1 << bit
        elif change == "seed_high":
            seeds[1] ^= 1 << (bit + 32)
        elif change == "position":
            positions[1] ^= 1 << bit
        noise = gumbel_noise(seeds, positions, 64 if change != "token" else 1 << (bit + 1))
        if change == "token":
            assert noise[0, 0] != noise[0, 1 << bit]
        else:
            assert (noise[0] == noise[1]).sum() < 3
            assert abs(torch.corrcoef(noise)[0, 1]) < 0.5
