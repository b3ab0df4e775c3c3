"""The outputs of a request, with vLLM's field names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from minivllm.core.lora_request import LoRARequest


class Logprob(msgspec.Struct, gc=False):
    """``rank`` is 1 for the most likely token. (There are many of these, so the garbage collector skips them.)"""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion. ``logprobs[i]`` maps token ids, the sampled one first, to log-probabilities at ``token_ids[i]``.

    ``finish_reason`` is stop or length (None while running); ``stop_reason`` is the stop string or stop token id that
    ended it, None for the tokenizer's own EOS token (a checkpoint may list more).
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: ClassVar[None] = None
    lora_request: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request. ``num_cached_tokens`` counts prompt tokens found in the prefix cache.
    ``prompt_logprobs[i]`` is for ``prompt_token_ids[i]``, in the format of ``CompletionOutput.logprobs``; None for the
    first token. With DELTA only the first output has them. Each delta lists all completions: one that ended earlier
    has no new text or tokens and repeats its ``finish_reason``. Fields that are always None are vLLM's, for features
    that do not exist here."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    lora_request: LoRARequest | None = None
    metrics: ClassVar[None] = None
    multi_modal_placeholders: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
