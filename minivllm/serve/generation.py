"""The reader's handle for a request's outputs, which arrive in pieces; for a slow reader, pending ones are merged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from minivllm.core.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from minivllm.core.outputs import RequestOutput
    from minivllm.core.requests import Prompt


class Aborted(Exception):
    """``Generation.abort`` was called while its outputs were awaited."""


class Interrupted(Exception):
    """The server ended the request, which may be sent again."""


class Generation:
    """The outputs of one or more prompts as they arrive: ``async for output in generation``.

    With ``RequestOutputKind.DELTA`` each output is what is new since the previous one of the same request. Unread
    deltas are merged (otherwise the newest is kept), so that a slow reader holds at most one output per prompt.

    Raises, while read:
        EngineDeadError: the engine died. Aborted: ``abort`` was called. Interrupted: ``reload_weights`` or ``sleep``
            aborted it.
    """

    def __init__(
        self,
        prompts: Mapping[str, Prompt],
        kind: RequestOutputKind,
        completions: int,
        abort: Callable[[tuple[str, ...]], None],
    ) -> None:
        self.prompts = prompts  # by request id
        self.completions = completions  # per prompt
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._abort = abort
        self._joins = kind is RequestOutputKind.DELTA
        self._open = set(prompts)  # not finished
        self._pending: dict[str, RequestOutput] = {}
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._pending.pop(next(iter(self._pending)))

    def abort(self) -> None:
        """Abort unfinished requests and free their memory. Does nothing if the generation has ended."""
        if self._open:
            self._abort(tuple(self._open))
            self._pending.clear()
            self.end(Aborted())

    def take(self, output: RequestOutput) -> None:
        """Add an output to those waiting to be read."""
        before = self._pending.get(output.request_id) if self._joins else None
        self._pending[output.request_id] = output if before is None else joined(before, output)
        if output.finished:
            self._open.discard(output.request_id)
        self._changed.set()

    def end(self, error: BaseException) -> None:
        """End with an error, after the outputs already taken have been read."""
        self._open.clear()
        self._error = error
        self._changed.set()
        if not self.accepted.done():
            self.accepted.set_exception(error)


def joined(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Merge two deltas of one request, appending ``then`` to ``first`` in place: unread text may be long."""
    for one, more in zip(first.outputs, then.outputs, strict=True):
        text, one.text = one.text, ""  # a string with one reference grows in place
        text += more.text
        one.text = text
        one.token_ids += more.token_ids
        if one.logprobs is not None and more.logprobs is not None:
            one.logprobs += more.logprobs
        one.cumulative_logprob = more.cumulative_logprob
        one.finish_reason, one.stop_reason = more.finish_reason, more.stop_reason
    first.finished, first.num_cached_tokens = then.finished, then.num_cached_tokens
    return first
