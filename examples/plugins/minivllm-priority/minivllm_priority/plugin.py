"""What this package adds to minivllm: ``scheduler=priority``."""

from __future__ import annotations

from collections.abc import Iterator

from minivllm.plugins import Component, hookimpl

MINIVLLM_API_VERSION = 1


@hookimpl
def minivllm_schedulers() -> Iterator[Component]:
    yield Component(
        "priority",
        "minivllm_priority.scheduler:PriorityScheduler",
        description="smaller priorities first, with ageing",
        options=("ageing",),
    )
