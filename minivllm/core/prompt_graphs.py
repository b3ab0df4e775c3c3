"""Steps with prompts as CUDA graphs: the model's layers for 32, 64, 128, … tokens, padded, and for a full step.

Launching a prompt step eagerly takes the host 10 to 30 ms, however few tokens there are; the GPU needs a tenth of that
for few tokens, and with a small model no more for a full step (``max_num_batched_tokens``). Sizes double while padding
is cheap, and are evenly spaced from there on. Only the layers are captured. What varies in shape, from the sampled rows
on, is launched afterwards, for a few rows as a graph of its own (``core/sample_graphs.py``). The full step has a second
graph for steps whose prompts all start in it, if the backend has a faster path for those; small sizes have one for few
sequences, as the work that attention launches grows with the most sequences there may be.

The input of a step is one int32 packet, see ``core/staging.py``; R is the graph's rows, T its tokens:
# | input_ids (T) int64 | query_start (R + 1) | seq_lens (R) | slots (R) | the backend's prompt_words |
# | tokens in the order of their LoRA adapters (2 T), in graphs of steps with such |
Static buffers, shared by all graphs: the packet, and, for the largest:
# positions, slot_mapping (T,) int64   ends (4 R,) int64, ``prompt_inputs``'   block_tables (R, max_blocks) int32
All rows go to the backend as prompt rows, decodes too; a step with many decodes is launched as two if reading the
weights twice takes less time than launching one eagerly. The row after the last holds the padding tokens: its context
is one key long, so they attend to almost nothing; they write into block 0, which is never allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from minivllm.core.adapter_rows import in_order
from minivllm.core.batch import AttentionBatch, Batch, captured_batch
from minivllm.core.cuda_graphs import capture_graph, check_differences, difference, random_values
from minivllm.core.model_runner import PICKED_FROM
from minivllm.core.staging import Packing, Staging
from minivllm.kernels.capture import rehearsal
from minivllm.kernels.prompt_inputs import prompt_inputs
from minivllm.rounding import cdiv

if TYPE_CHECKING:
    from minivllm.core.model_runner import ModelRunner
    from minivllm.core.parallel import TensorParallel

_Key = tuple[int, str]  # a graph's tokens, and which steps of that size it is for: one of these
_ANY, _WHOLE, _FEW = "any", "whole", "few"  # _WHOLE: all prompts start in the step, _FEW: few sequences
_ADAPTED = "adapted"  # some have LoRA adapters
_TOLD = {_ANY: "", _WHOLE: " from their start", _FEW: ", few", _ADAPTED: " with adapters"}
_FEW_ROWS, _FEW_TOKENS = 8, 512  # one of these rows is for padding
_SMALLEST, _TILE_ROWS = 32, 128  # tokens
_SMALLEST_DRAFTED = 8  # a step of one sequence and its draft: kernels for so few rows are faster
_LARGE = 1024  # tokens: from here on, the fastest GEMM kernel may differ from one size to the next
_LAYER_FLOP = 3.5e11  # of a layer's GEMMs: about 0.5 ms on a fast GPU. Larger steps hide most of their launch time
_BETWEEN_FLOP = 6e11  # 0.9 ms: about the largest gap between two sizes, which is also the most padding allowed
_ADAPTED_TIMES = 2  # these two, with LoRA adapters: launching takes longer, and a start that captures each size twice
_RANKS_FLOP, _RANKS_BETWEEN_FLOP = 3e13, 3.5e12  # per rank if there are several: the host needs 40 to 60 ms to launch
FULL_FLOP = 2e13  # 25 ms: a full step up to here is captured too, for hosts that launch slowly
_MAX_DECODES, _MAX_DECODE_CONTEXT = 32, 4096  # above these, decode kernels are faster
_APART_BYTES = 8e9  # of the layers' weights, all experts included: read in 2 ms; launching a step eagerly takes 10 ms
_PROOF_ROWS = 4  # sequences in a step that verifies a graph, or as many as its tokens need
_COMPARED = 256  # hidden states to compare, evenly spaced: an eager step's are kept until all graphs are captured


def prompt_sizes(most: int, between: int, full: int = 0, *, drafts: bool = False) -> list[int]:
    """Powers of two from 32, with ``drafts`` from 8, to ``between`` (itself one), then multiples of ``between``, up to
    ``most``. If ``full`` is not 0, it is the last, after the smaller ones."""
    smallest = _SMALLEST_DRAFTED if drafts else _SMALLEST
    doubling = [1 << n for n in range(smallest.bit_length() - 1, between.bit_length())]
    sizes = [n for n in (*doubling, *range(2 * between, most + 1, between)) if n <= most]
    return [*(n for n in sizes if n < full), full] if full else sizes


class GraphInput(NamedTuple):
    """The input of a graph: n sequences, t tokens, then padding."""

    num_seqs: int  # n
    num_tokens: int  # t
    query_lens: np.ndarray  # (R,) int32
    seq_lens: np.ndarray  # (R,) int32
    slots: np.ndarray  # (R,) int32
    packet: np.ndarray


class _Staged(NamedTuple):
    """The packet of a graph in ``staging``: its layout, and its arrays on the device."""

    packing: Packing
    input_ids: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    prompt_words: torch.Tensor
    adapter_order: torch.Tensor


def _nearest_power_of_2(tokens: float) -> int:
    """At least a tile's rows. (For some numbers in between, library GEMMs take twice the time of a few rows more.)"""
    return 1 << max(round(math.log2(tokens)), _TILE_ROWS.bit_length() - 1)


