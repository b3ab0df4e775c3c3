"""An ``LLMEngine`` for asyncio, in a thread of the same process, for embedding in an application.

Steps and the event loop share the GIL; ``minivllm serve`` runs them in two processes (``http_process``).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING

from minivllm.errors import MinivllmError
from minivllm.serve.engine_client import EngineClient, Limits
from minivllm.serve.engine_loop import EngineLoop
from minivllm.serve.messages import FromEngine, ToEngine

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from minivllm.core.engine import LLMEngine

_PATIENCE = 10.0  # seconds that `stop` waits for a step in flight


class AsyncEngine(EngineClient):
    """The thread sleeps while there are no requests.

    Call all methods except ``stop`` from one event loop's thread. Nothing else may call ``engine`` between ``start``
    and ``stop``; reading its counters is safe. ``stop`` does not shut the engine down; its creator does.
    """

    rest = 2.0  # so that the engine has the GIL to itself for two thirds of the time

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__(engine.tokenizer, Limits.of(engine))
        self.engine = engine
        self._make_thread()

    def _make_thread(self) -> None:
        self._inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self.engine_loop = EngineLoop(self.engine, self._inbox, self._tell)
        self._thread = threading.Thread(target=self.engine_loop.run, name="minivllm-engine", daemon=True)

    def start(self) -> None:
        """Raises MinivllmError if already started, or if its thread has not ended yet."""
        if self._thread.is_alive():
            why = "is started already" if self._started else "is in a step that does not end"
            raise MinivllmError(f"this AsyncEngine {why}; one lifespan at a time can have it")
        if self._thread.ident is not None:
            self._make_thread()
        super().start()
        self.is_sleeping = self.engine.is_sleeping()
        self.engine.served = True
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step, then abort the remaining requests."""
        left = list(self._generations)
        super().stop()
        if self._thread.ident is None:
            return
        self._inbox.put(None)
        self._thread.join(_PATIENCE)
        if not self._thread.is_alive():
            self.engine.abort(left)
            self.engine.served = False

    async def reload_weights(
        self,
        weights_path: str | Path | None = None,
        weights_iterator: Iterable[tuple[str, Tensor]] | None = None,
        *,
        abort: bool = False,
    ) -> None:
        """As ``EngineClient.reload_weights``; with a ``weights_iterator``, which is read in the engine's thread, as in
        ``LLMEngine.reload_weights``."""
        await self._reload(weights_path, weights_iterator, abort=abort)

    async def sleep(self, level: int = 1, *, abort: bool = False) -> None:
        """As ``EngineClient.sleep``. An engine that cannot says so before any request waits or ends."""
        self.engine.check_sleep(level)
        await super().sleep(level, abort=abort)

    async def metrics(self, model_name: str) -> bytes:
        return self.engine_loop.metrics(model_name)

    def _post(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def _tell(self, message: FromEngine) -> None:
        """Called in the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader any more
            self._loop.call_soon_threadsafe(self._hear, message)
