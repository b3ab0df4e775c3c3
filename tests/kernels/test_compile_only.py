"""``compile_only``: what is launched within is compiled and loaded, once a kind, when all is known. With a stand-in for
Triton's launching; its compilation ahead is the real one."""

from __future__ import annotations

import importlib
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minivllm.kernels import _triton
from minivllm.kernels._triton import compile_only, compiling

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not hasattr(triton, "AsyncCompileMode"), reason="needs Triton's AsyncCompileMode")


class Source:
    """Stands for Triton's ASTSource, of which each compilation makes one and reads it."""

    reading, most = 0, 0

    def make_ir(self, wait: float) -> str:
        Source.reading += 1
        Source.most = max(Source.most, Source.reading)
        time.sleep(wait)
        Source.reading -= 1
        return "ir"


class Kernel:
    """A JITFunction that compiles to an object, and writes down what is done to it."""

    log: list[str]

    def __init__(self, name: str, fails: bool = False, src: str = "") -> None:
        self.name, self.fails, self.src, self.ready = name, fails, src, dict[Any, Any]()
        self.fn = calls()

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        key = (self.name, *(str(a.dtype) if hasattr(a, "data_ptr") else repr(a) for a in args))
        if not warmup:
            self.log.append(f"launch {self.name}")
            return None
        mode = triton.runtime._async_compile.active_mode.get()
        self.log.append(f"found {self.name}")
        rest = [lambda kernel: None] if submit_takes_cleanup() else []
        return mode.submit(key, self._compile, lambda kernel: self.ready.__setitem__(key, kernel), *rest)

    def _compile(self) -> Any:
        if self.fails:
            raise ValueError("does not compile")
        assert Source().make_ir(0.02) == "ir"
        self.log.append(f"compile {self.name}")
        kernel = self

        class Compiled:
            @property
            def run(self) -> None:
                kernel.log.append(f"load {kernel.name} for device {device.index}")

        return Compiled()


def calls(*called: Kernel) -> Any:
    """A function whose text calls these."""
    names = {f"f{number}": kernel for number, kernel in enumerate(called)}
    scope: dict[str, Any] = dict(names, other=len)
    exec(f"def fn(): {'; '.join(f'{name}()' for name in (*names, 'other', 'missing'))}", scope)
    return scope["fn"]


def submit_takes_cleanup() -> bool:
    return triton.AsyncCompileMode.submit.__code__.co_argcount > 4


device = threading.local()  # as torch keeps it
device.index = 3


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(Kernel, "log", [], raising=False)
    device.index = 3
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device.index)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: setattr(device, "index", index))
    stand_in = SimpleNamespace(
        AsyncCompileMode=triton.AsyncCompileMode,
        knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)),
        runtime=SimpleNamespace(JITFunction=Kernel),
        compiler=SimpleNamespace(ASTSource=Source),
    )
    monkeypatch.setattr(_triton, "triton", stand_in)
    run = Kernel.run
    yield Kernel.log
    assert Kernel.run is run and not compiling()


def launch(kernel: Kernel, *args: Any) -> None:
    kernel.run(*args, grid=(1,), warmup=False)


def test_kernels_are_compiled_and_loaded_once_a_kind_when_all_are_known(log: list[str]) -> None:
    a, b = Kernel("a"), Kernel("b")
    half, single = torch.zeros(32, dtype=torch.float16), torch.zeros(32)
    with compile_only():
        assert compiling()
        for _ in range(3):
            launch(a, half, 1)
            launch(b, half, 1)
        launch(a, single, 1)
        launch(a, single, True)  # equal to 1, and another kind
        assert not log
    assert log[:4] == ["found a", "found b", "found a", "found a"]
    expected = [line for name in "aaab" for line in (f"compile {name}", f"load {name} for device 3")]
    assert sorted(log[4:]) == sorted(expected)
    assert len(a.ready) == 3 and len(b.ready) == 1
    del log[:]
    launch(a, half, 1)
    assert log == ["launch a"]


def test_tensors_of_other_alignment_are_another_kind(log: list[str]) -> None:
    a, x = Kernel("a"), torch.zeros(64, dtype=torch.float16)
    with compile_only():
        for first in (0, 8, 1, 16):
            launch(a, x[first:])
    assert log.count("found a") == 2


def test_arguments_without_a_hash_are_never_taken_for_known(log: list[str]) -> None:
    a = Kernel("a")
    with compile_only():
        launch(a, [1])
        launch(a, [2])
    assert log.count("found a") == 2


def test_a_kernel_that_does_not_compile_is_left_to_its_launch(log: list[str]) -> None:
    bad, good = Kernel("bad", fails=True), Kernel("good")
    with compile_only():
        launch(bad, 1)
        launch(good, 1)
    assert not bad.ready and good.ready


