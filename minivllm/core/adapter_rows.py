"""Which LoRA adapter each row of a step has: what the runner tells the linear layers (``layers/adapters.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def in_order(places: np.ndarray) -> np.ndarray:
    """(2 * t,) int32: rows, those with adapters in the same place next to each other, and these places (t,)."""
    order = np.argsort(places, kind="stable")
    return np.concatenate((order, places[order])).astype(np.int32)


class AdapterRows:
    """One for all layers of a model. ``order``: (2, t) int32, ``in_order`` on the device, 0: no adapter; None: layers
    run as if no row had one."""

    def __init__(self) -> None:
        self.order: torch.Tensor | None = None

    @contextmanager
    def used(self, order: torch.Tensor) -> Iterator[None]:
        """For the layers that are launched, or captured, in this context."""
        self.order = order.view(2, -1)
        try:
            yield
        finally:
            self.order = None
