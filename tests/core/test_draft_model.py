"""Drafts of a draft model: who gets one, what the model reads for it, and what becomes of it."""

from __future__ import annotations

import numpy as np
import pytest
from simulation import Ask, World, make_scheduler, told

from minivllm.core import draft_model
from minivllm.core.batch import Batch
from minivllm.core.draft_model import ASKS, DraftModelSpeculation
from minivllm.core.speculation import DECODES


def worlds(depth: int = 2, name: str = "mixed", num_speculative_tokens: int = 4, **options: int) -> World:
    drafts = {"num_speculative_tokens": num_speculative_tokens, "draft_model": "any", "max_num_seqs": 40}
    return World(make_scheduler(name, **drafts | options), depth=depth)


def asked(world: World) -> list[Batch]:
    return [batch for batch in world.batches if batch.num_drafts]


def verified(world: World) -> list[tuple[int, int]]:
    """Of each step without drafts of others: its rows, and its sequences."""
    return [(len(b.slots), len(set(b.slots.tolist()))) for b in world.batches if not b.num_drafts]


@pytest.mark.parametrize("name", ["mixed", "prefill_first"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_round_is_a_step_of_each_model(name: str, depth: int) -> None:
    world = worlds(depth, name)
    world.add(Ask((1, 2, 3), max_tokens=50))
    world.drain()
    rounds = len(asked(world))
    assert 50 / 5 <= rounds < 50 / 2, "of five tokens, if all were right"
    first, *later = asked(world)
    assert first.token_ids[:3].tolist() == [1, 2, 3] and first.samples.all() and first.num_computed.tolist() == [0]
    assert {int(batch.num_new.sum()) for batch in later} == {1, 2}, "it has read what it drafted, but for the last"
    assert sum(rows > 1 for rows, _ in verified(world)) == rounds


def test_sequences_share_the_steps_of_both_models() -> None:
    world = worlds()
    for i in range(4):
        world.add(Ask((i, 1, 2), max_tokens=30))
    world.drain()
    assert max(len(batch.slots) for batch in asked(world)) == 4
    assert (20, 4) in verified(world), "each with four draft tokens"


@pytest.mark.parametrize("rooms", [{"max_num_seqs": 14}, {"max_num_batched_tokens": 14}])
def test_no_more_is_drafted_than_can_be_verified(rooms: dict[str, int]) -> None:
    """A sequence and its draft take five rows."""
    world = worlds(**rooms)
    for i in range(4):
        world.add(Ask((i, 1, 2), max_tokens=20 + 10 * i))
    world.drain()
    drafted = sum(int(batch.samples.sum()) for batch in asked(world))
    assert drafted and drafted == sum((rows - its) / 4 for rows, its in verified(world))


def test_a_prompt_is_read_in_steps_of_the_budget() -> None:
    world = worlds(max_num_batched_tokens=8)
    world.add(Ask(tuple(i % 9 for i in range(30)), max_tokens=20))
    world.drain()
    read = [(int(batch.num_computed[0]), int(batch.num_new[0]), bool(batch.samples[0])) for batch in asked(world)]
    assert read[:4] == [(0, 8, False), (8, 8, False), (16, 8, False), (24, 8, True)], "it has two tokens by then"


def test_others_go_on_while_one_waits_for_its_drafts() -> None:
    """Prompts that take many steps beside one that decodes with drafts."""
    world = worlds(max_num_batched_tokens=12)
    world.add(Ask((1, 2), max_tokens=40))
    for _ in range(4):
        world.step()
    world.add(Ask((5,) * 60, max_tokens=2))
    world.drain()
    beside = [b for b in world.batches if not b.num_drafts and len(set(b.slots.tolist())) == 2]
    assert any(len(batch.slots) > 2 for batch in beside), "a step has a chunk and a draft"


def test_the_last_tokens_that_leave_no_room_for_a_draft_come_one_by_one() -> None:
    for max_tokens in range(1, 8):
        world = worlds(1, num_speculative_tokens=4)
        world.add(Ask((1, 2, 3), max_tokens=max_tokens))
        world.drain()
        assert bool(asked(world)) == (max_tokens > 5), max_tokens


def test_without_blocks_for_a_draft_a_sequence_goes_on_without() -> None:
    world = worlds(num_blocks=3, block_size=4, num_speculative_tokens=7)
    world.add(Ask((1, 2, 3), max_tokens=10))
    world.add(Ask((4, 5, 6), max_tokens=10))
    world.drain()
    assert len(told(world, "r0")) == len(told(world, "r1")) == 10


def test_with_many_running_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "MOST_RUNNING", 2)
    world = worlds()
    for i in range(3):
        world.add(Ask((i,), max_tokens=20 + 20 * (i == 0)))
    world.drain()
    assert asked(world) and all(len(batch.slots) == 1 for batch in asked(world)), "only the last one, alone"
    assert asked(world)[0].num_new[0] > 15, "it reads what it has missed"


def test_what_is_often_wrong_is_drafted_seldom() -> None:
    class Wrong(World):
        def launch(self, batch: Batch) -> np.ndarray:
            return super().launch(batch) + 1 if batch.num_drafts else super().launch(batch)

    drafts = {"num_speculative_tokens": 4, "draft_model": "any"}
    world = Wrong(make_scheduler(max_model_len=600, num_blocks=160, **drafts))
    world.add(Ask((1, 2, 3), max_tokens=500))
    world.drain()
    assert 500 / 34 < len(asked(world)) < 60


def test_a_draft_whose_sequence_is_gone_is_nobodys() -> None:
    """Another has started in its slot meanwhile."""
    world = worlds(max_num_seqs=8)
    scheduler = world.scheduler
    world.add(Ask((1, 2, 3), max_tokens=30))
    while (batch := scheduler.ask_for_drafts()) is None:
        step = scheduler.schedule()
        assert step is not None
        world.commit(step, world.launch(step))
    drafts = world.launch(batch)
    world.abort("r0")
    world.add(Ask((7,) * 5, max_tokens=30))
    chunk = scheduler.schedule()
    assert chunk is not None and chunk.slots.tolist() == batch.slots.tolist()
    sampled = world.launch(chunk)
    world.commit(batch, drafts)
    assert isinstance(scheduler.speculation, DraftModelSpeculation)
    assert scheduler.speculation.state[chunk.slots[0]] == DECODES and not scheduler.speculation.drafts
    world.commit(chunk, sampled)
    world.drain()


def test_who_has_yet_to_ask_takes_no_step() -> None:
    """A scheduler that makes room for others in ``schedule``, as examples/plugins/minivllm-priority does, may preempt
    all that wait, so that the others need not."""
    world = worlds(max_num_batched_tokens=8, num_speculative_tokens=2)
    scheduler = world.scheduler
    world.add(Ask((5,) * 20, max_tokens=30))
    world.add(Ask((1, 2, 3), max_tokens=30))
    while not ((batch := scheduler.ask_for_drafts()) and ASKS in scheduler.speculation.state):
        step = batch or scheduler.schedule()
        assert step is not None
        world.commit(step, world.launch(step))
    (asks,) = (scheduler.speculation.state == ASKS).nonzero()[0]
    drafts = world.launch(batch)
    assert scheduler.schedule() is None
    scheduler.preempt(int(batch.slots[0]))
    chunk = scheduler.schedule()
    assert chunk is not None and asks not in chunk.slots
    sampled = world.launch(chunk)
    world.commit(batch, drafts)
    world.commit(chunk, sampled)
    world.drain()


def test_a_preempted_sequence_is_read_again() -> None:
    world = worlds(num_blocks=9, block_size=4, prefix=False)
    for i in range(2):
        world.add(Ask((i, i + 1, i + 2), max_tokens=24))
    world.drain()
    assert sum((batch.num_computed == 0).sum() for batch in asked(world)) > 2, "one was preempted"


def test_what_it_has_seen_of_a_shared_prefix_it_does_not_read_again() -> None:
    world = worlds(num_speculative_tokens=3)
    prefix = tuple(i % 7 for i in range(20))
    for own in (8, 9):
        world.add(Ask((*prefix, own, 1), max_tokens=16))
        world.drain()
    reads = [int(batch.num_computed[0]) for batch in asked(world) if batch.num_computed[0] in (0, 20)]
    assert reads[0] == 0 and reads[1:] == [20], "five blocks of four tokens"
    before = len(asked(world))
    world.add(Ask((*prefix, 9, 1, *told(world, "r1"), 0), max_tokens=12))  # the next turn of that conversation
    world.drain()
    assert asked(world)[before].num_computed[0] == 28, "its own blocks, too, but for those of the last tokens"


def test_a_block_that_it_writes_into_again_is_not_as_it_was() -> None:
    """Of two blocks that it has seen all of, another sequence gets both, and so far has six tokens in them."""
    scheduler = make_scheduler(num_blocks=2, block_size=4, num_speculative_tokens=1, draft_model="any")
    its, blocks = scheduler.speculation, scheduler.blocks
    assert isinstance(its, DraftModelSpeculation)
    for number, seen in ((0, 8), (1, 6)):
        seq = Ask(tuple(range(number, number + 8))).sequence(f"r{number}", number)
        tokens = np.array(seq.known, dtype=np.int32)
        blocks.allocate(0, 8, [])
        blocks.register(0, seq, tokens, 8)
        its._note(0, 0, seen, seq)
        first, second = blocks.tables[0, :2].tolist()
        assert its._whole == {first: seq.block_hashes[0]} | ({second: seq.block_hashes[1]} if seen == 8 else {})
        blocks.free(0)
