"""``minivllm bench url=``: a server measured over HTTP, ours and ones that fail."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import Running, serving, until
from test_process import Process

from minivllm import LLM
from minivllm.bench import client
from minivllm.bench.workloads import make_requests
from minivllm.cli import main
from minivllm.config.compose import compose
from minivllm.models.checkpoint import DEMO
from minivllm.models.tokenizer import ByteTokenizer
from minivllm.plugins import default_registry

SMALL = ("workload.num_requests=6", "workload.input_len=[3,20]", "workload.output_len=[2,9]")
IDS = "workload.max_token_id=511"


def test_our_server_is_measured(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.slow_down(monkeypatch, 0.02)
    file, url = tmp_path / "out.jsonl", str(server.client.base_url).rstrip("/")
    command = ["bench", f"url={url}/v1", IDS, *SMALL, f"output={file}"]
    assert main(command) == 0
    assert main([*command, "repeat=2", "max_concurrency=2", "workload.request_rate=200", "workload.top_k=5"]) == 0
    first, second = map(json.loads, file.read_text().splitlines())
    options: Any = compose([IDS, *SMALL], default_registry(), mode="bench").options
    requests = make_requests(options.workload, 512)
    assert first["tokens_in"] == sum(len(r.prompt) for r in requests)
    assert first["tokens_out"] == sum(r.max_tokens for r in requests)
    assert (first["url"], first["model"], first["failed"]) == (url, "tiny", 0)
    assert 0 < first["ttft_ms_p50"] <= first["ttft_ms_p99"] <= first["latency_ms_p99"] <= 1e3 * first["seconds"] + 1
    assert first["tpot_ms_p50"] > 0 and first["output_tokens_per_s"] == first["tokens_out"] / first["seconds"]
    assert len(second["runs"]) == 2 and second["max_concurrency"] == 2 and second["requests"] == 6
    one, two = capsys.readouterr().out.split("written to", 1)
    assert "6 requests" in one and "ms to first token, p99" in one and "median" not in one
    assert "2 runs" in two and "median" in two and "min" in two and "max" in two


def test_a_server_is_sent_the_key_that_is_set(
    make_llm: Callable[..., LLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINIVLLM_API_KEY", raising=False)
    with serving(make_llm(), api_key="s3cret") as server:
        command = ["bench", f"url={server.client.base_url}", IDS, *SMALL]
        assert main(command) == 1
        assert "gives 401: " in (told := capsys.readouterr().err) and "; set MINIVLLM_API_KEY to its key" in told
        monkeypatch.setenv("MINIVLLM_API_KEY", "s3cret")
        assert main(command) == 0


def test_a_process_is_measured_and_one_that_is_killed_costs_only_what_it_had(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, file = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    trace.write_text('{"input_len": 5, "output_len": 4}\n{"input_len": 5, "output_len": 30000}\n')
    folder = tiny_checkpoint("qwen3", max_position_embeddings=40_000)
    process = Process(folder, tmp_path / "errors", "cache.num_blocks=4000")
    try:
        url = process.url()
        assert main(["bench", f"url={url}", IDS, *SMALL]) == 0

        def metric(name: str) -> float:
            lines = httpx.get(f"{url}/metrics").text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith(f"minivllm:{name}"))

        before = 7  # the six and their warm-up; the count follows the answers
        until(lambda: metric("request_success_total") == before)

        def kill_it_in_the_long_one() -> None:
            try:
                ended = before + 2  # the warm-up and the short one
                until(lambda: metric("request_success_total") == ended and metric("num_requests_running") == 1)
            finally:
                process.process.kill()

        killer = threading.Thread(target=kill_it_in_the_long_one)
        killer.start()
        keys = ("workload=trace", f"workload.path={trace}", "max_concurrency=1", f"output={file}")
        assert main(["bench", f"url={url}", IDS, *keys]) == 1
        killer.join()
    finally:
        process.process.kill()
        process.process.wait()
        assert process.process.stdout is not None
        process.process.stdout.close()
    record = json.loads(file.read_text())
    assert (record["failed"], record["tokens_out"]) == (1, 4)
    assert "1 requests failed; the first: the engine has stopped: its process has ended" in capsys.readouterr().out

    def is_gone() -> bool:  # the HTTP process ends a little behind the engine's
        try:
            httpx.get(f"{url}/v1/models")
        except httpx.TransportError:
            return True
        return False

    until(is_gone)
    assert main(["bench", f"url={url}", IDS, *SMALL]) == 1
    assert "no answer from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["url=localhost:8000"], "url=localhost:8000 is not a server's address; type url=http://"),
        (["url=http://"], "url=http:// is not a server's address"),
        (["url=http://127.0.0.1:99999"], "url=http://127.0.0.1:99999 is not a server's address"),
        (["url=http://127.0.0.1:9?model=m"], "is not a server's address"),
        (["url=http://127.0.0.1:9", "attention=triton"], "attention=triton: with url= the server has settings of"),
        (["url=http://127.0.0.1:9", "profile=true"], "profile=true with url=: the model runs elsewhere"),
        (["url=http://127.0.0.1:9", "workload=host"], "url= with workload=host"),
        (["max_concurrency=4"], "max_concurrency=4 is of requests to a server: add url="),
        (["endpoint=chat"], "endpoint=chat is of requests to a server: add url="),
        (["url=http://127.0.0.1:9", "endpoint=openai-chat"], "endpoint is one of completions, chat"),
        (["url=http://127.0.0.1:9", "model.tokenizer=x"], "model.tokenizer=x: only requests of endpoint=chat are text"),
        (["url=http://127.0.0.1:9", "endpoint=chat", "model=qwen3"], "model=qwen3: with url= the server has settings"),
        (["-m", "url=http://127.0.0.1:9", "workload=mixed,bs1"], "a sweep starts engines of its own"),
    ],
)
def test_what_has_no_meaning_is_refused(capsys: pytest.CaptureFixture[str], typed: list[str], message: str) -> None:
    assert main(["bench", *typed]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As other servers, ours does not say how large its vocabulary is."""
    hidden = property(lambda self: None, lambda self, size: None)
    monkeypatch.setattr(client.Server, "vocab_size", hidden, raising=False)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_ids_are_of_the_vocabulary_that_the_server_says(server: Running, endpoint: str) -> None:
    assert main(["bench", f"url={server.client.base_url}", f"endpoint={endpoint}", *SMALL]) == 0


