"""Ranks as Ray actors, one a GPU (or a CPU), on as many nodes as it takes: for what outgrows one machine.

What travels is bytes of our own (``wire``, ``messages``); Ray wraps them and never sees an object of ours.
"""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from minivllm.core.interfaces import Executor, StepHandle, StepResult
from minivllm.errors import ConfigError, EngineDeadError, MinivllmError
from minivllm.executors.messages import Build, Failed, Ready, decode, encode
from minivllm.executors.multiproc import refuse_unsplittable
from minivllm.executors.wire import pack_batch, pack_result, unpack_batch, unpack_result

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.batch import Batch
    from minivllm.core.model_config import ModelConfig
    from minivllm.core.model_runner import PendingStep
    from minivllm.executors.worker import Worker
    from minivllm.plugins.registry import Registry

_PLACE_TIMEOUT = 60.0  # seconds until the cluster has room
_STEP_TIMEOUT = 300.0
_LAST_WORDS = 0.5  # how long other ranks may still report, to find out who began
_PUT = 64 << 10  # a larger step is stored once instead of sent to each actor


Failures = list[tuple[int, Failed | RayError]]


class RankActor:
    """One rank. Steps run in one thread, their results are waited for in another, so that steps overlap."""

    def __init__(self, build: bytes, rank: int, size: int, on_gpu: bool) -> None:
        self.build, self.rank, self.size, self.on_gpu = build, rank, size, on_gpu
        self.worker: Worker | None = None
        self.pending: queue.SimpleQueue[PendingStep] = queue.SimpleQueue()
        self.store: Any = None

    @ray.method(concurrency_group="steps")
    def open_store(self) -> tuple[str, int]:
        """Rank 0: where the others find us."""
        from minivllm.executors.group import open_store

        host = ray.util.get_node_ip_address()
        self.store = open_store(host)
        return host, self.store.port

    @ray.method(concurrency_group="steps")
    def start(self, host: str, port: int) -> bytes:
        from minivllm.executors.group import join
        from minivllm.executors.worker import Worker
        from minivllm.plugins.manager import default_registry

        try:
            build = decode(self.build)
            assert isinstance(build, Build)
            # Ray shows an actor its own GPU only: it is number 0
            tp = join("cuda" if self.on_gpu else "cpu", 0, self.rank, self.size, host, port)
            self.worker = Worker(build.config, build.model_config, build.max_model_len, default_registry(), tp)
            self.worker.start()
            return encode(Ready(self.worker.num_blocks, self.worker.describe()))
        except BaseException as error:
            return encode(Failed.of(error, "at its start"))

    @ray.method(concurrency_group="steps")
    def launch(self, step: bytes) -> bytes:
        """Empty, or why it failed."""
        assert self.worker is not None and self.worker.runner is not None
        runner = self.worker.runner
        doing = "in a step"
        try:
            batch = unpack_batch(bytearray(step), runner.sampler.row)
            doing = f"in step {batch.step}"
            pending = runner.launch(batch)
            if self.rank == 0:
                self.pending.put(pending)
            return b""
        except BaseException as error:
            return encode(Failed.of(error, doing))

    @ray.method(concurrency_group="results")
    def result(self) -> bytes:
        """Rank 0: what the oldest step sampled that was not asked for yet."""
        assert self.worker is not None
        self.worker.use_device()
        return pack_result(self.pending.get().result())


_OPTIONS: dict[str, Any] = {"concurrency_groups": {"steps": 1, "results": 1}, "max_restarts": 0}
_RemoteRank: Any = ray.remote(**_OPTIONS)(RankActor)


