"""Servers on a small random checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_plugins import fake_plugin  # noqa: F401
from running import OVERRIDES, SETTINGS, Running, serving

from minivllm import LLM


@pytest.fixture(scope="session")
def make_llm(tiny_checkpoint: Callable[..., Path]) -> Iterator[Callable[..., LLM]]:
    """``make_llm(*overrides, **checkpoint_options)``; shut down at the end."""
    made: list[LLM] = []

    def make(*overrides: str, **checkpoint: Any) -> LLM:
        made.append(LLM(str(tiny_checkpoint("qwen3", **checkpoint)), **SETTINGS, overrides=[*OVERRIDES, *overrides]))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture(scope="session")
def alone(make_llm: Callable[..., LLM]) -> LLM:
    """The same checkpoint without a server: what must come out. Nothing is cached, each request runs alone."""
    return make_llm("cache.enable_prefix_caching=false", "scheduler.async_scheduling=false")


@pytest.fixture(scope="session")
def shared(make_llm: Callable[..., LLM]) -> Iterator[Running]:
    with serving(make_llm()) as running:
        yield running


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """One server for the session; each test leaves it without a request."""
    yield shared
    shared.settled()
