"""A rank as a Ray actor: what runs on the cluster's nodes. Imports torch only in ``start``, so that it answers early.

Steps run in one thread, a second waits for their results, and a third answers health checks.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING, Any

import ray

from minivllm.executors.messages import Build, Failed, Pulse, Ready, Still, decode, encode
from minivllm.executors.progress import Progress
from minivllm.executors.urgency import be_as_urgent_as_others

if TYPE_CHECKING:
    from minivllm.core.interfaces import StepHandle
    from minivllm.executors.taking import StepTaker
    from minivllm.executors.worker import Worker


class RankActor:
    def __init__(self, build: bytes, rank: int, size: int) -> None:
        be_as_urgent_as_others()
        self.build, self.rank, self.size = build, rank, size
        self.worker: Worker | None = None
        self.taker: StepTaker
        self.pending: queue.SimpleQueue[tuple[int, StepHandle]] = queue.SimpleQueue()
        self.store: Any = None
        self.progress: Progress | None = None
        self.failed = b""  # last words

    @ray.method(concurrency_group="health")
    def pulse(self) -> bytes:
        place = self.progress.sample() if self.progress is not None else Still.at_first()
        return encode(Pulse(os.getpid(), ray.get_runtime_context().get_node_id(), place))

    @ray.method(concurrency_group="steps")
    def open_store(self) -> tuple[str, int]:
        """Rank 0: the address at which the others find it."""
        self.progress = Progress(threading.get_ident())
        from minivllm.executors.group import open_store

        host = ray.util.get_node_ip_address()
        self.store = open_store(host)
        return host, self.store.port

    @ray.method(concurrency_group="steps")
    def start(self, host: str, port: int) -> bytes:
        self.progress = Progress(threading.get_ident())
        try:
            from minivllm.executors.group import join
            from minivllm.executors.taking import StepTaker
            from minivllm.executors.worker import Worker
            from minivllm.plugins.ranks import registry_of_rank

            build = decode(self.build)
            assert isinstance(build, Build)
            registry, notes = registry_of_rank(build.plugins, self.rank, build.config, build.model_config)
            gpu = own_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"), ray.get_gpu_ids())
            tp = join(build.config.device, gpu, self.rank, self.size, host, port)
            self.worker = Worker(build.config, build.model_config, build.max_model_len, registry, tp, gpu)
            self.worker.start()
            self.taker = StepTaker(self.worker)
            return encode(Ready(self.worker.num_blocks, self.worker.describe(), notes))
        except BaseException as error:
            return encode(Failed.of(error, "at its start"))

    @ray.method(concurrency_group="steps")
    def call(self, method: str, argument: str) -> bytes:
        """That it is ready for steps, or why it failed."""
        self.progress = Progress(threading.get_ident())
        try:
            answer = self.taker.call(method, argument)
            return encode(Ready(self.taker.worker.num_blocks, self.taker.worker.describe(), [], answer))
        except BaseException as error:
            self.failed = encode(Failed.of(error, self.taker.doing))
            return self.failed

    @ray.method(concurrency_group="steps")
    def launch(self, step: bytes) -> bytes:
        """Empty, or why it failed. Later calls repeat that, as the driver may not have waited for this answer."""
        if self.failed:
            return self.failed
        try:
            if (taken := self.taker.take(bytearray(step))) is not None and self.rank == 0:
                self.pending.put(taken)
            return b""
        except BaseException as error:
            self.failed = encode(Failed.of(error, self.taker.doing))
            return self.failed

    @ray.method(concurrency_group="results")
    def result(self) -> tuple[bytes, bytes]:
        """Rank 0: the result of the oldest step not yet asked for, and why there is none, or empty."""
        from minivllm.executors.step_bytes import pack_result

        assert self.worker is not None
        step, pending = self.pending.get()
        try:
            self.worker.use_device()
            return pack_result(pending.result()), b""
        except BaseException as error:
            self.failed = encode(Failed.of(error, f"in step {step}"))
            return b"", self.failed


def own_gpu(visible: str | None, given: list[Any]) -> int:
    """Torch's index of the GPU that Ray assigned to this actor. ``visible``: its CUDA_VISIBLE_DEVICES.

    Ray shows an actor only its own GPU, which is then index 0, unless told to leave the variable unchanged.
    """
    if not given:
        return 0
    shown = visible.split(",") if visible else []
    return shown.index(str(given[0])) if str(given[0]) in shown else int(given[0])


OPTIONS: dict[str, Any] = {"concurrency_groups": {"steps": 1, "results": 1, "health": 1}, "max_restarts": 0}
RemoteRank: Any = ray.remote(**OPTIONS)(RankActor)
