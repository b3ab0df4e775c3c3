"""Drafts: what is looked up, which sequences have one, and what a step makes of it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import SCHEDULERS, STOP, Ask, World, make_scheduler, told

from minivllm.core import speculation
from minivllm.core.batch import Batch
from minivllm.core.scheduler import MixedScheduler
from minivllm.core.sequence import Status
from minivllm.core.speculation import look_up


def worlds(depth: int = 2, name: str = "mixed", num_speculative_tokens: int = 4, **options: int) -> World:
    drafts = {"num_speculative_tokens": num_speculative_tokens, "prompt_lookup_min": 1} | options
    return World(make_scheduler(name, **drafts), depth=depth)


def drafts_of(world: World) -> list[tuple[int, int]]:
    """The drafts of all steps so far: the first token's place in the sequence, and how many there were."""
    found = []
    for batch in world.batches:
        slots = batch.slots[batch.num_decodes :].tolist()
        for row, slot in enumerate(slots):
            if row and slots[row - 1] == slot:
                place, count = found.pop()
                found.append((place, count + 1))
            else:
                found.append((int(batch.num_computed[batch.num_decodes + row]) + 1, 0))
    return [(place, count) for place, count in found if count]


def one_drafts_beside_three() -> World:
    """A world in which all have ended."""
    world = worlds()
    for i in range(3):
        world.add(Ask((4 + i, i, 5), max_tokens=30))
    world.add(Ask((1, 2, 1, 2), max_tokens=30, repeats=2))
    world.drain()
    return world


# --------------------------------------------------------------------------- looking up


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(0, 4), st.integers(1, 3), st.integers(0, 3))
def test_the_longest_of_the_last_tokens_that_occurred_before(
    tokens: list[int], count: int, shortest: int, more: int
) -> None:
    expected: list[int] = []
    for n in range(shortest + more, shortest - 1, -1):
        places = [i for i in range(n, len(tokens)) if n and tokens[i - n : i] == tokens[-n:]]
        if places:
            after = tokens[places[-1] :]
            expected = (after * count)[:count]
            break
    assert look_up(np.array(tokens, dtype=np.int32), count, shortest, shortest + more).tolist() == expected


# --------------------------------------------------------------------------- steps


@pytest.mark.parametrize("name", ["mixed", "prefill_first"])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_repeats_takes_fewer_steps(name: str, depth: int) -> None:
    """The prompt's step gives one token, and a step that is launched before that is read another one; then tokens come
    five in a step."""
    world = worlds(depth, name)
    world.add(Ask((1, 2, 3, 1, 2, 3), max_tokens=40 + depth, repeats=3))
    world.drain()
    assert [count for _, count in drafts_of(world)] == [4] * 8 and world.steps == 8 + depth
    assert told(world, "r0") == ([1, 2, 3] * 14)[: 40 + depth]


def test_a_sequence_with_a_draft_and_others_share_steps() -> None:
    world = one_drafts_beside_three()
    assert any(count == 4 for _, count in drafts_of(world))
    assert any(b.num_decodes and len(b.slots) > b.num_decodes + 1 for b in world.batches[2:]), "none decoded beside it"


def test_no_token_beyond_the_last_is_drafted() -> None:
    for max_tokens in range(2, 9):
        world = worlds(1, num_speculative_tokens=7)
        world.add(Ask((1,) * 5, max_tokens=max_tokens, repeats=1))
        world.drain()
        assert [count for _, count in drafts_of(world)] == ([max_tokens - 2] if max_tokens > 2 else [])


@pytest.mark.parametrize("min_tokens", [0, 3, 6])
def test_a_stop_token_amid_a_draft_ends_the_answer(min_tokens: int) -> None:
    prompt = (1, 2, STOP, 4, 5) * 3
    world = worlds()
    world.add(Ask(prompt, max_tokens=20, stops=True, min_tokens=min_tokens, repeats=5))
    world.drain()
    assert told(world, "r0") == [1, 2, STOP, 4, 5, 1, 2, STOP][: 3 if min_tokens < 3 else 8]


def test_what_is_often_wrong_is_drafted_seldom() -> None:
    """At random one token of twelve is right. Without pauses nearly all places would be tried; with them some at first,
    then one of 32 tokens."""
    world = worlds(max_model_len=600, num_blocks=160)
    world.add(Ask((1, 2, 3), max_tokens=500))
    world.drain()
    assert 5 + 10 < len(drafts_of(world)) < 60


def test_what_does_not_repeat_is_drafted_at_no_step() -> None:
    world = worlds(prompt_lookup_min=5)
    world.add(Ask(tuple(range(12)), max_tokens=40))
    world.drain()
    assert not drafts_of(world)


def test_drafts_take_what_others_leave_of_rows_and_budget() -> None:
    """Four sequences of eight rows, six tokens: each has its own, and two draft tokens are left."""
    world = worlds(1, num_speculative_tokens=7, max_num_batched_tokens=6)
    for i in range(4):
        world.add(Ask((i,), max_tokens=12, repeats=1))
    world.drain()
    counts = [(len(b.slots) - len(set(b.slots.tolist())), len(set(b.slots.tolist()))) for b in world.batches]
    assert (2, 4) in counts, "four sequences, and two draft tokens"


