"""What a rank gives back while its engine sleeps: the memory of weights and cache, which come back where they were, as
CUDA graphs and tensor maps hold addresses.

# region: addresses that stay reserved; memory is behind them while the engine is awake
#   on a GPU: the driver's virtual memory management (cuMemAddressReserve, cuMemMap)
#   on a CPU: a private anonymous mapping, whose pages the system takes back (MADV_DONTNEED)
"""

from __future__ import annotations

import mmap
import sys
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from minivllm.errors import ConfigError, RequestError
from minivllm.kernels.nvrtc import checked
from minivllm.naming import listed
from minivllm.rounding import round_up

_PIECE = 256 << 20  # bytes that are mapped at a time
_ALIGNMENT = 512  # bytes, as torch's allocator has

# --------------------------------------------------------------------------- regions


class Region(ABC):
    """``size`` bytes at addresses that stay the same: ``tensor``, (size,) uint8. Behind them is no memory until it is
    mapped. They are given up with the last tensor that is a view of ``tensor``."""

    tensor: torch.Tensor

    @abstractmethod
    def map(self, stop: int) -> None:
        """Have memory behind the first ``stop`` bytes. Raises torch.OutOfMemoryError, and has mapped nothing then."""

    @abstractmethod
    def unmap(self) -> None:
        """Give all memory back; what was in it is lost."""


class HostRegion(Region):
    """Pages come when they are first written to; until then they are zeros. ``huge``: of 2 MiB, where the system has
    such, which come ten times as fast."""

    def __init__(self, size: int, huge: bool = False) -> None:
        self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            with suppress(OSError):  # a kernel without them
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)

    def map(self, stop: int) -> None:
        pass

    def unmap(self) -> None:
        self._pages.madvise(mmap.MADV_DONTNEED)


class GpuRegion(Region):
    """In pieces, so that memory can come while what is moved here goes. Zeroed as it comes."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device, self._memory = device, _GpuMemory(size, device)
        self._memory.map(1)  # torch asks whose memory it is
        self.tensor = torch.as_tensor(self._memory, device=device)[:size]
        self.tensor[: self._memory.mapped].zero_()

    def map(self, stop: int) -> None:
        start = self._memory.mapped
        self._memory.map(stop)
        self.tensor[start : self._memory.mapped].zero_()

    def unmap(self) -> None:
        torch.cuda.synchronize(self._device)  # cuMemUnmap does not wait for who writes here, as zero_ may still
        self._memory.unmap()


class _GpuMemory:
    """Owned by the tensor that is made of it, and by its region."""

    def __init__(self, size: int, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver, self._device = driver, device
        what = self._what = driver.CUmemAllocationProp()
        what.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        what.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        what.location.id = device.index
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._size = round_up(size, checked(driver.cuMemGetAllocationGranularity(what, least)))
        self._address = int(checked(driver.cuMemAddressReserve(self._size, 0, 0, 0)))
        self._pieces: list[tuple[int, int, Any]] = []  # address, bytes, handle
        self.__cuda_array_interface__ = {
            "shape": (self._size,), "typestr": "|u1", "data": (self._address, False), "version": 3,
        }  # fmt: skip
        free = weakref.finalize(self, _give_up, driver, device, self._pieces, self._address, self._size)
        free.atexit = False  # the process's end does it

    @property
    def mapped(self) -> int:
        return sum(size for _, size, _ in self._pieces)

    def map(self, stop: int) -> None:
        driver, had = self._driver, len(self._pieces)
        access = driver.CUmemAccessDesc()
        access.location, access.flags = self._what.location, driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        while (start := self.mapped) < min(stop, self._size):
            size = min(_PIECE, self._size - start)
            status, handle = driver.cuMemCreate(size, self._what, 0)
            if int(status):  # torch may have what is needed, and not use it
                torch.cuda.empty_cache()
                status, handle = driver.cuMemCreate(size, self._what, 0)
            if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                _unmap(driver, self._pieces, had)
                raise torch.OutOfMemoryError(f"{size / 2**20:.0f} MiB more are needed than are free on {self._device}")
            checked((status,))
            checked(driver.cuMemMap(self._address + start, size, 0, handle, 0))
            self._pieces.append((self._address + start, size, handle))
            checked(driver.cuMemSetAccess(self._address + start, size, [access], 1))

    def unmap(self) -> None:
        _unmap(self._driver, self._pieces, 0)


def _unmap(driver: Any, pieces: list[tuple[int, int, Any]], left: int) -> None:
    while len(pieces) > left:
        address, size, handle = pieces.pop()
        checked(driver.cuMemUnmap(address, size))
        checked(driver.cuMemRelease(handle))


def _give_up(driver: Any, device: torch.device, pieces: list[tuple[int, int, Any]], address: int, size: int) -> None:
    torch.cuda.synchronize(device)
    _unmap(driver, pieces, 0)
    checked(driver.cuMemAddressFree(address, size))


def _region(size: int, device: torch.device) -> Region:
    return GpuRegion(size, device) if device.type == "cuda" else HostRegion(size)


class _HostCopy:
    """A copy of a GPU's memory, (n,) uint8, which the GPU writes and reads at the full pace of its link."""

    def __init__(self, original: torch.Tensor) -> None:
        from cuda.bindings import driver

        self._copy = HostRegion(len(original), huge=True).tensor.zero_()  # by all cores, so that all pages are there
        address = self._copy.data_ptr()
        (failed,) = driver.cuMemHostRegister(address, len(self._copy), 0)
        if not int(failed):  # else it is slower
            weakref.finalize(self, driver.cuMemHostUnregister, address)
        self._copy.copy_(original)

    def restore(self, original: torch.Tensor) -> None:
        original.copy_(self._copy)


