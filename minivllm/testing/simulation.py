"""A simulated device: it runs what a scheduler decides, and checks that each row reads its own history.

A token's "key and value" is the chained hash of all tokens up to it (and of the cache salt), so that a block that was
stolen, freed too early or shared wrongly shows another request's history. The next token is a function of that hash
alone, so that a request's expected output can be computed without batching. Only the interfaces are used:
``Scheduler``, ``BlockManager``, ``Batch``.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from minivllm.config.engine_config import SchedulerOptions
from minivllm.core.batch import Batch
from minivllm.core.cascade import CascadeLimits, CascadePlanner
from minivllm.core.interfaces import Scheduler
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import FinishReason, Sequence, Status

VOCAB = 12
STOP = 3  # the token that ends requests with ``stops``
ROW = np.dtype([("number", "<i4")])


@dataclass(frozen=True)
class Ask:
    """One request. ``string_at``: a stop string is complete after this many output tokens (0: never)."""

    prompt: tuple[int, ...]
    max_tokens: int = 4
    stops: bool = False
    min_tokens: int = 0
    string_at: int = 0
    salt: str | None = None
    priority: int = 0  # for schedulers with ``uses_priority``
    scores: bool = False  # ask for prompt log-probabilities, if the scheduler ``scores_prompts``
    repeats: int = 0  # each output token is the one this many before it, so that drafts are often right; 0: at random

    def sequence(self, name: str, number: int) -> Sequence:
        """The sequence as the engine would create it; ``number`` is unique to the request."""
        params = SamplingParams(max_tokens=self.max_tokens, min_tokens=min(self.min_tokens, self.max_tokens))
        never = range(VOCAB, VOCAB + 1 + 20 * (number % 2))  # many stop ids for every other request
        seq = Sequence(
            name, list(self.prompt), params, max_len=len(self.prompt) + self.max_tokens,
            stop_ids=(*never, STOP) if self.stops else (), cache_salt=self.salt,
            prompt_logprobs=1 if self.scores else None,
        )  # fmt: skip
        seq.sampler_row = np.array((number,), dtype=ROW)
        return seq


class Story:
    """A request's tokens if it ran alone, ignoring every stop."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.tokens = list(ask.prompt)
        state = hash((0, *(ask.salt or "").encode()))
        self.states = [state := hash((state, token)) for token in ask.prompt]
        for _ in range(ask.max_tokens):
            again = 0 < ask.repeats <= len(self.tokens)
            self.tokens.append(self.tokens[-ask.repeats] if again else next_token(state))
            state = hash((state, self.tokens[-1]))
            self.states.append(state)

    def after(self, states: list[int]) -> int:
        """The token that is sampled after this history, its own or, behind a wrong draft token, another."""
        n = len(states)
        return self.tokens[n] if states == self.states[:n] else next_token(states[-1])

    def ending(self) -> tuple[list[int], FinishReason]:
        """The request's expected output tokens and finish reason."""
        ask, n = self.ask, len(self.ask.prompt)
        for count, token in enumerate(self.tokens[n:], 1):
            if ask.stops and token == STOP and count > ask.min_tokens:
                return self.tokens[n : n + count], FinishReason.STOP
            if count == ask.max_tokens:
                return self.tokens[n:], FinishReason.LENGTH
            if count == ask.string_at:
                return self.tokens[n : n + count], FinishReason.STOP
        raise AssertionError("a story without an end")


def next_token(state: int) -> int:
    return (state >> 7) % VOCAB


