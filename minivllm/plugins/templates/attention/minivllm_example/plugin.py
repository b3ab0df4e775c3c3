"""What this package adds to minivllm: ``attention=example``. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from minivllm.plugins import Component, hookimpl

MINIVLLM_API_VERSION = 1


@hookimpl
def minivllm_attention_backends() -> Iterator[Component]:
    yield Component(
        "example",
        "minivllm_example.backend:ExampleAttention",
        priority=-1,  # attention=auto picks the highest that can run: triton has 40, torch 0
        description="attention written out in PyTorch",
    )
