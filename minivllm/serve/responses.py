"""Response objects: OpenAI's, with vLLM's additions. Unset fields are omitted."""

from __future__ import annotations

from pydantic import BaseModel
from typing_extensions import TypedDict


class CachedTokens(BaseModel):
    cached_tokens: int


class ReasoningTokens(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None  # of chats


class CompletionLogprobs(BaseModel):
    """``text_offset``: characters of the texts in ``tokens`` before this one, as in vLLM; in ``text`` it may be at
    another place (docs/serve.md). With echo the prompt comes first; its first token has no log-probabilities."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None  # None if the token ends in mid-character


class ChatLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]


class PromptLogprob(TypedDict):
    """vLLM's, of a token at a place of the prompt. There are many: a model each would take twice as long."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]  # by token id, the prompt's own first


class CalledFunction(BaseModel):
    name: str | None = None
    arguments: str  # JSON


class Call(BaseModel):
    """A tool call, or, in a stream, more of its arguments, without id, type and name. ``index``: in a stream, its place
    among its choice's calls."""

    index: int = 0
    id: str | None = None
    type: str | None = None
    function: CalledFunction


class Text(BaseModel):
    """A chat message, or a delta of it."""

    role: str = "assistant"
    content: str | None = None
    reasoning: str | None = None  # vLLM's
    tool_calls: list[Call] | None = None


class Choice(BaseModel):
    """``stop_reason`` is vLLM's: the stop string or token that ended it; None for the model's end-of-sequence token."""

    index: int
    text: str = ""
    message: Text | None = None
    delta: Text | None = None
    logprobs: CompletionLogprobs | ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None  # of a completion


class Answer(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None  # of a chat

    def json_bytes(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()
