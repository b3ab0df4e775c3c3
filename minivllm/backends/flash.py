"""FlashAttention: the best of its generations and packages that is installed.

All read the paged cache through the block table, with lengths and tables on the device, so that a decode step can be
captured. Prompts that start in the step read its own keys and values, which is faster than the cache. No package is
imported before the backend is built.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend, AttentionLayer, AttentionSpec, Capabilities, CudaGraphs

logger = logging.getLogger("minivllm")

# GQA packing puts the queries of all heads of a kv head in one tile of 128. Prompts of at least this many tokens fill
# tiles with one head, and packing costs more than it saves. Captured steps do not know their prompts and assume it.
_HEADS_APART, _CAPTURED_APART = 96, 4096
# From this many sequences times kv heads, no prompt's keys are split. The kernel that combines splits is launched for
# the longest prompt's query rows in every sequence: 512 rows in 257 sequences, mostly empty, took 230 µs per layer.
_FILLS = 64


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences of one step handled in one call: all its decodes, or all its prompt chunks."""

    query_start: torch.Tensor  # (n + 1,) int32, from 0
    seq_lens: torch.Tensor  # (n,) int32
    key_start: torch.Tensor | None  # (n + 1,) int32: sums of seq_lens, for prompts of ``Kernels.sums_keys``
    block_tables: torch.Tensor  # (n, width) int32
    max_query_len: int
    max_seq_len: int  # an upper bound; for decodes the block table's capacity, constant for graphs
    heads_apart: bool = False  # whether most prompts fill tiles with one head's queries
    whole_keys: bool = False  # whether keys must not be split over programs


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Rows, torch.Tensor], None]  # q, k, v, rows, out


@dataclass(frozen=True, slots=True)
class Kernels:
    """k and v are the layer's caches; for ``fresh``, the rows' own, (tokens, kv heads, head_dim)."""

    decode: Attend
    prefill: Attend
    fresh: Attend | None = None
    sums_keys: bool = False  # whether ``prefill`` needs ``Rows.key_start``


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """FlashAttention's (left, right): how many keys beyond its own a query sees on each side; -1: all."""
    return (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0)


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


def _into(attend: Callable[..., Any], **usual: Any) -> Callable[..., None]:
    """``attend`` as a function of (out, *its arguments), copying only if it cannot write to ``out``."""
    if "out" in inspect.signature(attend).parameters:
        return lambda out, *args, **options: attend(*args, out=out, **options, **usual)
    return lambda out, *args, **options: out.copy_(_first(attend(*args, **options, **usual)))


def _alone(module: str) -> ModuleType:
    """Import a package's module without running the package's ``__init__`` (for sglang-kernel 0.7 s, including
    FlashInfer); if it needs that, with it."""
    package = module.partition(".")[0]
    found = None if package in (module, *sys.modules) else find_spec(package)
    if found is None:
        return import_module(module)
    sys.modules[package] = module_from_spec(found)  # created, but not run
    try:
        return import_module(module)
    except Exception:
        logger.debug("%s needs all of %s", module, package, exc_info=True)
    finally:  # the next import of the package gets all of it
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
    return import_module(module)


