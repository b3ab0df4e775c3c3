"""Copies between GPUs beside what a GPU computes, by its copy engines, to a peer one after another; on a CPU at once.

They go by address, past torch, whose copy takes the host 25 µs with the views that it is of: a layer of four ranks has
thirty. Here each is one call of the driver. Captured, copies and waits are parts of the graph.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable

import torch

from minivllm.kernels.nvrtc import checked


class PeerCopies:
    """To ``peers``, from ``device``, which has its index. Addresses are as this device reaches them."""

    def __init__(self, device: torch.device, peers: Iterable[int]) -> None:
        self._device, self._under_way = device, set[int]()
        self._lanes = {peer: torch.cuda.Stream(device, priority=-1) for peer in peers} if device.type == "cuda" else {}
        self._launched = torch.cuda.Event() if self._lanes else None

    def begin(self, peers: Iterable[int]) -> None:
        """Copies to ``peers`` that follow are behind all that is launched so far, and beside what comes."""
        if self._launched is not None:
            self._launched.record(torch.cuda.current_stream(self._device))
            for peer in peers:
                self._lanes[peer].wait_event(self._launched)
                self._under_way.add(peer)

    def copy(self, peer: int, to: int, what: int, nbytes: int) -> None:
        """Behind the last one to ``peer``, of the same ``begin`` or an earlier one."""
        if not self._lanes:
            ctypes.memmove(to, what, nbytes)
        elif nbytes:
            from cuda.bindings import driver

            checked(driver.cuMemcpyAsync(to, what, nbytes, self._lanes[peer].cuda_stream))

    def settle(self) -> None:
        """What is launched from now on is behind the copies so far. A capture waits for none from before it: what is
        captured must begin settled."""
        for peer in self._under_way:
            torch.cuda.current_stream(self._device).wait_stream(self._lanes[peer])
        self._under_way.clear()

    def wait(self, address: int, number: int) -> None:
        """What is launched from now on finds ``number``, an int32, at ``address``; on a CPU this waits for it."""
        if not self._lanes:
            while ctypes.c_int32.from_address(address).value != number:
                time.sleep(0)
            return
        from cuda.bindings import driver

        stream, equal = torch.cuda.current_stream(self._device).cuda_stream, driver.CUstreamWaitValue_flags
        checked(driver.cuStreamWaitValue32(stream, address, number, equal.CU_STREAM_WAIT_VALUE_EQ))
