"""Of HTTP itself what uvicorn leaves open: how long a request's head may be."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minivllm.serve.errors import error_body

MAX_HEAD = 64 << 10  # bytes of a request's line and headers, without those that came with its first


class HeadLimit(HttpToolsProtocol):
    """431 for a head that goes on after ``MAX_HEAD``: httptools has no limit, and joins each piece with all before."""

    # Whether a head goes on, whether it began in what came last, and how much came since then.
    _within, _began, _come = True, False, 0

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
        super().data_received(data)
        if self._within and not self._began:
            self._come += len(data)

    def on_message_begin(self) -> None:
        self._within, self._began, self._come = True, True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> Any:
        self._within = False
        return super().on_headers_complete()
