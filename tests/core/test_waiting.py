"""The queue of waiting sequences: their order, who is in sight of a step, and who overtakes whom."""

from __future__ import annotations

import random
import weakref

from minivllm.core import waiting
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence, Status
from minivllm.core.waiting import WaitingQueue


def queued(*lengths: int) -> tuple[WaitingQueue, list[Sequence]]:
    """A queue of sequences of these lengths, in the order of their arrival."""
    queue, seqs = WaitingQueue(), []
    for i, length in enumerate(lengths):
        seqs.append(Sequence(f"r{i}", [1] * length, SamplingParams(), max_len=99))
        seqs[-1].place = (i,)
        queue.add(seqs[-1])
    return queue, seqs


def admit(queue: WaitingQueue, seq: Sequence) -> None:
    queue.admit(seq)
    seq.status = Status.RUNNING


def test_a_step_sees_the_first_32_and_the_shortest_of_the_rest() -> None:
    queue, seqs = queued(*[9] * 40, 3, 3, 5)
    assert list(queue.in_sight()) == [*seqs[:32], seqs[40]]
    queue, seqs = queued(*[2] * 32, 3, 3)
    assert list(queue.in_sight()) == seqs[:32], "the shortest is among them"


def test_whoever_is_admitted_lets_the_next_come_into_sight() -> None:
    queue, seqs = queued(*[9] * 32, 8, 7, 6)
    seen = []
    for seq in queue.in_sight():
        seen.append(seq)
        if seq in (seqs[3], seqs[34], seqs[33]):
            admit(queue, seq)
    assert seen == [*seqs[:33], seqs[34], seqs[33]], "then the shortest is one that was tried"
    assert seqs[0].overtaken == 3 and list(queue) == [*seqs[:3], *seqs[4:33]]
    queue.check()


def test_admitting_the_head_overtakes_nobody() -> None:
    queue, seqs = queued(1, 1)
    admit(queue, queue.head)
    assert queue.head is seqs[1] and not seqs[1].overtaken


def test_the_head_may_be_overtaken_64_times() -> None:
    queue, seqs = queued(9, *[1] * 65)
    for i, seq in enumerate(seqs[1:]):
        assert queue.may_overtake == (i < 64)
        admit(queue, seq)


def test_add_tells_whether_a_step_sees_it() -> None:
    queue, seqs = queued(*[5] * 40)
    late = [Sequence(f"late{length}", [1] * length, SamplingParams(), max_len=99) for length in (5, 4)]
    for at, seq in enumerate(late):
        seq.place = (100 + at,)
    assert [queue.add(seq) for seq in late] == [False, True]
    queue.remove(seqs[10])
    assert queue.add(seqs[10]) and list(queue)[10] is seqs[10], "back at its place, as after a preemption"


def test_who_left_is_not_kept() -> None:
    queue, seqs = queued(*range(1, 2001))
    random.Random(0).shuffle(seqs)
    for seq in seqs[100:]:
        queue.remove(seq)
        seq.status = Status.FINISHED
    for i in range(100):
        seq = Sequence(f"next{i}", [1] * 3000, SamplingParams(), max_len=9999)
        seq.place = (2000 + i,)
        queue.add(seq)
    queue.check()
    assert len(queue._lengths) <= 2 * len(queue) + waiting._LOOK_AHEAD
    for seq in list(queue):
        queue.remove(seq)
    assert not queue and not queue._lengths


def test_whoever_left_can_be_freed_while_others_wait() -> None:
    class Watched(Sequence):
        __slots__ = ("__weakref__",)

    queue, _ = queued(9, 9)
    seq = Watched("watched", [1], SamplingParams(), max_len=99)
    seq.place, left = (2,), weakref.ref(seq)
    queue.add(seq)
    queue.remove(seq)
    del seq
    assert left() is None and len(queue) == 2
