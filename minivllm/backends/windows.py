"""Attention for models whose layers have different sliding windows: one backend for each window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend, AttentionLayer, AttentionSpec
from minivllm.kernels.rms_norm import RowScale


def for_layers(build: Callable[[AttentionSpec], AttentionBackend], spec: AttentionSpec) -> AttentionBackend:
    """``build(spec)``; where ``spec.layer_windows`` differ, one for each window, combined.

    Raises:
        TypeError: layers differ, and the backend writes the cache in its own way.
    """
    if not spec.layer_windows:
        return build(spec)
    made: dict[int | None, AttentionBackend] = {}
    for window in dict.fromkeys(spec.layer_windows):
        first = spec.layer_windows.index(window)
        made[window] = build(replace(spec, sliding_window=window, layer_windows=(), first_layer=first))
    for backend in made.values():
        if not backend.keeps_cache_write():
            raise TypeError(
                f"{type(backend).__name__} writes the cache in its own way, and layers with different windows share one"
            )
    return WindowedBackend(spec, [made[window] for window in spec.layer_windows])


class WindowedBackend(AttentionBackend):
    """Hands each layer to the backend of its window. All share one cache."""

    def __init__(self, spec: AttentionSpec, of_layers: list[AttentionBackend]) -> None:
        """``of_layers``: each layer's backend; layers with one window have the same one."""
        super().__init__(spec)
        self._of, self._each = of_layers, list(dict.fromkeys(of_layers))
        self.plans_on_host = any(one.plans_on_host for one in self._each)
        self.captures_prompts = all(one.captures_prompts for one in self._each)
        most = [one.most_captured_context for one in self._each if one.most_captured_context is not None]
        self.most_captured_context = min(most, default=None)
        self.fused_decode_rows = min(one.fused_decode_rows for one in self._each)
        self.attends_beside = all(one.attends_beside for one in self._each)
        limits = [one.cascade_limits for one in self._each if one.cascade_limits is not None]
        self.cascade_limits = limits[0] if limits else None  # only layers without a window have some
        # How many of ``prompt_words`` are each one's: of the newest eager step (None), and of captured steps, by their
        # prompt rows and all words.
        self._shares: dict[tuple[int, int] | None, list[int]] = {}

    def bind(self, kv_cache: torch.Tensor) -> None:
        super().bind(kv_cache)
        for one in self._each:
            one.bind(kv_cache)

    def prompt_words(self, query_lens: np.ndarray, seq_lens: np.ndarray, captured: int = 0) -> np.ndarray:
        words = [one.prompt_words(query_lens, seq_lens, captured) for one in self._each]
        together = np.concatenate(words)
        key = (len(query_lens), len(together)) if captured else None
        self._shares[key] = [len(its) for its in words]
        return together

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = batch
        words = [batch.prompt_words] * len(self._each)
        if batch.prompt_words is not None and self._shares:  # else they are another backend's, which does the prompts
            key = batch.num_seqs - batch.num_decodes, len(batch.prompt_words)
            words = list(batch.prompt_words.split(self._shares[key if batch.graph_size else None]))
        for one, its in zip(self._each, words, strict=True):
            cascade = batch.cascade if one.cascade_limits is not None else None
            one.plan(replace(batch, prompt_words=its, cascade=cascade))
        self.fresh_prompts = any(one.fresh_prompts for one in self._each)

    def decode(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self._of[layer.index].decode(q, layer, out)

    def prefill(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self._of[layer.index].prefill(q, layer, out)

    def prefill_fresh(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        one = self._of[layer.index]
        if one.fresh_prompts:
            one.prefill_fresh(q, k, v, layer, out)
        else:
            one.prefill(q, layer, out)

    def takes_qkv(self, rows: int, scaled: bool, rotary_dim: int) -> bool:
        return all(one.takes_qkv(rows, scaled, rotary_dim) for one in self._each)

    def decode_qkv(
        self, qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float,
        cos_sin: torch.Tensor, positions: torch.Tensor, layer: AttentionLayer, scale: RowScale | None = None,
    ) -> torch.Tensor:  # fmt: skip
        more = {} if scale is None else {"scale": scale}
        return self._of[layer.index].decode_qkv(qkv, q_weight, k_weight, eps, cos_sin, positions, layer, **more)
