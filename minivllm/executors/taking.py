"""How a rank, in a process or an actor, handles the messages it receives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.errors import AdapterError
from minivllm.executors.elsewhere import DOING
from minivllm.executors.messages import Answer
from minivllm.executors.step_bytes import unpack_batch, unpack_masks

if TYPE_CHECKING:
    from minivllm.core.interfaces import StepHandle
    from minivllm.executors.worker import Worker
    from minivllm.models.request_adapters import FittingAdapter


class StepTaker:
    """Has one worker run the steps received, and tracks which of them are complete."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.doing = "before its first step"  # for the error message if it dies
        self._last: tuple[int, StepHandle]
        self._adapter: FittingAdapter  # read, and not loaded yet

    def take(self, message: bytearray) -> tuple[int, StepHandle] | None:
        """Launch a packed step, or let a guided one sample with the masks that follow it. Returns the step's number and
        handle once nothing more is to come for it."""
        if (masks := unpack_masks(message)) is not None:
            self.worker.guide(masks)
            return self._last
        assert self.worker.runner is not None
        batch = unpack_batch(message, self.worker.runner.sampler.row)
        self.doing = f"in step {batch.step}"
        self._last = batch.step, self.worker.launch(batch)
        return None if batch.guided else self._last

    def call(self, method: str, argument: str) -> Answer:
        """``Worker``'s method of this name, between steps. ``argument``: a checkpoint's folder, "" for the one that the
        worker started with; an adapter's folder; a place; a level; tags."""
        self.doing = f"while {DOING[method]}"
        if method == "reload_weights":
            self.worker.reload_weights(Path(argument) if argument else None)
        elif method == "read_adapter":
            try:
                self._adapter = self.worker.read_adapter(Path(argument))
            except AdapterError as error:
                return Answer(refused=str(error))
            return Answer(read=self._adapter.fingerprint)
        elif method == "place_adapter":
            self.worker.place_adapter(int(argument), self._adapter)
            del self._adapter
        elif method == "sleep":
            self.worker.sleep(int(argument))
        else:
            self.worker.wake_up(argument.split(","))
        return Answer()
