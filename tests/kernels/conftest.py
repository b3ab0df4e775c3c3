"""Where a kernel's launcher runs: on the GPU, and on the CPU under Triton's interpreter, in float32 (its bf16 dot is
wrong). Triton reads TRITON_INTERPRET when it is first imported, so it is set here, before any kernel is. Kernels in
CUDA C++ are compiled and launched on the CPU, too, up to the driver; some of them also run there, see emulator.py."""

import ctypes
import os
import re
import struct
import subprocess
import sys
import threading
from shutil import which
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

CASES = [
    pytest.param(("cpu", torch.float32), id="interpreter"),
    pytest.param(("cuda", torch.bfloat16), id="cuda-bf16", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.float32), id="cuda-f32", marks=pytest.mark.gpu),
]


@pytest.fixture(params=CASES)
def where(request, monkeypatch):
    """(device, dtype); skips what this machine lacks. Tensors from ``torch.empty`` come filled with NaN."""
    device, dtype = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    if device == "cpu":
        from minivllm.kernels.embedding import _embedding_kernel

        if type(_embedding_kernel).__name__ != "InterpretedFunction":
            pytest.skip("Triton was imported without TRITON_INTERPRET=1, or is not installed")
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    return device, dtype


@pytest.fixture
def close():
    def check(out, expected):
        """Relative error in the 2-norm: 1e-2 in bf16, 1e-5 in float32. ``expected`` is computed in float32."""
        assert out.isfinite().all(), "not every element was written"
        limit = 1e-2 if out.dtype == torch.bfloat16 else 1e-5
        out, expected = out.double().cpu(), expected.double().cpu()
        error = ((out - expected).norm() / expected.norm().clamp_min(1e-12)).item()
        assert error < limit, f"relative error {error:.2e}"

    return check


# --------------------------------------------------------------------------- kernels in CUDA C++


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """An empty cache folder; skips where there is no compiler."""
    pytest.importorskip("cuda.bindings.nvrtc")
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    return tmp_path


def unread_at_arrivals(machine_code):
    """Arrivals at a barrier, of a disassembly, behind a load from shared memory that nothing has waited for yet. A
    load's registers are there together: whatever reads one has waited for all."""
    found, pending = [], {}  # registers, and which load fills them
    for line in machine_code.splitlines():
        if not (match := re.search(r"/\*[0-9a-f]+\*/\s+(@\S+ )?([A-Z]\S*)(.*?);", line)):
            continue
        condition, name, arguments = match.groups()
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", arguments)]
        width = 4 if "M88.4" in name or ".128" in name else 2 if ".64" in name else 1
        if name.startswith("SYNCS.ARRIVE") and pending:
            found.append(line.strip())
        if name.startswith("SYNCS.ARRIVE") or (name in ("BRA", "EXIT") and not condition):
            pending = {}
        if name.startswith("LDS") and registers:  # LDSM, too
            read, written = registers[1:], {registers[0] + i for i in range(width)}
        elif name.startswith("HMMA"):
            read = [r + i for r, many in zip(registers[1:], (4, 2, 4), strict=False) for i in range(many)]
            written = set()
        else:
            read, written = [r + i for r in registers for i in range(width)], set()
        waited = {pending[r] for r in read if r in pending}
        pending = {r: load for r, load in pending.items() if load not in waited and r not in written}
        pending |= dict.fromkeys(written, line)
    return found


@pytest.fixture
def disassembled(tmp_path_factory):
    """The text of machine code."""

    def text(cubin):
        disassembler = pytest.importorskip("triton").knobs.nvidia.nvdisasm.path
        path = tmp_path_factory.mktemp("cubin") / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([disassembler, "-c", path], capture_output=True, text=True, check=True).stdout

    return text


