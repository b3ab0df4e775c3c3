"""Top-k, top-p and min-p: the bounds that are searched for are those that sorting finds, and draws keep to them."""

import pytest
import torch

from minivllm.kernels.sampling.draws import GROUP
from minivllm.kernels.sampling.filters import Filters, draw_filtered, filter_bounds_reference
from minivllm.kernels.sampling.sampling import sample_tokens, sample_tokens_reference, sample_tokens_triton

INF = float("inf")

# top_k, top_p, min_p
CASES = [
    (1, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.5, 0.0), (-1, 0.9, 0.0), (0, 1.0, 0.1), (0, 1.0, 1.0), (0, 1e-6, 0.0),
    (20, 0.8, 0.02), (3, 0.99, 0.3), (2000, 0.95, 0.0), (10, 0.3, 0.0), (0, 0.999, 0.001), (2**31 - 1, 0.7, 0.0),
    (0, 1.0, 0.0), (700, 1.0, 0.0), (20, 0.95, 0.0),
]  # fmt: skip


def filters_of(cases, device):
    k, p, m = zip(*cases, strict=True)
    top_k = torch.tensor(k, dtype=torch.int32, device=device)
    return Filters(top_k, torch.tensor(p, device=device), torch.tensor(m, device=device))


def bounds_of(logits, temperature, filters, slots):
    n, vocab = logits.shape
    padded = torch.nn.functional.pad(logits.float(), (0, -vocab % GROUP), value=-INF)
    maxima, out = padded.view(n, -1, GROUP).amax(dim=2), torch.empty(n, dtype=torch.int64, device=logits.device)
    rows, approx = torch.arange(n, device=logits.device), logits.is_cuda
    bounds = draw_filtered(logits, temperature, rows, slots, rows, filters, maxima, out, approx, False)
    assert torch.equal(out >= 0, bounds.isfinite())
    return bounds


def kept(logits, bounds):
    return logits.float() >= bounds[:, None]


@pytest.mark.parametrize(
    ("vocab", "spread"),
    [(1, 3.0), (7, 0.3), (1024, 3.0), (1500, 0.0), (1500, 0.3), (1500, 3.0), (1500, 30.0), (9000, 0.3), (9000, 30.0)],
)
def test_the_bound_is_the_one_that_sorting_finds(where, vocab, spread):
    device, dtype = where
    generator, n = torch.Generator().manual_seed(vocab), len(CASES)
    logits = (torch.randn(n, vocab, generator=generator) * spread).to(device, dtype)
    logits[:, ::5] = logits[:, :1].clone()  # ties, also between groups
    temperature = (torch.rand(n, generator=generator) * 2 + 0.2).to(device)
    slots = torch.randperm(n, generator=generator).to(device)
    filters = filters_of(CASES, device)
    found = kept(logits, bounds_of(logits, temperature, filters, slots))
    expected = kept(logits, filter_bounds_reference(logits, temperature, filters, slots))
    everything = Filters(filters.top_k, torch.ones_like(filters.top_p), filters.min_p)
    without_p = kept(logits, filter_bounds_reference(logits, temperature, everything, slots))
    for row in (found != expected).any(dim=1).nonzero()[:, 0].tolist():
        # Only where the part that the more likely ones have is top_p, to the last bits of float32: one logit's tokens.
        assert logits[row][found[row] != expected[row]].unique().numel() == 1
        weights = torch.softmax(logits[row].double() / temperature[slots[row]], 0)
        part = weights[found[row] & expected[row]].sum() / weights[without_p[row]].sum()
        assert abs(float(part) - float(filters.top_p[slots[row]])) < 1e-5


def test_rows_without_filters_have_no_bound(where):
    device, dtype = where
    logits = torch.randn(3, 3000).to(device, dtype)
    filters = filters_of([(0, 1.0, 0.0), (5, 0.5, 0.5), (-1, 1.0, 0.0)], device)
    temperature, slots = torch.tensor([1.0, 0.0, 0.5], device=device), torch.arange(3, device=device)
    bounds = bounds_of(logits, temperature, filters, slots)
    assert (bounds == -INF).all(), "a greedy row has no filters either"


def test_infinite_logits(where):
    device, dtype = where
    logits = torch.randn(4, 2500).to(device, dtype)
    logits[0] = -INF
    logits[1, [5, 2100]] = INF
    logits[2, 3:] = -INF  # fewer than k
    logits[3, 1000:2100] = -INF
    filters = filters_of([(2, 0.9, 0.1), (2, 0.9, 0.1), (8, 1.0, 0.0), (2000, 0.9999, 0.0)], device)
    rows = torch.arange(4, device=device)
    for position in range(3):
        args = (logits, torch.ones(4, device=device), rows, rows, rows + position)
        tokens = sample_tokens_triton(*args, filters=filters)
        assert torch.equal(tokens, sample_tokens_reference(*args, filters=filters))
        assert tokens[0] == 0 and tokens[1] in (5, 2100) and tokens[2] < 3
        assert logits[3, tokens[3]] > -INF


@pytest.mark.parametrize("rows", [5, 9])
def test_filtered_draws_are_the_references(where, rows):
    device, dtype = where
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, 3000, generator=generator) * 2).to(device, dtype)
    filters = filters_of([CASES[i % len(CASES)] for i in range(rows)], device)
    slots = torch.arange(rows, device=device)
    temperature = (torch.rand(rows, generator=generator) + 0.3).to(device)
    temperature[::4] = 0
    allowed, same = kept(logits, filter_bounds_reference(logits, temperature, filters, slots)), 0
    for position in range(3):
        at = torch.full_like(slots, position)
        args = (logits, temperature, slots * 77, slots, at)
        tokens = sample_tokens_triton(*args, filters=filters)
        assert allowed[slots, tokens].all()
        same += int((tokens == sample_tokens_reference(*args, filters=filters)).sum())
    assert same >= rows * 3 * 0.98  # but for ties that the last bit of a logarithm breaks
    for i in range(rows):
        alone = (logits[i : i + 1], *args[1:3], slots[i : i + 1], at[:1])
        assert sample_tokens_triton(*alone, filters=filters) == tokens[i], "a draw depends on the row's company"


def test_filtered_draws_follow_the_softmax_of_what_is_kept(where):
    device, dtype = where
    rows, vocab = 3000, 1100
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(4)).to(device, dtype)
    filters = filters_of([(40, 0.8, 0.0)], device)
    heat, seed = torch.tensor([0.7], device=device), torch.tensor([5], device=device)
    zero, positions = torch.zeros(rows, dtype=torch.int64, device=device), torch.arange(rows, device=device)
    keep = kept(logits[None], filter_bounds_reference(logits[None], heat, filters, zero[:1]))[0]
    tokens = sample_tokens(logits.expand(rows, vocab), heat, seed, zero, positions, filters=filters)
    expected = torch.softmax(torch.where(keep, logits.double() / 0.7, -INF), 0).cpu() * rows
    drawn, keep = torch.bincount(tokens.cpu(), minlength=vocab).double(), keep.cpu()
    assert drawn[~keep].sum() == 0 and 5 < int(keep.sum()) <= 40
    chi_square, freedom = ((drawn - expected) ** 2 / expected)[keep].sum(), int(keep.sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
