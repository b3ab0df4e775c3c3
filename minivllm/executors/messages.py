"""Messages between a rank and its parent, apart from steps: msgpack on a socket.

A closed socket tells either side that the other is gone.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec

from minivllm.config.engine_config import EngineConfig
from minivllm.core.model_config import FrozenDict, ModelConfig, frozen
from minivllm.errors import EngineDeadError, MinivllmError, RequestError, by_name, place_of
from minivllm.frames import Frames, frame
from minivllm.plugins.ranks import ParentView

_MOST_FDS = 253  # Linux's limit per message


class Build(msgspec.Struct, tag=True):
    """What every rank builds. Component names are resolved where they are used."""

    config: EngineConfig
    model_config: ModelConfig
    max_model_len: int
    plugins: ParentView


class Hello(msgspec.Struct, tag=True):
    """To a rank's process: which rank it is and what to build. An actor learns the rest during startup."""

    rank: int
    size: int
    device_index: int
    store_port: int
    build: Build
    step_bytes: int  # per slot
    result_bytes: int
    dies_with: int = 0  # the process that the kernel is to end it with, if any


class Still(msgspec.Struct, tag=True):
    """From a starting rank: where its main thread is, and for how many seconds it has been at exactly that place."""

    where: str
    seconds: float

    @classmethod
    def at_first(cls) -> Still:
        """Before it has said anything."""
        return cls("its first moments", 0.0)


class Pulse(msgspec.Struct, tag=True):
    """An actor's answer to a health check."""

    pid: int
    node: str
    place: Still  # of the thread that starts it and runs steps


class Answer(msgspec.Struct, frozen=True):
    """Of a rank. ``read``: a fingerprint of what it has read; ``refused``: why it has not, and goes on as it was."""

    read: str = ""
    refused: str = ""


class Ready(msgspec.Struct, tag=True):
    """From a rank: it is ready for steps. ``answer``: to what it was told to do between them."""

    num_blocks: int
    about: dict[str, Any]
    notes: list[str]  # for the parent to log: plugins that are broken here but not there
    answer: Answer = Answer()


class Failed(msgspec.Struct, tag=True):
    """From a rank: the error that ends it."""

    error: str  # the class's name
    message: str
    traceback: str
    doing: str
    place: str  # where it was raised; empty for minivllm's own errors, whose messages suffice
    at: float  # time.monotonic(), the same clock in all processes of a machine

    @classmethod
    def of(cls, error: BaseException, doing: str) -> Failed:
        text = "".join(traceback.format_exception(error))
        place = "" if isinstance(error, MinivllmError) or error.__traceback__ is None else place_of(error)
        return cls(type(error).__name__, str(error), text, doing, place, time.monotonic())

    def as_error(self, rank: int, starting: bool) -> MinivllmError:
        """The exception to raise in the parent: EngineDeadError; at startup, minivllm's own errors unchanged, except
        RequestError: an engine goes on after one, and this rank does not."""
        error = by_name(self.error, self.message)
        if not starting or not isinstance(error, MinivllmError) or isinstance(error, RequestError):
            where = f" ({self.place})" if self.place else ""
            error = EngineDeadError(f"rank {rank} failed {self.doing}: {self.error}: {self.message}{where}")
        error.add_note(f"on rank {rank}:\n{self.traceback}")
        return error


Message = Hello | Build | Still | Pulse | Ready | Failed
_decoder = msgspec.msgpack.Decoder(Message, dec_hook=lambda kind, value: _decode(kind, value))


def _decode(kind: type, value: Any) -> Any:
    if kind is FrozenDict:
        return frozen(value)
    raise NotImplementedError(kind)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=str)


def decode(data: bytes) -> Message:
    return _decoder.decode(data)


class Link:
    """One end of the socket between a rank and its parent."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.ended = False
        self._frames = Frames()
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Does not raise if the other side is gone: whoever waits for an answer will notice."""
        data = encode(message)
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(frame(data))

    def hand_over(self, fds: Sequence[int]) -> None:
        """Send file descriptors, before the first message, for ``take_over``."""
        with contextlib.suppress(OSError):
            socket.send_fds(self.socket, [b"\0"], list(fds))

    def take_over(self) -> list[int]:
        """The descriptors handed over, as numbers in this process; empty: the other side is gone."""
        try:
            return list(socket.recv_fds(self.socket, 1, _MOST_FDS)[1])
        except ConnectionError:
            return []

    def receive(self) -> Message | None:
        """Wait for the next message; None: the other side is gone."""
        while (message := self._next()) is None and not self.ended:
            self._fill()
        return message

    def hear(self) -> list[Message]:
        """All complete messages, once a poll has found data. Sets ``ended``."""
        self._fill()
        found = []
        while (message := self._next()) is not None:
            found.append(message)
        return found

    def _fill(self) -> None:
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        self._frames.add(data)
        self.ended = self.ended or not data

    def _next(self) -> Message | None:
        data = self._frames.next()
        return None if data is None else decode(data)
