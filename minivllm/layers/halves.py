"""The residual stream of a large step on several ranks, whose halves are summed apart: one half's sum runs beside what
is computed of the other. Which layers go so, ``Decoder`` decides; one step's stream lives here, and nothing behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minivllm.layers.linear import RowParallelLinear


class Half:
    """``rows`` of the stream, and the sum of them that is under way, if one is."""

    __slots__ = ("_sum", "_x", "rows")

    def __init__(self, x: torch.Tensor, rows: slice) -> None:
        self.rows = rows
        self._x = x[rows]
        self._sum: Any = None

    @property
    def under_way(self) -> bool:
        return self._sum is not None

    def arrive(self) -> torch.Tensor:
        """The rows (t, hidden), for what is launched from now on: the device waits for their sum, the host does not."""
        if self._sum is not None:
            self._sum.wait()
            self._sum = None
        return self._x

    def add(self, product: RowParallelLinear, y: torch.Tensor) -> None:
        """Begin to add ``product(y)``, y (t, in / tp)."""
        self._sum = product.start_add_to(self.arrive(), y)


class Halves:
    """x (t, hidden), t at least 2: read by ``arriving``, half by half, or ``whole``."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x, middle = x, -(-x.shape[0] // 2)
        self._halves = Half(x, slice(0, middle)), Half(x, slice(middle, x.shape[0]))

    @property
    def under_way(self) -> bool:
        return any(half.under_way for half in self._halves)

    @property
    def shape(self) -> torch.Size:
        return self._x.shape

    @property
    def fewest_rows(self) -> int:
        return self._x.shape[0] // 2

    def arriving(self) -> Iterator[tuple[Half, torch.Tensor]]:
        """Each half with its rows, waited for only when it is reached: by then the first one's work is launched."""
        for half in self._halves:
            yield half, half.arrive()

    def whole(self) -> torch.Tensor:
        for half in self._halves:
            half.arrive()
        return self._x


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether to call the module is to call the forward of ``kind``: no subclass's, no wrapper's, and no hook's."""
    forward = getattr(module.forward, "__func__", None)
    return forward is kind.forward and not module._forward_hooks and not module._forward_pre_hooks


def starts(product: nn.Module) -> bool:
    """Whether there are ranks to sum over, and ``add_to`` of many rows is ``start_add_to`` and a wait."""
    if not isinstance(product, RowParallelLinear) or type(product).add_to is not RowParallelLinear.add_to:
        return False
    return product.tp.size > 1 and product.bias is None
