"""A client for servers with OpenAI's API: requests one completion at a time and records when its tokens arrive."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import msgspec

from minivllm.bench.texts import Coder
from minivllm.bench.workloads import BenchRequest
from minivllm.errors import MinivllmError

CONNECT_TIMEOUT = 30.0  # seconds; as long as a server may take to name its model
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}  # by endpoint=
LOWER = "; lower workload.max_token_id"  # the way out of ids that a model does not have

_FAILURES = aiohttp.ClientError, TimeoutError, ValueError, OSError  # of a request, or of what comes back

T = TypeVar("T")

# What is read of a server's JSON: other fields are ignored, other types are errors.


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    vocab_size: int | None = None  # only minivllm has it


class _Models(msgspec.Struct):
    data: list[_Model]


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    delta: _Delta | None = None  # of a chat

    def brings_token(self) -> bool:
        """A chat's first message may have only a role, its last only a finish reason. One with neither, and without
        text, stands for a token that does not complete a character."""
        delta = self.delta
        if delta is None or delta.content or delta.reasoning or delta.reasoning_content:
            return True
        return delta.role is None and self.finish_reason is None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Message(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_MESSAGE = msgspec.json.Decoder(_Message)


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


@dataclass(slots=True)
class Answer:
    """A request's result; times are ``time.perf_counter``."""

    sent: float
    came: list[float] = field(default_factory=list)  # when each message with tokens did
    ended: float = 0.0
    tokens: int = 0
    tokens_in: int | None = None  # None: the server does not say
    uncounted: bool = True
    error: str | None = None


class Server:
    """Sends requests to one server. ``model``: the first that it lists."""

    def __init__(self, url: str, endpoint: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.endpoint = endpoint
        self.model = ""
        self.max_model_len: int | None = None
        self.vocab_size: int | None = None
        self._session = session

    async def find_model(self) -> None:
        """Raises MinivllmError if there is no such server, or it lists no model."""
        where = f"{self.url}/v1/models"
        try:
            timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT)
            async with self._session.get(where, timeout=timeout) as response:
                status, text = response.status, await response.text()
        except _FAILURES as error:
            raise MinivllmError(
                f"url={self.url}: no answer from {where} ({_said(error)}); start a server, as with `minivllm serve`"
            ) from error
        if status != 200:
            key = "; set MINIVLLM_API_KEY to its key" if status == 401 else ""
            raise MinivllmError(f"url={self.url}: GET {where} gives {status}: {_reason(text)}{key}")
        try:
            first = msgspec.json.decode(text, type=_Models).data[0]
        except (msgspec.DecodeError, LookupError) as error:
            raise MinivllmError(f"url={self.url}: {where} lists no model in OpenAI's form") from error
        self.model, self.max_model_len, self.vocab_size = first.id, first.max_model_len, first.vocab_size

    def coder(self) -> Coder:
        """Its own tokenizer, over HTTP; for threads other than the event loop's."""
        loop = asyncio.get_running_loop()

        def ask(path: str, answer: type[T], **body: Any) -> T:
            asked = self._ask(path, {"model": self.model, **body}, answer)
            return asyncio.run_coroutine_threadsafe(asked, loop).result()

        return Coder(
            lambda text: ask("/tokenize", _Tokens, prompt=text, add_special_tokens=False).tokens,
            lambda ids: ask("/detokenize", _Text, tokens=list(ids)).prompt,
        )

    async def _ask(self, path: str, body: dict[str, Any], answer: type[T]) -> T:
        try:
            async with self._session.post(f"{self.url}{path}", json=body) as response:
                text = await response.text()
                if response.status == 200:
                    return msgspec.json.decode(text, type=answer)
                why = f"{response.status}: {_reason(text)}"
        except _FAILURES as error:
            why = _said(error)
        name = self.model if "/" in self.model else "ORG/NAME"
        instead = f"; name its model's tokenizer instead, a folder or repository: model.tokenizer={name}"
        raise MinivllmError(
            f"url={self.url}: POST {path}, which makes text of tokens for endpoint=chat, gives {why}"
            + (LOWER if "vocabulary" in why else instead)
        )

    async def complete(self, request: BenchRequest, sampling: dict[str, Any]) -> Answer:
        said = {"role": "user", "content": request.text}
        body = {
            **sampling, **({"prompt": request.prompt} if request.text is None else {"messages": [said]}),
            "model": self.model, "max_tokens": request.max_tokens,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        answer = Answer(time.perf_counter())
        try:
            async with self._session.post(self.url + PATHS[self.endpoint], json=body) as response:
                if response.status != 200:
                    answer.error = f"{response.status}: {_reason(await response.text())}"
                else:
                    await self._read(response, answer, request.max_tokens, sampling["ignore_eos"])
        except _FAILURES as error:
            answer.error = _said(error)
        return answer

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer, wanted: int, whole: bool) -> None:
        """``whole``: whether fewer tokens than ``wanted`` are an error."""
        counted, reason = None, None
        async for line in response.content:  # to its end, so that the connection serves the next request
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]" or not line.startswith(b"data:"):
                continue
            message = _MESSAGE.decode(data)
            if message.error is not None:
                answer.error = _reason(data.decode())
                return
            if message.usage is not None:
                counted = message.usage.completion_tokens or counted
                answer.tokens_in = message.usage.prompt_tokens or answer.tokens_in
            for choice in message.choices or ():
                answer.ended = time.perf_counter()
                reason = choice.finish_reason or reason
                if choice.brings_token():
                    answer.came.append(answer.ended)
        if reason is None:
            answer.error = "the stream broke off"
            return
        answer.came = answer.came or [answer.ended]  # its tokens had no text
        answer.uncounted = counted is None or answer.tokens_in is None
        # a server that does not count sends a message for each token, or all that it was asked for
        answer.tokens = counted or (wanted if reason == "length" else len(answer.came))
        if whole and counted is not None and counted < wanted:
            answer.error = (
                f"it ended after {answer.tokens} of {wanted} tokens ({reason}), and ignore_eos was asked for; type "
                "workload.ignore_eos=false for a server that does not know it"
            )


def _reason(body: str) -> str:
    """OpenAI's error message, or the body."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, LookupError, TypeError):
        return " ".join(body.split())[:200] or "nothing"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
