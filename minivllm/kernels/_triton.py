"""Triton where it is installed, a stand-in where it is not, so that every kernel module imports on any machine.

Kernel files must not use ``from __future__ import annotations``: Triton reads ``tl.constexpr`` from the annotation.
"""

from typing import Any

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:  # the references run, the launchers do not
    HAVE_TRITON = False

    class _Language:
        constexpr = int

    class _Triton:
        @staticmethod
        def jit(fn: Any = None, **_: Any) -> Any:
            return fn if fn is not None else (lambda f: f)

    triton, tl = _Triton(), _Language()


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