# --------------------------------------------------------------------------- a rank's


class SleepingMemory:
    """A rank's weights, what is made of them, and its cache, in regions of these names: ``weights``, ``copies``,
    ``kv_cache``. Raises ConfigError where there are no regions."""

    def __init__(self, device: torch.device) -> None:
        if sys.platform != "linux":
            raise ConfigError(f"enable_sleep_mode=true works on Linux, not on {sys.platform}; leave it out")
        self._device = device
        self._regions: dict[str, Region] = {}
        self._asleep: set[str] = set()  # names
        self._kept: _HostCopy | None = None  # of weights that sleep at level 1

    @property
    def nbytes(self) -> int:
        return sum(len(region.tensor) for region in self._regions.values())

    def cache(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 zeros for keys and values. Raises torch.OutOfMemoryError."""
        region = _region(nbytes, self._device)
        region.map(nbytes)
        self._regions["kv_cache"] = region
        return region.tensor

    def take(self, name: str, named: Mapping[str, torch.Tensor]) -> None:
        """Move these tensors to region ``name``. Their objects stay the same. Call it before an address is used.

        Raises:
            ConfigError: another tensor shares the memory of one; that could not follow.
        """
        sharing: dict[int, list[str]] = defaultdict(list)  # by address, names of tensors of one storage
        for its, tensor in named.items():
            if tensor.untyped_storage().nbytes():
                sharing[tensor.untyped_storage().data_ptr()].append(its)
        sizes = [named[names[0]].untyped_storage().nbytes() for names in sharing.values()]
        if not sizes:
            return
        region = _region(sum(round_up(size, _ALIGNMENT) for size in sizes), self._device)
        start, freed = 0, 0
        for names, size in zip(sharing.values(), sizes, strict=True):
            region.map(start + size)
            _move([named[name] for name in names], region.tensor[start : start + size], names)
            start += round_up(size, _ALIGNMENT)
            if self._device.type == "cuda" and start - freed > 2 * _PIECE:  # torch would keep it for itself
                torch.cuda.empty_cache()
                freed = start
        self._regions[name] = region

    def sleep(self, level: int) -> None:
        """Give back what is awake; at level 1 a GPU's weights are copied to the host first, and a CPU's stay."""
        on_gpu = self._device.type == "cuda"
        for name in [name for name in self._regions if name not in self._asleep]:
            region = self._regions[name]
            if level == 1 and name == "weights" and on_gpu and self._kept is None:  # else they are not back yet
                self._kept = _HostCopy(region.tensor)
            if level == 2 or name == "kv_cache" or on_gpu:
                region.unmap()
            self._asleep.add(name)
        if on_gpu:
            torch.cuda.empty_cache()

    def wake_up(self, tags: Iterable[str]) -> bool:
        """Have memory for these again, of zeros where nothing was kept. Returns whether weights came back, of which
        copies have to be made.

        Raises:
            RequestError: there is no room for one; it and those behind it sleep on.
        """
        wanted = {"kv_cache"} & set(tags) | ({"weights", "copies"} if "weights" in tags else set())
        for name in [name for name in self._regions if name in wanted & self._asleep]:
            tensor = self._regions[name].tensor
            try:
                self._regions[name].map(len(tensor))
            except torch.OutOfMemoryError as error:
                said = f"wake_up: there is no room for {name}, {len(tensor) / 2**30:.2f} GiB: {error}"
                raise RequestError(said) from error
            self._asleep.remove(name)
        kept = self._kept
        if kept is None or self._asleep & {"weights", "copies"}:
            return False
        self._kept = None
        kept.restore(self._regions["weights"].tensor)
        return True


def _move(tensors: Sequence[torch.Tensor], place: torch.Tensor, names: Sequence[str]) -> None:
    """Move the storage that these share."""
    storage = tensors[0].untyped_storage()
    place.copy_(torch.empty(0, dtype=torch.uint8, device=place.device).set_(storage))
    former = StorageWeakRef(storage)
    del storage
    for tensor in tensors:
        whole = place[: len(place) // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        tensor.data = whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset() + tensor.storage_offset())
    if not former.expired():
        raise ConfigError(
            f"enable_sleep_mode=true: the model has another tensor in the memory of {listed(names)}, as a view that it "
            "keeps; it must make such views when it uses them"
        )
