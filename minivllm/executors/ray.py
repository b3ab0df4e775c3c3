"""Ranks as Ray actors, one per GPU (or CPU), on as many nodes as needed: for models that outgrow one machine.

Ray only transports bytes in our own formats (``step_bytes``, ``messages``), never our objects. Silent actors are
detected here, by polling each every second (``ray_health``): Ray watches only nodes, and a call to a stopped actor
would wait forever.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from minivllm.core.interfaces import StepHandle, StepResult
from minivllm.errors import ConfigError, EngineDeadError, MinivllmError, one_line, was_shut_down
from minivllm.executors.elsewhere import DOING, ElsewhereExecutor, refuse_unsplittable
from minivllm.executors.messages import Answer, Build, Failed, Ready, decode, encode
from minivllm.executors.progress import START_TIMEOUT, STEP_TIMEOUT, TICK, seconds
from minivllm.executors.ray_actor import RemoteRank
from minivllm.executors.ray_health import Failures, Hearts
from minivllm.executors.step_bytes import pack_batch, pack_masks, unpack_result
from minivllm.plugins.ranks import tell, view_of

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.batch import Batch, TokenMasks
    from minivllm.core.model_config import ModelConfig
    from minivllm.plugins.registry import Registry

_PLACE_TIMEOUT = 60.0  # seconds until the cluster has room
_LAST_WORDS = 2.0  # seconds for other ranks to report, to find which failed first; Ray is slow to notice a dead one
_PUT = 64 << 10  # a larger step is put in the object store once instead of sent to each actor


class RayExecutor(ElsewhereExecutor):
    """Options: ``address`` of the cluster (by default the running one, or a new one on this machine); ``step_timeout``
    and ``start_timeout`` in seconds (how long startup may make no progress)."""

    name = "ray"
    takes_masks = True

    def __init__(self, config: EngineConfig, model_config: ModelConfig, max_model_len: int, registry: Registry) -> None:
        self.config = config
        self._args = model_config, max_model_len, view_of(registry)
        self._registry = registry
        refuse_unsplittable(config, model_config, registry)
        self._timeout = seconds(config.executor.options, "step_timeout", STEP_TIMEOUT)
        self._start_timeout = seconds(config.executor.options, "start_timeout", START_TIMEOUT)
        self._about: dict[str, Any] = {}
        self._actors: list[Any] = []
        self._hearts = Hearts([], self._start_timeout)
        self._group: Any = None
        self._owns_ray = False
        self._dead: MinivllmError | None = None

    def start(self) -> int:
        if not ray.is_initialized():
            address = self.config.executor.options.get("address")
            try:
                ray.init(address=address, log_to_driver=False)
            except (ValueError, ConnectionError) as error:
                said = one_line(error)
                raise ConfigError(f"executor.options.address={address}: Ray cannot join it: {said}") from error
            self._owns_ray = True
        size = self.config.tp
        on_gpu = self.config.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        if self.config.device == "cuda" and not on_gpu:
            raise ConfigError("device=cuda with executor=ray: the cluster has no GPU; use device=cpu")
        self._place(size, {"CPU": 1.0} | ({"GPU": 1.0} if on_gpu else {}))
        config = replace(self.config, device="cuda" if on_gpu else "cpu")  # whatever an actor's node has
        build = ray.put(encode(Build(config, *self._args)))
        for rank in range(size):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            options = {"num_cpus": 1, "num_gpus": int(on_gpu), "scheduling_strategy": strategy}
            self._actors.append(RemoteRank.options(**options).remote(build, rank, size))
        self._hearts = Hearts(self._actors, self._start_timeout)
        host, port = self._gather({self._actors[0].open_store.remote(): 0}, time_limit=None)[0]
        started = {actor.start.remote(host, port): rank for rank, actor in enumerate(self._actors)}
        found = [r for r in map(decode, self._gather(started, time_limit=None)) if isinstance(r, Ready)]
        self._hearts.starting = False
        tell(self._registry, (note for r in found for note in r.notes))
        self._about = found[0].about | {"ranks": size, "nodes": self._hearts.count_nodes()}
        return min(r.num_blocks for r in found)

    def _place(self, size: int, bundle: dict[str, float]) -> None:
        """Reserve resources for all ranks on as few nodes as possible. Raises ConfigError if there are none."""
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
        self._launched = self._tell(pack_batch(batch))
        return _Step(self, self._launched, self._actors[0].result.remote())

    def profile(self, file: Path) -> NoReturn:
        raise ConfigError("profile with executor=ray: its ranks are not traced; type executor=multiproc, too")

    def guide(self, masks: TokenMasks) -> None:
        self.check_health()
        self._launched |= self._tell(pack_masks(masks))  # belongs to the step, which waits for it

    def tell_all(self, method: str, argument: str) -> list[Answer]:
        self.check_health()
        self._hearts.begin(DOING[method])
        calls = {actor.call.remote(method, argument): rank for rank, actor in enumerate(self._actors)}
        said = map(decode, self._gather(calls, time_limit=None))
        self._hearts.starting = False
        return [ready.answer for ready in said if isinstance(ready, Ready)]

    def _tell(self, message: Any) -> dict[Any, int]:
        if len(message) > _PUT:
            message = ray.put(message)
        return {actor.launch.remote(message): rank for rank, actor in enumerate(self._actors)}

    def _gather(self, asked: dict[Any, int], time_limit: float | None, result: Any = None) -> list[Any]:
        """Wait for ``result``, or else for all of ``asked`` (call -> rank); returns the answers.

        Raises:
            EngineDeadError: an actor failed, is gone or is silent, or this took longer than ``time_limit`` seconds.
        """
        said: dict[Any, Any] = {}
        failures: Failures = []
        waiting = [*asked, *([result] if result is not None else [])]
        began = time.monotonic()
        while waiting and result not in said and not failures:
            waiting = self._listen(waiting, asked, said, failures)
            if time_limit is not None and time.monotonic() - began > time_limit and not failures:
                where = "; ".join(heart.where() for heart in self._hearts.hearts)
                why = f"a step did not finish in {time_limit:g} s (executor.options.step_timeout): {where}"
                raise self._died([(0, why)])
        if not failures:
            return [said[result]] if result is not None else [said[ref] for ref in asked]
        end = time.monotonic() + _LAST_WORDS  # one rank's death makes the others fail, too
        waiting = [ref for ref in waiting if ref is not result]
        while waiting and time.monotonic() < end and all(isinstance(why, Failed) for _, why in failures):
            waiting = self._listen(waiting, asked, said, failures)
        raise self._died(failures)

    def _listen(self, waiting: list[Any], asked: dict[Any, int], said: dict[Any, Any], failures: Failures) -> list[Any]:
        """Add answers that come within a moment to ``said`` or ``failures``; returns those still pending."""
        done, waiting = ray.wait(waiting, timeout=TICK)
        for ref in done:
            rank = asked.get(ref, 0)
            try:
                said[ref] = data = ray.get(ref)
            except RayError as error:
                failures.append((rank, error))
                continue
            words = data if ref in asked else data[1]
            if isinstance(words, bytes) and words and isinstance(failed := decode(words), Failed):
                failures.append((rank, failed))
        failures += self._hearts.look()
        return waiting

    def _died(self, failures: Failures) -> MinivllmError:
        """The error to raise: an actor that is gone or silent explains the others' errors; among errors, the first."""
        gone = [(rank, why) for rank, why in failures if isinstance(why, RayError)]
        silent = [why for _, why in failures if isinstance(why, str)]
        spoke = sorted([(why.at, rank, why) for rank, why in failures if isinstance(why, Failed)], key=lambda x: x[:2])
        if gone:
            rank, error = gone[0]
            self._dead = EngineDeadError(f"rank {rank} (a Ray actor) is gone: {one_line(error)}")
        elif silent:
            self._dead = EngineDeadError(f"{silent[0]}; the engine was stopped")
        else:
            _, rank, failed = spoke[0]
            self._dead = failed.as_error(rank, self._hearts.starting)
        self._end()
        return self._dead

    def check_health(self) -> None:
        if self._dead is not None:
            raise self._dead
        if not self._actors:
            raise was_shut_down()
        if failures := self._hearts.look():
            raise self._died(failures)

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
    """A step in flight."""

    def __init__(self, executor: RayExecutor, launched: dict[Any, int], outcome: Any) -> None:
        self.executor, self.launched, self.outcome = executor, launched, outcome

    def result(self) -> StepResult:
        executor = self.executor
        executor.check_health()
        return unpack_result(bytearray(executor._gather(self.launched, executor._timeout, self.outcome)[0][0]))
