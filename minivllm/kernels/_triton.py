"""Triton if installed, otherwise a stand-in, so that every kernel module can be imported on any machine.

Kernel files must not use ``from __future__ import annotations``: Triton reads ``tl.constexpr`` from the annotation.
"""

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from threading import Lock, Thread, get_ident
from typing import TYPE_CHECKING, Any

from minivllm.cores import usable_cores

if TYPE_CHECKING:
    import torch

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:  # references still work, launchers do not
    HAVE_TRITON = False

    class _Language:
        constexpr = int

    class _Triton:
        @staticmethod
        def jit(fn: Any = None, **_: Any) -> Any:
            return fn if fn is not None else (lambda f: f)

    triton, tl = _Triton(), _Language()


LOG2E = 1.4426950408889634  # exp(x) is 2 ** (x * LOG2E)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; 1 for n below 1."""
    return 1 << max(n - 1, 0).bit_length()


@cache
def num_sms(device: "torch.device") -> int:
    """The number of SMs of a GPU; a few for the interpreter."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


# --------------------------------------------------------------------------- compiling ahead


@triton.jit
def _nothing_kernel(n):
    pass


_openings: list[Thread] = []  # running, or done and not yet joined


@cache
def open_device(index: int) -> None:
    """Prepare GPU ``index`` in the background: its context, and what the first Triton and library kernels have to wait
    for. Triton hashes its own 400 MB, asks for the compiler's version, and on a new machine builds its driver; the
    library loads itself.

    Best called before torch is imported, which takes Python longer than all this; without such a GPU, or with a torch
    without CUDA, it changes nothing.
    """

    def work() -> None:
        driver, device = _open_context(index)
        compiles = HAVE_TRITON and not triton.knobs.runtime.interpret
        if compiles:
            triton.runtime.cache.triton_key()  # Triton caches it
        import torch

        if not torch.cuda.is_available():
            driver.cuDevicePrimaryCtxRelease_v2(device)
            return
        torch.cuda.set_device(index)
        x = torch.empty((64, 64), dtype=torch.bfloat16, device="cuda")
        if compiles:
            _load(_nothing_kernel.warmup(1, grid=(1,)))
        torch.mm(x, x)

    def quietly() -> None:
        with suppress(Exception):  # the next user of the device gets the error again
            work()

    _openings.append(Thread(target=quietly, name="minivllm-open-device"))
    _openings[-1].start()


def _open_context(index: int) -> tuple[Any, Any]:
    """Open the context that torch will use, through the driver alone; returns the driver and its device handle. Raises
    OSError or RuntimeError if there is no such GPU."""
    driver, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
    if (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), index)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    ):
        raise RuntimeError(f"the driver opens no GPU {index}")
    return driver, device


def _load(kernel: Any) -> Any:
    """Load a compiled kernel onto the current device. Otherwise Triton does it at the first launch, one kernel after
    another, and some versions call a C compiler for each."""
    _ = kernel.run
    return kernel


class _Compilations(Executor):
    """Defers compilations until all are known: threads that compile would take the GIL from the one that finds them."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[[], Any], /, *_: Any, **__: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, fn))
        return future

    def run(self) -> None:
        """Run all in parallel, started in the order in which they came."""
        import torch

        threads = min(len(self._jobs), usable_cores(), _MOST_THREADS)
        if not threads:
            return
        device = torch.cuda.current_device()  # per thread in torch

        def pool(name: str) -> ThreadPoolExecutor:
            return ThreadPoolExecutor(threads, name, initializer=torch.cuda.set_device, initargs=(device,))

        with pool("loads") as loads, pool("compiles") as compiles:
            for future, compile_ in self._jobs:
                compiles.submit(_compile, future, compile_, loads)

    def give_up(self) -> None:
        for future, _ in self._jobs:
            if not future.done():
                future.set_exception(RuntimeError("not compiled: what would have launched it failed"))


