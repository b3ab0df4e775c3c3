"""Messages between a server's two processes, as frames on a socket that neither waits for.

What goes to the engine is pickled: a request may hold any number or text that a client can think of. What comes back,
hundreds of outputs a step, is msgpack.
"""

from __future__ import annotations

import builtins
import contextlib
import pickle
import queue
import select
import socket
import time
import traceback
from typing import Any

import msgspec

from minivllm import errors
from minivllm.core.outputs import CompletionOutput, Logprob, RequestOutput
from minivllm.errors import MinivllmError
from minivllm.frames import Frames, frame
from minivllm.serve.messages import Died, FromEngine, Metrics, News, ToEngine

_PIECE = 1 << 18  # bytes


class _Failure(msgspec.Struct, array_like=True):
    error: str  # the class's name
    message: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        text = "" if isinstance(error, MinivllmError) else "".join(traceback.format_exception(error))
        return cls(type(error).__name__, _whole(str(error)), _whole(text))

    def as_error(self) -> Exception:
        """Of its class, if that is ours or Python's."""
        kind = getattr(errors, self.error, None) or getattr(builtins, self.error, None)
        error: Exception = RuntimeError(f"{self.error}: {self.message}")
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(TypeError):  # a class that is made of more than a message
                error = kind(self.message)
        if self.traceback:
            error.add_note(f"in the engine:\n{self.traceback}")
        return error


class _Output(msgspec.Struct, array_like=True, gc=False):
    """A ``RequestOutput`` without its prompt, which the other side has."""

    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class _News(msgspec.Struct, array_like=True, tag=True):
    taken: list[tuple[str, _Failure | None]]
    outputs: list[_Output]


class _Metrics(msgspec.Struct, array_like=True, tag=True):
    text: bytes


class _Died(msgspec.Struct, array_like=True, tag=True):
    why: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_News | _Metrics | _Died)


def encode_from_engine(message: FromEngine) -> bytes:
    if isinstance(message, News):
        taken = [(name, None if error is None else _Failure.of(error)) for name, error in message.taken]
        outputs = [
            _Output(o.request_id, o.outputs, o.finished, o.num_cached_tokens, o.prompt_logprobs)
            for o in message.outputs
        ]
        return _encoder.encode(_News(taken, outputs))
    if isinstance(message, Metrics):
        return _encoder.encode(_Metrics(message.text))
    return _encoder.encode(_Died(_whole(message.why)))


def decode_from_engine(data: bytes) -> FromEngine:
    """Outputs have no prompt."""
    message = _decoder.decode(data)
    if isinstance(message, _News):
        taken = [(name, None if failure is None else failure.as_error()) for name, failure in message.taken]
        outputs = [
            RequestOutput(o.request_id, None, [], o.outputs, o.finished, o.num_cached_tokens, o.prompt_logprobs)
            for o in message.outputs
        ]
        return News(taken, outputs)
    if isinstance(message, _Metrics):
        return Metrics(message.text)
    return Died(message.why)


def _whole(text: str) -> str:
    """Halves of characters, which a client can send, spelled out."""
    return text.encode(errors="backslashreplace").decode()


class Wire:
    """One end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.ended = False  # the other side is gone
        self.unsent = bytearray()
        self._frames = Frames()

    def send(self, data: bytes) -> None:
        """What does not go now waits in ``unsent`` for ``flush``."""
        self.unsent += frame(data)
        self.flush()

    def send_object(self, value: Any) -> None:
        self.send(pickle.dumps(value))

    def flush(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # whoever waits for an answer will see that nobody is there
            self.unsent.clear()

    def receive(self) -> bytes | None:
        """The oldest message that has come. None: there is none yet, or with ``ended`` no more."""
        message = self._frames.next()
        if message is None:
            self._read()
            message = self._frames.next()
        return message

    def wait(self) -> Any:
        """The next message, an object, for as long as it takes. None: the other side is gone."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        while (message := self.receive()) is None and not self.ended:
            poller.poll()
        return None if message is None else pickle.loads(message)

    def _read(self) -> None:
        try:
            while data := self.socket.recv(_PIECE):
                self._frames.add(data)
                if len(data) < _PIECE:
                    return
            self.ended = True
        except BlockingIOError:
            pass
        except ConnectionError:
            self.ended = True


class EngineEnd:
    """The engine's end, as ``EngineLoop`` wants it: its inbox, and what it tells."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._poller = select.poll()

    def tell(self, message: FromEngine) -> None:
        """What does not go at once goes with what follows: a step waits for no reader."""
        self.wire.send(encode_from_engine(message))

    def get(self, block: bool, timeout: float) -> ToEngine | None:
        """As ``queue.SimpleQueue``'s; None: the other side is gone."""
        message = self.wire.receive()
        if message is None and block and not self.wire.ended:
            self._wait(timeout)
            message = self.wire.receive()
        elif self.wire.unsent:
            self.wire.flush()
        if message is not None:
            found: ToEngine = pickle.loads(message)
            return found
        if self.wire.ended:
            return None
        raise queue.Empty

    def finish(self, timeout: float) -> None:
        """Send what waits, for ``timeout`` seconds at most; what comes meanwhile is for nobody."""
        end = time.monotonic() + timeout
        while self.wire.unsent and not self.wire.ended and (left := end - time.monotonic()) > 0:
            self._wait(left)
            self.wire.receive()

    def _wait(self, timeout: float) -> None:
        """For something to read, or to be able to write what waits."""
        self.wire.flush()
        self._poller.register(self.wire.socket, select.POLLIN | (select.POLLOUT if self.wire.unsent else 0))
        self._poller.poll(timeout * 1000)
        self.wire.flush()
