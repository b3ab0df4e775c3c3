"""Several ranks on one machine, each a child process; the parent schedules and stays responsive if one dies or hangs.

Steps go to all ranks through one shared-memory ring, tokens come back from rank 0 through another. Children are
started as ``python -m minivllm.executors.rank``, so scripts need no ``if __name__ == "__main__"``, and get the config
as msgpack.
"""

from __future__ import annotations

import select
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minivllm.core.batch import mask_words
from minivllm.core.interfaces import StepHandle, StepResult
from minivllm.errors import ConfigError, MinivllmError, was_shut_down
from minivllm.executors.elsewhere import DOING, ElsewhereExecutor, refuse_unsplittable
from minivllm.executors.group import open_store
from minivllm.executors.messages import Answer, Build, Hello
from minivllm.executors.peers import check_all_reduce
from minivllm.executors.processes import Child, RankProcesses, start_children
from minivllm.executors.progress import START_TIMEOUT, STEP_TIMEOUT, seconds
from minivllm.executors.ring import Bell, Reader, Ring, Writer, create_memory
from minivllm.executors.step_bytes import pack_batch, pack_call, pack_masks, pack_profile, unpack_result
from minivllm.executors.worker import resolve_device
from minivllm.plugins.ranks import tell, view_of

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.batch import Batch, TokenMasks
    from minivllm.core.model_config import ModelConfig
    from minivllm.plugins.registry import Registry

_LOGPROBS = 20  # per token, in a slot for results; more are sent in pieces