class PromptGraphs:
    """Captures the layers of steps with prompts, and replays them."""

    def __init__(self, runner: ModelRunner, max_tokens: int, tp: TensorParallel, *, drafts: bool = False) -> None:
        """``drafts``: sequences may have some, so that many steps have few tokens."""
        self.runner, device, rows = runner, runner.device, runner.num_slots + 1
        self._drafts = drafts
        self.block_tables = torch.zeros((rows, runner.block_table.shape[1]), dtype=torch.int32, device=device)
        weights = [
            p
            for name, p in runner.model.named_parameters()  # type: ignore[attr-defined]
            if not name.endswith(("embed_tokens.weight", "lm_head.weight"))
        ]

        def fullest(number: int) -> int:
            """The maximum over ranks: all must use the same graphs, and a model need not be split evenly."""
            return -tp.minimum(-number, device)

        self.flop = flop = 2 * max(fullest(sum(p.numel() for p in weights if p.dim() == 2)), 1)  # per token
        # Tokens of a sequence: at most max_model_len, which the block table's width is rounded up from.
        self.longest = (self.block_tables.shape[1] - 1) * runner.block_size + 1
        step = min(max_tokens, runner.num_slots * self.longest)
        self.full = step if step * flop <= FULL_FLOP else 0
        self.sizes, self.most_padding = self._sizes(step, tp)
        self.adapted_sizes, self.most_adapted_padding = self.sizes, self.most_padding
        if tp.size == 1:
            self.adapted_sizes, self.most_adapted_padding = self._sizes(step, tp, _ADAPTED_TIMES)
        if runner.adapters is None:
            self.adapted_sizes = []
        self.apart = fullest(sum(p.nbytes for p in weights)) <= _APART_BYTES
        self._top = top = max(*self.sizes[-1:], *self.adapted_sizes[-1:], 0, 0)
        self.ends = torch.zeros(4 * rows, dtype=torch.int64, device=device)
        self.positions, self.slot_mapping = (torch.zeros(top, dtype=torch.int64, device=device) for _ in range(2))
        self._nobody = np.full(rows, runner.num_slots, dtype=np.int32)  # the padding slot, which has no blocks
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
        self._hidden: dict[_Key, torch.Tensor] = {}
        keys = [(size, _ANY) for size in self.sizes] + ([(self.full, _WHOLE)] if self.full else [])
        few = min(_FEW_TOKENS, (_FEW_ROWS - 1) * self.longest) if rows > _FEW_ROWS else 0
        keys += [(size, _FEW) for size in self.sizes if size <= few]
        keys += [(size, _ADAPTED) for size in self.adapted_sizes]
        packings = {key: self._packing(key, _FEW_ROWS if key[1] == _FEW else rows) for key in keys}
        self.staging = Staging(device, max((packing.words for packing in packings.values()), default=0))
        self._staged = {key: _Staged(packing, *packing.cut(self.staging.words)) for key, packing in packings.items()}
        self._plans = {key: self._plan(key) for key in keys}

    def _sizes(self, step: int, tp: TensorParallel, times: float = 1) -> tuple[list[int], int]:
        """The sizes for steps of up to ``step`` tokens, and how many tokens of padding a step may have."""
        between = _nearest_power_of_2(times * (_BETWEEN_FLOP if tp.size == 1 else _RANKS_BETWEEN_FLOP) / self.flop)
        wanted = times * _LAYER_FLOP * self.runner.attention.spec.num_layers / self.flop
        most, padding = max(int(wanted), round(wanted / between) * between), between
        if tp.size > 1:
            most = max(most, int(_RANKS_FLOP / self.flop))
            padding = max(between, most)
        return prompt_sizes(min(most, step), between, self.full, drafts=self._drafts), padding

    def _packing(self, key: _Key, rows: int) -> Packing:
        (size, kind), none = key, np.zeros(rows, dtype=np.int32)
        words, order = len(self.runner.attention.prompt_words(none, none, size)), 2 * size * (kind == _ADAPTED)
        return Packing(((size,), np.int64), *(((n,), np.int32) for n in (rows + 1, rows, rows, words, order)))

    def _plan(self, key: _Key) -> AttentionBatch:
        (size, kind), staged = key, self._staged[key]
        rows = len(staged.slots)
        picks = kind != _ADAPTED and size > PICKED_FROM and size >= 2 * (rows - 1)
        return captured_batch(
            0, staged.query_start, staged.seq_lens, self.block_tables[:rows], self.slot_mapping[:size],
            graph_whole=kind == _WHOLE,
            last_tokens=self._ends(key)[3, : rows - 1] if picks else None,  # not padding's
            prompt_words=staged.prompt_words,
        )  # fmt: skip

    # ------------------------------------------------------------------ capture

    @torch.inference_mode()
    def launch_all_kinds(self) -> None:
        """Launch the smallest, the largest below ``_LARGE``, and all from there on, for ``compile_only``: together they
        use every kernel."""
        for key in self._plans:
            small = [size for size in (self.adapted_sizes if key[1] == _ADAPTED else self.sizes) if size < _LARGE]
            if key[0] <= _SMALLEST or key[0] in small[-1:] or key[0] >= _LARGE:
                self._load(key, self._of_padding(key))
                with rehearsal():
                    self._forward(key)

    def capture(self, num_blocks: int, vocab_size: int) -> None:
        """Capture every size, largest first so that smaller ones reuse its memory, and verify it."""
        pool = torch.cuda.graph_pool_handle()

        def capture_one(key: _Key) -> None:
            self._load(key, self._of_padding(key))  # not the step it is verified with: it must work with any
            self._graphs[key], self._hidden[key] = capture_graph(partial(self._forward, key), pool)

        self._compare(num_blocks, vocab_size, capture_one)

    def _load(self, key: _Key, given: GraphInput) -> None:
        """Copy a step's input to the graph's buffers, and plan it. Unlike with ``Staging``, any number of steps may be
        queued on the device."""
        self.staging.words[: len(given.packet)] = torch.from_numpy(given.packet)
        self._hand_over(key, given)

    def _of_padding(self, key: _Key) -> GraphInput:
        """A step of the padding slot, in rows that are as long as possible."""
        size, parts = key[0], cdiv(key[0], self.longest)
        lens = np.minimum(self.longest, size - self.longest * np.arange(parts))
        return self._padded(key, self._nobody[:parts], np.zeros_like(lens), lens, np.zeros(size, dtype=np.int32))

    def _forward(self, key: _Key) -> torch.Tensor:
        plan, staged, run = self._plans[key], self._staged[key], self.runner
        positions = self.positions[: key[0]]
        prompt_inputs(
            staged.query_start, staged.seq_lens, staged.slots, run.block_table, positions, plan.slot_mapping,
            plan.block_tables, run.block_size, self._ends(key),
        )  # fmt: skip
        with run.with_adapters(staged.adapter_order if key[1] == _ADAPTED else None):
            return run.model.forward(staged.input_ids, positions, run.attention)

    # ------------------------------------------------------------------ replay

    def size_for(self, batch: Batch) -> int | None:
        """The size of the graph for this step; None if it should run eagerly."""
        d = batch.num_decodes
        if d > _MAX_DECODES or (d and int(batch.num_computed[:d].max()) >= _MAX_DECODE_CONTEXT):
            return None
        return None if self.sees_too_much(batch) else self._smallest(batch.num_tokens, batch)

    def sees_too_much(self, batch: Batch) -> bool:
        """Whether a prompt has a context for which the backend would rather not be captured."""
        most, d = self.runner.attention.most_captured_context, batch.num_decodes
        return most is not None and int((batch.num_computed + batch.num_new)[d:].max(initial=0)) > most

    def _smallest(self, tokens: int, batch: Batch) -> int | None:
        """The size for so many tokens of a step."""
        sizes, padding = self.sizes, self.most_padding
        if self.adapted_sizes and self.runner.has_adapters(batch):
            sizes, padding = self.adapted_sizes, self.most_adapted_padding
        size = next((size for size in sizes if size >= tokens), None)
        return None if size is None or size - tokens > padding else size

    def takes_apart(self, batch: Batch) -> bool:
        """Whether this step of decodes and prompts should be launched as two, each a graph."""
        if not self.apart or not batch.num_decodes or self.size_for(batch) is not None:
            return False
        return not self.sees_too_much(batch) and self._smallest(len(batch.token_ids), batch) is not None

    def key_for(self, batch: Batch) -> _Key | None:
        """The graph for this step; None as in ``size_for``."""
        size = self.size_for(batch)
        if size is None:
            return None
        if self.adapted_sizes and self.runner.has_adapters(batch):
            return size, _ADAPTED
        if (size, _WHOLE) in self._graphs and not batch.num_decodes and not batch.num_computed.any():
            return size, _WHOLE
        return size, _FEW if (size, _FEW) in self._graphs and len(batch.slots) < _FEW_ROWS else _ANY

    def picks(self, key: _Key) -> bool:
        """Whether the graph keeps only the hidden states of rows' last tokens."""
        return self._plans[key].last_tokens is not None

    def input_of(self, key: _Key, batch: Batch) -> GraphInput:
        """The graph's input for a step."""
        return self._padded(key, batch.slots, batch.num_computed, batch.num_new, batch.token_ids)

    def _padded(
        self, key: _Key, slots: np.ndarray, computed: np.ndarray, new: np.ndarray, token_ids: np.ndarray
    ) -> GraphInput:
        """``token_ids``: the tokens that the device does not have, which come after those it has."""
        (size, _), packing, n = key, self._staged[key].packing, len(slots)
        packet = np.zeros(packing.words, dtype=np.int32)
        input_ids, query_start, seq_lens, slots_, words, order = packing.cut(packet)
        query_lens = np.zeros(len(slots_), dtype=np.int32)
        np.cumsum(new, out=query_start[1 : n + 1])
        t = int(query_start[n])
        query_start[n + 1 :] = size
        query_lens[:n], query_lens[n] = new, size - t
        seq_lens[:n], seq_lens[n:] = computed + new, 1
        slots_[:n], slots_[n:] = slots, self.runner.num_slots
        input_ids[t - len(token_ids) : t] = token_ids
        words[:] = self.runner.attention.prompt_words(query_lens, seq_lens, size)
        if len(order):
            order[:] = in_order(np.repeat(self.runner.adapter_of[slots_], query_lens))
        return GraphInput(n, t, query_lens, seq_lens, slots_, packet)

    def launch(self, key: _Key, given: GraphInput, decodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch a step whose packet is in ``staging``; the first ``decodes`` rows' tokens are already on the device.
        Returns hidden states, of all tokens (t, hidden_size) or of each row's last (n, hidden_size), and the ``ends``
        of ``prompt_inputs`` for the graph's rows."""
        self._hand_over(key, given)
        staged = self._staged[key]
        if decodes:
            staged.input_ids[:decodes] = self.runner.last_token.index_select(0, staged.slots[:decodes])
        return self._replay(key, given), self._ends(key)

    def _ends(self, key: _Key) -> torch.Tensor:
        rows = len(self._staged[key].slots)
        return self.ends[: 4 * rows].view(4, rows)

    def _hand_over(self, key: _Key, given: GraphInput) -> None:
        plan = self._plans[key]
        plan.host_query_lens, plan.host_seq_lens = given.query_lens, given.seq_lens
        self.runner.hand_over(plan, given.slots)

    def _replay(self, key: _Key, given: GraphInput) -> torch.Tensor:
        self._graphs[key].replay()
        return self._without_padding(self._hidden[key], key, given)

    def _without_padding(self, hidden: torch.Tensor, key: _Key, given: GraphInput) -> torch.Tensor:
        return hidden[: given.num_tokens if len(hidden) == key[0] else given.num_seqs]

    # ------------------------------------------------------------------ proving

    def verify(self, num_blocks: int, vocab_size: int) -> None:
        """Replay every graph once with random tokens, after random contexts unless prompts must be whole, and compare
        with the same step run eagerly. Leaves the cache empty.

        Raises:
            MinivllmError: they differ; the message names backend and size.
        """
        self._compare(num_blocks, vocab_size, lambda key: None)

    @torch.inference_mode()
    def _compare(self, num_blocks: int, vocab_size: int, capture: Callable[[_Key], None]) -> None:
        """``verify``, calling ``capture`` after each graph's eager step, which has loaded what it needs: verification
        adds only a replay. All are captured before the replays; the host waits once."""
        if not self.sizes:
            return
        run, cache = self.runner, self.runner.attention.kv_cache
        rows = min(max(_PROOF_ROWS, cdiv(self._top, self.longest)), run.num_slots, num_blocks)
        per_row = min(num_blocks // rows, run.block_table.shape[1])
        blocks = 1 + np.arange(rows * per_row, dtype=np.int32).reshape(rows, per_row)
        run.host_tables[:rows, :per_row] = blocks
        run.block_table[:rows, :per_row] = torch.from_numpy(blocks).to(run.device)
        contexts = cache[:, :, 1 : 1 + rows * per_row : per_row]  # each row's first block
        values = random_values(contexts.shape, cache)
        rng = np.random.default_rng(0)
        steps = {key: self._random_step(key, blocks, vocab_size, rng) for key in self._plans}

        def hidden(key: _Key, launch: Callable[[_Key, GraphInput], torch.Tensor]) -> torch.Tensor:
            contexts.copy_(values)
            states = launch(key, steps[key])
            return states[:: cdiv(len(states), _COMPARED)]

        def eager(key: _Key, step: GraphInput) -> torch.Tensor:
            with rehearsal():
                return self._without_padding(self._forward(key), key, step)

        expected, differences = {}, {}
        for key in reversed(self._plans):
            self._load(key, steps[key])
            if key[1] == _WHOLE and not run.attention.fresh_prompts:
                continue  # this backend does not treat such steps differently
            expected[key] = hidden(key, eager).clone()
            capture(key)
        for key in reversed(expected):
            self._load(key, steps[key])
            what = f"{key[0]} tokens of prompts" + _TOLD[key[1]]
            differences[what] = difference(expected[key], hidden(key, self._replay))
        check_differences(differences, run.attention)
        cache[:, :, 1 : 1 + rows * per_row] = 0
        run.host_tables[:] = 0
        for used in (run.block_table, self.block_tables, self.staging.words):
            used.zero_()

    def _random_step(self, key: _Key, blocks: np.ndarray, vocab_size: int, rng: np.random.Generator) -> GraphInput:
        """A step that fills the graph as far as ``blocks`` (rows, blocks per row) allow: one new token in the first
        sequence, like a decode, and equally many in each of the others."""
        (size, kind), block_size = key, self.runner.block_size
        n, room = min(len(blocks), size, self._plans[key].num_seqs - 1), blocks.shape[1] * block_size
        room = min(room, self.longest)
        computed = np.minimum(rng.integers(1, block_size + 1, n), room - 1) * (kind != _WHOLE)
        new = np.minimum((size - 1) // (n - 1) if n > 1 else size, room - computed)
        if n > 1:
            new[0] = 1
        slots, ids = np.arange(n, dtype=np.int32), rng.integers(0, vocab_size, new.sum())
        return self._padded(key, slots, computed, new, ids)
