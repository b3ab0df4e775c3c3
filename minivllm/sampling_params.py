"""The names of ``vllm.sampling_params``."""

from __future__ import annotations

from typing import Any

from minivllm.core.sampling_params import RequestOutputKind, SamplingParams
from minivllm.core.structured_outputs import StructuredOutputsParams
from minivllm.missing import missing_name

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
