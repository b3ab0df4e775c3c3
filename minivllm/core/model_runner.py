"""Runs one rank's part of a step: batch in, sampled tokens out, without waiting for the device in between.

On the device, one row per slot (the last is for padding), owned by the runner:
# last_token (S + 1,) int64   num_computed (S + 1,) int64   block_table (S + 1, max_blocks) int32
On the host: host_tables, the same block table, for backends that plan on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from minivllm.core.adapter_rows import AdapterRows, in_order
from minivllm.core.batch import NO_INTS, AttentionBatch, Batch, Cascade, TokenMasks
from minivllm.core.cascade import CascadePlanner
from minivllm.core.interfaces import DeviceLogprobs, Sampler
from minivllm.core.landing import IN_FLIGHT, GuidedStep, Packed, PendingStep, ScoredStep, StepApart
from minivllm.core.overrides import overrides_both
from minivllm.core.prompt_scores import PromptScores
from minivllm.core.staging import PinnedRing, Staging
from minivllm.kernels.megakernel.megakernel import MAX_MEGAKERNEL_ROWS
from minivllm.kernels.prompt_inputs import prompt_inputs
from minivllm.rounding import cdiv

if TYPE_CHECKING:
    from minivllm.core.cuda_graphs import DecodeGraphs
    from minivllm.core.interfaces import AttentionBackend, Model, StepHandle
    from minivllm.core.mixed_graphs import MixedGraphs
    from minivllm.core.parallel import TensorParallel
    from minivllm.core.prompt_graphs import PromptGraphs
    from minivllm.core.sample_graphs import SampleGraphs

# The fewest rows of a last layer: fewer would need more kernels to be compiled at each start, which decodes do not need
# where so few rows go through all layers in one kernel.
_FEW_ROWS = MAX_MEGAKERNEL_ROWS + 1
PICKED_FROM = 256  # tokens: up to here a GEMM takes as long as reading its weights, however few rows it has
_SHARED_ROWS = 16  # from this many on, ranks sample from shards: for fewer rows gathering the logits is faster


class NewSlots(NamedTuple):
    """New sequences, on the device: slots (a,) int64; as int32, the words of their params and ``Batch.known_ids``."""

    slots: torch.Tensor
    params: torch.Tensor
    known: torch.Tensor


class ModelRunner:
    """Owns the device's slot state and turns batches into launched work.

    ``launch`` is called once per step, in order. The device runs the steps in that order too, which makes it safe to
    reuse blocks and slots as soon as the host has released them.
    """

    def __init__(
        self, model: Model, attention: AttentionBackend, sampler: Sampler, tp: TensorParallel, *, num_slots: int,
        max_blocks: int, block_size: int, hidden_size: int, device: torch.device, beside: ModelRunner | None = None,
    ) -> None:  # fmt: skip
        """``beside``: the runner of another model for the same sequences, with whose block tables this one's cache is
        read and written, too."""
        self.model, self.attention, self.sampler, self.tp = model, attention, sampler, tp
        self.device, self.block_size, self.num_slots = device, block_size, num_slots
        self.hidden_size = hidden_size
        self._sharded = sampler.samples_shards() and overrides_both(
            type(model), "compute_logits", "compute_logits_shard"
        )
        self.captures_refine = sampler.captures_refine()
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        if beside is None:
            self.block_table = torch.zeros((num_slots + 1, max_blocks), dtype=torch.int32, device=device)
            self.host_tables = np.zeros((num_slots + 1, max_blocks), dtype=np.int32)
        else:
            self.block_table, self.host_tables = beside.block_table, beside.host_tables
        limits = attention.cascade_limits
        self.cascade = None if limits is None else CascadePlanner(self.host_tables, block_size, limits)
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        self.sample_graphs: SampleGraphs | None = None
        self.adapters: AdapterRows | None = None  # set if requests may have LoRA adapters
        self.adapter_of = np.zeros(num_slots + 1, dtype=np.int32)  # the place of each slot's adapter; 0: none
        self.staging = Staging(device)
        self._landing = PinnedRing()
        self._masks = Staging(device)
        self._waiting: list[GuidedStep] = []
        self._scores = PromptScores(self)
        on_gpu = device.type == "cuda"
        # Reused, as making one takes 20 µs. Steps that land in two parts record two.
        self._events = [torch.cuda.Event() for _ in range(2 * IN_FLIGHT)] if on_gpu else []
        self._turn = 0

    @torch.inference_mode()
    def launch(self, batch: Batch) -> StepHandle:
        if len(batch.block_slots):
            self.host_tables[batch.block_slots, batch.block_indices] = batch.block_ids
        if len(batch.admitted_slots):
            self.adapter_of[batch.admitted_slots] = batch.admitted_adapters if len(batch.admitted_adapters) else 0
        graphs = self.graphs if self.graphs is not None and self.graphs.takes(batch) else None
        if graphs is not None and batch.num_decodes == len(batch.slots):
            return graphs.launch(batch)
        if batch.scored is not None:
            return self._launch_eager(batch)
        adapted = self.has_adapters(batch)
        if self.mixed_graphs is not None and not adapted and (key := self.mixed_graphs.key_for(batch)) is not None:
            return self.mixed_graphs.launch(key, batch)
        if graphs is not None and self.prompt_graphs is not None and self.prompt_graphs.takes_apart(batch):
            decodes, prompts = batch.apart()
            return StepApart(graphs.launch(decodes), self._launch_eager(prompts))
        return self._launch_eager(batch)

    def has_adapters(self, batch: Batch) -> bool:
        """Whether a row has a LoRA adapter, so that layers run with adapters."""
        return self.adapters is not None and bool(self.adapter_of[batch.slots].any())

    def sample_when_guided(self, batch: Batch, sample: Callable[[], StepHandle]) -> StepHandle:
        """End a step whose layers are launched: now, or in ``guide`` if the batch is ``guided``."""
        if not batch.guided:
            return sample()
        self._waiting.append(GuidedStep(sample))
        return self._waiting[-1]

    @torch.inference_mode()
    def guide(self, masks: TokenMasks) -> None:
        """See ``Executor.guide``."""
        if len(masks.slots):
            slots, bits = self._masks.send(masks.slots.astype(np.int64), masks.bits.reshape(-1))
            self.sampler.take_masks(slots, bits.view(len(slots), -1))
        for step in self._waiting:  # two of them if decodes and prompts were launched separately
            step.go_on()
        self._waiting = []

    def table_entries(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """The new block table entries, for ``write_table``: flat indices (b,) int64, and block ids (b,) int32."""
        rows = np.multiply(batch.block_slots, self.block_table.shape[1], dtype=np.int64)
        return rows + batch.block_indices, batch.block_ids

    def write_table(self, places: torch.Tensor, blocks: torch.Tensor) -> None:
        """Write ``table_entries`` on the device, before anything that was sent with them is used."""
        if len(blocks):
            self.block_table.view(-1).index_copy_(0, places, blocks)

    def begin(
        self, batch: Batch, *arrays: np.ndarray, staging: Staging | None = None
    ) -> tuple[NewSlots, list[torch.Tensor]]:
        """Write the batch's new blocks into the block table. Returns what ``admit`` needs before the step samples, and
        ``arrays`` on the device, which are sent first in the same copy (``Staging.send``)."""
        admitted_slots = batch.admitted_slots.astype(np.int64)
        *sent, places, blocks, slots, params, known = (staging or self.staging).send(
            *arrays, *self.table_entries(batch), admitted_slots, batch.admitted_params.view(np.int32), batch.known_ids
        )
        self.write_table(places, blocks)
        return NewSlots(slots, params, known), sent

    def admit(self, batch: Batch, its: NewSlots) -> None:
        """Tell the sampler about the batch's new sequences."""
        if rows := len(its.slots):
            self.sampler.prepare(batch.admitted_slots, batch.admitted_params, its.slots, its.params.view(rows, -1))
        if len(its.known):
            self.sampler.take_tokens(batch.admitted_slots, batch.known_lens, its.known)

    def host_tables_of(self, slots: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """(n, width) int32: block tables of slots (n,), wide enough for the longest of ``seq_lens`` (n,)."""
        return self.host_tables[slots, : cdiv(int(seq_lens.max()), self.block_size)]

    def hand_over(self, plan: AttentionBatch, slots: np.ndarray) -> None:
        """Let the backend plan a captured step of these slots, one per row, with host block tables if it needs them."""
        if self.attention.plans_on_host:
            plan.host_block_tables = self.host_tables_of(slots, plan.host_seq_lens)
        self.attention.batch = plan
        self.attention.plan(plan)

    # ------------------------------------------------------------------ eager

    def _launch_eager(self, batch: Batch) -> StepHandle:
        """Launch the layers and what follows them one after another; each may have a graph of its own."""
        n, sampled = len(batch.slots), np.nonzero(batch.samples)[0]
        some = sampled if len(sampled) < n else NO_INTS
        rows, key = self._for_layers(batch)
        drafts, graphs = rows is not batch, self.prompt_graphs
        ends_of_all = batch.ends(self.num_slots).reshape(-1) if drafts else NO_INTS
        if graphs is not None and key is not None:
            given = graphs.input_of(key, rows)
            admission, (_, some_, ends_) = self.begin(batch, given.packet, some, ends_of_all, staging=graphs.staging)
            hidden, ends = graphs.launch(key, given, batch.num_decodes)
        else:
            admission, some_, ends_, hidden, ends = self._launch_layers(rows, some, ends_of_all)
        ends = ends_.view(4, -1) if drafts else ends
        self.admit(batch, admission)  # meanwhile the device runs the layers
        end = partial(self._end_step, batch, sampled, some_, hidden, ends)
        if batch.scored is None:
            return self.sample_when_guided(batch, end)
        scores = self._scores.launch(batch, batch.scored, hidden)
        return ScoredStep(self.sample_when_guided(batch, end), scores)

    def _for_layers(self, batch: Batch) -> tuple[Batch, tuple[int, str] | None]:
        """The step as its layers compute it, with drafts joined to their sequences' rows if it has few tokens, and the
        key of the layers' graph; None: they run eagerly."""
        # A graph may keep only the hidden states of rows' last tokens: not enough to score prompts, nor, if a draft is
        # joined to its sequence's row, to verify it.
        if batch.scored is not None:
            return batch, None
        rows = batch.joined() if batch.num_tokens <= PICKED_FROM else batch
        if (graphs := self.prompt_graphs) is None:
            return rows, None
        key = graphs.key_for(rows)
        if rows is not batch and key is not None and graphs.picks(key):
            return batch, graphs.key_for(batch)
        return rows, key

    def _end_step(
        self, batch: Batch, sampled: np.ndarray, some: torch.Tensor, hidden: torch.Tensor, ends: torch.Tensor
    ) -> StepHandle:
        """After the layers: sample the rows ``sampled``; ``some``: the same on the device, empty if all rows sample."""
        n = len(batch.slots)
        if len(hidden) == batch.num_tokens:  # all tokens' states: few tokens, or a model that ignores ``last_tokens``
            hidden = hidden.index_select(0, ends[3, :n])
        if self.sample_graphs is not None and (size := self.sample_graphs.size_for(batch)) is not None:
            return self.sample_graphs.launch(size, hidden, ends, batch)
        slots_, after = ends[:2, :n]
        self.num_computed.scatter_(0, slots_, after)
        if not len(sampled):
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            return self.land(n, sampled, Packed.of(nothing, None))
        hidden = hidden[:n]
        if len(some):
            hidden, slots_, after = (x.index_select(0, some) for x in (hidden, slots_, after))
        found, logprobs = self._sample(hidden, slots_, after, batch.slots[sampled])
        self.last_token.scatter_(0, slots_, found)
        return self.land(n, sampled, Packed.of(found, logprobs))

    def _launch_layers(
        self, batch: Batch, some: np.ndarray, drafts: np.ndarray
    ) -> tuple[NewSlots, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Launch the layers eagerly. Returns the admissions, ``some`` and ``drafts`` on the device, hidden states, all
        tokens' if there are ``drafts``, and the ``ends`` of ``prompt_inputs`` for the rows, followed by padding's,
        whose hidden states are not needed."""
        d, n, t = batch.num_decodes, len(batch.slots), batch.num_tokens
        cascade = self.cascade.plan(batch) if self.cascade is not None and d else None
        shared = NO_INTS if cascade is None else cascade.padded(d, len(cascade.items))
        rows = max(n, _FEW_ROWS)
        ids, start = np.zeros(t, dtype=np.int64), np.zeros(rows + 1, dtype=np.int32)
        slots, seq_lens = np.full(rows, self.num_slots, dtype=np.int32), np.ones(rows, dtype=np.int32)
        ids[d:] = batch.token_ids
        np.cumsum(batch.num_new, out=start[1 : n + 1])
        slots[:n], seq_lens[:n], start[n + 1 :] = batch.slots, batch.num_computed + batch.num_new, t
        words = self.attention.prompt_words(batch.num_new[d:], seq_lens[d:n])
        adapted = self.has_adapters(batch)
        order = in_order(np.repeat(self.adapter_of[batch.slots], batch.num_new)) if adapted else NO_INTS
        admission, sent = self.begin(batch, some, drafts, ids, start, seq_lens, slots, shared, words, order)
        some_, drafts_, ids_, start_, seq_lens_, slots_, shared_, words_, order_ = sent
        if d:
            ids_[:d] = self.last_token.index_select(0, slots_[:d])
        # Zeros: if kernels are only compiled nothing writes these, and libraries still read them.
        positions, mapping = torch.zeros_like(ids_), torch.zeros_like(ids_)  # separate, so that both are aligned
        ends = torch.zeros((4, rows), dtype=torch.int64, device=self.device)
        tables = self.block_table.new_zeros(rows, cdiv(int(seq_lens.max()), self.block_size))
        prompt_inputs(
            start_, seq_lens_, slots_, self.block_table, positions, mapping, tables, self.block_size, ends
        )  # fmt: skip
        plan = AttentionBatch(
            num_decodes=d,
            query_start=start_[: n + 1],
            seq_lens=seq_lens_[:n],
            block_tables=tables[:n],
            slot_mapping=mapping,
            host_query_lens=batch.num_new,
            host_seq_lens=seq_lens[:n],
            host_block_tables=self.host_tables_of(batch.slots, seq_lens),
            # Layers with adapters know the places of all tokens, not of some.
            last_tokens=ends[3] if t > rows and batch.scored is None and not len(drafts) and not adapted else None,
            cascade=None if cascade is None else Cascade.of(shared_, d, cascade.beside),
            prompt_words=words_,
        )
        self.attention.batch = plan
        self.attention.plan(plan)
        with self.with_adapters(order_ if adapted else None):
            return admission, some_, drafts_, self.model.forward(ids_, positions, self.attention), ends

    def with_adapters(self, order: torch.Tensor | None) -> AbstractContextManager[None]:
        """For layers whose rows have adapters, ``in_order``; None: nobody has one."""
        if order is None:
            return nullcontext()
        assert self.adapters is not None
        return self.adapters.used(order)

    def _sample(
        self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, host_slots: np.ndarray
    ) -> tuple[torch.Tensor, DeviceLogprobs | None]:
        if not self.needs_refine(host_slots, len(hidden)):
            return self.sample(hidden, slots, positions)[0], None
        logits = self.model.compute_logits(hidden)
        tokens = self.sampler.sample(logits, slots, positions)
        return self.refine(logits, slots, positions, tokens, host_slots)

    def refine(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, given: torch.Tensor,
        host_slots: np.ndarray, kind: Hashable | None = None,
    ) -> tuple[torch.Tensor, DeviceLogprobs | None]:  # fmt: skip
        """The sampler's ``refine`` of the tokens ``given``, or ``refine_captured`` if there is a ``kind``. Returns the
        same tokens on all ranks; ``given`` itself if unchanged."""
        # Each rank samples for itself: the all-gather after the LM head gives all ranks the same bytes of logits, a
        # token is a function of logits, seed and position, and ``sample_shard`` ends in a sum over the ranks, which is
        # the same on all. So ``last_token`` stays in sync without a broadcast in the graph. Resampling may sum in an
        # order that varies from run to run (as a cumulative sum of one long row does on a GPU), so that a token at the
        # top-p threshold could differ between ranks: there rank 0's choice is broadcast.
        if kind is None:
            tokens, logprobs = self.sampler.refine(logits, slots, positions, given, host_slots)
        else:
            tokens, logprobs = self.sampler.refine_captured(logits, slots, positions, given, kind)
        return tokens if tokens is given else self.tp.broadcast(tokens), logprobs

    def _shares(self, rows: int) -> bool:
        """Whether ranks sample this many rows from shards; false once the model has returned no shard."""
        return rows >= _SHARED_ROWS and self._sharded

    def needs_refine(self, host_slots: np.ndarray, rows: int) -> bool:
        """Whether these slots, sampled in a step of ``rows``, need more than ``sample``."""
        sampler = self.sampler
        return sampler.refines_shards(host_slots) if self._shares(rows) else sampler.needs_refine(host_slots)

    def sample(
        self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The capturable part of sampling: hidden (n, hidden_size), slots and positions (n,) int64. Returns tokens (n,)
        and their logits (n, vocab), or None for the logits if ranks sampled from shards."""
        if self._shares(len(hidden)):
            part = self.model.compute_logits_shard(hidden)
            if part is not None:
                return self.sampler.sample_shard(*part, slots, positions), None
            self._sharded = False
        logits = self.model.compute_logits(hidden)
        return self.sampler.sample(logits, slots, positions), logits

    @torch.inference_mode()
    def dry_run(self, num_tokens: int, max_len: int, num_decodes: int = 0, *, adapted: bool = False) -> None:
        """Run a largest possible step: ``num_decodes`` decodes and ``num_tokens`` prompt tokens in as few sequences as
        possible, then the logits of a full decode batch. All writes go to block 0; no state is kept. ``adapted``: all
        have a LoRA adapter."""
        parts = min(cdiv(num_tokens, max_len), self.num_slots - num_decodes)
        chunk, n = min(num_tokens // parts, max_len), num_decodes + parts
        new = np.array([1] * num_decodes + [chunk] * parts, dtype=np.int32)
        batch = Batch(
            step=-1,
            slots=np.arange(n, dtype=np.int32),
            generations=np.full(n, -1),  # no sequence's
            num_computed=np.zeros(n, dtype=np.int32),
            num_new=new,
            samples=np.ones(n, dtype=bool),
            num_decodes=num_decodes,
            token_ids=np.zeros(chunk * parts, dtype=np.int32),
            block_slots=NO_INTS,
            block_indices=NO_INTS,
            block_ids=NO_INTS,
            admitted_slots=NO_INTS,
            admitted_params=np.empty(0, dtype=self.sampler.row),
        )
        self.adapter_of[:-1] = adapted
        self._launch_eager(batch).result()
        self.adapter_of[:] = 0
        slots = torch.arange(self.num_slots, device=self.device)
        self.sampler.sample(self._some_logits(self.num_slots), slots, slots)
        self.num_computed.zero_()
        self.last_token.zero_()

    @torch.inference_mode()
    def launch_all_refinements(self) -> None:
        """Launch the sampler's work other than ``sample``, for few and for many rows, for ``compile_only``."""
        for rows in (1, _SHARED_ROWS):
            slots, logits = torch.zeros(rows, dtype=torch.int64, device=self.device), self._some_logits(rows)
            self.sampler.launch_all_kinds(logits, slots, slots)

    def _some_logits(self, rows: int) -> torch.Tensor:
        """Logits of ``rows`` hidden states of zeros."""
        dtype = getattr(torch, self.attention.spec.dtype)
        hidden = torch.zeros((rows, self.hidden_size), dtype=dtype, device=self.device)
        return self.model.compute_logits(hidden)

    # ------------------------------------------------------------------ to the host

    def land(self, num_rows: int, rows: np.ndarray, found: Packed, ring: PinnedRing | None = None) -> PendingStep:
        """Start copying what ``rows`` sampled to the host; ``ring``: pinned memory other than the step's own."""
        if self.device.type != "cuda":
            return PendingStep(num_rows, rows, found.words.numpy().copy(), found.layout, None)
        landing = (ring or self._landing).next(len(found.words))
        landing.copy_(found.words, non_blocking=True)
        return PendingStep(num_rows, rows, landing.numpy(), found.layout, self.done())

    def done(self) -> torch.cuda.Event | None:
        """An event that completes when all work launched so far has; None on a CPU, where it already has."""
        if self.device.type != "cuda":
            return None
        self._turn = (self._turn + 1) % len(self._events)
        self._events[self._turn].record()
        return self._events[self._turn]
