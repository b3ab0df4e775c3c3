"""Scheduler and block manager alone, under everything that can happen to them; ``simulation`` says what must hold."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from simulation import Ask, World, make_scheduler

from minivllm.errors import RequestError

EXAMPLES = int(os.environ.get("MINIVLLM_EXAMPLES", "2000"))
MAX_LEN = 40


@dataclass(frozen=True)
class Setting:
    block_size: int
    spare: int  # blocks more than the largest request needs
    max_num_seqs: int
    budget: int
    prefix: bool
    depth: int
    partial: int
    long: int
    threshold: int


@dataclass(frozen=True)
class Add:
    ask: Ask


@dataclass(frozen=True)
class Abort:
    which: int  # of those that live, modulo their number


@dataclass(frozen=True)
class Step:
    times: int


@st.composite
def setting(draw: st.DrawFn) -> Setting:
    partial = draw(st.integers(1, 3))
    return Setting(
        block_size=draw(st.sampled_from((2, 1, 3, 4, 8, 16))),
        spare=draw(st.integers(-1, 4)),
        max_num_seqs=draw(st.sampled_from((4, 3, 2, 1, 6, 8))),
        budget=draw(st.one_of(st.integers(1, 12), st.integers(4, 64))),
        prefix=draw(st.booleans()),
        depth=draw(st.integers(1, 2)),
        partial=partial,
        long=draw(st.integers(1, partial)),
        threshold=draw(st.sampled_from((0, 0, 1, 3, 8))),
    )


def ask(family: int, shared: int, own: int, max_tokens: int, ends: int, salt: int) -> Ask:
    """A prompt: ``shared`` tokens that all of its family begin with, then ``own`` ones."""
    prompt = [(family * 5 + i * i) % 11 for i in range(shared)] + [(i * (own + max_tokens)) % 11 for i in range(own)]
    return Ask(
        prompt=tuple(prompt) or (0,),  # token id 0 is a token
        max_tokens=max_tokens,
        stops=ends > 0,
        min_tokens=ends - 1 if 1 < ends < 4 else 0,
        string_at=ends - 3 if ends > 3 else 0,
        salt="salt" if salt == 3 else None,
    )


adds = st.builds(
    lambda *numbers: Add(ask(*numbers)), st.integers(0, 1), st.integers(0, 5) | st.integers(0, 20), st.integers(0, 5),
    st.integers(1, 20), st.integers(0, 6), st.integers(0, 3),
)  # fmt: skip
ops = st.one_of(adds, adds, st.builds(Step, st.integers(1, 6)), st.builds(Abort, st.integers(0, 7)))
stories = st.builds(
    lambda first, then: first + then, st.lists(adds, min_size=1, max_size=8), st.lists(ops, max_size=24)
)


@pytest.mark.parametrize("name", ["mixed", "prefill_first"])
@settings(
    max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(where=setting(), story=stories)
def test_every_row_reads_its_own_history_and_every_request_ends(
    name: str, where: Setting, story: list[Add | Abort | Step]
) -> None:
    longest = max(len(op.ask.prompt) + op.ask.max_tokens for op in story if isinstance(op, Add))
    num_blocks = max(-(-(min(longest, MAX_LEN) - 1) // where.block_size) + where.spare, 1)
    world = World(
        make_scheduler(
            name,
            block_size=where.block_size,
            num_blocks=num_blocks,
            max_model_len=MAX_LEN,
            prefix=where.prefix,
            max_num_seqs=where.max_num_seqs,
            max_num_batched_tokens=where.budget,
            max_num_partial_prefills=where.partial,
            max_long_partial_prefills=where.long,
            long_prefill_token_threshold=where.threshold,
        ),
        depth=where.depth,
    )
    work = 0
    for op in story:
        if isinstance(op, Add):
            length = len(op.ask.prompt) + op.ask.max_tokens
            fits = length <= MAX_LEN and length - 1 <= num_blocks * where.block_size
            if fits:
                world.add(op.ask)
                work += length
            else:
                with pytest.raises(RequestError):
                    world.add(op.ask)
            world.scheduler.check()
        elif isinstance(op, Abort):
            if world.live:
                world.abort(list(world.live)[op.which % len(world.live)])
        else:
            for _ in range(op.times):
                world.step()
    note(f"work {work}")
    world.drain(limit=LIMIT * work + 10)


LIMIT = 4
