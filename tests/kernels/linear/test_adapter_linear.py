"""Adapters of single rows: the kernels against the reference, row by row."""

import numpy as np
import pytest
import torch

from minivllm.core.adapter_rows import in_order
from minivllm.kernels.linear import adapter_linear


def case(where, places, k, n, width, number=3, seed=0):
    """y, x, a slice of a wider tensor, a, b, and places."""
    device, dtype = where
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, by=1.0):
        return (by * torch.randn(shape, generator=generator)).to(device, dtype)

    t = len(places)
    x = normal(t, k + 8)[:, :k]
    a, b = normal(number, width, k, by=k**-0.5), normal(number, n, width)
    order = torch.from_numpy(in_order(np.array(places, dtype=np.int32))).view(2, t)
    return normal(t, n), x, a, b, order.to(device), places


def check(where, close, *shape, **more):
    y, x, a, b, order, places = case(where, *shape, **more)
    expected = y.float()
    for row, place in enumerate(places):
        if place:
            expected[row] += b[place - 1].float() @ (a[place - 1].float() @ x[row].float())
    before = y.clone()
    out = adapter_linear.expand_triton(y, adapter_linear.shrink_triton(x, a, order), b, order)
    assert out.data_ptr() == y.data_ptr()
    close(out, expected)
    none = [row for row, place in enumerate(places) if not place]
    assert torch.equal(out[none], before[none]), "rows without one are left as they are"


@pytest.mark.parametrize("width", [1, 8, 16, 24, 48, 96, 192])
def test_every_width(where, close, width):
    check(where, close, [1, 0, 3, 2, 2], 64, 80, width)


@pytest.mark.parametrize("k", [8, 128, 520, 2100])
@pytest.mark.parametrize("n", [16, 100])
def test_every_size(where, close, k, n):
    check(where, close, [2, 0, 1], k, n, 16)


@pytest.mark.parametrize("t", [1, 16, 17, 64, 65, 150, 257])
def test_every_number_of_rows(where, close, t):
    check(where, close, [(7 * i) % 4 for i in range(t)], 72, 40, 32)


def test_rows_of_one_and_of_none(where, close):
    check(where, close, [2] * 80, 40, 24, 16)
    check(where, close, [0] * 40 + [1] * 30 + [0] * 70, 40, 24, 16)
    check(where, close, [0] * 5, 40, 24, 16)


def test_no_rows(where):
    y, x, a, b, order, _ = case(where, [], 16, 8, 4)
    assert adapter_linear.expand_triton(y, adapter_linear.shrink_triton(x, a, order), b, order) is y


def test_the_reference(close):
    where = ("cpu", torch.float32)
    y, x, a, b, order, _ = case(where, [3, 1, 0, 3], 24, 12, 4)
    expected = y.clone()
    for row, place in ((0, 3), (1, 1), (3, 3)):
        expected[row] += b[place - 1] @ a[place - 1] @ x[row]
    assert adapter_linear.expand(y, adapter_linear.shrink(x, a, order), b, order) is y
    close(y, expected)
