"""The order in which to add requests when only the time until the last one ends counts, as in ``LLM.generate``."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from typing import TYPE_CHECKING

from minivllm.rounding import cdiv

if TYPE_CHECKING:
    from minivllm.core.engine import LLMEngine
    from minivllm.core.sampling_params import SamplingParams

_LEFT_FREE = 0.05  # fraction of the cache; admissions leave some free as well


def longest_first(engine: LLMEngine, sizes: Sequence[int], params: Sequence[SamplingParams]) -> list[int]:
    """Indices of the requests in order. ``sizes``: prompt lengths in tokens, or an upper estimate (characters).

    Longest outputs first (the LPT rule, Graham 1969), so that none is left to run alone at the end. The given order is
    kept if all run at once anyway, or if the cache may be too small for the longest ones to run together: they would
    preempt each other and be recomputed.
    """
    order, running = range(len(params)), engine.config.scheduler.max_num_seqs
    if sum(one.n for one in params) <= running:
        return list(order)
    longest, block_size = engine.max_model_len, engine.config.cache.block_size
    answers = [longest if one.max_tokens is None else one.max_tokens for one in params]
    blocks: list[int] = []  # per completion, at its end
    for size, answer, one in zip(sizes, answers, params, strict=True):
        blocks += [cdiv(min(size + answer, longest), block_size)] * min(one.n, running)
    if sum(nlargest(running, blocks)) > engine.num_blocks * (1 - _LEFT_FREE):
        return list(order)
    return sorted(order, key=lambda i: -answers[i])
