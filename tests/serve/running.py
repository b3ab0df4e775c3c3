"""Servers in threads of the test's process: real sockets, and an engine to look into."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from minivllm import LLM
from minivllm.core.engine import LLMEngine
from minivllm.serve.app import create_app
from minivllm.serve.engine_client import Limits
from minivllm.serve.engine_loop import EngineLoop
from minivllm.serve.handshake import ServerOptions
from minivllm.serve.http_process import RemoteEngine, http_protocol
from minivllm.serve.wire import EngineEnd, Wire

SETTINGS = {"device": "cpu", "dtype": "float32", "attention": "torch"}
OVERRIDES = ["cache.num_blocks=256", "cache.block_size=8"]


@dataclass
class Running:
    """``post`` and ``get`` give the response; ``events`` a stream's objects."""

    client: httpx.Client
    engine: LLMEngine
    engine_client: RemoteEngine
    engine_loop: EngineLoop

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def slow_down(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        """Let each step take so long and more, or on a busy machine all are done before anybody has read the first."""
        step = self.engine.step

        def slowly() -> Any:
            time.sleep(seconds)
            return step()

        monkeypatch.setattr(self.engine, "step", slowly)

    def settled(self) -> None:
        """Wait until nothing runs, and see that nothing is left behind."""
        blocks = self.engine.scheduler.blocks
        until(lambda: not self.engine.has_unfinished_requests() and blocks.num_free == blocks.num_blocks)
        assert self.engine_loop.num_running == self.engine_loop.num_waiting == self.engine_client.num_completions == 0
        self.engine.scheduler.check()


def until(happens: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


@contextmanager
def serving(llm: LLM, name: str = "tiny", **options: Any) -> Iterator[Running]:
    """As ``minivllm serve`` has it, but for its two processes, which are two threads here."""
    ours, theirs = socket.socketpair()
    end = EngineEnd(Wire(ours))
    engine_loop = EngineLoop(llm.engine, end, end.tell)
    engine_client = RemoteEngine(Wire(theirs), llm.engine.tokenizer, Limits.of(llm.engine))
    app = create_app(engine_client, ServerOptions(name, "somewhere", **options))
    config = uvicorn.Config(
        app, port=0, log_config=None, log_level="critical", timeout_graceful_shutdown=1, http=http_protocol()
    )
    server = uvicorn.Server(config)
    threads = threading.Thread(target=server.run), threading.Thread(target=engine_loop.run)
    for thread in threads:
        thread.start()
    try:
        until(lambda: server.started or not threads[0].is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield Running(client, llm.engine, engine_client, engine_loop)
    finally:
        server.should_exit = True
        threads[0].join()
        theirs.close()
        threads[1].join(10)
        ours.close()
    assert not threads[1].is_alive()


def told(response: httpx.Response, status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The error that a response holds."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error


def metrics(server: Running) -> dict[tuple[str, str], float]:
    """What /metrics shows: (name, its label besides the model's name) → value."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        assert sample.labels["model_name"] == "tiny" and sample.name.startswith("minivllm:")
        other = [value for key, value in sample.labels.items() if key != "model_name"]
        found[sample.name.removeprefix("minivllm:"), *other or [""]] = sample.value
    return found
