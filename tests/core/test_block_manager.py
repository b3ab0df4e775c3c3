"""The pool of blocks: shared when equal, never lost, given away least recently used first."""

from __future__ import annotations

import numpy as np
import pytest

from minivllm.core.block_manager import PagedBlockManager
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence

SIZE = 4


def pool(num_blocks: int = 8, *, slots: int = 4, prefix_caching: bool = True) -> PagedBlockManager:
    return PagedBlockManager(num_blocks, SIZE, slots, 8, prefix_caching=prefix_caching)


def sequence(tokens: list[int], salt: str | None = None) -> Sequence:
    return Sequence("r", tokens, SamplingParams(), max_len=len(tokens) + 16, cache_salt=salt)


def hold(blocks: PagedBlockManager, slot: int, tokens: list[int], salt: str | None = None) -> Sequence:
    """Admit a sequence as the scheduler does, and offer all of its blocks."""
    seq = sequence(tokens, salt)
    blocks.allocate(slot, len(tokens), blocks.match(seq))
    blocks.register(slot, seq, seq.known, len(tokens))
    blocks.check()
    return seq


def row(blocks: PagedBlockManager, slot: int) -> list[int]:
    return blocks.tables[slot, : blocks.held[slot]].tolist()


def test_block_0_is_never_handed_out() -> None:
    blocks = pool(3)
    blocks.allocate(0, 3 * SIZE, [])
    assert sorted(row(blocks, 0)) == [1, 2, 3]
    assert blocks.num_free == 0


@pytest.mark.parametrize("tokens,count", [(1, 1), (SIZE, 1), (SIZE + 1, 2), (2 * SIZE, 2)])
def test_a_prompt_gets_as_many_blocks_as_it_touches(tokens: int, count: int) -> None:
    blocks = pool()
    blocks.allocate(2, tokens, [])
    assert len(row(blocks, 2)) == count == blocks.num_blocks - blocks.num_free
    blocks.check()


def test_append_gives_each_slot_one_block_and_tells_the_device() -> None:
    blocks = pool()
    blocks.allocate(0, SIZE, [])
    blocks.allocate(1, 1, [])
    blocks.take_updates()
    blocks.append(np.array([1, 0], dtype=np.int32))
    slots, indices, ids = blocks.take_updates()
    assert (slots.tolist(), indices.tolist()) == ([1, 0], [1, 1])
    assert ids.tolist() == [row(blocks, 1)[1], row(blocks, 0)[1]]
    assert len(set(row(blocks, 0) + row(blocks, 1))) == 4
    assert not len(blocks.take_updates()[0]), "told twice"
    blocks.check()


def test_more_than_is_free_is_refused_and_nothing_is_taken() -> None:
    blocks = pool(2)
    blocks.allocate(0, SIZE, [])
    assert blocks.missing(2 * SIZE, []) == 1
    with pytest.raises(RuntimeError, match="2 cache blocks asked for, 1 free"):
        blocks.allocate(1, 2 * SIZE, [])
    blocks.check()


def test_a_slot_that_holds_blocks_cannot_be_given_others() -> None:
    blocks = pool()
    blocks.allocate(0, 1, [])
    with pytest.raises(AssertionError, match="slot 0 already holds 1"):
        blocks.allocate(0, 1, [])


def test_equal_prefixes_share_whole_blocks_but_never_the_last_token() -> None:
    blocks = pool()
    first = hold(blocks, 0, list(range(2 * SIZE)))
    assert blocks.match(first) == row(blocks, 0)[:1], "the last token must be computed: its logits are needed"
    longer = sequence([*range(2 * SIZE), 99])
    assert blocks.match(longer) == row(blocks, 0)
    assert blocks.match(sequence([*range(SIZE), 99, 98, 97, 96, 95])) == row(blocks, 0)[:1]
    assert blocks.match(sequence([99, *range(1, 2 * SIZE + 1)])) == []
    assert blocks.match(sequence([0])) == []
    longer.prompt_logprobs = 0
    assert blocks.match(longer) == [], "all of its prompt is computed"


def test_the_same_block_after_another_prefix_is_another_block() -> None:
    blocks = pool()
    hold(blocks, 0, [1] * SIZE + [2] * SIZE)
    assert blocks.match(sequence([3] * SIZE + [2] * SIZE + [9])) == []
    assert blocks.match(sequence([2] * SIZE + [9])) == []


def test_salt_separates_and_equal_salt_shares() -> None:
    blocks = pool()
    hold(blocks, 0, list(range(SIZE)), salt="a")
    longer = [*range(SIZE), 9]
    assert blocks.match(sequence(longer)) == blocks.match(sequence(longer, salt="b")) == []
    assert blocks.match(sequence(longer, salt="a")) == row(blocks, 0)


def test_nobody_can_know_the_hashes_of_a_pool() -> None:
    one, other = (hold(pool(), 0, list(range(SIZE))) for _ in range(2))
    assert not set(one.block_hashes) & set(other.block_hashes)


def test_prefix_caching_off_shares_and_keeps_nothing() -> None:
    blocks = pool(prefix_caching=False)
    seq = hold(blocks, 0, list(range(2 * SIZE)))
    assert blocks.match(seq) == []
    blocks.free(0)
    assert blocks.match(seq) == [] and blocks.num_free == 8
    blocks.check()


