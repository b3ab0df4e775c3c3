"""Steps with prompts as CUDA graphs: the model's layers for 32, 64, 128, … tokens, padded, and for a full step.

Launching a step of prompts kernel by kernel takes the host 10 to 30 ms, however few tokens there are; the GPU needs a
tenth of it for few, and of a small model no more for a full step (``max_num_batched_tokens``). Sizes double while
padding takes little, and lie equally far apart from there on. Only the layers are captured: what varies in shape, from
the rows that sample on, is launched behind, of a few rows as a graph of its own (``core/sample_graphs.py``). The full
step is captured once more for prompts that all start in it, where the backend has a faster way for those, and small
ones for few sequences: what attention launches grows with those that there may be.

What a step is told crosses as one packet, int32, see ``core/staging.py``; R the graph's rows, T its tokens:
# | input_ids, positions, slot_mapping (3, T) int64 | query_start (R + 1) | seq_lens (R) | slots (R) |
Static buffers, shared by all graphs: packet, and, for the largest:
# block_tables (R, max_blocks) int32   last_tokens (R - 1,) int64
All rows go to the backend as prompt rows, decodes too; a step of many of these is launched as two, where reading the
weights twice takes less than launching one eagerly. The row behind the last holds the tokens of the padding: its
context is one key long, so that they see nothing; they write into block 0, which nobody owns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from minivllm.core.batch import AttentionBatch, Batch, PromptStep
from minivllm.core.cuda_graphs import capture_graph, check_differences, difference
from minivllm.core.staging import Packing
from minivllm.kernels.capture import rehearsal

if TYPE_CHECKING:
    from minivllm.core.model_runner import ModelRunner
    from minivllm.core.parallel import TensorParallel

_Key = tuple[int, str]  # a graph's tokens, and for which steps of so many it is: one of these
_ANY, _WHOLE, _FEW = "any", "whole", "few"  # _WHOLE: whose prompts all start in it, _FEW: of few sequences
_FEW_ROWS, _FEW_TOKENS = 8, 512  # one of these rows is the padding's
_SMALLEST, _TILE_ROWS = 32, 128  # tokens
_LARGE = 1024  # tokens: from here on, a product's fastest kernel may differ from one size to the next
_FLOP = 1e13  # of the layers' products: about 13 ms of a fast GPU. Larger steps hide most of their launches
_BETWEEN_FLOP = 1e12  # 1.5 ms: about what lies between two sizes, at most; that much padding is allowed
_RANKS_FLOP, _RANKS_BETWEEN_FLOP = 3e13, 3.5e12  # of one rank of several, which take the host 40 to 60 ms to launch
FULL_FLOP = 2e13  # 25 ms: a full step up to here is captured, too, for hosts that launch slowly
_MAX_DECODES, _MAX_DECODE_CONTEXT = 32, 4096  # more are better off in the kernels for decodes
_APART_BYTES = 8e9  # of the layers' weights, experts and all: read in 2 ms, where launching a step eagerly takes 10
_PICKED_FROM = 256  # tokens: up to here a product takes as long as reading its weights, however few rows it has
_PROOF_ROWS = 4  # sequences of a step that proves a graph, or as many as its tokens need
_COMPARED = 256  # hidden states of it, spread evenly: an eager step's are kept until all graphs are captured


def prompt_sizes(most: int, between: int, full: int = 0) -> list[int]:
    """Powers of two from 32 to ``between``, which is one, and then its multiples, up to ``most``; ``full`` behind those
    that are smaller, unless it is 0."""
    doubling = [1 << n for n in range(_SMALLEST.bit_length() - 1, between.bit_length())]
    sizes = [n for n in (*doubling, *range(2 * between, most + 1, between)) if n <= most]
    return [*(n for n in sizes if n < full), full] if full else sizes


@cache
def _packing(size: int, rows: int) -> Packing:
    """Of a step's packet, see above."""
    of_rows = (((n,), np.int32) for n in (rows + 1, rows, rows))
    return Packing(((3, size), np.int64), *of_rows)


def _nearest_power_of_2(tokens: float) -> int:
    """At least a tile's rows: for some numbers between, libraries' products take twice the time of a few rows more."""
    return 1 << max(round(math.log2(tokens)), _TILE_ROWS.bit_length() - 1)


