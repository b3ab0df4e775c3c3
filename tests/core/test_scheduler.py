"""Each promise of a scheduler, by itself. ``World`` runs the scheduler on a device that checks what every row reads."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from simulation import STOP, Ask, Story, World, make_scheduler, told

from minivllm.config.engine_config import SchedulerOptions
from minivllm.core.block_manager import PagedBlockManager
from minivllm.core.scheduler import MixedScheduler
from minivllm.core.sequence import FinishReason, Sequence, Status
from minivllm.errors import ConfigError, RequestError

BOTH = pytest.mark.parametrize("name", ["mixed", "prefill_first"])
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def world(name: str = "mixed", depth: int = 2, **options: Any) -> World:
    return World(make_scheduler(name, **options), depth=depth)


def prompt(n: int, first: int = 1) -> tuple[int, ...]:
    """``n`` tokens that share no prefix with a prompt of another ``first``."""
    return tuple((first + i * i) % 11 for i in range(n))


def step_until(w: World, seq: Sequence, status: Status, limit: int = 500) -> None:
    while seq.status is not status:
        assert limit > 0, f"{seq} never became {status.value}"
        w.step()
        limit -= 1


def stopping_prompt(after: int) -> tuple[int, ...]:
    """A prompt whose ``after``-th answer token is the first STOP."""
    for a in range(11):
        for b in range(500):
            tokens = (a, b % 11, b // 11)
            answer = Story(Ask(tokens, max_tokens=after + 3)).tokens[3:]
            if STOP in answer and answer.index(STOP) == after - 1:
                return tokens
    raise AssertionError("no such prompt")


# --------------------------------------------------------------------------- who goes first


@BOTH
@DEPTHS
def test_first_come_first_served(name: str, depth: int) -> None:
    w = world(name, depth, max_num_seqs=2)
    seqs = [w.add(Ask(prompt(3 + i, first=i), max_tokens=3)) for i in range(6)]
    started: list[int] = []
    while w.scheduler.has_work:
        w.step()
        started += [i for i, s in enumerate(seqs) if s.status is not Status.WAITING and i not in started]
    assert started == sorted(started)
    assert len(w.ended) == 6


@BOTH
def test_a_short_prompt_is_not_held_behind_one_that_cannot_be_admitted(name: str) -> None:
    w = world(name, block_size=4, num_blocks=10)
    runs = w.add(Ask(prompt(20), max_tokens=12))
    w.step()
    big, small = w.add(Ask(prompt(30, first=2), max_tokens=4)), w.add(Ask(prompt(3, first=3), max_tokens=4))
    w.step()
    assert runs.status is Status.RUNNING
    assert small.status is Status.RUNNING, "it fits and waits for nothing but a prompt that does not"
    assert big.status is Status.WAITING
    w.drain()
    assert big.overtaken == 1


@BOTH
@pytest.mark.parametrize("many", [31, 32, 90])
def test_nor_is_it_behind_however_many_of_them(name: str, many: int) -> None:
    w = world(name, block_size=4, num_blocks=15)
    runs = w.add(Ask(prompt(4), max_tokens=30))
    w.step()
    big = [w.add(Ask(prompt(56, first=i % 11), max_tokens=1)) for i in range(many)]
    w.step()
    small = [w.add(Ask(prompt(3 + i, first=i), max_tokens=2)) for i in range(2)]
    w.add(Ask(prompt(2), max_tokens=2), name="gone")
    w.abort("gone")
    for _ in range(6):
        w.step()
    assert [seq.status for seq in small] == [Status.FINISHED] * 2 and runs.status is Status.RUNNING
    assert big[0].overtaken == 2 and all(seq.status is Status.WAITING for seq in big)
    w.drain()


@BOTH
@pytest.mark.parametrize("length", [58, 61])  # 61: all 16 blocks, none left for others to grow
def test_the_head_of_the_queue_is_overtaken_a_bounded_number_of_times(name: str, length: int) -> None:
    w = world(name, block_size=4, num_blocks=16, max_num_seqs=8)
    for i in range(8):
        w.add(Ask(prompt(6, first=i), max_tokens=4 + i))
    w.step()
    big = w.add(Ask(prompt(length, first=9), max_tokens=3))
    steps = 0
    while big.status is Status.WAITING:
        w.add(Ask(prompt(2 + steps % 3, first=steps % 11), max_tokens=1 + steps % 7))  # there is always a small one
        w.add(Ask(prompt(3, first=steps % 7), max_tokens=3))
        w.step()
        steps += 1
        assert steps < 400, "starved"
    assert 0 < big.overtaken <= 64
    w.drain()


@BOTH
def test_any_number_may_pass_a_head_that_waits_for_earlier_ones_only(name: str) -> None:
    w = world(name, num_blocks=64, max_model_len=256)
    runs = w.add(Ask(prompt(10), max_tokens=240))
    w.step()
    big = w.add(Ask(prompt(250, first=2), max_tokens=4))  # 63 blocks, and one to grow
    for i in range(80):
        short = w.add(Ask(prompt(5, first=i), max_tokens=2))
        w.step()
        assert short.status is Status.RUNNING, f"short prompt {i} waits, with {w.scheduler.blocks.num_free} free blocks"
        w.step()
    assert big.overtaken == 80 and runs.status is Status.RUNNING
    w.drain()


@BOTH
def test_after_64_none_passes_while_later_ones_hold_what_the_head_lacks(name: str) -> None:
    w = world(name, block_size=1, num_blocks=64, max_num_seqs=32, max_num_batched_tokens=64)
    runs = w.add(Ask(prompt(4), max_tokens=20))
    w.step()
    big = w.add(Ask(prompt(60, first=2), max_tokens=4))
    long = w.add(Ask(prompt(3, first=3), max_tokens=40))
    shorts = [w.add(Ask((i % 11,), max_tokens=1)) for i in range(100)]
    step_until(w, runs, Status.FINISHED)
    assert big.overtaken == 101 and all(short.status is Status.FINISHED for short in shorts)
    assert big.status is Status.WAITING and long.status is Status.RUNNING, "the one that passed it keeps it waiting"
    for i in range(100):
        w.add(Ask((i % 11,), max_tokens=1))
    step_until(w, big, Status.RUNNING)
    assert long.status is Status.FINISHED and big.overtaken == 101
    w.drain()


@BOTH
def test_many_at_once_do_not_overtake_the_head_more_often_than_allowed(name: str) -> None:
    w = world(name, block_size=1, num_blocks=64, max_num_seqs=32, max_num_batched_tokens=64)
    first = w.add(Ask(prompt(4), max_tokens=1))
    big = w.add(Ask(prompt(60, first=2), max_tokens=4))  # it lacks one block, then two
    w.add(Ask((3,), max_tokens=60))
    for i in range(120):  # 30 of them fit into a step
        w.add(Ask((i % 11,), max_tokens=30))
    step_until(w, big, Status.RUNNING)
    assert first.status is Status.FINISHED and 0 < big.overtaken <= 64
    w.drain()


@BOTH
def test_a_later_one_passes_as_soon_as_earlier_ones_alone_keep_the_head_waiting(name: str) -> None:
    """Though no block becomes free: the first in the cache grows."""
    w = world(name, depth=1, block_size=1, num_blocks=64, prefix=False)
    w.add(Ask(prompt(8), max_tokens=40))
    ends = w.add(Ask(prompt(12, first=2), max_tokens=5))
    w.step()
    big = w.add(Ask(prompt(46, first=3), max_tokens=4))
    w.add(Ask(prompt(8, first=4), max_tokens=50))
    w.step()
    assert big.overtaken == 1
    big.overtaken = 64
    step_until(w, ends, Status.FINISHED)
    small = w.add(Ask(prompt(2, first=5), max_tokens=2))
    w.step()
    assert small.status is Status.WAITING, "without the one behind it, the head would fit"
    step_until(w, small, Status.RUNNING, limit=6)
    assert big.status is Status.WAITING
    w.drain()


@BOTH
def test_a_full_house_admits_nobody(name: str) -> None:
    w = world(name, max_num_seqs=2)
    seqs = [w.add(Ask(prompt(3, first=i), max_tokens=8)) for i in range(3)]
    for _ in range(3):
        w.step()
    assert [s.status for s in seqs] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    assert (w.scheduler.num_running, w.scheduler.num_waiting) == (2, 1)
    w.drain()


def test_decodes_come_first_and_prompts_fill_the_budget() -> None:
    w = world("mixed", depth=1, max_num_batched_tokens=8)
    w.add(Ask(prompt(3), max_tokens=20))
    w.step()
    w.add(Ask(prompt(30, first=2), max_tokens=2))
    w.step()
    batch = w.batches[-1]
    assert batch.num_decodes == 1 and batch.num_new.tolist() == [1, 7]
    assert batch.samples.tolist() == [True, False]
    w.drain()


@BOTH
def test_a_step_admits_as_many_short_prompts_as_fit(name: str) -> None:
    w = world(name, max_num_seqs=100, max_num_batched_tokens=160, num_blocks=400, block_size=4)
    for i in range(120):
        w.add(Ask(prompt(2, first=i), max_tokens=3))
    w.step()
    assert len(w.scheduler.running) >= 80


def test_prefill_first_computes_prompts_alone_then_decodes() -> None:
    w = world("prefill_first", depth=1, max_num_batched_tokens=8)
    w.add(Ask(prompt(3), max_tokens=20))
    w.step()
    w.step()
    w.add(Ask(prompt(13, first=2), max_tokens=2))
    for _ in range(3):
        w.step()
    assert [(b.num_decodes, b.num_new.tolist()) for b in w.batches[1:]] == [(1, [1]), (0, [8]), (0, [5]), (2, [1, 1])]
    w.drain()


@pytest.mark.parametrize("drafts", [0, 3])
@DEPTHS
def test_prefill_first_lets_decodes_take_a_step_after_32_of_prompts(depth: int, drafts: int) -> None:
    w = world("prefill_first", depth, max_num_batched_tokens=5, num_speculative_tokens=drafts, prompt_lookup_min=1)
    runs = w.add(Ask((1, 2, 3), max_tokens=12, repeats=1))
    decoded: list[int] = []  # the steps that had it
    while runs.status is not Status.FINISHED:
        for i in range(2):  # one more than a step has room for
            w.add(Ask(prompt(5, first=w.steps + i), max_tokens=1))
        w.step()
        decoded = [batch.step for batch in w.batches if runs.slot in batch.slots]
        assert w.steps < 500, "starved"
    assert max(np.diff(decoded)) == 33
    w.drain()


def test_prefill_first_counts_only_prompts_that_hold_decodes_up() -> None:
    """A batch that comes at once is prefilled unbroken for 32 steps after its first prompt, however long that is."""
    w = world("prefill_first", depth=1, block_size=16, num_blocks=200, max_model_len=256, max_num_batched_tokens=2,
              max_num_seqs=40)  # fmt: skip
    w.add(Ask(prompt(100), max_tokens=4))
    for i in range(39):
        w.add(Ask(prompt(2, first=i), max_tokens=4))
    w.drain()
    kinds = "".join("p" if len(b.token_ids) else "d" for b in w.batches)
    assert kinds.startswith("p" * (50 + 32) + "d" + "p" * 7 + "d")


@DEPTHS
def test_a_budget_smaller_than_the_decodes_serves_the_oldest(depth: int) -> None:
    w = world("mixed", depth, max_num_batched_tokens=2, max_num_seqs=4)
    seqs = [w.add(Ask(prompt(2, first=i), max_tokens=6)) for i in range(4)]
    w.drain(limit=40)
    assert list(w.ended) == [s.request_id for s in seqs]


# --------------------------------------------------------------------------- too little memory


@BOTH
@DEPTHS
def test_under_pressure_the_latest_arrived_is_preempted_and_the_oldest_never(name: str, depth: int) -> None:
    w = world(name, depth, block_size=2, num_blocks=14, prefix=False)
    seqs = [w.add(Ask(prompt(4, first=i), max_tokens=20)) for i in range(3)]
    while not any(s.num_preemptions for s in seqs):
        w.step()
    assert [s.num_preemptions for s in seqs] == [0, 0, 1]
    w.drain()
    assert seqs[0].num_preemptions == 0
    assert seqs[2].num_preemptions >= seqs[1].num_preemptions
    assert all(len(told(w, s.request_id)) == 20 for s in seqs)


@pytest.mark.parametrize(("tokens", "fits"), [(56, True), (57, False)])
def test_an_admission_leaves_those_that_run_room_to_grow(tokens: int, fits: bool) -> None:
    w = world(depth=1, block_size=1, num_blocks=100)  # of which it leaves 3
    runs = w.add(Ask(prompt(40), max_tokens=5))
    w.step()
    late = w.add(Ask(prompt(tokens, first=3), max_tokens=2))
    w.step()  # the other's next token has the 41st block
    assert late.status is (Status.RUNNING if fits else Status.WAITING)
    step_until(w, runs, Status.FINISHED)
    step_until(w, late, Status.FINISHED)
    w.drain()


@BOTH
@pytest.mark.parametrize("prefix", [False, True])
def test_a_preempted_sequence_computes_its_known_tokens_again(name: str, prefix: bool) -> None:
    w = world(name, block_size=2, num_blocks=12, prefix=prefix)
    w.add(Ask(prompt(4), max_tokens=18))
    late = w.add(Ask(prompt(4, first=5), max_tokens=14))
    while not late.num_preemptions:
        w.step()
    assert late.status is Status.WAITING and late.slot == -1
    kept = len(late.known)
    assert 4 < kept < 18 and late.known.tolist() == Story(Ask(prompt(4, first=5), max_tokens=14)).tokens[:kept]
    step_until(w, late, Status.RUNNING)
    batch = next(b for b in reversed(w.batches) if late.slot in b.admitted_slots)
    row = batch.slots.tolist().index(late.slot)
    assert row >= batch.num_decodes and batch.num_computed[row] + batch.num_new[row] == kept
    assert prefix or batch.num_computed[row] == 0
    w.drain()


def test_a_preempted_sequence_keeps_its_place_in_the_queue() -> None:
    w = world("mixed", block_size=2, num_blocks=12, max_num_seqs=2)
    w.add(Ask(prompt(4), max_tokens=18))
    second = w.add(Ask(prompt(4, first=5), max_tokens=14))
    later = [w.add(Ask(prompt(3, first=i), max_tokens=2)) for i in range(6, 9)]
    while not second.num_preemptions:
        w.step()
    assert w.scheduler.waiting.head is second
    assert all(s.arrival > second.arrival for s in later)
    w.drain()


@BOTH
def test_num_cached_tokens_is_what_the_first_admission_found(name: str) -> None:
    w = world(name, block_size=2, num_blocks=12)
    w.add(Ask(prompt(4), max_tokens=18))
    late = w.add(Ask(prompt(4, first=5), max_tokens=14))
    w.drain()
    assert late.num_preemptions and late.num_cached_tokens == 0, "its own blocks, found again, are no cached prompt"


@pytest.mark.parametrize(
    "length,max_tokens,numbers",
    [
        (60, 5, ["max_tokens=5", "60-token prompt", "max_model_len=64", "start with a larger max_model_len"]),
        (40, 9, ["max_tokens=9", "40-token prompt", "needs 12 cache blocks", "has 11", "of 4 tokens: 44", "raise"]),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers_and_never_queued(
    length: int, max_tokens: int, numbers: list[str]
) -> None:
    w = world(num_blocks=11)
    with pytest.raises(RequestError) as error:
        w.add(Ask(prompt(length), max_tokens=max_tokens))
    for number in [*numbers, "shorten the prompt", "lower max_tokens"]:
        assert number in str(error.value)
    assert not w.scheduler.has_work and w.scheduler.num_waiting == 0
    w.add(Ask(prompt(40), max_tokens=5))  # fills the cache to the last place: its last token is never written
    w.drain()


def test_an_id_in_use_is_refused() -> None:
    w = world()
    w.add(Ask(prompt(3)), name="a")
    with pytest.raises(RequestError, match="'a' is already waiting or running"):
        w.add(Ask(prompt(3)), name="a")
    w.drain()
    w.add(Ask(prompt(3)), name="a")
    w.drain()


@pytest.mark.parametrize("option", ["max_num_seqs", "max_num_batched_tokens"])
def test_a_scheduler_without_room_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"scheduler.{option}=0")):
        MixedScheduler(SchedulerOptions(**{option: 0}), PagedBlockManager(4, 4, 1, 4), 16)


# --------------------------------------------------------------------------- chunks


def half_done(w: World) -> list[int]:
    """What is left of the prompts that have begun."""
    s = w.scheduler
    return [int(s.known_len[i] - s.computed[i]) for i in s.running.tolist() if s.computed[i] < s.known_len[i]]


def test_one_prompt_at_a_time_is_half_done_by_default() -> None:
    w = world(depth=1, max_num_batched_tokens=8)
    for i in range(3):
        w.add(Ask(prompt(20, first=i), max_tokens=1))
    w.step()
    assert half_done(w) == [12]
    w.step()
    w.step()
    assert w.batches[-1].num_new.tolist() == [4, 4], "the first one's rest, then the second begins"
    assert half_done(w) == [16]
    w.drain()


def test_short_prompts_pass_while_a_long_one_is_half_done() -> None:
    w = world(
        depth=1, max_num_batched_tokens=16, max_num_partial_prefills=2, max_long_partial_prefills=1,
        long_prefill_token_threshold=6,
    )  # fmt: skip
    long = [w.add(Ask(prompt(40, first=i), max_tokens=1)) for i in range(2)]
    short = w.add(Ask(prompt(5, first=7), max_tokens=1))
    w.step()
    assert w.batches[-1].num_new.tolist() == [6, 5], "the threshold bounds the long one's chunk"
    assert (long[0].status, long[1].status) == (Status.RUNNING, Status.WAITING)
    assert short.request_id in w.ended
    w.drain()


def test_two_long_prompts_share_a_step_where_that_is_allowed() -> None:
    w = world(
        depth=1, max_num_batched_tokens=16, max_num_partial_prefills=2, max_long_partial_prefills=2,
        long_prefill_token_threshold=6,
    )  # fmt: skip
    for i in range(3):
        w.add(Ask(prompt(40, first=i), max_tokens=1))
    w.step()
    assert w.batches[-1].num_new.tolist() == [6, 6]
    w.drain()


def test_the_limit_counts_short_prompts_that_the_budget_cuts() -> None:
    w = world(depth=1, max_num_batched_tokens=5, long_prefill_token_threshold=3)
    w.add(Ask(prompt(8), max_tokens=1))
    short = w.add(Ask(prompt(3, first=2), max_tokens=1))
    w.step()
    assert w.batches[-1].num_new.tolist() == [3] and short.status is Status.WAITING, "2 of its 3 tokens would fit"
    w.drain()


def test_a_prompt_that_one_step_had_no_room_for_is_in_the_next_that_has() -> None:
    """Not only when the long one is done."""
    w = world(depth=1, max_num_batched_tokens=10, long_prefill_token_threshold=6)
    for i in range(2):
        w.add(Ask(prompt(2, first=i), max_tokens=3))
    w.step()
    w.add(Ask(prompt(60, first=5), max_tokens=1))
    short = w.add(Ask(prompt(4, first=7), max_tokens=1))
    w.step()
    assert w.batches[-1].num_new.tolist() == [1, 1, 6] and short.status is Status.WAITING
    w.step()
    w.step()
    assert w.batches[-1].num_new.tolist() == [6, 4], "the two that decoded have ended"
    w.drain()


def test_several_partial_prefills_bring_vllms_threshold() -> None:
    assert make_scheduler(max_model_len=200, max_num_partial_prefills=2).threshold == 8
    assert make_scheduler(max_model_len=200, max_num_partial_prefills=1).threshold == 0
    assert make_scheduler(max_model_len=200, max_num_partial_prefills=2, long_prefill_token_threshold=5).threshold == 5


# --------------------------------------------------------------------------- shared prefixes


@DEPTHS
def test_two_requests_with_one_prefix_in_one_batch_share_it(depth: int) -> None:
    w = world(depth=depth)
    seqs = [w.add(Ask((*prompt(9), i), max_tokens=4)) for i in range(3)]
    w.step()
    assert [s.num_cached_tokens for s in seqs] == [0, 8, 8]
    assert w.batches[0].num_computed.tolist() == [0, 8, 8] and w.batches[0].num_new.tolist() == [10, 2, 2]
    w.drain()


@DEPTHS
def test_the_first_of_a_shared_prefix_may_go_at_any_moment(depth: int) -> None:
    for moment in range(6):
        w = world(depth=depth, num_blocks=10, max_num_batched_tokens=7)
        for i in range(3):
            w.add(Ask((*prompt(9), i), max_tokens=8))
        for _ in range(moment):
            w.step()
        if "r0" in w.live:
            w.abort("r0")
        w.add(Ask((*prompt(9, first=4), 1), max_tokens=8))  # takes what the abort set free
        w.drain()


def test_cache_salt_separates() -> None:
    w = world()
    for salt, cached in [(None, 0), (None, 8), ("a", 0), ("b", 0), ("a", 8)]:
        seq = w.add(Ask(prompt(10), max_tokens=2, salt=salt))
        w.drain()
        assert seq.num_cached_tokens == cached


def test_answers_are_cached_too() -> None:
    w = world()
    w.add(Ask(prompt(4), max_tokens=9))
    w.drain()
    again = w.add(Ask(tuple(Story(Ask(prompt(4), max_tokens=9)).tokens), max_tokens=2))
    w.drain()
    assert again.num_cached_tokens == 12  # of 13; the 13th was never written


# --------------------------------------------------------------------------- block boundaries and small numbers


@BOTH
@DEPTHS
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_every_prompt_length_crosses_its_block_boundaries(name: str, depth: int, block_size: int) -> None:
    w = world(name, depth, block_size=block_size, num_blocks=-(-64 // block_size) * 3, prefix=False)
    for n in range(1, 2 * block_size + 2):
        w.add(Ask(prompt(n, first=n), max_tokens=block_size + 2))
    w.drain()
    assert len(w.ended) == 2 * block_size + 1


@BOTH
@DEPTHS
def test_one_token_in_and_one_token_out(name: str, depth: int) -> None:
    w = world(name, depth, block_size=1, num_blocks=1, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=2)
    for i in range(4):
        w.add(Ask((i,), max_tokens=1))  # token id 0 is a token
    w.drain(limit=8)
    assert all(len(tokens) == 1 and why is FinishReason.LENGTH for tokens, why in w.ended.values())
    assert all(b.num_decodes == 0 for b in w.batches), "the last token needs no step of its own"


@DEPTHS
def test_a_request_takes_exactly_as_many_steps_as_it_has_tokens(depth: int) -> None:
    w = world(depth=depth)
    w.add(Ask(prompt(5), max_tokens=7))
    w.drain()
    assert len(w.batches) == 7


# --------------------------------------------------------------------------- ends


@BOTH
@DEPTHS
@pytest.mark.parametrize("after", [1, 2, 4, 5])
def test_a_stop_token_ends_the_answer_with_nothing_after_it(name: str, depth: int, after: int) -> None:
    w = world(name, depth)
    w.add(Ask(stopping_prompt(after), max_tokens=20, stops=True))
    w.drain()
    tokens, reason = w.ended["r0"]
    assert tokens[-1] == STOP and len(tokens) == after and reason is FinishReason.STOP
    assert len(w.batches) == after + depth - 1, "the pipeline wastes one step, and no more"


def test_many_stop_tokens_cost_only_whoever_has_them() -> None:
    w = world(max_num_seqs=4)
    for number in range(6):  # those of every second request are many, see ``Ask.sequence``
        w.add(Ask(stopping_prompt(1 + number), max_tokens=20, stops=True))
    w.drain()
    assert [len(w.ended[f"r{n}"][0]) for n in range(6)] == [1, 2, 3, 4, 5, 6]
    assert w.scheduler.stop_tokens.ids.shape[1] <= 16 and not w.scheduler.stop_tokens._more


@DEPTHS
def test_min_tokens_reads_past_stop_tokens(depth: int) -> None:
    w = world(depth=depth)
    w.add(Ask(stopping_prompt(2), max_tokens=3, stops=True, min_tokens=3))
    w.drain()
    assert len(told(w, "r0")) == 3 and w.ended["r0"][1] is FinishReason.LENGTH


@BOTH
def test_a_slot_is_reused_while_the_old_row_is_in_flight(name: str) -> None:
    w = world(name, depth=2, max_num_seqs=1, num_blocks=4, prefix=False)
    w.add(Ask(stopping_prompt(2), max_tokens=12, stops=True))
    w.add(Ask(prompt(5, first=4), max_tokens=5))
    while "r0" not in w.ended:
        w.step()
    [(stale, tokens)] = w.under_way
    assert stale.slots.tolist() == [0] and stale.generations[0] != w.scheduler.generation[0]
    batch = w.scheduler.schedule()
    assert batch is not None and batch.slots.tolist() == [0] and batch.admitted_slots.tolist() == [0]
    w.under_way.append((batch, w.launch(batch)))
    committed = w.scheduler.commit(*w.under_way.popleft())
    assert not len(committed.rows) and not committed.finished, f"a stale row brought {tokens}"
    w.drain()
    assert len(told(w, "r1")) == 5


@BOTH
@DEPTHS
def test_abort_at_every_moment_frees_at_once_and_harms_nobody(name: str, depth: int) -> None:
    for moment in range(9):
        w = world(name, depth, max_num_batched_tokens=6, num_blocks=12, max_num_seqs=2)
        for i in range(3):
            w.add(Ask(prompt(9, first=i), max_tokens=5))
        for _ in range(moment):
            w.step()
        if "r1" in w.live:
            held = w.scheduler.blocks.num_free
            seq = w.live["r1"][0]
            running = seq.status is Status.RUNNING
            w.abort("r1")
            assert (w.scheduler.blocks.num_free > held) == running
        w.add(Ask(prompt(9, first=5), max_tokens=5))
        w.drain()
        assert {"r0", "r2", "r3"} <= set(w.ended)


def test_abort_of_a_prompt_in_flight() -> None:
    w = world(depth=2, max_num_batched_tokens=4, num_blocks=12)
    w.add(Ask(prompt(20), max_tokens=4))
    w.step()
    assert len(w.under_way) == 1 and half_done(w) == [12]
    w.abort("r0")
    assert w.scheduler.blocks.num_free == 12 and not w.scheduler.has_work
    w.add(Ask(prompt(20), max_tokens=4))  # the same tokens: what was computed before the abort is right and reused
    w.drain()
    assert len(told(w, "r1")) == 4


def test_abort_of_an_unknown_id_is_none() -> None:
    w = world()
    assert w.scheduler.abort("nobody") is None
    w.add(Ask(prompt(3), max_tokens=1))
    w.drain()
    assert w.scheduler.abort("r0") is None


def test_aborted_requests_leave_the_queue() -> None:
    w = world(max_num_seqs=1)
    w.add(Ask(prompt(3), max_tokens=20))
    w.step()
    for i in range(100):
        w.add(Ask(prompt(3), max_tokens=2), name=f"w{i}")
    last = w.add(Ask(prompt(3), max_tokens=2))
    for i in range(100):
        w.abort(f"w{i}")
    assert w.scheduler.num_waiting == 1
    step_until(w, last, Status.RUNNING)
    assert len(w.scheduler.waiting) == 0
    w.drain()


def test_an_abort_lets_the_next_in_sight() -> None:
    """A step looks at the first 32 that wait; if none of them can be admitted, they hide one behind them that would
    need less, as it has a prefix in the cache."""
    w = world(block_size=4, num_blocks=10, max_num_seqs=4)
    w.add(Ask(prompt(20), max_tokens=20))
    w.step()
    for i in range(32):
        w.add(Ask(prompt(30, first=2), max_tokens=2), name=f"big{i}")
    cached = w.add(Ask((*prompt(20), *prompt(10, first=5)), max_tokens=2))
    w.step()
    assert cached.status is Status.WAITING
    w.abort("big7")
    w.step()
    assert cached.status is Status.RUNNING
    w.drain()


def test_nothing_to_do_is_no_batch() -> None:
    w = world()
    assert w.scheduler.schedule() is None and not w.scheduler.has_work
    w.add(Ask(prompt(3), max_tokens=1))
    batch = w.scheduler.schedule()
    assert batch is not None
    assert w.scheduler.schedule() is None, "its last token is in flight"
    assert w.scheduler.has_work
    w.commit(batch, w.launch(batch))
    assert not w.scheduler.has_work


# --------------------------------------------------------------------------- the proof itself


@pytest.mark.parametrize("damage", ["slot", "order", "partial", "blocks"])
def test_check_sees_damage(damage: str) -> None:
    w = world()
    for i in range(2):
        w.add(Ask(prompt(5, first=i), max_tokens=9))
    w.step()
    s = w.scheduler
    if damage == "slot":
        s._free_slots.pop()
    elif damage == "order":
        s.running = s.running[::-1]
    elif damage == "partial":
        s._partial.append(int(s.running[0]))
    else:
        s.blocks.free(int(s.running[0]))
    with pytest.raises(AssertionError):
        s.check()


def test_the_simulation_looks_at_what_decodes_read_together() -> None:
    world = World(make_scheduler())
    for i in range(4):
        world.add(Ask(prompt=(*range(8), i), max_tokens=6))
    world.drain()
    assert world.cascades >= 5
