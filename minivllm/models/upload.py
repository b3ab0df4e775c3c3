"""Copies weights to a GPU through pinned memory: all cores fill one buffer while the GPU reads another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_BUFFERS, _BUFFER_BYTES = 4, 16 << 20


class PinnedUpload(TorchFunctionMode):
    """While active, every ``gpu_tensor.copy_(host_tensor)`` in this thread goes through pinned memory.

    From pageable memory the driver copies with one core while the GPU waits. This is a mode, not a function, so that
    models and plugins can load weights with plain ``copy_``. On exit, copies may still be in flight, like any work
    launched after them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[torch.Tensor] = []
        self._read: list[torch.cuda.Event] = []  # by buffer: the GPU has read its last content
        self._turns = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.copy_ and len(args) == 2 and not kwargs:
            target, source = args
            if target.is_cuda and source.device.type == "cpu" and target.shape == source.shape and source.dim():
                self._copy(target, source)
                return target
        return func(*args, **(kwargs or {}))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy slices of the first dimension; if a single one is too large, slices of the next. Dtypes are converted on
        the host."""
        if not source.numel():
            return
        row_bytes = target[0].numel() * target.element_size()
        if row_bytes > _BUFFER_BYTES:
            for one, of in zip(target, source, strict=True):
                self._copy(one, of)
            return
        rows = _BUFFER_BYTES // row_bytes
        for start in range(0, len(source), rows):
            part = source[start : start + rows]
            buffer, read = self._next()
            staged = buffer[: part.numel() * target.element_size()].view(target.dtype).view(part.shape)
            staged.copy_(part)
            target[start : start + rows].copy_(staged, non_blocking=True)
            read.record()

    def _next(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """The least recently used buffer, once it is writable, and the event to record after it has been read."""
        which, self._turns = self._turns % _BUFFERS, self._turns + 1
        if which == len(self._buffers):
            self._buffers.append(torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True))
            self._read.append(torch.cuda.Event())
        else:
            self._read[which].synchronize()
        return self._buffers[which], self._read[which]
