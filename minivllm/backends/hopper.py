"""Attention on Hopper GPUs with minivllm's own kernels only: prompts with wgmma, decodes as in the triton backend.

The wgmma kernel reads bfloat16. Of a float8 cache, prompts in steps that are not captured get copies of the pages that
they see, if that saves more than it costs; all others attend as in the triton backend.
"""

from __future__ import annotations

import numpy as np
import torch

from minivllm.backends.triton import TritonBackend
from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionLayer, AttentionSpec, Capabilities, CudaGraphs
from minivllm.kernels import nvrtc
from minivllm.kernels._triton import compiling
from minivllm.kernels.attention.prompt_attention import (
    HEAD_DIMS,
    PAGE,
    PromptWorkspace,
    loads_prompt_attention,
    prompt_attention,
)
from minivllm.kernels.attention.wide_pages import WidePages
from minivllm.rounding import cdiv

_COPIED_BYTES = 1 << 30  # of pages that are copied, at most
# What copying a key costs, in what it saves: so many queries see it, or the longest context is a so-manieth of all
# keys (the triton backend's kernel goes through a context one tile after another).
_QUERIES_A_COPY, _LATENCY_A_COPY = 50, 16
_CAPTURED_CONTEXT = 8192  # longer ones of a float8 cache are read faster by copies, though launched one by one


class HopperBackend(TritonBackend):
    """The choice of ``auto`` where it is supported: faster than FlashAttention-3, except for single prompts of many
    thousand tokens, where it is about as fast (docs/performance-log.md)."""

    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=("bfloat16",),
        head_dims=HEAD_DIMS,
        block_sizes=(PAGE,),
        min_compute_capability=(9, 0),
        cuda_graphs=CudaGraphs.ALWAYS,
        packages=("triton", "cuda.bindings"),
        fp8_cache=True,
    )

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._prompts: PromptWorkspace | None = None
        self._wide: WidePages | None = None  # of a float8 cache
        self._starts: np.ndarray | None = None  # ``starts_of`` the newest eager step's prompts, if they get copies
        self._copies = False  # whether this step's do
        if spec.kv_cache_dtype == "fp8":
            self.most_captured_context = _CAPTURED_CONTEXT
        self.attends_beside = self.plain_decode and type(self).prefill is HopperBackend.prefill

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        why = super(TritonBackend, cls).unsupported(spec)
        if not why and not nvrtc.available(torch.device(spec.device)):
            why.append("it needs a Hopper GPU (compute capability 9.0), and a CUDA build of torch")
        return why

    def bind(self, kv_cache: torch.Tensor) -> None:
        super().bind(kv_cache)
        if self._prompts is None:
            s = self.spec
            self._prompts = PromptWorkspace(s.num_heads, s.num_kv_heads, s.head_dim, kv_cache.device)
            if s.kv_cache_dtype == "fp8":
                token_bytes = 4 * s.num_kv_heads * s.head_dim  # of keys and values in bfloat16
                tokens = min(s.max_model_len + s.max_num_batched_tokens, _COPIED_BYTES // token_bytes)
                self._wide = WidePages(tokens, s.block_size, s.num_kv_heads, s.head_dim, kv_cache.device)

    def _loads(self) -> bool:
        """Whether the wgmma kernel loads; if not, prompts use the Triton kernel."""
        return loads_prompt_attention(self.spec.head_dim, self.kv_cache.device)

    def prompt_words(self, query_lens: np.ndarray, seq_lens: np.ndarray, captured: int = 0) -> np.ndarray:
        """The query tiles; then, if prompts get copies, the pages before each row's."""
        if captured:
            return super().prompt_words(query_lens, seq_lens, captured)
        self._starts = self._starts_of(query_lens, seq_lens)
        words = super().prompt_words(query_lens, seq_lens)
        return words if self._starts is None else np.concatenate((words, self._starts))

    def _starts_of(self, query_lens: np.ndarray, seq_lens: np.ndarray) -> np.ndarray | None:
        """None: such prompts get no copies."""
        if self._wide is None or not len(seq_lens) or not self._loads():
            return None
        pairs = np.dot(query_lens.astype(np.int64), seq_lens)
        saved = max(pairs / _QUERIES_A_COPY, _LATENCY_A_COPY * int(seq_lens.max()))
        return self._wide.starts_of(seq_lens) if saved > seq_lens.sum(dtype=np.int64) else None

    def _query_tiles(self, query_lens: np.ndarray, seq_lens: np.ndarray, captured: int) -> np.ndarray:
        assert self._prompts is not None
        reads = self._wide is None or (not captured and self._starts is not None)
        if not reads or not self._loads():
            return super()._query_tiles(query_lens, seq_lens, captured)
        return self._prompts.key_parts(query_lens, seq_lens)

    def _most_words(self, tokens: int, rows: int) -> int:
        assert self._prompts is not None
        ours, theirs = self._prompts.most_tiles(tokens, rows), super()._most_words(tokens, rows)
        return 4 * max(ours, cdiv(theirs, 4))  # whichever kernel reads them

    def _plan_prompts(self, batch: AttentionBatch) -> None:
        d = batch.num_decodes
        self._copies = self._starts is not None and not batch.graph_size and d < batch.num_seqs
        if self._copies:
            assert self._words is not None and self._wide is not None and self._starts is not None
            self._words, starts = self._words[: -len(self._starts)], self._words[-len(self._starts) :]
            self._wide.plan(batch.block_tables[d:], starts, self._starts)

    def prefill(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        if not self._loads() or (self._wide is not None and not self._copies):
            super().prefill(q, layer, out)
            return
        batch = self.batch
        assert batch is not None and self._prompts is not None
        (k_cache, v_cache), d = self.kv_cache[layer.index], batch.num_decodes
        rows = batch.block_tables, batch.query_start, batch.seq_lens
        if self._wide is not None:
            if compiling():  # other steps' prompts read the cache itself
                super().prefill(q, layer, out)
            k_cache, v_cache = self._wide.fill(k_cache, v_cache)
            rows, d = (self._wide.tables, batch.query_start[d:], batch.seq_lens[d:]), 0
        prompt_attention(q, k_cache, v_cache, *rows, self._tiles(4), self.spec.scale, out, self._prompts, d)
