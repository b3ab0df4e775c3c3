"""Requests by priority: a smaller number goes first, takes the room of larger ones, and nobody waits for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.core.scheduler import MixedScheduler
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from minivllm.config.engine_config import SchedulerOptions
    from minivllm.core.batch import Batch
    from minivllm.core.interfaces import BlockManager
    from minivllm.core.sequence import Sequence

AGEING = 1000


class PriorityScheduler(MixedScheduler):
    """The built-in mixed batches, in another order: by ``priority``, less one for every ``ageing`` steps of waiting.

    All grow older alike, so the order of two requests never changes: it is that of ``priority * ageing`` plus the step
    in which each came. Whoever comes ``(p - q) * ageing`` steps or more after a request of priority p, with priority q,
    stands behind it: that bounds who can go first. Steps are counted, not seconds, because the ranks of
    ``executor=torchrun`` schedule each for itself and must agree.

    Raises:
        ConfigError: ``scheduler.options.ageing`` is not a whole number from 1.
    """

    uses_priority = True

    def __init__(
        self, options: SchedulerOptions, blocks: BlockManager, max_model_len: int, sampler_row: np.dtype | None = None
    ) -> None:
        super().__init__(options, blocks, max_model_len, sampler_row)
        self.ageing = options.options.get("ageing", AGEING)
        if type(self.ageing) is not int or self.ageing < 1:
            raise ConfigError(
                f"scheduler.options.ageing={self.ageing} is not a whole number of steps from 1; type "
                f"scheduler.options.ageing={AGEING}, or leave it out"
            )

    def place(self, seq: Sequence) -> tuple[int, ...]:
        return seq.priority * self.ageing + self.steps, seq.arrival

    def schedule(self) -> Batch | None:
        self._make_room()
        return super().schedule()

    def _make_room(self) -> None:
        """Preempt sequences of larger priority that stand behind the head of the queue, if that lets it in.

        What a preempted one has computed stays in the prefix cache as long as nobody needs its blocks.
        """
        if not self.waiting:
            return
        head = self.waiting.head
        behind: list[int] = []  # slots, last place first
        for slot in reversed(self.running.tolist()):
            seq = self.sequences[slot]
            assert seq is not None
            if seq.place < head.place:
                break
            if seq.priority > head.priority:
                behind.append(slot)
        if not behind or self._blocks_lacking(head) > int(self.blocks.held[behind].sum()):
            return
        while behind and (self.num_running == self.options.max_num_seqs or self._blocks_lacking(head) > 0):
            self.preempt(behind.pop(0))

    def _blocks_lacking(self, seq: Sequence) -> int:
        return self.lacking(seq, self.blocks.match(seq))
