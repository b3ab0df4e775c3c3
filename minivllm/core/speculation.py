"""Speculative decoding by prompt lookup (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding).

Where a sequence's last tokens occurred before, in its prompt or its answer, the tokens that followed them there are its
draft: they often follow again when a model quotes, edits or summarizes. One step computes the newest token and the
draft, each in a row of its own, and samples after every row. A draft token is accepted if it is what was sampled
before it. As a token depends only on its request's seed and its position, the tokens are the same as without drafts.

``state`` (S,), a slot array:
# DECODES: as any other sequence, with steps in flight; until ``look`` finds a draft
# WAITS: for its steps in flight, as a draft starts from the newest token; ``look`` then decides anew
# DRAFTS: its next step computes the newest token and ``drafts[slot]``; once ``launched`` it waits for that step
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.batch import NO_INTS, Batch

if TYPE_CHECKING:
    from minivllm.config.engine_config import SchedulerOptions
    from minivllm.core.interfaces import BlockManager
    from minivllm.core.sequence import Sequence

DECODES, WAITS, DRAFTS = 0, 1, 2
MOST_RUNNING = 32  # with more sequences running there are no new drafts: their steps would take longer than they save
PAUSE = 32  # tokens between drafts of a sequence of whose drafts too few tokens are accepted on average
_WEIGHT = 1 / 8  # of the newest draft in that average
_MOST_PLACES = 4096  # where the last token occurred before, the latest of them
_SYNCHRONIZES = 4  # if one of this many sequences waits, all do, so that their drafts share a step


def look_up(tokens: np.ndarray, count: int, shortest: int, longest: int) -> np.ndarray:
    """The ``count`` tokens that followed an earlier occurrence of the last ones of tokens (n,): of as many of them as
    occurred before, ``shortest`` to ``longest``, and of these occurrences the latest. If that is less than ``count``
    tokens ago, what followed it is repeated. Empty if there is none."""
    n, length, found = len(tokens), 0, NO_INTS
    ends = (tokens[:-1] == tokens[-1]).nonzero()[0][-_MOST_PLACES:]  # of occurrences of the last ``length + 1`` tokens
    while len(ends) and length < longest:
        found, length = ends, length + 1
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[n - 1 - length]]
    if not length or length < shortest:
        return NO_INTS
    after = int(found[-1]) + 1
    return np.resize(tokens[after : after + count], count)


class Speculation:
    """Which running sequences have drafts, and what these are. A scheduler owns one."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.most, size = options.num_speculative_tokens, options.max_num_seqs
        self._most_running = min(MOST_RUNNING, size // 2)  # each draft token takes a row
        self.shortest, self.longest = options.prompt_lookup_min, options.prompt_lookup_max
        self.state = np.zeros(size, dtype=np.int8)
        self.drafts: dict[int, np.ndarray] = {}
        self._may = np.zeros(size, dtype=bool)  # those that may have drafts
        self._from = np.zeros(size, dtype=np.int32)  # the tokens that a sequence must have before it looks again
        self._accepted = np.ones(size)  # tokens of a draft that were accepted, a moving average
        # Slots of which the device has a rejected token as the newest: the next step must bring its tokens along.
        self._behind: set[int] = set()

    def start(self, slot: int, seq: Sequence, computed: int) -> None:
        """A sequence starts in this slot, with so many tokens in blocks that others computed. One whose tokens the
        sampler counts has no drafts, as it would count rejected ones; nor has one whose guide gives one mask a step."""
        self._may[slot] = self.most > 0 and (seq.guide is None or seq.guide.drafts) and not seq.tells_tokens
        self._from[slot], self._accepted[slot] = 0, 1

    def stop(self, slot: int) -> None:
        self._decode(slot)
        self._may[slot] = False

    def _decode(self, slot: int) -> None:
        self.state[slot] = DECODES
        self.drafts.pop(slot, None)
        self._behind.discard(slot)

    def look(
        self, slots: np.ndarray, num_running: int, tokens: np.ndarray, committed: np.ndarray, computed: np.ndarray
    ) -> None:
        """Decide how the sequences in these slots go on, which have just got tokens. The last three are the scheduler's
        slot arrays."""
        slots = slots[self._may[slots]]
        looks = (committed[slots] >= self._from[slots]) & (num_running <= self._most_running)
        changes = looks | (self.state[slots] != DECODES)
        for slot, looks_up in dict(zip(slots[changes].tolist(), looks[changes].tolist(), strict=True)).items():
            n, draft = int(committed[slot]), NO_INTS
            if looks_up:
                draft = look_up(tokens[slot, :n], self.most, self.shortest, self.longest)
            if computed[slot] >= n:  # a step is in flight
                if len(draft):
                    self.state[slot] = WAITS
            elif len(draft) or slot in self._behind:
                self.state[slot], self.drafts[slot] = DRAFTS, draft
            else:
                if self.state[slot] == WAITS:  # in vain
                    self.settled(slot, 0, n, num_running)
                self._decode(slot)

    def goes_on(self, slots: np.ndarray) -> np.ndarray:
        """Whether the sequences in these slots take part in the next step."""
        state = self.state[slots]
        return (state == DECODES) | (state == DRAFTS)

    def waits(self, running: np.ndarray) -> bool:
        """Whether the next step should be launched only when no step is in flight: too many of the sequences in these
        slots would miss it. A step with few rows takes nearly as long as one with many."""
        return len(running) > 0 and _SYNCHRONIZES * int((self.state[running] == WAITS).sum()) >= len(running)

    def rows(
        self, slots: list[int], most: int, tokens: np.ndarray, committed: np.ndarray, max_len: np.ndarray,
        blocks: BlockManager, sequences: list[Sequence | None],
    ) -> tuple[np.ndarray, ...]:  # fmt: skip
        """A step's rows of sequences with drafts, ``most`` at most, each of one token: slots, places in the sequence,
        ids, each (m,) int32. Every sequence gets one for its newest token, and for draft tokens that its guide allows
        what else there is of rows and free blocks. The last five arguments are the scheduler's."""
        in_slots: list[int] = []
        places: list[int] = []
        ids: list[np.ndarray] = []
        for number, slot in enumerate(slots, 1):
            if most < 1:
                break
            n, others = int(committed[slot]), len(slots) - number
            draft = self.drafts[slot][: max(min(most - others, int(max_len[slot]) - n) - 1, 0)]
            seq = sequences[slot]
            if seq is not None and seq.guide is not None and len(draft):  # it has the newest token by now
                draft = draft[: seq.guide.allowed(draft.tolist())]
                if not len(draft):
                    self.settled(slot, 0, n, len(slots))
            while n + len(draft) > blocks.held[slot] * blocks.block_size:
                if blocks.num_free:
                    blocks.append(np.array([slot]))
                else:
                    draft = draft[: blocks.held[slot] * blocks.block_size - n]
            self.launched(slot, len(draft))
            rows = 1 + len(draft)
            in_slots += [slot] * rows
            places += range(n - 1, n - 1 + rows)
            ids += [tokens[slot, n - 1 : n], draft]
            most -= rows
        return np.array(in_slots, np.int32), np.array(places, np.int32), np.concatenate(ids) if ids else NO_INTS

    def launched(self, slot: int, num_drafts: int) -> None:
        """A step computes the slot's newest token and this many draft tokens."""
        self._decode(slot)
        if num_drafts:
            self.state[slot] = WAITS
            self._behind.add(slot)

    def worth(self, slot: int, num_running: int) -> float:
        """How many tokens of this slot's drafts must be accepted for them to pay off, on average: in steps of
        Qwen3-14B, H200."""
        return min(0.2 + num_running / 32, self.most / 4)

    def settled(self, slot: int, accepted: int, length: int, num_running: int) -> None:
        """This many draft tokens were accepted; the sequence has ``length`` tokens now."""
        self._accepted[slot] += _WEIGHT * (accepted - self._accepted[slot])
        least = self.worth(slot, num_running)
        self._from[slot] = length
        if self._accepted[slot] < least:
            self._from[slot] += PAUSE
            self._accepted[slot] = least  # the next draft decides


def drafted_rows(batch: Batch, token_ids: np.ndarray) -> list[tuple[int, int, int]]:
    """The sequences with drafts in a batch whose rows sampled token_ids (n,): the first row of each, how many draft
    tokens it has, a row each behind the first, and how many of these are accepted."""
    first, d = batch.first_rows, batch.num_decodes
    rows = np.diff(first, append=len(batch.slots))
    found = []
    for row, count in zip(first[rows > 1].tolist(), (rows[rows > 1] - 1).tolist(), strict=True):
        draft = batch.token_ids[row + 1 - d : row + 1 + count - d]  # rows of drafts precede those of prompts
        wrong = (draft != token_ids[row : row + count]).nonzero()[0]
        found.append((row, count, int(wrong[0]) if len(wrong) else count))
    return found
