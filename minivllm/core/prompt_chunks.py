"""How much of which prompt a step computes, within the limits of the scheduler's options."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.config.engine_config import SchedulerOptions


class PromptChunks:
    """The prompt chunks of one step. ``left`` is how many tokens of a prompt are not computed yet."""

    def __init__(self, options: SchedulerOptions, threshold: int, budget: int) -> None:
        """threshold: the most tokens of a chunk, 0 for any; a prompt with more left is a long one. budget: the most of
        all chunks."""
        self.options, self.threshold = options, threshold
        self.budget = budget  # what is left of it
        self.taken: list[tuple[int, int]] = []  # (slot, tokens)
        self._partial = self._long = 0  # prompts that this step leaves unfinished, and how many of them are long

    def may_begin(self, left: int) -> bool:
        """Whether a prompt may be begun: if this step leaves it unfinished, only so many others may be."""
        return self._next(left) == left or (
            self._partial < self.options.max_num_partial_prefills
            and (not self._is_long(left) or self._long < self.options.max_long_partial_prefills)
        )

    def take(self, slot: int, left: int) -> int:
        """Take the next chunk of a slot's prompt; returns its tokens, 0 if there is no budget."""
        n = self._next(left)
        if n:
            self.taken.append((slot, n))
            self.budget -= n
        if n < left:
            self._partial += 1
            self._long += self._is_long(left)
        return n

    def _next(self, left: int) -> int:
        return min(left, self.budget, self.threshold or left)

    def _is_long(self, left: int) -> bool:
        return 0 < self.threshold < left
