"""What a reader of one request's outputs holds: they come in pieces, and wait for a slow one as one piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from minivllm.core.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from minivllm.core.outputs import RequestOutput
    from minivllm.core.requests import Prompt


class Aborted(Exception):
    """Somebody called ``Generation.abort`` while its outputs were waited for."""


class Generation:
    """The outputs of one or more prompts, as they come: ``async for output in generation``.

    With ``RequestOutputKind.DELTA`` each output is what came since the one before of the same request; what nobody
    fetched yet is put together (else the newest stays), so that a slow reader costs no more than one output a prompt.

    Raises, while it is read:
        EngineDeadError: the engine died. Aborted: by ``abort``.
    """

    def __init__(
        self,
        prompts: Mapping[str, Prompt],
        kind: RequestOutputKind,
        completions: int,
        abort: Callable[[tuple[str, ...]], None],
    ) -> None:
        self.prompts = prompts  # by request id
        self.completions = completions  # of each prompt
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
        """End what is not finished, and give its memory back. Does nothing to a generation that has ended."""
        if self._open:
            self._abort(tuple(self._open))
            self._pending.clear()
            self.end(Aborted())

    def take(self, output: RequestOutput) -> None:
        """Have it read, with what waits to be."""
        before = self._pending.get(output.request_id) if self._joins else None
        self._pending[output.request_id] = output if before is None else joined(before, output)
        if output.finished:
            self._open.discard(output.request_id)
        self._changed.set()

    def end(self, error: BaseException) -> None:
        """What was taken is read first."""
        self._open.clear()
        self._error = error
        self._changed.set()
        if not self.accepted.done():
            self.accepted.set_exception(error)


def joined(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Two deltas of one request as one, ``first`` with what ``then`` brings: what is not read yet may be long."""
    for one, more in zip(first.outputs, then.outputs, strict=True):
        text, one.text = one.text, ""  # what nobody else has grows in place
        text += more.text
        one.text = text
        one.token_ids += more.token_ids
        if one.logprobs is not None and more.logprobs is not None:
            one.logprobs += more.logprobs
        one.cumulative_logprob = more.cumulative_logprob
        one.finish_reason, one.stop_reason = more.finish_reason, more.stop_reason
    first.finished, first.num_cached_tokens = then.finished, then.num_cached_tokens
    return first
