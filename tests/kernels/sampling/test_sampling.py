"""Sampling: the launcher draws what the reference draws, for any shape, seed and company."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from minivllm.core.parallel import TensorParallel
from minivllm.kernels.sampling.draws import GROUP, gumbel_noise
from minivllm.kernels.sampling.sampling import (
    Shard,
    _weigh_groups_kernel,
    sample_tokens,
    sample_tokens_reference,
    sample_tokens_triton,
)


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
    """The same tokens, but for ties that the last bit of a logarithm breaks: of groups, or of tokens in their group."""
    expected = sample_tokens_reference(logits, temperature, seeds, slots, positions)
    assert tokens.dtype == torch.int64 and tokens.shape == expected.shape
    greedy = temperature[slots] == 0
    assert torch.equal(tokens[greedy], expected[greedy])
    assert (tokens != expected).float().mean() <= 0.01
    vocab = logits.shape[1]
    for row in range(len(tokens)):
        heat, seed, position = temperature[slots[row]], seeds[slots[row]][None], positions[row][None]
        scores, groups = logits[row].double(), -(-vocab // GROUP)
        noise = torch.zeros(vocab + groups, device=logits.device, dtype=torch.float64)
        if heat > 0:
            scores, noise = scores / heat, gumbel_noise(seed, position, vocab + groups)[0].double()
        best = torch.stack([(g.logsumexp(0) if heat > 0 else g.max()) for g in scores.split(GROUP)]) + noise[vocab:]
        scores = scores + noise[:vocab]
        for token in (int(tokens[row]), int(expected[row])):
            group = token // GROUP
            assert best[group] > best.max() - 1e-4, "a group was drawn that is not the best"
            there = scores[group * GROUP : (group + 1) * GROUP]
            assert scores[token] > there.max() - 1e-4, "another token than the best of its group was drawn"


@dataclass
class Meeting:
    """Where ranks that are threads bring what they have."""

    size: int
    brought: dict = field(default_factory=dict)

    def __post_init__(self):
        self.barrier = threading.Barrier(self.size, timeout=60)

    def all_of(self, rank, x):
        self.brought[rank] = x
        self.barrier.wait()
        found = [self.brought[r] for r in range(self.size)]
        self.barrier.wait()
        return found


@dataclass(frozen=True)
class Thread(TensorParallel):
    meeting: Meeting | None = None

    def all_gather(self, x):
        return torch.cat(self.meeting.all_of(self.rank, x), 1)

    def all_reduce(self, x):
        return sum(self.meeting.all_of(self.rank, x))


@pytest.mark.parametrize(
    ("size", "vocab", "columns"), [(2, 3000, 2048), (3, 5000, 2048), (2, 2048, 1024), (4, 3100, 1024)]
)
def test_ranks_that_hold_a_part_each_draw_what_one_draws_that_holds_all(where, size, vocab, columns):
    device, dtype = where
    logits, *args = world(device, dtype, 24, vocab)
    args[0][args[2][3]] = 0.0
    logits[1] = float("-inf")
    logits[1, vocab - 1] = 0.0  # the last rank's last
    logits[2, :columns] = float("-inf")  # nothing on the first
    logits[3] = 1.0  # greedy: a tie across all ranks goes to the lowest
    padded = torch.full((24, columns * size), 50.0, device=device, dtype=dtype)  # what stands behind the vocabulary
    padded[:, :vocab] = logits
    meeting = Meeting(size)

    def rank(r):
        mine = padded[:, r * columns : (r + 1) * columns].contiguous()
        return sample_tokens(mine, *args, shard=Shard(r * columns, vocab, Thread(r, size, meeting=meeting)))

    with ThreadPoolExecutor(size) as pool:
        drawn = list(pool.map(rank, range(size)))
    expected = sample_tokens(logits, *args)
    assert all(torch.equal(tokens, expected) for tokens in drawn)
    assert expected[1] == vocab - 1 and expected[2] >= columns and expected[3] == 0


@pytest.mark.parametrize(
    ("rows", "vocab"),
    [(1, 1), (5, 7), (3, 4096), (4, 4097), (9, 10_000), (33, 100), (17, 1024), (20, 5000), (40, 1025)],
)
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


@pytest.mark.parametrize("rows", [3, 18])
def test_ties_go_to_the_lowest_token_also_between_groups(where, rows):
    device, dtype = where
    logits = torch.zeros(rows, 9000, device=device, dtype=dtype)
    logits[0, [50, 4096, 8999]] = 2
    logits[1, [1023, 1024]] = 2
    logits[2, [4095, 4096]] = 2
    zero = torch.zeros(rows, device=device)
    index = torch.arange(rows, device=device)
    tokens = sample_tokens_triton(logits, zero, index, index, index)
    assert tokens.tolist() == [50, 1023, 4095, *[0] * (rows - 3)]
    assert torch.equal(tokens, sample_tokens_reference(logits, zero, index, index, index))


@pytest.mark.parametrize("rows", [8, 18])
def test_tokens_that_are_ruled_out_are_never_drawn(where, rows):
    device, dtype = where
    logits, temperature, seeds, slots, _ = world(device, dtype, rows, 5000)
    allowed = torch.zeros(5000, dtype=torch.bool, device=device)
    allowed[[7, 1023, 4998, 4999]] = True  # none in the three groups between
    logits[:, ~allowed] = float("-inf")
    for position in range(4):
        args = (logits, temperature, seeds, slots, torch.full_like(slots, position))
        tokens = sample_tokens_triton(*args)
        assert allowed[tokens].all()
        agree(tokens, *args)


@pytest.mark.parametrize("sample", [sample_tokens_triton, sample_tokens_reference])
@pytest.mark.parametrize("rows", [6, 18])
def test_infinite_logits_rule_out_everything_or_everything_else(where, rows, sample):
    device, dtype = where
    logits, *rest = world(device, dtype, rows, 3000)
    logits[::2] = float("-inf")
    logits[1::2, [2100, 2200]] = float("inf")
    tokens = sample(logits, *rest).view(-1, 2)
    assert (tokens[:, 0] == 0).all() and (tokens[:, 1] == 2100).all()


def test_a_row_draws_the_same_in_any_company(where):
    device, dtype = where
    logits, temperature, seeds, slots, positions = world(device, dtype, 40, 4500)
    together = sample_tokens_triton(logits, temperature, seeds, slots, positions)
    for some in (*([i] for i in range(40)), [11, 0], [5, 1, 7, 2], list(range(39, 15, -1))):
        tokens = sample_tokens_triton(logits[some], temperature, seeds, slots[some], positions[some])
        assert torch.equal(tokens, together[some])


def test_a_group_weighs_the_same_to_the_bit_whatever_kernel_weighs_it(where):
    """Several groups a program or one, its warps, the width of a load, the logits' type and alignment."""
    device, dtype = where
    rows, vocab = 6, 4500
    logits, temperature, _, slots, _ = world(device, dtype, rows, vocab)
    groups, approx = -(-vocab // GROUP), logits.is_cuda and torch.version.cuda is not None
    wide = torch.zeros(rows, vocab + 1, device=device)
    wide[:, 1:] = logits
    weighed = []
    for x in (logits, logits.float(), wide[:, 1:]):
        for each, warps in ((1, 4), (4, 1), (2, 2)):
            totals = torch.empty(rows, groups, device=device)
            _weigh_groups_kernel[(rows, -(-groups // each))](
                x, temperature, slots, totals, totals, x.stride(0), VOCAB=vocab, GROUPS=groups, EACH=each,
                FILTERED=False, APPROX=approx, PDL=False, num_warps=warps,
            )  # fmt: skip
            assert totals.isfinite().all()
            weighed.append(totals)
    assert all(torch.equal(totals, weighed[0]) for totals in weighed)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("vocab", [100, 1024, 1030, 2500])
def test_draws_follow_the_softmax_in_and_between_groups(where, vocab, temperature):
    device, dtype = where
    rows = 12_000
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(vocab, generator=generator) * temperature**0.5 * 1.5).to(device, dtype)
    logits[3::7] = float("-inf")
    logits[vocab - 1] = logits.max()  # much in a last group that is not full
    logits[:3] = logits.max()  # the noise of groups 0, 1, 2 must not be that of these
    heat, seed = torch.tensor([temperature], device=device), torch.tensor([1234], device=device)
    slots, positions = torch.zeros(rows, dtype=torch.int64, device=device), torch.arange(rows, device=device)
    tokens = torch.cat(
        [sample_tokens(logits.expand(len(p), vocab), heat, seed, slots[p], p) for p in positions.split(2000)]
    )
    expected = (torch.softmax(logits.double() / temperature, 0) * rows).cpu()
    # tokens that are rarely drawn count as one, of each group
    token = torch.arange(vocab)
    cell = torch.where(expected >= 8, token, vocab + token // GROUP)
    drawn = torch.bincount(cell[tokens.cpu()], minlength=vocab + 3).double()
    expected = torch.zeros(vocab + 3, dtype=torch.float64).scatter_add_(0, cell, expected)
    assert drawn[expected == 0].sum() == 0
    common = expected >= 1
    assert drawn[~common].sum() < 12
    chi_square = ((drawn - expected) ** 2 / expected)[common].sum()
    freedom = int(common.sum()) - 1
    assert freedom >= 3 and chi_square < freedom + 4 * (2 * freedom) ** 0.5


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
