"""Steps of many decodes and a few prompts as one CUDA graph, from the batch's slots to the tokens on the host.

Launched as two (``ModelRunner.launch``), such a step would read the weights twice and launch everything around the
prompts' layers eagerly. Most requests of a busy engine start in such a step. A graph has D (padded) decode rows,
P = ``_PROMPTS`` prompt rows and T (padded) prompt tokens; it samples D rows, in the batch's order. A graph is captured
only after it was wanted a few times: there could be a hundred, and a run needs ten. All ranks choose the same graph.

The input of a step is one int32 packet, see ``core/staging.py``; the device fills in what it knows of the decodes:
# | slots of decode rows, of sampled rows slots, positions sampled for, those computed, hidden rows: (5, D) int64 |
# | input_ids (D + T) int64 | slots of prompt rows (P) | seq_lens (D + P) | query_start (D + P + 1) |
# | the backend's prompt_words |
Static buffers, shared by all graphs: the packet, and, for the largest:
# positions, slot_mapping (D + T,) int64   block_tables (D + P, max_blocks) int32
The prompt row after the last one holds the padding tokens, as in ``core/prompt_graphs.py``.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from minivllm.core.batch import AttentionBatch, Batch, captured_batch
from minivllm.core.cuda_graphs import Kept, capture_graph
from minivllm.core.landing import Packed
from minivllm.core.prompt_graphs import FULL_FLOP
from minivllm.core.staging import Packing, Staging
from minivllm.kernels.capture import loading, rehearsal
from minivllm.kernels.decode_inputs import decode_inputs
from minivllm.kernels.prompt_inputs import prompt_inputs

if TYPE_CHECKING:
    from minivllm.core.cuda_graphs import DecodeGraphs
    from minivllm.core.interfaces import StepHandle
    from minivllm.core.model_runner import ModelRunner
    from minivllm.core.prompt_graphs import PromptGraphs

_Key = tuple[int, int, bool]  # rows, tokens of prompts, and whether all prompts start in the step
_PROMPTS = 8  # one of these rows is for padding
_ROWS = 64  # a graph's rows are a multiple of this, or the most decode rows
_TOKENS = (64, *range(128, 1025, 128), *range(1280, 2049, 256))
_OFTEN = 8  # capture a graph once this many steps wanted it: a capture costs what ten to fifty steps save
_MOST_GRAPHS = 64


class _Staged(NamedTuple):
    """The packet of a graph in ``staging``: its layout, and its arrays on the device."""

    packing: Packing
    rows: torch.Tensor
    input_ids: torch.Tensor
    prompt_slots: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    prompt_words: torch.Tensor


class MixedGraphs:
    """Captures and replays steps of decodes and prompts for one runner."""

    def __init__(self, runner: ModelRunner, decodes: DecodeGraphs, prompts: PromptGraphs, max_tokens: int) -> None:
        self.runner, self._decodes, self._prompts, self.landing = runner, decodes, prompts, decodes.landing
        self.padding, top, device = decodes.padding, decodes.sizes[-1], runner.device
        self._rows = [n for n in decodes.sizes if n % _ROWS == 0 or n == top]
        self._tokens = [size for size in _TOKENS if size <= max_tokens]
        self._most = int(FULL_FLOP / prompts.flop)  # tokens of a step: larger ones hide their launch time
        longest = self._tokens[-1] if self._tokens else 0
        self.staging = Staging(device, self._packing(top, longest).words)
        self.positions, self.slot_mapping = torch.zeros((2, top + longest), dtype=torch.int64, device=device)
        self.block_tables = torch.zeros((top + _PROMPTS, runner.block_table.shape[1]), dtype=torch.int32, device=device)
        self._staged: dict[tuple[int, int], _Staged] = {}
        self._plans: dict[_Key, AttentionBatch] = {}
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
        self._kept: dict[_Key, Kept] = {}
        self._wanted: Counter[_Key] = Counter()

    def _packing(self, rows: int, size: int) -> Packing:
        none = np.zeros(_PROMPTS, dtype=np.int32)
        words = len(self.runner.attention.prompt_words(none, none, size)) if size else 0
        of_rows = (((n,), np.int32) for n in (_PROMPTS, rows + _PROMPTS, rows + _PROMPTS + 1, words))
        return Packing(((5, rows), np.int64), ((rows + size,), np.int64), *of_rows)

    def _staged_of(self, key: _Key) -> _Staged:
        rows, size, _ = key
        if (rows, size) not in self._staged:
            packing = self._packing(rows, size)
            self._staged[rows, size] = _Staged(packing, *packing.cut(self.staging.words))
        return self._staged[rows, size]

    # ------------------------------------------------------------------ choosing

    def key_for(self, batch: Batch) -> _Key | None:
        """The graph for this step. None: a graph would not pay off, or was not wanted often enough yet."""
        key = self._smallest(batch)
        if key is None or self._prompts.sees_too_much(batch) or self._prompts.size_for(batch) is not None:
            return None
        cascade = self.runner.cascade
        if cascade is not None and cascade.plan(batch) is not None:
            return None
        self._wanted[key] += 1
        often = self._wanted[key] >= _OFTEN and len(self._graphs) < _MOST_GRAPHS
        return key if often or key in self._graphs else None

    def _smallest(self, batch: Batch) -> _Key | None:
        n, d, t = len(batch.slots), batch.num_decodes, len(batch.token_ids)
        if not 0 < n - d < _PROMPTS or not d:
            return None
        rows = next((rows for rows in self._rows if rows >= n), None)
        tokens = next((tokens for tokens in self._tokens if tokens >= t), None)
        if rows is None or tokens is None or rows + tokens > self._most:
            return None
        if rows + tokens - d - t > self._prompts.most_padding:
            return None
        return rows, tokens, not batch.num_computed[d:].any() and self._reads_fresh

    @cached_property
    def _reads_fresh(self) -> bool:
        """Whether the backend has a faster path for prompts that start in the step."""
        attention = self.runner.attention
        attention.plan(self._plan((self._rows[0], self._tokens[0], True)))
        return attention.fresh_prompts

    # ------------------------------------------------------------------ ahead

    @torch.inference_mode()
    def launch_all_kinds(self) -> None:
        """Launch the smallest step with the most decode rows, for ``compile_only``: others use the kernels of decode or
        prompt steps. Each prompt row has equally many tokens of the padding slot."""
        if not self._tokens:
            return
        rows, size, _ = key = self._rows[-1], self._tokens[0], False
        plan, lens = self._plan(key), np.repeat([1, size // _PROMPTS], (rows, _PROMPTS)).astype(np.int32)
        plan.host_query_lens[:], plan.host_seq_lens[:] = lens, np.minimum(lens, self._prompts.longest)
        plan.seq_lens.copy_(torch.from_numpy(plan.host_seq_lens))
        plan.query_start[1:].copy_(torch.from_numpy(np.cumsum(lens, dtype=np.int32)))
        self.runner.hand_over(plan, np.full(len(lens), self.padding, dtype=np.int32))
        with rehearsal():
            self._forward(key)

    # ------------------------------------------------------------------ a step

    def launch(self, key: _Key, batch: Batch) -> StepHandle:
        run, n = self.runner, len(batch.slots)
        self._load(key, batch)
        if key not in self._graphs:
            with loading():  # sampling is already loaded: a decode graph samples as many rows
                self._forward(key)
            self._graphs[key], self._kept[key] = capture_graph(partial(self._step, key), self._decodes.pool)
        self.landing.replay(self._graphs[key])
        kept = self._kept[key]
        if run.needs_refine(batch.slots, key[0]):
            return run.sample_when_guided(batch, partial(self._refined, key, kept, batch))
        return self.landing.step(n, run.done(), None if batch.samples.all() else batch.samples)

    def _load(self, key: _Key, batch: Batch) -> None:
        """Copy the step's input to the device, and plan it."""
        (rows, size, _), packing, run = key, self._staged_of(key).packing, self.runner
        n, d, t = len(batch.slots), batch.num_decodes, len(batch.token_ids)
        m, lens, new = n - d, batch.num_computed + batch.num_new, batch.num_new[d:]
        packet = np.zeros(packing.words, dtype=np.int32)
        (decodes, slots, after, ends, last), input_ids, prompt_slots, seq_lens, start, words = packing.cut(packet)
        decodes[:d], decodes[d:] = batch.slots[:d], self.padding
        slots[:n], slots[n:] = batch.slots, self.padding
        after[:n], ends[:n] = lens, lens - 1
        last[:d], last[d:n] = np.arange(d), rows + np.cumsum(new) - 1
        input_ids[rows : rows + t] = batch.token_ids
        prompt_slots[:m], prompt_slots[m:] = batch.slots[d:], self.padding
        query_lens = np.zeros(rows + _PROMPTS, dtype=np.int32)
        query_lens[:rows], query_lens[rows : rows + m], query_lens[rows + m] = 1, new, size - t
        seq_lens[:], seq_lens[:d], seq_lens[rows : rows + m] = 1, lens[:d], lens[d:]
        np.cumsum(query_lens, out=start[1:])
        words[:] = run.attention.prompt_words(query_lens[rows:], seq_lens[rows:], size)
        admission, _ = run.begin(batch, packet, staging=self.staging)
        run.admit(batch, admission)
        plan = self._plan(key)
        plan.host_query_lens, plan.host_seq_lens = query_lens, seq_lens
        run.hand_over(plan, np.append(decodes, prompt_slots))

    def _plan(self, key: _Key) -> AttentionBatch:
        if key not in self._plans:
            (rows, size, whole), seqs, staged = key, key[0] + _PROMPTS, self._staged_of(key)
            self._plans[key] = captured_batch(
                rows, staged.query_start, staged.seq_lens, self.block_tables[:seqs], self.slot_mapping[: rows + size],
                graph_whole=whole,
                last_tokens=staged.rows[4] if size >= rows else None,
                prompt_words=staged.prompt_words,
            )  # fmt: skip
        return self._plans[key]

    def _step(self, key: _Key) -> Kept:
        """What is captured."""
        run, hidden = self.runner, self._forward(key)
        _, slots, after, ends, _ = self._staged_of(key).rows
        tokens, _ = run.sample(hidden, slots, after)
        self.landing.finish(tokens, slots, ends, run.last_token, run.num_computed, self.padding)
        return Kept(hidden, tokens, None)

    def _forward(self, key: _Key) -> torch.Tensor:
        """Hidden states (D, hidden_size) that the step samples from."""
        (rows, size, _), staged, plan, run = key, self._staged_of(key), self._plan(key), self.runner
        decodes, _, _, _, last = staged.rows
        positions, slot_mapping, tables = self.positions[: rows + size], plan.slot_mapping, plan.block_tables
        decode_inputs(
            decodes, run.last_token, run.num_computed, run.block_table, staged.input_ids[:rows], positions[:rows],
            staged.seq_lens[:rows], slot_mapping[:rows], tables[:rows], run.block_size, self._decodes.after[:rows],
        )  # fmt: skip
        prompt_inputs(
            staged.query_start[rows:], staged.seq_lens[rows:], staged.prompt_slots, run.block_table, positions[rows:],
            slot_mapping[rows:], tables[rows:], run.block_size,
        )  # fmt: skip
        hidden = run.model.forward(staged.input_ids, positions, run.attention)
        if len(hidden) == rows + size:  # few tokens, or a model that ignores ``last_tokens``
            hidden = hidden.index_select(0, last)
        return hidden

    def _refined(self, key: _Key, kept: Kept, batch: Batch) -> StepHandle:
        """Run the sampler's ``refine`` for the step just replayed."""
        run, rows = self.runner, np.nonzero(batch.samples)[0]
        (at,) = run.staging.send(rows)
        _, slots, after, _, _ = self._staged_of(key).rows
        hidden, tokens, slots, after = (x.index_select(0, at) for x in (kept.hidden, kept.tokens, slots, after))
        logits = run.model.compute_logits(hidden)
        tokens, logprobs = run.refine(logits, slots, after, tokens, batch.slots[rows])
        run.last_token[slots] = tokens
        return run.land(len(batch.slots), rows, Packed.of(tokens, logprobs))
