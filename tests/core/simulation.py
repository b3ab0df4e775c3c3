"""A device in a few lines of Python: it runs what a scheduler decides, and sees whether each row reads its own history.

A token's "key and value" is the chained hash of all tokens before it (and of the cache salt), so a block that was
stolen, freed too early or shared wrongly is read as a foreign history. The model's next token is a function of that
hash alone: what a request must say can be computed without any batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minivllm.config.engine_config import SchedulerOptions
from minivllm.core.batch import Batch
from minivllm.core.block_manager import PagedBlockManager
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.scheduler import MixedScheduler, PrefillFirstScheduler, SlotScheduler
from minivllm.core.sequence import FinishReason, Sequence, Status

SCHEDULERS: dict[str, type[SlotScheduler]] = {"mixed": MixedScheduler, "prefill_first": PrefillFirstScheduler}
VOCAB = 12
STOP = 3  # the token that ends requests with ``stops``
ROW = np.dtype([("number", "<i4")])


@dataclass(frozen=True)
class Ask:
    """One request. ``string_at``: a stop string is complete after so many tokens (0: never)."""

    prompt: tuple[int, ...]
    max_tokens: int = 4
    stops: bool = False
    min_tokens: int = 0
    string_at: int = 0
    salt: str | None = None


class Story:
    """A request's tokens as a lone run would give them, going on past every stop."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.tokens = list(ask.prompt)
        state = hash((0, *(ask.salt or "").encode()))
        self.states = [state := hash((state, token)) for token in ask.prompt]
        for _ in range(ask.max_tokens):
            self.tokens.append(next_token(state))
            state = hash((state, self.tokens[-1]))
            self.states.append(state)

    def ending(self) -> tuple[list[int], FinishReason]:
        """What the request must bring back."""
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


