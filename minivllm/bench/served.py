"""``bench url=``: a workload against a server with OpenAI's API, as its clients see it; ours, or another.

Each request is a stream: ``/v1/completions`` with token ids, so that all servers get the same, or
``/v1/chat/completions`` with a text of as many tokens (``texts``). A server keeps its prefix cache between runs, so
each run draws new prompts, from the next seed.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
from tqdm import tqdm

from minivllm.bench.client import CONNECT_TIMEOUT, LOWER, PATHS, Answer, Server
from minivllm.bench.texts import Coder, Texts, local_coder
from minivllm.bench.workloads import BenchRequest, check_fits, make_requests
from minivllm.errors import MinivllmError

if TYPE_CHECKING:
    from minivllm.config.modes import BenchOptions

_WARM_UP_TOKENS = 8
_READ_AHEAD = 2 << 20  # bytes; an event may be twice as long, which log-probabilities of many tokens are


@dataclass(frozen=True, slots=True)
class ServedRun:
    """The figures of one run. ``ttft``: from sending a request to its first token; ``tpot``: mean time between tokens;
    ``itl``: between two messages with tokens; ``latency``: to the last token. Failed requests count only in ``failed``.
    ``uncounted``: requests whose tokens the server did not count; their counts are estimates."""

    seconds: float
    failed: int
    uncounted: int
    tokens_in: int
    tokens_out: int
    tokens_asked: int
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


async def measure(
    options: BenchOptions, tokenizer: str | None, say: Callable[[str], None]
) -> tuple[Server, int, list[ServedRun], str | None]:
    """Returns the server, the number of requests, each run's figures, and why the first failed request failed.

    Args:
        tokenizer: a folder or repository with the model's, to make text with; None: use the server's.
        say: receives progress messages.

    Raises:
        MinivllmError: there is no server, or no request succeeds.
        ConfigError: the workload does not fit the model.
    """
    assert options.url is not None
    key = os.environ.get("MINIVLLM_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector, read_bufsize=_READ_AHEAD
    ) as session:
        server = Server(options.url, options.endpoint, session)
        await server.find_model()
        work = options.workload
        sampling = _sampling(options)
        say("drawing the prompts")
        size = min(work.max_token_id + 1, server.vocab_size or sys.maxsize)
        texts = await asyncio.to_thread(_texts, server.coder(), tokenizer, options, size)
        drawn, spare = await asyncio.to_thread(_draw, options, texts, size)
        if server.max_model_len is not None:
            for requests in drawn:
                check_fits(work, requests, server.max_model_len)
        say("warming up")
        warm = await server.complete(spare, sampling)
        if warm.error is not None:
            (other,) = PATHS.keys() - {options.endpoint}
            hint = LOWER if "vocabulary" in warm.error else ""
            if warm.error.startswith("404:"):
                hint = f"; if it has no {PATHS[options.endpoint]}, type endpoint={other}"
            raise MinivllmError(f"url={server.url}: the server refuses a first request: {warm.error}{hint}")
        runs, why = [], None
        for number in range(options.repeat):
            say(f"run {number + 1} of {options.repeat}")
            run, failure = await _run(server, drawn[number], sampling, options.max_concurrency)
            runs.append(run)
            why = why or failure
        return server, len(drawn[0]), runs, why


def _sampling(options: BenchOptions) -> dict[str, Any]:
    """The sampling fields of each request, in the endpoint's terms."""
    sampling = options.workload.request_fields()
    if options.endpoint == "chat" and (count := sampling.pop("logprobs", None)) is not None:
        sampling |= {"logprobs": True, "top_logprobs": count}
    return sampling


def _texts(served: Coder, tokenizer: str | None, options: BenchOptions, size: int) -> Texts | None:
    """Makes text for prompts from the token ids below ``size``; None if tokens are sent."""
    if options.endpoint == "completions":
        return None
    if tokenizer is None:
        return Texts(served, size)
    coder, vocab_size = local_coder(tokenizer)
    return Texts(coder, min(size, vocab_size))


def _draw(options: BenchOptions, texts: Texts | None, size: int) -> tuple[list[list[BenchRequest]], BenchRequest]:
    """The requests of each run; and one to warm up with, whose prompt is none of theirs, also if a trace names them."""
    drawn = [_requests(options, texts, size, number) for number in range(options.repeat)]
    first, draw = drawn[0][0], random.Random(options.workload.seed + options.repeat)
    ids = range(size) if texts is None else list(texts.words)
    prompt = [draw.choice(ids) for _ in first.prompt]
    text = None if texts is None else texts.of(prompt)
    return drawn, BenchRequest(prompt, min(first.max_tokens, _WARM_UP_TOKENS), text=text)


def _requests(options: BenchOptions, texts: Texts | None, size: int, number: int) -> list[BenchRequest]:
    def encode(text: str) -> list[int]:
        raise ValueError(
            "a text has no tokens here; give input_len or prompt_token_ids, or type endpoint=chat, which sends texts"
        )

    work = replace(options.workload, seed=options.workload.seed + number)
    if texts is None:
        return make_requests(work, size, encode)
    requests = make_requests(work, list(texts.words), texts.encode)
    return [replace(request, text=texts.of(request.prompt)) for request in requests]


async def _run(
    server: Server, requests: Sequence[BenchRequest], sampling: dict[str, Any], max_concurrency: int | None
) -> tuple[ServedRun, str | None]:
    turns = asyncio.Semaphore(max_concurrency or len(requests))
    with tqdm(total=len(requests), desc="requests", disable=not sys.stderr.isatty(), leave=False) as bar:
        began = time.perf_counter()

        async def one(request: BenchRequest) -> Answer:
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


def _figures(done: Sequence[tuple[BenchRequest, Answer]], failed: int, seconds: float) -> ServedRun:
    tokens_in = sum(answer.tokens_in or len(request.prompt) for request, answer in done)
    tokens_out = sum(answer.tokens for _, answer in done)
    times: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "latency": []}
    for _, answer in done:
        first = answer.came[0]
        times["ttft"].append(first - answer.sent)
        times["latency"].append(answer.ended - answer.sent)
        times["itl"] += np.diff(answer.came).tolist()
        if answer.tokens > 1:
            times["tpot"].append((answer.ended - first) / (answer.tokens - 1))
    figures: dict[str, float] = {}
    for name, values in times.items():
        ms = 1e3 * np.array(values or [0.0])
        figures[f"{name}_ms_mean"] = float(ms.mean())
        figures |= {f"{name}_ms_p{q}": float(np.percentile(ms, q)) for q in (50, 90, 99)}
    return ServedRun(
        seconds=seconds, failed=failed, uncounted=sum(answer.uncounted for _, answer in done),
        tokens_in=tokens_in, tokens_out=tokens_out, tokens_asked=sum(request.max_tokens for request, _ in done),
        requests_per_s=len(done) / seconds, output_tokens_per_s=tokens_out / seconds,
        total_tokens_per_s=(tokens_in + tokens_out) / seconds, **figures,
    )  # fmt: skip
