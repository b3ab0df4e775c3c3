"""Engines on small random checkpoints, shut down when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost these small matrices more than they bring, and much more where tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engine(tiny_checkpoint: Callable[..., Path]) -> Iterator[Callable[..., LLM]]:
    """``engine(folder=None, **{"cache.num_blocks": 64, ...}) -> LLM`` on the CPU in float32, with the torch backend."""
    made: list[LLM] = []

    def make(folder: Path | None = None, **overrides: Any) -> LLM:
        settings = {"attention": "torch"} | overrides
        attention = settings.pop("attention")
        llm = LLM(
            str(folder or tiny_checkpoint("qwen3")),
            attention=attention,
            device="cpu",
            dtype="float32",
            overrides=[f"{key}={value}" for key, value in settings.items()],
        )
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.shutdown()
