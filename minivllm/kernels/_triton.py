"""Triton where it is installed, a stand-in where it is not, so that every kernel module imports on any machine.

Kernel files must not use ``from __future__ import annotations``: Triton reads ``tl.constexpr`` from the annotation.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from os import cpu_count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

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


@cache
def num_sms(device: "torch.device") -> int:
    """Multiprocessors of a GPU; a few for the interpreter."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@contextmanager
def compile_only() -> Iterator[None]:
    """Within, kernels are not launched but compiled, all at once, on all cores; their outputs stay as they were.

    A step run so costs its Python once and brings every kernel that it needs into Triton's cache. Where Triton has no
    asynchronous compilation, or interprets, the step's kernels are left to be compiled when they are launched.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if not HAVE_TRITON or mode is None or triton.knobs.runtime.interpret:
        yield
        return
    function = triton.runtime.JITFunction
    run = function.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    function.run = compiled
    try:
        with ThreadPoolExecutor(cpu_count()) as pool, mode(pool, ignore_errors=True):
            yield
    finally:
        function.run = run
