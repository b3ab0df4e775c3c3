"""The decode step as one CUDA graph a batch size: from gathering the input tokens to writing the sampled ones back.

Static buffers, shared by all sizes (their first rows are used), owned by DecodeGraphs:
# slots, input_ids, positions, after (positions + 1), slot_mapping, tokens (max,) int64   seq_lens (max,) int32
# block_tables (max, max_blocks) int32
Rows past the batch hold the padding slot: its table row is all zeros, so they use block 0, which nobody owns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minivllm.core.batch import AttentionBatch, Batch
from minivllm.errors import MinivllmError
from minivllm.kernels._triton import compile_only
from minivllm.kernels.decode_inputs import decode_inputs, finish_decode

if TYPE_CHECKING:
    from minivllm.core.model_runner import ModelRunner, PendingStep

_TOLERANCE = 2e-2  # relative difference of hidden states between a replay and the eager step; bf16 noise is near 1e-3


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 until ``max_num_seqs`` fits."""
    top = -(-max_num_seqs // 8) * 8
    return [n for n in (1, 2, 4) if n < max_num_seqs or n == 1] + list(range(8, top + 1, 8))


def capture_graph(run: Callable[[], torch.Tensor], pool: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """``run`` as a graph, and the tensor that holds its result after a replay. It is run once before: what it needs is
    compiled outside the capture. (On the same stream: for each other one cuBLAS would keep 32 MiB for ever.)"""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    return graph, result


class DecodeGraphs:
    """Captures and replays decode steps for one runner."""

    def __init__(self, runner: ModelRunner, max_num_seqs: int) -> None:
        self.runner = runner
        self.sizes = graph_sizes(max_num_seqs)
        top, device = self.sizes[-1], runner.device
        self.padding = runner.num_slots
        self.size_for = np.searchsorted(self.sizes, np.arange(top + 1))
        self.slots = torch.full((top,), self.padding, dtype=torch.int64, device=device)
        self.input_ids, self.positions, self.after, self.slot_mapping, self.tokens = torch.zeros(
            (5, top), dtype=torch.int64, device=device
        )
        self.seq_lens = torch.ones(top, dtype=torch.int32, device=device)
        self.query_start = torch.arange(top + 1, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((top, runner.block_table.shape[1]), dtype=torch.int32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        self._plans = {size: self._plan(size) for size in self.sizes}
        self._on_device = np.full(top, self.padding, dtype=np.int32)  # what ``slots`` holds
        self._ones = np.ones(top, dtype=np.int32)

    # ------------------------------------------------------------------ capture

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, largest first so that the smaller ones live in its memory."""
        with compile_only():  # kernels differ between a few rows, some, and many
            for size in self.sizes:
                if size in (1, 2, 4, 8, 16, 24, 40, 72, self.sizes[-1]):
                    self._prepare(self._plans[size], self._ones[:size], None)
                    self._step(size)
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            self._prepare(self._plans[size], self._ones[:size], None)
            self._graphs[size], self._hidden[size] = capture_graph(partial(self._step, size), pool)
        self.runner.num_computed.zero_()
        self.runner.last_token.zero_()

    def _plan(self, size: int) -> AttentionBatch:
        return AttentionBatch(
            num_decodes=size,
            query_start=self.query_start[: size + 1],
            seq_lens=self.seq_lens[:size],
            block_tables=self.block_tables[:size],
            slot_mapping=self.slot_mapping[:size],
            host_query_lens=np.ones(size, dtype=np.int32),
            host_seq_lens=np.ones(size, dtype=np.int32),
            host_block_tables=np.zeros((size, 1), dtype=np.int32),
            graph_size=size,
        )

    def _step(self, size: int) -> torch.Tensor:
        """What is captured. Returns the final hidden states of its rows, from which ``refine`` makes logits again."""
        run, slots = self.runner, self.slots[:size]
        decode_inputs(
            slots, run.last_token, run.num_computed, run.block_table, self.input_ids[:size], self.positions[:size],
            self.seq_lens[:size], self.slot_mapping[:size], self.block_tables[:size], run.block_size, self.after[:size],
        )  # fmt: skip
        hidden = run.model.forward(self.input_ids[:size], self.positions[:size], run.attention)
        tokens = run.sampler.sample(run.model.compute_logits(hidden), slots, self.after[:size])
        finish_decode(
            tokens, slots, self.positions[:size], run.last_token, run.num_computed, self.tokens[:size], self.padding
        )
        return hidden

    def _prepare(self, plan: AttentionBatch, host_seq_lens: np.ndarray, slots: np.ndarray | None) -> None:
        """Hand the plan to the backend, with the host's view of it if it plans on the host."""
        attention = self.runner.attention
        attention.batch = plan
        if attention.plans_on_host:
            width = -(-int(host_seq_lens.max()) // self.runner.block_size)
            plan.host_seq_lens = host_seq_lens
            plan.host_block_tables = (
                np.zeros((len(host_seq_lens), width), dtype=np.int32)
                if slots is None
                else self.runner.host_tables[slots, :width]
            )
        attention.plan(plan)

    # ------------------------------------------------------------------ replay

    def launch(self, batch: Batch) -> PendingStep:
        run, n = self.runner, len(batch.slots)
        size = self.sizes[self.size_for[n]]
        self._update(batch, size)
        if run.attention.plans_on_host:
            seq_lens = np.ones(size, dtype=np.int32)
            seq_lens[:n] = batch.num_computed + 1
            self._prepare(self._plans[size], seq_lens, self._on_device[:size])
        self._graphs[size].replay()
        tokens, logprobs = self.tokens[:n], None
        if run.sampler.needs_refine(batch.slots):
            logits = run.model.compute_logits(self._hidden[size][:n])
            tokens, logprobs = run.sampler.refine(logits, self.slots[:n], self.positions[:n] + 1, tokens, batch.slots)
            run.last_token[self.slots[:n]] = tokens
        return run.land(n, np.arange(n), tokens, logprobs)

    def _update(self, batch: Batch, size: int) -> None:
        """Tell the device what changed since the last replay, in one copy; nothing changed: no copy."""
        n, run = len(batch.slots), self.runner
        wanted = np.full(size, self.padding, dtype=np.int32)
        wanted[:n] = batch.slots
        moved = not np.array_equal(wanted, self._on_device[:size])
        if not moved and not len(batch.block_slots):
            return
        slots, block_slots, block_indices, block_ids = run.staging.send(
            wanted if moved else wanted[:0], batch.block_slots, batch.block_indices, batch.block_ids
        )
        if moved:
            self.slots[:size] = slots
            self._on_device[:size] = wanted
        if len(block_slots):
            run.block_table[block_slots.long(), block_indices.long()] = block_ids

    # ------------------------------------------------------------------ proving

    @torch.inference_mode()
    def verify(self, num_blocks: int, vocab_size: int) -> None:
        """Replay each size once on random state and compare with the same step run eagerly.

        Raises:
            MinivllmError: they differ; backend and size are named.
        """
        run, rng = self.runner, np.random.default_rng(0)
        rows = min(self.sizes[-1], run.num_slots, num_blocks)  # each with blocks of its own; more are padding
        per_slot = min(num_blocks // rows, run.block_table.shape[1], 4)
        blocks = 1 + np.arange(rows * per_slot, dtype=np.int32).reshape(rows, per_slot)
        lengths = rng.integers(0, per_slot * run.block_size, rows).astype(np.int32)
        used = torch.from_numpy(np.unique(blocks)).to(run.device)
        cache = run.attention.kv_cache
        for layer in range(cache.shape[0]):
            cache[layer][:, used.long()] = torch.randn_like(cache[layer][:, used.long()])
        run.host_tables[:rows, :per_slot] = blocks
        run.block_table[:rows, :per_slot] = torch.from_numpy(blocks).to(run.device)
        first = torch.from_numpy(rng.integers(0, vocab_size, rows)).to(run.device)
        computed = torch.from_numpy(lengths).long().to(run.device)
        for size in self.sizes:
            n = min(size, rows)
            slots = np.full(size, self.padding, dtype=np.int32)
            slots[:n] = np.arange(n)
            seq_lens = np.ones(size, dtype=np.int32)
            seq_lens[:n] = lengths[:n] + 1
            self.slots[:size] = torch.from_numpy(slots).to(run.device)
            hidden = []
            for replay in (False, True):
                run.last_token[:rows], run.num_computed[:rows] = first, computed
                self._prepare(self._plans[size], seq_lens, slots)
                if replay:
                    self._graphs[size].replay()
                    hidden.append(self._hidden[size][:n].float())
                else:
                    hidden.append(self._step(size)[:n].float())
            error = float((hidden[0] - hidden[1]).norm() / hidden[0].norm().clamp_min(1e-6))
            if not error < _TOLERANCE:
                raise MinivllmError(
                    f"the CUDA graph of {size} rows with attention={type(run.attention).__name__} differs from the "
                    f"eager step by {error:.3g} (allowed: {_TOLERANCE}); run with enforce_eager=true and report it"
                )
        cache[:, :, used.long()] = 0
        run.host_tables[:] = 0
        run.block_table.zero_()
        run.last_token.zero_()
        run.num_computed.zero_()
        self.slots.fill_(self.padding)
        self._on_device[:] = self.padding
