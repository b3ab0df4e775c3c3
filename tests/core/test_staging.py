"""What crosses to the device together comes apart there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minivllm.core import staging as staging_module
from minivllm.core.staging import Packing, Staging


@pytest.mark.parametrize("shapes", [((3, 5), (6,), (1,)), ((1,), (0,), (2, 2)), ((0, 4), (7,), (3,))])
def test_a_packet_is_cut_on_the_device_as_on_the_host(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Into arrays that do not share words, each at an aligned place."""
    packing = Packing(*((shape, dtype) for shape in shapes for dtype in (np.int64, np.int32)))
    numbers, rng = np.zeros(packing.words + 3, dtype=np.int32), np.random.default_rng(0)
    arrays = packing.cut(numbers)
    assert [array.shape for array in arrays] == [shape for shape in shapes for _ in range(2)]
    values = [rng.integers(1 << 30 << 31 * (a.dtype == np.int64), size=a.shape, dtype=a.dtype) for a in arrays]
    for array, value in zip(arrays, values, strict=True):
        array[:] = value
    assert not numbers[packing.words :].any()
    for part, value, place in zip(packing.cut(torch.from_numpy(numbers)), values, packing.places, strict=True):
        assert part.dtype == torch.from_numpy(value).dtype and place % 4 == 0
        np.testing.assert_array_equal(part.numpy(), value)


@pytest.mark.parametrize("sizes", [(0, 0, 0), (1, 3, 2), (5, 4, 7)])
def test_what_is_sent_together_comes_apart_at_aligned_places(sizes: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    whole, long = rng.integers(0, 1 << 30, sizes[0], dtype=np.int32), rng.integers(1 << 40, size=2 * sizes[1])[::2]
    records = np.zeros(sizes[2], dtype=[("a", "<f4"), ("b", "<i8")])
    records["a"], records["b"] = rng.random(sizes[2]), rng.integers(1 << 40, size=sizes[2])
    staging = Staging(torch.device("cpu"))
    sent = staging.send(whole, long, records, whole)
    assert [part.dtype for part in sent] == [torch.int32, torch.int64, torch.int32, torch.int32]
    for array, part in zip((whole, long, records.view(np.int32), whole), sent, strict=True):
        np.testing.assert_array_equal(part.numpy(), array)
        assert part.data_ptr() % 16 == 0 or not len(part)


def test_what_is_sent_later_takes_the_place_of_what_was_whatever_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that come again, others between them, larger ones than before, and more kinds than are kept."""
    monkeypatch.setattr(staging_module, "_MOST_KINDS", 3)
    staging, rng = Staging(torch.device("cpu")), np.random.default_rng(0)
    for sizes in [(3, 5), (0, 2), (3, 5), (5, 3), (40, 1), (3, 5), (1, 1), (2, 2), (3, 5), (400, 30), (40, 1)]:
        arrays = rng.integers(1 << 30, size=sizes[0], dtype=np.int32), rng.integers(1 << 40, size=sizes[1])
        for array, part in zip(arrays, staging.send(*arrays), strict=True):
            np.testing.assert_array_equal(part.numpy(), array)
            assert part.data_ptr() % 16 == 0 or not len(part)
        assert len(staging._kinds) <= 3


def test_the_first_has_a_fixed_place_if_it_is_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is sent with it, as much as there is room for or more."""
    monkeypatch.setattr(staging_module, "_ROOM", 40)
    staging, rng = Staging(torch.device("cpu"), 16), np.random.default_rng(0)
    front = staging.words[:16]
    for sizes in [(16,), (16, 4, 0), (9, 30), (16, 400), (3, 1, 50), (16, 8)]:
        arrays = [rng.integers(1 << 30, size=n, dtype=np.int32) for n in sizes]
        for array, part in zip(arrays, staging.send(*arrays), strict=True):
            np.testing.assert_array_equal(part.numpy(), array)
        np.testing.assert_array_equal(front[: sizes[0]].numpy(), arrays[0])
    assert staging.words.data_ptr() == front.data_ptr()
