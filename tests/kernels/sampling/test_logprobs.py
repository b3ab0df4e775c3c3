"""Log-probabilities: kernels and reference agree with float64."""

import pytest
import torch

from minivllm.kernels.sampling.logprobs import MOST, logprobs, logprobs_reference, logprobs_triton


def expected(logits, tokens, k):
    values = torch.log_softmax(logits.double().cpu(), dim=-1)
    sampled = values.gather(1, tokens.cpu()[:, None])
    return sampled[:, 0], (values > sampled).sum(dim=-1) + 1, values.topk(k, dim=-1).values, values


def everybody(tokens):
    """Slots, and what they ask for: each row its own."""
    return torch.arange(len(tokens), device=tokens.device), torch.zeros_like(tokens, dtype=torch.int32)


@pytest.mark.parametrize("find", [logprobs_triton, logprobs_reference])
def test_rows_that_do_not_ask_have_no_rank(where, find):
    """Found by their slots; nothing but the rank of the others counts."""
    device, dtype = where
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    tokens = torch.tensor([7, 4999, 7, 4097], device=device)
    slots, asked = torch.tensor([5, 0, 2, 1], device=device), torch.tensor([3, -1, 0, -1, -1, 20], device=device).int()
    sampled, rank, top, _ = find(logits, tokens, 2, slots, asked)
    want_sampled, want_rank, want_top, _ = expected(logits, tokens, 2)
    assert rank.tolist() == [*want_rank.tolist()[:3], 0]
    torch.testing.assert_close(sampled[:3].double().cpu(), want_sampled[:3], rtol=0, atol=2e-5)
    torch.testing.assert_close(top[:3].double().cpu(), want_top[:3], rtol=0, atol=2e-5)


@pytest.mark.parametrize("vocab", [33, 4096, 9001])
@pytest.mark.parametrize("k", [1, 5, MOST])
@pytest.mark.parametrize("find", [logprobs_triton, logprobs_reference])
def test_they_are_those_of_the_softmax(where, vocab, k, find):
    device, dtype = where
    generator = torch.Generator().manual_seed(vocab + k)
    wide = (torch.randn(3, vocab + 7, generator=generator) * 4).to(device, dtype)
    logits = wide[:, :vocab]  # rows lie apart
    tokens = torch.tensor([vocab - 1, 0, int(logits[2].float().argmax())], device=device)
    sampled, rank, top, top_ids = find(logits, tokens, k, *everybody(tokens))
    want_sampled, want_rank, want_top, values = expected(logits, tokens, k)
    assert sampled.dtype == top.dtype == torch.float32 and rank.dtype == top_ids.dtype == torch.int32
    torch.testing.assert_close(sampled.double().cpu(), want_sampled, rtol=0, atol=2e-5)
    torch.testing.assert_close(top.double().cpu(), want_top, rtol=0, atol=2e-5)
    assert rank.tolist() == want_rank.tolist() and rank[2] == 1
    for row, ids in enumerate(top_ids.tolist()):  # of equal ones any may come first, none twice
        assert len(set(ids)) == k
        torch.testing.assert_close(values[row, ids], want_top[row], rtol=0, atol=1e-12)


@pytest.mark.parametrize("find", [logprobs_triton, logprobs_reference])
def test_of_equal_ones_the_first_however_many_are_asked_for(where, find):
    device, dtype = where
    logits = torch.randint(-9, 1, (3, 9001), generator=torch.Generator().manual_seed(2)).to(device, dtype)
    tokens = torch.tensor([0, 1, 9000], device=device)
    want = logits.float().sort(dim=-1, descending=True, stable=True).indices
    for k in (1, 7, MOST):
        top_ids = find(logits, tokens, k, *everybody(tokens))[3]
        assert top_ids.tolist() == want[:, :k].tolist()


@pytest.mark.parametrize("find", [logprobs_triton, logprobs_reference])
def test_all_equal_far_apart_and_impossible(where, find):
    device, dtype = where
    logits = torch.zeros(3, 5000, device=device, dtype=dtype)
    logits[1, 4097] = 90.0
    logits[2, 8:] = float("-inf")  # nothing of the second part can be
    tokens = torch.tensor([4999, 4097, 3], device=device)
    sampled, rank, top, top_ids = find(logits, tokens, 2, *everybody(tokens))
    torch.testing.assert_close(sampled.exp().cpu(), torch.tensor([1 / 5000, 1.0, 1 / 8]))
    assert rank.tolist() == [1, 1, 1] and top_ids[1, 0] == 4097
    torch.testing.assert_close(top.exp().cpu(), torch.tensor([[1 / 5000] * 2, [1.0, 0.0], [1 / 8] * 2]))


def test_no_rows_and_more_than_the_kernels_find(where):
    device, dtype = where
    tokens = torch.empty(0, dtype=torch.int64, device=device)
    none = torch.zeros(0, 99, device=device, dtype=dtype)
    assert [len(x) for x in logprobs_triton(none, tokens, 3, *everybody(tokens))] == [0] * 4
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    found = logprobs(torch.zeros(2, 99, device=device, dtype=dtype), tokens, MOST + 1, *everybody(tokens))
    assert found[2].shape == (2, MOST + 1)
