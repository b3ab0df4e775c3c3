"""CUDA C++ kernels, compiled by NVRTC when first needed: for what Triton cannot express (clusters).

Needs the package cuda-bindings, which torch's CUDA builds bring along; without it ``available`` is False and callers
use other kernels. Compiled kernels are cached in Triton's cache directory.
"""

import ctypes
import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minivllm.errors import MinivllmError
from minivllm.kernels._triton import HAVE_TRITON, triton

_ARCHITECTURE = "sm_90a"  # the only one with wgmma and setmaxnreg


@cache
def available(device: torch.device) -> bool:
    """Whether Hopper kernels can be compiled and run on ``device``."""
    if device.type != "cuda" or torch.version.cuda is None or not HAVE_TRITON:
        return False
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library
    except (ImportError, RuntimeError, OSError):
        return False
    return True


def checked(result: tuple[Any, ...]) -> Any:
    """What a cuda-bindings call returned, without its status."""
    if int(result[0]):
        raise MinivllmError(f"a call of the CUDA driver or compiler failed: {result[0]}")
    return result[1] if len(result) == 2 else result[1:]


def compile_cubin(source: str) -> bytes:
    """The machine code of ``source`` for Hopper, cached on disk. Raises MinivllmError with the compiler's log."""
    from cuda.bindings import nvrtc

    version = checked(nvrtc.nvrtcVersion())
    key = hashlib.sha256(f"{version} {_ARCHITECTURE} {source}".encode()).hexdigest()[:32]
    path = Path(triton.knobs.cache.dir) / f"minivllm-{key}.cubin"
    if path.is_file():
        return path.read_bytes()
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    options = [f"--gpu-architecture={_ARCHITECTURE}".encode()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status):
        log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise MinivllmError(f"a kernel does not compile: {status}\n{log.decode().rstrip(chr(0))}")
    cubin = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    checked(nvrtc.nvrtcDestroyProgram(program))
    with suppress(OSError):  # with a read-only directory every process compiles again
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")  # ranks compile at the same time
        unfinished.write_bytes(cubin)
        unfinished.replace(path)
    return bytes(cubin)


def load(cubin: bytes, name: str, device: torch.device, shared_bytes: int) -> Any:
    """The kernel ``name`` on ``device``, allowed ``shared_bytes`` of dynamic shared memory per program."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # by now torch has created the device's context, and it is current
        module = checked(driver.cuModuleLoadData(cubin))
        function = checked(driver.cuModuleGetFunction(module, name.encode()))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, limit, shared_bytes))
    return function


class TensorMap(NamedTuple):
    """A driver object, and the address of its 128 bytes."""

    made: Any
    address: int


@lru_cache(maxsize=8192)
def tensor_map(pointer: int, rows: int, columns: int, stride: int, box_rows: int, box_columns: int) -> TensorMap:
    """What TMA needs to load tiles of a bfloat16 matrix in swizzled lines of 128 bytes; zeros beyond its ends.

    ``pointer`` in bytes and ``stride`` in elements must be multiples of 16 bytes. Nothing else of the tensor matters,
    so a map may outlive it.
    """
    return _encoded(pointer, (columns, rows), (stride,), (box_columns, box_rows))


@lru_cache(maxsize=8192)
def page_map(pointer: int, pages: int, size: int, width: int, columns: int | None = None) -> TensorMap:
    """The same for pages of ``size`` lines of ``width`` elements, one after another, or ``columns`` of them. In shared
    memory each 64 columns of a page are contiguous, ``size`` lines of 128 bytes."""
    box = (64, size, (columns or width) // 64, 1)
    return _encoded(pointer, (64, size, width // 64, pages), (width, 64, size * width), box)


@lru_cache(maxsize=8192)
def plain_page_map(pointer: int, pages: int, size: int, width: int) -> TensorMap:
    """The same for pages of ``size`` lines of ``width`` bytes: 64 of each line, which are not swizzled."""
    sizes, strides = (32, size, width // 64, pages), (width // 2, 32, size * width // 2)
    return _encoded(pointer, sizes, strides, (32, size, 1, 1), swizzled=False)


@lru_cache(maxsize=8192)
def head_map(
    pointer: int, tokens: int, heads: int, dim: int, stride: int, box_heads: int, box_tokens: int
) -> TensorMap:
    """The same for (tokens, heads, dim), with ``stride`` elements between tokens: 64 dimensions of some heads of some
    tokens, a token's heads one after another."""
    box = (64, box_heads, box_tokens, 1)
    return _encoded(pointer, (64, heads, tokens, dim // 64), (dim, stride, 64), box)


def _encoded(
    pointer: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzled: bool = True
) -> TensorMap:
    """Dimensions from the innermost, which is contiguous, outward; ``strides``: of the others, in elements."""
    from cuda.bindings import driver

    swizzles = driver.CUtensorMapSwizzle
    made = checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(sizes),
            pointer,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(2 * stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,  # with 256: 4.2, not 4.6 TB/s
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap(made, int(made.getPtr()))


Size = tuple[int, int, int]


@dataclass(frozen=True, eq=False, slots=True)
class LaunchShape:
    """How a kernel is launched. ``pdl``: as a programmatic dependent launch, see pdl.py."""

    grid: Size
    cluster: Size
    threads: int
    shared_bytes: int
    pdl: bool


@lru_cache(maxsize=4096)
def _launch_config(shape: LaunchShape, stream: int) -> Any:
    from cuda.bindings import driver

    attributes = []

    def attribute(name: Any) -> Any:
        made = driver.CUlaunchAttribute()
        made.id = name
        attributes.append(made)
        return made.value

    if shape.cluster != (1, 1, 1):  # even clusters of one are placed as clusters: two per SM, other SMs idle
        size = attribute(driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim
        size.x, size.y, size.z = shape.cluster
    if shape.pdl:
        value = attribute(driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
        value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.threads, 1, 1
    config.sharedMemBytes = shape.shared_bytes
    config.hStream = stream
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def _stream() -> int:
    """Torch's current stream. Without a device given, torch asks the driver how many there are: 30 µs per launch."""
    return torch.cuda.current_stream(torch.cuda.current_device()).cuda_stream


def clusters_at_once(function: Any, shape: LaunchShape) -> int:
    """How many clusters of a kernel can be resident at once on the current device."""
    from cuda.bindings import driver

    config = _launch_config(shape, _stream())
    return int(checked(driver.cuOccupancyMaxActiveClusters(function, config)))


def programs_at_once(function: Any, shape: LaunchShape, multiprocessors: int) -> int:
    """How many programs of a kernel without clusters can be resident at once on a device with so many SMs."""
    from cuda.bindings import driver

    each = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, shape.threads, shape.shared_bytes)
    return multiprocessors * int(checked(each))


def launch(function: Any, shape: LaunchShape, arguments: list[int]) -> None:
    """Start a kernel on torch's current stream. ``arguments``: the address of each; read before this returns."""
    from cuda.bindings import driver

    addresses = (ctypes.c_void_p * len(arguments))(*arguments)
    config = _launch_config(shape, _stream())
    checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(addresses), 0))
