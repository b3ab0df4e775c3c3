"""What a rank makes of what comes on the wire, be it a process or an actor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.executors.step_bytes import unpack_batch, unpack_masks

if TYPE_CHECKING:
    from minivllm.core.interfaces import StepHandle
    from minivllm.executors.worker import Worker


class StepTaker:
    """Has one worker take the steps that come, and knows which of them are whole."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.doing = "before its first step"  # for last words
        self._last: tuple[int, StepHandle]

    def take(self, message: bytearray) -> tuple[int, StepHandle] | None:
        """Launch a step that was packed, or let it sample with the masks that come behind a guided one. Returns its
        number and itself when nothing more is to come for it."""
        if (masks := unpack_masks(message)) is not None:
            self.worker.guide(masks)
            return self._last
        assert self.worker.runner is not None
        batch = unpack_batch(message, self.worker.runner.sampler.row)
        self.doing = f"in step {batch.step}"
        self._last = batch.step, self.worker.launch(batch)
        return None if batch.guided else self._last