class PromptGraphs:
    """Captures the layers of steps with prompts, and replays them."""

    def __init__(self, runner: ModelRunner, max_tokens: int, tp: TensorParallel) -> None:
        self.runner, device, rows = runner, runner.device, runner.num_slots + 1
        self.block_tables = torch.zeros((rows, runner.block_table.shape[1]), dtype=torch.int32, device=device)
        weights = [
            p
            for name, p in runner.model.named_parameters()  # type: ignore[attr-defined]
            if not name.endswith(("embed_tokens.weight", "lm_head.weight"))
        ]

        def fullest(number: int) -> int:
            """The rank's that has most: all must take the same graphs, and a model need not be split evenly."""
            return -tp.minimum(-number, device)

        self.flop = flop = 2 * max(fullest(sum(p.numel() for p in weights if p.dim() == 2)), 1)  # a token
        self._longest = self.block_tables.shape[1] * runner.block_size  # tokens that a block table can hold
        step = min(max_tokens, runner.num_slots * self._longest)
        between = self.waste = _nearest_power_of_2((_BETWEEN_FLOP if tp.size == 1 else _RANKS_BETWEEN_FLOP) / flop)
        most = max(int(_FLOP / flop), round(_FLOP / flop / between) * between)
        if tp.size > 1:
            most = max(most, int(_RANKS_FLOP / flop))
            self.waste = max(between, most)
        self.full = step if step * flop <= FULL_FLOP else 0
        self.sizes = prompt_sizes(min(most, step), between, self.full)
        self.apart = fullest(sum(p.nbytes for p in weights)) <= _APART_BYTES
        top = self.sizes[-1] if self.sizes else 0
        self.packet = torch.zeros(_packing(top, rows).words, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(runner.num_slots, dtype=torch.int64, device=device)  # padding's is not asked for
        self._nobody = np.full(rows, runner.num_slots, dtype=np.int32)  # the padding's slot, which has no blocks
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
        self._hidden: dict[_Key, torch.Tensor] = {}
        keys = [(size, _ANY) for size in self.sizes] + ([(self.full, _WHOLE)] if self.full else [])
        few = min(_FEW_TOKENS, (_FEW_ROWS - 1) * self._longest) if rows > _FEW_ROWS else 0
        keys += [(size, _FEW) for size in self.sizes if size <= few]
        self._told = {key: _packing(key[0], _FEW_ROWS if key[1] == _FEW else rows).cut(self.packet) for key in keys}
        self._plans = {key: self._plan(key) for key in keys}

    def _plan(self, key: _Key) -> AttentionBatch:
        (size, kind), (tokens, query_start, seq_lens, _) = key, self._told[key]
        rows = len(seq_lens)
        picks = size > _PICKED_FROM and size >= 2 * (rows - 1)
        return AttentionBatch(
            num_decodes=0,
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=self.block_tables[:rows],
            slot_mapping=tokens[2],
            host_query_lens=np.zeros(rows, dtype=np.int32),
            host_seq_lens=np.zeros(rows, dtype=np.int32),
            host_block_tables=np.zeros((rows, 1), dtype=np.int32),
            graph_size=size,
            graph_whole=kind == _WHOLE,
            last_tokens=self.last_tokens[: rows - 1] if picks else None,
        )

    # ------------------------------------------------------------------ capture

    @torch.inference_mode()
    def launch_all_kinds(self) -> None:
        """The smallest step, the largest of those that are not large, and all large ones, which between them take every
        kernel, for ``compile_only``."""
        small = [size for size in self.sizes if size < _LARGE]
        for key in self._plans:
            if key[0] in (*small[:1], *small[-1:]) or key[0] >= _LARGE:
                self._rehearse(*key)
                with rehearsal():
                    self._forward(key)

    def capture(self, num_blocks: int, vocab_size: int) -> None:
        """Capture every size, largest first so that the smaller ones live in its memory, and verify it."""
        pool = torch.cuda.graph_pool_handle()

        def capture_one(key: _Key) -> None:
            self._rehearse(*key)  # another plan than it is verified with: it must work with any
            self._graphs[key], self._hidden[key] = capture_graph(partial(self._forward, key), pool)

        self._compare(num_blocks, vocab_size, capture_one)

    def _rehearse(self, size: int, kind: str) -> None:
        """Plan a step of ``size`` tokens of the padding slot, in rows as long as a block table may be."""
        lens = np.zeros(self._plans[size, kind].num_seqs, dtype=np.int32)
        parts = -(-size // self._longest)
        lens[:parts] = np.minimum(self._longest, size - self._longest * np.arange(parts))
        packing = _packing(size, len(lens))
        numbers = np.zeros(packing.words, dtype=np.int32)
        _, query_start, seq_lens, slots = packing.cut(numbers)
        np.cumsum(lens, out=query_start[1:])
        seq_lens[:], slots[:] = lens, self._nobody[: len(lens)]
        self.packet[: len(numbers)] = torch.from_numpy(numbers)
        self._hand_over((size, kind), lens, lens, slots)

    def _hand_over(self, key: _Key, query_lens: np.ndarray, seq_lens: np.ndarray, slots: np.ndarray) -> None:
        plan = self._plans[key]
        plan.host_query_lens, plan.host_seq_lens = query_lens, seq_lens
        self.runner.hand_over(plan, slots)

    def _forward(self, key: _Key) -> torch.Tensor:
        plan, (input_ids, positions, _) = self._plans[key], self._told[key][0]
        if plan.last_tokens is not None:  # where no sequence is, that of the padding
            torch.sub(plan.query_start[1:-1], 1, out=plan.last_tokens)
        return self.runner.model.forward(input_ids, positions, self.runner.attention)

    # ------------------------------------------------------------------ replay

    def size_for(self, batch: Batch) -> int | None:
        """The graph for this step; None if it had better run eagerly."""
        d = batch.num_decodes
        if d > _MAX_DECODES or (d and int(batch.num_computed[:d].max()) >= _MAX_DECODE_CONTEXT):
            return None
        return self._size_for(batch.num_tokens)

    def _size_for(self, tokens: int) -> int | None:
        if not self.sizes or tokens > self.sizes[-1]:
            return None
        size = next(size for size in self.sizes if size >= tokens)
        return size if size - tokens <= self.waste else None

    def takes_apart(self, batch: Batch) -> bool:
        """Whether this step of decodes and prompts had better be two, each a graph."""
        if not self.apart or not batch.num_decodes or self.size_for(batch) is not None:
            return False
        return self._size_for(len(batch.token_ids)) is not None

    def key_for(self, batch: Batch) -> _Key | None:
        """Which graph it is; None as for ``size_for``."""
        size = self.size_for(batch)
        if size is None:
            return None
        if (size, _WHOLE) in self._graphs and not batch.num_decodes and not batch.num_computed.any():
            return size, _WHOLE
        return size, _FEW if (size, _FEW) in self._graphs and len(batch.slots) < _FEW_ROWS else _ANY

    def numbers(self, key: _Key, step: PromptStep) -> np.ndarray:
        """What the device is told of a step, padded, for ``launch``: a packet."""
        size, n, t = key[0], len(step.slots), step.tokens.shape[1]
        packing = _packing(size, self._plans[key].num_seqs)
        numbers = np.zeros(packing.words, dtype=np.int32)
        tokens, query_start, seq_lens, slots = packing.cut(numbers)
        tokens[:, :t] = step.tokens
        np.cumsum(step.num_new, out=query_start[1 : n + 1])
        query_start[n + 1 :] = size
        seq_lens[:n], seq_lens[n:] = step.num_computed + step.num_new, 1
        slots[:n], slots[n:] = step.slots, self.runner.num_slots
        return numbers

    def launch(self, key: _Key, step: PromptStep, sent: torch.Tensor, decodes: torch.Tensor) -> torch.Tensor:
        """``sent``: the step's ``numbers``. decodes (d,) int64: slots of the first sequences, whose tokens the device
        has. Returns hidden states, of all tokens (t, hidden_size) or of each row's last (n, hidden_size)."""
        self._load(key, step, sent)
        if len(decodes):
            self._told[key][0][0, : len(decodes)] = self.runner.last_token.index_select(0, decodes)
        return self._replay(key, step)

    def _load(self, key: _Key, step: PromptStep, sent: torch.Tensor) -> None:
        """Put the step where the graph finds it, with its padding, and plan it."""
        size, rows, n = key[0], self._plans[key].num_seqs, len(step.slots)
        self.packet[: len(sent)] = sent
        slots = self._told[key][3]
        torch.index_select(self.runner.block_table, 0, slots[: n + 1], out=self.block_tables[: n + 1])
        query_lens, lens = np.zeros((2, rows), dtype=np.int32)
        query_lens[:n], lens[:n] = step.num_new, step.num_computed + step.num_new
        query_lens[n], lens[n] = size - step.tokens.shape[1], 1
        self._hand_over(key, query_lens, lens, np.concatenate([step.slots, self._nobody[: rows - n]]))

    def _replay(self, key: _Key, step: PromptStep) -> torch.Tensor:
        self._graphs[key].replay()
        return self._without_padding(self._hidden[key], key, step)

    def _without_padding(self, hidden: torch.Tensor, key: _Key, step: PromptStep) -> torch.Tensor:
        return hidden[: step.tokens.shape[1]] if len(hidden) == key[0] else hidden[: len(step.slots)]

    # ------------------------------------------------------------------ proving

    def verify(self, num_blocks: int, vocab_size: int) -> None:
        """Replay every graph once for random tokens, behind random contexts where prompts need not be whole, and
        compare with the same step run eagerly. Leaves the cache empty.

        Raises:
            MinivllmError: they differ; backend and size are named.
        """
        self._compare(num_blocks, vocab_size, lambda key: None)

    @torch.inference_mode()
    def _compare(self, num_blocks: int, vocab_size: int, capture: Callable[[_Key], None]) -> None:
        """``verify``, with ``capture`` behind each graph's eager step, which has loaded what it needs: a proof adds no
        more than a replay. These come when all are captured; the host waits once."""
        if not self.sizes:
            return
        run, cache, block_size = self.runner, self.runner.attention.kv_cache, self.runner.block_size
        longest = self._longest - block_size + 1  # a model's length, rounded up to blocks, may have no more than this
        rows = min(max(_PROOF_ROWS, -(-self.sizes[-1] // longest)), run.num_slots, num_blocks)
        per_row = min(num_blocks // rows, run.block_table.shape[1])
        blocks = 1 + np.arange(rows * per_row, dtype=np.int32).reshape(rows, per_row)
        run.host_tables[:rows, :per_row] = blocks
        run.block_table[:rows, :per_row] = torch.from_numpy(blocks).to(run.device)
        contexts = cache[:, :, 1 : 1 + rows * per_row : per_row]  # each row's first block
        values = torch.randn_like(contexts)
        rng = np.random.default_rng(0)
        steps = {key: self._random_step(key, blocks, longest, vocab_size, rng) for key in self._plans}
        sent = {key: torch.from_numpy(self.numbers(key, step)).to(run.device) for key, step in steps.items()}

        def hidden(key: _Key, launch: Callable[[_Key, PromptStep], torch.Tensor]) -> torch.Tensor:
            contexts.copy_(values)
            states = launch(key, steps[key])
            return states[:: -(-len(states) // _COMPARED)]

        def eager(key: _Key, step: PromptStep) -> torch.Tensor:
            with rehearsal():
                return self._without_padding(self._forward(key), key, step)

        expected, differences = {}, {}
        for key in reversed(self._plans):
            self._load(key, steps[key], sent[key])
            if key[1] == _WHOLE and not run.attention.fresh_prompts:
                continue  # such steps are like any other to this backend
            expected[key] = hidden(key, eager).clone()
            capture(key)
        for key in reversed(expected):
            self._load(key, steps[key], sent[key])
            what = f"{key[0]} tokens of prompts" + {_ANY: "", _WHOLE: " from their start", _FEW: ", few"}[key[1]]
            differences[what] = difference(expected[key], hidden(key, self._replay))
        check_differences(differences, run.attention)
        cache[:, :, 1 : 1 + rows * per_row] = 0
        run.host_tables[:] = 0
        for used in (run.block_table, self.block_tables, self.packet):
            used.zero_()

    def _random_step(
        self, key: _Key, blocks: np.ndarray, longest: int, vocab_size: int, rng: np.random.Generator
    ) -> PromptStep:
        """A step that fills the graph as far as ``blocks``, (rows, blocks of each) do: one new token in the first
        sequence, as a decode has, and equally many in the others."""
        (size, kind), block_size = key, self.runner.block_size
        n, room = min(len(blocks), size, self._plans[key].num_seqs - 1), min(blocks.shape[1] * block_size, longest)
        computed = np.minimum(rng.integers(1, block_size + 1, n), room - 1) * (kind != _WHOLE)
        new = np.minimum((size - 1) // (n - 1) if n > 1 else size, room - computed)
        if n > 1:
            new[0] = 1
        start = np.zeros(n + 1, dtype=np.int64)
        np.cumsum(new, out=start[1:])
        row = np.repeat(np.arange(n), new)
        position = np.arange(start[-1]) + (computed - start[:-1])[row]
        mapping = blocks[row, position // block_size] * block_size + position % block_size
        tokens = np.stack([rng.integers(0, vocab_size, start[-1]), position, mapping])
        return PromptStep(new.astype(np.int32), computed.astype(np.int32), np.arange(n, dtype=np.int32), tokens)
