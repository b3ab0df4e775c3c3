"""What vLLM has under this name: what a request brings back."""

from __future__ import annotations

from typing import Any

from minivllm.core.outputs import CompletionOutput, RequestOutput
from minivllm.missing import missing_name

__all__ = ["CompletionOutput", "RequestOutput"]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