_MOST_THREADS = 8  # they wait for the GIL, a fifth of a compilation and more: twice as many take 20% longer


def _compile(future: Future[Any], compile_: Callable[[], Any], loads: Executor) -> None:
    """Compile, then load in a thread of ``loads``, which mostly waits for other programs, not for the GIL."""
    try:
        kernel = compile_()
    except Exception as error:
        future.set_exception(error)
    else:
        loads.submit(_fulfil, future, partial(_load, kernel))


def _fulfil(future: Future[Any], make: Callable[[], Any]) -> None:
    try:
        future.set_result(make())
    except Exception as error:
        future.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands in for a tensor where a kernel is only compiled: has what Triton asks for, without memory."""

    dtype: Any
    start: int  # address in bytes modulo 16

    def data_ptr(self) -> int:
        return self.start


def _place(value: Any) -> Any:
    return _Place(value.dtype, value.data_ptr() % 16) if hasattr(value, "data_ptr") else value


def _length(kernel: Any) -> int:
    """The length of a kernel's source plus that of all functions that it calls, each counted once."""
    texts, unread = {kernel.fn: kernel.src}, [kernel.fn]
    while unread:
        fn = unread.pop()
        for called in map(fn.__globals__.get, fn.__code__.co_names):
            if isinstance(called, triton.runtime.JITFunction) and called.fn not in texts:
                texts[called.fn] = called.src
                unread.append(called.fn)
    return sum(map(len, texts.values()))


@contextmanager
def _read_in_turn() -> Iterator[None]:
    """Within this context one thread at a time generates Triton IR from source. That holds the GIL, so in parallel each
    would take as long as all together; in turn, the first soon continues without the GIL."""
    source, turn = triton.compiler.ASTSource, Lock()
    make_ir = source.make_ir

    def in_turn(*args: Any, **kwargs: Any) -> Any:
        with turn:
            return make_ir(*args, **kwargs)

    source.make_ir = in_turn
    try:
        yield
    finally:
        source.make_ir = make_ir


_turn = Lock()
_compiling: int | None = None  # the thread in ``compile_only``


def compiling() -> bool:
    """Whether this thread currently only compiles kernels, see ``compile_only``."""
    return _compiling == get_ident()


@contextmanager
def compile_only() -> Iterator[None]:
    """In this context kernels are not launched; their outputs stay unchanged. On exit, all are compiled and loaded, on
    all cores.

    Running a step in it costs the step's Python once and makes all its kernels ready. If Triton lacks asynchronous
    compilation, or interprets, the step's kernels are compiled when they are launched.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if not HAVE_TRITON or mode is None or triton.knobs.runtime.interpret:
        yield
        return
    function = triton.runtime.JITFunction
    seen: set[Any] = set()  # each layer launches the same kernels
    found: list[tuple[int, Callable[[], Any]]] = []  # (length of the source, compilation)

    def kept(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not compiling():  # another engine's thread
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        args, kwargs = tuple(map(_place, args)), {name: _place(value) for name, value in kwargs.items()}
        with suppress(TypeError):  # an unhashable argument
            # Equal arguments need one compiled kernel; this may distinguish more than Triton does.
            kind = (id(self), *((type(value), value) for value in args), *((n, type(v), v) for n, v in kwargs.items()))
            if kind in seen:
                return None
            seen.add(kind)
        found.append((_length(self), partial(run, self, *args, grid=grid, warmup=True, **kwargs)))
        return None

    global _compiling
    compilations = _Compilations()
    with _turn:
        run = function.run
        function.run, _compiling = kept, get_ident()
        try:
            yield
        finally:
            function.run, _compiling = run, None
        while _openings:
            _openings.pop().join()
        with _read_in_turn(), mode(compilations, ignore_errors=True):
            try:
                for _, compile_ in sorted(found, key=lambda one: -one[0]):  # longest first
                    compile_()
                compilations.run()
            finally:
                compilations.give_up()  # ``mode`` would wait forever for unfinished ones
