"""What is refused, or forgotten, before it costs anybody time: large bodies, long texts, what nobody waits for."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock

import httpx
import pytest
import uvicorn
from helpers import byte_level_tokenizer
from running import Running, serving, told, until
from tokenizers import AddedToken, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from uvicorn.server import ServerState

from minivllm import LLM, RequestOutput
from minivllm.core.outputs import CompletionOutput, Logprob
from minivllm.models.tokenizer import ByteTokenizer, CheckpointTokenizer
from minivllm.serve import app as app_module
from minivllm.serve.conversation import MAX_MESSAGES
from minivllm.serve.generation import joined
from minivllm.serve.http_protocol import HeadLimit
from minivllm.serve.protocol import MAX_IDS
from minivllm.serve.text_lengths import longest_token

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


# --------------------------------------------------------------------------- large bodies


def test_a_body_that_is_too_long_is_refused(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "MAX_BODY", 100_000)
    headers = {"Content-Type": "application/json"}

    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(30):
            yield b"a" * 10_000
        yield b'"}'

    with serving(make_llm()) as server:
        told(server.post(COMPLETIONS, prompt="a" * 100_000), 413, "the body has more than 100000 bytes")
        told(server.client.post(COMPLETIONS, content=pieces(), headers=headers), 413, "more than 100000 bytes")
        assert server.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 200
        url = server.client.base_url
        with socket.create_connection((url.host, url.port), timeout=10) as client:  # which sends no body at all
            said = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100001"
            client.sendall(said.encode() + b"\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 413")
        server.settled()


@pytest.mark.parametrize("begins", [b"GET /health HTTP/1.1\r\nHost: a\r\nX: ", b"GET /", b"GET /health HTTP/1.1\r\n"])
def test_a_head_without_end_is_refused(server: Running, begins: bytes) -> None:
    """One header, the path, or many headers; also behind a request that was answered."""
    url, more = server.client.base_url, b"a: b\r\n" * 10_000 if begins.endswith(b"\n") else b"a" * 60_000
    for before in (b"", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"):
        with socket.create_connection((url.host, url.port), timeout=10) as client:
            client.sendall(before)
            assert not before or client.recv(1000).startswith(b"HTTP/1.1 200")
            client.sendall(begins)
            said = b""
            try:
                for _ in range(500):
                    client.sendall(more)
                    time.sleep(0.001)
            except OSError:
                pass  # it is closed
            else:
                pytest.fail("30 MB of it were taken")
            try:
                said = client.recv(1000)
            except OSError:
                continue  # what was sent in vain made the other side forget its answer
        assert said.startswith(b"HTTP/1.1 431") and b"more than 65536 bytes" in said
    assert server.client.get("/health", headers={"X": "a" * 50_000}).status_code == 200
    server.settled()


def test_a_head_that_begins_where_a_long_body_ends_is_short(server: Running) -> None:
    url, body = server.client.base_url, b'{"prompt": "' + b"a" * 150_000 + b'"}'
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((url.host, url.port), timeout=10) as client:
        client.sendall(head.encode() + body + b"GET /hea")
        time.sleep(0.2)
        client.sendall(b"lth HTTP/1.1\r\nHost: a\r\n")
        time.sleep(0.1)
        client.sendall(b"Connection: close\r\n\r\n")
        said = b""
        while piece := client.recv(1 << 16):
            said += piece
    assert said.count(b"HTTP/1.1 200") == 2 and b"HTTP/1.1 4" not in said


def test_long_lists_are_refused_before_each_of_them_is_looked_at(server: Running) -> None:
    ids = server.post(COMPLETIONS, prompt=[5] * 300_000)
    assert told(ids, 400, "the prompt has 300000 tokens, and max_model", "prompt")["code"] == "context_length_exceeded"
    told(server.post(COMPLETIONS, prompt=[[5], [5] * 300_000]), 400, "prompt 1: the prompt has 300000 tokens", "prompt")
    mixed = [5] * 300_000 + ["a"]
    told(server.post(COMPLETIONS, prompt=mixed), 400, "the prompt has 300001 tokens", "prompt")
    told(server.post("/detokenize", tokens=["a"] * (MAX_IDS + 1)), 400, f"tokens: {MAX_IDS + 1} are more", "tokens")
    messages = [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)
    for path in (CHAT, "/tokenize"):
        told(server.post(path, messages=messages), 400, f"messages: {MAX_MESSAGES + 1} are more than", "messages")


def test_what_is_not_read_is_put_together_in_linear_time() -> None:
    """8.6 ms a step with 1,000 tokens of 128 completions that nobody read, and 48 with 4,000, if all was copied."""

    def delta() -> RequestOutput:
        new = [CompletionOutput(i, "a", [5], -1.0 * i, [{5: Logprob(-1.0)}]) for i in range(128)]
        return RequestOutput("r", None, [1], new)

    whole, times = delta(), []
    whole.prompt_logprobs = [None]
    for _ in range(4000):
        then, began = delta(), time.perf_counter()
        whole = joined(whole, then)
        times.append(time.perf_counter() - began)
    assert whole.prompt_logprobs == [None] and not whole.finished
    for i, one in enumerate(whole.outputs):
        assert (one.text, one.token_ids, one.cumulative_logprob) == ("a" * 4001, [5] * 4001, -1.0 * i)
        assert one.logprobs is not None and len(one.logprobs) == 4001 and one.finish_reason is None
    last = RequestOutput("r", None, [1], [CompletionOutput(i, "", [], finish_reason="stop") for i in range(128)], True)
    assert joined(whole, last).finished and {one.finish_reason for one in whole.outputs} == {"stop"}
    assert sorted(times[-1000:])[500] < 4 * sorted(times[:1000])[500] + 1e-3


# --------------------------------------------------------------------------- long texts


def test_a_text_that_must_be_too_long_never_becomes_tokens(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, seen = server.engine_client.tokenizer, []
    encode_batch = tokenizer.encode_batch
    monkeypatch.setattr(
        tokenizer, "encode_batch", lambda texts, **how: (seen.append(texts), encode_batch(texts, **how))[1]
    )
    long = "x " * 50_000
    said = "tokens or more, and max_model_len=1024 leaves no room"
    for path, body, begins, param in (
        (COMPLETIONS, {"prompt": long}, "the prompt has", "prompt"),
        (COMPLETIONS, {"prompt": ["a", [5], long]}, "prompt 2: the prompt has", "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": long}]}, "the prompt has", "messages"),
    ):
        error = told(server.post(path, **body), 400, said, param)
        assert error["message"].startswith(begins) and error["code"] == "context_length_exceeded"
    assert not seen
    told(server.post(COMPLETIONS, prompt="x " * 1000), 400, "tokens, and max_model_len=1024", "prompt")
    assert server.post("/tokenize", prompt=long).json()["count"] >= 50_000
    assert len(seen) == 2


def test_no_token_stands_for_more_than_the_longest(tmp_path: Path) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    rng = random.Random(0)
    parts = ["hello", " world", "\n", "  ", "é", "e\u0301", "\u1100\u1161\u11a8", "🙂", "<|im_start|>", "1234", "\0"]
    for tokenizer in (CheckpointTokenizer(tmp_path), ByteTokenizer(300)):
        longest = longest_token(tokenizer)
        assert longest is not None
        for _ in range(200):
            text = "".join(rng.choices(parts, k=rng.randrange(1, 40)))
            assert len(tokenizer.encode(text)) * longest >= len(text.encode())


def lowercasing(its: PreTrainedTokenizerFast) -> None:
    its.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])


def removing(its: PreTrainedTokenizerFast) -> None:
    cut = pre_tokenizers.Split(" ", "removed")
    its.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel()])


def no_bytes(its: PreTrainedTokenizerFast) -> None:
    its.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


def stripping(its: PreTrainedTokenizerFast) -> None:
    its.add_tokens([AddedToken("<s>", rstrip=True)])


@pytest.mark.parametrize("change", [lowercasing, removing, no_bytes, stripping])
def test_of_others_nothing_is_known(tmp_path: Path, change: Callable[[PreTrainedTokenizerFast], None]) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    tokenizer = CheckpointTokenizer(tmp_path)
    assert longest_token(tokenizer) is not None
    change(tokenizer.hf_tokenizer)
    assert longest_token(tokenizer) is None


def test_many_texts_become_tokens_in_turns(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """And come out in their places, ids among them, and the same one twice."""
    prompts: list[Any] = [f"text number {i}" for i in range(20)] + [[5, 6], "text number 3"]
    body = {"prompt": prompts, "max_tokens": 3, "temperature": 0}
    at_once = server.post(COMPLETIONS, **body).json()
    tokenizer, seen = server.engine_client.tokenizer, []
    encode_batch = tokenizer.encode_batch
    monkeypatch.setattr(
        tokenizer, "encode_batch", lambda texts, **how: (seen.append(texts), encode_batch(texts, **how))[1]
    )
    monkeypatch.setattr(app_module, "_PIECE", 50)
    other = server.post(COMPLETIONS, **body).json()
    assert [one["text"] for one in other["choices"]] == [one["text"] for one in at_once["choices"]]
    assert other["usage"]["prompt_tokens"] == at_once["usage"]["prompt_tokens"]
    assert len(seen) == 7 and [text for some in seen for text in some] == prompts[:20]


# --------------------------------------------------------------------------- nobody waits any more


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_who_left_the_tokenizers_queue_has_no_turn(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    tokenizer, begun, go_on = server.engine_client.tokenizer, threading.Event(), threading.Event()
    encode_batch = tokenizer.encode_batch
    turns = 0

    def held(texts: list[str], **how: Any) -> list[list[int]]:
        nonlocal turns
        turns += 1
        begun.set()
        assert go_on.wait(20)
        return encode_batch(texts, **how)

    monkeypatch.setattr(tokenizer, "encode_batch", held)
    first = threading.Thread(target=server.post, args=(COMPLETIONS,), kwargs={"prompt": "b", "max_tokens": 1})
    first.start()
    assert begun.wait(20)
    for _ in range(5):
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(path, json=body, timeout=0.1)
    time.sleep(0.1)  # the last one's leave has to come
    go_on.set()
    first.join()
    assert server.post(COMPLETIONS, prompt="c", max_tokens=1).status_code == 200
    assert turns == 2
    until(lambda: server.engine_client.num_completions == 0)


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_body_behind_an_upgrade_is_this_requests_and_no_other(server: Running, at_once: bool) -> None:
    """As Java's client and ``curl --http2`` ask."""
    url, body = server.client.base_url, b'{"prompt": "a", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + UPGRADE + b"Content-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection((url.host, url.port), timeout=10) as client:
        for _ in range(2):  # and it goes on
            for piece in [request] if at_once else [request[:45], request[45 : -len(body)], body]:
                client.sendall(piece)
                time.sleep(0.05)
            said = client.recv(1 << 16)
            assert said.startswith(b"HTTP/1.1 200") and b'"text_completion"' in said


