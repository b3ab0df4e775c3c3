"""Adds to uvicorn's HTTP protocol a limit on the size of a request's head."""

from __future__ import annotations

import re
from typing import Any

from fastapi.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minivllm.serve.errors import error_body

MAX_HEAD = 64 << 10  # bytes of request line and headers, not counting the first piece received


_END = b"\r\n\r\n"  # of a head
_UPGRADE = re.compile(rb"(?i)\r\nupgrade:[^\r\n]*(?=\r\n)")


class HeadLimit(HttpToolsProtocol):
    """431 for a head longer than ``MAX_HEAD``: httptools has no limit, and joins each piece with all before.

    An ``Upgrade``, as Java's client and ``curl --http2`` send it with every request, is taken out: httptools would read
    what is behind it as no body, but as the next request. Where it cannot be, the connection ends with a 400.
    """

    # Whether a head is incomplete, whether it began in the last piece, and the bytes received since then.
    _within, _began, _come = True, False, 0
    _body = False  # whether a body goes on

    def data_received(self, data: bytes) -> None:
        if self._within and self._come > MAX_HEAD:
            said = f"the request's line and headers have more than {MAX_HEAD} bytes"
            body = bytes(JSONResponse(error_body(said, 431)).body)
            length = f"content-length: {len(body)}\r\n".encode()
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            self.transport.write(head + length + b"connection: close\r\n\r\n" + body)
            self.transport.close()
            return
        self._began = False
        if not self._body:
            end = data.find(_END)
            head = data if end < 0 else data[: end + len(_END)]
            data = _UPGRADE.sub(b"", head) + data[len(head) :]
        super().data_received(data)
        if self._within and not self._began:
            self._come += len(data)

    def on_message_begin(self) -> None:
        self._within, self._began, self._come = True, True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> Any:
        self._within, self._body = False, True
        if self.parser.should_upgrade():
            raise ValueError("Upgrade is not supported")  # which httptools makes an error of, and uvicorn a 400
        return super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._body = False
        super().on_message_complete()
