"""An engine on a CPU whose steps are small, and its runner; a test that needs another engine has its own ``llm``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import small_steps

from minivllm import LLM
from minivllm.core.model_runner import ModelRunner


@pytest.fixture(scope="session")
def folder(tiny_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint of as many tokens as the tests name, with layers that are neither among the first nor the last."""
    return tiny_checkpoint(vocab_size=1024, num_hidden_layers=5)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with small_steps(folder, 300, 10) as llm:
        yield llm


@pytest.fixture
def runner(llm: LLM) -> ModelRunner:
    return llm.engine.executor._worker.runner  # type: ignore[attr-defined, no-any-return]