def test_an_error_within_is_raised_and_nothing_is_compiled(log: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), compile_only():
        launch(Kernel("a"), 1)
        raise ZeroDivisionError
    assert not log


def test_the_longest_source_comes_first(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "_MOST_THREADS", 1)
    with compile_only():
        for name, length in (("a", 3), ("b", 9), ("c", 5), ("d", 9)):
            launch(Kernel(name, src=length * "x"), 1)
    assert [line for line in log if line.startswith("compile")] == [f"compile {name}" for name in "bdca"]


def test_the_text_of_what_a_kernel_calls_counts_once(log: list[str]) -> None:
    a, b, c = Kernel("a", src="x"), Kernel("b", src="xx"), Kernel("c", src="xxxx")
    a.fn, b.fn, c.fn = calls(b, b, c), calls(c), calls(a)
    assert _triton._length(a) == _triton._length(c) == 7
    b.fn = calls()
    assert _triton._length(b) == 2


def test_one_text_is_read_at_a_time(log: list[str]) -> None:
    Source.most, make_ir = 0, Source.make_ir
    with compile_only():
        for name in "abcdef":
            launch(Kernel(name), 1)
    assert Source.most == 1 and Source.make_ir is make_ir
    assert sum(line.startswith("compile") for line in log) == 6


def test_only_what_it_compiles_waits_for_a_device_that_is_being_opened(log: list[str]) -> None:
    opened = threading.Event()
    _triton._openings.append(threading.Thread(target=lambda: opened.wait(60) and log.append("opened")))
    _triton._openings[-1].start()
    with compile_only():
        launch(Kernel("a"), 1)
        opened.set()
    assert log == ["opened", "found a", "compile a", "load a for device 3"] and not _triton._openings


class Driver:
    """Of GPUs that there are or are not; writes down what it is asked."""

    def __init__(self, log: list[str], fails: str) -> None:
        self.log, self.fails = log, fails

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.log.append(name)
            return int(name == self.fails)

        return call


CALLS = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize(("fails", "has_cuda"), [("", True), ("", False), *((call, True) for call in CALLS)])
def test_a_device_is_opened_before_torch_and_without_one_nothing_is_done(
    fails: str, has_cuda: bool, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton.ctypes, "CDLL", lambda name: Driver(log, fails))
    _triton.triton.runtime.cache = SimpleNamespace(triton_key=lambda: log.append("key"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: log.append(f"torch {index}"))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: log.append(f"first tensor on {device}"))
    monkeypatch.setattr(torch, "mm", lambda x, y: log.append("first product"))
    kernel = SimpleNamespace(warmup=lambda *args, grid: SimpleNamespace(run=log.append("first kernel")))
    monkeypatch.setattr(_triton, "_nothing_kernel", kernel)
    _triton.open_device.__wrapped__(2)
    _triton._openings.pop().join()
    if fails:
        assert log == CALLS[: 1 + CALLS.index(fails)]
    elif not has_cuda:
        assert log == [*CALLS, "key", "cuDevicePrimaryCtxRelease_v2"]
    else:
        assert log == [*CALLS, "key", "torch 2", "first tensor on cuda", "first kernel", "first product"]


def test_there_is_no_such_device() -> None:
    with pytest.raises((OSError, RuntimeError)):
        _triton._open_context(1000)


def test_what_is_kept_of_a_tensor_until_then_is_not_its_memory(log: list[str]) -> None:
    x = torch.zeros(64, dtype=torch.float16)
    kept = weakref.ref(x)
    with compile_only():
        launch(Kernel("a"), x)
        del x
        assert kept() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.int32, torch.int16])
def test_what_stands_for_a_tensor_is_the_same_to_triton(dtype: torch.dtype) -> None:
    tell = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    backend = importlib.import_module("triton.backends.nvidia.compiler").CUDABackend
    for start in (0, 8):
        x = torch.zeros(64, dtype=torch.uint8)[start : start + 32].view(dtype)
        for options in itertools.product((False, True), repeat=3):
            assert tell(backend, x, *options) == tell(backend, _triton._place(x), *options)


def test_other_threads_launch_meanwhile(log: list[str]) -> None:
    a = Kernel("a")

    def other() -> None:
        assert not compiling()
        launch(a, 1)

    with compile_only():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert log == ["launch a"]
        launch(a, 1)
    assert log[1:] == ["found a", "compile a", "load a for device 3"]


def test_two_threads_compile_in_turn(log: list[str]) -> None:
    def work(kernel: Kernel) -> None:
        device.index = 3
        for _ in range(20):
            with compile_only():
                launch(kernel, 1)

    threads = [threading.Thread(target=work, args=(Kernel(name),)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [line for line in log if line.startswith("launch")]
    assert log.count("compile a") == log.count("compile b") == 20
