"""Steps with prompts as CUDA graphs: the model's layers for 32, 64, 128, … tokens, padded, and for a full step.

Launching a step of prompts kernel by kernel takes the host 10 to 20 ms, however few tokens there are; the GPU needs a
tenth of it for few, and of a small model no more for a full step (``max_num_batched_tokens``). Only the layers are
captured: what varies in shape, from the rows that sample on, runs eagerly behind. The full step is captured once more
for prompts that all start in it, where the backend has a faster way for those.

Static buffers, shared by all sizes (their first rows are used), owned by PromptGraphs; R = num_slots + 1, T the size:
# input_ids, positions, slot_mapping (T,) int64
# query_start (R + 1,) int32   seq_lens (R,) int32   block_tables (R, max_blocks) int32   last_tokens (R - 1,) int64
All rows go to the backend as prompt rows, decodes too. The row behind the last holds the tokens of the padding: its
context is one key long, so that they see nothing; they write into block 0, which nobody owns.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from minivllm.core.batch import AttentionBatch, Batch
from minivllm.core.cuda_graphs import capture_graph

if TYPE_CHECKING:
    from minivllm.core.model_runner import ModelRunner
    from minivllm.core.parallel import TensorParallel

_Key = tuple[int, bool]  # a graph's tokens, and whether its prompts all start in the step
_SMALLEST = 32
_LARGE = 1024  # tokens: from here on, a product's fastest kernel may differ from one size to the next
_FLOP = 6e12  # of the layers' products: about 8 ms of a fast GPU. Larger steps hide most of their launches
_FULL_FLOP = 2e13  # 25 ms: a full step up to here is captured, too, for hosts that launch slowly
_WASTE = 0.25  # of _FLOP: padding allowed
_FULL_WASTE = 1 / 16  # of a full step's tokens
_MAX_DECODES, _MAX_DECODE_CONTEXT = 32, 4096  # more are better off in the kernels for decodes
_PICKED_FROM = 256  # tokens: up to here a product takes as long as reading its weights, however few rows it has


def prompt_sizes(most: int, full: int = 0) -> list[int]:
    """Powers of two from 32 to ``most``, then ``full`` unless it is 0."""
    sizes = [1 << n for n in range(_SMALLEST.bit_length() - 1, most.bit_length())]
    return [*sizes, full] if full else sizes


class PromptGraphs:
    """Captures the layers of steps with prompts, and replays them."""

    def __init__(self, runner: ModelRunner, max_tokens: int, tp: TensorParallel) -> None:
        self.runner, device, rows = runner, runner.device, runner.num_slots + 1
        self.block_tables = torch.zeros((rows, runner.block_table.shape[1]), dtype=torch.int32, device=device)
        layers = sum(
            p.numel()
            for name, p in runner.model.named_parameters()  # type: ignore[attr-defined]
            if p.dim() == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight"))
        )
        # of the fullest rank: all must take the same graphs, and a model need not be split evenly
        layers = -tp.minimum(-layers, device)
        flop = 2 * max(layers, 1)  # a token
        self._longest = self.block_tables.shape[1] * runner.block_size  # tokens that a block table can hold
        step, limit = min(max_tokens, runner.num_slots * self._longest), int(_FLOP / flop)
        self.full = step if limit < step and step * flop <= _FULL_FLOP else 0
        self.sizes = prompt_sizes(min(limit, step), self.full)
        self.waste = int(_WASTE * _FLOP / flop)
        top = self.sizes[-1] if self.sizes else 0
        self.input_ids, self.positions, self.slot_mapping = torch.zeros((3, top), dtype=torch.int64, device=device)
        self.query_start = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(runner.num_slots, dtype=torch.int64, device=device)  # padding's is not asked for
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
        self._hidden: dict[_Key, torch.Tensor] = {}
        keys = [(size, False) for size in self.sizes] + ([(self.full, True)] if self.full else [])
        self._plans = {key: self._plan(*key) for key in keys}

    def _plan(self, size: int, whole: bool) -> AttentionBatch:
        rows = len(self.seq_lens)
        picks = size > _PICKED_FROM and size >= 2 * len(self.last_tokens)
        return AttentionBatch(
            num_decodes=0,
            query_start=self.query_start,
            seq_lens=self.seq_lens,
            block_tables=self.block_tables,
            slot_mapping=self.slot_mapping[:size],
            host_query_lens=np.zeros(rows, dtype=np.int32),
            host_seq_lens=np.zeros(rows, dtype=np.int32),
            host_block_tables=np.zeros((rows, 1), dtype=np.int32),
            graph_size=size,
            graph_whole=whole,
            last_tokens=self.last_tokens if picks else None,
        )

    # ------------------------------------------------------------------ capture

    @torch.inference_mode()
    def launch_all_kinds(self) -> None:
        """The smallest step and all large ones, which between them take every kernel, for ``compile_only``."""
        for key in self._plans:
            if key[0] == self.sizes[0] or key[0] >= _LARGE:
                self._rehearse(*key)
                self._forward(key[0])

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, largest first so that the smaller ones live in its memory."""
        pool = torch.cuda.graph_pool_handle()
        for key in reversed(self._plans):
            self._rehearse(*key)
            if key[1] and not self.runner.attention.fresh_prompts:
                continue  # such steps are like any other to this backend
            self._forward(key[0])
            self._graphs[key], self._hidden[key] = capture_graph(partial(self._forward, key[0]), pool)

    def _rehearse(self, size: int, whole: bool) -> None:
        """Plan a step of ``size`` tokens of the padding slot, in rows as long as a block table may be."""
        lens = np.zeros(len(self.seq_lens), dtype=np.int32)
        parts = -(-size // self._longest)
        lens[:parts] = np.minimum(self._longest, size - self._longest * np.arange(parts))
        start = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(lens, out=start[1:])
        self.query_start.copy_(torch.from_numpy(start))
        self.seq_lens.copy_(torch.from_numpy(lens))
        self._hand_over((size, whole), lens, lens)

    def _hand_over(self, key: _Key, query_lens: np.ndarray, seq_lens: np.ndarray) -> None:
        plan = self._plans[key]
        plan.host_query_lens, plan.host_seq_lens = query_lens, seq_lens
        self.runner.attention.batch = plan
        self.runner.attention.plan(plan)

    def _forward(self, size: int) -> torch.Tensor:
        if self._plans[size, False].last_tokens is not None:  # where no sequence is, that of the padding
            torch.sub(self.query_start[1:-1], 1, out=self.last_tokens)
        return self.runner.model.forward(self.input_ids[:size], self.positions[:size], self.runner.attention)

    # ------------------------------------------------------------------ replay

    def size_for(self, batch: Batch) -> int | None:
        """The graph for this step; None if it had better run eagerly."""
        tokens, d = batch.num_tokens, batch.num_decodes
        if not self.sizes or tokens > self.sizes[-1] or d > _MAX_DECODES:
            return None
        if d and int(batch.num_computed[:d].max()) >= _MAX_DECODE_CONTEXT:
            return None
        size = next(size for size in self.sizes if size >= tokens)
        waste = min(self.waste, int(_FULL_WASTE * size)) if size == self.full else self.waste
        return size if size - tokens <= waste else None

    def launch(
        self, size: int, batch: Batch, input_ids: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor,
        query_start: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Arguments as the eager step has them, on the device; returns hidden states, of all tokens (t, hidden_size) or
        of each row's last (n, hidden_size)."""
        t, n = len(input_ids), len(batch.slots)
        self.input_ids[:t], self.positions[:t], self.slot_mapping[:t] = input_ids, positions, slot_mapping
        self.query_start[: n + 1], self.seq_lens[:n] = query_start, seq_lens
        torch.index_select(self.runner.block_table, 0, slots, out=self.block_tables[:n])
        query_lens, lens = np.zeros((2, len(self.seq_lens)), dtype=np.int32)
        query_lens[:n], lens[:n] = batch.num_new, batch.num_computed + batch.num_new
        query_lens[n], lens[n] = size - t, 1
        self.query_start[n + 1 :] = size
        self.seq_lens[n:] = 1
        self.block_tables[n] = 0
        if size > t:
            self.input_ids[t:size] = 0
            self.positions[t:size] = 0
            self.slot_mapping[t:size] = 0
        key = (size, not batch.num_decodes and not batch.num_computed.any())
        if key not in self._graphs:
            key = (size, False)
        self._hand_over(key, query_lens, lens)
        self._graphs[key].replay()
        hidden = self._hidden[key]
        return hidden[:t] if len(hidden) == size else hidden[:n]
