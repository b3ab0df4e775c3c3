"""Copies between GPUs beside what a GPU computes, by its copy engines, one after another; on a CPU at once.

They go by address, past torch, whose copy takes the host 25 µs with the views that it is of: a layer of four ranks has
thirty. Here each is one call of the driver.
"""

from __future__ import annotations

import ctypes
import time

import torch

from minivllm.kernels.nvrtc import checked


class PeerCopies:
    """To one peer, from ``device``, which has its index. Addresses are as this device reaches them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lane = device, None
        if device.type == "cuda":
            self._lane = torch.cuda.Stream(device, priority=-1)
            self._launched = torch.cuda.Event()

    def begin(self) -> None:
        """The copies that follow are behind all that is launched so far, and beside what comes."""
        if self._lane is not None:
            self._launched.record(torch.cuda.current_stream(self._device))
            self._lane.wait_event(self._launched)

    def copy(self, to: int, what: int, nbytes: int) -> None:
        if self._lane is None:
            ctypes.memmove(to, what, nbytes)
        elif nbytes:
            from cuda.bindings import driver

            checked(driver.cuMemcpyAsync(to, what, nbytes, self._lane.cuda_stream))

    def settle(self) -> None:
        """What is launched from now on is behind the copies so far."""
        if self._lane is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._lane)

    def wait(self, address: int, number: int) -> None:
        """What is launched from now on finds ``number``, an int32, at ``address``; on a CPU this waits for it."""
        if self._lane is None:
            while ctypes.c_int32.from_address(address).value != number:
                time.sleep(0)
            return
        from cuda.bindings import driver

        stream, equal = torch.cuda.current_stream(self._device).cuda_stream, driver.CUstreamWaitValue_flags
        checked(driver.cuStreamWaitValue32(stream, address, number, equal.CU_STREAM_WAIT_VALUE_EQ))
