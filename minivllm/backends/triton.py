"""Attention with minivllm's own kernels: no other package, any GPU that Triton supports; on Hopper, one is CUDA C++."""

from __future__ import annotations

import os

import numpy as np
import torch

from minivllm.core.batch import AttentionBatch
from minivllm.core.cascade import CascadeLimits
from minivllm.core.interfaces import AttentionBackend, AttentionLayer, AttentionSpec, Capabilities, CudaGraphs
from minivllm.kernels.attention.cascade import (
    BLOCK_M,
    BLOCK_N,
    CascadeWorkspace,
    attend_cascade,
    own_contexts,
    programs_a_head,
)
from minivllm.kernels.attention.paged_decode import DecodeWorkspace, NewTokens, paged_decode_triton, schedule_decode
from minivllm.kernels.attention.paged_prefill import paged_prefill_triton, prefill_config, query_tiles
from minivllm.kernels.attention.stream_decode import StreamWorkspace, fits_stream, schedule_stream, stream_decode
from minivllm.kernels.rms_norm import RowScale
from minivllm.rounding import cdiv, round_up

_CASCADE_BYTES = 320 << 20  # keys and values per layer, 25-40 µs to read, mostly from L2: two more kernels pay off


class TritonBackend(AttentionBackend):
    capabilities = Capabilities(
        devices=("cuda",),
        min_compute_capability=(8, 0),
        sliding_window=True,
        cuda_graphs=CudaGraphs.ALWAYS,
        packages=("triton",),
        fp8_cache=True,
    )
    fused_decode_rows = 16  # in the Triton kernel; beyond, normalizing q in every program costs more than a kernel
    few_decode_rows = 4  # rows; here one long context is spread over more programs than the stream kernel would

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        ways = ("plan", "decode", "decode_qkv", "_decode")
        kept = all(getattr(type(self), name) is getattr(TritonBackend, name) for name in ways)
        self.plain_decode = kept and spec.sliding_window is None
        self.attends_beside = kept and type(self).prefill is TritonBackend.prefill
        self.group = spec.num_heads // spec.num_kv_heads
        self.prefill_config = prefill_config(spec.head_dim, self.group, getattr(torch, spec.dtype))
        self.max_rows = round_up(spec.max_num_seqs, 16)  # captured batches are padded
        self._workspace: DecodeWorkspace | None = None
        self._stream: StreamWorkspace | None = None  # if its kernel can run: for rows that are not fused
        self._fits_stream = fits_stream(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size, torch.device(spec.device),
            spec.sliding_window, self.max_rows, getattr(torch, spec.dtype), spec.cache_dtype,
        )  # fmt: skip
        if self._fits_stream and spec.kv_cache_dtype == "fp8":
            self.fused_decode_rows = self.few_decode_rows  # the Triton kernel reads float8 at 2.7 TB/s
        self.cascade_limits = self._cascade_limits() if kept and spec.cascade else None
        self._cascade: CascadeWorkspace | None = None
        self._own: tuple[torch.Tensor, torch.Tensor] | None = None  # for this step's cascade: tables and lengths
        self._scheduled: DecodeWorkspace | StreamWorkspace | None = None  # the one that holds this step's schedule
        self._words: torch.Tensor | None = None  # ``prompt_words`` of the step

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        why = super().unsupported(spec)
        if spec.device == "cpu":
            why = [reason for reason in why if not reason.startswith("it runs on")]
            if os.environ.get("TRITON_INTERPRET") != "1":
                why.insert(0, "on a CPU it runs only under TRITON_INTERPRET=1, for tests")
            elif spec.dtype != "float32":
                why.append(f"under TRITON_INTERPRET=1 it takes float32, not {spec.dtype}")
        elif spec.kv_cache_dtype == "fp8":
            if spec.dtype == "float32":  # tiles that are widened would not fit in shared memory
                why.append("it reads a cache in float8 with dtype bfloat16 or float16, not float32")
            if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
                why.append("it reads a cache in float8 on GPUs of compute capability 8.9 and later")
        if not 16 <= spec.head_dim <= 256:
            why.append(f"it takes head sizes from 16 to 256, not {spec.head_dim}")
        return why

    def bind(self, kv_cache: torch.Tensor) -> None:
        super().bind(kv_cache)
        if self._workspace is None:
            s = self.spec
            self._workspace = DecodeWorkspace(
                self.max_rows,
                s.num_heads,
                s.num_kv_heads,
                s.head_dim,
                kv_cache.dtype,
                kv_cache.device,
                s.sliding_window,
                max_len=s.max_model_len,
            )
            if self._fits_stream:
                self._stream = StreamWorkspace(
                    self.max_rows, s.num_heads, s.num_kv_heads, s.head_dim, kv_cache.device, s.kv_cache_dtype == "fp8"
                )
            if self.cascade_limits is not None:
                blocks = cdiv(s.max_model_len, s.block_size)
                self._cascade = CascadeWorkspace(
                    self.max_rows, self.cascade_limits.parts, blocks, s.num_heads, s.head_dim, kv_cache.device
                )

    def _cascade_limits(self) -> CascadeLimits | None:
        """None: cascades are not supported."""
        s = self.spec
        if s.sliding_window is not None or self.group > BLOCK_M:
            return None
        beside, alone = (programs_a_head(s.num_kv_heads, torch.device(s.device), beside) for beside in (True, False))
        key_bytes = 2 * s.num_kv_heads * s.head_dim * s.cache_dtype.itemsize
        return CascadeLimits(
            rows=BLOCK_M // self.group,
            keys=BLOCK_N,
            beside=beside,
            alone=alone,
            items=2 * alone + self.max_rows,
            parts=max(4 * self.max_rows, 1024),
            saved_keys=_CASCADE_BYTES // key_bytes,
        )

    @property
    def tile_tokens(self) -> int:
        """Query tokens per tile of ``prefill``."""
        return self.prefill_config.block_m // self.group

    def _query_tiles(self, query_lens: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """The query tiles of the step's prompt rows, for ``prefill``."""
        return query_tiles(query_lens, seq_lens, self.tile_tokens)

    def _most_words(self, tokens: int, rows: int) -> int:
        """The most words that the tiles of this many tokens in this many rows can take."""
        return 2 * (tokens // self.tile_tokens + rows)

    def prompt_words(self, query_lens: np.ndarray, seq_lens: np.ndarray, captured: int = 0) -> np.ndarray:
        """The query tiles; for a captured step, padded with -1."""
        if not captured:
            return self._query_tiles(query_lens, seq_lens).reshape(-1)
        words = np.full(self._most_words(captured, len(query_lens)), -1, dtype=np.int32)
        if query_lens.any():  # else only the size is asked for, which need not wait for a compiler
            tiles = self._query_tiles(query_lens, seq_lens)
            words[: tiles.size] = tiles.reshape(-1)
        return words

    def plan(self, batch: AttentionBatch) -> None:
        if batch.num_decodes > self.max_rows:
            raise ValueError(f"{batch.num_decodes} decode rows, planned for {self.max_rows} (max_num_seqs)")
        self.batch, self._scheduled, self._words = batch, None, batch.prompt_words
        d = batch.num_decodes
        if self._words is None and d < batch.num_seqs:
            words = self.prompt_words(batch.host_query_lens[d:], batch.host_seq_lens[d:])
            self._words = torch.from_numpy(words).to(batch.seq_lens.device)

    def _tiles(self, numbers: int) -> torch.Tensor:
        """The step's tiles, (m, numbers) int32. Raises ValueError if the batch's ``prompt_words`` were not set."""
        assert self._words is not None
        if not len(self._words):
            raise ValueError(
                f"{type(self).__name__} is to attend for prompts and has no prompt_words; a backend that delegates to "
                "it forwards prompt_words as well as plan"
            )
        return self._words.view(-1, numbers)

    def decode(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self._decode(q, layer, out, None)

    def decode_qkv(
        self, qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float,
        cos_sin: torch.Tensor, positions: torch.Tensor, layer: AttentionLayer, scale: RowScale | None = None,
    ) -> torch.Tensor:  # fmt: skip
        assert self.batch is not None
        out = qkv.new_empty((qkv.shape[0], self.spec.num_heads, self.spec.head_dim))
        new = NewTokens(q_weight, k_weight, eps, cos_sin, positions, self.batch.slot_mapping, scale)
        self._decode(qkv, layer, out, new)
        return out

    def takes_qkv(self, rows: int, scaled: bool, rotary_dim: int) -> bool:
        if self.batch is not None and self.batch.cascade is not None:
            return False
        if not self.fused_decode_rows or (rows <= self.fused_decode_rows and not scaled):
            return super().takes_qkv(rows, scaled, rotary_dim)
        return self._stream is not None and rotary_dim == self.spec.head_dim and self._stream.takes_qkv()

    def _decode(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor, new: NewTokens | None) -> None:
        batch, workspace, stream = self.batch, self._workspace, self._stream
        assert batch is not None and workspace is not None
        rows, (k_cache, v_cache), cascade = q.shape[0], self.kv_cache[layer.index], batch.cascade
        if stream is not None:
            if new is None:
                suits = rows > self.few_decode_rows and stream.takes_heads()
            else:
                suits = new.scale is not None or rows > self.fused_decode_rows
            suits = suits if cascade is None else stream.takes_shared()
            stream = stream if suits else None
        holder = stream or workspace
        # The first layer always schedules, as capture follows an eager step with the same plan.
        first = layer.index == self.spec.first_layer or self._scheduled is not holder
        self._scheduled = holder
        tables, lens, shared = batch.block_tables, batch.seq_lens, None
        if cascade is not None:
            assert self._cascade is not None
            if first:
                self._own = own_contexts(self._cascade, cascade, tables, lens, self.spec.block_size)
            shared = attend_cascade(q, k_cache, v_cache, tables, cascade, self.spec.scale, self._cascade)
            assert self._own is not None
            tables, lens = self._own
        args = (q, k_cache, v_cache, tables, lens, self.spec.scale, out)
        if stream is not None:
            if first:
                schedule_stream(stream, tables, lens, rows)
            stream_decode(*args, stream, new, early=not first, shared=shared)
            return
        if first:
            schedule_decode(workspace, lens, rows)
        paged_decode_triton(*args, workspace, new, early=not first, shared=shared)

    def prefill(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        batch = self.batch
        assert batch is not None
        k_cache, v_cache = self.kv_cache[layer.index]
        paged_prefill_triton(
            q,
            k_cache,
            v_cache,
            batch.block_tables,
            batch.query_start,
            batch.seq_lens,
            self._tiles(2),
            self.spec.scale,
            out,
            self.prefill_config,
            batch.num_decodes,
            self.spec.sliding_window,
        )
