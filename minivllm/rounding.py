"""Division and multiples, rounded up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import numpy as np


@overload
def cdiv(a: int, b: int) -> int: ...
@overload
def cdiv(a: np.ndarray, b: int | np.ndarray) -> np.ndarray: ...
def cdiv(a: Any, b: Any) -> Any:
    """a / b, rounded up."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """The next multiple from ``n``."""
    return -(-n // multiple) * multiple
