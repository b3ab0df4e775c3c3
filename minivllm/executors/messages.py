"""What a rank and its parent say to each other beside the steps: msgpack on a socket.

That the socket ends tells either side that the other is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec

from minivllm.config.engine_config import EngineConfig
from minivllm.core.model_config import FrozenDict, ModelConfig, frozen
from minivllm.errors import EngineDeadError, MinivllmError, by_name, place_of
from minivllm.frames import Frames, frame
from minivllm.plugins.ranks import ParentView

_MOST_FDS = 253  # that Linux takes in one message: of 125 ranks


class Hello(msgspec.Struct, tag=True):
    """To a rank: who it is and what to build. Names of components are resolved where they are used."""

    rank: int
    size: int
    device_index: int
    store_port: int
    config: EngineConfig
    model_config: ModelConfig
    max_model_len: int
    steps_fd: int
    results_fd: int
    step_bytes: int  # of a slot
    result_bytes: int
    plugins: ParentView
    bell_fds: tuple[int, int]  # of the rank's own bell
    results_bell_fds: tuple[int, int]  # of the parent's
    fds: list[int] = []  # all of these, as they were handed over
    parent_pid: int = 0
    die_with_parent: bool = False

    def rename_fds(self, taken: Sequence[int]) -> None:
        """By their numbers in this process, which has taken ``fds`` over in their order; closes what is another's."""
        here = dict(zip(self.fds, taken, strict=True))
        self.steps_fd, self.results_fd = here[self.steps_fd], here[self.results_fd]
        self.bell_fds = here[self.bell_fds[0]], here[self.bell_fds[1]]
        self.results_bell_fds = here[self.results_bell_fds[0]], here[self.results_bell_fds[1]]
        kept = {self.steps_fd, self.results_fd, *self.bell_fds, *self.results_bell_fds}
        for fd in set(taken) - kept:
            os.close(fd)
        self.fds = list(kept)


class Build(msgspec.Struct, tag=True):
    """What an actor builds; the rest it is told as it comes up."""

    config: EngineConfig
    model_config: ModelConfig
    max_model_len: int
    plugins: ParentView


class Still(msgspec.Struct, tag=True):
    """From a rank that starts: what its main thread is in, and for how many seconds at that very place."""

    where: str
    seconds: float


class Pulse(msgspec.Struct, tag=True):
    """From an actor that was asked whether it lives."""

    pid: int
    node: str
    place: Still  # of the thread that starts it and takes steps


class Ready(msgspec.Struct, tag=True):
    """From a rank: it can take steps."""

    num_blocks: int
    about: dict[str, Any]
    notes: list[str]  # what the parent should tell: plugins that are broken here and not there


class Failed(msgspec.Struct, tag=True):
    """From a rank, its last words."""

    error: str  # the class's name
    message: str
    traceback: str
    doing: str
    place: str  # where it was raised; empty for errors of ours, whose messages say what is wrong
    at: float  # time.monotonic(), the same clock for all processes of a machine

    @classmethod
    def of(cls, error: BaseException, doing: str) -> Failed:
        text = "".join(traceback.format_exception(error))
        place = "" if isinstance(error, MinivllmError) or error.__traceback__ is None else place_of(error)
        return cls(type(error).__name__, str(error), text, doing, place, time.monotonic())

    def as_error(self, rank: int, starting: bool) -> MinivllmError:
        """What to raise in the parent: EngineDeadError; at the start, an error of ours as it was."""
        error = by_name(self.error, self.message)
        if not starting or not isinstance(error, MinivllmError):
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
        """Raises nothing if the other side is gone: whoever waits for an answer will see that."""
        data = encode(message)
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(frame(data))

    def hand_over(self, fds: Sequence[int]) -> None:
        """Descriptors, ahead of the first message, for ``take_over``."""
        with contextlib.suppress(OSError):
            socket.send_fds(self.socket, [b"\0"], list(fds))

    def take_over(self) -> list[int]:
        """What was handed over, by its numbers here; none: the other side is gone."""
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
        """After a poll said that there is something: all messages that are complete. Sets ``ended``."""
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
