"""The HTTP process: ``python -m minivllm.serve.http_process WIRE LISTENER``, two sockets inherited from its parent.

It has the tokenizer and the event loop; the engine is in the parent (``engine_process``), so that steps wait for
neither. Signals come from the parent: SIGTERM, and ``CTRL_C`` for SIGINT, which a terminal would send to both.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from minivllm.bytecode import kept_bytecode
from minivllm.core.garbage import frozen
from minivllm.errors import MinivllmError
from minivllm.models.tokenizer import load_tokenizer
from minivllm.serve.app import create_app
from minivllm.serve.encoding import decode_from_engine, encode_to_engine
from minivllm.serve.engine_client import EngineClient, Limits, fail
from minivllm.serve.handshake import CTRL_C, INTERRUPTED, Begin, Go, Refused, Serving
from minivllm.serve.messages import AskMetrics, Died, FromEngine, Metrics, News, ToEngine
from minivllm.serve.wire import Wire

if TYPE_CHECKING:
    from minivllm.models.tokenizer import Tokenizer

_LAST_WORDS = 1.0  # seconds for clients to receive the error that ends their requests


class RemoteEngine(EngineClient):
    """An engine at the other end of a wire. Prompts are mappings of which only ``prompt_token_ids`` is sent."""

    def __init__(self, wire: Wire, tokenizer: Tokenizer, limits: Limits) -> None:
        super().__init__(tokenizer, limits)
        self._wire = wire
        self._asked: deque[asyncio.Future[bytes]] = deque()

    def start(self) -> None:
        super().start()
        self._loop.add_reader(self._wire.socket, self._read)

    def stop(self) -> None:
        super().stop()
        self._loop.remove_reader(self._wire.socket)
        self._loop.remove_writer(self._wire.socket)

    async def metrics(self, model_name: str) -> bytes:
        self.check()
        answer = self._loop.create_future()
        self._asked.append(answer)
        self._post(AskMetrics(model_name))
        return await answer

    def _post(self, message: ToEngine) -> None:
        self._wire.send(encode_to_engine(message))
        if self._wire.unsent:
            self._loop.add_writer(self._wire.socket, self._write)

    def _write(self) -> None:
        self._wire.flush()
        if not self._wire.unsent:
            self._loop.remove_writer(self._wire.socket)

    def _read(self) -> None:
        while (data := self._wire.receive()) is not None:
            self._hear(decode_from_engine(data))
        if self._wire.ended:
            self._loop.remove_reader(self._wire.socket)
            self._die(Died("its process has ended"))

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, Metrics):
            asked = self._asked.popleft()
            if not asked.done():  # the client may have disconnected
                asked.set_result(message.text)
        else:
            super()._hear(message)

    def _hear_news(self, news: News) -> None:
        for output in news.outputs:
            if (generation := self._generations.get(output.request_id)) is not None:
                prompt: Any = generation.prompts[output.request_id]
                output.prompt_token_ids = prompt["prompt_token_ids"]
        super()._hear_news(news)

    def _fail_all(self) -> None:
        super()._fail_all()
        fail(self._asked, str(self._why_not()))  # they stay there, as their answers may yet come


class HttpServer(uvicorn.Server):
    """Shuts down in three steps: it stops accepting requests; after ``timeout`` seconds, or on a second Ctrl-C, or at
    once if the engine sleeps, as nobody can wake it any more, running requests end with an error; and clients that do
    not read that are disconnected."""

    def __init__(
        self, config: uvicorn.Config, engine: EngineClient, timeout: float, started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._engine, self._timeout, self._started = engine, timeout, started
        self._ending = False
        self.interrupted = False
        engine.on_death = self._stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = self._loop.call_later(0 if self._engine.sleeps_on else self._timeout, self._end_all)
        await super().shutdown(sockets)
        timer.cancel()

    def _stop(self) -> None:
        self.should_exit = True

    def _end_all(self) -> None:
        self._ending = True
        self._engine.end()
        self._loop.call_later(_LAST_WORDS, self._cut_off)

    def _cut_off(self) -> None:
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()
        self._loop.call_later(_LAST_WORDS, self._force)

    def _force(self) -> None:
        """Do not wait for what runs without a client, such as tokenization of a long text."""
        self.force_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Our handlers instead of uvicorn's, which handle SIGINT and raise each signal again at the end."""
        for number in (CTRL_C, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted |= sig == CTRL_C
        running = len(self.server_state.tasks)
        if self.should_exit:
            if sig == CTRL_C and not self._ending:
                self._loop.call_soon_threadsafe(self._end_all)
            return
        if running:
            them = f"{running} running request{'s' if running > 1 else ''}"
            said = f"waiting up to {self._timeout:g} s for {them}; press Ctrl-C again to stop now"
            if self._engine.sleeps_on:
                said = f"ending {them}, as the engine sleeps"
            print(f"\nminivllm: {said}", file=sys.stderr)
        super().handle_exit(signal.SIGINT if sig == CTRL_C else sig, frame)


def serve(wire: Wire, listener: socket.socket) -> int:
    """Serve as the parent instructs; returns the exit code."""
    begin = wire.wait()
    if not isinstance(begin, Begin):
        return 0  # the parent is gone
    try:
        tokenizer = load_tokenizer(begin.model, begin.path, begin.model_config, begin.load_format)
    except MinivllmError as error:
        wire.say(Refused(type(error).__name__, str(error)))
        return 1
    go = wire.wait()
    if not isinstance(go, Go):
        return 0

    def started() -> None:
        print(go.hello, flush=True)
        wire.say(Serving())

    engine = RemoteEngine(wire, tokenizer, go.limits)
    log_requests(go.log_requests)
    config = uvicorn.Config(
        create_app(engine, go.server),
        log_config=None,
        log_level="info" if go.log_requests else "warning",
        access_log=go.log_requests,
        server_header=False,
        http=http_protocol(),
    )
    server = HttpServer(config, engine, go.shutdown_timeout, started)
    with frozen():
        server.run(sockets=[listener])
    return INTERRUPTED if server.interrupted else 0


def http_protocol() -> Any:
    """The HTTP protocol class. h11, which uvicorn uses without httptools, has its own limit on heads."""
    try:
        from minivllm.serve.http_protocol import HeadLimit
    except ModuleNotFoundError:
        return "h11"
    return HeadLimit


def log_requests(wanted: bool) -> None:
    """Log one line per request on standard error, if wanted; otherwise only errors."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if wanted:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logging.getLogger("uvicorn.access").addHandler(handler)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wire, listener = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
    for one in (wire, listener):
        one.set_inheritable(False)
    sys.exit(serve(Wire(wire), listener))


if __name__ == "__main__":
    with kept_bytecode():
        main()
