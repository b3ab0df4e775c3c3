"""Copies between GPUs by copy engines, overlapped with compute; in order for each peer. On a CPU they are synchronous.

They use addresses and bypass torch, whose copy, including views, costs the host 25 µs: a layer on four ranks has
thirty. Here each is one driver call. Under capture, copies and waits become part of the graph.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable

import torch

from minivllm.kernels.nvrtc import checked


class PeerCopies:
    """Copies to ``peers`` from ``device``, which must have an index. Addresses are as seen from this device."""

    def __init__(self, device: torch.device, peers: Iterable[int]) -> None:
        self._device, self._under_way = device, set[int]()
        self._lanes = {peer: torch.cuda.Stream(device, priority=-1) for peer in peers} if device.type == "cuda" else {}
        self._launched = torch.cuda.Event() if self._lanes else None

    def begin(self, peers: Iterable[int]) -> None:
        """Make further copies to ``peers`` wait for all that is launched so far; they overlap with what comes later."""
        if self._launched is not None:
            self._launched.record(torch.cuda.current_stream(self._device))
            for peer in peers:
                self._lanes[peer].wait_event(self._launched)
                self._under_way.add(peer)

    def copy(self, peer: int, to: int, what: int, nbytes: int) -> None:
        """Copy after the last copy to ``peer``, of the same ``begin`` or an earlier one."""
        if not self._lanes:
            ctypes.memmove(to, what, nbytes)
        elif nbytes:
            from cuda.bindings import driver

            checked(driver.cuMemcpyAsync(to, what, nbytes, self._lanes[peer].cuda_stream))

    def settle(self) -> None:
        """Make what is launched from now on wait for the copies so far. A capture must begin settled: it cannot wait
        for copies from before it."""
        for peer in self._under_way:
            torch.cuda.current_stream(self._device).wait_stream(self._lanes[peer])
        self._under_way.clear()

    def wait(self, address: int, number: int) -> None:
        """Make what is launched from now on wait for ``number``, an int32, at ``address``; on a CPU, wait here."""
        if not self._lanes:
            while ctypes.c_int32.from_address(address).value != number:
                time.sleep(0)
            return
        from cuda.bindings import driver

        stream, equal = torch.cuda.current_stream(self._device).cuda_stream, driver.CUstreamWaitValue_flags
        checked(driver.cuStreamWaitValue32(stream, address, number, equal.CU_STREAM_WAIT_VALUE_EQ))
