"""Copies a step's arrays to the device: packed one after another into one packet, in one copy."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import torch

from minivllm.core.landing import IN_FLIGHT
from minivllm.rounding import round_up

_Array = TypeVar("_Array", np.ndarray, torch.Tensor)
_MOST_KINDS = 256  # eager prompt steps may have any number of tokens
_ROOM = 1 << 16  # words after the array at the fixed place, for the arrays sent with it
_ALIGNED = 4  # words: each array begins at a multiple of 16 bytes, so that kernels are compiled for one alignment


class Packing:
    """The layout of arrays of these shapes in a packet, which is one-dimensional and int32."""

    def __init__(self, *arrays: tuple[tuple[int, ...], type[np.int32 | np.int64]]) -> None:
        self.places: list[int] = []  # each array's offset, in words
        self.words = 0  # in all
        self._cuts: list[tuple[slice, tuple[int, ...], bool]] = []  # words, shape if not 1-D, whether it is int64
        for shape, dtype in arrays:
            long = dtype is np.int64
            end = self.words + int(np.prod(shape)) * (1 + long)
            self.places.append(self.words)
            self._cuts.append((slice(self.words, end), shape if len(shape) > 1 else (), long))
            self.words = round_up(end, _ALIGNED)

    def cut(self, packet: _Array) -> list[_Array]:
        """Views of the arrays in a packet (``words`` or more,), which is on the host or on the device."""
        wide, arrays = np.int64 if isinstance(packet, np.ndarray) else torch.int64, []
        for at, shape, long in self._cuts:
            array = packet[at].view(wide) if long else packet[at]
            arrays.append(array.reshape(shape) if shape else array)
        return arrays


class PinnedRing:
    """Pinned host memory for copies to or from a GPU."""

    def __init__(self) -> None:
        self._pinned = [torch.empty(0, dtype=torch.int32)] * IN_FLIGHT
        self._turn = 0

    def next(self, words: int) -> torch.Tensor:
        """(words,) int32, not reused by the next ``IN_FLIGHT - 1`` calls."""
        self._turn = (self._turn + 1) % IN_FLIGHT
        if len(self._pinned[self._turn]) < words:
            self._pinned[self._turn] = torch.empty(2 * words, dtype=torch.int32, pin_memory=True)
        return self._pinned[self._turn][:words]


class _Kind(NamedTuple):
    """For arrays of certain sizes: each one's offset, each one's tensor on the device, and the whole packet."""

    places: list[int]
    sent: list[torch.Tensor]
    packet: torch.Tensor


class Staging:
    """Copies many small host arrays to the device in one copy, on a GPU through pinned memory."""

    def __init__(self, device: torch.device, words: int = 0) -> None:
        """``words``: reserve the front of ``self.words`` for the first array of each send, up to this many int32 words;
        0: no fixed place."""
        self.device, self._fixed = device, bool(words)
        self._ring = PinnedRing()
        self.words = torch.zeros(words + _ROOM * self._fixed, dtype=torch.int32, device=device)
        self._kinds: dict[tuple[int, ...], _Kind] = {}  # making the tensors takes as long as the copy

    def send(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Each int32 or int64 array (size,) on the device; structured arrays as int32 words. They are valid for work
        launched before the next ``send``. The first one is at the front of ``words`` if its place is fixed."""
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
        """``kind``: for each array twice its number of words, plus 1 if it is int64."""
        packing = Packing(*(((each // 4,), np.int64) if each % 2 else ((each // 2,), np.int32) for each in kind))
        if packing.words > len(self.words):
            assert not self._fixed
            self._kinds.clear()
            self.words = torch.zeros(2 * packing.words, dtype=torch.int32, device=self.device)
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        packet = self.words[: packing.words]
        return self._kinds.setdefault(kind, _Kind(packing.places, packing.cut(packet), packet))