@pytest.fixture
def reads_in_time(disassembled):
    """Checks machine code: what is loaded from shared memory is used before the next arrival at a barrier. That does
    not wait for loads, and TMA may write where they read."""

    def check(cubin):
        text = disassembled(cubin)
        assert text.count("SYNCS.ARRIVE") > 3
        assert not unread_at_arrivals(text)

    return check


@pytest.fixture
def told(monkeypatch):
    """The driver's own structures, filled, without a GPU. ``seen``, of each launch: its config, its Kernel, its
    arguments' values (a tensor map's is its address, 5), read back from their addresses. ``maps``: what TMA loads."""
    from minivllm.kernels import hopper
    from minivllm.kernels.attention import prompt_attention, stream_decode
    from minivllm.kernels.linear import chain_linear, cluster_linear, packed_chain, packed_linear, persistent_linear
    from minivllm.kernels.megakernel import megakernel

    driver = pytest.importorskip("cuda.bindings.driver")
    launches = SimpleNamespace(seen=[], maps=[], driver=driver)
    pointer, number, long, fraction = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float
    maps_and_rest = {
        "cluster_linear": (2, [*[pointer] * 3, *[number] * 8, fraction, fraction, hopper.HeadsArgument]),
        "persistent_linear": (3, [pointer, pointer, *[number] * 5, hopper.HeadsArgument]),
        "chain_linear": (8, [*[pointer] * 5, number, fraction]),
        "large_chain": (9, [*[pointer] * 7, number, fraction, fraction]),
        "packed_chain": (3, [*[pointer] * 15, number, fraction, fraction]),
        "packed_linear": (1, [*[pointer] * 4, number]),
        "megakernel": (0, [*[pointer] * 11, long, long, *[number] * 3, *[fraction] * 3, pointer, number]),
        "prompt_attention": (3, [pointer, prompt_attention._Step]),
        "stream_decode": (2, [*[pointer] * 7, long, *[number] * 5, fraction, stream_decode._NewArgument]),
    }

    def launched(config, kernel, addresses, extra):
        maps, kinds = maps_and_rest[kernel.name]
        if ("PARTS", 1) in kernel.macros:
            kinds = [*kinds, persistent_linear.ArrivalArgument]
        at = (ctypes.c_void_p * (maps + len(kinds))).from_address(addresses)
        values = [kind.from_buffer_copy(kind.from_address(at[maps + i])) for i, kind in enumerate(kinds)]
        launches.seen.append((config, kernel, [*at[:maps], *(getattr(value, "value", value) for value in values)]))
        return (0,)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=72 + device))
    for module in (hopper, chain_linear, megakernel, packed_chain, packed_linear, prompt_attention, stream_decode):
        monkeypatch.setattr(module, "load", lambda kernel, device: kernel)
    for kind in ("tensor_map", "page_map", "plain_page_map", "head_map"):
        monkeypatch.setattr(hopper.nvrtc, kind, lambda *args: launches.maps.append(args) or SimpleNamespace(address=5))
    monkeypatch.setattr(megakernel, "_map_bytes", lambda made: bytes(128))
    monkeypatch.setattr(driver, "cuLaunchKernelEx", launched)
    products = (cluster_linear, persistent_linear, chain_linear, packed_chain, packed_linear)
    for module in (*products, megakernel, prompt_attention, stream_decode):
        monkeypatch.setattr(module, "use_pdl", lambda device: True)
        monkeypatch.setattr(module, "num_sms", lambda device: 132)
    for module in (cluster_linear, persistent_linear):
        module._plan.cache_clear()
    yield launches
    for module in (cluster_linear, persistent_linear):
        module._plan.cache_clear()


