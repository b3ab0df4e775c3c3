"""What this package adds to minivllm: ``attention=sdpa_window``."""

from __future__ import annotations

from collections.abc import Iterator

from minivllm.plugins import Component, hookimpl

MINIVLLM_API_VERSION = 1


@hookimpl
def minivllm_attention_backends() -> Iterator[Component]:
    yield Component(
        "sdpa_window",
        "minivllm_sdpa_window.backend:SdpaWindow",
        priority=-1,  # attention=auto never takes it: torch, with 0, runs wherever this one does
        description="torch's scaled_dot_product_attention, with a sliding window",
    )
