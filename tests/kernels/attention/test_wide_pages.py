"""Copies of float8 pages for the kernel of prompts, and the hopper backend, which decides which prompts get some."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from minivllm.backends import hopper
from minivllm.backends.hopper import HopperBackend
from minivllm.backends.select import HybridBackend
from minivllm.backends.triton import TritonBackend
from minivllm.kernels.attention.wide_pages import WidePages
from minivllm.testing.attention import relative_error
from minivllm.testing.steps import LAYER, Step, plan_eager, spec_of

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(("kv_heads", "dim"), [(2, 64), (3, 32), (8, 128)])
def test_each_context_is_copied_page_by_page(where, kv_heads, dim):
    device, dtype = where
    lens = np.array([33, 1, 64, 0], dtype=np.int32)
    cache = torch.randn(2, 20, 16, kv_heads, dim, device=device).to(FP8)
    tables = torch.randperm(20, device=device).int().view(4, 5)
    wide = WidePages(140, 16, kv_heads, dim, device, dtype)
    starts = wide.starts_of(lens)
    assert starts.dtype == np.int32 and starts.tolist() == [0, 3, 4, 8, 8]
    wide.plan(tables, torch.from_numpy(starts).to(device), starts)
    copies = wide.fill(*cache)
    assert copies.dtype == dtype and copies.shape[1] == 9
    for row, pages in enumerate([3, 1, 4, 0]):
        its = copies[:, wide.tables[row, :pages].long()]
        assert torch.equal(its.float(), cache.float()[:, tables[row, :pages].long()])
    assert not copies[:, 8].any(), "nobody's"


def test_contexts_that_are_too_many_get_no_copies():
    wide = WidePages(64, 16, 2, 64, "cpu")
    assert wide.starts_of(np.array([48, 16], np.int32)) is not None
    assert wide.starts_of(np.array([48, 17], np.int32)) is None


def backend_of(monkeypatch, cache_dtype="fp8", **options):
    """One on the CPU, as if the kernels loaded; its cache's shape is ``spec``'s."""
    monkeypatch.setattr(hopper, "loads_prompt_attention", lambda dim, device: True)
    spec = spec_of(4, 2, 64, 16, device="cpu", kv_cache_dtype=cache_dtype, max_num_seqs=16, **options)
    backend = HopperBackend(spec)
    backend.bind(torch.zeros(2, 2, 4, 16, 2, 64).to(spec.cache_dtype))
    return backend


@pytest.mark.parametrize(
    ("queries", "contexts", "captured", "copied"),
    [
        ([200, 70], [300, 70], 0, True),
        ([1], [3000], 0, True),  # one long context, which the other kernel reads tile after tile
        ([20] * 20, [200] * 20, 0, False),  # more is copied than is saved
        ([60] * 20, [200] * 20, 0, True),
        ([200], [300], 256, False),
        ([900], [20_000], 0, False),  # no room
        ([], [], 0, False),
        ([0, 0], [0, 0], 0, False),
    ],
)
def test_prompts_that_see_their_keys_often_get_copies(monkeypatch, queries, contexts, captured, copied):
    backend = backend_of(monkeypatch, max_model_len=4096)
    rows = np.array(queries, np.int32), np.array(contexts, np.int32)
    words = backend.prompt_words(*rows, captured)
    if copied:
        pages = -(-rows[1] // 16)
        assert words[-len(queries) - 1 :].tolist() == [0, *np.cumsum(pages)]
        assert len(words) == 4 * len(backend._prompts.key_parts(*rows)) + len(queries) + 1
    else:
        tiles = super(HopperBackend, backend)._query_tiles(*rows, captured).reshape(-1)
        assert words[: len(tiles)].tolist() == tiles.tolist() and (captured or len(words) == len(tiles))
    in_bfloat16 = backend_of(monkeypatch, "auto", max_model_len=4096)
    assert in_bfloat16._wide is None, "nothing to copy"


def test_long_contexts_are_not_captured_whoever_decodes():
    spec = spec_of(4, 2, 64, 16, device="cpu", kv_cache_dtype="fp8")
    hopper_s, triton_s = HopperBackend(spec), TritonBackend(spec)
    assert HybridBackend(hopper_s, triton_s).most_captured_context == hopper_s.most_captured_context == 8192
    assert HybridBackend(triton_s, hopper_s).most_captured_context is None, "prompts are the other one's"
    assert HopperBackend(replace(spec, kv_cache_dtype="auto")).most_captured_context is None


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_decodes_go_every_fast_way(monkeypatch, cache_dtype):
    backend = backend_of(monkeypatch, cache_dtype, cascade=True)
    assert backend.plain_decode, "all layers may be one kernel"
    assert backend.attends_beside and backend.cascade_limits is not None and backend.takes_qkv(1, False, 64)


def test_a_captured_step_does_not_take_the_eager_one_for_its_own(monkeypatch):
    backend = backend_of(monkeypatch)
    step = Step(backend.spec, [(100, 130)], 0)
    plan_eager(backend, step.batch)
    assert backend._copies and backend._words.numel() % 4 == 0
    plan_eager(backend, replace(step.batch, graph_size=128))
    assert not backend._copies
    plan_eager(backend, Step(backend.spec, [(1, 130)], 1).batch)
    assert not backend._copies, "no prompts"


@pytest.mark.parametrize("lens", [[(130, 300), (80, 80)], [(1, 7), (150, 520)]], ids=str)
def test_prompts_attend_to_their_copies_wherever_it_runs(emulated, monkeypatch, lens):
    if type(hopper.WidePages.fill.__globals__["_widen_kernel"]).__name__ != "InterpretedFunction":
        pytest.skip("Triton was imported without TRITON_INTERPRET=1")
    backend = backend_of(monkeypatch)
    decodes = sum(query == 1 for query, _ in lens)
    step = Step(backend.spec, lens, decodes, poison=True)
    backend.bind(step.cache)
    plan_eager(backend, step.batch)
    backend.batch, q = step.batch, step.q[decodes:]
    out = torch.full_like(q, float("nan"))
    backend.prefill(q, LAYER, out)
    assert relative_error(out, step.expected()[decodes:]) < 1e-2
