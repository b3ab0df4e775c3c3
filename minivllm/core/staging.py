"""How a step's arrays cross to the device: one behind another in one packet, in one copy."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import torch

from minivllm.core.landing import IN_FLIGHT

_Array = TypeVar("_Array", np.ndarray, torch.Tensor)
_MOST_KINDS = 256  # prompts launched kernel by kernel may have any number of tokens
_ROOM = 1 << 16  # words behind an array that stands at a fixed place, for what is sent with it
_ALIGNED = 4  # words: each array begins at a multiple of 16 bytes, so that kernels are compiled for one alignment


class Packing:
    """Where arrays of these shapes lie in a packet, which is one-dimensional and int32."""

    def __init__(self, *arrays: tuple[tuple[int, ...], type[np.int32 | np.int64]]) -> None:
        self.places: list[int] = []  # in words, as ``words``, all of them
        self.words = 0
        self._cuts: list[tuple[slice, tuple[int, ...], bool]] = []  # the shape of more dimensions, whether it is int64
        for shape, dtype in arrays:
            long = dtype is np.int64
            end = self.words + int(np.prod(shape)) * (1 + long)
            self.places.append(self.words)
            self._cuts.append((slice(self.words, end), shape if len(shape) > 1 else (), long))
            self.words = -(-end // _ALIGNED) * _ALIGNED

    def cut(self, packet: _Array) -> list[_Array]:
        """The arrays in a packet (``words`` or more,), as views of it, on the host or on the device."""
        wide, arrays = np.int64 if isinstance(packet, np.ndarray) else torch.int64, []
        for at, shape, long in self._cuts:
            array = packet[at].view(wide) if long else packet[at]
            arrays.append(array.reshape(shape) if shape else array)
        return arrays


class PinnedRing:
    """Pinned host memory for what crosses to or from a GPU."""

    def __init__(self) -> None:
        self._pinned = [torch.empty(0, dtype=torch.int32)] * IN_FLIGHT
        self._turn = 0

    def next(self, words: int) -> torch.Tensor:
        """(words,) int32, of nobody else until it has been called ``IN_FLIGHT`` times."""
        self._turn = (self._turn + 1) % IN_FLIGHT
        if len(self._pinned[self._turn]) < words:
            self._pinned[self._turn] = torch.empty(2 * words, dtype=torch.int32, pin_memory=True)
        return self._pinned[self._turn][:words]


class _Kind(NamedTuple):
    """Of arrays of certain sizes: where each begins, its tensor on the device, and all of them."""

    places: list[int]
    sent: list[torch.Tensor]
    packet: torch.Tensor


class Staging:
    """Many small host arrays to the device in one copy, through pinned memory on a GPU."""

    def __init__(self, device: torch.device, words: int = 0) -> None:
        """``words``: of the longest array that must always stand at the front of ``words``, when it is sent first."""
        self.device, self._fixed = device, bool(words)
        self._ring = PinnedRing()
        self.words = torch.zeros(words + _ROOM * self._fixed, dtype=torch.int32, device=device)
        self._kinds: dict[tuple[int, ...], _Kind] = {}  # to make a tensor of each array takes as long as the copy

    def send(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Each int32 or int64 array (size,) on the device; records as int32, (their words,). They stand there until
        what is launched behind the next ``send``, and the first one at the front of ``words`` if that is its place."""
        words = [np.ascontiguousarray(a).view(np.int32) for a in arrays]
        if self._fixed and sum(map(len, words)) > len(self.words) - _ALIGNED * len(words):
            return self.send(arrays[0]) + Staging(self.device).send(*arrays[1:])
        kind = tuple(2 * len(w) + (a.dtype == np.int64) for w, a in zip(words, arrays, strict=True))
        places, sent, packet = self._kinds.get(kind) or self._add(kind)
        if not len(packet):
            return sent
        staged = packet if self.device.type == "cpu" else self._ring.next(len(packet))
        flat = staged.numpy()
        for at, w in zip(places, words, strict=True):
            flat[at : at + len(w)] = w
        if staged is not packet:
            packet.copy_(staged, non_blocking=True)
        return sent

    def _add(self, kind: tuple[int, ...]) -> _Kind:
        """``kind``: twice the words of each array, and 1 more of int64."""
        packing = Packing(*(((each // 4,), np.int64) if each % 2 else ((each // 2,), np.int32) for each in kind))
        if packing.words > len(self.words):
            assert not self._fixed
            self._kinds.clear()
            self.words = torch.zeros(2 * packing.words, dtype=torch.int32, device=self.device)
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        packet = self.words[: packing.words]
        return self._kinds.setdefault(kind, _Kind(packing.places, packing.cut(packet), packet))
