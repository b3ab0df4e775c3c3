"""Memory that goes and comes back at the same addresses, and tensors that move there."""

from __future__ import annotations

import copy
import gc
import sys
import weakref

import pytest
import torch

from minivllm.errors import ConfigError, RequestError
from minivllm.executors import sleep
from minivllm.executors.sleep import HostRegion, SleepingMemory

CPU = torch.device("cpu")
MIB = 1 << 20


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("huge", [False, True])
def test_pages_go_and_come_back_as_zeros(huge: bool) -> None:
    region = HostRegion(64 * MIB, huge)
    before = resident()
    address = region.tensor.data_ptr()
    region.tensor.fill_(7)
    assert resident() - before > 56 * MIB
    region.unmap()
    assert resident() - before < 8 * MIB
    assert not region.tensor.any() and region.tensor.data_ptr() == address


def test_a_region_ends_with_its_last_tensor() -> None:
    region = HostRegion(64 * MIB)
    region.tensor.fill_(7)
    pages, view = weakref.ref(region._pages), region.tensor[5:].view(-1, 1)[:3]
    del region
    gc.collect()
    assert view.flatten().tolist() == [7, 7, 7] and pages() is not None
    del view
    gc.collect()
    assert pages() is None


@torch.inference_mode()
def test_tensors_move_as_they_are() -> None:
    kept = torch.randn(9, 5)
    tensors = {
        "rows": torch.randn(4, 3), "turned": torch.randn(6, 2).t(), "few": torch.arange(7, dtype=torch.int8),
        "part": kept[2:5, 1:], "its row": kept[3], "half": torch.randn(11).bfloat16(), "none": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(8), requires_grad=False),
    }  # fmt: skip
    del kept
    objects, before = dict(tensors), copy.deepcopy(tensors)
    memory = SleepingMemory(CPU)
    memory.take("weights", tensors)
    (region,) = memory._regions.values()
    start, end = region.tensor.data_ptr(), region.tensor.data_ptr() + memory.nbytes
    for name, tensor in tensors.items():
        assert tensor is objects[name] and torch.equal(tensor, before[name])
        assert tensor.stride() == before[name].stride()
        assert start <= tensor.data_ptr() < end or not tensor.numel()
    tensors["part"][1, 0] = 5.0
    assert tensors["its row"][1] == 5.0, "they still share it"
    memory.sleep(2)
    assert not any(tensor.any() for tensor in tensors.values())


def test_a_view_that_would_be_left_behind_is_refused() -> None:
    weight = torch.randn(4, 3)
    view = weight[1:]
    with pytest.raises(ConfigError, match=r"another tensor in the memory of first\.weight, as a view"):
        SleepingMemory(CPU).take("weights", {"first.weight": weight})
    assert view.numel()


def test_level_1_keeps_weights_and_level_2_nothing() -> None:
    memory = SleepingMemory(CPU)
    weight, cache = torch.ones(1000), memory.cache(4096)
    memory.take("weights", {"weight": weight})
    cache.fill_(1)
    memory.sleep(1)
    assert weight.all() and not cache.any()
    assert not memory.wake_up(["weights", "kv_cache"]), "of copies there are none to make"
    cache.fill_(1)
    memory.sleep(2)
    assert not weight.any() and not cache.any()
    assert not memory.wake_up(["weights"])
    weight.fill_(1)
    memory.sleep(1)
    assert weight.all()


def test_who_has_no_room_to_wake_up_may_sleep_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where weights had room and what is made of them had none: what the host keeps are still the weights."""
    full: list[HostRegion] = []

    class Gpu(HostRegion):
        def map(self, stop: int) -> None:
            if self in full:
                raise torch.OutOfMemoryError("256 MiB more are needed")

    class Kept:
        def __init__(self, original: torch.Tensor) -> None:
            self._copy = original.clone()

        def restore(self, original: torch.Tensor) -> None:
            original.copy_(self._copy)

    monkeypatch.setattr(sleep, "_region", lambda size, device: Gpu(size))
    monkeypatch.setattr(sleep, "_HostCopy", Kept)
    memory = SleepingMemory(torch.device("cuda", 0))
    weight = torch.ones(1000)
    memory.take("weights", {"weight": weight})
    memory.take("copies", {"copy": torch.ones(1000)})
    memory.sleep(1)
    full.append(memory._regions["copies"])  # type: ignore[arg-type]
    for level in (1, 2):
        with pytest.raises(RequestError, match=r"there is no room for copies, .* 256 MiB more"):
            memory.wake_up(["weights"])
        assert not memory.wake_up(["kv_cache"]), "there is nothing to make copies in yet"
        memory.sleep(level)
    full.clear()
    assert memory.wake_up(["weights"]) and weight.all()


def test_only_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="works on Linux, not on darwin; leave it out"):
        SleepingMemory(CPU)
