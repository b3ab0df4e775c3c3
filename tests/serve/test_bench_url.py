"""``minivllm bench url=``: a server measured over HTTP, ours and ones that fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from running import Running

from minivllm.bench.workloads import make_requests
from minivllm.cli import main
from minivllm.config.compose import compose
from minivllm.plugins import default_registry

SMALL = ("workload.num_requests=6", "workload.input_len=[3,20]", "workload.output_len=[2,9]")
IDS = "workload.max_token_id=511"


def test_our_server_is_measured(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert len(second["runs"]) == 2 and second["max_concurrency"] == 2
    assert "ms to first token, p99" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["url=localhost:8000"], "url=localhost:8000 is no server's address; type url=http://"),
        (["url=http://127.0.0.1:9", "attention=triton"], "attention=triton: with url= the server has settings of"),
        (["url=http://127.0.0.1:9", "profile=true"], "profile=true with url=: the model runs elsewhere"),
        (["url=http://127.0.0.1:9", "workload=host"], "url= with workload=host"),
        (["max_concurrency=4"], "max_concurrency=4 is of requests to a server: add url="),
        (["-m", "url=http://127.0.0.1:9", "workload=mixed,bs1"], "a sweep starts engines of its own"),
    ],
)
def test_what_has_no_meaning_is_refused(capsys: pytest.CaptureFixture[str], typed: list[str], message: str) -> None:
    assert main(["bench", *typed]) == 2
    assert message in capsys.readouterr().err


def test_ids_beyond_the_vocabulary_are_told_before_anything_is_measured(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", f"url={server.client.base_url}", *SMALL]) == 1
    assert "is outside the vocabulary: 0 to 511; lower workload.max_token_id" in capsys.readouterr().err


def test_a_workload_that_does_not_fit_is_refused(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"url={server.client.base_url}", IDS, "workload.input_len=2000"]) == 2
    assert "requests exceed max_model_len=1024" in capsys.readouterr().err


@contextmanager
def standing_in(
    answer: Callable[[int], tuple[int, list[bytes]]], models: str = '{"data": [{"id": "m"}]}'
) -> Iterator[str]:
    """A server that says what ``answer`` gives for its n-th completion, status and lines; its address."""
    asked = iter(range(10**6))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200, [models.encode()])

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._say(*answer(next(asked)))

        def _say(self, status: int, lines: list[bytes]) -> None:
            self.send_response(status)
            self.end_headers()
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


def chunk(reason: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": "x", "finish_reason": reason}]}).encode()


WHOLE = [chunk(), b"", chunk("length"), b"data: [DONE]"]


def test_a_server_that_does_not_count_its_tokens(tmp_path: Path) -> None:
    with standing_in(lambda n: (200, WHOLE)) as url:
        assert main(["bench", f"url={url}", *SMALL, "workload.output_len=7", f"output={tmp_path / 'o'}"]) == 0
    assert json.loads((tmp_path / "o").read_text())["tokens_out"] == 6 * 7


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
        (200, [b"data: {"], "the server refuses a first request"),
    ],
)
def test_a_server_that_cannot_is_told(
    capsys: pytest.CaptureFixture[str], status: int, lines: list[bytes], told: str
) -> None:
    with standing_in(lambda n: (status, lines)) as url:
        assert main(["bench", f"url={url}", *SMALL]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("models", ["{}", "<html>", '{"data": []}'])
def test_what_is_no_such_server_is_told(capsys: pytest.CaptureFixture[str], models: str) -> None:
    with standing_in(lambda n: (200, WHOLE), models) as url:
        assert main(["bench", f"url={url}", *SMALL]) == 1
    assert "lists no model in OpenAI's form" in capsys.readouterr().err


def test_no_server_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "url=http://127.0.0.1:9", *SMALL]) == 1
    assert "start a server, as with `minivllm serve`" in capsys.readouterr().err
