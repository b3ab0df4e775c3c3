"""What this package adds to minivllm: ``sampler=example``. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from minivllm.plugins import Component, hookimpl

MINIVLLM_API_VERSION = 1


@hookimpl
def minivllm_samplers() -> Iterator[Component]:
    yield Component(
        "example",
        "minivllm_example.sampler:ExampleSampler",
        description="the built-in sampler, without the banned tokens",
        options=("banned",),
    )