def test_a_shared_block_lives_until_its_last_holder_is_gone() -> None:
    blocks = pool(4)
    hold(blocks, 0, [*range(SIZE), 50])
    hold(blocks, 1, [*range(SIZE), 60])
    assert row(blocks, 0)[0] == row(blocks, 1)[0] and row(blocks, 0)[1] != row(blocks, 1)[1]
    assert blocks.num_free == 1
    blocks.free(0)
    blocks.check()
    assert blocks.num_free == 2
    blocks.allocate(2, 2 * SIZE, [])  # everything that is free
    assert not set(row(blocks, 2)) & set(row(blocks, 1))
    blocks.check()
    blocks.free(1)
    blocks.free(2)
    assert blocks.num_free == 4
    blocks.check()


def test_a_freed_prefix_is_found_again_until_its_blocks_are_needed() -> None:
    blocks = pool(4)
    seq = hold(blocks, 0, [*range(2 * SIZE), 50])
    kept = row(blocks, 0)[:2]
    blocks.free(0)
    assert blocks.num_free == 4 and blocks.match(seq) == kept
    assert blocks.missing(9, kept) == -1, "reviving two cached blocks takes them from what is free"
    blocks.allocate(1, 2 * SIZE + 1, kept)
    assert row(blocks, 1)[:2] == kept and blocks.num_free == 1
    blocks.check()


def test_reviving_cached_blocks_counts_against_what_is_free() -> None:
    blocks = pool(2)
    seq = hold(blocks, 0, [*range(SIZE), 50])
    blocks.free(0)
    cached = blocks.match(seq)
    assert len(cached) == 1
    assert blocks.missing(2 * SIZE, cached) == 0
    assert blocks.missing(2 * SIZE + 1, cached) == 1


def test_the_least_recently_used_prefix_goes_first_and_of_one_its_tail() -> None:
    blocks = pool(4)
    old, new = [1] * SIZE + [2] * SIZE + [0], [3] * SIZE + [0]
    hold(blocks, 0, old[:-1])
    hold(blocks, 1, new[:-1])
    blocks.free(0)
    blocks.free(1)
    blocks.allocate(2, SIZE, [])  # the only block without content
    assert len(blocks.match(sequence(old))) == 2 and len(blocks.match(sequence(new))) == 1
    blocks.allocate(3, SIZE, [])  # one cached block goes: the tail of the older
    assert len(blocks.match(sequence(old))) == 1 and len(blocks.match(sequence(new))) == 1
    blocks.check()
    blocks.free(3)
    hold(blocks, 3, old[: SIZE + 1])  # uses the older prefix again: now the other is least recently used
    blocks.free(3)
    blocks.free(2)
    blocks.allocate(2, 3 * SIZE, [])
    assert len(blocks.match(sequence(old))) == 1 and blocks.match(sequence(new)) == []
    blocks.check()


def test_what_is_computed_twice_stays_private_and_leaves_no_trace() -> None:
    blocks = pool(4)
    a, b = sequence(list(range(SIZE))), sequence(list(range(SIZE)))
    for slot, seq in enumerate((a, b)):  # both admitted before either offers its block
        blocks.allocate(slot, SIZE, [])
        assert len(row(blocks, slot)) == 1, seq
    blocks.register(0, a, a.known, SIZE)
    blocks.register(1, b, b.known, SIZE)
    blocks.check()
    assert blocks.match(sequence([*range(SIZE), 9])) == row(blocks, 0)
    blocks.free(1)
    blocks.check()
    blocks.free(0)
    assert blocks.num_free == 4
    blocks.check()


def test_only_whole_blocks_are_offered() -> None:
    blocks = pool()
    seq = sequence(list(range(3 * SIZE)))
    blocks.allocate(0, 3 * SIZE, [])
    for computed, shared in [(SIZE - 1, 0), (SIZE, 1), (2 * SIZE - 1, 1), (3 * SIZE, 3)]:
        blocks.register(0, seq, seq.known, computed)
        assert len(blocks.match(sequence([*range(3 * SIZE), 9]))) == shared
    blocks.check()


def test_forgetting_keeps_what_is_in_use() -> None:
    blocks = pool(4)
    seq = hold(blocks, 0, [*range(2 * SIZE), 50])
    hold(blocks, 1, [7] * SIZE)
    blocks.free(1)
    blocks.reset_prefix_cache()
    blocks.check()
    assert blocks.match(seq) == [] and blocks.num_free == 1
    blocks.free(0)
    assert blocks.num_free == 4
    blocks.check()


@pytest.mark.parametrize("damage", ["ref", "lost", "twice", "hash", "zero"])
def test_check_sees_damage(damage: str) -> None:
    blocks = pool(4)
    hold(blocks, 0, [*range(SIZE), 50])
    if damage == "ref":
        blocks._ref[row(blocks, 0)[0]] += 1
    elif damage == "lost":
        blocks._free.pop()
    elif damage == "twice":
        blocks._free.append(row(blocks, 0)[1])
    elif damage == "hash":
        blocks._cached.clear()
    else:
        blocks.tables[0, 0] = 0
    with pytest.raises(AssertionError):
        blocks.check()
