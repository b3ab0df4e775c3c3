"""Turns a workload's options into requests: token ids and how many to generate. Equal options give equal requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.config.modes import WorkloadOptions


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt: list[int]
    max_tokens: int
    arrival: float = 0.0  # seconds after the run began
    text: str | None = None  # the prompt's text, if text is sent instead of tokens


def make_requests(
    options: WorkloadOptions, vocabulary: int | Sequence[int], encode: Callable[[str], list[int]] | None = None
) -> list[BenchRequest]:
    """Draws all prompts first, each its length and then its ids; then all output lengths: the order of nano-vllm's
    bench.py. Prefixes come last, and are put before the prompts in turn. ``request_rate`` changes none of these:
    arrivals are a Poisson process from 0 on, with its own generator.

    Args:
        vocabulary: its size, or the ids to draw from. A number beyond a small one is taken modulo its size.
        encode: tokenizes a trace's texts.

    Raises:
        ConfigError: a trace that cannot be read.
    """
    ids = range(vocabulary) if isinstance(vocabulary, int) else vocabulary
    draw = random.Random(options.seed)
    if options.path is not None:
        from minivllm.bench.trace_workload import read_requests

        return read_requests(options, lambda length: _ids(options, length, ids, draw), encode)
    assert options.num_requests is not None and options.output_len is not None
    prompts = [make_prompt(options, ids, draw) for _ in range(options.num_requests)]
    lengths = [_length(options.output_len, draw) for _ in prompts]
    if options.prefix_len is not None:
        prefixes = [_ids(options, options.prefix_len, ids, draw) for _ in range(options.num_prefixes or 1)]
        prompts = [prefixes[i % len(prefixes)] + prompt for i, prompt in enumerate(prompts)]
    arrivals = _arrivals(options.request_rate, len(prompts), random.Random(options.seed))
    return [BenchRequest(*request) for request in zip(prompts, lengths, arrivals, strict=True)]


def make_prompt(options: WorkloadOptions, ids: Sequence[int], draw: random.Random) -> list[int]:
    """Token ids of one prompt, drawn from ``ids``."""
    assert options.input_len is not None
    return _ids(options, _length(options.input_len, draw), ids, draw)


def check_fits(options: WorkloadOptions, requests: list[BenchRequest], max_model_len: int) -> None:
    """Raise ConfigError for a workload that would have to be truncated: its figures would be another workload's."""
    over = [r for r in requests if len(r.prompt) + r.max_tokens > max_model_len]
    if over:
        longest = max(over, key=lambda r: len(r.prompt) + r.max_tokens)
        excess, prefix = len(longest.prompt) + longest.max_tokens - max_model_len, options.prefix_len or 0
        fits = f" (workload.prefix_len={prefix - excess} fits)" if prefix > excess else ""
        shared = f"workload.prefix_len{fits}, " if prefix else ""
        keys = f"{shared}workload.input_len or workload.output_len"
        shorten = f"Shorten those of {options.path}" if options.path else f"Lower {keys}"
        raise ConfigError(
            f"workload={options.name}: {len(over)} of {len(requests)} requests exceed max_model_len={max_model_len}; "
            f"the longest has {len(longest.prompt)} tokens in and {longest.max_tokens} out. {shorten}, or raise "
            "max_model_len (or take a model that has more positions)"
        )


def _arrivals(rate: float | None, count: int, draw: random.Random) -> list[float]:
    """Arrival times in seconds, ``rate`` per second on average; None: all at 0."""
    if rate is None:
        return [0.0] * count
    return list(accumulate((draw.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def _ids(options: WorkloadOptions, length: int, ids: Sequence[int], draw: random.Random) -> list[int]:
    return [ids[draw.randint(0, options.max_token_id) % len(ids)] for _ in range(length)]


def _length(bounds: int | tuple[int, int], draw: random.Random) -> int:
    return draw.randint(*bounds) if isinstance(bounds, tuple) else bounds
