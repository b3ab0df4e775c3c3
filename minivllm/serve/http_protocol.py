"""Adds to uvicorn's HTTP protocol a limit on the size of a request's head."""

from __future__ import annotations

import re
from typing import Any

from fastapi.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minivllm.serve.errors import error_body

MAX_HEAD = 64 << 10  # bytes of a request's line and headers that come before the piece that completes them
_END = re.compile(rb"\r?\n\r?\n")  # of a head
_UPGRADE = re.compile(rb"(?i)\r\nupgrade:[^\r\n]*(?=\r\n)")


class HeadLimit(HttpToolsProtocol):
    """431 for a head that goes on after ``MAX_HEAD``: httptools has no limit, and joins each piece with all before.

    An ``Upgrade`` header, which Java's client and ``curl --http2`` send with every request, is removed: httptools would
    take the body for the next request. Where it is missed, behind a pipelined request, the connection ends with a 400.
    """

    _body = False  # whether a request's body is being read
    _ended = False  # whether a request ended in the latest piece
    _come = 0  # bytes of this head so far
    _held = b""  # the unfinished last line of this head, with the line end before it

    def data_received(self, data: bytes) -> None:
        if not self._body and self._come > MAX_HEAD:
            said = f"the request's line and headers have more than {MAX_HEAD} bytes"
            body = bytes(JSONResponse(error_body(said, 431)).body)
            length = f"content-length: {len(body)}\r\n".encode()
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            self.transport.write(head + length + b"connection: close\r\n\r\n" + body)
            self.transport.close()
            return
        of_head, size, self._ended = not self._body, len(data), False
        super().data_received(self._without_upgrade(data) if of_head else data)
        if of_head and not self._body and not self._ended:
            self._come += size

    def _without_upgrade(self, data: bytes) -> bytes:
        """A head's complete lines; what follows the last one waits for the next piece."""
        data, self._held = self._held + data, b""
        if end := _END.search(data):
            return _UPGRADE.sub(b"", data[: end.end()]) + data[end.end() :]
        last = data.rfind(b"\r\n")
        if last < 0:
            self._held = data
            return b""
        self._held = data[last:]
        return _UPGRADE.sub(b"", data[: last + 2])[:-2]

    def on_headers_complete(self) -> Any:
        self._body, self._come = True, 0
        if self.parser.should_upgrade():
            raise ValueError("Upgrade is not supported")  # which httptools makes an error of, and uvicorn a 400
        return super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._body, self._ended = False, True
        super().on_message_complete()
