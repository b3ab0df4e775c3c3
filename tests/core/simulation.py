"""The built-in schedulers in ``minivllm.testing``'s simulated world, with the promises that only they make."""

from __future__ import annotations

from typing import Any

from minivllm.config.engine_config import SchedulerOptions
from minivllm.core.batch import Batch
from minivllm.core.block_manager import PagedBlockManager
from minivllm.core.scheduler import MixedScheduler, PrefillFirstScheduler, SlotScheduler
from minivllm.testing.simulation import ROW, STOP, Ask, Story
from minivllm.testing.simulation import World as AnyWorld

__all__ = ["STOP", "Ask", "Story", "World", "make_scheduler", "told"]

SCHEDULERS: dict[str, type[SlotScheduler]] = {"mixed": MixedScheduler, "prefill_first": PrefillFirstScheduler}


def make_scheduler(
    name: str = "mixed", *, block_size: int = 4, num_blocks: int = 64, max_model_len: int = 64, prefix: bool = True,
    **options: Any,
) -> SlotScheduler:  # fmt: skip
    settings = SchedulerOptions(**({"name": name, "max_num_seqs": 8, "max_num_batched_tokens": 64} | options))
    blocks = PagedBlockManager(
        num_blocks, block_size, settings.max_num_seqs, -(-max_model_len // block_size), prefix_caching=prefix
    )
    return SCHEDULERS[name](settings, blocks, max_model_len, ROW)


class World(AnyWorld):
    """``World(scheduler, depth=2)``."""

    scheduler: SlotScheduler

    def __init__(self, scheduler: SlotScheduler, options: SchedulerOptions | None = None, depth: int = 2) -> None:
        super().__init__(scheduler, options or scheduler.options, depth)

    def drain(self, limit: int = 10_000) -> None:
        super().drain(limit)
        assert not self.scheduler.num_running and not self.scheduler.num_waiting

    def check_policy(self, batch: Batch) -> None:
        s, options = self.scheduler, self.options
        assert (batch.generations == s.generation[batch.slots]).all()
        if isinstance(s, PrefillFirstScheduler):
            prompts = batch.num_computed < s.known_len[batch.slots]
            assert prompts.all() or not prompts.any(), "decodes and prompts in one step"
        run = s.running
        left = (s.known_len[run] - s.computed[run])[s.computed[run] < s.known_len[run]]
        assert len(left) <= options.max_num_partial_prefills, "too many prompts are half done"
        if s.threshold:
            assert (left > s.threshold).sum() <= options.max_long_partial_prefills, (
                "too many long prompts are half done"
            )
            assert (batch.num_new <= s.threshold).all(), "a chunk is over the threshold"


def told(world: World, name: str) -> list[int]:
    """The tokens that a request ended with."""
    return world.ended[name][0]