class MultiprocExecutor(ElsewhereExecutor):
    """Options: ``devices``, GPU indices (default 0, 1, …); ``step_timeout`` and ``start_timeout`` in seconds (how long
    startup may make no progress); ``all_reduce``: small all-reduces use peer memory up to the size where that is faster
    (auto), never (nccl) or up to ``all_reduce_bytes`` (peer)."""

    name = "multiproc"
    takes_masks = True

    def __init__(self, config: EngineConfig, model_config: ModelConfig, max_model_len: int, registry: Registry) -> None:
        self.config, self.model_config, self.max_model_len = config, model_config, max_model_len
        self._registry = registry
        self.devices = choose_devices(config)
        check_all_reduce(config.executor.options, resolve_device(config.device))
        refuse_unsplittable(config, model_config, registry)
        with registry.building("sampler", config.sampler.name):
            self._row_bytes = registry.resolve("sampler", config.sampler.name).row.itemsize
        self._step_timeout = seconds(config.executor.options, "step_timeout", STEP_TIMEOUT)
        self._start_timeout = seconds(config.executor.options, "start_timeout", START_TIMEOUT)
        self._about: dict[str, Any] = {}
        self._dead: MinivllmError | None = None
        self._sent = self._received = 0
        self._children: Sequence[Child] = ()
        self._resources = ExitStack()
        self._release = weakref.finalize(self, self._resources.close)  # for an engine that was never shut down

    def take(self, children: Sequence[Child]) -> None:
        """Use these processes for the ranks, instead of starting them in ``start``; the executor owns them now."""
        self._children = children
        for child in children:
            self._resources.callback(child.kill)

    def start(self) -> int:
        size, held = self.config.tp, self._resources
        step_bytes, result_bytes = self._slot_bytes()
        steps = Ring(create_memory(Ring.size(size, step_bytes)), size, step_bytes)
        results = Ring(create_memory(Ring.size(1, result_bytes)), 1, result_bytes)
        bells = [Bell.create() for _ in range(size + 1)]
        for close in (steps.close, results.close, *(bell.close for bell in bells)):
            held.callback(close)
        stores = [open_store("127.0.0.1")]  # must live as long as the ranks
        build = Build(self.config, self.model_config, self.max_model_len, view_of(self._registry))
        hellos = [
            Hello(
                rank=rank,
                size=size,
                device_index=self.devices[rank] if self.devices else 0,
                store_port=stores[0].port,
                build=build,
                step_bytes=step_bytes,
                result_bytes=result_bytes,
            )
            for rank in range(size)
        ]
        *own, ours = ((bell.read_fd, bell.write_fd) for bell in bells)
        fds = [(steps.fd, results.fd, *bell, *ours) for bell in own]
        held.callback(stores.clear)
        if not self._children:
            self.take(start_children(size, gpus=False))
        self._ranks = RankProcesses(steps.beats, self._start_timeout)
        held.callback(self._ranks.kill)
        self._steps, self._results = Writer(steps, bells[:size]), Reader(results, 0, bells[size])
        self._ranks.poller.register(bells[size].read_fd, select.POLLIN)
        try:
            self._ranks.spawn(hellos, fds, self._children)
            ready = self._ranks.wait_ready()
        except MinivllmError as error:
            self._dead = error
            raise
        self._about = ready[0].about | {"ranks": size}
        tell(self._registry, (note for r in ready for note in r.notes))
        return min(r.num_blocks for r in ready)

    def _slot_bytes(self) -> tuple[int, int]:
        """Slot sizes that hold nearly every step (a full batch, a few new blocks per sequence and those of a prompt)
        and all masks of guided sequences. Memory is allocated only when first written to."""
        s, cache = self.config.scheduler, self.config.cache
        blocks = 4 * s.max_num_seqs + 2 * s.max_num_batched_tokens // cache.block_size
        step = 4096 + s.max_num_seqs * (32 + self._row_bytes) + 4 * s.max_num_batched_tokens + 12 * blocks
        masks = 4096 + s.max_num_seqs * (4 + 4 * mask_words(self.model_config.vocab_size))
        return max(step, masks), 4096 + s.max_num_seqs * (20 + 8 * _LOGPROBS)

    # ------------------------------------------------------------------ steps

    def launch(self, batch: Batch) -> StepHandle:
        self._tell(pack_batch(batch))
        self._sent += 1
        return _Step(self, self._sent)

    def guide(self, masks: TokenMasks) -> None:
        self._tell(pack_masks(masks))

    def _tell(self, message: bytes) -> None:
        self._check_alive()
        try:
            self._steps.send(message, self._ranks.watch)
        except MinivllmError as error:
            raise self._died(error) from None

    def result(self, number: int) -> StepResult:
        """The result of step ``number`` (from 1, in launch order); drops earlier results that were not asked for."""
        self._check_alive()
        waited = 0.0

        def sleep() -> None:
            nonlocal waited
            waited += self._ranks.watch()
            if waited > self._step_timeout:
                slowest = min(self._ranks.ranks, key=lambda rank: self._steps.ring.read(rank.number))
                why = f"did not finish a step in {waited:.0f} s (executor.options.step_timeout)"
                raise self._ranks.give_up(slowest, why)

        try:
            while self._received < number:
                data = self._results.receive(sleep)
                self._received += 1
        except MinivllmError as error:
            raise self._died(error) from None
        return unpack_result(data)

    def check_health(self) -> None:
        self._check_alive()
        try:
            self._ranks.check()
        except MinivllmError as error:
            raise self._died(error) from None

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead
        if not self._release.alive:
            raise was_shut_down()

    def _died(self, error: MinivllmError) -> MinivllmError:
        self._dead = error
        self._release()
        return error

    # ------------------------------------------------------------------ the rest

    def tell_all(self, method: str, argument: str) -> list[Answer]:
        self._check_alive()
        self._ranks.begin_again()
        self._tell(pack_call(method, argument))
        try:
            return [ready.answer for ready in self._ranks.wait_ready(DOING[method])]
        except MinivllmError as error:
            raise self._died(error) from None

    @contextmanager
    def profile(self, file: Path) -> Iterator[None]:
        file = file.absolute()
        file.unlink(missing_ok=True)
        self._tell(pack_profile(str(file)))
        try:
            yield
        finally:
            self._tell(pack_profile(""))
        while not file.exists():
            try:
                self._ranks.watch()
            except MinivllmError as error:
                raise self._died(error) from None

    def describe(self) -> dict[str, Any]:
        return self._about

    def shutdown(self) -> None:
        if self._dead is None and self._release.alive and self._about:
            try:
                self._steps.send(b"", self._ranks.watch)
                self._ranks.wait_ended()
            except MinivllmError as error:  # one was already gone
                self._dead = error
        self._release()


class _Step:
    """A step in flight."""

    __slots__ = ("executor", "number")

    def __init__(self, executor: MultiprocExecutor, number: int) -> None:
        self.executor, self.number = executor, number

    def result(self) -> StepResult:
        return self.executor.result(self.number)


def choose_devices(config: EngineConfig) -> list[int]:
    """The ranks' GPUs; none on a CPU. Raises ConfigError if there are too few."""
    if resolve_device(config.device) == "cpu":
        if "devices" in config.executor.options:
            raise ConfigError("executor.options.devices names GPUs, and this runs on the CPU; leave it out")
        return []
    there = torch.cuda.device_count()
    named = config.executor.options.get("devices")
    if named is not None:
        given = list(named) if isinstance(named, (list, tuple)) else named
        if not isinstance(given, list) or any(type(d) is not int for d in given) or len(set(given)) != config.tp:
            raise ConfigError(
                f"executor.options.devices={given} is not a list of {config.tp} different GPUs, which tp={config.tp} "
                f"needs; type executor.options.devices={list(range(config.tp))}"
            )
    devices = list(range(config.tp)) if named is None else list(named)
    if not all(0 <= d < there for d in devices):
        which = "" if named is None else f" (executor.options.devices={devices})"
        raise ConfigError(
            f"tp={config.tp} needs {config.tp} GPUs{which}, and torch sees {there}; lower tp, or check "
            "CUDA_VISIBLE_DEVICES"
        )
    return devices
