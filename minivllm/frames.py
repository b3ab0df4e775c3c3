"""Length-prefixed messages on a stream socket."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("<I")


def frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Reassembles messages from bytes that arrive in arbitrary pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """Remove and return the oldest complete message; None: there is none yet."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return message