@dataclass
class World:
    """A scheduler, a simulated device, and the loop between them with ``depth`` steps in flight, as in
    ``LLMEngine.step``."""

    scheduler: Scheduler
    options: SchedulerOptions
    depth: int = 2
    steps: int = 0
    asked: int = 0
    live: dict[str, tuple[Sequence, Story]] = field(default_factory=dict)
    ended: dict[str, tuple[list[int], FinishReason]] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        blocks = self.scheduler.blocks
        self.size = blocks.block_size
        self.under_way: deque[tuple[Batch, np.ndarray]] = deque()
        self.tables = np.zeros_like(blocks.tables)  # the device's copy
        self.last_token = np.full(self.options.max_num_seqs, -1)
        self.number = np.full(self.options.max_num_seqs, -1)  # by slot, what Sampler.prepare was given
        self.cache: dict[tuple[int, int], int] = {}  # (block, offset) → the state that was written there
        self.draft_cache: dict[tuple[int, int], int] = {}  # the same, of the draft model
        self.told: dict[str, int] = {}  # tokens committed, by request
        self.scored: dict[str, int] = {}  # by request, leading prompt tokens that are scored or need not be
        self.generations: dict[int, set[int]] = {}  # by slot, generations that were admitted
        limits = CascadeLimits(
            rows=2, keys=self.size, beside=2, alone=3, items=40, parts=200, saved_keys=1, node_keys=1, node_saved=1
        )
        self.planner = CascadePlanner(self.tables, self.size, limits)
        self.cascades = 0  # steps whose decodes would share reads of a prefix

    # ------------------------------------------------------------------ requests

    def add(self, ask: Ask, name: str | None = None) -> Sequence:
        name = name if name is not None else f"r{self.asked}"
        seq = ask.sequence(name, self.asked)
        seq.priority = ask.priority if self.scheduler.uses_priority else 0
        seq.prompt_logprobs = seq.prompt_logprobs if self.scheduler.scores_prompts else None
        self.scheduler.add(seq)
        self.asked += 1
        self.live[name] = seq, Story(ask)
        self.told[name], self.scored[name] = 0, 1
        return seq

    def abort(self, name: str) -> None:
        seq = self.scheduler.abort(name)
        assert seq is self.live.pop(name)[0] and seq.status is Status.FINISHED
        self.scheduler.check()

    # ------------------------------------------------------------------ steps

    def step(self) -> bool:
        """Does what ``LLMEngine.step`` does; returns whether there was anything to do."""
        while len(self.under_way) < self.depth:
            batch = self.scheduler.ask_for_drafts() or self.scheduler.schedule()
            self.scheduler.check()
            self.scheduler.blocks.check()
            if batch is None:
                break
            self.under_way.append((batch, self.launch(batch)))
        if not self.under_way:
            return False
        self.steps += 1
        batch, tokens = self.under_way.popleft()
        self.commit(batch, tokens)
        self.scheduler.check()
        self.scheduler.blocks.check()
        return True

    def drain(self, limit: int = 10_000) -> None:
        """Step until every request has ended; then no slot or block may be held."""
        s = self.scheduler
        for _ in range(limit):
            if not s.has_work:
                break
            assert self.step(), "there is work, nothing is under way, and nothing was scheduled"
        assert not s.has_work, f"requests still wait after {limit} steps: {list(self.live)}"
        while self.under_way:
            self.step()
        assert not self.live, "it says that there is no work, and these have not ended"
        assert s.blocks.num_free == s.blocks.num_blocks, "blocks leaked"
        assert not any(s.sequences), "a slot still holds a sequence"
        assert s.schedule() is None, "a step was scheduled for nobody"

    def launch(self, batch: Batch) -> np.ndarray:
        """Run a step, checking everything that a device would trust; returns the sampled tokens."""
        s = self.scheduler
        self.batches.append(batch)
        if batch.num_drafts:
            return self._draft(batch)
        self._check_shape(batch)
        self.check_policy(batch)

        self.tables[batch.block_slots, batch.block_indices] = batch.block_ids
        places = batch.block_slots.astype(np.int64) * self.tables.shape[1] + batch.block_indices
        assert len(np.unique(places)) == len(places), "a table entry is sent twice: the order would matter"
        self.number[batch.admitted_slots] = batch.admitted_params["number"]

        rows: list[tuple[int, int, int, list[int]]] = []  # slot, tokens computed before and in this step, all states
        at = 0
        for i, (slot, c, n) in enumerate(zip(*(x.tolist() for x in (batch.slots, batch.num_computed, batch.num_new)),
                                             strict=True)):  # fmt: skip
            seq = s.sequences[slot]
            assert seq is not None and seq.slot == slot
            kept, story = self.live[seq.request_id]
            assert kept is seq and seq.sampler_row is not None and self.number[slot] == seq.sampler_row["number"]
            if i < batch.num_decodes:
                new = [int(self.last_token[slot])]
                assert c >= seq.prompt_len
            else:
                new = batch.token_ids[at : at + n].tolist()
                at += n
            if i > batch.num_decodes and slot == batch.slots[i - 1]:  # a draft token, which may be wrong
                states = rows[-1][3]
                assert n == 1 and c == rows[-1][1] + rows[-1][2] < len(story.tokens) - 1 and self.scheduler.speculates
                states = [*states[:c], hash((states[c - 1], *new))]
            else:
                assert new == story.tokens[c : c + n], f"{seq} computes {new} at {c}, its tokens are {story.tokens}"
                states = story.states
            assert not batch.samples[i] or c + n >= seq.prompt_len, "sampled within the prompt"
            rows.append((slot, c, n, states))
        assert at == len(batch.token_ids)

        owner: dict[int, int] = {}
        for slot, c, n, states in rows:  # each layer writes all of a step's keys before any row attends
            for p in range(c, c + n):
                block = int(self.tables[slot, p // self.size])
                assert block > 0, "block 0 is padding's"
                assert owner.setdefault(block, slot) == slot, f"block {block} is written by two sequences in one step"
                self.cache[block, p % self.size] = states[p]
        sampled = np.full(len(rows), -1, dtype=np.int32)
        for i, (slot, c, n, states) in enumerate(rows):
            size, table = self.size, self.tables[slot].tolist()
            seen = [self.cache.get((table[p // size], p % size)) for p in range(c + n)]
            assert seen == states[: c + n], f"slot {slot} reads another history than its own"
            if batch.samples[i]:
                sampled[i] = self.last_token[slot] = self._story(slot).after(states[: c + n])
        self._check_scored(batch)
        self._check_cascade(batch, [self._story(slot) for slot, _, _, _ in rows])
        return sampled

    def _draft(self, batch: Batch) -> np.ndarray:
        """A step of a draft model, which is wrong about each seventh token."""
        asked, most = self.options.num_speculative_tokens, self.options.max_num_batched_tokens
        assert self.scheduler.asks_draft_models and batch.num_drafts == asked
        assert batch.num_decodes == 0 and not len(batch.admitted_slots) and batch.scored is None
        assert not any(step.num_drafts for step, _ in self.under_way), "two steps of the draft model are in flight"
        assert 0 < batch.num_new.sum() == len(batch.token_ids) <= most and (batch.num_new > 0).all()
        assert len(set(batch.slots.tolist())) == len(batch.slots), "a sequence is drafted twice"
        self.tables[batch.block_slots, batch.block_indices] = batch.block_ids
        drafts, at = [], 0
        of_rows = (batch.slots, batch.generations, batch.num_computed, batch.num_new, batch.samples)
        for slot, generation, c, n, ends in zip(*(x.tolist() for x in of_rows), strict=True):
            assert generation in self.generations[slot]
            story, table = self._story(slot), self.tables[slot].tolist()
            assert batch.token_ids[at : at + n].tolist() == story.tokens[c : c + n]
            at += n
            states, draft = story.states[: c + n], [0] * batch.num_drafts
            for i in range(batch.num_drafts if ends else 1):
                new = range(c, c + n) if i == 0 else range(c + n + i - 1, c + n + i)
                for p in new:
                    assert table[p // self.size] > 0, "block 0 is padding's"
                    self.draft_cache[table[p // self.size], p % self.size] = states[p]
                seen = [self.draft_cache.get((table[p // self.size], p % self.size)) for p in range(new.stop)]
                assert seen == states, f"the draft model reads another history than that of slot {slot}"
                token = (story.after(states) + (states[-1] % 7 == 0)) % VOCAB
                states, draft[i] = [*states, hash((states[-1], token))], token
            if ends:
                drafts.append(draft)
        return np.array(drafts, dtype=np.int32).T.reshape(-1)

    def _story(self, slot: int) -> Story:
        seq = self.scheduler.sequences[slot]
        assert seq is not None
        return self.live[seq.request_id][1]

    def _check_scored(self, batch: Batch) -> None:
        """Each scored row's ids are the tokens that follow those it computes; no token of a prompt is left out, though
        one may be scored again."""
        scored = batch.scored
        if scored is None:
            return
        assert len(scored.ids) == scored.lens.sum() > 0 and (scored.rows >= batch.num_decodes).all()
        ids, places, best = iter(scored.ids.tolist()), iter(scored.places(batch).tolist()), []
        starts = (np.cumsum(batch.num_new) - batch.num_new).tolist()
        for row, count in zip(scored.rows.tolist(), scored.lens.tolist(), strict=True):
            seq, c = self.scheduler.sequences[batch.slots[row]], int(batch.num_computed[row])
            assert seq is not None and seq.prompt_logprobs is not None, f"nobody wants row {row} scored"
            name, tokens = seq.request_id, self.live[seq.request_id][1].tokens
            assert count <= batch.num_new[row] and [next(ids) for _ in range(count)] == tokens[c + 1 : c + 1 + count]
            assert [next(places) for _ in range(count)] == list(range(starts[row], starts[row] + count))
            assert c < self.scored[name], f"{name}: a part of the prompt is not scored"
            self.scored[name] = max(self.scored[name], c + 1 + count)
            best.append(seq.prompt_logprobs)
        assert scored.best == max(best)

    def _check_cascade(self, batch: Batch, stories: list[Story]) -> None:
        """Check that what decodes would read together is each one's own history, up to where each reads on alone."""
        plan = self.planner.plan(batch)
        if plan is None:
            return
        read: dict[int, list[int]] = {row: [] for row in range(batch.num_decodes)}
        for first, count, lead, begin, end, _ in plan.items.tolist():
            table = self.tables[batch.slots[lead]].tolist()
            found = [self.cache.get((table[p // self.size], p % self.size)) for p in range(begin, end)]
            for row in plan.order[first : first + count].tolist():
                assert found == stories[row].states[begin:end], (
                    f"row {row} would read another history than its own with row {lead}: a slot's blocks stay as long "
                    "as its generation does"
                )
                read[row] += range(begin, end)
        for row, keys in read.items():
            skipped = int(plan.skips[row]) * self.size
            assert sorted(keys) == list(range(skipped)) and skipped <= batch.num_computed[row]
        self.cascades += 1

    def commit(self, batch: Batch, tokens: np.ndarray) -> None:
        committed = self.scheduler.commit(batch, tokens)
        over = {seq.request_id: reason for seq, reason in committed.finished}
        for row, slot, token in zip(committed.rows, committed.slots, committed.token_ids, strict=True):
            assert batch.slots[row] == slot and tokens[row] == token
        by_slot = {seq.slot: seq for seq, _ in committed.finished}
        assert len(by_slot) == len(committed.finished)
        for slot, count in Counter(committed.slots.tolist()).items():
            seq = by_slot.get(slot) or self.scheduler.sequences[slot]
            assert seq is not None
            name, ask = seq.request_id, self.live[seq.request_id][1].ask
            told = self.told[name]
            self.told[name] += count
            if told < ask.string_at <= self.told[name] and (ask.string_at < self.told[name] or name not in over):
                if name not in over:
                    self.scheduler.finish(seq)
                self._end(name, FinishReason.STOP, ask.string_at)
            elif name in over:
                self._end(name, over[name])

    def _end(self, name: str, reason: FinishReason, count: int | None = None) -> None:
        """``count``: of its tokens, those up to the end of a stop string."""
        seq, story = self.live.pop(name)
        assert seq.status is Status.FINISHED
        self.ended[name] = seq.output_token_ids[:count], reason
        assert seq.prompt_logprobs is None or self.scored[name] == seq.prompt_len, f"{name}'s prompt is not all scored"
        assert self.ended[name] == story.ending(), f"{name} differs from its lone run"

    def _check_shape(self, batch: Batch) -> None:
        assert batch.num_tokens == batch.num_new.sum() <= self.options.max_num_batched_tokens
        assert 0 < len(batch.slots) <= self.options.max_num_seqs
        assert len(set(batch.slots.tolist())) == len(batch.first_rows), "rows of a draft stand apart"
        assert (batch.num_new > 0).all() and (batch.num_new[: batch.num_decodes] == 1).all()
        assert batch.samples[: batch.num_decodes].all()
        generation = dict(zip(batch.slots.tolist(), batch.generations.tolist(), strict=True))
        for slot in batch.admitted_slots.tolist():
            known = self.generations.setdefault(slot, set())
            assert generation[slot] not in known, f"slot {slot} starts a sequence in a generation that was there before"
            known.add(generation[slot])
        for slot, number in generation.items():
            assert number in self.generations.get(slot, ()), f"slot {slot} runs, and was never admitted"

    def check_policy(self, batch: Batch) -> None:
        """For subclasses: check what one scheduler promises beyond the interface."""