def make_scheduler(
    name: str = "mixed", *, block_size: int = 4, num_blocks: int = 64, max_model_len: int = 64, prefix: bool = True,
    **options: Any,
) -> SlotScheduler:  # fmt: skip
    settings = SchedulerOptions(**({"name": name, "max_num_seqs": 8, "max_num_batched_tokens": 64} | options))
    blocks = PagedBlockManager(
        num_blocks, block_size, settings.max_num_seqs, -(-max_model_len // block_size), prefix_caching=prefix
    )
    return SCHEDULERS[name](settings, blocks, max_model_len, ROW)


@dataclass
class World:
    """A scheduler, the device under it, and the loop between them, ``depth`` steps deep as ``LLMEngine.step`` is."""

    scheduler: SlotScheduler
    depth: int = 2
    steps: int = 0
    asked: int = 0
    live: dict[str, tuple[Sequence, Story]] = field(default_factory=dict)
    ended: dict[str, tuple[list[int], FinishReason]] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        s = self.scheduler
        self.size = s.blocks.block_size
        self.under_way: deque[tuple[Batch, np.ndarray]] = deque()
        self.tables = np.zeros_like(s.blocks.tables)  # the device's copy
        self.last_token = np.full(s.options.max_num_seqs, -1)
        self.number = np.full(s.options.max_num_seqs, -1)  # what Sampler.prepare was told of each slot
        self.cache: dict[tuple[int, int], int] = {}  # (block, offset) → the state that was written there

    # ------------------------------------------------------------------ requests

    def add(self, ask: Ask, name: str | None = None) -> Sequence:
        name = name if name is not None else f"r{self.asked}"
        params = SamplingParams(max_tokens=ask.max_tokens, min_tokens=min(ask.min_tokens, ask.max_tokens))
        seq = Sequence(
            name, list(ask.prompt), params, max_len=len(ask.prompt) + ask.max_tokens,
            stop_ids=(STOP, VOCAB) if ask.stops else (), cache_salt=ask.salt,
        )  # fmt: skip
        seq.sampler_row = np.array((self.asked,), dtype=ROW)
        self.scheduler.add(seq)
        self.asked += 1
        self.live[name] = seq, Story(ask)
        return seq

    def abort(self, name: str) -> None:
        seq = self.scheduler.abort(name)
        assert seq is self.live.pop(name)[0] and seq.status is Status.FINISHED
        self.scheduler.check()

    # ------------------------------------------------------------------ steps

    def step(self) -> bool:
        """What ``LLMEngine.step`` does; returns whether there was anything to do."""
        while len(self.under_way) < self.depth:
            batch = self.scheduler.schedule()
            self.scheduler.check()
            if batch is None:
                break
            self.under_way.append((batch, self.launch(batch)))
        if not self.under_way:
            return False
        self.steps += 1
        batch, tokens = self.under_way.popleft()
        self.commit(batch, tokens)
        self.scheduler.check()
        return True

    def drain(self, limit: int = 10_000) -> None:
        """Step until every request has ended; then nothing may be held."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            assert self.step(), "there is work, nothing is under way, and nothing was scheduled"
        assert not self.scheduler.has_work, f"requests still wait after {limit} steps: {list(self.live)}"
        while self.under_way:
            self.step()
        assert not self.live
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_blocks, "blocks leaked"
        assert not self.scheduler.num_running and not self.scheduler.num_waiting

    def launch(self, batch: Batch) -> np.ndarray:
        """Run a step, checking all that a device would trust; returns what it samples."""
        s, options = self.scheduler, self.scheduler.options
        self.batches.append(batch)
        assert batch.num_tokens == batch.num_new.sum() <= options.max_num_batched_tokens
        assert len(set(batch.slots.tolist())) == len(batch.slots) <= options.max_num_seqs
        assert (batch.num_new > 0).all() and (batch.num_new[: batch.num_decodes] == 1).all()
        assert batch.samples[: batch.num_decodes].all()
        if isinstance(s, PrefillFirstScheduler):
            assert batch.num_decodes in (0, len(batch.slots)), "decodes and prompts in one step"
        self._check_partial(batch)

        self.tables[batch.block_slots, batch.block_indices] = batch.block_ids
        places = batch.block_slots.astype(np.int64) * self.tables.shape[1] + batch.block_indices
        assert len(np.unique(places)) == len(places), "a table entry is sent twice: the order would matter"
        self.number[batch.admitted_slots] = batch.admitted_params["number"]

        rows, at = [], 0
        for i, (slot, c, n) in enumerate(zip(*(x.tolist() for x in (batch.slots, batch.num_computed, batch.num_new)),
                                             strict=True)):  # fmt: skip
            seq = s.sequences[slot]
            assert seq is not None and seq.slot == slot and batch.generations[i] == s.generation[slot]
            kept, story = self.live[seq.request_id]
            assert kept is seq and self.number[slot] == seq.sampler_row["number"]
            if i < batch.num_decodes:
                new = [int(self.last_token[slot])]
                assert c >= seq.prompt_len
            else:
                new = batch.token_ids[at : at + n].tolist()
                at += n
            assert new == story.tokens[c : c + n], f"{seq} computes {new} at {c}, its tokens are {story.tokens}"
            assert not batch.samples[i] or c + n >= seq.prompt_len, "sampled within the prompt"
            rows.append((slot, c, n, story))
        assert at == len(batch.token_ids)

        owner: dict[int, int] = {}
        for slot, c, n, story in rows:  # each layer writes all of a step's keys before any row attends
            for p in range(c, c + n):
                block = int(self.tables[slot, p // self.size])
                assert block > 0, "block 0 is padding's"
                assert owner.setdefault(block, slot) == slot, f"block {block} is written by two sequences in one step"
                self.cache[block, p % self.size] = story.states[p]
        sampled = np.full(len(rows), -1, dtype=np.int32)
        for i, (slot, c, n, story) in enumerate(rows):
            size, table = self.size, self.tables[slot].tolist()
            seen = [self.cache.get((table[p // size], p % size)) for p in range(c + n)]
            assert seen == story.states[: c + n], f"slot {slot} reads another history than its own"
            if batch.samples[i]:
                sampled[i] = self.last_token[slot] = next_token(seen[-1])
        return sampled

    def commit(self, batch: Batch, tokens: np.ndarray) -> None:
        committed = self.scheduler.commit(batch, tokens)
        over = {seq.request_id: reason for seq, reason in committed.finished}
        for row, slot, token in zip(committed.rows, committed.slots, committed.token_ids, strict=True):
            assert batch.slots[row] == slot and tokens[row] == token
        by_slot = {seq.slot: seq for seq, _ in committed.finished}
        assert len(by_slot) == len(committed.finished)
        for slot in committed.slots.tolist():
            seq = by_slot.get(slot) or self.scheduler.sequences[slot]
            assert seq is not None
            story = self.live[seq.request_id][1]
            name, ask = seq.request_id, story.ask
            if name in over:
                self._end(name, over[name])
            elif ask.string_at == self.scheduler.committed[slot] - seq.prompt_len:
                self.scheduler.finish(seq)
                self._end(name, FinishReason.STOP)

    def _end(self, name: str, reason: FinishReason) -> None:
        seq, story = self.live.pop(name)
        assert seq.status is Status.FINISHED
        self.ended[name] = seq.output_token_ids, reason
        assert self.ended[name] == story.ending(), f"{name} differs from its lone run"

    def _check_partial(self, batch: Batch) -> None:
        s, options = self.scheduler, self.scheduler.options
        run = s.running
        left = (s.known_len[run] - s.computed[run])[s.computed[run] < s.known_len[run]]
        assert len(left) <= options.max_num_partial_prefills, "too many prompts are half done"
        if s.threshold:
            assert (left > s.threshold).sum() <= options.max_long_partial_prefills, (
                "too many long prompts are half done"
            )
            assert (batch.num_new <= s.threshold).all(), "a chunk is over the threshold"


def told(world: World, name: str) -> list[int]:
    """The tokens that a request ended with."""
    return world.ended[name][0]


def slots_in(batch: Batch) -> SequenceOf[int]:
    return batch.slots.tolist()
