"""Answers, whole or in chunks: ``responses``, built from the engine's outputs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic_core import to_json

from minivllm.core.outputs import CompletionOutput, Logprob, RequestOutput
from minivllm.serve.call_readers import CallReader
from minivllm.serve.echo import Echo, emptied, own_and_best
from minivllm.serve.reasoning import Thoughts
from minivllm.serve.responses import (
    Answer,
    CachedTokens,
    Call,
    ChatLogprob,
    ChatLogprobs,
    Choice,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    ReasoningTokens,
    Text,
    TokenLogprob,
    Usage,
)
from minivllm.serve.tool_calls import ToolUse

_LEAST = -9999.0  # replaces minus infinity, which JSON lacks, as in vLLM
_MARK = "\ue000 text \ue000"  # marks the text's place in a chunk's JSON


class Reply(ABC):
    """An answer in progress: maps outputs to choices and counts tokens.

    ``request_ids``: the engine's, one per prompt, each with ``n`` completions. For streams, ``include_usage``: whether
    the last chunk has the total usage; ``continuous_usage``: whether each chunk has that of its choice so far.
    ``prompt_logprobs``: the number of best tokens per prompt position in a whole answer; None: no log-probabilities.
    """

    name: ClassVar[str]
    whole_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(
        self, reply_id: str, model: str, request_ids: Sequence[str], n: int, include_usage: bool,
        continuous_usage: bool = False, *, prompt_logprobs: int | None = None,
    ) -> None:  # fmt: skip
        self.id, self.model, self.n, self.include_usage = reply_id, model, n, include_usage
        self.created = int(time.time())
        self._continuous, self._prompt_logprobs = continuous_usage, prompt_logprobs
        self._place = {name: i for i, name in enumerate(request_ids)}
        self._ended: set[int] = set()
        self._prompt_tokens: dict[int, int] = {}  # by prompt, as its outputs come
        self._cached_tokens: dict[int, int] = {}
        self._completion_tokens: Counter[int] = Counter()  # by choice
        self._frames: dict[tuple[int, str], tuple[bytes, bytes]] = {}  # by choice and kind of text

    @abstractmethod
    def _content(self, index: int, text: str, *, whole: bool) -> dict[str, Any]:
        """The fields of choice ``index`` that hold ``text``."""

    @abstractmethod
    def _logprobs(self, index: int, new: CompletionOutput) -> CompletionLogprobs | ChatLogprobs:
        """The log-probabilities of ``new``, which must have them."""

    @abstractmethod
    def _add_prompt(self, answer: Answer, prompt: int, logprobs: PromptLogprobs) -> None:
        """Add a prompt's log-probabilities to a whole answer."""

    def _first_chunks(self) -> Iterator[Answer]:
        """The first chunks of a stream, sent together with the first output, as in vLLM: benchmarks take the first
        chunk as the first token."""
        return iter(())

    def whole(self, outputs: Iterable[RequestOutput]) -> Answer:
        choices = []
        of_prompts: dict[int, PromptLogprobs] = {}
        for output in outputs:
            self._count(output)
            choices += [self._choice(index, new, whole=True) for index, new in self._news(output)]
            if (most := self._prompt_logprobs) is not None:
                of_prompts[self._place[output.request_id]] = _prompt_logprobs(output, most)
        choices.sort(key=lambda choice: choice.index)
        answer = self._answer(self.whole_name, choices, usage=self.usage())
        for prompt, logprobs in of_prompts.items():
            self._add_prompt(answer, prompt, logprobs)
        return answer

    def chunks(self, output: RequestOutput) -> Iterator[bytes]:
        """A delta as JSON, one chunk per choice."""
        begins = not self._prompt_tokens
        self._count(output)
        if begins:
            yield from (chunk.json_bytes() for chunk in self._first_chunks())
        for index, new in self._news(output):
            if (alone := self._text_alone(index, new)) is not None:  # nearly all of them
                before, after = self._frame(index, alone[0])
                yield before + to_json(alone[1]) + after
            else:
                yield self._chunk([self._choice(index, new, whole=False)]).json_bytes()

    def _text_alone(self, index: int, new: CompletionOutput) -> tuple[str, str] | None:
        """The text of a chunk of ``new`` that contains nothing else, and its kind: of kinds, frames differ."""
        alone = new.finish_reason is None and new.logprobs is None and not self._continuous
        return ("text", new.text) if alone else None

    def _frame(self, index: int, kind: str) -> tuple[bytes, bytes]:
        """The JSON before and after the text of a text-only chunk of choice ``index``."""
        if (index, kind) not in self._frames:
            choice = self._choice(index, self._marked(index, kind), whole=False)
            before, after = self._chunk([choice]).json_bytes().split(to_json(_MARK))
            self._frames[index, kind] = before, after
        return self._frames[index, kind]

    def _marked(self, index: int, kind: str) -> CompletionOutput:
        """An output whose text of this kind is ``_MARK``."""
        return CompletionOutput(index, _MARK, [])

    def last_chunks(self) -> Iterator[Answer]:
        if self.include_usage:
            yield self._answer(self.chunk_name, [], usage=self.usage())

    def usage(self) -> Usage:
        cached = sum(self._cached_tokens.values())
        return _usage(sum(self._prompt_tokens.values()), self._completion_tokens.total(), cached)

    def _usage_of(self, index: int) -> Usage:
        """The usage of a choice so far, and of its prompt."""
        prompt, completion = index // self.n, self._completion_tokens[index]
        return _usage(self._prompt_tokens.get(prompt, 0), completion, self._cached_tokens.get(prompt, 0))

    def _count(self, output: RequestOutput) -> None:
        prompt = self._place[output.request_id]
        self._prompt_tokens[prompt] = len(output.prompt_token_ids)
        self._cached_tokens[prompt] = output.num_cached_tokens

    def _news(self, output: RequestOutput) -> Iterator[tuple[int, CompletionOutput]]:
        """The choices with something new to send, and what."""
        for index, new in self._counted(output):
            if new.text or new.logprobs or new.finished():  # else text is held back: it may become a stop string
                yield index, new

    def _counted(self, output: RequestOutput) -> Iterator[tuple[int, CompletionOutput]]:
        """The choices that have not ended, and what is new, its tokens counted."""
        first = self._place[output.request_id] * self.n
        for new in output.outputs:
            index = first + new.index
            if index in self._ended:
                continue
            self._completion_tokens[index] += len(new.token_ids)
            if new.finished():
                self._ended.add(index)
            yield index, new

    def _choice(self, index: int, new: CompletionOutput, *, whole: bool) -> Choice:
        fields = self._content(index, new.text, whole=whole)
        if new.finished():
            fields["stop_reason"] = new.stop_reason
        logprobs = self._logprobs(index, new) if new.logprobs is not None else None
        return Choice(index=index, logprobs=logprobs, finish_reason=self._finish_reason(index, new), **fields)

    def _finish_reason(self, index: int, new: CompletionOutput) -> str | None:
        return new.finish_reason

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

    def __init__(self, *args: Any, echo: Echo | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self._offset: dict[int, int] = {}
        self._echo = echo
        self._unsaid = set(self._place if echo is not None else ())  # requests whose echo is still to come

    def _news(self, output: RequestOutput) -> Iterator[tuple[int, CompletionOutput]]:
        if self._echo is not None:
            if self._echo.only:
                output = emptied(output)
            if output.request_id in self._unsaid:
                self._unsaid.remove(output.request_id)
                output = self._echo.first(self._place[output.request_id], output)
        return super()._news(output)

    def _add_prompt(self, answer: Answer, prompt: int, logprobs: PromptLogprobs) -> None:
        for choice in answer.choices[prompt * self.n : (prompt + 1) * self.n]:
            choice.prompt_logprobs = logprobs

    def _content(self, index: int, text: str, *, whole: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, index: int, new: CompletionOutput) -> CompletionLogprobs:
        said = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        offset = self._offset.get(index, 0)
        for values in new.logprobs or ():
            token = next(iter(values.values()), None)
            if token is None:  # the prompt's first
                assert self._echo is not None
                text, logprob, top = self._echo.first_tokens[index // self.n], None, None
            else:
                text, logprob = _text(token), _value(token)
                rising = sorted(values.values(), key=lambda one: one.logprob)
                top = {_text(one): _value(one) for one in rising}  # of tokens with one text the likeliest stays
            said.tokens.append(text)
            said.token_logprobs.append(logprob)
            said.top_logprobs.append(top)
            said.text_offset.append(offset)
            offset += len(text)
        self._offset[index] = offset
        return said


class ChatReply(Reply):
    name = "chatcmpl"
    whole_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, *args: Any, top_logprobs: int = 0, tools: ToolUse | None = None,
        thoughts: Callable[[], Thoughts] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """``thoughts``: makes a choice's; None: there is no reasoning."""
        super().__init__(*args, **more)
        self._top, self._tools, self._new_thoughts = top_logprobs, tools, thoughts
        self._thoughts: dict[int, Thoughts] = {}  # by choice
        self._reasoning: dict[int, str] = {}  # by choice, not sent yet
        self._readers: dict[int, CallReader] = {}  # by choice
        self._calls: dict[int, list[Call]] = {}  # by choice, not sent yet
        self._num_calls: Counter[int] = Counter()

    def _first_chunks(self) -> Iterator[Answer]:
        for index in range(len(self._place) * self.n):
            start = Text(role="assistant", content="")
            yield self._chunk([Choice(index=index, delta=start, logprobs=None, finish_reason=None)])

    def _news(self, output: RequestOutput) -> Iterator[tuple[int, CompletionOutput]]:
        """The text without reasoning and, with tools, without calls, which go to ``_content``."""
        for index, new in self._counted(output):
            if self._new_thoughts is not None:
                if index not in self._thoughts:
                    self._thoughts[index] = self._new_thoughts()
                reasoning, new = self._thoughts[index].split(new)
                if reasoning:
                    self._reasoning[index] = reasoning
            if self._tools is None:
                if index in self._reasoning or new.text or new.finished() or new.logprobs:
                    yield index, new
                continue
            if index not in self._readers:
                self._readers[index] = self._tools.reader()
            text, calls = self._readers[index].read(new.text, last=new.finished())
            if self._tools.one_alone and self._tools.tag is None:
                calls = calls[: 1 - self._num_calls[index]]
            if calls:
                self._calls[index] = calls
            if calls or text or index in self._reasoning or new.finished() or new.logprobs:
                yield index, replace(new, text=text)

    def usage(self) -> Usage:
        return _with_reasoning(super().usage(), self._thoughts.values())

    def _usage_of(self, index: int) -> Usage:
        mine = [self._thoughts[index]] if index in self._thoughts else []
        return _with_reasoning(super()._usage_of(index), mine)

    def _text_alone(self, index: int, new: CompletionOutput) -> tuple[str, str] | None:
        if index in self._calls or (alone := super()._text_alone(index, new)) is None:
            return None
        if index not in self._reasoning:
            return alone
        return None if new.text else ("reasoning", self._reasoning.pop(index))

    def _marked(self, index: int, kind: str) -> CompletionOutput:
        if kind != "reasoning":
            return super()._marked(index, kind)
        self._reasoning[index] = _MARK
        return CompletionOutput(index, "", [])

    def _content(self, index: int, text: str, *, whole: bool) -> dict[str, Any]:
        calls, reasoning = self._calls.pop(index, []), self._reasoning.pop(index, None)
        for call in calls:
            self._num_calls[index] += call.id is not None
            if not whole:
                call.index = self._num_calls[index] - 1
        if whole:
            message = Text(role="assistant", content=text if text or not (calls or reasoning) else None)
        else:
            message = Text(content=text) if text or not (calls or reasoning) else Text()
        if reasoning:
            message.reasoning = reasoning
        if calls:
            message.tool_calls = calls
        return {"message": message} if whole else {"delta": message}

    def _finish_reason(self, index: int, new: CompletionOutput) -> str | None:
        called = self._tools is not None and self._num_calls[index] and not self._tools.named
        whole = called and new.finish_reason == "stop" and not self._readers[index].within
        return "tool_calls" if whole else new.finish_reason

    def _add_prompt(self, answer: Answer, prompt: int, logprobs: PromptLogprobs) -> None:
        answer.prompt_logprobs = logprobs

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


def _with_reasoning(usage: Usage, thoughts: Iterable[Thoughts]) -> Usage:
    usage.completion_tokens_details = ReasoningTokens(reasoning_tokens=sum(one.tokens for one in thoughts))
    return usage


def _prompt_logprobs(output: RequestOutput, most: int) -> PromptLogprobs:
    def told(one: Logprob) -> PromptLogprob:
        return PromptLogprob(logprob=_value(one), rank=one.rank, decoded_token=one.decoded_token)

    of_places = (own_and_best(values, most) for values in output.prompt_logprobs or ())
    return [{token: told(one) for token, one in values.items()} or None for values in of_places]


def _value(one: Logprob) -> float:
    return one.logprob if one.logprob > _LEAST else _LEAST


def _text(one: Logprob) -> str:
    return one.decoded_token or ""


def _token(one: Logprob) -> dict[str, Any]:
    text = _text(one)
    return {"token": text, "logprob": _value(one), "bytes": None if "\ufffd" in text else list(text.encode())}