def test_ids_beyond_the_vocabulary_are_told_before_anything_is_measured(
    server: Running, silent: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", f"url={server.client.base_url}", *SMALL]) == 1
    assert "is outside the vocabulary: 0 to 511; lower workload.max_token_id" in capsys.readouterr().err


def test_a_workload_that_does_not_fit_is_refused(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"url={server.client.base_url}", IDS, "workload.input_len=2000"]) == 2
    assert "requests exceed max_model_len=1024" in capsys.readouterr().err


@contextmanager
def standing_in(
    answer: Callable[[int], tuple[int, list[bytes] | Callable[[Callable[[bytes], None]], None]]],
    models: str = '{"data": [{"id": "m"}]}',
    bodies: list[dict[str, Any]] | None = None,
    path: str | None = None,
) -> Iterator[str]:
    """A server that says what ``answer`` gives for its n-th completion, status and lines (or what sends them, one by
    one); its address. It puts what it was sent into ``bodies``. With a ``path`` it has that only, and a tokenizer of
    bytes."""
    asked, tokenizer = iter(range(10**6)), ByteTokenizer(256)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200, [models.encode()])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if path is not None and self.path == "/tokenize":
                self._say(200, [json.dumps({"tokens": tokenizer.encode(body["prompt"])}).encode()])
            elif path is not None and self.path == "/detokenize":
                self._say(200, [json.dumps({"prompt": tokenizer.decode(body["tokens"])}).encode()])
            elif path is not None and self.path != path:
                self._say(404, [b'{"detail": "Not Found"}'])
            else:
                if bodies is not None:
                    bodies.append(body)
                self._say(*answer(next(asked)))

        def _say(self, status: int, lines: list[bytes] | Callable[[Callable[[bytes], None]], None]) -> None:
            self.send_response(status)
            self.end_headers()
            if callable(lines):
                lines(lambda line: self.wfile.write(line + b"\n") and self.wfile.flush())
            else:
                self.wfile.write(b"\n".join(lines) + b"\n")

        def log_message(self, *_: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def chunk(reason: str | None = None, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": "x", "finish_reason": reason}], **more}).encode()


WHOLE = [chunk(), b"", chunk("length"), b"data: [DONE]"]


def test_a_server_that_does_not_count_its_tokens(tmp_path: Path) -> None:
    with standing_in(lambda n: (200, WHOLE)) as url:
        assert main(["bench", f"url={url}", *SMALL, "workload.output_len=7", f"output={tmp_path / 'o'}"]) == 0
    assert json.loads((tmp_path / "o").read_text())["tokens_out"] == 6 * 7


def test_what_a_server_is_asked() -> None:
    bodies: list[dict[str, Any]] = []
    with standing_in(lambda n: (200, WHOLE), bodies=bodies) as url:
        assert main(["bench", f"url={url}", "workload.num_requests=1", "workload.input_len=3"]) == 0
    for body in bodies:  # the first warms up
        prompt, most = body.pop("prompt"), body.pop("max_tokens")
        assert len(prompt) == 3 and all(type(token) is int for token in prompt) and most in (8, 64)
        assert body.pop("stream") is True and body.pop("stream_options") == {"include_usage": True}
        assert body == {"model": "m", "temperature": 0.6, "ignore_eos": True}
    assert len(bodies) == 2


def test_requests_are_sent_when_they_arrive(tmp_path: Path) -> None:
    trace, came = tmp_path / "trace.jsonl", []
    trace.write_text('{"arrival": 4.0, "input_len": 1, "output_len": 2}\n{"input_len": 1, "output_len": 2}\n')

    def answer(number: int) -> tuple[int, list[bytes]]:
        came.append(time.monotonic())
        return 200, WHOLE

    with standing_in(answer) as url:
        keys = ("workload=trace", f"workload.path={trace}", "workload.time_scale=0.1")
        assert main(["bench", f"url={url}", *keys]) == 0
    assert 0.35 < came[2] - came[1] < 3


@pytest.mark.parametrize(("typed", "at_once"), [([], 6), (["max_concurrency=2"], 2)])
def test_so_many_requests_are_under_way_at_once(typed: list[str], at_once: int) -> None:
    lock, under_way, most = threading.Lock(), 0, 0

    def answer(number: int) -> tuple[int, list[bytes]]:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.6)
        with lock:
            under_way -= 1
        return 200, WHOLE

    with standing_in(answer) as url:
        assert main(["bench", f"url={url}", *SMALL, *typed]) == 0
    assert most == at_once


def test_an_error_that_is_null_is_none() -> None:
    lines = [chunk(error=None), b"", chunk("length", error=None, usage=None), b"data: [DONE]"]
    with standing_in(lambda n: (200, lines)) as url:
        assert main(["bench", f"url={url}", *SMALL]) == 0


def test_events_may_be_long() -> None:
    """As with log-probabilities of many tokens, sent together because the client was slow."""
    lines = [chunk(logprobs={"tokens": ["x" * 1000] * 1000}), b"", chunk("length"), b"data: [DONE]"]
    with standing_in(lambda n: (200, lines)) as url:
        assert main(["bench", f"url={url}", *SMALL]) == 0


def test_answers_that_end_early_are_failures_unless_they_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [chunk("stop", usage={"completion_tokens": 1}), b"data: [DONE]"]
    with standing_in(lambda n: (200, short if n == 3 else WHOLE)) as url:
        keys = (f"output={tmp_path / 'o'}", "workload.output_len=2")
        assert main(["bench", f"url={url}", *SMALL, *keys]) == 1
        assert "it ended after 1 of 2 tokens (stop)" in (said := capsys.readouterr().out)
        assert "type workload.ignore_eos=false" in said
        assert json.loads((tmp_path / "o").read_text())["failed"] == 1
    with standing_in(lambda n: (200, short)) as url:
        assert main(["bench", f"url={url}", *SMALL, "workload.ignore_eos=false"]) == 0


def test_two_servers_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / name) for name in "ab"]
    for file in files:
        with standing_in(lambda n: (200, WHOLE)) as url:
            assert main(["bench", f"url={url}", *SMALL, f"output={file}"]) == 0
    main(["bench", "compare", *files, "threshold=1000"])
    assert "workload.num_requests=6" in (said := capsys.readouterr().out) and "first token ms" in said


