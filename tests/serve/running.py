"""Servers in a thread of the test's process: real sockets, and an engine to look into."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from minivllm import LLM
from minivllm.core.engine import LLMEngine
from minivllm.serve.app import ServerOptions, create_app
from minivllm.serve.async_engine import AsyncEngine

SETTINGS = {"device": "cpu", "dtype": "float32", "attention": "torch"}
OVERRIDES = ["cache.num_blocks=256", "cache.block_size=8"]


@dataclass
class Running:
    """``post`` and ``get`` give the response; ``events`` a stream's objects."""

    client: httpx.Client
    engine: LLMEngine
    async_engine: AsyncEngine

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def settled(self) -> None:
        """Wait until nothing runs, and see that nothing is left behind."""
        blocks = self.engine.scheduler.blocks
        until(lambda: not self.engine.has_unfinished_requests() and blocks.num_free == blocks.num_blocks)
        assert self.async_engine.num_running == self.async_engine.num_waiting == 0
        self.engine.scheduler.check()


def until(happens: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


@contextmanager
def serving(llm: LLM, name: str = "tiny", **options: Any) -> Iterator[Running]:
    async_engine = AsyncEngine(llm.engine)
    app = create_app(async_engine, ServerOptions(name, "somewhere", **options))
    config = uvicorn.Config(app, port=0, log_config=None, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield Running(client, llm.engine, async_engine)
    finally:
        server.should_exit = True
        thread.join()
    assert not async_engine._thread.is_alive()
