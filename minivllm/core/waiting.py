"""The queue of sequences that wait to run: their order, and which of them a step may admit.

It admits none: ``SlotScheduler`` does, which knows what room there is.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from minivllm.core.sequence import Status

if TYPE_CHECKING:
    from minivllm.core.sequence import Sequence

_LOOK_AHEAD = 32  # how many waiting sequences a step looks at, so that its cost does not grow with the queue
_MAX_OVERTAKEN = 64  # after so many, no later one is admitted before the head of the queue if that keeps it waiting


class WaitingQueue:
    """Waiting sequences by ``place``: the smallest is the head, and goes first if it fits."""

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()
        self._by_id: dict[str, Sequence] = {}
        # A heap of them, plus some that left: (known tokens when it was added, place, request id).
        self._lengths: list[tuple[int, tuple[int, ...], str]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    @property
    def head(self) -> Sequence:
        return self._queue[0]

    def add(self, seq: Sequence) -> bool:
        """Add a sequence at its place; returns whether it is in sight."""
        at = len(self._queue)
        if at and self._queue[-1].place > seq.place:
            at = bisect(self._queue, seq.place, key=_place_of)
        self._queue.insert(at, seq)
        self._by_id[seq.request_id] = seq
        heappush(self._lengths, _length_of(seq))
        if len(self._lengths) > 2 * len(self._queue) + _LOOK_AHEAD:
            self._lengths = [_length_of(other) for other in self._queue]
            heapify(self._lengths)
        return at < _LOOK_AHEAD or self._shortest() is seq

    def remove(self, seq: Sequence) -> None:
        at = 0 if self._queue[0] is seq else bisect_left(self._queue, seq.place, key=_place_of)
        while self._queue[at] is not seq:
            at += 1
        del self._queue[at], self._by_id[seq.request_id]
        if not self._queue:
            self._lengths.clear()

    def admit(self, seq: Sequence) -> None:
        """Remove a sequence that runs from now on; if it is not the head, it overtakes that."""
        self.remove(seq)
        if self._queue and self._queue[0].place < seq.place:
            self._queue[0].overtaken += 1

    def in_sight(self) -> Iterator[Sequence]:
        """Those that a step may admit, in the order in which it should try: the first ``_LOOK_AHEAD``, then the
        shortest of the rest. Whoever iterates may admit the sequence that it was given, and the next one comes into
        sight."""
        at = 0
        while at < min(len(self._queue), _LOOK_AHEAD):
            seq = self._queue[at]
            yield seq
            at += seq.status is Status.WAITING
        while len(self._queue) > _LOOK_AHEAD:
            shortest = self._shortest()
            if shortest is None or shortest.place < self._queue[_LOOK_AHEAD].place:
                return  # it was already tried
            yield shortest
            if shortest.status is Status.WAITING:
                return

    @property
    def may_overtake(self) -> bool:
        """Whether later ones may be admitted before the head even if that keeps it waiting."""
        return self.head.overtaken < _MAX_OVERTAKEN

    def _shortest(self) -> Sequence | None:
        """The sequence with the fewest tokens; the earliest if there are several."""
        while self._lengths:
            seq = self._by_id.get(self._lengths[0][2])
            if seq is not None and _length_of(seq) == self._lengths[0]:
                return seq
            heappop(self._lengths)
        return None

    def check(self) -> None:
        assert all(seq.status is Status.WAITING for seq in self._queue), "one in the queue does not wait"
        places = [seq.place for seq in self._queue]
        assert places == sorted(places), "waiting is out of order"
        assert self._by_id == {seq.request_id: seq for seq in self._queue}, "one in the queue is not found by its id"
        lengths = set(self._lengths)
        assert all(_length_of(seq) in lengths for seq in self._queue), "a length is lost"


def _place_of(seq: Sequence) -> tuple[int, ...]:
    return seq.place


def _length_of(seq: Sequence) -> tuple[int, tuple[int, ...], str]:
    return len(seq.known), seq.place, seq.request_id
