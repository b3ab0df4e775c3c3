"""What this package adds to minivllm: ``scheduler=example``. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from minivllm.plugins import Component, hookimpl

MINIVLLM_API_VERSION = 1


@hookimpl
def minivllm_schedulers() -> Iterator[Component]:
    yield Component(
        "example",
        "minivllm_example.scheduler:ExampleScheduler",
        description="mixed batches with few prompt tokens",
        options=("prompt_tokens",),
    )
