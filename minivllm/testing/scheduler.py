"""What a scheduler must do: whatever requests come and go, each row reads its own history and every request ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.config.engine_config import SchedulerOptions
from minivllm.core.block_manager import PagedBlockManager
from minivllm.core.interfaces import Scheduler
from minivllm.core.model_config import FrozenDict
from minivllm.errors import RequestError
from minivllm.plugins.manager import default_registry
from minivllm.rounding import cdiv
from minivllm.testing.conformance import Conformance
from minivllm.testing.simulation import ROW, Ask, World

MAX_LEN = 40


@dataclass(frozen=True)
class Setting:
    block_size: int
    spare: int  # blocks beyond what the largest request needs
    max_num_seqs: int
    budget: int
    prefix: bool
    depth: int
    partial: int
    long: int
    threshold: int
    drafts: int
    least: int
    asks: bool


@dataclass(frozen=True)
class Add:
    ask: Ask


@dataclass(frozen=True)
class Abort:
    which: int  # index into the live requests, modulo their number


@dataclass(frozen=True)
class Steps:
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
        drafts=draw(st.sampled_from((0, 1, 2, 3, 7))),
        least=draw(st.integers(1, 2)),
        asks=draw(st.booleans()),
    )


def ask(family: int, shared: int, own: int, max_tokens: int, ends: int, salt: int, priority: int, repeats: int) -> Ask:
    """A request whose prompt is ``shared`` tokens common to its family, then ``own`` of its own."""
    prompt = [(family * 5 + i * i) % 11 for i in range(shared)] + [(i * (own + max_tokens)) % 11 for i in range(own)]
    return Ask(
        prompt=tuple(prompt) or (0,),  # token id 0 is a token
        max_tokens=max_tokens,
        stops=ends > 0,
        min_tokens=ends - 1 if 1 < ends < 4 else 0,
        string_at=ends - 3 if ends > 3 else 0,
        salt="salt" if salt == 3 else None,
        priority=priority,
        scores=own == 2,
        repeats=repeats,
    )


adds = st.builds(
    lambda *numbers: Add(ask(*numbers)), st.integers(0, 1), st.integers(0, 5) | st.integers(0, 20), st.integers(0, 5),
    st.integers(1, 20), st.integers(0, 6), st.integers(0, 3), st.integers(-1, 2),
    st.integers(0, 4),
)  # fmt: skip
ops = st.one_of(adds, adds, st.builds(Steps, st.integers(1, 6)), st.builds(Abort, st.integers(0, 7)))
stories = st.builds(
    lambda first, then: first + then, st.lists(adds, min_size=1, max_size=8), st.lists(ops, max_size=24)
)


class SchedulerConformance(Conformance):
    """A scheduler on the built-in block manager, with a simulated device that checks every batch it gets."""

    required = ("scheduler",)
    scheduler: ClassVar[str | type[Scheduler]]  # a registered name, or the class
    options: ClassVar[dict[str, Any]] = {}  # scheduler.options
    examples: ClassVar[int] = 200  # Hypothesis examples
    world: ClassVar[type[World]] = World  # a subclass may check more at each step: ``check_policy``
    steps_per_token: ClassVar[int] = 4  # everything must end within so many steps per token of all requests
    patience: ClassVar[int] = 400  # steps that a request may take, for which few are enough, while others keep coming

    @property
    def _class(self) -> type[Scheduler]:
        if isinstance(self.scheduler, str):
            return cast("type[Scheduler]", default_registry().resolve("scheduler", self.scheduler))
        return self.scheduler

    def make(
        self, *, block_size: int = 4, num_blocks: int = 64, max_model_len: int = 64, prefix: bool = True,
        depth: int = 2, **options: Any,
    ) -> World:  # fmt: skip
        cls = self._class
        name = self.scheduler if isinstance(self.scheduler, str) else cls.__name__
        usual: dict[str, Any] = {
            "name": name,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "options": FrozenDict(self.options),
        }
        chosen = SchedulerOptions(**(usual | options))
        blocks = PagedBlockManager(
            num_blocks, block_size, chosen.max_num_seqs, cdiv(max_model_len, block_size), prefix_caching=prefix
        )
        return self.world(cls(chosen, blocks, max_model_len, ROW), chosen, depth=depth)

    # ------------------------------------------------------------------ at random

    def test_every_row_reads_its_own_history_and_every_request_ends(self) -> None:
        @settings(
            max_examples=self.examples,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @given(where=setting(), story=stories)
        def check(where: Setting, story: list[Add | Abort | Steps]) -> None:
            self._play(where, story)

        check()

    def _play(self, where: Setting, story: list[Add | Abort | Steps]) -> None:
        drafts = min(where.drafts, where.max_num_seqs - 1) if self._class.speculates else 0
        longest = max(len(op.ask.prompt) + op.ask.max_tokens for op in story if isinstance(op, Add))
        num_blocks = max(cdiv(min(longest, MAX_LEN) - 1, where.block_size) + where.spare, 1)
        world = self.make(
            block_size=where.block_size,
            num_blocks=num_blocks,
            max_model_len=MAX_LEN,
            prefix=where.prefix,
            depth=where.depth,
            max_num_seqs=where.max_num_seqs,
            max_num_batched_tokens=where.budget,
            max_num_partial_prefills=where.partial,
            max_long_partial_prefills=where.long,
            long_prefill_token_threshold=where.threshold,
            num_speculative_tokens=drafts,
            prompt_lookup_min=where.least,
            draft_model="any" if drafts and where.asks and self._class.asks_draft_models else None,
        )
        work = 0
        for op in story:
            if isinstance(op, Add):
                length = len(op.ask.prompt) + op.ask.max_tokens
                if length <= MAX_LEN and length - 1 <= num_blocks * where.block_size:
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
        world.drain(limit=self.steps_per_token * work + 10)

    # ------------------------------------------------------------------ one by one

    @pytest.mark.parametrize("budget", [1, 3, 64])
    def test_prompts_go_in_chunks_of_the_budget(self, budget: int) -> None:
        world = self.make(max_num_batched_tokens=budget)
        for n in (30, 1, 17):
            world.add(Ask(tuple(range(n)), max_tokens=5))
        world.drain()
        assert len(world.ended) == 3

    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_pool_for_one_serves_many(self, depth: int) -> None:
        """Each fits alone, but no two at full length: some must be preempted, and none may lose a token."""
        world = self.make(num_blocks=8, prefix=False, depth=depth)
        for i in range(6):
            world.add(Ask((i, i + 1, i + 2), max_tokens=28))
        world.drain()
        assert len(world.ended) == 6

    @pytest.mark.parametrize("after", range(6))
    def test_an_abort_at_any_moment_frees_all(self, after: int) -> None:
        world = self.make(num_blocks=16, max_num_batched_tokens=8)
        for i in range(5):
            world.add(Ask((i,) * 12, max_tokens=20))
        for _ in range(after):
            world.step()
        for name in [*world.live][::2]:
            world.abort(name)
        world.drain()
        assert world.scheduler.abort("nobody") is None

    def test_what_can_never_fit_is_refused_with_the_numbers(self) -> None:
        world = self.make(num_blocks=4, block_size=4, max_model_len=40)
        with pytest.raises(RequestError, match="40"):
            world.add(Ask((1,) * 30, max_tokens=11))
        with pytest.raises(RequestError, match=r"\b(4|16)\b"):
            world.add(Ask((1,) * 10, max_tokens=8))
        world.scheduler.check()
        assert not world.scheduler.has_work
        world.add(Ask((1,) * 10, max_tokens=7))  # the last token needs no cache slot
        world.drain()

    def test_a_large_request_is_not_starved_by_small_ones(self) -> None:
        world = self.make(num_blocks=16)
        for i in range(8):
            world.add(Ask((i,) * 6, max_tokens=4 + i))
        world.step()
        large = world.add(Ask(tuple(range(11)) * 5, max_tokens=4))
        steps = 0
        while large.request_id in world.live:
            world.add(Ask((steps % 11,) * (2 + steps % 3), max_tokens=1 + steps % 7))  # there is always a small request
            world.add(Ask((steps % 7,) * 3, max_tokens=3))
            world.step()
            steps += 1
            assert steps < self.patience, "it still waits"
        world.drain()

    @pytest.mark.parametrize("length", [3, 12])
    def test_a_running_request_is_not_starved_by_prompts(self, length: int) -> None:
        """Before each step a prompt comes that ends with its first token; steps have room for 8 tokens."""
        world = self.make(max_num_batched_tokens=8)
        runs = world.add(Ask((1, 2, 3), max_tokens=8))
        steps = 0
        while runs.request_id in world.live:
            world.add(Ask(tuple((steps + i * i) % 11 for i in range(length)), max_tokens=1))
            world.step()
            steps += 1
            assert steps < self.patience, f"it has {world.told[runs.request_id]} of 8 tokens"
        world.drain()

    def test_a_request_id_is_taken_once(self) -> None:
        world = self.make()
        world.add(Ask((1, 2)), "same")
        with pytest.raises(RequestError, match="same"):
            world.scheduler.add(Ask((3, 4)).sequence("same", 1))
        world.drain()
