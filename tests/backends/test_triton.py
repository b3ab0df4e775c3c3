"""The triton backend on the CPU, under Triton's interpreter, in float32."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

from dataclasses import replace
from types import SimpleNamespace

import pytest
from steps import LAYER, Step, relative_error, spec_of

from minivllm.backends.triton import TritonBackend
from minivllm.kernels.paged_decode import _decode_kernel
from minivllm.layers.attention import Attention

CPU = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 256}
SPEC = spec_of(4, 2, 16, 16, **CPU)
interpreted = pytest.mark.skipif(
    type(_decode_kernel).__name__ != "InterpretedFunction",
    reason="Triton runs without TRITON_INTERPRET=1, or is missing",
)

STEPS = {
    "decodes": ([(1, 40), (1, 1), (1, 130)], 3),
    "prompts": ([(5, 5), (20, 20), (1, 1)], 0),
    "chunks": ([(8, 40), (3, 131)], 0),
    "mixed": ([(1, 17), (1, 33), (9, 9), (4, 60)], 2),
}


@interpreted
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "spec",
    [SPEC, spec_of(5, 1, 32, 4, **CPU), spec_of(4, 4, 64, 64, **CPU), replace(SPEC, sliding_window=12)],
    ids=["usual", "five heads", "one head a group", "window"],
)
def test_every_kind_of_batch_equals_the_reference(step, spec):
    lens, decodes = STEPS[step]
    world = Step(spec, lens, decodes, poison=True)
    assert relative_error(world.run(TritonBackend(spec)), world.expected()) < 1e-5


@interpreted
def test_one_backend_runs_step_after_step():
    backend = TritonBackend(SPEC)
    for seed, name in enumerate([*STEPS, *STEPS]):
        world = Step(SPEC, *STEPS[name], poison=True, seed=seed)
        assert relative_error(world.run(backend), world.expected()) < 1e-5


@interpreted
def test_forward_writes_the_new_keys_and_values_before_it_attends():
    world = Step(SPEC, *STEPS["mixed"], poison=True)
    expected, kept = world.expected(), world.cache.clone()
    b, size = world.batch, SPEC.block_size
    at = b.slot_mapping // size, b.slot_mapping % size
    k, v = world.cache[LAYER.index][(slice(None), *at)]
    world.cache[(LAYER.index, slice(None), *at)] = float("nan")
    backend = TritonBackend(SPEC)
    backend.bind(world.cache)
    backend.plan(b)
    assert relative_error(backend.forward(world.q, k, v, LAYER), expected) < 1e-5
    assert torch.equal(world.cache.nan_to_num(), kept.nan_to_num())


@interpreted
@pytest.mark.parametrize("step", ["decodes", "mixed"])
def test_a_layer_gets_the_same_from_the_fused_decode_as_from_the_separate_kernels(step):
    class Separate(TritonBackend):
        fused_decode_rows = 0

    heads, kv_heads, dim = SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim
    world = Step(SPEC, *STEPS[step])
    rotary = SimpleNamespace(cos_sin=torch.rand(256, dim))
    norm = SimpleNamespace(weight=torch.rand(dim) + 0.5, eps=1e-6)
    layer = Attention(LAYER.index, heads, kv_heads, dim, rotary, scale=SPEC.scale, q_norm=norm, k_norm=norm)
    qkv, b = torch.randn(len(world.q), (heads + 2 * kv_heads) * dim), world.batch
    ends = torch.arange(len(qkv)) - b.query_start[1:].long().repeat_interleave(torch.from_numpy(b.host_query_lens))
    positions = b.seq_lens.long().repeat_interleave(torch.from_numpy(b.host_query_lens)) + ends
    outs, caches = [], []
    for backend in (TritonBackend(SPEC), Separate(SPEC)):
        cache = world.cache.clone()
        backend.bind(cache)
        backend.plan(b)
        outs.append(layer(qkv, positions, backend))
        caches.append(cache)
    assert relative_error(*outs) < 1e-5
    assert relative_error(*caches) < 1e-6


@interpreted
def test_a_later_layer_can_be_the_first_to_attend_after_a_plan():
    world = Step(SPEC, *STEPS["decodes"])
    backend = TritonBackend(SPEC)
    for _ in range(2):
        assert relative_error(world.run(backend), world.expected()) < 1e-5


def test_it_says_what_it_cannot_run(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "TRITON_INTERPRET=1" in TritonBackend.unsupported(SPEC)[0]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonBackend.unsupported(SPEC) == []
    assert "bfloat16" in TritonBackend.unsupported(replace(SPEC, dtype="bfloat16"))[0]
    assert "512" in TritonBackend.unsupported(replace(SPEC, head_dim=512))[0]
    assert "cuda" not in TritonBackend.unsupported(replace(SPEC, head_dim=512))[0]


def test_a_batch_larger_than_planned_for_is_refused():
    world = Step(replace(SPEC, max_num_seqs=1000), [(1, 1)] * 17, 17)
    backend = TritonBackend(SPEC)
    backend.bind(world.cache)
    with pytest.raises(ValueError, match="17 decode rows"):
        backend.plan(world.batch)
