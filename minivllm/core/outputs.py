"""What a request brings back: vLLM's field names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import msgspec


class Logprob(msgspec.Struct, gc=False):
    """``rank`` is 1 for the most likely token. (There are many: the garbage collector need not walk them.)"""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion. ``logprobs[i]`` maps token ids, the sampled one first, to log-probabilities at ``token_ids[i]``.

    ``finish_reason`` is stop or length (None while it runs); ``stop_reason`` is the stop string or stop token id
    that ended it, None for the tokenizer's own end token (a checkpoint may name more).
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
    """One request, as far as it has come. ``num_cached_tokens`` counts prompt tokens found in the prefix cache.
    ``prompt_logprobs[i]`` is of ``prompt_token_ids[i]``, as ``CompletionOutput.logprobs`` are: the token itself comes
    first; of the first token None. Of deltas the first has them, and each has all completions: of one that has ended
    before nothing is new, and its ``finish_reason`` is said again. Fields that are always None are vLLM's, for what is
    not here."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: ClassVar[None] = None
    lora_request: ClassVar[None] = None
    multi_modal_placeholders: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
