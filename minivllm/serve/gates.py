"""Middleware that requests pass before a route, and detection of disconnected clients."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.serve.errors import ClientError, error_response
from minivllm.serve.generation import Aborted

MAX_BODY = 64 << 20  # bytes: 2,048 prompts of 4,000 token ids
_OPEN = ("/health", "/ping", "/version", "/metrics")  # no key needed: they reveal nothing from requests
_DIGITS = 18  # of a length, at most


class KeyCheck:
    """401 for requests without ``Authorization: Bearer KEY``, before the body is read."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._wanted = app, api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) not in _OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            if scheme.lower() != b"bearer" or not secrets.compare_digest(key, self._wanted):
                needs = "this server needs the header Authorization: Bearer KEY"
                said = "the key is wrong" if scheme.lower() == b"bearer" else needs
                app = error_response(ClientError(said, status=401, code="invalid_api_key"))
        await app(scope, receive, send)


class BodyLimit:
    """413 for a body that is too long; before it is read, if its length is given."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        said, come = dict(scope.get("headers", ())).get(b"content-length", b"0"), 0

        async def counted() -> Message:
            nonlocal come
            message = await receive()
            come += len(message.get("body", b""))
            if come > self._most:
                raise self._error()
            return message

        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif len(said) > _DIGITS or (said.isdigit() and int(said) > self._most):
            await error_response(self._error())(scope, receive, send)
        else:
            await self._app(scope, counted, send)

    def _error(self) -> ClientError:
        return ClientError(f"the body has more than {self._most} bytes; send several requests", status=413)


@asynccontextmanager
async def while_there(request: Request) -> AsyncIterator[None]:
    """For a request whose body has been read: cancel the enclosed code if the client disconnects, and raise Aborted."""
    task, gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and not task.uncancel():  # else it was also cancelled by others
            raise Aborted from None
        raise
    finally:
        watcher.cancel()
