"""In which order to add requests of which only the end of the last one counts, as those of one ``generate`` call."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.core.engine import LLMEngine
    from minivllm.core.sampling_params import SamplingParams

_LEFT_FREE = 0.05  # of the cache, which admissions do not fill either


def longest_first(engine: LLMEngine, sizes: Sequence[int], params: Sequence[SamplingParams]) -> list[int]:
    """Places of the requests. ``sizes``: of their prompts, in tokens, or what is likely more (letters).

    The longest answers first (the rule LPT, Graham 1969), so that none is left to run alone at the end; as they come if
    all run at once anyway, or if the cache may be too small for as many as run at once to go on for so long: they would
    take blocks from each other, and what is preempted is computed again.
    """
    order, running = range(len(params)), engine.config.scheduler.max_num_seqs
    if sum(one.n for one in params) <= running:
        return list(order)
    longest, block_size = engine.max_model_len, engine.config.cache.block_size
    answers = [longest if one.max_tokens is None else one.max_tokens for one in params]
    blocks: list[int] = []  # of each completion at its end
    for size, answer, one in zip(sizes, answers, params, strict=True):
        blocks += [-(-min(size + answer, longest) // block_size)] * min(one.n, running)
    if sum(nlargest(running, blocks)) > engine.num_blocks * (1 - _LEFT_FREE):
        return list(order)
    return sorted(order, key=lambda i: -answers[i])
