"""A rank's part of a GPU's memory, as vLLM counts it: a fraction of everything that the GPU has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minivllm.executors.memory import MemoryShare

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of 100 bytes, those that are ``free``, and those that this process has."""
    its = SimpleNamespace(free=100, ours=0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (its.free, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: its.ours)
    return its


def take(gpu: SimpleNamespace, ours: int = 0, others: int = 0) -> None:
    gpu.ours += ours
    gpu.free -= ours + others


def test_weights_are_part_of_the_fraction(gpu: SimpleNamespace) -> None:
    share = MemoryShare(GPU, 0.5)
    assert share.left() == 50
    take(gpu, ours=20)
    assert share.left() == 30
    take(gpu, ours=40)
    assert share.left() == -10, "more than its part"


def test_engines_of_one_process_get_as_much_one_after_another(gpu: SimpleNamespace) -> None:
    first = MemoryShare(GPU, 0.45)
    take(gpu, ours=45)
    second = MemoryShare(GPU, 0.45)
    assert (first.left(), second.left()) == (0, 45)
    take(gpu, ours=-45)
    assert second.left() == 45, "not more, when the first has ended"


def test_engines_of_two_processes_get_as_much_at_the_same_time(gpu: SimpleNamespace) -> None:
    share = MemoryShare(GPU, 0.45)
    take(gpu, ours=10, others=30)
    assert share.left() == 35


def test_what_others_have_is_not_there(gpu: SimpleNamespace) -> None:
    """Then a little is left, as other things than tensors need memory, too."""
    take(gpu, others=70)
    share = MemoryShare(GPU, 0.9)
    assert share.left() == 28
    take(gpu, others=-10)
    assert share.left() == 38


@pytest.mark.gpu
def test_an_engine_keeps_to_its_part() -> None:
    from minivllm import LLM

    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    torch.cuda.empty_cache()
    before, everything = torch.cuda.mem_get_info()
    options = {"load_format": "dummy", "max_model_len": 2048, "max_num_seqs": 256, "enforce_eager": True}
    with (
        LLM("qwen3-4b", gpu_memory_utilization=0.2, **options) as first,
        LLM("qwen3", gpu_memory_utilization=0.2, **options) as second,
    ):
        taken = before - torch.cuda.mem_get_info()[0]
        assert 0.36 * everything < taken < 0.42 * everything
        assert first.engine.num_blocks < second.engine.num_blocks, "of a smaller model more is left for the cache"
