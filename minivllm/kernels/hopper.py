"""Shared by the CUDA C++ kernels for Hopper: assembling, compiling and loading one, launching products, and the
epilogue of a projection of heads."""

import ctypes
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minivllm.errors import MinivllmError
from minivllm.kernels import nvrtc
from minivllm.kernels._triton import compiling

if TYPE_CHECKING:  # the folders' kernels import this file
    from minivllm.kernels.attention.rotary import Heads

logger = logging.getLogger("minivllm")

STEP = 64  # elements of k per stage: 128 bytes, TMA's swizzle width
SHARED_BYTES = 227 * 1024  # shared memory that a program may have
FIXED_BYTES = 2048  # of it: barriers, and aligning tiles to 1,024


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a kernel is compiled from: ``macros``, hopper.cuh, generated WGMMA products, the .cuh files named in
    ``headers``, and ``name``.cu; all in this folder or one in it.

    A product is one instruction, 64 x 16 (A) times 16 x N (B) of ``operands``, "bf16" or "f16", or 64 x 32 times 32 x N
    of "e4m3", which only ``columns`` can be. It is generated for each N
    - of ``columns``: ``multiply``, and ``multiply_first``, which overwrites the sums; both in shared memory, K-major;
    - of ``held``: ``multiply_held``; A in registers, B N-major;
    - of ``by``: ``multiply_by``; A in registers, B K-major.
    """

    name: str
    columns: tuple[int, ...]
    macros: tuple[tuple[str, int], ...]
    headers: tuple[str, ...] = ()
    held: tuple[int, ...] = ()
    by: tuple[int, ...] = ()
    operands: str = "bf16"

    @property
    def source(self) -> str:
        macros = "".join(f"#define {name} {value}\n" for name, value in self.macros)
        files = ("hopper.cuh", *(f"{name}.cuh" for name in self.headers), f"{self.name}.cu")
        first, *others = (_sources()[file].read_text() for file in files)
        ways = (_multiply, self.columns), (_multiply_held, self.held), (_multiply_by, self.by)
        products = [way(n, self.operands) for way, columns in ways for n in columns]
        return macros + first + "".join(products) + "".join(others)


@cache
def _sources() -> dict[str, Path]:
    """The files in CUDA C++ by name: no two folders have the same."""
    folder = Path(__file__).parent
    return {file.name: file for ending in ("cu", "cuh") for file in folder.rglob(f"*.{ending}")}


def _multiply(n: int, operands: str) -> str:
    product, signs = _product(n, operands), "1, 1" if operands == "e4m3" else "1, 1, 0, 0"
    both = (("multiply", "+", 1), ("multiply_first", "=", 0))
    a, b = (f"%{n // 2 + i}" for i in range(2))
    return "".join(
        f"__device__ __forceinline__ void {name}(float (&d)[{n // 2}], u64 a, u64 b) {{\n"
        f'  asm volatile("{product}, {a}, {b}, {adds}, {signs};" : {_sums(n, sign)} : "l"(a), "l"(b));\n}}\n'
        for name, sign, adds in both
    )


def _multiply_held(n: int, operands: str) -> str:
    a, b = ", ".join(f"%{n // 2 + i}" for i in range(4)), f"%{n // 2 + 4}"
    return (
        f"__device__ __forceinline__ void multiply_held(float (&d)[{n // 2}], u32 a0, u32 a1, u32 a2, u32 a3, u64 b)"
        f' {{\n  asm volatile("{_product(n, operands)}, {{{a}}}, {b}, 1, 1, 1, 1;" : {_sums(n, "+")} :'
        f' "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));\n}}\n'
    )


def _multiply_by(n: int, operands: str) -> str:
    """Adds to the sums, or overwrites them if not ``adds``: setting them to zero first would stall."""
    a, b, adds = ", ".join(f"%{n // 2 + i}" for i in range(4)), f"%{n // 2 + 4}", f"%{n // 2 + 5}"
    product = f".reg .pred p;\\nsetp.ne.b32 p, {adds}, 0;\\n{_product(n, operands)}, {{{a}}}, {b}, p, 1, 1, 0;"
    return (
        f"__device__ __forceinline__ void multiply_by(float (&d)[{n // 2}], const u32* a, u64 b, int adds) {{\n"
        f'  asm volatile("{{\\n{product}\\n}}" : {_sums(n, "+")} :'
        f' "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));\n}}\n'
    )


def _product(n: int, operands: str) -> str:
    kind = f"m64n{n}k{32 if operands == 'e4m3' else 16}.f32.{operands}.{operands}"
    return f"wgmma.mma_async.sync.aligned.{kind} {{{', '.join(f'%{i}' for i in range(n // 2))}}}"


def _sums(n: int, sign: str) -> str:
    return ", ".join(f'"{sign}f"(d[{i}])' for i in range(n // 2))


@cache
def _compiled(kernel: Kernel) -> Future[bytes]:
    """Half a second each, the first time on a machine; in parallel."""
    return _pool().submit(nvrtc.compile_cubin, kernel.source)


def compile_ahead(kernel: Kernel) -> None:
    """Start compiling, for a later ``loads`` or ``load``."""
    _compiled(kernel)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(8, "nvrtc")


@cache
def load(kernel: Kernel, device: torch.device) -> Any:
    """The driver's function. Raises MinivllmError if compiling fails."""
    return nvrtc.load(_compiled(kernel).result(), kernel.name, device, SHARED_BYTES - 1024)


