"""The names of ``vllm.outputs``: the results of requests."""

from __future__ import annotations

from typing import Any

from minivllm.core.outputs import CompletionOutput, RequestOutput
from minivllm.missing import missing_name

__all__ = ["CompletionOutput", "RequestOutput"]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
