"""Error responses: OpenAI's error object and its HTTP status."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from minivllm.errors import AdapterError, BusyError, ContextLengthError, EngineDeadError, RequestError, printable
from minivllm.naming import listing
from minivllm.serve.generation import Aborted, Interrupted

_GONE = 499  # never read: the client has disconnected
_RETRY = {"Retry-After": "1"}
_JSON = re.compile(r"application/(\S+\+)?json", re.IGNORECASE)  # what FastAPI reads as JSON
_TYPE = re.compile(r"(str|int|float|bool|list|dict|function-\w+)\b(\[|$)")  # pydantic's, of a union, in a place
_TAKES = {  # of fields that take several
    "stop": "it is a string, or a list of strings",
    "content": 'it is a string, or a list of text parts: {"type": "text", "text": …}',
}
_FIRST_WORD = re.compile(r"(?:prompt \d+: )?([a-z_]+)(?:=|: | has )")
_OF_PROMPT = re.compile(r"(?:prompt \d+: )?(?:token id|the prompt)\b")


class ClientError(Exception):
    """A request is answered with an error. ``param``: the invalid field."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = printable(message)
    param = None if param is None else printable(param)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def asked_wrongly(
    error: RequestError, fields: Container[str], *, message: str | None = None, prompt: str | None = None
) -> ClientError:
    """``param`` is the one of ``fields`` that the message starts with, or ``prompt`` if it is about the prompt.
    ``message`` replaces the error's own."""
    message = str(error) if message is None else message
    if isinstance(error, BusyError):
        return ClientError(message, status=503, code="overloaded")
    if isinstance(error, AdapterError):  # the client only named it
        said = f"this model's adapter cannot be loaded, or no longer: {message}"
        return ClientError(said, status=500, code="adapter_lost")
    begins = _FIRST_WORD.match(message)
    param = begins[1] if begins and begins[1] in fields else None
    if param is None and _OF_PROMPT.match(message):
        param = prompt
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
    return ClientError(message, param=param, code=code)


def error_response(error: Exception, fields: Sequence[str] = ()) -> JSONResponse:
    """``fields``: a RequestError whose message starts with one of these has it as ``param``."""
    status, param, code, headers = 500, None, None, None
    if isinstance(error, RequestError):
        error = asked_wrongly(error, fields)
    message = str(error)
    if isinstance(error, ClientError):
        status, param, code = error.status, error.param, error.code
    elif isinstance(error, EngineDeadError):
        status, code = 503, "engine_dead"
    elif isinstance(error, Interrupted):
        status, code = 503, "interrupted"
    elif isinstance(error, Aborted):
        status, message = _GONE, "the client has closed the connection"
    else:
        message = f"the server failed: {type(error).__name__}"  # details go to the log only
        headers = {"Connection": "close"}  # uvicorn closes it anyway
    if status == 503 and code != "engine_dead":
        headers = _RETRY
    if status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    return JSONResponse(error_body(message, status, param, code), status, headers)


def install_error_handlers(app: FastAPI, fields: Sequence[str]) -> None:
    """Return every error of ``app`` in OpenAI's format."""

    async def ours(request: Request, error: Exception) -> JSONResponse:
        return error_response(error, fields)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        kind = request.headers.get("content-type", "nothing")
        if not _JSON.fullmatch(kind.partition(";")[0].strip()):
            said = f"the body's Content-Type is {kind}; send JSON, and the header Content-Type: application/json"
            return error_response(ClientError(said, status=415))
        return error_response(_as_client_error(error.errors()[0], error.body))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 400:  # FastAPI's only one: what json.loads raises that is no mistake in JSON
            coding = request.headers.get("content-encoding", "identity")
            if coding.lower() != "identity":
                said = f"the body's Content-Encoding is {coding}, which is not supported; send it as it is"
                return error_response(ClientError(said, status=415))
            return error_response(_unreadable(error.__cause__), fields)
        said = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == 404:  # as with base_url without /v1, or for a part of OpenAI's API that is not here
            routes = (route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema)
            said += f"; there are {listing(dict.fromkeys(route.path_format for route in routes))}"
        return JSONResponse(error_body(said, error.status_code), error.status_code, error.headers)

    for kind in (ClientError, RequestError, EngineDeadError, Aborted, Interrupted, Exception):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _unreadable(why: BaseException | None) -> ClientError:
    """For a body that json.loads rejects for another reason than its syntax, or that was refused while being read."""
    if isinstance(why, ClientError):
        return why
    if isinstance(why, RecursionError):
        return ClientError("the body is not JSON: it is nested too deeply")
    if isinstance(why, ValueError) and not isinstance(why, UnicodeError):  # Python's limit, which is 4300
        return ClientError("the body has a number with too many digits")
    return ClientError("the body is not JSON: it is not text in UTF-8")


def _as_client_error(first: Mapping[str, Any], body: Any) -> ClientError:
    """Pydantic's first complaint about ``body``, or FastAPI's, if it is not JSON."""
    place = [str(part) for part in first["loc"] if part != "body" and not _TYPE.match(str(part))]
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", first["msg"])
        at = first["loc"][-1]
        if isinstance(at, int) and isinstance(body, str):
            why += f": line {body.count(chr(10), 0, at) + 1} column {at - body.rfind(chr(10), 0, at)}"
        return ClientError(f"the body is not JSON: {why}")
    if not place:
        return ClientError(f"the body is not a JSON object: {first['msg']}")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"].endswith("_type"):
        message = next((_TAKES[part] for part in reversed(place) if part in _TAKES), message)
    return ClientError(f"{'.'.join(place)}: {message}", param=place[0])
