"""What a request draws: its distribution, its filters, and that nobody else in the batch has a say in it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import pytest
import torch

from minivllm.core.interfaces import DeviceLogprobs
from minivllm.core.parallel import TensorParallel
from minivllm.core.sampler import DefaultSampler
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence
from minivllm.errors import RequestError
from minivllm.kernels.sampling.filters import Filters, filter_bounds_reference
from minivllm.kernels.sampling.sampling import Shard

PROMPT_LEN = 5


def encode(seed: int = 0, stop_ids: tuple[int, ...] = (), **params: Any) -> np.ndarray:
    seq = Sequence("r", [1] * PROMPT_LEN, SamplingParams(**params), max_len=100, stop_ids=stop_ids)
    return DefaultSampler.encode(seq, seed)


class Rows:
    """A sampler with one row of parameters a slot, used as the model runner uses it."""

    def __init__(self, vocab: int, rows: SequenceOf[np.ndarray]) -> None:
        packed = np.array(rows, dtype=DefaultSampler.row)
        slots = np.arange(len(packed), dtype=np.int32)
        self.sampler = DefaultSampler(len(packed) + 1, vocab, torch.device("cpu"))
        words = torch.from_numpy(packed.view(np.int32).reshape(len(packed), -1).copy())
        self.sampler.prepare(slots, packed, torch.from_numpy(slots).long(), words)

    def draw(
        self, logits: torch.Tensor, slots: SequenceOf[int] | np.ndarray, positions: SequenceOf[int] | np.ndarray | int
    ) -> tuple[list[int], DeviceLogprobs | None]:
        host = np.asarray(slots, dtype=np.int32)
        at = torch.from_numpy(np.broadcast_to(np.asarray(positions, dtype=np.int64), host.shape).copy())
        device = torch.from_numpy(host).long()
        tokens, logprobs = self.sampler.sample(logits, device, at), None
        if self.sampler.needs_refine(host):
            tokens, logprobs = self.sampler.refine(logits, device, at, tokens, host)
        return tokens.tolist(), logprobs


def random_logits(n: int, vocab: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# --------------------------------------------------------------------------- greedy, and draws


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_argmax_whatever_else_is_set(dtype: torch.dtype) -> None:
    logits = random_logits(6, 50).to(dtype)
    rows = Rows(
        50,
        [
            encode(temperature=0),
            encode(temperature=1e-6, seed=3),
            encode(temperature=0, top_k=2, top_p=0.1, min_p=0.9),
            encode(temperature=0, logprobs=2),
            encode(temperature=0, min_tokens=3),
            encode(seed=9, temperature=0),
        ],
    )
    assert rows.draw(logits, range(6), 7)[0] == logits.argmax(-1).tolist()


def test_greedy_ties_go_to_the_lowest_token_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert Rows(4, [encode(temperature=0)] * 2).draw(logits, [0, 1], 0)[0] == [1, 0]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("varied", ["positions", "seeds"])
def test_draws_follow_the_softmax(temperature: float, varied: str) -> None:
    n, logits = 40_000, random_logits(1, 8, scale=1.0)
    if varied == "positions":
        rows, slots, positions = [encode(seed=11, temperature=temperature)], np.zeros(n), np.arange(n)
    else:
        row = encode(temperature=temperature)
        rows, slots, positions = [row.copy() for _ in range(n)], np.arange(n), np.full(n, 17)
        for i, r in enumerate(rows):
            r["seed"] = i
    tokens, _ = Rows(8, rows).draw(logits.expand(n, 8), slots, positions)
    expected = torch.softmax(logits[0].double() / temperature, -1).numpy() * n
    assert chi_square(np.bincount(tokens, minlength=8), expected) < 24.3  # p > 0.001 with 7 degrees of freedom


@pytest.mark.parametrize("step", [1, 2, 16])
def test_neighbouring_positions_and_seeds_draw_independently(step: int) -> None:
    n = 40_000
    same = Rows(4, [encode(seed=1), encode(seed=1 + step)])
    logits = torch.zeros(n, 4)
    first = np.array(same.draw(logits, np.zeros(n), np.arange(n))[0])
    for second in (first[step:], np.array(same.draw(logits, np.ones(n), np.arange(n))[0])):
        m = min(len(first), len(second))
        counts = np.bincount(first[:m] * 4 + second[:m], minlength=16)
        assert chi_square(counts, np.full(16, m / 16)) < 37.7  # p > 0.001 with 15 degrees of freedom


@pytest.mark.parametrize("vocab", [300, 3000])
def test_a_draw_is_a_function_of_logits_seed_and_position(vocab: int) -> None:
    """Alone, in any company and in any order: the same token. The company has filters, stops and log-probabilities."""
    rng = np.random.default_rng(0)
    rows = [
        encode(seed=5, temperature=0.8),
        encode(seed=5, temperature=0.8, top_k=20),
        encode(seed=-7, temperature=1.5, top_p=0.7),
        encode(seed=2**40 + 1, temperature=1.0, min_p=0.05),
        encode(seed=1, temperature=0),
        encode(seed=9, temperature=1.0, min_tokens=4, stop_ids=(3, 250)),
        encode(seed=9, temperature=1.2, logprobs=3, top_k=9, top_p=0.9, min_p=0.01),
    ]
    logits, positions = random_logits(len(rows), vocab), np.array([5, 6, 7, 8, 9, 6, 11])
    every = Rows(vocab, rows)
    alone = [every.draw(logits[i : i + 1], [i], positions[i : i + 1])[0][0] for i in range(len(rows))]
    for _ in range(20):
        some = rng.permutation(len(rows))[: rng.integers(1, len(rows) + 1)]
        assert every.draw(logits[some], some, positions[some])[0] == [alone[i] for i in some]
    moved = Rows(vocab, [encode(temperature=0.3, seed=99), *reversed(rows)])  # other slots
    back = np.arange(len(rows), 0, -1)
    assert moved.draw(logits, back, positions)[0] == alone


def test_seed_and_position_both_matter() -> None:
    rows, logits = Rows(1000, [encode(seed=1), encode(seed=2), encode(seed=2**32 + 1)]), torch.zeros(3, 1000)
    here, there = rows.draw(logits, [0, 1, 2], 5)[0], rows.draw(logits, [0, 1, 2], 6)[0]
    assert len({*here, *there}) == 6


# --------------------------------------------------------------------------- filters


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """One row, slowly: which tokens may be drawn. No two logits are equal."""
    p = np.exp(logits.astype(np.float64) / temperature - (logits.astype(np.float64) / temperature).max())
    p /= p.sum()
    order = [int(i) for i in np.argsort(-p) if p[i] >= min_p * p.max()]
    if top_k > 0:
        order = order[:top_k]
    total, chosen, before = p[order].sum(), [], 0.0
    for token in order:
        if top_p < 1 and before / total >= top_p:
            break
        chosen.append(token)
        before += p[token]
    return set(chosen)


def allowed(rows: Rows, logits: torch.Tensor) -> list[set[int]]:
    sampler = rows.sampler
    filters = Filters(sampler.top_k, sampler.top_p, sampler.min_p)
    bounds = filter_bounds_reference(logits, sampler.temperature, filters, torch.arange(len(logits)))
    return [set(row.nonzero()[:, 0].tolist()) for row in logits >= bounds[:, None]]


FILTERS: list[dict[str, Any]] = [
    {"top_k": k, "top_p": p, "min_p": m, "temperature": t}
    for k, p, m, t in [
        (1, 1.0, 0.0, 1.0), (5, 1.0, 0.0, 1.0), (0, 0.5, 0.0, 1.0), (-1, 0.9, 0.0, 0.7), (0, 1.0, 0.1, 1.0),
        (0, 1.0, 1.0, 1.0), (0, 1e-6, 0.0, 1.0), (20, 0.8, 0.02, 1.3), (3, 0.99, 0.3, 0.5), (64, 1.0, 0.0, 1.0),
        (1000, 0.95, 0.0, 2.0), (0, 0.999, 0.001, 5.0), (10, 0.3, 0.0, 3.0),
    ]
]  # fmt: skip


def test_top_k_top_p_and_min_p_keep_what_a_simple_loop_keeps() -> None:
    for seed in range(20):
        logits = random_logits(len(FILTERS), 64, seed=seed)
        rows = Rows(64, [encode(**f) for f in FILTERS])
        for row, got, f in zip(logits.numpy(), allowed(rows, logits), FILTERS, strict=True):
            assert got == kept(row, **f), f


def test_only_kept_tokens_are_drawn_and_all_of_them() -> None:
    n, logits = 3000, random_logits(1, 40, scale=1.0)
    for f in ({"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.4}, {"top_k": 12, "top_p": 0.7, "temperature": 2.0}):
        tokens, _ = Rows(40, [encode(seed=3, **f)]).draw(logits.expand(n, 40), np.zeros(n), np.arange(n))
        whole = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0} | f
        assert set(tokens) == kept(logits[0].numpy(), **whole)


def test_filtered_draws_follow_the_softmax_of_what_is_kept() -> None:
    n, logits = 40_000, random_logits(1, 32, scale=1.0)
    tokens, _ = Rows(32, [encode(seed=3, top_k=6, temperature=1.5)]).draw(logits.expand(n, 32), np.zeros(n), range(n))
    best = logits[0].topk(6).indices
    expected = torch.softmax(logits[0][best].double() / 1.5, -1).numpy() * n
    assert chi_square(np.bincount(tokens, minlength=32)[best.numpy()], expected) < 20.5  # p > 0.001, 5 degrees


def test_equal_probabilities_stay_together() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0]] * 3)
    rows = Rows(5, [encode(top_k=2), encode(top_p=0.3), encode(min_p=1.0)])
    assert allowed(rows, logits) == [{1, 2, 3}] * 3


def test_rows_without_filters_keep_every_token() -> None:
    logits = random_logits(4, 30)
    for row in (encode(top_k=0), encode(top_k=-1), encode(top_k=2**40), encode(top_p=1.0)):
        assert allowed(Rows(30, [encode(top_k=1), row]), logits[:2])[1] == set(range(30))


def test_an_unlikely_token_is_not_lost_to_rounding() -> None:
    logits = torch.full((1, 50_000), -20.0)
    logits[0, 7] = 0.0
    assert allowed(Rows(50_000, [encode(top_p=0.999)]), logits)[0] == {7}
    assert len(allowed(Rows(50_000, [encode(min_p=1e-12)]), logits)[0]) == 50_000


# --------------------------------------------------------------------------- min_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_are_held_back_until_min_tokens_are_there(temperature: float) -> None:
    logits = torch.zeros(1, 10)
    logits[0, [0, 9]] = 50.0  # token 0 and the last one are stop tokens
    rows = Rows(10, [encode(temperature=temperature, min_tokens=3, stop_ids=(9, 0), seed=2)])
    for output in range(6):
        [token] = rows.draw(logits, [0], PROMPT_LEN + output)[0]
        assert (token in (0, 9)) == (output >= 3), f"output {output} is {token}"


def test_holding_back_touches_only_rows_that_asked() -> None:
    logits = torch.zeros(3, 10)
    logits[:, 4] = 50.0
    rows = Rows(10, [encode(temperature=0, min_tokens=3, stop_ids=(4,)), encode(temperature=0), encode(seed=1)])
    tokens = rows.draw(logits, [0, 1, 2], PROMPT_LEN)[0]
    assert tokens[0] != 4 and tokens[1:] == [4, 4]
    assert not torch.isinf(logits).any(), "the logits are the caller's"


def test_more_stop_tokens_than_can_be_held_back_are_refused() -> None:
    encode(min_tokens=1, stop_ids=tuple(range(16)))
    encode(stop_ids=tuple(range(17)))
    with pytest.raises(RequestError, match=r"min_tokens=2 with 17 stop and end tokens: at most 16 .* fewer stop_token"):
        encode(min_tokens=2, stop_ids=tuple(range(17)))


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**63, -(2**63), 2**64 + 5])
def test_any_seed_fits(seed: int) -> None:
    row = encode(seed=seed)
    assert (int(row["seed"]) - seed) % 2**64 == 0
    [token] = Rows(100, [row]).draw(torch.zeros(1, 100), [0], 3)[0]
    assert 0 <= token < 100


# --------------------------------------------------------------------------- log-probabilities


def test_logprobs_are_the_models_own_distribution() -> None:
    logits = random_logits(4, 60)
    rows = Rows(
        60,
        [
            encode(temperature=0.0, logprobs=3),
            encode(seed=1, temperature=3.0),
            encode(seed=2, temperature=3.0, top_k=30, logprobs=5),  # neither temperature nor filters change them
            encode(seed=3, temperature=2.0, logprobs=0),
        ],
    )
    tokens, lp = rows.draw(logits, range(4), 6)
    assert lp is not None
    want = torch.log_softmax(logits.double(), -1)
    assert lp.rank[1] == 0, "one that did not ask"
    for row in (0, 2, 3):
        assert lp.sampled[row].item() == pytest.approx(want[row, tokens[row]].item(), abs=1e-5)
        assert lp.rank[row].item() == int((want[row] > want[row, tokens[row]]).sum()) + 1
        best = want[row].topk(8)
        assert lp.top_ids[row].tolist() == best.indices.tolist()
        assert lp.top[row].tolist() == pytest.approx(best.values.tolist(), abs=1e-5)
    assert lp.rank[0] == 1
    assert rows.draw(logits[1:2], [1], 6)[1] is None


def test_asking_for_logprobs_changes_no_token() -> None:
    logits = random_logits(2, 60)
    for params in ({}, {"top_k": 5}, {"temperature": 0}):
        rows = Rows(60, [encode(seed=4, **params), encode(seed=4, logprobs=2, **params)])
        for position in range(20):
            tokens = rows.draw(logits[:1].expand(2, 60), [0, 1], position)[0]
            assert tokens[0] == tokens[1]


# --------------------------------------------------------------------------- slots change hands


def test_a_slot_forgets_its_last_owner() -> None:
    rows = Rows(20, [encode(seed=1, top_k=1, min_tokens=9, stop_ids=(2, 3), logprobs=4)])
    fresh = Rows(20, [encode(seed=1)])
    packed = np.array([encode(seed=1)], dtype=DefaultSampler.row)
    slot = np.zeros(1, dtype=np.int32)
    rows.sampler.prepare(slot, packed, torch.zeros(1).long(), torch.from_numpy(packed.view(np.int32).reshape(1, -1)))
    assert not rows.sampler.needs_refine(slot)
    logits = random_logits(1, 20)
    for position in range(30):
        assert rows.draw(logits, [0], position) == fresh.draw(logits, [0], position)


def test_a_slot_may_have_a_mask_for_each_of_some_positions() -> None:
    guided = encode(temperature=0, structured_outputs={"choice": ["a"]})
    rows = Rows(40, [guided, guided, encode(temperature=0)])
    sampler, only = rows.sampler, [3, 35, 8, 21]
    sampler.masks_per_slot = 3
    bits = torch.zeros((4, 2), dtype=torch.int32)
    for row, token in enumerate(only):
        bits[row, token // 32] = 1 << token % 32
    places = [0 * 3 + 7 % 3, 0 * 3 + 8 % 3, 0 * 3 + 9 % 3, 1 * 3 + 5 % 3]
    sampler.take_masks(torch.tensor(places), bits)
    logits = random_logits(1, 40).expand(5, 40).contiguous()
    free = int(logits[0].argmax())
    assert rows.draw(logits, [0, 0, 0, 1, 2], [7, 8, 9, 5, 8])[0] == [*only, free]
    assert rows.draw(logits[:2], [0, 0], [10, 11])[0] == only[:2], "the masks of three tokens before"
    packed, slot = np.array([encode(temperature=0)], dtype=DefaultSampler.row), np.zeros(1, dtype=np.int32)
    sampler.prepare(slot, packed, torch.zeros(1).long(), torch.from_numpy(packed.view(np.int32).reshape(1, -1)))
    assert rows.draw(logits[:4], [0, 0, 0, 1], [7, 8, 9, 5])[0] == [free, free, free, only[3]]


# --------------------------------------------------------------------------- penalties


def test_many_penalized_rows_among_others() -> None:
    """More rows than are penalized at once, tokens that come back in each step, and slots that change their owners."""
    vocab, rows = 40, 70
    kinds = [
        {}, {"presence_penalty": 0.7}, {"frequency_penalty": -0.4}, {"repetition_penalty": 1.3, "min_tokens": 4}
    ]  # fmt: skip
    params = [kinds[i % 4] for i in range(rows)]
    world = Rows(vocab, [encode(temperature=0, stop_ids=(3,), **p) for p in params])
    for owner in range(2):
        rng = np.random.default_rng(owner)
        known = [rng.integers(0, vocab, PROMPT_LEN + i % 3).tolist() if p else [] for i, p in enumerate(params)]
        slots = np.arange(rows, dtype=np.int32)
        if owner:
            packed = world.sampler.host[:rows].copy()
            words = torch.from_numpy(packed.view(np.int32).reshape(rows, -1).copy())
            world.sampler.prepare(slots, packed, torch.from_numpy(slots).long(), words)
        told = torch.tensor([token for ids in known for token in ids], dtype=torch.int32)
        world.sampler.take_tokens(slots, np.array([len(ids) for ids in known]), told)
        for step in range(6):
            logits = random_logits(rows, vocab, seed=100 * owner + step)
            before = logits.clone()
            at = [len(ids) or PROMPT_LEN for ids in known]
            tokens, _ = world.draw(logits, slots, np.array(at))
            assert torch.equal(logits, before), "the model's own logits were written to"
            for i, (token, ids, p) in enumerate(zip(tokens, known, params, strict=True)):
                scores, said = logits[i].tolist(), ids[PROMPT_LEN:]
                if p.get("min_tokens") and len(ids) < PROMPT_LEN + 4:
                    scores[3] = float("-inf")
                for seen in set(ids):
                    repetition = p.get("repetition_penalty", 1.0)
                    scores[seen] = scores[seen] / repetition if scores[seen] > 0 else scores[seen] * repetition
                    times = said.count(seen)
                    scores[seen] -= p.get("frequency_penalty", 0) * times + p.get("presence_penalty", 0) * (times > 0)
                assert scores[token] >= max(scores) - 1e-5, (i, p, step)
                if p:
                    ids.append(token)


def test_biases_are_of_their_row_and_gone_with_it() -> None:
    """Slots that change their owners, of which some have biases, some penalties, some both, and some neither."""
    vocab, rows = 30, 24
    kinds: list[dict[str, Any]] = [
        {}, {"logit_bias": {3: 4.0, 7: -100.0}}, {"allowed_token_ids": [1, 2, 5, 8]},
        {"allowed_token_ids": [4, 6], "logit_bias": {6: 3.0, 9: 1e30}, "frequency_penalty": 1.5, "min_tokens": 2},
        {"repetition_penalty": 1.4},
    ]  # fmt: skip
    world = Rows(vocab, [encode(temperature=0) for _ in range(rows)])
    slots = np.arange(rows, dtype=np.int32)
    for owner in range(3):
        params = [kinds[(i + owner) % 5] for i in range(rows)]
        seqs = [
            Sequence("r", list(range(PROMPT_LEN)), SamplingParams(temperature=0, **p), max_len=99, stop_ids=(6,))
            for p in params
        ]
        for seq in seqs:
            seq.sampler_row = DefaultSampler.encode(seq, 0)
            seq.sampler_words, seq.tells_tokens = DefaultSampler.words(seq), DefaultSampler.wants_tokens(seq)
        packed = np.array([seq.sampler_row for seq in seqs])
        words = torch.from_numpy(packed.view(np.int32).reshape(rows, -1).copy())
        world.sampler.prepare(slots, packed, torch.from_numpy(slots).long(), words)
        told = [seq.told for seq in seqs]
        world.sampler.take_tokens(slots, np.array([len(w) for w in told]), torch.from_numpy(np.concatenate(told)))
        said: list[list[int]] = [[] for _ in params]
        for step in range(5):
            logits = random_logits(rows, vocab, seed=10 * owner + step)
            before = logits.clone()
            tokens, _ = world.draw(logits, slots, PROMPT_LEN + step)
            assert torch.equal(logits, before), "the model's own logits were written to"
            for i, (token, p) in enumerate(zip(tokens, params, strict=True)):
                scores = logits[i].tolist()
                for t in range(vocab):
                    scores[t] += p.get("logit_bias", {}).get(t, 0.0)
                    if t not in p.get("allowed_token_ids", range(vocab)) or (t == 6 and step < p.get("min_tokens", 0)):
                        scores[t] = float("-inf")
                    if t in said[i] or t < PROMPT_LEN:
                        repetition = p.get("repetition_penalty", 1.0)
                        scores[t] = scores[t] / repetition if scores[t] > 0 else scores[t] * repetition
                    scores[t] -= p.get("frequency_penalty", 0.0) * said[i].count(t)
                assert scores[token] >= max(scores) - 1e-4, (i, p, step)
                said[i].append(token)


def test_what_may_be_said_must_not_be_all_held_back() -> None:
    encode(min_tokens=1, stop_ids=(3, 4), allowed_token_ids=[3, 5])
    encode(stop_ids=(3, 4), allowed_token_ids=[3])
    with pytest.raises(RequestError, match=r"allowed_token_ids=\[3\] are stop or end tokens, which min_tokens=1 holds"):
        encode(min_tokens=1, stop_ids=(3, 4), allowed_token_ids=[3])


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1 + 1e-12, 1e38, 1e300])
def test_a_repetition_penalty_at_the_ends_of_float32(penalty: float) -> None:
    """No NaN, and a sampler that is not told tokens is one that needs none."""
    seq = Sequence("r", [1] * PROMPT_LEN, SamplingParams(temperature=0.8, repetition_penalty=penalty), max_len=100)
    seq.sampler_row = DefaultSampler.encode(seq, 0)
    world = Rows(8, [seq.sampler_row])
    if DefaultSampler.wants_tokens(seq):
        world.sampler.take_tokens(np.array([0]), np.array([PROMPT_LEN]), torch.ones(PROMPT_LEN, dtype=torch.int32))
    tokens, _ = world.draw(torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, 0.0, 0.0, -3.0]]), [0], PROMPT_LEN)
    assert (tokens == [1]) == (penalty < 1) or penalty == 1 + 1e-12
    assert 0 <= tokens[0] < 8


def test_whoever_overrides_sample_alone_samples_whole_rows() -> None:
    """With several ranks: ``sample_shard`` stands for the ``sample`` that it was written beside, and for no other."""

    class Own(DefaultSampler):
        def sample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return logits.argmin(dim=1)

    class Both(Own):
        def sample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return logits.argmax(dim=1)

        def sample_shard(self, logits: torch.Tensor, shard: Shard, *rest: torch.Tensor) -> torch.Tensor:
            return shard.tp.all_gather(logits).argmax(dim=1)

    made = [kind(2, 8, torch.device("cpu")) for kind in (DefaultSampler, Own, Both)]
    assert [sampler.samples_shards() for sampler in made] == [True, False, True]


def test_filters_have_a_part_in_what_shards_were_sampled_from() -> None:
    """By drawing again, also where that is captured; not of rows that were sampled whole."""
    logits = torch.tensor([[0.0, 4.0, 1.0, 3.9]]).repeat(200, 1)
    rows = Rows(4, [encode(i, temperature=1.0, top_k=1, logprobs=2) for i in range(200)])
    host, slots, at = np.arange(200, dtype=np.int32), torch.arange(200), torch.full((200,), 7)
    assert not rows.sampler.refinement(host).draws  # type: ignore[union-attr]
    sharded = rows.sampler.sample_shard(logits, Shard(0, 4, TensorParallel()), slots, at)
    assert set(sharded.tolist()) > {1}
    kind = rows.sampler.refinement(host)
    for refined, logprobs in (
        rows.sampler.refine(logits, slots, at, sharded, host),
        rows.sampler.refine_captured(logits, slots, at, sharded, kind),
    ):
        assert set(refined.tolist()) == {1}
        assert logprobs is not None and (logprobs.rank == 1).all()
