"""Decides which tokens the next step computes: prompts and decodes mixed, or prompts first.

Slot arrays, one row per running sequence, owned by the scheduler (S = max_num_seqs):
# tokens (S, max_model_len) int32: each sequence's tokens known on the host    committed (S,): how many are valid
# computed (S,): how many are in the cache, or will be after the steps in flight
# known_len (S,): how many were known at admission   max_len (S,): the length at which the sequence ends
# min_len (S,): the length before which no stop token ends it   stop_ids (S, k): its first stop ids, padded with -1
# generation (S,) int64: incremented when the slot is released, so that rows still in flight are recognized as stale

A sequence decodes once computed >= known_len: it then has computed + 1 tokens, of which the newest may be in flight.
One with a draft (``core/speculation.py``) has, while that is in flight, been computed to the draft's end.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect, bisect_left, insort
from collections import deque
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.batch import NO_INTS, Batch, Scored
from minivllm.core.interfaces import Committed, Scheduler
from minivllm.core.sequence import FinishReason, Sequence, Status
from minivllm.core.speculation import DRAFTS, WAITS, Speculation, drafted_rows
from minivllm.errors import ConfigError, ContextLengthError, RequestError

if TYPE_CHECKING:
    from minivllm.config.engine_config import SchedulerOptions
    from minivllm.core.interfaces import BlockManager

_FEW_RUNNING = 2  # with more running, two quiet steps in a row are rare
_LOOK_AHEAD = 32  # how many waiting sequences a step may skip, so that its cost does not grow with the queue
_MAX_OVERTAKEN = 64  # after so many, no later one is admitted before the head of the queue if that keeps it waiting
_NEVER = 1 << 62
_MOST_PROMPT_STEPS = 32  # of ``prefill_first`` in a row, while running sequences wait to decode
_FEW_STOP_IDS = 16  # stop ids of a sequence that are compared in one vectorized operation
_WATERMARK = 0.03  # the fraction of the pool that an admission leaves free for running sequences to grow


class SlotScheduler(Scheduler):
    """First come, first served, on slot arrays. A subclass's ``schedule`` decides how decodes and prompt chunks share a
    step: ``take_decodes``, ``take_chunks``, then ``write_batch``. Override ``place`` for another order.

    - All blocks of a prompt are allocated at admission, so a half-computed prompt never waits for memory.
    - When a decode needs a block and none is free, the running sequence with the last place (here: the latest arrival)
      is preempted: its blocks are freed and its known tokens are recomputed later. The first is never preempted, so
      every step makes progress.
    - While the head of the queue does not fit, later sequences that do go first: any of the first ``_LOOK_AHEAD``, then
      the shortest of the rest. After ``_MAX_OVERTAKEN`` of them none does while later ones hold what the head lacks; as
      long as it would not fit without them either, they do not delay it.
    - Sequences with drafts are decodes to ``take_decodes``, which keeps them for ``write_batch`` instead of returning
      them: it adds their rows, as prompt rows. ``take_chunks`` leaves them a token each.
    """

    scores_prompts = speculates = True

    def __init__(
        self, options: SchedulerOptions, blocks: BlockManager, max_model_len: int, sampler_row: np.dtype | None = None
    ) -> None:
        if options.max_num_seqs < 1 or options.max_num_batched_tokens < 1:
            raise ConfigError(
                f"scheduler.max_num_seqs={options.max_num_seqs} and scheduler.max_num_batched_tokens="
                f"{options.max_num_batched_tokens} must both be at least 1"
            )
        self.options = options
        self.blocks = blocks
        self.max_model_len = max_model_len
        size = options.max_num_seqs
        self.threshold = options.long_prefill_token_threshold
        if not self.threshold and options.max_num_partial_prefills > 1:
            self.threshold = max(1, int(max_model_len * 0.04))  # as in vLLM

        self.tokens = np.zeros((size, max_model_len), dtype=np.int32)
        self.committed = np.zeros(size, dtype=np.int32)
        self.computed = np.zeros(size, dtype=np.int32)
        self.known_len = np.zeros(size, dtype=np.int32)
        self.min_len = np.zeros(size, dtype=np.int32)
        self.max_len = np.zeros(size, dtype=np.int32)
        self.generation = np.zeros(size, dtype=np.int64)
        self.stop_ids = np.full((size, 1), -1, dtype=np.int32)
        self._more_stop_ids: dict[int, frozenset[int]] = {}  # by slot: those past ``_FEW_STOP_IDS``
        self.speculation = Speculation(options)
        self._drafting: list[int] = []  # those with drafts that ``take_decodes`` kept for this step, by place
        self._taken = 0  # tokens that it took, theirs included

        self.sequences: list[Sequence | None] = [None] * size
        self.waiting: deque[Sequence] = deque()  # by place; aborted ones are dropped when they reach the front
        # A heap of the waiting sequences, plus some stale entries: (known tokens, place, request id).
        self._lengths: list[tuple[int, tuple[int, ...], str]] = []
        self.running = NO_INTS  # slots, by place; never modified in place: batches hold views
        self._room = np.empty(size, dtype=np.int32)  # what ``running`` is a view of, with room to grow
        self._room_filled = 0  # entries of it in use
        self._partial: list[int] = []  # slots with known tokens left to compute, by place
        self._free_slots = list(range(size - 1, -1, -1))
        self._by_id: dict[str, Sequence] = {}
        self._arrivals = 0
        self.steps = 0  # written so far
        self._quiet = range(0)  # steps in which no running sequence needs a block, fills one or reaches its max length
        self._retry_at = 0  # with fewer free blocks than this no waiting sequence within reach can be admitted
        self._row = sampler_row if sampler_row is not None else np.dtype([("none", "i4")])
        self._no_params = np.empty(0, dtype=self._row)
        self._admitted: list[Sequence] = []
        self._ones, self._all, self._rows = np.ones(size, dtype=np.int32), np.ones(size, dtype=bool), np.arange(size)
        for constant in (self._ones, self._all, self._rows):
            constant.flags.writeable = False  # batches hold views of them

    # ------------------------------------------------------------------ the queue

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self._by_id) - len(self.running)

    def add(self, seq: Sequence) -> None:
        capacity = self.blocks.num_blocks * self.blocks.block_size
        if seq.max_len > self.max_model_len:
            raise ContextLengthError(
                f"max_tokens={seq.max_len - seq.prompt_len} with a {seq.prompt_len}-token prompt exceeds "
                f"max_model_len={self.max_model_len}: this model's maximum context length is {self.max_model_len} "
                "tokens; shorten the prompt, lower max_tokens or raise max_model_len"
            )
        if seq.max_len - 1 > capacity:  # the last token is never written to the cache
            raise RequestError(
                f"a {seq.prompt_len}-token prompt with max_tokens={seq.max_len - seq.prompt_len} needs "
                f"{-(-(seq.max_len - 1) // self.blocks.block_size)} cache blocks, and the whole cache has "
                f"{self.blocks.num_blocks} (of {self.blocks.block_size} tokens: {capacity}); shorten the prompt, lower "
                "max_tokens, or raise cache.num_blocks"
            )
        if seq.request_id in self._by_id:
            raise RequestError(f"request_id {seq.request_id!r} is already waiting or running; choose another")
        seq.arrival = self._arrivals
        seq.place = self.place(seq)
        self._arrivals += 1
        self._by_id[seq.request_id] = seq
        if self._enqueue(seq) < _LOOK_AHEAD or self._shortest() is seq:
            self._retry_at = 0

    def place(self, seq: Sequence) -> tuple[int, ...]:
        """The fixed place of a sequence that was just added: smaller is admitted first and preempted last.

        Places must be unique, and any sequence must eventually precede all later arrivals, or it may starve.
        """
        return (seq.arrival,)

    def _enqueue(self, seq: Sequence) -> int:
        at = len(self.waiting)
        if at and self.waiting[-1].place > seq.place:
            at = bisect(self.waiting, seq.place, key=lambda other: other.place)
        self.waiting.insert(at, seq)
        heappush(self._lengths, _length_of(seq))
        if len(self._lengths) > 2 * self.num_waiting + _LOOK_AHEAD:
            self._lengths = [_length_of(other) for other in self.waiting if other.status is Status.WAITING]
            heapify(self._lengths)
        return at

    def _shortest(self) -> Sequence | None:
        """The waiting sequence with the fewest tokens; the earliest if there are several."""
        while self._lengths:
            seq = self._by_id.get(self._lengths[0][2])
            if seq is not None and seq.status is Status.WAITING and _length_of(seq) == self._lengths[0]:
                return seq
            heappop(self._lengths)
        return None

    def abort(self, request_id: str) -> Sequence | None:
        seq = self._by_id.get(request_id)
        if seq is not None:
            self.finish(seq)
        return seq

    def finish(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self._release(seq)
            self.running = self.running[self.running != seq.slot]
            seq.slot = -1
        if seq.status is Status.WAITING:
            self._retry_at = 0
        seq.status = Status.FINISHED
        del self._by_id[seq.request_id]
        if self.waiting and not self.num_waiting:
            self.waiting.clear()  # only finished ones are left
            self._lengths.clear()

    # ------------------------------------------------------------------ a step

    @abstractmethod
    def schedule(self) -> Batch | None: ...

    @property
    def waits_for_drafts(self) -> bool:
        """Whether the next step should wait until those in flight are committed, for drafts."""
        return self.speculation.most > 0 and self.speculation.waits(self.running)

    def take_decodes(self, budget: int) -> np.ndarray:
        """The slots that decode, by place, each with a block for its next token; but for those with drafts."""
        self._drafting, self._taken = [], 0
        if not len(self.running) or (self.steps in self._quiet and len(self.running) <= budget):
            return self.running
        while True:
            run = self.running
            computed = self.computed[run]
            left = self.max_len[run] - 1 - computed
            goes_on = left > 0
            if self._partial:
                goes_on &= computed >= self.known_len[run]
            if self.speculation.most:
                goes_on &= self.speculation.state[run] != WAITS
            if np.count_nonzero(goes_on) < len(run):
                run, computed = run[goes_on], computed[goes_on]
            ready = run[:budget]
            need = ready[computed[:budget] >= self.blocks.held[ready] * self.blocks.block_size]
            if len(need) <= self.blocks.num_free:
                if len(need):
                    self.blocks.append(need)
                elif 0 < len(ready) == len(self.running) <= _FEW_RUNNING and not self.speculation.most:
                    self._expect_quiet(computed.tolist(), left.tolist())
                return self._without_drafts(ready) if self.speculation.drafts else ready
            self.preempt(int(self.running[-1]))

    def _without_drafts(self, ready: np.ndarray) -> np.ndarray:
        drafting = self.speculation.state[ready] == DRAFTS
        self._drafting, self._taken = ready[drafting].tolist(), len(ready)
        return ready[~drafting]

    def _expect_quiet(self, computed: list[int], left: list[int]) -> None:
        """Predict the quiet steps. computed, left: tokens computed, and still allowed, of each running sequence. A new
        sequence ends the quiet period; one that leaves does not affect the others."""
        size = self.blocks.block_size
        steps = min(*(size - n % size for n in computed), *left) - 1
        self._quiet = range(self.steps, self.steps + steps)

    def take_chunks(self, budget: int) -> list[tuple[int, int]]:
        """Prompt chunks as (slot, number of tokens): partly computed prompts first, then new ones from the queue."""
        chunks: list[tuple[int, int]] = []
        if self._drafting:
            budget = min(budget, self.options.max_num_batched_tokens - self._taken)
        partial = long = 0  # prompts that this step leaves unfinished, and how many of them exceed the threshold
        for slot in self._partial:
            left = int(self.known_len[slot] - self.computed[slot])
            n = min(left, budget, self.threshold or left)
            if n:
                chunks.append((slot, n))
                budget -= n
            if n < left:
                partial += 1
                long += bool(self.threshold) and left > self.threshold
        if (
            self.waiting
            and budget > 0
            and self._free_slots
            and (self.blocks.num_free >= self._retry_at or not len(self.running))
        ):
            self._admit(budget, chunks, partial, long)
        return chunks

    def _admit(self, budget: int, chunks: list[tuple[int, int]], partial: int, long: int) -> None:
        at, retry_at, no_room, head_is_next = 0, _NEVER, False, False  # ``at``: how many are skipped
        while at < len(self.waiting) and budget > 0 and self._free_slots and not head_is_next:
            if at > _LOOK_AHEAD:
                break
            if at == _LOOK_AHEAD:
                shortest = self._shortest()
                if shortest is None or shortest.place < self.waiting[at].place:
                    break  # it was already skipped
                at = bisect_left(self.waiting, shortest.place, key=lambda other: other.place)
                if at == len(self.waiting):
                    break  # a subclass removed it
            seq = self.waiting[at]
            if seq.status is not Status.WAITING:
                del self.waiting[at]
                continue
            known = len(seq.known)
            cached = self.blocks.match(seq)
            lacking = self.lacking(seq, cached)
            left = known - len(cached) * self.blocks.block_size
            n = min(left, budget, self.threshold or left)
            is_long = bool(self.threshold) and left > self.threshold
            room = n == left or (
                partial < self.options.max_num_partial_prefills
                and (not is_long or long < self.options.max_long_partial_prefills)
            )
            if lacking <= 0 and room:
                self._start(seq, cached)
                self._take_first_chunk(chunks, seq, n)
                budget -= n
                if n < left:
                    partial += 1
                    long += is_long
                if at:
                    self.waiting[0].overtaken += 1
                    head_is_next = self._must_go_next(self.waiting[0])
                del self.waiting[at]
                at = min(at, _LOOK_AHEAD)
                continue
            if lacking > 0:
                retry_at = min(retry_at, self.blocks.num_free + lacking)
            else:
                no_room = True
            if not at:
                head_is_next = self._must_go_next(seq)
            at += 1
        blocked = at > 0 and budget > 0 and self._free_slots
        self._retry_at = retry_at if blocked and not no_room and not head_is_next else 0

    def _must_go_next(self, head: Sequence) -> bool:
        """Whether ``head`` was overtaken often enough, and running sequences behind it hold what it lacks."""
        if head.overtaken < _MAX_OVERTAKEN:
            return False
        ahead = bisect(self.running.tolist(), head.place, key=self._place_of)
        if not ahead:
            return True  # alone it fits
        # Shared blocks count twice here. So this may be True too often, but never False if the later ones are to blame.
        return self.lacking(head, self.blocks.match(head)) <= int(self.blocks.held[self.running[ahead:]].sum())

    def lacking(self, seq: Sequence, cached: list[int]) -> int:
        """How many more free blocks are needed to admit ``seq``, given its ``cached`` blocks; 0 or less: it fits."""
        reserve = max(1, int(_WATERMARK * self.blocks.num_blocks)) if len(self.running) else 0
        return self.blocks.missing(len(seq.known), cached) + reserve

    def _take_first_chunk(self, chunks: list[tuple[int, int]], seq: Sequence, n: int) -> None:
        """Add the first chunk of a sequence that was just admitted, and make its blocks shareable.

        A later row of the same step may read them: each layer writes all of the step's keys before any row attends.
        """
        chunks.append((seq.slot, n))
        self.blocks.register(seq.slot, seq, self.tokens[seq.slot], int(self.computed[seq.slot]) + n)

    def _start(self, seq: Sequence, cached: list[int]) -> None:
        slot = self._free_slots.pop()
        known = len(seq.known)
        self.blocks.allocate(slot, known, cached)
        computed = len(cached) * self.blocks.block_size
        self.tokens[slot, :known] = seq.known
        self.committed[slot] = self.known_len[slot] = known
        self.computed[slot] = computed
        self.max_len[slot] = seq.max_len
        self.min_len[slot] = seq.prompt_len + seq.params.min_tokens
        self._set_stop_ids(slot, seq.stop_ids)
        self.speculation.start(slot, seq)
        self.sequences[slot] = seq
        self._quiet = range(0)
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = computed
        seq.slot, seq.status = slot, Status.RUNNING
        self._insert_running(slot, seq.place)
        if self._partial and self._place_of(self._partial[-1]) > seq.place:
            insort(self._partial, slot, key=self._place_of)
        else:
            self._partial.append(slot)
        self._admitted.append(seq)

    def _insert_running(self, slot: int, place: tuple[int, ...]) -> None:
        """Insert a slot into ``running`` by place; usually at the end, where there is room."""
        running, n = self.running, len(self.running)
        if n and self._place_of(int(running[-1])) > place:
            at = bisect(running.tolist(), place, key=self._place_of)
            self.running = np.insert(running, at, slot)
            return
        if running.base is not self._room or n != self._room_filled:
            self._room = np.empty(len(self.sequences), dtype=np.int32)
            self._room[:n] = running
        self._room[n], self._room_filled = slot, n + 1
        self.running = self._room[: n + 1]

    def _place_of(self, slot: int) -> tuple[int, ...]:
        seq = self.sequences[slot]
        assert seq is not None
        return seq.place

    def preempt(self, slot: int) -> None:
        """Free a running sequence's slot and blocks and queue it again; a token in flight will be sampled again."""
        seq = self.sequences[slot]
        assert seq is not None
        self._release(seq)
        self.running = self.running[self.running != slot]
        seq.slot, seq.status = -1, Status.WAITING
        seq.num_preemptions += 1
        self._enqueue(seq)
        self._retry_at = 0

    def _release(self, seq: Sequence) -> None:
        """Free a running sequence's slot and blocks, keeping its tokens; the caller removes it from ``running``."""
        slot = seq.slot
        seq.known = self.tokens[slot, : self.committed[slot]].copy()
        self.generation[slot] += 1
        self.blocks.free(slot)
        self.speculation.stop(slot)
        self.sequences[slot] = None
        self._free_slots.append(slot)
        self._more_stop_ids.pop(slot, None)
        if slot in self._partial:
            self._partial.remove(slot)

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        if len(ids) > _FEW_STOP_IDS:
            self._more_stop_ids[slot] = frozenset(ids[_FEW_STOP_IDS:])
            ids = ids[:_FEW_STOP_IDS]
        if len(ids) > self.stop_ids.shape[1]:
            wider = np.full((len(self.stop_ids), len(ids)), -1, dtype=np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(ids)] = ids

    def write_batch(self, decodes: np.ndarray, chunks: list[tuple[int, int]]) -> Batch | None:
        """Build the step's batch, and advance the slot arrays past it."""
        d = len(decodes)
        drafted, places, token_ids = self._take_drafts(d, chunks) if self._drafting else (NO_INTS,) * 3
        scored = None
        if chunks or len(drafted):
            slots = np.concatenate([decodes, drafted, np.array([s for s, _ in chunks], dtype=np.int32)])
            computed, new = self.computed[slots], np.ones(len(slots), dtype=np.int32)
            first = d + len(drafted)
            computed[d:first] = places
            if chunks:
                new[first:] = [n for _, n in chunks]
                of_chunks, scored = self._chunk_tokens(chunks, computed[first:].tolist(), first)
                token_ids = np.concatenate([token_ids, of_chunks])
        elif d:
            slots, computed, new = decodes, self.computed[decodes], self._ones[:d]
        else:
            return None
        after = computed + new
        samples = after >= self.known_len[slots] if chunks else self._all[: len(slots)]
        admitted = self._admitted
        params, known = self._admitted_params() if admitted else (self._no_params, [])
        block_slots, block_indices, block_ids = self.blocks.take_updates()
        batch = Batch(
            step=self.steps,
            slots=slots,
            generations=self.generation[slots],
            num_computed=computed,
            num_new=new,
            samples=samples,
            num_decodes=d,
            token_ids=token_ids,
            block_slots=block_slots,
            block_indices=block_indices,
            block_ids=block_ids,
            admitted_slots=np.array([seq.slot for seq in admitted], dtype=np.int32) if admitted else NO_INTS,
            admitted_params=params,
            known_lens=np.array([len(ids) for ids in known], dtype=np.int32) if known else NO_INTS,
            known_ids=np.concatenate(known) if known else NO_INTS,
            scored=scored,
        )
        self.computed[slots] = after
        if self._partial:
            partial = np.array(self._partial)
            self._partial = partial[self.computed[partial] < self.known_len[partial]].tolist()
        self._admitted = []
        self.steps += 1
        return batch

    def _take_drafts(self, num_decodes: int, chunks: list[tuple[int, int]]) -> tuple[np.ndarray, ...]:
        """The rows of sequences with drafts, each of one token: slots, places in the sequence, ids, each (m,) int32.
        Draft tokens get what else the step leaves of its budget and rows, and free blocks."""
        drafting, self._drafting, self._taken = self._drafting, [], 0
        left = min(
            self.options.max_num_batched_tokens - num_decodes - sum(n for _, n in chunks),
            self.options.max_num_seqs - num_decodes - len(chunks),
        )
        slots: list[int] = []
        places: list[int] = []
        ids: list[np.ndarray] = []
        for number, slot in enumerate(drafting, 1):
            if left < 1:
                break
            n, others = int(self.committed[slot]), len(drafting) - number
            most = min(left - others, int(self.max_len[slot]) - n) - 1
            draft = self.speculation.drafts[slot][: max(most, 0)]
            while n + len(draft) > self.blocks.held[slot] * self.blocks.block_size:
                if self.blocks.num_free:
                    self.blocks.append(np.array([slot]))
                else:
                    draft = draft[: self.blocks.held[slot] * self.blocks.block_size - n]
            self.speculation.launched(slot, len(draft))
            rows = 1 + len(draft)
            slots += [slot] * rows
            places += range(n - 1, n - 1 + rows)
            ids += [self.tokens[slot, n - 1 : n], draft]
            left -= rows
        return np.array(slots, np.int32), np.array(places, np.int32), np.concatenate(ids) if ids else NO_INTS

    def _chunk_tokens(
        self, chunks: list[tuple[int, int]], computed: list[int], first_row: int
    ) -> tuple[np.ndarray, Scored | None]:
        """The chunks' tokens, one after another, and those to score. Makes the blocks that chunks fill shareable."""
        parts, scored, best = [], [], 0
        for row, ((slot, n), begin) in enumerate(zip(chunks, computed, strict=True), first_row):
            seq = self.sequences[slot]
            assert seq is not None
            parts.append(self.tokens[slot, begin : begin + n])
            self.blocks.register(slot, seq, self.tokens[slot], begin + n)
            if seq.scores_prompt and begin + 1 < seq.prompt_len:
                scored.append((row, self.tokens[slot, begin + 1 : min(begin + n + 1, seq.prompt_len)]))
                best = max(best, seq.prompt_logprobs or 0)
        ids = np.concatenate(parts)
        if not scored:
            return ids, None
        rows, lens = np.array([(row, len(some)) for row, some in scored], dtype=np.int32).T
        return ids, Scored(rows, lens, np.concatenate([some for _, some in scored]), best)

    def _admitted_params(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Of those admitted in this step, what ``Batch`` has of each; no words at all if there are none of any."""
        params = np.zeros(len(self._admitted), dtype=self._row)
        for i, seq in enumerate(self._admitted):
            if seq.sampler_row is not None:
                params[i] = seq.sampler_row
        told = [seq.told for seq in self._admitted]
        return params, told if any(map(len, told)) else []

    # ------------------------------------------------------------------ what came back

    def commit(self, batch: Batch, token_ids: np.ndarray) -> Committed:
        unchanged = batch.slots is self.running  # any sequence that starts or leaves replaces ``running``
        if batch.num_decodes == len(batch.slots) and (unchanged or self._all_there(batch)):
            rows, slots, tokens = self._rows[: len(batch.slots)], batch.slots, token_ids
        else:
            rows = (batch.samples & (self.generation[batch.slots] == batch.generations)).nonzero()[0]
            slots, tokens = batch.slots[rows], token_ids[rows]
        tokens = tokens.astype(np.int32, copy=False)
        at = self.committed[slots]  # also the number of tokens in the cache now
        drafts: list[tuple[int, int]] = []
        if self.speculation.most and len(batch.token_ids):
            offsets, drafts = self._accept(batch, token_ids)
            kept = offsets[rows] >= 0
            rows, slots, tokens, at = rows[kept], slots[kept], tokens[kept], (at + offsets[rows])[kept]
        self.tokens[slots, at] = tokens
        self.committed[slots] = at + 1

        too_long = NO_INTS
        if batch.step not in self._quiet:
            self._share_whole_blocks(slots, at)
            too_long = (at >= self.max_len[slots] - 1).nonzero()[0]
        stopped = self._stops(slots, tokens, at)
        finished: list[tuple[Sequence, FinishReason]] = []
        if len(stopped) or len(too_long):
            finished = self._end(slots, stopped, too_long)
        if self.speculation.most:
            self.speculation.look(slots, len(self.running), self.tokens, self.committed, self.computed)
        return Committed(rows, slots, tokens, finished, drafts)

    def _accept(self, batch: Batch, token_ids: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Decide which draft tokens are accepted, and take the others back from ``computed``.

        Returns (n,) int32, how many of the step's tokens precede each row's in its sequence, -1 if it is rejected; and
        ``Committed.drafts``.
        """
        offsets, drafts = np.zeros(len(batch.slots), dtype=np.int32), []
        for first, count, accepted in drafted_rows(batch, token_ids):
            slot = int(batch.slots[first])
            if self.generation[slot] != batch.generations[first]:
                continue
            length, rows = int(self.committed[slot]), slice(first, first + accepted)
            stops = self._stops(batch.slots[rows], token_ids[rows], length + self._rows[:accepted])
            accepted = int(stops.min(initial=accepted))
            offsets[first : first + count + 1] = [*range(accepted + 1), *[-1] * (count - accepted)]
            self.computed[slot] = length + accepted
            self.speculation.settled(slot, accepted, length + accepted + 1, len(self.running))
            drafts.append((count, accepted))
        return offsets, drafts

    def _stops(self, slots: np.ndarray, tokens: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Which of these rows' tokens end their sequences. ``at``: their places there; all (n,)."""
        found = (tokens[:, None] == self.stop_ids[slots]).nonzero()[0]
        if self._more_stop_ids:
            more, pairs = self._more_stop_ids, zip(slots.tolist(), tokens.tolist(), strict=True)
            others = [row for row, (slot, token) in enumerate(pairs) if token in more.get(slot, ())]
            found = np.append(found, np.array(others, dtype=np.int64))
        return found[at[found] >= self.min_len[slots[found]]] if len(found) else found

    def _all_there(self, batch: Batch) -> bool:
        return self.generation[batch.slots].tobytes() == batch.generations.tobytes()

    def _share_whole_blocks(self, slots: np.ndarray, lens: np.ndarray) -> None:
        """Register the blocks of those slots whose token count, in ``lens``, is a multiple of the block size."""
        whole = (lens % self.blocks.block_size == 0).nonzero()[0]
        if not len(whole):
            return
        for slot, n in zip(slots[whole].tolist(), lens[whole].tolist(), strict=True):
            seq = self.sequences[slot]
            assert seq is not None
            self.blocks.register(slot, seq, self.tokens[slot], n)

    def _end(self, slots: np.ndarray, stopped: np.ndarray, too_long: np.ndarray) -> list[tuple[Sequence, FinishReason]]:
        """End the sequences of these rows, in row order."""
        stops, finished = set(stopped.tolist()), []
        for row in sorted(stops.union(too_long.tolist())):
            seq = self.sequences[slots[row]]
            assert seq is not None
            self._release(seq)
            seq.status = Status.FINISHED
            del self._by_id[seq.request_id]
            finished.append((seq, FinishReason.STOP if row in stops else FinishReason.LENGTH))
        if finished:
            ended = np.zeros(len(self.sequences), dtype=bool)
            ended[[seq.slot for seq, _ in finished]] = True
            self.running = self.running[~ended[self.running]]
        return finished

    # ------------------------------------------------------------------ proving

    def check(self) -> None:
        self.blocks.check()
        run = self.running.tolist()
        assert len(run) <= self.options.max_num_seqs
        assert len(set(run)) == len(run), "a slot runs twice"
        assert set(run) | set(self._free_slots) == set(range(self.options.max_num_seqs)), "a slot is lost"
        assert not set(run) & set(self._free_slots), "a running slot is free"
        places = [self._place_of(s) for s in run]
        assert places == sorted(places), "running is out of order"
        queue = [s.place for s in self.waiting if s.status is Status.WAITING]
        assert queue == sorted(queue), "waiting is out of order"
        assert len(queue) + len(run) == len(self._by_id), "a sequence is lost"
        for slot in range(self.options.max_num_seqs):
            seq, held = self.sequences[slot], int(self.blocks.held[slot])
            if seq is None:
                assert held == 0, f"the empty slot {slot} holds blocks"
                continue
            assert seq.slot == slot and seq.status is Status.RUNNING
            assert self.computed[slot] <= held * self.blocks.block_size, "computed past the slot's blocks"
            computed, known = self.computed[slot], self.known_len[slot]
            length = computed + 1 if computed >= known else known  # its tokens, one in flight included
            assert known <= self.committed[slot] <= length <= self.max_len[slot]
            assert (slot in self._partial) == (self.computed[slot] < self.known_len[slot])


class MixedScheduler(SlotScheduler):
    """Decodes and prompt chunks in one step, decodes first, up to ``max_num_batched_tokens``."""

    def schedule(self) -> Batch | None:
        if self.waits_for_drafts:
            return None
        decodes = self.take_decodes(self.options.max_num_batched_tokens)
        chunks = self.take_chunks(self.options.max_num_batched_tokens - len(decodes))
        return self.write_batch(decodes, chunks)


class PrefillFirstScheduler(SlotScheduler):
    """Steps of prompts only while there are any to compute, then steps of decodes only.

    If prompts never run out, a step of decodes follows every ``_MOST_PROMPT_STEPS`` of them. So a running sequence
    waits for its next token no longer than that, prompts lose one step in 33, and a batch that comes at once is
    prefilled without a break, unless that takes more steps.
    """

    _prompt_steps = 0  # in a row, that decodes had to wait for

    def schedule(self) -> Batch | None:
        if self.waits_for_drafts:
            return None
        budget = self.options.max_num_batched_tokens
        if self._prompt_steps >= _MOST_PROMPT_STEPS:
            decodes = self.take_decodes(budget)
            if len(decodes) or self._drafting:
                self._prompt_steps = 0
                return self.write_batch(decodes, [])
        held_up = len(self.running) > len(self._partial)
        chunks = self.take_chunks(budget)
        self._prompt_steps = self._prompt_steps + held_up if chunks else 0
        return self.write_batch(NO_INTS if chunks else self.take_decodes(budget), chunks)


def _length_of(seq: Sequence) -> tuple[int, tuple[int, ...], str]:
    return len(seq.known), seq.place, seq.request_id
