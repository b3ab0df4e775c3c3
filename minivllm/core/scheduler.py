"""Decides which tokens the next step computes: prompts and decodes mixed, or prompts first.

Slot arrays, one row per running sequence, owned by the scheduler (S = max_num_seqs):
# tokens (S, max_model_len) int32: each sequence's tokens known on the host    committed (S,): how many are valid
# computed (S,): how many are in the cache, or will be after the steps in flight
# known_len (S,): how many were known at admission   max_len (S,): the length at which the sequence ends
# generation (S,) int64: incremented when the slot is released, so that rows still in flight are recognized as stale

A sequence decodes once computed >= known_len: it then has computed + 1 tokens, of which the newest may be in flight.
One with a draft (``core/speculation.py``) has, while that is in flight, been computed to the draft's end.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect, insort
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.batch import NO_INTS, Batch, Scored
from minivllm.core.draft_model import DraftModelSpeculation
from minivllm.core.interfaces import Committed, Scheduler
from minivllm.core.prompt_chunks import PromptChunks
from minivllm.core.sequence import FinishReason, Sequence, Status
from minivllm.core.speculation import DRAFTS, Speculation, drafted_rows
from minivllm.core.stop_tokens import StopTokens
from minivllm.core.waiting import WaitingQueue
from minivllm.errors import ConfigError, ContextLengthError, RequestError
from minivllm.rounding import cdiv

if TYPE_CHECKING:
    from minivllm.config.engine_config import SchedulerOptions
    from minivllm.core.interfaces import BlockManager

_FEW_RUNNING = 2  # with more running, two quiet steps in a row are rare
_NEVER = 1 << 62
_MOST_PROMPT_STEPS = 32  # of ``prefill_first`` in a row, while running sequences wait to decode
_WATERMARK = 0.03  # the fraction of the pool that an admission leaves free for running sequences to grow


class SlotScheduler(Scheduler):
    """First come, first served, on slot arrays. A subclass's ``schedule`` decides how decodes and prompt chunks share a
    step: ``take_decodes``, ``take_chunks``, then ``write_batch``. Override ``place`` for another order.

    - All blocks of a prompt are allocated at admission, so a half-computed prompt never waits for memory.
    - When a decode needs a block and none is free, the running sequence with the last place (here: the latest arrival)
      is preempted: its blocks are freed and its known tokens are recomputed later. The first is never preempted, so
      every step makes progress.
    - While the head of the queue does not fit, later sequences that do go first: those ``in_sight``. If they no longer
      ``may_overtake`` it, none does while later ones hold what the head lacks; as long as it would not fit without them
      either, they do not delay it.
    - Sequences with drafts are decodes to ``take_decodes``, which keeps them for ``write_batch`` instead of returning
      them: it adds their rows, as prompt rows. ``take_chunks`` leaves them a token each.
    """

    scores_prompts = speculates = asks_draft_models = True

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
        self.max_len = np.zeros(size, dtype=np.int32)
        self.generation = np.zeros(size, dtype=np.int64)
        self.stop_tokens = StopTokens(size)
        by_model = options.draft_model is not None
        self.speculation = DraftModelSpeculation(options, blocks) if by_model else Speculation(options)
        self._drafting: list[int] = []  # those with drafts that ``take_decodes`` kept for this step, by place
        self._taken = 0  # tokens that it took, theirs included

        self.sequences: list[Sequence | None] = [None] * size
        self.waiting = WaitingQueue()
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
        return len(self.waiting)

    def add(self, seq: Sequence) -> None:
        capacity = self.blocks.num_blocks * self.blocks.block_size
        if seq.max_len > self.max_model_len:
            raise ContextLengthError(
                f"max_tokens={seq.max_len - seq.prompt_len} with a {seq.prompt_len}-token prompt exceeds "
                f"max_model_len={self.max_model_len}: this model's maximum context length is {self.max_model_len} "
                "tokens; shorten the prompt, lower max_tokens, or start with a larger max_model_len if the model "
                "has more positions"
            )
        if seq.max_len - 1 > capacity:  # the last token is never written to the cache
            raise RequestError(
                f"a {seq.prompt_len}-token prompt with max_tokens={seq.max_len - seq.prompt_len} needs "
                f"{cdiv(seq.max_len - 1, self.blocks.block_size)} cache blocks, and the whole cache has "
                f"{self.blocks.num_blocks} (of {self.blocks.block_size} tokens: {capacity}); shorten the prompt, lower "
                "max_tokens, or raise cache.num_blocks"
            )
        if seq.request_id in self._by_id:
            raise RequestError(f"request_id {seq.request_id!r} is already waiting or running; choose another")
        seq.arrival = self._arrivals
        seq.place = self.place(seq)
        self._arrivals += 1
        self._by_id[seq.request_id] = seq
        if self.waiting.add(seq):
            self._retry_at = 0

    def place(self, seq: Sequence) -> tuple[int, ...]:
        """The fixed place of a sequence that was just added: smaller is admitted first and preempted last.

        Places must be unique, and any sequence must eventually precede all later arrivals, or it may starve.
        """
        return (seq.arrival,)

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
            self.waiting.remove(seq)
            self._retry_at = 0
        seq.status = Status.FINISHED
        del self._by_id[seq.request_id]

    # ------------------------------------------------------------------ a step

    @abstractmethod
    def schedule(self) -> Batch | None: ...

    @property
    def waits_for_drafts(self) -> bool:
        """Whether the next step should wait until those in flight are committed, for drafts."""
        return self.speculation.most > 0 and self.speculation.waits(self.running)

    def ask_for_drafts(self) -> Batch | None:
        its = self.speculation
        if not isinstance(its, DraftModelSpeculation) or its.drafts_now or self.waits_for_drafts:
            return None
        rows = its.ask(self.options.max_num_batched_tokens, self.tokens, self.committed, self.sequences)
        if not rows:
            return None
        slots, seen, ids, ends = zip(*rows, strict=True)
        block_slots, block_indices, block_ids = self.blocks.take_updates()
        batch = Batch(
            step=self.steps,
            slots=np.array(slots, dtype=np.int32),
            generations=self.generation[list(slots)],
            num_computed=np.array(seen, dtype=np.int32),
            num_new=np.array([len(its) for its in ids], dtype=np.int32),
            samples=np.array(ends),
            num_decodes=0,
            token_ids=np.concatenate(ids),
            block_slots=block_slots,
            block_indices=block_indices,
            block_ids=block_ids,
            admitted_slots=NO_INTS,
            admitted_params=self._no_params,
            num_drafts=its.most,
        )
        self.steps += 1
        return batch

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
                goes_on &= self.speculation.goes_on(run)
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
        if self._drafting:
            budget = min(budget, self.options.max_num_batched_tokens - self._taken)
        chunks = PromptChunks(self.options, self.threshold, budget)
        for slot in self._partial:
            chunks.take(slot, int(self.known_len[slot] - self.computed[slot]))
        if self.waiting and (self.blocks.num_free >= self._retry_at or not len(self.running)):
            self._admit(chunks)
        return chunks.taken

    def _admit(self, chunks: PromptChunks) -> None:
        """Start waiting sequences that fit, each with the first chunk of its prompt."""
        self._retry_at, retry_at = 0, _NEVER
        for seq in self.waiting.in_sight():
            if chunks.budget <= 0 or not self._free_slots:
                return
            head = self.waiting.head
            cached = self.blocks.match(seq)
            lacking = self.lacking(seq, cached)
            left = len(seq.known) - len(cached) * self.blocks.block_size
            if lacking > 0 or not chunks.may_begin(left):
                retry_at = min(retry_at, self.blocks.num_free + lacking if lacking > 0 else 0)
                if seq is head and self._must_go_next(head):
                    return
                continue
            self.waiting.admit(seq)
            self._start(seq, cached)
            n = chunks.take(seq.slot, left)
            # A later row of the same step may read these blocks: each layer writes all keys before any row attends.
            self.blocks.register(seq.slot, seq, self.tokens[seq.slot], int(self.computed[seq.slot]) + n)
            if seq is not head and self._must_go_next(head):
                return
        if chunks.budget > 0 and self._free_slots and retry_at < _NEVER:
            self._retry_at = retry_at

    def _must_go_next(self, head: Sequence) -> bool:
        """Whether the head of the queue was overtaken often enough, and running ones behind it hold what it lacks."""
        if self.waiting.may_overtake:
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

    def _start(self, seq: Sequence, cached: list[int]) -> None:
        slot = self._free_slots.pop()
        known = len(seq.known)
        self.blocks.allocate(slot, known, cached)
        computed = len(cached) * self.blocks.block_size
        self.tokens[slot, :known] = seq.known
        self.committed[slot] = self.known_len[slot] = known
        self.computed[slot] = computed
        self.max_len[slot] = seq.max_len
        self.stop_tokens.start(slot, seq)
        self.speculation.start(slot, seq, computed)
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
        self.waiting.add(seq)
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
        self.stop_tokens.stop(slot)
        if slot in self._partial:
            self._partial.remove(slot)

    def write_batch(self, decodes: np.ndarray, chunks: list[tuple[int, int]]) -> Batch | None:
        """Build the step's batch, and advance the slot arrays past it."""
        d = len(decodes)
        drafted, places, token_ids = self._draft_rows(d, chunks) if self._drafting else (NO_INTS,) * 3
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

    def _draft_rows(self, num_decodes: int, chunks: list[tuple[int, int]]) -> tuple[np.ndarray, ...]:
        """``Speculation.rows`` of the sequences that ``take_decodes`` kept, in what else the step leaves of its budget
        and rows."""
        drafting, self._drafting, self._taken = self._drafting, [], 0
        left = min(
            self.options.max_num_batched_tokens - num_decodes - sum(n for _, n in chunks),
            self.options.max_num_seqs - num_decodes - len(chunks),
        )
        return self.speculation.rows(
            drafting, left, self.tokens, self.committed, self.max_len, self.blocks, self.sequences
        )

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
        if batch.num_drafts:
            assert isinstance(self.speculation, DraftModelSpeculation)
            self.speculation.take(batch, token_ids, self.generation[batch.slots] == batch.generations)
            return Committed(NO_INTS, NO_INTS, NO_INTS, [])
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
        stopped = self.stop_tokens.find(slots, tokens, at)
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
            stops = self.stop_tokens.find(batch.slots[rows], token_ids[rows], length + self._rows[:accepted])
            accepted = int(stops.min(initial=accepted))
            offsets[first : first + count + 1] = [*range(accepted + 1), *[-1] * (count - accepted)]
            self.computed[slot] = length + accepted
            self.speculation.settled(slot, accepted, length + accepted + 1, len(self.running))
            drafts.append((count, accepted))
        return offsets, drafts

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
        self.waiting.check()
        assert len(self.waiting) + len(run) == len(self._by_id), "a sequence is lost"
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