def loads(kernel: Kernel, device: torch.device) -> bool:
    """Whether the kernel compiles and loads here. If not, a warning gives the reason once; use another kernel. While
    kernels are only compiled ahead, this returns at once."""
    if compiling():
        _compiled(kernel)
        return True
    return _loaded(kernel, device)


@cache
def _loaded(kernel: Kernel, device: torch.device) -> bool:
    try:
        load(kernel, device)
    except MinivllmError as error:
        logger.warning("the kernel %s cannot be used, so slower ones are: %s", kernel.name, error)
        return False
    return True


# --------------------------------------------------------------------------- heads


_POINTERS = ("angles", "positions", "slots", "keys", "values", "query_norm", "key_norm", "kept")


class HeadsArgument(ctypes.Structure):
    """``Heads`` of hopper.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("angles", "block", "slot", "head")),
        *((name, ctypes.c_int) for name in ("queries", "keys_each", "block_size")),
        ("eps", ctypes.c_float),
    ]


def heads_argument(heads: "Heads | None", kept: torch.Tensor | None = None) -> HeadsArgument:
    """``kept`` (t, 2 * kv heads, head_dim): receives a copy of keys and values."""
    if heads is None:
        return HeadsArgument()
    assert heads.k_cache.stride() == heads.v_cache.stride() and heads.k_cache.stride(3) == 1
    assert heads.positions.dtype == heads.slot_mapping.dtype == torch.int64
    read = (heads.cos_sin, heads.positions, heads.slot_mapping, heads.k_cache, heads.v_cache)
    perhaps = (heads.q_weight, heads.k_weight, kept)
    return HeadsArgument(
        *(tensor.data_ptr() for tensor in read), *(None if t is None else t.data_ptr() for t in perhaps),
        heads.cos_sin.stride(0), *heads.k_cache.stride()[:3],
        heads.num_heads, heads.num_kv_heads, heads.k_cache.shape[1], heads.eps,
    )  # fmt: skip


# --------------------------------------------------------------------------- launching


def launch_kernel(
    function: Any,
    shape: nvrtc.LaunchShape,
    maps: Sequence[nvrtc.TensorMap],
    tensors: Sequence[torch.Tensor | None],
    *values: Any,
) -> None:
    """Launch a kernel whose parameters are ``maps``, a pointer to each of ``tensors`` (null for None), and ``values``,
    objects of ctypes, of which an array is a parameter per element."""
    addresses = [made.address for made in maps]
    pointers = (ctypes.c_void_p * len(tensors))(*(None if tensor is None else tensor.data_ptr() for tensor in tensors))
    for value in (pointers, *values):
        at = ctypes.addressof(value)
        size = ctypes.sizeof(value._type_) if isinstance(value, ctypes.Array) else ctypes.sizeof(value)
        addresses += range(at, at + ctypes.sizeof(value), size)
    nvrtc.launch(function, shape, addresses)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the launches of a product with tensors of one shape share, made once for ``launch_product``."""

    kernel: Any
    shape: nvrtc.LaunchShape
    boxes: tuple[int, ...]  # lines per TMA load: for each of the weight's maps, and last rows of x
    numbers: Any  # the kernel's, in arrays that must stay alive
    addresses: list[int]  # of each number


def plan_of(
    kernel: Kernel,
    device: torch.device,
    shape: nvrtc.LaunchShape,
    boxes: tuple[int, ...],
    ints: Sequence[int],
    floats: Sequence[float] = (),
) -> Plan:
    numbers = (ctypes.c_int * len(ints))(*ints), (ctypes.c_float * len(floats))(*floats)
    addresses = [ctypes.addressof(array) + 4 * i for array in numbers for i in range(len(array))]
    return Plan(load(kernel, device), shape, boxes, numbers, addresses)


def launch_product(
    plan: Plan,
    x: torch.Tensor,
    weight: torch.Tensor,
    tensors: Sequence[torch.Tensor | None],
    *structures: ctypes.Structure,
) -> None:
    """x (t, k), weight (n, k). The kernel's parameters are the tensor maps, the weight's first, pointers to
    ``tensors``, the plan's numbers, and ``structures``."""
    assert weight.is_contiguous()
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:  # TMA's alignment
        x = x.contiguous()
    (rows, k), n = x.shape, weight.shape[0]
    *lines, box_rows = plan.boxes
    maps = [nvrtc.tensor_map(weight.data_ptr(), n, k, k, box_lines, STEP) for box_lines in lines]
    maps.append(nvrtc.tensor_map(x.data_ptr(), rows, k, x.stride(0), box_rows, STEP))
    pointers = (ctypes.c_void_p * len(tensors))(*[None if t is None else t.data_ptr() for t in tensors])
    at = ctypes.addressof(pointers)
    to_pointers = range(at, at + ctypes.sizeof(pointers), 8)
    addresses = [*(made.address for made in maps), *to_pointers, *plan.addresses, *map(ctypes.addressof, structures)]
    nvrtc.launch(plan.kernel, plan.shape, addresses)
