"""The parent's side of rank processes: starting them, detecting that one is gone or silent, ending them all.

They are started before the parent imports torch, and import it at the same time (``start_children``); they are told
which rank they are once the parent knows (``RankProcesses.spawn``).

A rank is monitored in three ways: its socket closes when it dies, however it dies; it reports its own errors there; and
its heartbeats stop if it is stopped, or stuck with all threads blocked. At startup that may be legitimate (an import or
a driver can block all threads), so there a rank counts as lost only if the system says that it is stopped, or if no
rank makes progress for long.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from minivllm import child_process
from minivllm.cores import usable_cores
from minivllm.errors import EngineDeadError, MinivllmError
from minivllm.executors.messages import Failed, Hello, Link, Ready, Still
from minivllm.executors.progress import SILENT, START_TIMEOUT, TICK, nobody_moves

_LAST_WORDS = 0.5  # seconds for others to report, to find which failed first
_GRACE = 3.0  # seconds between asking ranks to exit and killing them


@dataclass(slots=True)
class Rank:
    """One rank, as seen by its parent."""

    number: int
    process: subprocess.Popen[bytes]
    link: Link
    ready: Ready | None = None
    failed: Failed | None = None
    place: Still = field(default_factory=Still.at_first)
    beats: int = 0
    silent: float = 0.0  # seconds, while we were watching

    def hear(self) -> None:
        for message in self.link.hear():
            if isinstance(message, Ready):
                self.ready = message
            elif isinstance(message, Failed):
                self.failed = self.failed or message
            elif isinstance(message, Still):
                self.place = message

    def still(self) -> Still:
        """Where it is; its last report is stale if it is silent."""
        return Still(self.place.where, self.place.seconds + self.silent)

    def end(self) -> str:
        """How its process ended, in words."""
        try:
            code = self.process.wait(1)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return child_process.how_it_ended(code) + hint


@dataclass(frozen=True, slots=True)
class Child:
    """A process waiting to be told which rank it is."""

    process: subprocess.Popen[bytes]
    link: Link
    dies_with_parent: bool

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.link.socket.close()


def start_children(size: int, gpus: bool) -> list[Child]:
    """Start a process for each of ``size`` ranks. ``gpus``: rank i may open GPU i while it imports torch."""
    with ExitStack() as undo:
        children = []
        for number in range(size):
            children.append(_start_child(size, [str(number)] if gpus else []))
            undo.callback(children[-1].kill)
        undo.pop_all()
    return children


def _start_child(size: int, gpu: list[str]) -> Child:
    ours, theirs = socket.socketpair()
    threads = max(usable_cores() // size, 1)
    fd = theirs.fileno()
    try:
        process = child_process.start(
            "minivllm.executors.rank", *gpu, fd, fds=[fd],
            OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", str(threads)),
        )  # fmt: skip
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    # A dying parent may lose the thread that started the rank first; only the main thread lives as long as the parent.
    return Child(process, Link(ours), threading.current_thread() is threading.main_thread())


class RankProcesses:
    """All ranks of one engine. ``beats(rank)`` reads a rank's heartbeat counter; ``start_timeout`` is in seconds."""

    def __init__(self, beats: Callable[[int], int], start_timeout: float = START_TIMEOUT) -> None:
        self.ranks: list[Rank] = []
        self.beats, self.start_timeout = beats, start_timeout
        self.poller = select.poll()  # for a blocking wait; the caller registers what else should end it
        self._health = select.poll()
        self._by_fd: dict[int, Rank] = {}
        self._listened = time.monotonic()
        self._starting = True  # or loading other weights, which is watched like a start

    def spawn(self, hellos: Sequence[Hello], fds: Sequence[Sequence[int]], children: Sequence[Child]) -> None:
        """Tell each child which rank it is, and hand it that rank's descriptors; from then on they are ``ranks``."""
        for hello, child in zip(hellos, children, strict=True):
            rank = Rank(hello.rank, child.process, child.link)
            self.ranks.append(rank)
            self._by_fd[child.link.socket.fileno()] = rank
            for poller in (self.poller, self._health):
                poller.register(child.link.socket.fileno(), select.POLLIN)
        for hello, own, child in zip(hellos, fds, children, strict=True):
            self._tell(hello, own, child)

    def _tell(self, hello: Hello, fds: Sequence[int], child: Child) -> None:
        hello.dies_with = os.getpid() if child.dies_with_parent else 0
        child.link.hand_over(fds)
        child.link.send(hello)

    # ------------------------------------------------------------------ watching

    def begin_again(self) -> None:
        """Before ranks are told to load other weights, after which each says again that it is ready."""
        self._starting = True
        for rank in self.ranks:
            rank.ready, rank.place, rank.silent = None, Still.at_first(), 0.0

    def wait_ready(self, doing: str = "startup") -> list[Ready]:
        """Wait until every rank is ready for steps. Raises what a rank raised while ``doing`` this."""
        while waiting := [rank for rank in self.ranks if rank.ready is None]:
            self.watch()
            if why := nobody_moves({rank.number: rank.still() for rank in waiting}, self.start_timeout, doing):
                self.kill()
                raise EngineDeadError(why)
        for rank in self.ranks:
            rank.silent = 0.0
        self._starting = False
        return [rank.ready for rank in self.ranks if rank.ready is not None]

    def watch(self) -> float:
        """Wait a moment, or until an event on ``poller``; returns the seconds since the last call.

        Raises:
            EngineDeadError: a rank failed, is gone or is silent; all ranks have been ended then.
        """
        self._hear(self.poller.poll(TICK * 1000))
        now = time.monotonic()
        # Counted in our own ticks, so that time in which nothing ran (Ctrl-Z, a suspended machine) does not count.
        elapsed, self._listened = min(now - self._listened, 2 * TICK), now
        for rank in self.ranks:
            beats = self.beats(rank.number)
            rank.silent = rank.silent + elapsed if beats == rank.beats else 0.0
            rank.beats = beats
            if rank.silent > SILENT:
                state = process_state(rank.process.pid)
                if state == STOPPED or not self._starting:
                    raise self.give_up(rank, f"has not answered for {rank.silent:.0f} s (it is {state})")
        return elapsed

    def check(self) -> None:
        """Like ``watch``, but without waiting and without heartbeats."""
        if events := self._health.poll(0):
            self._hear(events)

    def give_up(self, rank: Rank, why: str) -> MinivllmError:
        """End all ranks because one does not respond; returns the error to raise."""
        self.kill()
        return EngineDeadError(f"rank {rank.number} (process {rank.process.pid}) {why}; the engine was stopped")

    def _hear(self, events: list[tuple[int, int]]) -> None:
        heard = [rank for fd, _ in events if (rank := self._by_fd.get(fd)) is not None]
        for rank in heard:
            rank.hear()
        if any(rank.link.ended or rank.failed is not None for rank in heard):
            raise self._post_mortem()

    def _post_mortem(self) -> MinivllmError:
        """One rank's death makes the others fail, too: keep listening for a moment, then name the first to fail."""
        end = time.monotonic() + _LAST_WORDS
        while (left := end - time.monotonic()) > 0 and (open_ := [r for r in self.ranks if not r.link.ended]):
            ready, _, _ = select.select([rank.link.socket for rank in open_], [], [], left)
            for rank in open_:
                if rank.link.socket in ready:
                    rank.hear()
        starting = any(rank.ready is None for rank in self.ranks)
        mute = [rank for rank in self.ranks if rank.link.ended and rank.failed is None]
        spoke = sorted((r for r in self.ranks if r.failed is not None), key=lambda r: r.failed.at if r.failed else 0)
        culprit = (mute or spoke)[0]
        if culprit.failed is not None:
            error = culprit.failed.as_error(culprit.number, starting)
        else:
            how, when = culprit.end(), " before it was ready" if starting else ""
            error = EngineDeadError(f"rank {culprit.number} (process {culprit.process.pid}) {how}{when}")
        for rank in spoke:
            if rank is not culprit and rank.failed is not None:
                error.add_note(f"then rank {rank.number}: {rank.failed.error}: {rank.failed.message}")
        for rank in self.ranks:
            if rank.ready is None and rank is not culprit and rank not in spoke:
                error.add_note(
                    f"meanwhile rank {rank.number} was for {rank.still().seconds:.0f} s in {rank.place.where}"
                )
        self.kill()
        return error

    # ------------------------------------------------------------------ ending

    def wait_ended(self) -> None:
        """Give ranks that were asked to exit a moment to do so."""
        end = time.monotonic() + _GRACE
        for rank in self.ranks:
            try:
                rank.process.wait(max(end - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                return

    def kill(self) -> None:
        """Kill every process and wait until it is gone; safe to call twice."""
        for rank in self.ranks:
            rank.process.kill()  # a no-op if it was already waited for
        for rank in self.ranks:
            rank.process.wait()
            if rank.link.socket.fileno() >= 0:
                for poller in (self.poller, self._health):
                    poller.unregister(rank.link.socket)
                del self._by_fd[rank.link.socket.fileno()]
                rank.link.socket.close()


STOPPED = "stopped"
_STATES = {"T": STOPPED, "t": "held by a debugger", "D": "waiting for a device", "R": "running", "S": "asleep"}


def process_state(pid: int) -> str:
    """The state of a process on this machine (Linux)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "unknown"
    return _STATES.get(state, state)