def _fa3(module: str, spec: AttentionSpec) -> Kernels:
    package, usual = _alone(module), {"softmax_scale": spec.scale, "causal": True, "window_size": _window(spec)}
    unpacked = "pack_gqa" in inspect.signature(package.flash_attn_varlen_func).parameters and spec.head_dim >= 128
    unsplit = {"num_splits": 1} if "num_splits" in inspect.signature(package.flash_attn_with_kvcache).parameters else {}
    paged, varlen = (_into(f, **usual) for f in (package.flash_attn_with_kvcache, package.flash_attn_varlen_func))

    def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        paged(out[:, None], q[:, None], k, v, cache_seqlens=rows.seq_lens, page_table=rows.block_tables)

    def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        paged(
            out, q, k, v, cache_seqlens=rows.seq_lens, page_table=rows.block_tables,
            cu_seqlens_q=rows.query_start, max_seqlen_q=rows.max_query_len, **(unsplit if rows.whole_keys else {}),
        )  # fmt: skip

    def fresh(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        start, longest = rows.query_start, rows.max_query_len
        varlen(
            out, q, k, v, cu_seqlens_q=start, cu_seqlens_k=start, max_seqlen_q=longest, max_seqlen_k=longest,
            **({"pack_gqa": False} if unpacked and rows.heads_apart else {}),
        )  # fmt: skip

    return Kernels(decode, prefill, fresh)


def _fa4(module: str, spec: AttentionSpec) -> Kernels:
    attend = import_module(module).flash_attn_varlen_func
    window = (None, None) if spec.sliding_window is None else (spec.sliding_window - 1, 0)

    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        result = attend(
            q, k, v, cu_seqlens_q=rows.query_start, max_seqlen_q=rows.max_query_len, max_seqlen_k=rows.max_seq_len,
            seqused_k=rows.seq_lens, page_table=rows.block_tables, softmax_scale=spec.scale, causal=True,
            window_size=window,
        )  # fmt: skip
        out.copy_(_first(result))

    return Kernels(both, both)


def _fa2(module: str, spec: AttentionSpec) -> Kernels:
    package = import_module(module)
    usual = {"softmax_scale": spec.scale, "causal": True, "window_size": _window(spec)}

    def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        result = package.flash_attn_with_kvcache(
            q[:, None], k, v, cache_seqlens=rows.seq_lens, block_table=rows.block_tables, **usual
        )
        out.copy_(_first(result)[:, 0])

    def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        result = package.flash_attn_varlen_func(
            q, k, v, rows.query_start, rows.key_start, rows.max_query_len, rows.max_seq_len,
            block_table=rows.block_tables, **usual,
        )  # fmt: skip
        out.copy_(_first(result))

    def fresh(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        start, longest = rows.query_start, rows.max_query_len
        out.copy_(_first(package.flash_attn_varlen_func(q, k, v, start, start, longest, longest, **usual)))

    return Kernels(decode, prefill, fresh, sums_keys=True)


@dataclass(frozen=True, slots=True)
class Variant:
    """One generation of FlashAttention in one package, and its limits."""

    label: str
    module: str
    build: Callable[[str, AttentionSpec], Kernels]
    generations: tuple[int, ...]  # major compute capabilities
    max_head_dim: int = 256
    block_multiple: int = 1

    def limits(self, spec: AttentionSpec) -> list[str]:
        why = []
        if spec.dtype not in ("bfloat16", "float16"):
            why.append(f"it takes bfloat16 and float16, not {spec.dtype}")
        if spec.head_dim > self.max_head_dim or spec.head_dim % 8:
            why.append(f"it takes head sizes in multiples of 8 up to {self.max_head_dim}, not {spec.head_dim}")
        if spec.block_size % self.block_multiple:
            why.append(f"it takes cache.block_size in multiples of {self.block_multiple}, not {spec.block_size}")
        if torch.cuda.is_available() and (has := torch.cuda.get_device_capability())[0] not in self.generations:
            need = " or ".join(f"{major}.x" for major in self.generations)
            why.append(f"it needs compute capability {need}, this GPU has {has[0]}.{has[1]}")
        return why


VARIANTS = (  # best first
    Variant("FlashAttention-3", "flash_attn_interface", _fa3, (9,)),
    Variant("FlashAttention-3", "sgl_kernel.flash_attn", _fa3, (9,)),
    Variant("FlashAttention-4", "flash_attn.cute", _fa4, (9, 10, 11), max_head_dim=128),
    Variant("FlashAttention-2", "flash_attn", _fa2, (8, 9, 10, 12), block_multiple=256),
)


def installed(module: str) -> bool:
    """Whether a module can be found, without importing it or its package."""
    top, _, rest = module.partition(".")
    try:
        found = find_spec(top)
    except (ImportError, ValueError):
        return False
    if found is None:
        return False
    if not rest:  # flash-attn-4 brings a flash_attn without an __init__.py, which is not FlashAttention-2
        return found.origin is not None
    folders = [Path(p) for p in found.submodule_search_locations or ()]
    return any((f / f"{rest}.py").is_file() or (f / rest / "__init__.py").is_file() for f in folders)


def choose(spec: AttentionSpec) -> tuple[Variant | None, list[str]]:
    """The best variant that can run ``spec``, and why each better one cannot (all, if none can)."""
    why: list[str] = []
    for variant in VARIANTS:
        name = f"{variant.label} ({variant.module})"
        reasons = variant.limits(spec) if installed(variant.module) else ["it is not installed"]
        if not reasons:
            return variant, why
        why.append(f"{name}: {', '.join(reasons)}")
    return None, why


class FlashBackend(AttentionBackend):
    capabilities = Capabilities(
        devices=("cuda",), dtypes=("bfloat16", "float16"), sliding_window=True, cuda_graphs=CudaGraphs.ALWAYS
    )

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        variant, self._passed = choose(spec)
        if variant is None:
            raise ValueError("no FlashAttention can run this: " + "; ".join(self._passed))
        self.variant = variant
        self._kernels = variant.build(variant.module, spec)
        self._decode_rows: Rows | None = None
        self._prompt_rows: Rows | None = None
        self._captured: dict[tuple[str, int], torch.Tensor] = {}  # (kind, length) -> buffer that graphs read
        logger.info(self.describe())

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        why = super().unsupported(spec)
        if not any(installed(v.module) for v in VARIANTS):
            why.append(f"none of the packages {', '.join(v.module for v in VARIANTS)} is installed")
        if why:
            return why
        variant, passed = choose(spec)
        return passed if variant is None else []

    def describe(self) -> str:
        """Which FlashAttention runs, and why a better one does not."""
        why = f" (not {'; not '.join(self._passed)})" if self._passed else ""
        return f"attention=flash is {self.variant.label} from {self.variant.module}{why}"

    def plan(self, batch: AttentionBatch) -> None:
        self.batch, d = batch, batch.num_decodes
        width = batch.block_tables.shape[1] * self.spec.block_size
        self._decode_rows = self._prompt_rows = None
        self.fresh_prompts = False
        if d:
            self._decode_rows = Rows(
                batch.query_start[: d + 1], batch.seq_lens[:d], None, batch.block_tables[:d], 1, width
            )
        if d < batch.num_seqs:
            seq_lens, captured = batch.seq_lens[d:], batch.graph_size
            start = self._query_start(batch) if d else batch.query_start
            whole, query_lens = batch.whole_prompts, batch.host_query_lens[d:]
            self.fresh_prompts = whole and self._kernels.fresh is not None
            self._prompt_rows = Rows(
                start,
                seq_lens,
                start if whole or not self._kernels.sums_keys else self._key_start(batch),
                batch.block_tables[d:],
                captured - d if captured else int(np.max(query_lens)),
                width if captured else int(np.max(batch.host_seq_lens[d:])),
                captured - d >= _CAPTURED_APART if captured else float(np.mean(query_lens)) >= _HEADS_APART,
                len(seq_lens) * self.spec.num_kv_heads > _FILLS,
            )

    def _query_start(self, batch: AttentionBatch) -> torch.Tensor:
        """The prompts' query starts, from 0."""
        start = batch.query_start[batch.num_decodes :]
        return torch.sub(start, batch.num_decodes, out=self._starts("query", len(start), batch))

    def _key_start(self, batch: AttentionBatch) -> torch.Tensor:
        seq_lens = batch.seq_lens[batch.num_decodes :]
        starts = self._starts("key", len(seq_lens) + 1, batch)
        torch.cumsum(seq_lens, 0, out=starts[1:])
        return starts

    def _starts(self, of: str, length: int, batch: AttentionBatch) -> torch.Tensor:
        """(length,) int32 zeros; for a captured step, a static buffer that the graph reads at every replay."""
        if not batch.graph_size:
            return batch.seq_lens.new_zeros(length)
        if (of, length) not in self._captured:
            self._captured[of, length] = batch.seq_lens.new_zeros(length)
        return self._captured[of, length]

    def decode(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        assert self._decode_rows is not None
        k_cache, v_cache = self.kv_cache[layer.index]
        self._kernels.decode(q, k_cache, v_cache, self._decode_rows, out)

    def prefill(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        assert self._prompt_rows is not None
        k_cache, v_cache = self.kv_cache[layer.index]
        self._kernels.prefill(q, k_cache, v_cache, self._prompt_rows, out)

    def prefill_fresh(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        assert self._prompt_rows is not None and self._kernels.fresh is not None
        self._kernels.fresh(q, k, v, self._prompt_rows, out)