@pytest.fixture
def emulated(monkeypatch, tmp_path_factory):
    """The megakernel on the CPU, of 16 programs, ``packed_chain`` and ``packed_linear``, of 6, ``stream_decode`` and
    ``prompt_attention``, of 4. ``seed`` draws the order in which they go on; ``changes``, pairs of texts, are made in
    the source. Of ``gpus``, each launches in a thread of its own."""
    if sys.platform != "linux" or which("g++") is None:
        pytest.skip("no g++, or not on Linux")
    import emulator

    from minivllm.kernels import nvrtc
    from minivllm.kernels.attention import prompt_attention, stream_decode
    from minivllm.kernels.linear import packed_chain, packed_config, packed_linear, packed_weights
    from minivllm.kernels.megakernel import megakernel

    asked = SimpleNamespace(seed=1, changes=(), gpus=1)
    there, met = {}, threading.Condition()

    def launched(kernel, shape, addresses):
        """The last GPU to come launches all; the others wait until that is over."""
        with met:
            rank = ctypes.c_int.from_address(addresses[-1]).value if asked.gpus > 1 else 0
            there[rank] = addresses
            if len(there) < asked.gpus:
                met.wait_for(lambda: not there, 300)
                return
            given = [address for rank in sorted(there) for address in there[rank]]
            try:
                run(kernel, shape, given)
            finally:
                there.clear()
                met.notify_all()

    def run(kernel, shape, addresses):
        source = kernel.source
        for old, new in asked.changes:
            assert source.count(old) == 1
            source = source.replace(old, new)
        if source not in _EMULATED:
            _EMULATED[source] = emulator.build(source, tmp_path_factory.mktemp("emulated"))
        given = (ctypes.c_void_p * len(addresses))(*addresses)
        wrong = _EMULATED[source](asked.gpus, shape.grid[0], shape.threads, asked.seed, given)
        if wrong:
            raise RuntimeError(wrong.decode())

    def page_map(pointer, pages, size, width, columns=None):  # Pages of emulator.h
        return tensor_map(pointer, size, width, columns or width)

    def plain_page_map(pointer, pages, size, width):
        return tensor_map(pointer, size, width // 2, 32, 1)

    def tensor_map(*numbers):  # Matrix
        data = struct.pack(f"<{len(numbers)}q", *numbers).ljust(128, b"\0")
        kept = ctypes.create_string_buffer(data, 128 + 64)
        at = -ctypes.addressof(kept) % 64
        ctypes.memmove(ctypes.addressof(kept) + at, data, 128)
        return nvrtc.TensorMap(kept, ctypes.addressof(kept) + at)

    for left in (megakernel._words, packed_chain._counts, packed_config._parts):  # of a run that went wrong
        left.cache_clear()
    of_each = {megakernel: 16, packed_chain: 6, packed_linear: 6, stream_decode: 4, prompt_attention: 4}
    for module, programs in of_each.items():
        monkeypatch.setattr(module, "num_sms", lambda device, programs=programs: programs)
        monkeypatch.setattr(module, "load", lambda kernel, device: kernel)
        monkeypatch.setattr(module, "use_pdl", lambda device: False)
    monkeypatch.setattr(packed_weights, "loads", lambda kernel, device: False)  # packed in torch
    monkeypatch.setattr(nvrtc, "available", lambda device: True)
    monkeypatch.setattr(nvrtc, "page_map", page_map)
    monkeypatch.setattr(nvrtc, "plain_page_map", plain_page_map)
    monkeypatch.setattr(nvrtc, "head_map", tensor_map)  # HeadsOfTokens
    monkeypatch.setattr(nvrtc, "tensor_map", tensor_map)
    monkeypatch.setattr(nvrtc, "launch", launched)
    return asked


_EMULATED = {}  # source: what runs it


@pytest.fixture
def gpu():
    """The device; skips where kernels for Hopper cannot be compiled and run."""
    from minivllm.kernels import nvrtc

    device = torch.device("cuda")
    if not torch.cuda.is_available() or not nvrtc.available(device):
        pytest.skip("no Hopper GPU, or no cuda-bindings")
    torch.manual_seed(0)
    return device


@pytest.fixture
def captured():
    """What a function launches, as a CUDA graph; it has run once before."""

    def capture(step):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph

    return capture