class Heard:
    """What ``HeadLimit`` makes of pieces: the requests that an application gets, and what is answered."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []
        self.said = b""

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.requests.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def hear(self, pieces: list[bytes]) -> None:
        config = uvicorn.Config(self.app, interface="asgi3", log_config=None)
        config.load()
        protocol = HeadLimit(config=config, server_state=ServerState(), app_state={})
        transport = Mock(spec=asyncio.Transport)
        transport.get_extra_info.return_value = None
        transport.is_closing.return_value = False
        transport.write.side_effect = lambda data: setattr(self, "said", self.said + data)
        protocol.connection_made(transport)
        for piece in pieces:
            if not transport.close.called:
                protocol.data_received(piece)
            for _ in range(8):
                await asyncio.sleep(0)


def heard(*pieces: bytes) -> Heard:
    found = Heard()
    asyncio.run(found.hear(list(pieces)))
    return found


BODY = b"x\r\nUpgrade: y\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n"
ASKED = b"POST /a HTTP/1.1\r\nHost: a\r\n" + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
NEXT = b"GET /b HTTP/1.1\r\nHost: a\r\n\r\n"


def test_a_request_is_the_same_wherever_it_is_cut() -> None:
    whole = [("/a", BODY), ("/b", b"")]
    assert heard(ASKED, NEXT).requests == whole == heard(ASKED + NEXT).requests
    for at in range(1, len(ASKED)):
        assert heard(ASKED[:at], ASKED[at:], NEXT).requests == whole, at
    for size in (1, 2, 3, 7):
        stream = ASKED + NEXT
        assert heard(*(stream[i : i + size] for i in range(0, len(stream), size))).requests == whole, size


def test_an_upgrade_behind_a_pipelined_request_ends_the_connection() -> None:
    found = heard(NEXT + ASKED)
    assert b"HTTP/1.1 400" in found.said and not {"/a", "/smuggled"} & {path for path, _ in found.requests}


def test_what_clients_send_besides(server: Running) -> None:
    assert server.client.get("/v1/models/").json() == server.client.get("/v1/models").json()
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = server.client.post(COMPLETIONS, content=gzip.compress(b'{"prompt": "a"}'), headers=packed)
    told(response, 415, "Content-Encoding is gzip, which is not supported", None)
    grammar = 'start: "a"'
    more = {"structured_outputs": {"grammar": grammar}, "guided_decoding_backend": "guidance"}
    assert server.post(COMPLETIONS, prompt="a", max_tokens=2, guided_grammar=grammar, **more).status_code == 200
    told(server.post(COMPLETIONS, prompt="a", guided_grammar="x", **more), 400, "there is no field 'guided_", ANY)
    for text in ("?start: x\nx: /[ab]/", "!start : x\nx: /[ab]/"):
        answer = server.post(COMPLETIONS, prompt="a", max_tokens=2, structured_outputs={"grammar": text}).json()
        assert answer["choices"][0]["text"] in ("a", "b")
    user = {"role": "user", "content": "a"}
    for message in (
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "b", "parsed": {"b": 1}, "refusal": None},
        {"role": "tool", "content": None, "tool_call_id": "c"},
    ):
        assert server.post("/v1/chat/completions", messages=[user, message, user], max_tokens=1).status_code == 200
    for kind in ("text", "json_object"):
        asked = {"response_format": {"type": kind, "json_schema": None}, "verbosity": "medium"}
        assert server.post("/v1/chat/completions", messages=[user], max_tokens=1, **asked).status_code == 200
