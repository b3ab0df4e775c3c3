"""What the suite for attention backends does not vary, for triton: on the CPU, under Triton's interpreter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from minivllm.backends.select import HybridBackend
from minivllm.backends.torch import TorchBackend
from minivllm.backends.triton import TritonBackend
from minivllm.core.interfaces import AttentionBackend
from minivllm.kernels.attention.paged_decode import _decode_kernel
from minivllm.testing.steps import Step, relative_error, spec_of

CPU = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 256}
SPEC = spec_of(4, 2, 16, 16, **CPU)  # the smallest head
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
    [SPEC, spec_of(5, 1, 32, 4, **CPU), spec_of(4, 4, 64, 64, **CPU)],
    ids=["usual", "five heads", "one head a group"],
)
def test_every_kind_of_batch_equals_the_reference(step, spec):
    lens, decodes = STEPS[step]
    world = Step(spec, lens, decodes, poison=True)
    assert relative_error(world.run(TritonBackend(spec)), world.expected()) < 1e-5


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


class Delegates(AttentionBackend):
    """To a backend of ours, all but what its prompts need."""

    def __init__(self, spec):
        super().__init__(spec)
        self.inner = TritonBackend(spec)

    def bind(self, kv_cache):
        super().bind(kv_cache)
        self.inner.bind(kv_cache)

    def plan(self, batch):
        self.batch = batch
        self.inner.plan(batch)

    def decode(self, *args):
        self.inner.decode(*args)

    def prefill(self, *args):
        self.inner.prefill(*args)


class DelegatesAll(Delegates):
    def prompt_words(self, *args):
        return self.inner.prompt_words(*args)


@interpreted
def test_who_delegates_and_hands_no_prompt_words_on_is_told():
    world = Step(SPEC, *STEPS["mixed"])
    assert relative_error(world.run(DelegatesAll(SPEC)), world.expected()) < 1e-5
    with pytest.raises(ValueError, match="forwards prompt_words as well as plan"):
        world.run(Delegates(SPEC))


class OwnDecode(TritonBackend):
    def decode(self, *args):
        super().decode(*args)


class OwnPlan(TritonBackend):
    def plan(self, batch):
        super().plan(batch)


class OwnPrefill(TritonBackend):
    def prefill(self, *args):
        super().prefill(*args)


def test_a_kernel_of_all_layers_may_decode_in_its_place_unless_it_is_asked_for_something_else():
    plain = TritonBackend(SPEC)
    assert plain.plain_decode and HybridBackend(TorchBackend(SPEC), plain).plain_decode
    assert not TritonBackend(replace(SPEC, sliding_window=64)).plain_decode
    assert not OwnDecode(SPEC).plain_decode and not OwnPlan(SPEC).plain_decode
    assert not HybridBackend(plain, TorchBackend(SPEC)).plain_decode, "decodes are the other one's"


def test_prompts_attend_beside_decodes_where_both_are_its_own_or_prompts_another_backends():
    plain = TritonBackend(SPEC)
    assert plain.attends_beside and HybridBackend(TorchBackend(SPEC), plain).attends_beside
    assert not OwnDecode(SPEC).attends_beside, "who knows what memory that shares with prefill"
    assert not OwnPrefill(SPEC).attends_beside and OwnPrefill(SPEC).plain_decode
    assert not HybridBackend(plain, TorchBackend(SPEC)).attends_beside


@pytest.mark.parametrize(
    ("rows", "kernel"), [(1, "paged_decode_triton"), (4, "paged_decode_triton"), (5, "stream_decode")]
)
def test_few_queries_are_not_streamed(rows: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, which the stream is for: one long context is read by more programs without it."""
    called: list[str] = []
    for name in ("schedule_stream", "stream_decode", "schedule_decode", "paged_decode_triton"):
        note = partial(lambda its_name, *args, **keywords: called.append(its_name), name)
        monkeypatch.setattr(f"minivllm.backends.triton.{name}", note)
    world = Step(SPEC, [(1, 40)] * rows, rows)
    backend = TritonBackend(SPEC)
    backend.bind(world.cache)
    backend._stream = SimpleNamespace(takes_heads=lambda: True)  # type: ignore[assignment]
    backend.plan(world.batch)
    for index in range(2):
        backend.decode(world.q, SimpleNamespace(index=index), torch.empty_like(world.q))  # type: ignore[arg-type]
    assert set(called[1:]) == {kernel} and called[0].startswith("schedule")
