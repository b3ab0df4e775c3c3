"""minivllm's own suite for schedulers, then what priorities promise: order, preemption, a bound on waiting."""

from __future__ import annotations

import numpy as np
import pytest
from minivllm_priority.scheduler import PriorityScheduler

from minivllm import LLM, SamplingParams
from minivllm.config.engine_config import SchedulerOptions
from minivllm.core.block_manager import PagedBlockManager
from minivllm.core.model_config import FrozenDict
from minivllm.core.sequence import Sequence, Status
from minivllm.errors import ConfigError, RequestError
from minivllm.testing import SchedulerConformance
from minivllm.testing.simulation import World

BLOCK = 4


class Prioritized(World):
    """Requests of four priorities, in no order."""

    def prepare(self, seq: Sequence, number: int) -> Sequence:
        seq.priority = (0, 2, 0, -1, 5, 2, 0)[number % 7]
        return seq


class TestPriority(SchedulerConformance):
    scheduler = "priority"
    options = {"ageing": 20}
    world = Prioritized


class Run:
    """The scheduler alone, its steps committed at once; token 9 is what every step samples."""

    def __init__(self, *, seqs: int = 1, num_blocks: int = 64, ageing: object = 1000) -> None:
        options = SchedulerOptions(
            name="priority", max_num_seqs=seqs, max_num_batched_tokens=64, options=FrozenDict(ageing=ageing)
        )
        self.scheduler = PriorityScheduler(options, PagedBlockManager(num_blocks, BLOCK, seqs, 16), 64)
        self.added = 0
        self.admitted: list[str] = []
        self.ended: list[str] = []

    def add(self, name: str, priority: int, *, prompt: int = 3, tokens: int = 4) -> Sequence:
        self.added += 1
        ids = np.full(prompt, self.added)  # no two share a prefix
        seq = Sequence(name, ids, SamplingParams(max_tokens=tokens), max_len=prompt + tokens, priority=priority)
        self.scheduler.add(seq)
        return seq

    def step(self) -> None:
        batch = self.scheduler.schedule()
        self.scheduler.check()
        assert batch is not None
        for slot in batch.admitted_slots.tolist():
            seq = self.scheduler.sequences[slot]
            assert seq is not None
            self.admitted.append(seq.request_id)
        committed = self.scheduler.commit(batch, np.full(len(batch.slots), 9))
        self.ended += [seq.request_id for seq, _ in committed.finished]
        self.scheduler.check()

    def drain(self) -> None:
        while self.scheduler.has_work:
            self.step()


# --------------------------------------------------------------------------- order


def test_smaller_priorities_go_first_and_equal_ones_as_they_came() -> None:
    run = Run()
    for name, priority in [("a", 0), ("b", 2), ("c", -1), ("d", 2), ("e", 0), ("f", 10**12)]:
        run.add(name, priority)
    run.drain()
    assert run.ended == ["c", "a", "e", "b", "d", "f"]
    assert run.admitted == run.ended, "nobody was preempted"


# --------------------------------------------------------------------------- preemption


def test_a_full_cache_takes_from_the_largest_priority() -> None:
    run = Run(seqs=3, num_blocks=9)
    seqs = [run.add(name, p, prompt=8, tokens=16) for name, p in [("low", 5), ("high", 0), ("middle", 2)]]
    run.drain()
    preempted = {seq.request_id: seq.num_preemptions for seq in seqs}
    assert preempted["low"] > 0 and preempted["high"] == 0
    assert run.ended == ["high", "middle", "low"]


def test_an_urgent_request_takes_a_slot_and_the_other_goes_on_later() -> None:
    run = Run(seqs=2)
    low, lower = run.add("low", 3, tokens=20), run.add("lower", 4, tokens=20)
    run.step()
    urgent = run.add("urgent", 0)
    run.step()
    assert (urgent.status, low.status, lower.status) == (Status.RUNNING, Status.RUNNING, Status.WAITING)
    run.drain()
    assert run.ended == ["urgent", "low", "lower"]
    assert len(lower.output_token_ids) == 20


