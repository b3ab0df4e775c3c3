"""FlashInfer's paged prefill and decode wrappers.

It plans on the host how to split contexts among thread blocks. A plan is written to a pinned staging buffer and copied
to the device on the stream; the buffer may be reused only when the copy is done (an event tells). Eager steps have one
wrapper for prompts and one for decodes, and every captured size has its own; all share one float workspace. The page
tables of a decode step are copied as one packed tensor:

# packed (int32, device, static): | indptr (rows + 1) | last page's length (rows) | page ids |, each 16-byte aligned

Prompts are captured with FlashAttention-3's kernels only: their plans always go to the same addresses, whatever the
lengths. FlashAttention-2's would keep and sum float32 partial results of all tiles that a captured step may have,
hundreds of megabytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend, AttentionLayer, AttentionSpec, Capabilities, CudaGraphs
from minivllm.rounding import cdiv, round_up

KNOWN = ("0.6.12",)  # versions whose internal plan function we call directly: the wrapper's takes ~1 ms at 256 rows
TURNS = 2  # staging buffers, so that a plan need not wait for the previous copy
MORE_ROWS = 16  # at most, of a captured step beyond max_num_seqs: padding, one page each
_PLAN_BYTES = 8 << 20  # of a plan's numbers, at most: FlashInfer's own size of this buffer


def _aligned(n: int) -> int:
    return round_up(n, 4)


class _Pages:
    """Rows of block tables in FlashInfer's format: concatenated page ids, on the host."""

    def __init__(self, seq_lens: np.ndarray, tables: np.ndarray, block_size: int) -> None:
        self.seq_lens = np.maximum(seq_lens, 1).astype(np.int32)  # padding rows: one token of block 0
        counts = cdiv(self.seq_lens, block_size)
        self.indptr = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=self.indptr[1:])
        self.last_len = (self.seq_lens - (counts - 1) * block_size).astype(np.int32)
        width = int(counts.max())
        self.indices = tables[:, :width][np.arange(width) < counts[:, None]]

    def pack(self) -> tuple[torch.Tensor, int, int]:
        """The three arrays in one pinned tensor, and the offsets of the second and third."""
        second = _aligned(len(self.indptr))
        third = second + _aligned(len(self.last_len))
        packed = torch.empty(third + len(self.indices), dtype=torch.int32, pin_memory=True)
        to = packed.numpy()
        to[: len(self.indptr)] = self.indptr
        to[second : second + len(self.last_len)] = self.last_len
        to[third:] = self.indices
        return packed, second, third


class _Staging:
    """The device buffer that plans are copied to, and the pinned buffers that they are written to, used in turn."""

    def __init__(self, device: torch.device) -> None:
        self.device_buffer = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device)
        self._pinned = [torch.empty(_PLAN_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(TURNS)]
        self._copied = [torch.cuda.Event() for _ in range(TURNS)]
        self._turn = 0

    def begin(self, wrapper: Any) -> torch.Tensor:
        """Wait until the next pinned buffer is free, and give it to the wrapper."""
        self._turn = (self._turn + 1) % TURNS
        self._copied[self._turn].synchronize()
        wrapper._int_workspace_buffer = self.device_buffer
        wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]
        return self._pinned[self._turn]

    def end(self) -> None:
        self._copied[self._turn].record()


