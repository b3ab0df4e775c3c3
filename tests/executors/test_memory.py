"""A rank's part of a GPU's memory, as vLLM counts it: a fraction of everything that the GPU has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minivllm.executors.memory import MemoryShare

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of 100 bytes, those that are ``free``."""
    its = SimpleNamespace(free=100)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (its.free, 100))
    return its


def test_weights_are_part_of_the_fraction(gpu: SimpleNamespace) -> None:
    share = MemoryShare(GPU, 0.5)
    assert share.left() == 50
    gpu.free -= 20  # weights
    assert share.left() == 30
    gpu.free -= 40
    assert share.left() == -10, "more than its part"


def test_two_engines_of_one_fraction_get_as_much(gpu: SimpleNamespace) -> None:
    first = MemoryShare(GPU, 0.45)
    gpu.free -= 45
    second = MemoryShare(GPU, 0.45)
    assert (first.left(), second.left()) == (0, 45)


def test_what_others_have_is_not_there(gpu: SimpleNamespace) -> None:
    """Then a little is left, as other things than tensors need memory, too."""
    gpu.free = 30
    share = MemoryShare(GPU, 0.9)
    assert share.left() == 28
    gpu.free = 40  # another has ended
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
