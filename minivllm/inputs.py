"""The names of ``vllm.inputs``: prompts as mappings."""

from __future__ import annotations

from typing import Any

from minivllm.core.requests import Prompt as PromptType
from minivllm.core.requests import TextPrompt, TokensPrompt
from minivllm.missing import missing_name

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
