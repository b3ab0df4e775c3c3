"""An engine on a CPU whose steps are small, and its runner; a test that needs another engine has its own ``llm``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import small_steps

from minivllm import LLM
from minivllm.core.model_runner import ModelRunner


@pytest.fixture
def llm() -> Iterator[LLM]:
    with small_steps(300, 10) as llm:
        yield llm


@pytest.fixture
def runner(llm: LLM) -> ModelRunner:
    return llm.engine.executor._worker.runner  # type: ignore[attr-defined, no-any-return]
