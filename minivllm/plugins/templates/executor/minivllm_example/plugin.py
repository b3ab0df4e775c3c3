"""What this package adds to minivllm: ``executor=example``. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from minivllm.plugins import Component, hookimpl

MINIVLLM_API_VERSION = 1


@hookimpl
def minivllm_executors() -> Iterator[Component]:
    yield Component(
        "example", "minivllm_example.executor:ExampleExecutor", description="one process that counts what it ran"
    )
