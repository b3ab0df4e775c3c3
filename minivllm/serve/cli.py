"""``minivllm serve``: the process around the server. Where it listens, what it says, how it ends."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from minivllm.config.modes import ServeOptions
from minivllm.core.engine import LLMEngine
from minivllm.core.garbage import frozen
from minivllm.errors import ConfigError, MinivllmError
from minivllm.serve.app import ServerOptions, create_app
from minivllm.serve.async_engine import AsyncEngine

if TYPE_CHECKING:
    from minivllm.config.compose import Composed
    from minivllm.config.engine_config import EngineConfig

_HOSTS = "type host=127.0.0.1 to be reached from this machine only, host=0.0.0.0 at each of its addresses"
_LAST_WORDS = 1.0  # seconds that clients have to take the error that ends their requests


def run(composed: Composed) -> int:
    """Serve until SIGTERM (returns 0) or Ctrl-C (KeyboardInterrupt). Raises EngineDeadError if the engine dies."""
    options = composed.options
    assert isinstance(options, ServeOptions)
    if composed.engine.executor.name == "torchrun":
        raise ConfigError("executor=torchrun in serve: its ranks need the same requests; use multiproc or ray")
    listener = _bind(options.host, options.port)  # before anything is loaded: a taken port is known at once
    with listener, LLMEngine.from_config(composed.engine) as engine:
        _listen(listener, options.host, options.port)
        about = engine.describe()
        if why := about.get("attention_why"):
            print(why, file=sys.stderr)
        name = options.served_model_name or _name(composed.engine)
        key = find_key(options)
        async_engine = AsyncEngine(engine)
        app = create_app(async_engine, ServerOptions(name, str(about["model"]), key, options.max_waiting))
        _log_requests(options.log_requests)
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="info" if options.log_requests else "warning",
            access_log=options.log_requests,
            server_header=False,
        )
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        hello = f"minivllm serves {name} on {url} ({about['device']}, attention {about['attention']}). Try:"
        server = _Server(
            config, async_engine, options.shutdown_timeout, f"{hello}\n{curl_line(url, name, key=key is not None)}"
        )
        try:
            with frozen():
                server.run(sockets=[listener])
        finally:
            async_engine.stop()
        if async_engine.error is not None:
            async_engine.check()
    if server.interrupted:
        raise KeyboardInterrupt
    return 0


class _Server(uvicorn.Server):
    """Ends in three steps: it stops accepting; after ``timeout`` seconds, or with a second Ctrl-C, what still runs ends
    with an error; and who does not even take that is cut off."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, timeout: float, hello: str) -> None:
        super().__init__(config)
        self._engine, self._timeout, self._hello = engine, timeout, hello
        self._ending = False
        self.interrupted = False
        engine.on_death = self._stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        print(self._hello, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = self._loop.call_later(self._timeout, self._end_all)
        await super().shutdown(sockets)
        timer.cancel()

    def _stop(self) -> None:
        self.should_exit = True

    def _end_all(self) -> None:
        self._ending = True
        self._engine.end()
        self._loop.call_later(_LAST_WORDS, self._force)

    def _force(self) -> None:
        self.force_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn's own, which sends itself each signal once more at the end."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted |= sig == signal.SIGINT
        running = len(self.server_state.tasks)
        if self.should_exit and not self._ending:
            if sig == signal.SIGINT:
                self._loop.call_soon_threadsafe(self._end_all)
            return
        if running and not self.should_exit:
            limit = f"{self._timeout:g} s"
            print(f"\nminivllm: {running} requests may end within {limit}; Ctrl-C ends them at once", file=sys.stderr)
        super().handle_exit(sig, frame)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except socket.gaierror as error:
        raise ConfigError(f"host={host} is no address of this machine: {error.strerror}; {_HOSTS}") from error
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _listen(listener: socket.socket, host: str, port: int) -> None:
    """Until here clients were refused, and another server that was loading, too, may have been faster."""
    try:
        listener.listen()
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> MinivllmError:
    hint = ""
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        hint = "; type port=0 for any free one"
    elif error.errno == errno.EADDRNOTAVAIL:
        hint = f"; {_HOSTS}"
    return MinivllmError(f"cannot listen on host={host} port={port}: {error.strerror}{hint}")


def _name(config: EngineConfig) -> str:
    """What clients call the model, unless ``served_model_name`` says: its folder, repository or option."""
    model = config.model
    return model.path or (model.repo if model.name == "checkpoint" else None) or model.name


def curl_line(url: str, name: str, *, key: bool) -> str:
    """What to type to see it work."""
    body = {"model": name, "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    header = ' -H "Authorization: Bearer $MINIVLLM_API_KEY"' if key else ""
    return f"curl {url}/v1/completions -H 'Content-Type: application/json'{header} -d {shlex.quote(json.dumps(body))}"


def find_key(options: ServeOptions) -> str | None:
    """What clients must send, if anything. A command line can be read by others on the machine, the environment not."""
    return options.api_key or os.environ.get("MINIVLLM_API_KEY") or None


def _log_requests(wanted: bool) -> None:
    """One line a request on standard error; of all else only what went wrong."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if wanted:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logging.getLogger("uvicorn.access").addHandler(handler)
