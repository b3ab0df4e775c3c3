"""Messages on a stream socket: each behind its length."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("<I")


def frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


class Frames:
    """What has come, in whatever pieces, as the messages that it is of."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """The oldest message that is complete."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return message
