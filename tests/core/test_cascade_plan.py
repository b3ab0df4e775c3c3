"""What decode rows share: every key of a shared prefix is read by exactly one item for each of its rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minivllm.core.batch import Batch
from minivllm.core.cascade import CascadeLimits, CascadePlanner, plan_cascade

LIMITS = CascadeLimits(rows=4, keys=32, beside=6, alone=12, items=40, parts=200, saved_keys=1)


def covered(plan, tables, slots, computed, size, limits=LIMITS):
    """Keys that items read for each row, after checking that each item is what its rows have in common."""
    n, parts = len(slots), {}
    assert sorted(plan.order.tolist()) == list(range(n))
    assert len(plan.items) <= limits.items and plan.parts[:, 1].sum() <= limits.parts
    read = [[] for _ in range(n)]
    for first, count, lead, begin, end, part in plan.items.tolist():
        rows = plan.order[first : first + count].tolist()
        assert 1 <= count <= limits.rows and lead in plan.order.tolist() and 0 <= begin < end
        for row in rows:
            blocks = slice(begin // size, -(-end // size))
            assert (tables[slots[row], blocks] == tables[slots[lead], blocks]).all(), "they differ"
            assert end <= computed[row] // size * size, "past what is in the cache, or a block that is not whole"
            read[row] += range(begin, end)
            where = int(plan.parts[row, 0]) + part
            assert part < plan.parts[row, 1] and parts.setdefault(where, row) == row, "two write one part"
            del parts[where]
            parts[where, begin] = row
    assert len({where for where, _ in parts}) == len(parts), "two write one part"
    assert len(parts) == plan.parts[:, 1].sum(), "a part that nobody writes"
    return [sorted(keys) for keys in read]


def random_tables(draw, rows, size):
    """Tables of rows that branch off others, or not, and what is computed of each."""
    width, fresh = 24, iter(range(1, 10_000))
    tables = np.zeros((rows + 2, width), dtype=np.int32)
    slots = draw(st.permutations(range(rows + 2)))[:rows]
    computed = np.zeros(rows, dtype=np.int32)
    for i, slot in enumerate(slots):
        kept = 0
        if i and draw(st.integers(0, 3)):
            parent = draw(st.integers(0, i - 1))
            kept = min(draw(st.integers(0, width)), int(computed[parent]) // size)
            tables[slot, :kept] = tables[slots[parent], :kept]
        tables[slot, kept:] = [next(fresh) for _ in range(width - kept)]
        computed[i] = draw(st.integers(max(kept * size, 1), width * size))
    return tables, np.array(slots, dtype=np.int32), computed


@given(st.data(), st.integers(1, 14), st.sampled_from([1, 4, 16]))
def test_every_shared_key_is_read_once_for_each_row(data, rows, size):
    tables, slots, computed = random_tables(data.draw, rows, size)
    before = tables.copy()
    plan = plan_cascade(tables, slots, computed, size, LIMITS)
    assert (tables == before).all()
    if plan is None:
        return
    for row, keys in enumerate(covered(plan, tables, slots, computed, size)):
        assert keys == list(range(int(plan.skips[row]) * size)), "not once each"
    flat = plan.padded(rows + 3, LIMITS.items)
    assert flat.dtype == np.int32 and len(flat) == 4 * (rows + 3) + 6 * LIMITS.items


def grown(*rows, size=16):
    """Tables of such blocks, each row's all computed."""
    width = max(map(len, rows)) + 1
    tables = np.zeros((len(rows), width), dtype=np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    computed = np.array([len(row) * size for row in rows], dtype=np.int32)
    return tables, np.arange(len(rows), dtype=np.int32), computed


def test_a_tree_of_prefixes_is_read_level_by_level():
    system, a, b = list(range(1, 41)), list(range(50, 90)), list(range(100, 160))
    tables, slots, computed = grown(
        [*system, *a, 201], [*system, *b, 202], [*system, *a, 203], [*system, *b, 204], [7, 8], [*system, 205]
    )
    plan = plan_cascade(tables, slots, computed, 16, LIMITS)
    assert plan.skips.tolist() == [80, 100, 80, 100, 0, 40]
    assert plan.parts[4, 1] == 0
    read = covered(plan, tables, slots, computed, 16)
    assert [len(keys) for keys in read] == [80 * 16, 100 * 16, 80 * 16, 100 * 16, 0, 40 * 16]
    of_system = {tuple(item) for item in plan.items.tolist() if item[3] < 40 * 16}
    assert {item[0] + item[1] for item in of_system} == {4, 5}, "five rows, four at a time"


def test_what_saves_little_is_left_to_each_row():
    alone = [[10 * i + j for j in range(1, 9)] for i in range(5)]
    assert plan_cascade(*grown(*alone), 16, LIMITS) is None, "nothing is shared"
    short = [[1, 2, 3, 100 + i, 200 + i] for i in range(40)]
    free = CascadeLimits(rows=4, keys=32, beside=6, alone=12, items=40, parts=200, saved_keys=0)
    assert plan_cascade(*grown(*short), 16, free) is None, "three blocks"
    two = [[1, 2, 3, 4, 5, 6, 100 + i] for i in range(2)]
    assert plan_cascade(*grown(*two), 16, free) is None, "96 keys for two rows"
    shared = [[*range(1, 21), 100 + i] for i in range(5)]
    assert plan_cascade(*grown(*shared), 16, LIMITS) is not None
    dear = CascadeLimits(rows=4, keys=32, beside=6, alone=12, items=40, parts=200, saved_keys=4 * 20 * 16 + 1)
    assert plan_cascade(*grown(*shared), 16, dear) is None
    none = CascadeLimits(rows=4, keys=32, beside=6, alone=12, items=1, parts=200, saved_keys=1)
    assert plan_cascade(*grown(*shared), 16, none) is None, "five rows in one item of four"


def test_work_is_cut_evenly_and_fits():
    shared = [[*range(1, 401), 1000 + i] for i in range(8)]
    tables, slots, computed = grown(*shared)
    plan = plan_cascade(tables, slots, computed, 16, LIMITS)
    assert (
        not plan.beside and len(plan.items) == 12 and set((plan.items[:, 4] - plan.items[:, 3]).tolist()) == {1088, 960}
    )
    longer = grown(*[[*row, *range(2000 + 300 * i, 2200 + 300 * i)] for i, row in enumerate(shared)])
    plan = plan_cascade(*longer, 16, LIMITS)
    assert plan.beside and len(plan.items) == 6 and set((plan.items[:, 4] - plan.items[:, 3]).tolist()) == {2144, 2112}
    tight = CascadeLimits(rows=4, keys=32, beside=6, alone=12, items=40, parts=8, saved_keys=1)
    assert len(plan_cascade(tables, slots, computed, 16, tight).items) == 2, "a part a row is all there is room for"


def test_a_row_shares_only_whole_blocks_that_are_there():
    tables, slots, _ = grown([*range(1, 31)], [*range(1, 31)], [*range(1, 31)])
    computed = np.array([8 * 16 + 15, 480, 25 * 16], dtype=np.int32)
    plan = plan_cascade(tables, slots, computed, 16, LIMITS)
    assert plan.skips.tolist() == [8, 25, 25]


def batch_of(slots, generations, computed, prompts=0):
    n, none = len(slots), np.empty(0, dtype=np.int32)
    return Batch(
        step=0, slots=np.array(slots, dtype=np.int32), generations=np.array(generations), num_new=np.ones(n, np.int32),
        num_computed=np.array(computed, dtype=np.int32), samples=np.ones(n, bool), num_decodes=n - prompts,
        token_ids=none, block_slots=none, block_indices=none, block_ids=none, admitted_slots=none, admitted_params=none,
    )  # fmt: skip


def test_the_planner_looks_again_when_other_sequences_decode():
    tables, slots, computed = grown(*[[*range(1, 21), 100 + i] for i in range(4)])
    planner = CascadePlanner(tables, 16, LIMITS)
    first = planner.plan(batch_of(slots, [0] * 4, computed))
    assert first is not None
    assert planner.plan(batch_of(slots, [0] * 4, computed + 1)) is first, "they only grew"
    tables[2] = np.arange(500, 500 + tables.shape[1])
    other = planner.plan(batch_of(slots, [0, 0, 1, 0], computed))
    assert other is not first and other.skips.tolist() == [20, 20, 0, 20], "another sequence in the same slot"
    assert planner.plan(batch_of(slots[[0, 3, 2]], [0, 0, 1], computed[:3])).skips.tolist() == [20, 20, 0]
    assert planner.plan(batch_of(slots[[0, 2, 3]], [0, 0, 1], computed[:3])).skips.tolist() == [20, 0, 20], (
        "in other slots"
    )
    assert planner.plan(batch_of(slots[:3], [0, 0, 1], computed[:3])).skips.tolist() == [20, 20, 0]
    assert planner.plan(batch_of(slots[:3], [0, 0, 1], computed[:3], prompts=1)).skips.tolist() == [20, 20]
