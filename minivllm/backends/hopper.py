"""Attention on Hopper GPUs with minivllm's own kernels only: prompts with wgmma, decodes as in the triton backend."""

from __future__ import annotations

import numpy as np
import torch

from minivllm.backends.triton import TritonBackend
from minivllm.core.interfaces import AttentionLayer, AttentionSpec, Capabilities, CudaGraphs
from minivllm.kernels import nvrtc
from minivllm.kernels.attention.prompt_attention import (
    HEAD_DIMS,
    PAGE,
    PromptWorkspace,
    loads_prompt_attention,
    prompt_attention,
)
from minivllm.rounding import cdiv


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

    def _loads(self) -> bool:
        """Whether the wgmma kernel loads; if not, prompts use the Triton kernel."""
        return loads_prompt_attention(self.spec.head_dim, self.spec.kv_cache_dtype == "fp8", self.kv_cache.device)

    def _query_tiles(self, query_lens: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        assert self._prompts is not None
        if not self._loads():
            return super()._query_tiles(query_lens, seq_lens)
        return self._prompts.key_parts(query_lens, seq_lens)

    def _most_words(self, tokens: int, rows: int) -> int:
        assert self._prompts is not None
        ours, theirs = self._prompts.most_tiles(tokens, rows), super()._most_words(tokens, rows)
        return 4 * max(ours, cdiv(theirs, 4))  # whichever kernel reads them

    def prefill(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        if not self._loads():
            super().prefill(q, layer, out)
            return
        batch = self.batch
        assert batch is not None and self._prompts is not None
        k_cache, v_cache = self.kv_cache[layer.index]
        rows = batch.block_tables, batch.query_start, batch.seq_lens
        prompt_attention(
            q, k_cache, v_cache, *rows, self._tiles(4), self.spec.scale, out, self._prompts, batch.num_decodes
        )