def test_without_free_blocks_a_draft_is_as_long_as_its_sequences_blocks() -> None:
    world = worlds(num_blocks=4, num_speculative_tokens=7)
    world.add(Ask((1,) * 6, max_tokens=11, repeats=1))
    world.drain()
    world = worlds(num_blocks=5, num_speculative_tokens=7, prefix=False)
    for i in range(2):
        world.add(Ask((i,) * 4, max_tokens=14, repeats=1))
    world.drain()
    assert drafts_of(world)


def test_an_abort_while_a_draft_is_verified() -> None:
    for moment in range(8):
        world = worlds()
        world.add(Ask((1, 2) * 3, max_tokens=40, repeats=2))
        world.add(Ask((2, 3) * 3, max_tokens=9, repeats=2))
        for _ in range(moment):
            world.step()
        if "r0" in world.live:
            world.abort("r0")
        world.add(Ask((5, 6) * 3, max_tokens=9, repeats=2))
        world.drain()


def test_a_guide_with_one_mask_and_counted_tokens_have_none() -> None:
    for change in ({"guide": SimpleNamespace(drafts=False)}, {"tells_tokens": True}):
        world = worlds()
        seq = world.add(Ask((1, 2) * 4, max_tokens=20, repeats=2))
        for name, value in change.items():
            setattr(seq, name, value)
        world.drain()
        assert seq.status is Status.FINISHED and not drafts_of(world)


@pytest.mark.parametrize("most", [0, 2])
def test_no_row_is_spent_on_what_a_guide_forbids(most: int) -> None:
    asked = []

    def allowed(tokens: list[int]) -> int:
        asked.append(tokens)
        return min(most, len(tokens))

    world = worlds()
    seq = world.add(Ask((1, 2, 1, 2), max_tokens=60, repeats=2))
    seq.guide = SimpleNamespace(drafts=True, allowed=allowed)
    world.drain()
    counts = [count for _, count in drafts_of(world)]
    assert all(count <= most for count in counts)
    assert len(counts) > 5 if most else len(asked) < 20, "where nothing is allowed it pauses"


def test_many_sequences_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MOST_RUNNING", 3)
    world = worlds()
    for i in range(4):
        world.add(Ask((i, i + 1) * 4, max_tokens=10 + 10 * (i == 3), repeats=2))
    world.drain()
    drafted = drafts_of(world)
    assert drafted and min(place for place, _ in drafted) > 8 + 9, "only when one was left"


def test_layers_see_one_row_and_the_end_of_a_step_one_for_each_token() -> None:
    world = one_drafts_beside_three()
    drafted = 0
    for batch in world.batches:
        rows, n = batch.joined(), len(batch.slots)
        assert (rows is batch) == (len(set(batch.slots.tolist())) == n)
        drafted += rows is not batch
        at, end = rows.num_computed.tolist(), (rows.num_computed + rows.num_new).tolist()
        layers = [(s, p) for s, a, b in zip(rows.slots.tolist(), at, end, strict=True) for p in range(a, b)]
        slots, lengths, positions, tokens = batch.ends(8)[:, :n]
        assert [layers[i] for i in tokens] == list(zip(slots.tolist(), positions.tolist(), strict=True))
        assert (lengths == positions + 1).all() and (batch.ends(8)[0, n:] == 8).all()
        assert rows.num_decodes == batch.num_decodes and rows.num_tokens == batch.num_tokens
    assert drafted


# --------------------------------------------------------------------------- policies of others


class FewPromptTokens(MixedScheduler):
    def take_chunks(self, budget: int) -> list[tuple[int, int]]:
        return super().take_chunks(min(budget, 2))


class PromptsAlone(MixedScheduler):
    def schedule(self) -> Batch | None:
        decodes = self.take_decodes(self.options.max_num_batched_tokens)
        return self.write_batch(decodes, self.take_chunks(0 if len(decodes) else 20))


@pytest.mark.parametrize("policy", [FewPromptTokens, PromptsAlone])
def test_policies_that_override_a_part(policy: type[MixedScheduler], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULERS, "mixed", policy)
    world = worlds(max_num_batched_tokens=24)
    for i in range(3):
        world.add(Ask((i, i + 1) * 2, max_tokens=50, repeats=2))
    for _ in range(8):
        world.step()
    late = world.add(Ask(tuple(range(11)) * 3, max_tokens=2))
    world.abort("r1")
    steps = 0
    while late.request_id in world.live and steps < 60:
        steps += world.step()
    assert policy is not FewPromptTokens or steps < 25, "its two tokens a step are left to it"
    world.drain()
    assert drafts_of(world)


def test_decodes_that_are_taken_and_not_written_are_forgotten() -> None:
    world = worlds()
    for i in range(2):
        world.add(Ask((i, i + 1) * 4, max_tokens=20, repeats=2))
    while not world.scheduler.speculation.drafts:
        world.step()
    world.scheduler.take_decodes(64)
    for name in [*world.live]:
        world.abort(name)
    world.add(Ask((5,), max_tokens=3))
    world.drain()


def test_without_rows_for_drafts_nobody_waits_for_one() -> None:
    """Two of four rows would be left for three drafts."""
    for running, waits in ((2, True), (3, False)):
        world = worlds(max_num_seqs=4, num_speculative_tokens=3)
        for i in range(running):
            world.add(Ask((i, i + 1) * 4, max_tokens=20, repeats=2))
        for _ in range(8):
            world.step()
        assert any(world.scheduler.speculation.state) == waits and bool(drafts_of(world)) == waits