class FlashInferBackend(AttentionBackend):
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=("bfloat16", "float16"),
        head_dims=(64, 128, 256),
        min_compute_capability=(8, 0),
        sliding_window=True,
        cuda_graphs=CudaGraphs.ALWAYS,
        packages=("flashinfer",),
    )
    plans_on_host = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        import flashinfer

        self._flashinfer = flashinfer
        self.direct = flashinfer.__version__.split("+")[0] in KNOWN
        self.group = spec.num_heads // spec.num_kv_heads
        self.tensor_cores = self.group > 1  # with a single query row per kv head, the CUDA-core kernel is as fast
        hopper = torch.cuda.get_device_capability()[0] == 9
        self.prefill_kernels = "fa3" if hopper and spec.head_dim >= 128 else "fa2"
        self.captures_prompts = self.prefill_kernels == "fa3"
        self.dtype = getattr(torch, spec.dtype)
        self.window_left = -1 if spec.sliding_window is None else spec.sliding_window - 1
        self._graph_decode: dict[int, Any] = {}  # by rows
        self._graph_prefill: dict[tuple[int, int], Any] = {}  # by rows and tokens
        self._float_workspace: torch.Tensor | None = None
        self._decode_wrapper: Any = None  # the ones planned last
        self._prefill_wrapper: Any = None

    # ------------------------------------------------------------------ buffers

    def bind(self, kv_cache: torch.Tensor) -> None:
        super().bind(kv_cache)
        if self._float_workspace is not None:
            return
        s, device = self.spec, kv_cache.device
        self._float_workspace = torch.zeros(self._workspace_bytes(device), dtype=torch.uint8, device=device)
        self._rows = round_up(s.max_num_seqs, 16)
        pages = cdiv(s.max_model_len, s.block_size)
        self._packed = torch.zeros(2 * _aligned(self._rows + 1) + self._rows * pages, dtype=torch.int32, device=device)
        if self.captures_prompts:
            ids = s.max_num_seqs * (pages + 1) + MORE_ROWS
            self._prompt_pages = torch.zeros(ids, dtype=torch.int32, device=device)
        self._query_start = torch.arange(self._rows + 1, dtype=torch.int32)  # on the host, where plans need it
        self._device_query_start = self._query_start.to(device)
        self._graph_staging, self._decode_staging, self._prefill_staging = (_Staging(device) for _ in range(3))
        self._eager_decode, self._eager_prefill = self._new_decode_wrapper(), self._new_prefill_wrapper()

    def _workspace_bytes(self, device: torch.device) -> int:
        """Space for partial results: of decodes (tiles of 16 query rows, one or more per sequence) and of split prompts
        (tiles of 128 query rows, two per SM)."""
        s, blocks = self.spec, 2 * torch.cuda.get_device_properties(device).multi_processor_count
        tile = 16 if self.group <= 16 else 64 if self.group <= 64 else 128
        rows = s.max_num_seqs + 16
        tiles = max(blocks // s.num_kv_heads, math.ceil(rows * self.group / tile) + rows)
        decode = s.num_heads * tiles * tile
        prefill = self.group * blocks * 128
        return max(128 << 20, (max(decode, prefill) * (s.head_dim + 1) * 4 * 17) // 16)

    def _new_decode_wrapper(self, captured_rows: int = 0) -> Any:
        buffers: dict[str, Any] = {}
        if captured_rows:
            second = _aligned(captured_rows + 1)
            third = second + _aligned(captured_rows)
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": self._packed[: captured_rows + 1],
                "paged_kv_last_page_len_buffer": self._packed[second : second + captured_rows],
                "paged_kv_indices_buffer": self._packed[third:],
            }
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._float_workspace, "NHD", use_tensor_cores=self.tensor_cores, backend="auto", **buffers
        )

    def _new_prefill_wrapper(self, captured_rows: int = 0) -> Any:
        buffers: dict[str, Any] = {}
        if captured_rows:
            device = self._prompt_pages.device
            not_read = torch.zeros((3, captured_rows + 1), dtype=torch.int32, device=device)  # required arguments
            buffers = {
                "use_cuda_graph": True,
                "qo_indptr_buf": not_read[0],
                "paged_kv_indptr_buf": not_read[1],
                "paged_kv_last_page_len_buf": not_read[2, :captured_rows],
                "paged_kv_indices_buf": self._prompt_pages,
            }
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._float_workspace, "NHD", backend=self.prefill_kernels, **buffers
        )

    # ------------------------------------------------------------------ planning: once a step, on the host

    def plan(self, batch: AttentionBatch) -> None:
        self.batch, d = batch, batch.num_decodes
        if d:
            pages = _Pages(batch.host_seq_lens[:d], batch.host_block_tables[:d], self.spec.block_size)
            if batch.graph_size:
                if d not in self._graph_decode:
                    self._graph_decode[d] = self._new_decode_wrapper(d)
                self._plan_decode(self._graph_decode[d], self._graph_staging, pages, self._packed)
            else:
                self._plan_decode(self._eager_decode, self._decode_staging, pages, None)
        if d < batch.num_seqs:
            self._plan_prefill(batch)

    def _plan_decode(self, wrapper: Any, staging: _Staging, pages: _Pages, static: torch.Tensor | None) -> None:
        s, rows = self.spec, len(pages.seq_lens)
        device = staging.device_buffer.device
        packed, second, third = pages.pack()
        if static is None:
            on_device = packed.to(device, non_blocking=True)
        else:
            on_device = static[: len(packed)]
            on_device.copy_(packed, non_blocking=True)
        indptr = torch.from_numpy(pages.indptr)
        self._decode_wrapper = wrapper
        pinned = staging.begin(wrapper)
        if self.direct and self.tensor_cores and getattr(wrapper, "_planned", False):
            if static is None:
                wrapper._paged_kv_indptr_buf = on_device[: rows + 1]
                wrapper._paged_kv_last_page_len_buf = on_device[second : second + rows]
                wrapper._paged_kv_indices_buf = on_device[third:]
                wrapper._qo_indptr_buf = self._device_query_start[: rows + 1]
                wrapper._batch_size = rows
            wrapper._plan_info = wrapper._cached_module.plan(
                self._float_workspace,
                staging.device_buffer,
                pinned,
                self._query_start[: rows + 1],
                indptr,
                torch.from_numpy(pages.seq_lens),
                rows,  # query rows
                rows,
                s.num_heads,
                s.num_kv_heads,
                s.block_size,
                static is not None,
                s.head_dim,
                s.head_dim,
                False,  # causal: not needed, the only query is the last token
                self.window_left,
                -1,  # no fixed split size
                False,  # splitting allowed
                0,  # no concurrent kernel
            )
        else:
            wrapper.plan(
                indptr,
                on_device[third:],
                torch.from_numpy(pages.last_len),
                s.num_heads,
                s.num_kv_heads,
                s.head_dim,
                s.block_size,
                window_left=self.window_left,
                q_data_type=self.dtype,
                kv_data_type=self.dtype,
                sm_scale=s.scale,
                seq_lens=torch.from_numpy(pages.seq_lens),
            )
            wrapper._planned = True
        staging.end()

    def _plan_prefill(self, batch: AttentionBatch) -> None:
        s, d = self.spec, batch.num_decodes
        pages = _Pages(batch.host_seq_lens[d:], batch.host_block_tables[d:], s.block_size)
        rows, tokens = len(pages.seq_lens), max(batch.graph_size - d, 0)
        query_start = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(batch.host_query_lens[d:], out=query_start[1:])
        start, indptr, seq_lens = map(torch.from_numpy, (query_start, pages.indptr, pages.seq_lens))
        packed, _, third = pages.pack()
        device = self._prefill_staging.device_buffer.device
        if not tokens:
            wrapper, page_ids = self._eager_prefill, packed.to(device, non_blocking=True)[third:]
        else:
            if (rows, tokens) not in self._graph_prefill:
                self._graph_prefill[rows, tokens] = made = self._new_prefill_wrapper(rows)
                made._max_total_num_rows = tokens  # the first plan may have had fewer
            wrapper, page_ids = self._graph_prefill[rows, tokens], self._prompt_pages[: len(packed) - third]
            page_ids.copy_(packed[third:], non_blocking=True)
        self._prefill_wrapper = wrapper
        pinned = self._prefill_staging.begin(wrapper)
        if tokens and self.direct and wrapper._plan_info is not None:
            wrapper._qo_indptr_last = int(query_start[-1])
            wrapper._plan_info = wrapper._cached_module.plan(
                self._float_workspace,
                self._prefill_staging.device_buffer,
                pinned,
                start,
                indptr,
                seq_lens,
                tokens,  # at most
                rows,
                s.num_heads,
                s.num_kv_heads,
                s.block_size,
                True,  # captured
                s.head_dim,
                s.head_dim,
                True,  # causal
                self.window_left,
            )
        else:
            wrapper.plan(
                start,
                indptr,
                page_ids,
                torch.from_numpy(pages.last_len),
                s.num_heads,
                s.num_kv_heads,
                s.head_dim,
                s.block_size,
                causal=True,
                sm_scale=s.scale,
                window_left=self.window_left,
                q_data_type=self.dtype,
                kv_data_type=self.dtype,
                seq_lens=seq_lens,
                max_token_per_sequence=int(np.max(batch.host_query_lens[d:])),
            )
        self._prefill_staging.end()

    # ------------------------------------------------------------------ attending: once a layer

    def decode(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self._decode_wrapper.run(q, (self.kv_cache[layer.index, 0], self.kv_cache[layer.index, 1]), out=out)

    def prefill(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self._prefill_wrapper.run(q, (self.kv_cache[layer.index, 0], self.kv_cache[layer.index, 1]), out=out)