def test_requests_that_fail_are_counted_and_the_first_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(number: int) -> tuple[int, list[bytes]]:
        if number == 2:
            return 200, [chunk()]
        return (503, [b'{"error": {"message": "come again"}}']) if number == 1 else (200, WHOLE)

    with standing_in(answer) as url:
        assert main(["bench", f"url={url}", *SMALL, "max_concurrency=1", f"output={tmp_path / 'o'}"]) == 1
    record = json.loads((tmp_path / "o").read_text())
    assert record["failed"] == 2 and record["requests_per_s"] == 4 / record["seconds"]
    assert "2 requests failed; the first: 503: come again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "lines", "told"),
    [
        (500, [b"oh no"], "the server refuses a first request: 500: oh no"),
        (200, [chunk()], "the stream broke off"),
        (200, [b'data: {"error": {"message": "out of memory"}}'], "out of memory"),
        (200, [b"data: {"], "the server refuses a first request: DecodeError"),
        (200, [b"data: [1]"], "Expected `object`, got `array`"),
        (200, [b'data: {"choices": [null]}'], "Expected `object`, got `null`"),
        (200, [chunk("length", usage={"completion_tokens": "3"})], "got `str`"),
    ],
)
def test_a_server_that_cannot_is_told(
    capsys: pytest.CaptureFixture[str], status: int, lines: list[bytes], told: str
) -> None:
    with standing_in(lambda n: (status, lines)) as url:
        assert main(["bench", f"url={url}", *SMALL]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("models", ["{}", "<html>", '{"data": []}', '{"data": [{"id": 5}]}'])
def test_what_is_no_such_server_is_told(capsys: pytest.CaptureFixture[str], models: str) -> None:
    with standing_in(lambda n: (200, WHOLE), models) as url:
        assert main(["bench", f"url={url}", *SMALL]) == 1
    assert "lists no model in OpenAI's form" in capsys.readouterr().err


def test_no_server_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "url=http://127.0.0.1:9", *SMALL]) == 1
    assert "start a server, as with `minivllm serve`" in capsys.readouterr().err


