"""Engines on small random checkpoints, shut down when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM


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
