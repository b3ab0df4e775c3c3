"""A non-blocking socket for messages (``encoding``) between a server's two processes."""

from __future__ import annotations

import queue
import select
import socket
import time

from minivllm.frames import Frames, frame
from minivllm.serve.encoding import decode_handshake, decode_to_engine, encode_from_engine, encode_handshake
from minivllm.serve.handshake import Handshake
from minivllm.serve.messages import FromEngine, ToEngine

_PIECE = 1 << 18  # bytes


class Wire:
    """One end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.ended = False  # the other side is gone
        self.unsent = bytearray()
        self._frames = Frames()

    def send(self, data: bytes) -> None:
        """Send; what cannot be sent now waits in ``unsent`` for ``flush``."""
        self.unsent += frame(data)
        self.flush()

    def say(self, message: Handshake) -> None:
        self.send(encode_handshake(message))

    def flush(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # whoever waits for an answer will notice
            self.unsent.clear()

    def receive(self) -> bytes | None:
        """The oldest message received. None: there is none yet or, if ``ended``, none to come."""
        message = self._frames.next()
        if message is None:
            self._read()
            message = self._frames.next()
        return message

    def wait(self) -> Handshake | None:
        """Wait for the next message. None: the other side is gone."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        while (message := self.receive()) is None and not self.ended:
            poller.poll()
        return None if message is None else decode_handshake(message)

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
    """The engine's end, for ``EngineLoop``: its inbox and its outgoing messages."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._poller = select.poll()

    def tell(self, message: FromEngine) -> None:
        """Send; what cannot be sent now goes with the next message, so that a step never waits for a reader."""
        self.wire.send(encode_from_engine(message))

    def get(self, block: bool, timeout: float) -> ToEngine | None:
        """Like ``queue.SimpleQueue.get``. None: the other side is gone."""
        message = self.wire.receive()
        if message is None and block and not self.wire.ended:
            self._wait(timeout)
            message = self.wire.receive()
        elif self.wire.unsent:
            self.wire.flush()
        if message is not None:
            return decode_to_engine(message)
        if self.wire.ended:
            return None
        raise queue.Empty

    def finish(self, timeout: float) -> None:
        """Send what is pending, for at most ``timeout`` seconds; incoming messages are dropped."""
        end = time.monotonic() + timeout
        while self.wire.unsent and not self.wire.ended and (left := end - time.monotonic()) > 0:
            self._wait(left)
            self.wire.receive()

    def _wait(self, timeout: float) -> None:
        """Wait until there is something to read, or pending data can be written."""
        self.wire.flush()
        self._poller.register(self.wire.socket, select.POLLIN | (select.POLLOUT if self.wire.unsent else 0))
        self._poller.poll(timeout * 1000)
        self.wire.flush()
