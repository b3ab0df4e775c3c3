"""FlashAttention's backend around kernels of torch: what it hands them, and when it reads the step's own keys."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import PagedRun, attention_spec, reference_tokens

from minivllm.backends import flash
from minivllm.backends.flash import FlashBackend, Variant
from minivllm.backends.select import HybridBackend
from minivllm.backends.torch import TorchBackend
from minivllm.core.interfaces import AttentionBackend, AttentionSpec
from minivllm.core.parallel import TensorParallel
from minivllm.kernels.attention.paged_prefill import paged_attention_reference
from minivllm.layers.linear import _StackedLinear
from minivllm.models.checkpoint import read_model_config
from minivllm.models.loader import build_model, iterate_safetensors
from minivllm.models.qwen3 import Qwen3ForCausalLM
from minivllm.testing.attention import SMALL
from minivllm.testing.steps import Step, relative_error, spec_of

Checkpoints = Callable[..., Path]
SPEC = spec_of(4, 2, 32, 4, device="cpu", dtype="float32", max_model_len=256)
FRESH = {"prompts", "decodes and whole prompts"}


class Package(ModuleType):
    """FlashAttention's functions as its three generations have them, and what they were called for."""

    def __init__(self, *, out: bool) -> None:
        super().__init__("fake_flash")
        self.calls: list[str] = []
        self.takes_packing, self.packs = out, list[bool | None]()
        self.splits: list[int] = []  # of prompts
        if out:
            self.flash_attn_varlen_func = self._varlen_out
            self.flash_attn_with_kvcache = self._kvcache_out
        else:
            self.flash_attn_varlen_func = lambda *a, **k: self._varlen(*a, **k)
            self.flash_attn_with_kvcache = lambda *a, **k: self._kvcache(*a, **k)

    def _varlen_out(self, *args: Any, out: torch.Tensor, pack_gqa: bool | None = None, **options: Any) -> torch.Tensor:
        self.packs.append(pack_gqa)
        return out.copy_(self._varlen(*args, **options))

    def _kvcache_out(self, *args: Any, out: torch.Tensor, num_splits: int = 0, **options: Any) -> torch.Tensor:
        self.splits += [num_splits] if "cu_seqlens_q" in options else []
        return out.copy_(self._kvcache(*args, **options))

    def _varlen(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float, causal: bool,
        window_size: tuple[int, int], block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        assert causal and k.stride(-1) == v.stride(-1) == 1
        assert int(cu_seqlens_q.diff().max()) == max_seqlen_q and int(cu_seqlens_k.diff().max()) == max_seqlen_k
        assert int(cu_seqlens_q[-1]) == len(q)
        self.calls.append("varlen" if block_table is None else "paged")
        if block_table is None:  # blocks of one token
            assert len(k) == len(v) == int(cu_seqlens_k[-1])
            k, v = k[:, None], v[:, None]
            at = torch.arange(max_seqlen_k)
            block_table = (cu_seqlens_k[:-1, None] + at).clamp_max(len(k) - 1)
        return attend(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k.diff(), softmax_scale, window_size)

    def _kvcache(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cache_seqlens: torch.Tensor, softmax_scale: float,
        causal: bool, window_size: tuple[int, int], page_table: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        tables = page_table if page_table is not None else block_table
        assert causal and tables is not None
        if cu_seqlens_q is None:  # decodes: (n, 1, heads, head_dim)
            self.calls.append("decode")
            start = torch.arange(len(q) + 1)
            return attend(q[:, 0], k, v, tables, start, cache_seqlens, softmax_scale, window_size)[:, None]
        assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
        self.calls.append("paged")
        return attend(q, k, v, tables, cu_seqlens_q, cache_seqlens, softmax_scale, window_size)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, start: torch.Tensor, lens: torch.Tensor,
    scale: float, window: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    assert window == (-1, -1) or window[1] == 0
    sliding = None if window[0] < 0 else window[0] + 1
    return paged_attention_reference(q.float(), k.float(), v.float(), tables, start, lens, scale, sliding).to(q)


GENERATIONS = {"FA3 of sgl_kernel": (flash._fa3, True), "FA3": (flash._fa3, False), "FA2": (flash._fa2, False)}


@pytest.fixture(params=GENERATIONS)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Package:
    """The one that ``FlashBackend`` finds."""
    build, out = GENERATIONS[request.param]
    fake = Package(out=out)
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(flash, "choose", lambda spec: (Variant(request.param, fake.__name__, build, (9,)), []))
    return fake


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("name", SMALL)
def test_equals_attention_written_out(package: Package, name: str, window: int | None) -> None:
    spec = replace(SPEC, sliding_window=window)
    step = Step(spec, *SMALL[name], poison=True)
    backend = FlashBackend(spec)
    assert relative_error(step.run(backend), step.expected()) < 2e-5  # of both ways, where there are two
    assert backend.fresh_prompts == (name in FRESH)
    assert ("varlen" in package.calls) == (name in FRESH)


@pytest.mark.parametrize(("head_dim", "mean"), [(128, 8), (128, 9), (64, 8)])
def test_heads_of_long_prompts_go_apart(
    package: Package, head_dim: int, mean: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "_HEADS_APART", mean)
    spec = replace(SPEC, head_dim=head_dim)
    Step(spec, [(9, 9), (7, 7)], 0).run(FlashBackend(spec))
    apart = False if head_dim == 128 and mean == 8 else None
    assert set(package.packs) == ({apart} if package.takes_packing else set())


def test_keys_are_split_where_few_sequences_leave_the_device_idle(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "_FILLS", 2 * 2)
    for sequences in (2, 3):
        step = Step(SPEC, [(9, 20), (7, 17), (4, 4)][:sequences], 0)
        assert relative_error(step.run(FlashBackend(SPEC)), step.expected()) < 2e-5
    assert package.splits == ([0, 1] if package.takes_packing else [])


def test_one_step_after_another_decides_anew(package: Package) -> None:
    backend = FlashBackend(SPEC)
    for name in ("prompts", "decodes", "prompts", "chunks", "decodes and whole prompts", "mixed"):
        Step(SPEC, *SMALL[name]).run(backend)
        assert backend.fresh_prompts == (name in FRESH)


def test_what_is_captured_reads_the_cache(package: Package) -> None:
    step = Step(SPEC, [(9, 9), (7, 7)], 0)
    step.batch.graph_size = 16
    backend = FlashBackend(SPEC)
    backend.plan(step.batch)
    assert not backend.fresh_prompts and backend._prompt_rows is not None and not backend._prompt_rows.heads_apart
    step.batch.graph_size = flash._CAPTURED_APART
    backend.plan(step.batch)
    assert backend._prompt_rows.heads_apart


def hybrid(spec: AttentionSpec) -> AttentionBackend:
    return HybridBackend(FlashBackend(spec), TorchBackend(spec))


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("make", [FlashBackend, hybrid])
def test_a_model_says_what_transformers_says(
    package: Package,
    make: Callable[[AttentionSpec], AttentionBackend],
    folded: bool,
    tiny_checkpoint: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole prompts; then decodes with whole prompts, with a row of a prompt that was begun, and alone."""
    monkeypatch.setattr(_StackedLinear, "foldable", folded)
    folder = tiny_checkpoint("qwen3")
    config, prompts = (
        read_model_config(folder),
        [list(range(i, i + n)) for i, n in ((3, 30), (90, 1), (200, 21), (50, 9))],
    )
    model = build_model(
        Qwen3ForCausalLM, config, TensorParallel(), "cpu", torch.float32, iterate_safetensors(folder), 256
    )
    run = PagedRun(model, make(attention_spec(config)), 64, 4)
    expected = [reference_tokens(folder, prompt, 5) for prompt in prompts]
    said: list[list[int]] = [[] for _ in prompts]

    def step(*rows: int, prompt: dict[int, int] | None = None) -> set[str]:
        """Decode ``rows``, and compute so many more tokens of each ``prompt``; returns how prompts were read."""
        package.calls.clear()
        prompt = prompt or {}
        new = [said[row][-1:] for row in rows]
        new += [prompts[row][run.computed[row] : run.computed[row] + n] for row, n in prompt.items()]
        tokens = run.step([*rows, *prompt], new, len(rows)).argmax(-1).tolist()
        for row, token in zip([*rows, *prompt], tokens, strict=True):
            if run.computed[row] >= len(prompts[row]):
                said[row].append(token)
        return set(package.calls) - {"decode"}

    assert step(prompt={0: 30, 1: 1}) == {"varlen"}
    assert step(0, 1, prompt={2: 19}) == {"varlen"}
    assert step(0, 1, prompt={2: 2, 3: 9}) == {"paged"}
    for _ in range(4):
        assert step(0, 1, 2, 3) == set()
    assert [tokens[:5] for tokens in said] == expected


@pytest.mark.parametrize("needs_all", [False, True])
def test_a_package_is_left_out_unless_its_module_needs_it(
    needs_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sglang-kernel is: its kernels, not FlashInfer, which the package imports for others."""
    folder = tmp_path / "some_kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text("from some_kernels import helper\nEVERYTHING = True\n")
    (folder / "helper.py").write_text("")
    needed = "EVERYTHING" if needs_all else "helper"
    (folder / "attention.py").write_text(f"from some_kernels import {needed}\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    module = flash._alone("some_kernels.attention")
    assert hasattr(module, needed)
    seen = {name for name in set(sys.modules) - before if name.startswith("some_kernels")}
    assert ("some_kernels" in seen) == needs_all and (needs_all or not seen)

    import some_kernels.attention  # type: ignore[import-not-found]

    assert some_kernels.EVERYTHING and some_kernels.attention
    assert flash._alone("some_kernels.attention") is some_kernels.attention  # what is there already is taken
    for name in set(sys.modules) - before:
        if name.startswith("some_kernels"):
            del sys.modules[name]
