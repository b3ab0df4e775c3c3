"""What clients get back: OpenAI's objects, built from the engine's outputs, whole or in chunks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel
from pydantic_core import to_json

from minivllm.core.outputs import CompletionOutput, Logprob, RequestOutput

# --------------------------------------------------------------------------- objects; fields that are not set stay out


class CachedTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(BaseModel):
    """``text_offset`` counts characters of the tokens' texts from the answer's beginning."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None  # None of a token that ends within a character


class ChatLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]


class Text(BaseModel):
    """A chat's message, or what is new of it."""

    role: str = "assistant"
    content: str | None = None


class Choice(BaseModel):
    """``stop_reason`` is vLLM's: the stop string or token that ended it, None for the model's own end token."""

    index: int
    text: str = ""
    message: Text | None = None
    delta: Text | None = None
    logprobs: CompletionLogprobs | ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Answer(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None

    def json_bytes(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()


# --------------------------------------------------------------------------- building them

_MARK = "\ue000 text \ue000"  # in a chunk's JSON found only where its text goes


class Reply(ABC):
    """One answer under way: knows which choice an output belongs to, and counts tokens.

    ``request_ids``: the engine's, one a prompt, each with ``n`` completions. Of a stream, ``include_usage``: whether
    its last chunk counts all tokens; ``continuous_usage``: and each chunk those of its choice so far, and its prompt's.
    """

    name: ClassVar[str]
    whole_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(
        self, reply_id: str, model: str, request_ids: Sequence[str], n: int, include_usage: bool,
        continuous_usage: bool = False,
    ) -> None:  # fmt: skip
        self.id, self.model, self.n, self.include_usage = reply_id, model, n, include_usage
        self.created = int(time.time())
        self._continuous = continuous_usage
        self._place = {name: i for i, name in enumerate(request_ids)}
        self._ended: set[int] = set()
        self._prompt_tokens: dict[int, int] = {}  # by prompt, as its outputs come
        self._cached_tokens: dict[int, int] = {}
        self._completion_tokens: Counter[int] = Counter()  # by choice
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    @abstractmethod
    def _content(self, text: str, *, whole: bool) -> dict[str, Any]:
        """The fields of a choice that hold ``text``."""

    @abstractmethod
    def _logprobs(self, index: int, new: CompletionOutput) -> CompletionLogprobs | ChatLogprobs:
        """Of the tokens of ``new``, which has them."""

    def _first_chunks(self) -> Iterator[Answer]:
        """What a stream begins with, together with the first output, as vLLM's: who measures takes the first chunk for
        the first token's."""
        return iter(())

    def whole(self, outputs: Iterable[RequestOutput]) -> Answer:
        choices = []
        for output in outputs:
            self._count(output)
            choices += [self._choice(index, new, whole=True) for index, new in self._news(output)]
        choices.sort(key=lambda choice: choice.index)
        return self._answer(self.whole_name, choices, usage=self.usage())

    def chunks(self, output: RequestOutput) -> Iterator[bytes]:
        """What a delta brings, as JSON, one chunk a choice."""
        begins = not self._prompt_tokens
        self._count(output)
        if begins:
            yield from (chunk.json_bytes() for chunk in self._first_chunks())
        for index, new in self._news(output):
            if new.finish_reason is None and new.logprobs is None and not self._continuous:  # nearly all of them
                before, after = self._frame(index)
                yield before + to_json(new.text) + after
            else:
                yield self._chunk([self._choice(index, new, whole=False)]).json_bytes()

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """The JSON of a chunk of choice ``index`` that says nothing but text, before the text and behind it."""
        if index not in self._frames:
            choice = self._choice(index, CompletionOutput(index, _MARK, []), whole=False)
            before, after = self._chunk([choice]).json_bytes().split(to_json(_MARK))
            self._frames[index] = before, after
        return self._frames[index]

    def last_chunks(self) -> Iterator[Answer]:
        if self.include_usage:
            yield self._answer(self.chunk_name, [], usage=self.usage())

    def usage(self) -> Usage:
        cached = sum(self._cached_tokens.values())
        return _usage(sum(self._prompt_tokens.values()), self._completion_tokens.total(), cached)

    def _usage_of(self, index: int) -> Usage:
        """Of a choice so far, and its prompt."""
        prompt, completion = index // self.n, self._completion_tokens[index]
        return _usage(self._prompt_tokens.get(prompt, 0), completion, self._cached_tokens.get(prompt, 0))

    def _count(self, output: RequestOutput) -> None:
        prompt = self._place[output.request_id]
        self._prompt_tokens[prompt], self._cached_tokens[prompt] = (
            len(output.prompt_token_ids),
            output.num_cached_tokens,
        )

    def _news(self, output: RequestOutput) -> Iterator[tuple[int, CompletionOutput]]:
        """The choices that have something to say, and what."""
        first = self._place[output.request_id] * self.n
        for new in output.outputs:
            index = first + new.index
            if index in self._ended:
                continue
            self._completion_tokens[index] += len(new.token_ids)
            if new.finished():
                self._ended.add(index)
            elif not new.text and not new.logprobs:
                continue  # text that waits: half a character, or what may become a stop string
            yield index, new

    def _choice(self, index: int, new: CompletionOutput, *, whole: bool) -> Choice:
        fields = self._content(new.text, whole=whole)
        if new.finished():
            fields["stop_reason"] = new.stop_reason
        logprobs = self._logprobs(index, new) if new.logprobs is not None else None
        return Choice(index=index, logprobs=logprobs, finish_reason=new.finish_reason, **fields)

    def _chunk(self, choices: list[Choice]) -> Answer:
        if not self.include_usage:
            return self._answer(self.chunk_name, choices)
        return self._answer(
            self.chunk_name, choices, usage=self._usage_of(choices[0].index) if self._continuous else None
        )

    def _answer(self, name: str, choices: list[Choice], **more: Any) -> Answer:
        return Answer(id=self.id, object=name, created=self.created, model=self.model, choices=choices, **more)


class CompletionReply(Reply):
    name = "cmpl"
    whole_name = chunk_name = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offset: dict[int, int] = {}

    def _content(self, text: str, *, whole: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, index: int, new: CompletionOutput) -> CompletionLogprobs:
        said = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        offset = self._offset.get(index, 0)
        for token, values in zip(new.token_ids, new.logprobs or (), strict=True):
            sampled = values[token]
            said.tokens.append(_text(sampled))
            said.token_logprobs.append(sampled.logprob)
            rising = sorted(values.values(), key=lambda one: one.logprob)  # of tokens with one text the likeliest stays
            said.top_logprobs.append({_text(one): one.logprob for one in rising})
            said.text_offset.append(offset)
            offset += len(_text(sampled))
        self._offset[index] = offset
        return said


class ChatReply(Reply):
    name = "chatcmpl"
    whole_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any, top_logprobs: int = 0) -> None:
        super().__init__(*args)
        self._top = top_logprobs

    def _first_chunks(self) -> Iterator[Answer]:
        for index in range(len(self._place) * self.n):
            start = Text(role="assistant", content="")
            yield self._chunk([Choice(index=index, delta=start, logprobs=None, finish_reason=None)])

    def _content(self, text: str, *, whole: bool) -> dict[str, Any]:
        return {"message": Text(role="assistant", content=text)} if whole else {"delta": Text(content=text)}

    def _logprobs(self, index: int, new: CompletionOutput) -> ChatLogprobs:
        content = []
        for token, values in zip(new.token_ids, new.logprobs or (), strict=True):
            best = sorted(values.values(), key=lambda one: one.rank or 0)[: self._top]
            top = [TokenLogprob(**_token(one)) for one in best]
            content.append(ChatLogprob(**_token(values[token]), top_logprobs=top))
        return ChatLogprobs(content=content)


def _usage(prompt: int, completion: int, cached: int) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=CachedTokens(cached_tokens=cached),
    )


def _text(one: Logprob) -> str:
    return one.decoded_token or ""


def _token(one: Logprob) -> dict[str, Any]:
    text = _text(one)
    return {"token": text, "logprob": one.logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
