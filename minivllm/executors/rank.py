"""One rank's process: ``python -m minivllm.executors.rank [GPU] FD`` imports torch while opening that GPU, learns on
that socket which rank it is, then runs steps.

It exits when its parent does, however that ends; Ctrl-C is left to the parent.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.bytecode import kept_bytecode
from minivllm.child_process import ends_with
from minivllm.core.garbage import frozen, uncollected
from minivllm.executors.messages import Failed, Hello, Link, Ready
from minivllm.executors.progress import Progress
from minivllm.executors.ring import Bell, Reader, Ring, Writer

if TYPE_CHECKING:
    from minivllm.core.interfaces import StepHandle
    from minivllm.executors.taking import StepTaker
    from minivllm.executors.worker import Worker
    from minivllm.plugins.registry import Registry

_BEAT = 0.2  # seconds
_BEATS_A_REPORT = 5  # of progress


class RankProcess:
    """The main thread runs the model; one watches the parent and sends heartbeats; one (rank 0) returns tokens.

    ``fds``: the memory of steps and of results, then both ends of the rank's own bell, and of its parent's.
    """

    def __init__(self, link: Link, hello: Hello, fds: Sequence[int]) -> None:
        self.link, self.hello = link, hello
        steps, self._results, *bells = fds
        self._parents_bell = Bell(*bells[2:])
        self.taker: StepTaker | None = None  # set when it is ready
        self._progress: Progress | None = Progress(threading.main_thread().ident)  # while it starts or loads weights
        self.steps = Reader(Ring(steps, hello.size, hello.step_bytes), hello.rank, Bell(*bells[:2]))
        self._pending: queue.SimpleQueue[StepHandle | None] = queue.SimpleQueue()
        threading.Thread(target=self._watch, daemon=True).start()

    def run(self) -> None:
        hello, build = self.hello, self.hello.build
        with uncollected():
            from minivllm.executors.taking import StepTaker
            from minivllm.plugins.ranks import registry_of_rank

            registry, notes = registry_of_rank(build.plugins, hello.rank, build.config, build.model_config)
            worker = start_worker(hello, registry)
        returning = None
        if hello.rank == 0:
            returning = threading.Thread(target=self._return, args=(worker,), daemon=True)
            returning.start()
        self.taker, self._progress = (taker := StepTaker(worker)), None
        self.link.send(Ready(worker.num_blocks, worker.describe(), notes))
        with frozen():
            self._serve(taker)
        if returning is not None:
            self._pending.put(None)
            returning.join(5)

    def _serve(self, taker: StepTaker) -> None:
        from minivllm.executors.step_bytes import unpack_call, unpack_profile

        profile = contextlib.ExitStack()
        while message := self.steps.receive():  # an empty message ends it
            if (file := unpack_profile(message)) is not None:
                self._profile(taker, profile, file)
            elif (call := unpack_call(message)) is not None:
                self._call(taker, *call)
            elif (taken := taker.take(message)) is not None and self.hello.rank == 0:
                self._pending.put(taken[1])

    def _call(self, taker: StepTaker, method: str, argument: str) -> None:
        self._progress = Progress(threading.main_thread().ident)
        answer = taker.call(method, argument)
        self._progress = None
        self.link.send(Ready(taker.worker.num_blocks, taker.worker.describe(), [], answer))

    def _profile(self, taker: StepTaker, running: contextlib.ExitStack, file: str) -> None:
        if self.hello.rank > 0:
            return
        taker.doing = "in its profile"
        running.close()
        if file:
            from minivllm.core.profiled import profiled

            running.enter_context(profiled(Path(file)))

    def _return(self, worker: Worker) -> None:
        """Return tokens to the parent as soon as the device has them, while the main thread launches further steps."""
        from minivllm.executors.step_bytes import pack_result

        worker.use_device()  # per thread
        results = Writer(Ring(self._results, 1, self.hello.result_bytes), [self._parents_bell])
        try:
            while (pending := self._pending.get()) is not None:
                results.send(pack_result(pending.result()))
        except BaseException as error:
            self.fail(error)

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self.link.socket.fileno(), select.POLLIN)
        for number in itertools.count(1):
            self.steps.beat()
            if (progress := self._progress) is not None:
                still = progress.sample()
                if number % _BEATS_A_REPORT == 0:
                    self.link.send(still)
            if poller.poll(_BEAT * 1000):
                self.link.hear()
                if self.link.ended:
                    os._exit(0)

    def fail(self, error: BaseException) -> None:
        doing = "at its start" if self.taker is None else self.taker.doing
        self.link.send(Failed.of(error, doing))
        leave(1)


def import_ahead(gpu: int | None) -> None:
    """Import what every rank needs, while the parent does the same. Failed imports fail again where they are needed."""
    with contextlib.suppress(Exception):
        from minivllm.kernels._triton import open_device

        if gpu is not None:
            open_device(gpu)  # while torch is imported
        import minivllm.executors.group
        import minivllm.executors.peers
        import minivllm.executors.worker  # noqa: F401


def start_worker(hello: Hello, registry: Registry) -> Worker:
    """Join the other ranks, then load this one's part."""
    from minivllm.kernels._triton import open_device

    config, model, gpu = hello.build.config, hello.build.model_config, hello.device_index
    if config.device != "cpu":
        open_device(gpu)  # unless it was opened ahead
    import torch

    from minivllm.executors.group import join
    from minivllm.executors.peers import with_peers
    from minivllm.executors.worker import Worker, resolve_device, resolve_dtype

    device = resolve_device(config.device)
    tp = join(device, gpu, hello.rank, hello.size, "127.0.0.1", hello.store_port)
    if device == "cuda":
        dtype = getattr(torch, resolve_dtype(config.dtype, device, model.dtype))
        rows, options = config.scheduler.max_num_batched_tokens, config.executor.options
        tp = with_peers(tp, gpu, options, rows, model.hidden_size, dtype)
    worker = Worker(config, model, hello.build.max_model_len, registry, tp, gpu)
    worker.start()
    return worker


def leave(code: int) -> None:
    """Exit at once: the driver frees device memory faster than we could, and a peer may be gone already."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    # Sent to a whole process group (by a terminal, systemd, timeout), these are for the parent, which ends its ranks.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    *gpu, fd = map(int, sys.argv[1:])
    with uncollected():
        import_ahead(gpu[0] if gpu else None)
    link = Link(socket.socket(fileno=fd))
    fds, hello = link.take_over(), link.receive()
    if not isinstance(hello, Hello):
        return
    if hello.dies_with:
        ends_with(hello.dies_with)()
    for fd in (link.socket.fileno(), *fds):
        os.set_inheritable(fd, False)  # processes started by the model must not keep it open
    rank = RankProcess(link, hello, fds)
    try:
        rank.run()
    except BaseException as error:
        rank.fail(error)
    leave(0)


if __name__ == "__main__":
    with kept_bytecode():
        main()