def test_a_server_that_does_not_name_its_model_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "CONNECT_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert main(["bench", f"url=http://127.0.0.1:{silent.getsockname()[1]}", *SMALL]) == 1
    assert "no answer from" in capsys.readouterr().err


# --------------------------------------------------------------------------- endpoint=chat

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("named", [False, True])
def test_our_servers_chats_are_measured(
    server: Running, tiny_checkpoint: Callable[..., Path], tmp_path: Path, named: bool
) -> None:
    file = tmp_path / "out.jsonl"
    typed = [f"model.tokenizer={tiny_checkpoint('qwen3')}"] if named else []
    keys = (*SMALL, IDS, "workload.logprobs=2", f"output={file}", *typed)
    assert main(["bench", f"url={server.client.base_url}", "endpoint=chat", *keys]) == 0
    record = json.loads(file.read_text())
    options: Any = compose([IDS, *SMALL], default_registry(), mode="bench").options
    requests = make_requests(options.workload, 512)
    empty = server.post("/tokenize", messages=[{"role": "user", "content": ""}]).json()["count"]
    assert record["tokens_in"] == sum(empty + len(r.prompt) for r in requests)  # each word is one token
    assert record["tokens_out"] == record["tokens_asked"] == sum(r.max_tokens for r in requests)
    assert (record["endpoint"], record["failed"], record["uncounted"]) == ("chat", 0, 0)
    assert 0 < record["ttft_ms_p50"] <= record["latency_ms_p50"]