def test_an_urgent_request_takes_blocks_only_if_that_is_enough() -> None:
    run = Run(seqs=4, num_blocks=15)
    first, low = run.add("first", 0, prompt=30, tokens=8), run.add("low", 3, prompt=12, tokens=12)
    run.step()
    big = run.add("big", 0, prompt=40)
    run.step()
    assert (first.status, low.status, big.status) == (Status.RUNNING, Status.RUNNING, Status.WAITING)
    urgent = run.add("urgent", -1, prompt=16)
    run.step()
    assert (first.status, low.status, urgent.status) == (Status.RUNNING, Status.WAITING, Status.RUNNING)
    run.drain()


def test_equal_priorities_do_not_take_from_each_other() -> None:
    run = Run(seqs=1)
    first = run.add("first", 1, tokens=20)
    run.step()
    run.add("second", 1)
    run.drain()
    assert run.ended == ["first", "second"] and first.num_preemptions == 0


# --------------------------------------------------------------------------- nobody starves


@pytest.mark.parametrize("ageing", [1, 10, 40])
def test_who_goes_first_is_bounded_by_ageing(ageing: int) -> None:
    """Urgent requests keep the only slot busy for ever; one two levels below them waits for 2 * ageing steps' worth."""
    run = Run(ageing=ageing)
    run.add("first", 0)
    patient = run.add("patient", 2)
    came: dict[str, int] = {}
    for step in range(1000):
        run.step()
        if patient.status is Status.FINISHED:
            break
        name = f"urgent{step}"
        came[name] = run.scheduler.steps
        run.add(name, 0, tokens=1)
    assert patient.status is Status.FINISHED
    before = [came[name] for name in run.ended[: run.ended.index("patient")] if name != "first"]
    assert before == list(range(1, 2 * ageing)), "who comes 2 * ageing steps later, or more, stands behind"
    assert patient.num_preemptions == 0, "once it stands before the newcomers, they take nothing from it"


def test_without_its_age_it_would_wait() -> None:
    run = Run(ageing=10**6)
    run.add("first", 0)
    patient = run.add("patient", 2)
    for step in range(300):
        run.step()
        run.add(f"urgent{step}", 0, tokens=1)
    assert patient.status is Status.WAITING


# --------------------------------------------------------------------------- in the engine

PROMPTS = ["Once upon a time", "The engine", "In a small village", "A cache is", "The capital of France"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def llm(scheduler: str, *overrides: str, tp: int = 1) -> LLM:
    tight = ["max_model_len=64", "cache.block_size=4", "cache.num_blocks=16", "scheduler.max_num_seqs=3"]
    return LLM("demo", attention="torch", device="cpu", tp=tp, overrides=[f"scheduler={scheduler}", *tight, *overrides])


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with llm("mixed") as plain:
        return [o.outputs[0].token_ids for o in plain.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("tp", [1, 2])
def test_the_tokens_are_those_of_the_built_in_scheduler(expected: list[list[int]], tp: int) -> None:
    with llm("priority", tp=tp) as ours:
        outputs = ours.generate(PROMPTS, GREEDY, use_tqdm=False, priority=[3, 0, 2, 1, 0])
        assert ours.engine.stats.preemptions > 0
    assert [o.outputs[0].token_ids for o in outputs] == expected


def test_the_engine_ends_requests_in_order_of_priority() -> None:
    with llm("priority", "scheduler.max_num_seqs=1") as ours:
        for name, priority in [("a", 2), ("b", 0), ("c", 1)]:
            ours.engine.add_request(name, "The engine", GREEDY.clone(max_tokens=4), priority=priority)
        ended: list[str] = []
        while ours.engine.has_unfinished_requests():
            ended += [output.request_id for output in ours.engine.step() if output.finished]
    assert ended == ["b", "c", "a"]


def test_what_cannot_be_is_refused() -> None:
    for ageing in (0, 1.5, True, "much"):
        with pytest.raises(ConfigError, match=f"ageing={ageing} is not a whole number of steps from 1"):
            Run(ageing=ageing)
    with pytest.raises(ConfigError, match="Did you mean ageing"):
        llm("priority", "scheduler.options.aging=5")
    with llm("mixed") as plain, pytest.raises(RequestError, match="priority=1 is not supported by scheduler=mixed"):
        plain.generate("The engine", GREEDY, priority=[1])
