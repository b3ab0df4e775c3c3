"""The hopper backend on the CPU, as if its kernels loaded."""

import pytest
import torch

from minivllm.backends import hopper
from minivllm.backends.hopper import HopperBackend
from minivllm.backends.select import HybridBackend
from minivllm.backends.torch import TorchBackend
from minivllm.kernels import nvrtc
from minivllm.testing.steps import LAYER, Step, plan_eager, spec_of

CACHES = pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])


def backend_of(monkeypatch: pytest.MonkeyPatch, cache_dtype: str) -> HopperBackend:
    monkeypatch.setattr(hopper, "loads_prompt_attention", lambda dim, float8, device: float8 == (cache_dtype == "fp8"))
    spec = spec_of(4, 2, 64, 16, device="cpu", kv_cache_dtype=cache_dtype, max_num_seqs=16, cascade=True)
    backend = HopperBackend(spec)
    backend.bind(torch.zeros(2, 2, 4, 16, 2, 64).to(spec.cache_dtype))
    return backend


@CACHES
def test_decodes_go_every_fast_way(monkeypatch: pytest.MonkeyPatch, cache_dtype: str) -> None:
    backend = backend_of(monkeypatch, cache_dtype)
    assert backend.plain_decode, "all layers may be one kernel"
    assert backend.attends_beside and backend.cascade_limits is not None and backend.takes_qkv(1, False, 64)


@CACHES
def test_prompts_go_to_its_own_kernel(monkeypatch: pytest.MonkeyPatch, cache_dtype: str) -> None:
    backend, given = backend_of(monkeypatch, cache_dtype), []
    monkeypatch.setattr(hopper, "prompt_attention", lambda *args: given.append(args))
    step = Step(backend.spec, [(1, 30), (20, 50)], 1)
    plan_eager(backend, step.batch)
    backend.prefill(step.q[1:], LAYER, step.q[1:])
    ((q, k_cache, v_cache, tables, _, _, tiles, *_, decodes),) = given
    assert (q.shape[0], decodes) == (20, 1) and tables is step.batch.block_tables
    assert k_cache.dtype == v_cache.dtype == backend.spec.cache_dtype and tiles.shape == (1, 4)


@CACHES
def test_from_five_decodes_on_a_float8_cache_is_read_by_the_stream(
    monkeypatch: pytest.MonkeyPatch, cache_dtype: str
) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda device: True)
    backend = backend_of(monkeypatch, cache_dtype)
    assert backend.fused_decode_rows == (4 if cache_dtype == "fp8" else 16)


def test_a_backend_of_prompts_says_how_long_contexts_it_would_have_captured() -> None:
    one, other = (TorchBackend(spec_of(4, 2, 64, 16, device="cpu", dtype="float32")) for _ in range(2))
    one.most_captured_context = 100
    assert HybridBackend(one, other).most_captured_context == 100
    assert HybridBackend(other, one).most_captured_context is None
