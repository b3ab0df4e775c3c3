"""``minivllm serve``: the engine's process. Binds the socket, starts the server, returns its exit code.

Another process handles HTTP (``http_process``), so that steps never wait for the GIL: this one runs the engine in its
main thread, and they exchange ``messages``.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from minivllm import child_process
from minivllm.assemble import find_adapter, find_model
from minivllm.config.modes import ServeOptions
from minivllm.core.engine import LLMEngine
from minivllm.core.garbage import frozen
from minivllm.core.lora_request import LoRARequest
from minivllm.errors import ConfigError, MinivllmError, by_name
from minivllm.serve.engine_client import Limits
from minivllm.serve.engine_loop import EngineLoop
from minivllm.serve.handshake import CTRL_C, INTERRUPTED, Begin, Go, Refused, ServerOptions, Serving
from minivllm.serve.messages import Died
from minivllm.serve.wire import EngineEnd, Wire

if TYPE_CHECKING:
    from minivllm.config.compose import Composed
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.model_config import ModelConfig

for _package in ("fastapi", "uvicorn"):  # the other process imports these
    if find_spec(_package) is None:
        raise ModuleNotFoundError(f"No module named {_package!r}", name=_package)

_HOSTS = "type host=127.0.0.1 to be reached from this machine only, host=0.0.0.0 at each of its addresses"
_GRACE = 5.0  # seconds that the other process may take beyond ``shutdown_timeout``


def run(composed: Composed) -> int:
    """Serve until SIGTERM (returns 0) or Ctrl-C (KeyboardInterrupt). Raises EngineDeadError if the engine dies."""
    options = composed.options
    assert isinstance(options, ServeOptions)
    if composed.engine.executor.name == "torchrun":
        raise ConfigError("executor=torchrun in serve: its ranks need the same requests; use multiproc or ray")
    _check_lora(composed.engine, options)
    listener = _bind(options.host, options.port)  # before loading, so that a port in use is reported at once
    with listener, HttpProcess(listener) as front:
        path, model_config = find_model(composed.engine)
        front.begin(Begin(composed.engine.model, path, model_config, composed.engine.load_format))
        adapters = _find_adapters(composed.engine, options, model_config)
        with LLMEngine.from_config(composed.engine) as engine:
            for adapter in adapters[: composed.engine.max_loras]:  # the others are loaded when they are used
                engine.add_lora(adapter)
            _listen(listener, options.host, options.port)
            front.go(_go(composed.engine, options, engine, listener, adapters))
            listener.close()  # only the other process decides when connections are refused
            engine_loop = EngineLoop(engine, front.engine_end, front.engine_end.tell)
            with frozen(), front.signals():
                engine_loop.run()
                code = front.wait(options.shutdown_timeout + _GRACE)
    if engine_loop.error is not None:
        raise Died.of(engine_loop.error).as_error() from engine_loop.error
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise MinivllmError(f"the HTTP process {child_process.how_it_ended(code)}")
    return 0


def _check_lora(config: EngineConfig, options: ServeOptions) -> None:
    """Raises ConfigError for adapters where there can be none, or one with the model's name."""
    if not config.enable_lora and (options.lora_modules or options.allow_runtime_lora_updating):
        key = "lora_modules" if options.lora_modules else "allow_runtime_lora_updating=true"
        raise ConfigError(f"{key} needs an engine whose requests may have adapters; add enable_lora=true")
    if (name := options.served_model_name or _name(config)) in options.lora_modules:
        raise ConfigError(
            f"lora_modules: {name!r} is the name of the model itself; choose another, or type served_model_name=NAME"
        )


def _find_adapters(config: EngineConfig, options: ServeOptions, model_config: ModelConfig) -> tuple[LoRARequest, ...]:
    """All of ``lora_modules``, in folders. Raises CheckpointError if one cannot be used, before weights are read."""
    return tuple(
        LoRARequest(name, number, str(find_adapter(config, model_config, path, f"lora_modules.{name}")))
        for number, (name, path) in enumerate(options.lora_modules.items(), start=1)
    )


def _go(
    config: EngineConfig,
    options: ServeOptions,
    engine: LLMEngine,
    listener: socket.socket,
    adapters: tuple[LoRARequest, ...],
) -> Go:
    about = engine.describe()
    if why := about.get("attention_why"):
        print(why, file=sys.stderr)
    name = options.served_model_name or _name(config)
    key = find_key(options)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    how = f"{about['device']}, attention {about['attention']}, {about['weights']}"
    hello = f"minivllm serves {name} on {url} ({how}). Try:"
    server = ServerOptions(
        name,
        str(about["model"]),
        key,
        options.max_waiting,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        allowed_origins=options.allowed_origins,
        allow_reload=options.allow_reload,
        enable_sleep_mode=config.enable_sleep_mode,
        adapters=adapters,
        allow_runtime_lora_updating=options.allow_runtime_lora_updating,
    )
    return Go(
        server,
        Limits.of(engine),
        f"{hello}\n{curl_line(url, name, key=key is not None)}",
        options.shutdown_timeout,
        options.log_requests,
    )


class HttpProcess:
    """The HTTP process, as seen by the engine's. A context manager: the process is gone at the end."""

    def __init__(self, listener: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fds = theirs.fileno(), listener.fileno()
            self._process: subprocess.Popen[bytes] = child_process.start("minivllm.serve.http_process", *fds, fds=fds)
        self.engine_end = EngineEnd(Wire(ours))

    def begin(self, begin: Begin) -> None:
        self.engine_end.wire.say(begin)

    def go(self, go: Go) -> None:
        """Returns when the server accepts requests. Raises what the process raised at startup."""
        self.engine_end.wire.say(go)
        answer = self.engine_end.wire.wait()
        if isinstance(answer, Refused):
            raise by_name(answer.error, answer.message)
        if not isinstance(answer, Serving):
            how = child_process.how_it_ended(self._process.wait())
            raise MinivllmError(f"the HTTP process {how} before it was ready")

    @contextmanager
    def signals(self) -> Generator[None, None, None]:
        """Forward signals that end a server to the HTTP process, which knows the running requests."""

        def pass_on(number: int, _: Any) -> None:
            self._process.send_signal(CTRL_C if number == signal.SIGINT else number)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self, timeout: float) -> int:
        """Wait at most ``timeout`` seconds for its exit code."""
        self.engine_end.finish(timeout)
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def __enter__(self) -> HttpProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self.engine_end.wire.socket.close()


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
    """Start listening. Until now clients were refused, and another server that was loading may have been faster."""
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
    """The model's name for clients, unless ``served_model_name`` is set: its folder, repository or option."""
    model = config.model
    return model.path or (model.repo if model.name == "checkpoint" else None) or model.name


def curl_line(url: str, name: str, *, key: bool) -> str:
    """A curl command to try the server."""
    body = {"model": name, "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    header = ' -H "Authorization: Bearer $MINIVLLM_API_KEY"' if key else ""
    return f"curl {url}/v1/completions -H 'Content-Type: application/json'{header} -d {shlex.quote(json.dumps(body))}"


def find_key(options: ServeOptions) -> str | None:
    """The API key, if any. It may come from the environment, as other users can read a command line."""
    return options.api_key or os.environ.get("MINIVLLM_API_KEY") or None
