"""Messages from one process to several through shared memory: a few microseconds when the reader is awake.

The memory has no name (an unlinked file or a memfd, passed to children as a descriptor), so nothing is left behind
however its owners die. Messages are bytes; one longer than a slot is sent in pieces.

# words (int64): one line (64 bytes) of the writer: [written], in slots since the start
#                one line a reader: [read, asleep, beats]
# then the slots: [length, 1 if the message goes on in the next slot], payload
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import tempfile
import threading
import time
from collections.abc import Callable

from minivllm.rounding import cdiv

_LINE = 8  # words
_READ, _ASLEEP, _BEATS = 0, 1, 2
_SPIN = 50e-6  # seconds that a reader spins before it sleeps: an answer often comes within microseconds
SLOTS = 8


def create_memory(size: int) -> int:
    """A descriptor of ``size`` bytes of anonymous shared memory; pages are allocated when first written to."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("minivllm")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


class Ring:
    """The shared memory of one direction, as seen by any of its processes."""

    def __init__(self, fd: int, readers: int, slot_bytes: int) -> None:
        self.fd, self.readers, self.slot_bytes = fd, readers, slot_bytes
        self.stride = 2 + cdiv(slot_bytes, 8)  # words of a slot
        self.first = (1 + readers) * _LINE  # its first word
        self.memory = mmap.mmap(fd, self.size(readers, slot_bytes))
        self.bytes = memoryview(self.memory)
        self.words = self.bytes.cast("q")
        self._fence = threading.Lock()

    @staticmethod
    def size(readers: int, slot_bytes: int) -> int:
        return 8 * ((1 + readers) * _LINE + SLOTS * (2 + cdiv(slot_bytes, 8)))

    def fence(self) -> None:
        """Order memory accesses before this against those after it (a lock's atomics do; x86 hardly needs it)."""
        with self._fence:
            pass

    def slot(self, number: int) -> int:
        return self.first + (number % SLOTS) * self.stride

    def beats(self, reader: int) -> int:
        return self.words[(1 + reader) * _LINE + _BEATS]

    def read(self, reader: int) -> int:
        return self.words[(1 + reader) * _LINE + _READ]

    def close(self) -> None:
        self.words.release()
        self.bytes.release()
        self.memory.close()
        os.close(self.fd)


class Bell:
    """Wakes a sleeping process, through a pipe whose contents do not matter."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd

    @classmethod
    def create(cls) -> Bell:
        bell = cls(*os.pipe())
        os.set_blocking(bell.read_fd, False)
        os.set_blocking(bell.write_fd, False)
        return bell

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the pipe is full; the reader is gone
            os.write(self.write_fd, b"\0")

    def silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.read_fd, 4096)

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)


class Writer:
    """The one process that sends on a ring."""

    def __init__(self, ring: Ring, bells: list[Bell]) -> None:
        self.ring, self.bells, self.written = ring, bells, ring.words[0]

    def send(self, message: bytes, check: Callable[[], object] = lambda: None) -> None:
        """Send ``message`` to all readers. While the ring is full, ``check`` is called repeatedly (it may raise)."""
        ring, size = self.ring, self.ring.slot_bytes
        for start in range(0, max(len(message), 1), size):
            piece = message[start : start + size] if len(message) > size else message
            while self.written - min(map(ring.read, range(ring.readers))) >= SLOTS:
                check()
                time.sleep(1e-4)
            at = ring.slot(self.written)
            ring.bytes[8 * (at + 2) : 8 * (at + 2) + len(piece)] = piece
            ring.words[at], ring.words[at + 1] = len(piece), start + size < len(message)
            ring.fence()
            self.written += 1
            ring.words[0] = self.written
            ring.fence()
            for reader, bell in enumerate(self.bells):
                if ring.words[(1 + reader) * _LINE + _ASLEEP]:
                    bell.ring()


class Reader:
    """One of the processes that receive from a ring."""

    def __init__(self, ring: Ring, index: int, bell: Bell) -> None:
        self.ring, self.bell = ring, bell
        self._line = (1 + index) * _LINE
        self._read = ring.words[self._line + _READ]
        self._parts = bytearray()
        self._poller = select.poll()
        self._poller.register(bell.read_fd, select.POLLIN)

    def beat(self) -> None:
        """A sign of life, for the writer to see."""
        self.ring.words[self._line + _BEATS] += 1

    def receive(self, sleep: Callable[[], object] | None = None) -> bytearray:
        """The next message. ``sleep`` waits for the bell with a timeout; it is called repeatedly and may raise."""
        sleep = sleep or self._sleep
        while True:
            end = time.perf_counter() + _SPIN
            while True:
                if (message := self._try_receive()) is not None:
                    return message
                if time.perf_counter() >= end:
                    break
                os.sched_yield()
            self.ring.words[self._line + _ASLEEP] = 1
            self.ring.fence()
            try:
                if self.ring.words[0] == self._read:
                    sleep()
            finally:
                self.ring.words[self._line + _ASLEEP] = 0
                self.bell.silence()

    def _sleep(self) -> None:
        self._poller.poll(500)

    def _try_receive(self) -> bytearray | None:
        ring = self.ring
        while ring.words[0] != self._read:
            ring.fence()
            at = ring.slot(self._read)
            length, more = ring.words[at], ring.words[at + 1]
            self._parts += ring.bytes[8 * (at + 2) : 8 * (at + 2) + length]
            self._read += 1
            ring.fence()
            ring.words[self._line + _READ] = self._read
            if not more:
                message, self._parts = self._parts, bytearray()
                return message
        return None
