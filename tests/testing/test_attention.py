"""The built-in attention backends, and one with a cache of its own layout, through the suite that plugins run."""

from __future__ import annotations

from dataclasses import replace

import torch

from minivllm.backends.torch import TorchBackend
from minivllm.core.interfaces import AttentionLayer
from minivllm.testing import AttentionConformance

MANY = (  # heads, kv heads, head size, block size
    (4, 2, 128, 16),
    (4, 2, 64, 16),
    (2, 2, 128, 64),
    (2, 2, 64, 256),
    (8, 2, 128, 256),
    (8, 2, 64, 64),
    (5, 1, 128, 16),
    (5, 1, 64, 256),
    (8, 1, 128, 64),
    (8, 1, 64, 16),
    (16, 8, 128, 256),
)
GPU = {"cuda": "bfloat16"}


class TestTorch(AttentionConformance):
    backend = "torch"
    must_run_on = ("cpu", "cuda")


class TestTriton(AttentionConformance):
    backend = "triton"
    must_run_on = ("cuda",)


class TestTritonShapes(AttentionConformance):
    backend = "triton"
    shapes = (*MANY, (4, 2, 128, 1), (4, 2, 80, 16), (3, 1, 96, 4), (4, 2, 256, 16), (4, 2, 16, 16))
    dtypes = GPU


class TestHopper(AttentionConformance):
    backend = "hopper"
    shapes = ((4, 2, 128, 16), (4, 2, 64, 16), (5, 1, 128, 16), (8, 1, 64, 16), (16, 8, 128, 16))
    dtypes = GPU


class TestFlash(AttentionConformance):
    backend = "flash"
    shapes = MANY
    dtypes = GPU
    reads_contexts_only = False


class TestFlashInfer(TestFlash):
    backend = "flashinfer"


class Backwards(TorchBackend):
    """Keeps each block's keys and values last slot first: only what it wrote itself can it read."""

    capabilities = replace(TorchBackend.capabilities, fp8_cache=False)

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer) -> None:
        assert self.batch is not None
        size = self.spec.block_size
        block, slot = self.batch.slot_mapping // size, size - 1 - self.batch.slot_mapping % size
        self.kv_cache[layer.index, 0, block, slot], self.kv_cache[layer.index, 1, block, slot] = k, v

    def decode(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self._flipped(super().decode, q, layer, out)

    def prefill(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self._flipped(super().prefill, q, layer, out)

    def _flipped(self, attend, q, layer, out) -> None:  # type: ignore[no-untyped-def]
        kept = self.kv_cache
        self.kv_cache = kept.flip(3)
        try:
            attend(q, layer, out)
        finally:
            self.kv_cache = kept


class TestOwnLayout(AttentionConformance):
    backend = Backwards
    must_run_on = ("cpu", "cuda")