def said(delta: dict[str, Any] | None, reason: str | None = None, **more: Any) -> bytes:
    choices = [{"index": 0, "delta": delta, "finish_reason": reason}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode()


def counted(tokens_in: int, tokens_out: int) -> bytes:
    usage = {"prompt_tokens": tokens_in, "completion_tokens": tokens_out, "total_tokens": tokens_in + tokens_out}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode()


ROLE = said({"role": "assistant", "content": ""})


def test_what_a_chat_is_asked_and_what_counts(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []
    words = [ROLE, said({"reasoning": "a"}), said({"content": "b"}), said({"content": ""}, "length")]
    keys = ("workload.num_requests=1", "workload.input_len=5", "workload.logprobs=3", f"output={tmp_path / 'o'}")
    with standing_in(lambda n: (200, [*words, counted(17, 64), b"data: [DONE]"]), bodies=bodies, path=CHAT) as url:
        assert main(["bench", f"url={url}", "endpoint=chat", *keys]) == 0
    for body in bodies:  # the first warms up
        (message,), most = body.pop("messages"), body.pop("max_tokens")
        assert message.pop("role") == "user" and len(message.pop("content")) == 5 and not message and most in (8, 64)
        assert body.pop("stream") is True and body.pop("stream_options") == {"include_usage": True}
        assert body.pop("logprobs") is True and body.pop("top_logprobs") == 3
        assert body == {"model": "m", "temperature": 0.6, "ignore_eos": True}
    record = json.loads((tmp_path / "o").read_text())
    assert len(bodies) == 2 and (record["tokens_in"], record["tokens_out"], record["uncounted"]) == (17, 64, 0)


def test_a_traces_texts_and_tokens_are_what_a_chat_says(tmp_path: Path) -> None:
    trace, bodies = tmp_path / "trace.jsonl", list[dict[str, Any]]()
    tokens = list(b"as it is, too")
    lines = [{"prompt": "Is it so?"}, {"prompt_token_ids": tokens}, {"input_len": 4}]
    trace.write_text("".join(json.dumps(line | {"output_len": 2}) + "\n" for line in lines))
    whole = [said({"content": "x"}), said({"content": "y"}, "length")]
    with standing_in(lambda n: (200, whole), bodies=bodies, path=CHAT) as url:
        keys = ("workload=trace", f"workload.path={trace}", "max_concurrency=1")
        assert main(["bench", f"url={url}", "endpoint=chat", *keys]) == 0
        assert main(["bench", f"url={url}", *keys]) == 2  # no texts there
    warm_up, first, second, third = (body["messages"][0]["content"] for body in bodies)
    assert len(warm_up) == len(first) and warm_up[:4] != first[:4]  # else the first would be found in the cache
    assert (first, second) == ("Is it so?", "as it is, too") and len(third) == 4 and third.isalpha()


def test_a_traces_first_tokens_are_not_in_the_cache_before(tmp_path: Path) -> None:
    trace, bodies = tmp_path / "trace.jsonl", list[dict[str, Any]]()
    trace.write_text(json.dumps({"prompt_token_ids": [*range(90)], "output_len": 20}))
    with standing_in(lambda n: (200, WHOLE), bodies=bodies) as url:
        assert main(["bench", f"url={url}", "workload=trace", f"workload.path={trace}"]) == 0
    warm_up, first = bodies
    assert first["prompt"] == [*range(90)] and first["max_tokens"] == 20
    assert len(warm_up["prompt"]) == 90 and warm_up["prompt"][:4] != [0, 1, 2, 3] and warm_up["max_tokens"] == 8


def test_a_chat_server_that_counts_nothing_and_has_no_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As mini-sglang's: one message a token, the first with the role, some without text, and always an end by stop."""
    half = [said({"role": "assistant", "content": "a"}), b"", said({}), b"", said({"content": "b"}), b""]
    lines = [*half, said({}, "stop"), b"", b"data: [DONE]"]
    models = json.dumps({"data": [{"id": "Org/Name"}]})
    keys = (*SMALL, "workload.output_len=3", f"output={tmp_path / 'o'}")
    with standing_in(lambda n: (404, [b'{"detail": "Not Found"}']), models) as url:
        assert main(["bench", f"url={url}", "endpoint=chat", *keys]) == 1
    told = capsys.readouterr().err
    assert "POST /tokenize, which makes text of tokens for endpoint=chat, gives 404" in told
    assert "a folder or repository: model.tokenizer=Org/Name" in told
    with standing_in(lambda n: (200, lines), models) as url:
        assert main(["bench", f"url={url}", "endpoint=chat", f"model.tokenizer={DEMO}", *keys]) == 0
    record = json.loads((tmp_path / "o").read_text())
    options: Any = compose([*SMALL], default_registry(), mode="bench").options
    asked = sum(len(r.prompt) for r in make_requests(options.workload, 512))
    assert (record["tokens_out"], record["tokens_in"], record["uncounted"]) == (6 * 3, asked, 6)
    assert "6 answers came without usage" in (told := capsys.readouterr().out) and "(18 of 18 tokens asked for)" in told


@pytest.mark.parametrize(("usage", "tokens"), [({}, 3), ({"completion_tokens": 5}, 5)])
def test_what_is_not_counted_is_counted_here_and_may_be_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], usage: dict[str, int], tokens: int
) -> None:
    """A server that names the role each time, and says something in its last message."""
    role = {"role": "assistant"}
    lines = [said(role), said(role | {"reasoning": "a"}), said(role | {"content": "b"})]
    lines.append(said(role | {"content": "c"}, "stop", usage=usage))
    with standing_in(lambda n: (200, lines), path=CHAT) as url:
        keys = (*SMALL, "workload.output_len=5", f"output={tmp_path / 'o'}")
        assert main(["bench", f"url={url}", "endpoint=chat", *keys]) == 0
    record = json.loads((tmp_path / "o").read_text())
    assert (record["tokens_out"], record["tokens_asked"], record["uncounted"]) == (6 * tokens, 30, 6)
    assert f"({6 * tokens} of 30 tokens asked for)" in capsys.readouterr().out


