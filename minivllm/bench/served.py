"""``bench url=``: a workload against a server with OpenAI's interface, as its clients see it; ours, or another.

Each request is a stream of ``/v1/completions`` with token ids, so that all servers are asked the same. A server keeps
its prefix cache from run to run: each run draws its prompts anew, from the next seed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import numpy as np
from tqdm import tqdm

from minivllm.bench.workloads import BenchRequest, check_fits, make_requests
from minivllm.config.overrides import Override
from minivllm.errors import ConfigError, MinivllmError

if TYPE_CHECKING:
    from minivllm.config.modes import BenchOptions

_CONNECT_TIMEOUT = 30.0  # seconds; as long as a server may take to name its model
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ServedRun:
    """The figures of one run. ``ttft``: from sending a request to its first token; ``tpot``: between its tokens, on
    average; ``itl``: between two messages that bring some; ``latency``: to its last. Requests that failed count in
    ``failed`` only."""

    seconds: float
    failed: int
    tokens_in: int
    tokens_out: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms_mean: float
    ttft_ms_p50: float
    ttft_ms_p90: float
    ttft_ms_p99: float
    tpot_ms_mean: float
    tpot_ms_p50: float
    tpot_ms_p90: float
    tpot_ms_p99: float
    itl_ms_mean: float
    itl_ms_p50: float
    itl_ms_p90: float
    itl_ms_p99: float
    latency_ms_mean: float
    latency_ms_p50: float
    latency_ms_p90: float
    latency_ms_p99: float


# What is read of a server's JSON; anything else in it is passed over, and another type is an error.


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Message(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_MESSAGE = msgspec.json.Decoder(_Message)


@dataclass(slots=True)
class _Answer:
    """What came of a request, by ``time.perf_counter``."""

    sent: float
    came: list[float] = field(default_factory=list)  # when each message with tokens did
    tokens: int = 0
    error: str | None = None


class Server:
    """Asks one server. ``model`` is the first that it lists."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = ""
        self.max_model_len: int | None = None
        self._session = session

    async def find_model(self) -> None:
        """Raises MinivllmError: there is no such server, or it lists no model."""
        where = f"{self.url}/v1/models"
        try:
            timeout = aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT)
            async with self._session.get(where, timeout=timeout) as response:
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            raise MinivllmError(
                f"url={self.url}: no answer from {where} ({_said(error)}); start a server, as with `minivllm serve`"
            ) from error
        if status != 200:
            raise MinivllmError(f"url={self.url}: GET {where} gives {status}: {_reason(text)}")
        try:
            first = msgspec.json.decode(text, type=_Models).data[0]
        except (msgspec.DecodeError, LookupError) as error:
            raise MinivllmError(f"url={self.url}: {where} lists no model in OpenAI's form") from error
        self.model, self.max_model_len = first.id, first.max_model_len

    async def complete(self, request: BenchRequest, sampling: dict[str, Any]) -> _Answer:
        body = {
            **sampling, "model": self.model, "prompt": request.prompt, "max_tokens": request.max_tokens,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        answer = _Answer(time.perf_counter())
        try:
            async with self._session.post(f"{self.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    answer.error = f"{response.status}: {_reason(await response.text())}"
                else:
                    await self._read(response, answer, request.max_tokens, sampling["ignore_eos"])
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            answer.error = _said(error)
        return answer

    async def _read(self, response: aiohttp.ClientResponse, answer: _Answer, wanted: int, whole: bool) -> None:
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
            for choice in message.choices or ():
                answer.came.append(time.perf_counter())
                reason = choice.finish_reason or reason
        if reason is None:
            answer.error = "the stream broke off"
            return
        # a server that does not count sends a message for each token, or all that it was asked for
        answer.tokens = counted or (wanted if reason == "length" else len(answer.came))
        if whole and answer.tokens < wanted:
            answer.error = (
                f"it ended after {answer.tokens} of {wanted} tokens ({reason}), and ignore_eos was asked for; type "
                "workload.ignore_eos=false for a server that does not know it"
            )


async def measure(options: BenchOptions, say: Callable[[str], None]) -> tuple[Server, int, list[ServedRun], str | None]:
    """The server, the number of requests, each run's figures, and why the first request that failed did.

    Args:
        say: is told what happens now.

    Raises:
        MinivllmError: there is no server, or not one request comes back.
        ConfigError: the workload does not fit the model.
    """
    assert options.url is not None
    key = os.environ.get("MINIVLLM_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        server = Server(options.url, session)
        await server.find_model()
        work = options.workload
        sampling = work.request_fields()
        drawn = [_requests(options, number) for number in range(options.repeat)]
        if server.max_model_len is not None:
            for requests in drawn:
                check_fits(work, requests, server.max_model_len)
        (first,) = _requests(options, options.repeat, num_requests=1)  # a prompt that is not measured
        say("warming up")
        warm = await server.complete(replace(first, max_tokens=min(first.max_tokens, _WARM_UP_TOKENS)), sampling)
        if warm.error is not None:
            hint = "; lower workload.max_token_id" if "vocabulary" in warm.error else ""
            raise MinivllmError(f"url={server.url}: the server refuses a first request: {warm.error}{hint}")
        runs, why = [], None
        for number in range(options.repeat):
            say(f"run {number + 1} of {options.repeat}")
            run, failure = await _run(server, drawn[number], sampling, options.max_concurrency)
            runs.append(run)
            why = why or failure
        return server, len(drawn[0]), runs, why


def _requests(options: BenchOptions, number: int, **changes: Any) -> list[BenchRequest]:
    def encode(text: str) -> list[int]:
        raise ValueError("a text has no tokens here; give input_len or prompt_token_ids to measure a server")

    work = replace(options.workload, seed=options.workload.seed + number, **changes)
    return make_requests(work, work.max_token_id + 1, encode)


async def _run(
    server: Server, requests: Sequence[BenchRequest], sampling: dict[str, Any], max_concurrency: int | None
) -> tuple[ServedRun, str | None]:
    turns = asyncio.Semaphore(max_concurrency or len(requests))
    with tqdm(total=len(requests), desc="requests", disable=not sys.stderr.isatty(), leave=False) as bar:
        began = time.perf_counter()

        async def one(request: BenchRequest) -> _Answer:
            await asyncio.sleep(request.arrival - (time.perf_counter() - began))
            async with turns:
                answer = await server.complete(request, sampling)
            bar.update(1)
            return answer

        answers = await asyncio.gather(*map(one, requests))
        seconds = time.perf_counter() - began
    done = [(r, a) for r, a in zip(requests, answers, strict=True) if a.error is None]
    why = next((a.error for a in answers if a.error is not None), None)
    if not done:
        raise MinivllmError(f"url={server.url}: each of {len(requests)} requests failed; the first: {why}")
    return _figures(done, len(requests) - len(done), seconds), why


def _figures(done: Sequence[tuple[BenchRequest, _Answer]], failed: int, seconds: float) -> ServedRun:
    tokens_in = sum(len(request.prompt) for request, _ in done)
    tokens_out = sum(answer.tokens for _, answer in done)
    times: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "latency": []}
    for _, answer in done:
        first, last = answer.came[0], answer.came[-1]
        times["ttft"].append(first - answer.sent)
        times["latency"].append(last - answer.sent)
        times["itl"] += np.diff(answer.came).tolist()
        if answer.tokens > 1:
            times["tpot"].append((last - first) / (answer.tokens - 1))
    figures: dict[str, float] = {}
    for name, values in times.items():
        ms = 1e3 * np.array(values or [0.0])
        figures[f"{name}_ms_mean"] = float(ms.mean())
        figures |= {f"{name}_ms_p{q}": float(np.percentile(ms, q)) for q in (50, 90, 99)}
    return ServedRun(
        seconds=seconds, failed=failed, tokens_in=tokens_in, tokens_out=tokens_out,
        requests_per_s=len(done) / seconds, output_tokens_per_s=tokens_out / seconds,
        total_tokens_per_s=(tokens_in + tokens_out) / seconds, **figures,
    )  # fmt: skip


def check_alone(overrides: Sequence[str]) -> None:
    """Raises ConfigError for a typed key that is not the client's: the server was started with its own."""
    ours = ("mode", "output", "repeat", "url", "max_concurrency", "workload")
    for typed in overrides:
        key = Override.parse(typed).key
        if key.partition(".")[0] not in ours:
            raise ConfigError(f"{typed}: with url= the server has settings of its own; leave {key} out")


def _reason(body: str) -> str:
    """OpenAI's error message, or what there is."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, LookupError, TypeError):
        return " ".join(body.split())[:200] or "nothing"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
