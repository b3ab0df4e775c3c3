"""minivllm: a small, pluggable inference engine for large language models.

Names are looked up when they are first used, so that ``import minivllm`` imports neither torch nor Hydra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minivllm.version import API_VERSION, __version__

if TYPE_CHECKING:
    from minivllm.core.engine import LLMEngine
    from minivllm.core.lora_request import LoRARequest
    from minivllm.core.outputs import CompletionOutput, RequestOutput
    from minivllm.core.requests import TextPrompt, TokensPrompt
    from minivllm.core.sampling_params import RequestOutputKind, SamplingParams
    from minivllm.core.structured_outputs import StructuredOutputsParams
    from minivllm.inputs import PromptType
    from minivllm.llm import LLM

_LAZY = {
    "LLM": "minivllm.llm",
    "LLMEngine": "minivllm.core.engine",
    "SamplingParams": "minivllm.core.sampling_params",
    "RequestOutputKind": "minivllm.core.sampling_params",
    "StructuredOutputsParams": "minivllm.core.structured_outputs",
    "LoRARequest": "minivllm.core.lora_request",
    "RequestOutput": "minivllm.core.outputs",
    "CompletionOutput": "minivllm.core.outputs",
    "TextPrompt": "minivllm.core.requests",
    "TokensPrompt": "minivllm.core.requests",
    "PromptType": "minivllm.inputs",
}

__all__ = [
    "API_VERSION",
    "LLM",
    "CompletionOutput",
    "LLMEngine",
    "LoRARequest",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    from minivllm.missing import missing_name

    raise missing_name(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