class RayExecutor(Executor):
    """Options: ``address`` of the cluster (the running one, or a new one on this machine); ``step_timeout``."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, max_model_len: int, registry: Registry) -> None:
        self.config = config
        self._build = encode(Build(config, model_config, max_model_len))
        refuse_unsplittable(config, model_config, registry)
        self._timeout = float(config.executor.options.get("step_timeout", _STEP_TIMEOUT))
        self._about: dict[str, Any] = {}
        self._actors: list[Any] = []
        self._group: Any = None
        self._owns_ray = False
        self._dead: MinivllmError | None = None

    def start(self) -> int:
        if not ray.is_initialized():
            ray.init(address=self.config.executor.options.get("address"), log_to_driver=False)
            self._owns_ray = True
        size = self.config.tp
        on_gpu = self.config.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        if self.config.device == "cuda" and not on_gpu:
            raise ConfigError("device=cuda with executor=ray: the cluster has no GPU; use device=cpu")
        self._place(size, {"CPU": 1.0} | ({"GPU": 1.0} if on_gpu else {}))
        build = ray.put(self._build)
        for rank in range(size):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            options = {"num_cpus": 1, "num_gpus": int(on_gpu), "scheduling_strategy": strategy}
            self._actors.append(_RemoteRank.options(**options).remote(build, rank, size, on_gpu))
        try:
            host, port = ray.get(self._actors[0].open_store.remote())
        except RayError as error:
            raise self._died([(0, error)]) from None
        started = {actor.start.remote(host, port): rank for rank, actor in enumerate(self._actors)}
        found = [r for r in map(decode, self._gather(started, starting=True)) if isinstance(r, Ready)]
        self._about = found[0].about | {"ranks": size, "nodes": len({n["NodeID"] for n in ray.nodes() if n["Alive"]})}
        return min(r.num_blocks for r in found)

    def _place(self, size: int, bundle: dict[str, float]) -> None:
        """Room for all ranks, as few nodes as possible. Raises ConfigError if there is none."""
        self._group = placement_group([bundle] * size, strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=_PLACE_TIMEOUT)
        except GetTimeoutError:
            has = ", ".join(f"{ray.cluster_resources().get(kind, 0):g} {kind}" for kind in bundle)
            raise ConfigError(
                f"tp={size} with executor=ray needs {size} times {bundle}, and the cluster has {has}, not all of it "
                f"free; lower tp or add nodes"
            ) from None

    # ------------------------------------------------------------------ steps

    def launch(self, batch: Batch) -> StepHandle:
        self.check_health()
        step: Any = pack_batch(batch)
        if len(step) > _PUT:
            step = ray.put(step)
        launched = {actor.launch.remote(step): rank for rank, actor in enumerate(self._actors)}
        return _Step(self, launched, self._actors[0].result.remote())

    def _gather(self, launched: dict[Any, int], starting: bool = False, result: Any = None) -> list[bytes]:
        """Wait for ``result``, or else for all of ``launched``; returns what came. Raises what failed first."""
        waiting, said = [*launched, *([result] if result is not None else [])], {}
        end = time.monotonic() + self._timeout if not starting else float("inf")
        while waiting and (result is None or result not in said):
            done, waiting = ray.wait(waiting, timeout=1.0)
            failures: Failures = []
            for ref in done:
                said[ref] = self._answer(ref, launched.get(ref, 0), failures, result)
            if failures:
                late, _ = ray.wait(waiting, num_returns=len(waiting), timeout=_LAST_WORDS) if waiting else ([], [])
                for ref in late:
                    self._answer(ref, launched.get(ref, 0), failures, result)
                raise self._died(failures, starting)
            if time.monotonic() > end:
                raise self._died([(0, GetTimeoutError(f"a step did not finish in {self._timeout:.0f} s"))])
        return [said[result]] if result is not None else [said[ref] for ref in launched]

    def _answer(self, ref: Any, rank: int, failures: Failures, result: Any) -> bytes:
        try:
            data = ray.get(ref)
        except RayError as error:
            failures.append((rank, error))
            return b""
        if ref is not result and data and isinstance(failed := decode(data), Failed):
            failures.append((rank, failed))
        return data

    def _died(self, failures: Failures, starting: bool = False) -> MinivllmError:
        """An actor that is gone explains the errors of the others; among errors the first counts."""
        gone = [(rank, f) for rank, f in failures if isinstance(f, RayError)]
        spoke = sorted([(f.at, rank, f) for rank, f in failures if isinstance(f, Failed)], key=lambda x: x[:2])
        if gone:
            rank, error = gone[0]
            why = " ".join(str(error).split())
            self._dead = EngineDeadError(f"rank {rank} (a Ray actor) is gone: {why}")
        else:
            _, rank, failed = spoke[0]
            self._dead = failed.as_error(rank, starting)
        self._end()
        return self._dead

    def check_health(self) -> None:
        if self._dead is not None:
            raise self._dead
        if not self._actors:
            raise EngineDeadError("the engine was shut down; make a new one")

    def describe(self) -> dict[str, Any]:
        return self._about

    def shutdown(self) -> None:
        self._end()
        if self._owns_ray:
            self._owns_ray = False
            ray.shutdown()

    def _end(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


class _Step:
    """A step under way."""

    def __init__(self, executor: RayExecutor, launched: dict[Any, int], outcome: Any) -> None:
        self.executor, self.launched, self.outcome = executor, launched, outcome

    def result(self) -> StepResult:
        self.executor.check_health()
        return unpack_result(bytearray(self.executor._gather(self.launched, result=self.outcome)[0]))