def test_a_first_message_that_only_names_the_role_is_no_token(tmp_path: Path) -> None:
    def slowly(send: Callable[[bytes], None]) -> None:
        send(ROLE)
        time.sleep(0.4)
        send(said({"content": "a"}))
        time.sleep(0.2)
        send(said({}, "length"))

    with standing_in(lambda n: (200, slowly), path=CHAT) as url:
        keys = ("workload.num_requests=1", "workload.output_len=3", f"output={tmp_path / 'o'}")
        assert main(["bench", f"url={url}", "endpoint=chat", *keys]) == 0
    record = json.loads((tmp_path / "o").read_text())
    assert record["ttft_ms_p50"] >= 400 and record["latency_ms_p50"] >= 600
    assert record["tpot_ms_p50"] == pytest.approx((record["latency_ms_p50"] - record["ttft_ms_p50"]) / 2)


def test_answers_without_any_text_have_their_end_as_their_first_token() -> None:
    with standing_in(lambda n: (200, [ROLE, said({}, "length"), counted(9, 7)]), path=CHAT) as url:
        assert main(["bench", f"url={url}", "endpoint=chat", *SMALL, "workload.output_len=7"]) == 0


@pytest.mark.parametrize(
    ("has", "asked", "told"),
    [
        (CHAT, "completions", '404: {"detail": "Not Found"}; if it has no /v1/completions, type endpoint=chat'),
        ("/v1/completions", "chat", "if it has no /v1/chat/completions, type endpoint=completions"),
    ],
)
def test_a_server_with_the_other_endpoint_is_told(
    capsys: pytest.CaptureFixture[str], has: str, asked: str, told: str
) -> None:
    with standing_in(lambda n: (200, WHOLE), path=has) as url:
        assert main(["bench", f"url={url}", f"endpoint={asked}", *SMALL]) == 1
    assert told in capsys.readouterr().err


def test_a_chats_ids_beyond_the_vocabulary_are_told(
    server: Running, silent: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", f"url={server.client.base_url}", "endpoint=chat", *SMALL]) == 1
    assert "is outside the vocabulary: 0 to 511; lower workload.max_token_id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"{}", "missing required field `tokens`"),
        (b"<html>", "JSON is malformed"),
        (b'{"tokens": "abc"}', "got `str`"),
    ],
)
def test_a_tokenizer_of_another_form_is_told(capsys: pytest.CaptureFixture[str], answer: bytes, told: str) -> None:
    with standing_in(lambda n: (200, [answer])) as url:
        assert main(["bench", f"url={url}", "endpoint=chat", *SMALL]) == 1
    assert told in (said := capsys.readouterr().err)
    assert "name its model's tokenizer instead, a folder or repository: model.tokenizer=ORG/NAME" in said
