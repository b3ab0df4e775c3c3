"""This process is one rank, started from outside (``torchrun --nproc-per-node 2 script.py``), as RL trainers do.

Every rank builds the same LLM and makes the same requests; every rank's scheduler then takes the same steps, and only
the model's collectives communicate. Each step, checksums are compared to check that all ranks agree. With more ranks
than ``tp``, each ``tp`` neighbours form a replica with its own requests.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash

from minivllm.core.interfaces import Executor, StepHandle, StepResult
from minivllm.core.parallel import TensorParallel
from minivllm.errors import ConfigError, EngineDeadError, MinivllmError, was_shut_down
from minivllm.executors.progress import seconds
from minivllm.executors.step_bytes import pack_batch
from minivllm.executors.worker import Worker, resolve_device

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.batch import Batch, TokenMasks
    from minivllm.core.model_config import ModelConfig
    from minivllm.plugins.registry import Registry

_TIMEOUT = 600.0  # seconds by which ranks may arrive at a step apart
_LOAD = -1  # in place of a step's number
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class TorchrunExecutor(Executor):
    """Options: ``timeout``, the seconds that ranks wait for each other at a step."""

    takes_masks = True

    def __init__(self, config: EngineConfig, model_config: ModelConfig, max_model_len: int, registry: Registry) -> None:
        self.rank, world = read_environment(os.environ, config.tp)
        self._local = int(os.environ["LOCAL_RANK"])
        self._device = resolve_device(config.device)
        self._timeout = timedelta(seconds=seconds(config.executor.options, "timeout", _TIMEOUT))
        self._args = config, model_config, max_model_len, registry
        self._worker: Worker | None = None
        self._about: dict[str, Any] = {}
        self._dead: MinivllmError | None = None
        self._groups: list[Any] = []
        self._replicas = [list(range(first, first + config.tp)) for first in range(0, world, config.tp)]

    def start(self) -> int:
        config = self._args[0]
        tp = self._join() if config.tp > 1 else TensorParallel()
        self._worker = Worker(*self._args, tp, self._local if self._device == "cuda" else 0)
        blocks = self._worker.start()
        self._about = self._worker.describe() | {"ranks": config.tp, "replicas": len(self._replicas)}
        return blocks

    def _join(self) -> TensorParallel:
        """Create process groups separate from the trainer's, if any: engines and trainer never share a collective."""
        backend, device = "gloo", None
        if self._device == "cuda":
            backend, device = "nccl", torch.device("cuda", self._local)
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group(backend, device_id=device)
        mine: list[Any] = []
        for ranks in self._replicas:  # every rank must take part in creating every group
            talk = dist.new_group(ranks, backend=backend)
            check = dist.new_group(ranks, timeout=self._timeout, backend="gloo")
            if self.rank in ranks:
                mine = [talk, check]
        self._groups = mine
        return TensorParallel(dist.get_rank(mine[0]), self._args[0].tp, mine[0])

    # ------------------------------------------------------------------ steps

    def _running(self) -> Worker:
        """Raises EngineDeadError if it was shut down."""
        if self._worker is None:
            raise was_shut_down()
        return self._worker

    def launch(self, batch: Batch) -> StepHandle:
        worker = self._running()
        if not self._groups:
            return worker.launch(batch)
        digest = xxhash.xxh3_64_intdigest(pack_batch(batch)) >> 1
        check = _Exchange(self._groups[1], self._args[0].tp, batch.step, digest)
        if self._device == "cpu":  # steps run synchronously and would hang if ranks differed
            self._verify(check, batch.step)
        return _Step(self, check, batch.step, worker.launch(batch))

    def guide(self, masks: TokenMasks) -> None:
        self._running().guide(masks)

    def _verify(self, check: _Exchange, step: int) -> None:
        try:
            check.verify(step)
        except EngineDeadError as error:
            self._dead = error
            raise

    def reload_weights(self, weights: Path | Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """Returns when the weights are loaded on all ranks of this replica, each of which calls it."""
        worker, failed = self._running(), None
        try:
            worker.reload_weights(weights)
        except Exception as error:
            failed = error
        others = self._loads_of_others(failed is None) if self._groups else []
        if failed is not None:
            raise failed
        if others:
            raise EngineDeadError(f"rank {others[0]} failed to load its weights")

    def load_adapter(self, place: int, folder: Path) -> None:
        """Of this rank; each rank calls it."""
        self._running().load_adapter(place, folder)

    def sleep(self, level: int) -> None:
        """Of this rank; each rank calls it."""
        self._running().sleep(level)

    def wake_up(self, tags: Sequence[str]) -> None:
        """Of this rank; each rank calls it."""
        self._running().wake_up(tags)

    def _loads_of_others(self, done: bool) -> list[int]:
        """Wait for all ranks; returns those that failed to load, if this one is ``done``. Raises EngineDeadError if one
        does something else."""
        said = _Exchange(self._groups[1], self._args[0].tp, _LOAD, int(done))
        try:
            different = said.different("reload_weights")
            if steps := [rank for rank in different if said.all[rank][0] != _LOAD]:
                raise EngineDeadError(
                    f"rank {steps[0]} computes a step where this one loads weights: with executor=torchrun each rank "
                    "must make the same calls, in the same order"
                )
        except EngineDeadError as error:
            self._dead = error
            raise
        return different

    def check_health(self) -> None:
        if self._dead is not None:
            raise self._dead

    def describe(self) -> dict[str, Any]:
        return self._about

    def shutdown(self) -> None:
        if self._worker is not None and self._dead is None:
            self._worker.shutdown()
        self._worker = None
        if self._dead is None:  # else others may hang in a collective, and destroying the group would wait for them
            for group in self._groups:
                dist.destroy_process_group(group)
        self._groups = []


class _Exchange:
    """Exchanges with the other ranks what each does: a step and its checksum, or that it loaded weights. Waits for them
    only when this is needed."""

    def __init__(self, group: Any, size: int, what: int, digest: int) -> None:
        self.mine = torch.tensor([what, digest])
        self.all = [torch.empty_like(self.mine) for _ in range(size)]
        self.work = dist.all_gather(self.all, self.mine, group=group, async_op=True)

    def different(self, what: str) -> list[int]:
        """The ranks that said something else. Raises EngineDeadError if some say nothing."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise EngineDeadError(
                f"not every rank came to {what}: with executor=torchrun each must make the same requests in the "
                f"same order ({str(error).splitlines()[0]})"
            ) from error
        return [rank for rank, other in enumerate(self.all) if not torch.equal(other, self.mine)]

    def verify(self, step: int) -> None:
        """Raises EngineDeadError if other ranks run a different step, or none."""
        if different := self.different(f"step {step}"):
            raise EngineDeadError(
                f"rank {different[0]} computes another step {step} than this one: with executor=torchrun each rank "
                "must make the same requests, in the same order and with the same parameters"
            )


class _Step:
    """A step in flight."""

    __slots__ = ("check", "executor", "pending", "step")

    def __init__(self, executor: TorchrunExecutor, check: _Exchange, step: int, pending: StepHandle) -> None:
        self.executor, self.check, self.step, self.pending = executor, check, step, pending

    def result(self) -> StepResult:
        if self.executor._device != "cpu":
            self.executor._verify(self.check, self.step)
        return self.pending.result()


def read_environment(environ: Mapping[str, str], tp: int) -> tuple[int, int]:
    """(rank, world size). Raises ConfigError outside torchrun, or if ``tp`` does not divide the world size."""
    missing = [name for name in _NEEDED if name not in environ]
    if missing:
        raise ConfigError(
            f"executor=torchrun: {', '.join(missing)} not set: this process was not started by torchrun; start it with "
            f"`torchrun --nproc-per-node {tp} script.py`, or use executor=auto"
        )
    world = int(environ["WORLD_SIZE"])
    if world % tp:
        raise ConfigError(f"tp={tp} does not divide torchrun's {world} ranks; set tp={world} or --nproc-per-node {tp}")
    return int(environ["RANK"]), world
