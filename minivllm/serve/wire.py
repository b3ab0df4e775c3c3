"""A socket between a server's two processes, for messages (``encoding``) that neither waits for."""

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
        """What does not go now waits in ``unsent`` for ``flush``."""
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
        except OSError:  # whoever waits for an answer will see that nobody is there
            self.unsent.clear()

    def receive(self) -> bytes | None:
        """The oldest message that has come. None: there is none yet, or with ``ended`` no more."""
        message = self._frames.next()
        if message is None:
            self._read()
            message = self._frames.next()
        return message

    def wait(self) -> Handshake | None:
        """The next one's, for as long as it takes. None: the other side is gone."""
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
            return decode_to_engine(message)
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
