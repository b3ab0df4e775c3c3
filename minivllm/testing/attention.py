"""What an attention backend must do: match float32 attention in every kind of step, on CPU and GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from minivllm.core.interfaces import AttentionBackend, AttentionSpec, CudaGraphs
from minivllm.core.model_config import FrozenDict
from minivllm.core.sampling_params import SamplingParams
from minivllm.kernels.rms_norm import RowScale
from minivllm.layers.attention import Attention
from minivllm.llm import LLM
from minivllm.plugins.manager import default_registry
from minivllm.rounding import cdiv
from minivllm.testing.conformance import DEVICES, Conformance, on_gpu
from minivllm.testing.steps import LAYER, Captured, Step, plan_eager, relative_error, spec_of

Lens = list[tuple[int, int]]


def random_lens(n: int, most: int, seed: int = 0) -> Lens:
    return [(1, int(length)) for length in np.random.default_rng(seed).integers(1, most + 1, n)]


# name -> ([(query tokens, context), decodes first], number of decodes). CPU steps are small: kernels are interpreted.
SMALL: dict[str, tuple[Lens, int]] = {
    "one decode": ([(1, 1)], 1),
    "decodes": ([(1, 40), (1, 1), (1, 130), (1, 16), (1, 64)], 5),
    "prompts": ([(5, 5), (20, 20), (1, 1)], 0),
    "chunks": ([(8, 40), (3, 131)], 0),
    "mixed": ([(1, 17), (1, 33), (9, 9), (4, 60)], 2),
    "decodes and whole prompts": ([(1, 17), (1, 1), (9, 9), (1, 1), (30, 30)], 2),
}
LARGE: dict[str, tuple[Lens, int]] = {
    "one decode": ([(1, 8192)], 1),
    "decodes": ([*random_lens(20, 8192), (1, 1), (1, 8192), (1, 4096)], 23),
    "many decodes": (random_lens(300, 1024), 300),
    "prompts": ([(1, 1), (17, 17), (128, 128), (1000, 1000), (65, 65)], 0),
    "a long prompt": ([(4096, 4096)], 0),
    "chunks": ([(64, 8192), (1, 100), (200, 1000), (33, 97), (512, 1536)], 0),
    "mixed": ([(1, 700), (1, 1), (1, 3000), (50, 50), (300, 900), (1, 1), (127, 8000)], 3),
    "decodes and whole prompts": ([(1, 700), (1, 1), (1, 3000), (50, 50), (1, 1), (900, 900), (127, 127)], 3),
}
STEPS = list(dict.fromkeys([*SMALL, *LARGE]))


class AttentionConformance(Conformance):
    """Every kind of step against float32 attention. Where ``unsupported`` gives reasons, the test is skipped."""

    required = ("backend",)
    backend: ClassVar[str | type[AttentionBackend]]  # a registered name, or the class
    options: ClassVar[dict[str, Any]] = {}  # attention.options
    must_run_on: ClassVar[tuple[str, ...]] = ()  # devices that must support the first shape: a skip there fails
    shapes: ClassVar[tuple[tuple[int, int, int, int], ...]] = (  # heads, kv heads, head size, block size
        (4, 2, 64, 16),
        (16, 8, 128, 256),
        (5, 1, 64, 16),
        (2, 2, 128, 64),
    )
    dtypes: ClassVar[dict[str, str]] = {"cpu": "float32", "cuda": "bfloat16"}  # device -> dtype
    tolerances: ClassVar[dict[str, float]] = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 1e-2}  # norm-wise
    # False for a backend that multiplies masked values by zero, so that NaN would spread. (The engine's cache holds
    # stale keys and values, but no NaN.)
    reads_contexts_only: ClassVar[bool] = True

    # ------------------------------------------------------------------ the world

    @classmethod
    def backend_class(cls) -> type[AttentionBackend]:
        if isinstance(cls.backend, str):
            return default_registry().resolve("attention", cls.backend)
        return cls.backend

    def reasons(self, spec: AttentionSpec) -> list[str]:
        registry = default_registry()
        missing = registry.why_not(registry.get("attention", self.backend)) if isinstance(self.backend, str) else []
        return missing or self.backend_class().unsupported(spec)

    def spec(self, device: str, shape: tuple[int, int, int, int] | None = None, **changes: Any) -> AttentionSpec:
        size: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 256} if device == "cpu" else {}
        if device not in self.dtypes:
            pytest.skip(f"dtypes names no {device}")
        usual: dict[str, Any] = {
            "device": device,
            "dtype": self.dtypes[device],
            "options": FrozenDict(self.options),
            **size,
        }
        return spec_of(*(shape or self.shapes[0]), **(usual | changes))

    def build(self, spec: AttentionSpec) -> AttentionBackend:
        """The backend; skips the test if it does not support ``spec``."""
        if reasons := self.reasons(spec):
            why = f"{self.backend}: {'; '.join(reasons)}"
            if spec.device in self.must_run_on and spec == self.spec(spec.device):
                pytest.fail(f"it must run on {spec.device}: {why}", pytrace=False)
            pytest.skip(why)
        return self.backend_class()(spec)

    def step(self, spec: AttentionSpec, name: str, **options: Any) -> Step:
        steps = SMALL if spec.device == "cpu" else LARGE
        if name not in steps:
            pytest.skip("this step is for GPUs")
        lens, decodes = steps[name]
        return Step(spec, lens, decodes, **({"poison": self.reads_contexts_only} | options))

    def check(self, step: Step, backend: AttentionBackend) -> None:
        assert relative_error(step.run(backend), step.expected()) < self.tolerances[step.spec.dtype]

    # ------------------------------------------------------------------ numbers

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("step", STEPS)
    def test_every_kind_of_step(self, device: str, step: str) -> None:
        spec = self.spec(device)
        self.check(self.step(spec, step), self.build(spec))

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("step", ["decodes", "mixed"])
    def test_group_sizes_head_sizes_and_block_sizes(self, device: str, step: str) -> None:
        ran = 0
        for shape in self.shapes:
            spec = self.spec(device, shape)
            if not self.reasons(spec):
                self.check(self.step(spec, step), self.build(spec))
                ran += 1
        if not ran:
            self.build(self.spec(device))  # skips, with reasons

    @pytest.mark.parametrize("device", DEVICES)
    def test_dtypes(self, device: str) -> None:
        for dtype, tolerance in self.tolerances.items():
            spec = self.spec(device, dtype=dtype)
            if not self.reasons(spec):
                for step in (self.step(spec, "mixed"), self.step(spec, "decodes")):
                    assert relative_error(step.run(self.build(spec)), step.expected()) < tolerance, dtype

    @pytest.mark.parametrize("device", DEVICES)
    def test_one_backend_runs_step_after_step(self, device: str) -> None:
        spec = self.spec(device)
        backend = self.build(spec)
        steps = SMALL if device == "cpu" else LARGE
        for seed, name in enumerate([*steps, "mixed", "decodes"]):
            self.check(self.step(spec, name, seed=seed), backend)

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("step", ["decodes", "mixed"])
    def test_a_prefix_that_rows_share(self, device: str, step: str) -> None:
        spec = self.spec(device)
        backend, size = self.build(spec), spec.block_size
        lens, decodes = (SMALL if device == "cpu" else LARGE)[step]
        longer = [(query, min(context, spec.max_model_len - 2 * size) + 2 * size) for query, context in lens]
        self.check(Step(spec, longer, decodes, poison=self.reads_contexts_only, shared=2 * size), backend)

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("step", ["decodes", "mixed"])
    def test_a_prefix_that_is_read_once_for_its_rows(self, device: str, step: str) -> None:
        spec = self.spec(device, cascade=True, max_model_len=9216)
        backend, shared = self.build(spec), 1024 // spec.block_size * spec.block_size
        if backend.cascade_limits is None:
            pytest.skip("it sets no cascade_limits")
        lens, decodes = (SMALL if device == "cpu" else LARGE)[step]
        longer = Step(
            spec, [(n, context + shared) for n, context in lens], decodes, self.reads_contexts_only, 0, shared
        )
        longer.read_once(backend.cascade_limits)
        self.check(longer, backend)

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("step", ["decodes", "prompts", "chunks", "mixed"])
    def test_a_sliding_window(self, device: str, step: str) -> None:
        for window in (1, 12, 100):
            spec = self.spec(device, sliding_window=window)
            if not self.backend_class().capabilities.sliding_window:
                assert self.reasons(spec), "it declares no sliding window, and takes a spec with one"
                pytest.skip("it declares no sliding window")
            self.check(self.step(spec, step), self.build(spec))

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("step", ["decodes", "chunks", "mixed"])
    def test_a_cache_in_float8(self, device: str, step: str) -> None:
        for shape in self.shapes:
            spec = self.spec(device, shape, kv_cache_dtype="fp8")
            if not self.backend_class().capabilities.fp8_cache:
                unsupported = self.backend_class().unsupported
                assert set(unsupported(spec)) - set(unsupported(self.spec(device, shape))), "no reason tells of it"
                pytest.skip("it does not declare fp8_cache")
            if shape == self.shapes[0] or not self.reasons(spec):
                self.check(self.step(spec, step), self.build(spec))

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("size", [1, 8, 16])
    def test_padding_rows_touch_block_0_only(self, device: str, size: int) -> None:
        spec = self.spec(device)
        step = Step(spec, random_lens(min(size, 5), spec.max_model_len, size), min(size, 5), self.reads_contexts_only)
        padded, backend = step.padded(size), self.build(spec)
        got = padded.run(backend)[: len(step.lens)]
        assert relative_error(got, step.expected()) < self.tolerances[spec.dtype]

    # ------------------------------------------------------------------ what it declares

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_unsupported_gives_sentences(self, device: str) -> None:
        cls, usual = self.backend_class(), self.spec(device)
        c = cls.capabilities
        wrong = [replace(usual, device="abacus"), replace(usual, dtype="int4")]
        wrong += [replace(usual, head_dim=max(c.head_dims) + 1)] if c.head_dims else []
        wrong += [replace(usual, block_size=max(c.block_sizes) + 1)] if c.block_sizes else []
        wrong += [replace(usual, block_size=2 * n + 1)] if (n := c.block_size_multiple_of) > 1 else []
        for spec in wrong:
            reasons = cls.unsupported(spec)
            assert reasons, f"it takes {spec}"
            more = set(reasons) - set(cls.unsupported(usual))
            assert more, f"no reason tells {spec} from what is usual"
        for reason in [r for spec in [usual, *wrong] for r in cls.unsupported(spec)]:
            assert isinstance(reason, str) and len(reason.split()) >= 3 and "\n" not in reason, (
                f"{reason!r}: a sentence"
            )

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("cache", ["auto", "fp8"])
    def test_a_fused_decode_equals_the_separate_kernels(self, device: str, cache: str) -> None:
        spec = self.spec(device, kv_cache_dtype=cache)
        if device == "cpu" and cache == "fp8":
            pytest.skip("Triton's interpreter rounds to float8 in a way of its own")
        if not (most := self.build(spec).fused_decode_rows):
            pytest.skip("it declares no fused_decode_rows")
        lens = (SMALL if device == "cpu" else LARGE)["decodes"][0]
        self._fused_equals_separate(spec, lens[-most:], False)
        for scaled in (False, True):
            backend = self.build(spec)
            backend.bind(Step(spec, lens, len(lens)).cache)
            if backend.takes_qkv(len(lens), scaled, spec.head_dim):
                self._fused_equals_separate(spec, lens, scaled)

    def _fused_equals_separate(self, spec: AttentionSpec, lens: Lens, scaled: bool) -> None:
        heads, kv_heads, dim = self.shapes[0][:3]
        step, device = Step(spec, lens, len(lens)), spec.device
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.rand(shape, device=device, generator=generator)

        rotary = SimpleNamespace(cos_sin=random(spec.max_model_len, dim))
        norm = SimpleNamespace(weight=(random(dim) + 0.5).to(step.q), eps=1e-6)
        layer = Attention(LAYER.index, heads, kv_heads, dim, rotary, scale=spec.scale, q_norm=norm, k_norm=norm)  # type: ignore[arg-type]
        qkv, b = random(len(step.q), (heads + 2 * kv_heads) * dim).sub(0.5).to(step.q), step.batch
        scale = RowScale(random(len(step.q), 96).mul(3).to(step.q), 1e-5) if scaled else None
        outs, caches = [], []
        for rows in (None, 0):
            backend, cache = self.build(spec), step.cache.clone()
            if rows is not None:
                backend.fused_decode_rows = rows
            backend.bind(cache)
            plan_eager(backend, b)
            outs.append(layer(qkv.clone(), b.seq_lens.long() - 1, backend, scale))
            caches.append(cache)
        assert relative_error(*outs) < self.tolerances[spec.dtype]
        assert relative_error(*caches) < self.tolerances[spec.dtype]

    @on_gpu
    def test_a_captured_decode_step_equals_the_eager_one(self) -> None:
        if self.backend_class().capabilities.cuda_graphs == CudaGraphs.NEVER:
            pytest.skip("it declares that its steps cannot be captured")
        asked = [(64, 64, 8192), (8, 8, 100), (1, 1, 8192), (8, 5, 8192), (64, 57, 30), (1, 1, 1), (64, 64, 4000)]
        for spec in self._some_specs():
            backend, cache = self.build(spec), self._zeros(spec)
            graphs = {size: Captured(backend, cache, size) for size in (64, 8, 1)}
            for seed, (size, n, most) in enumerate(asked):
                self._replay(graphs[size], Step(spec, random_lens(n, most, seed), n, seed=seed))

    @on_gpu
    @pytest.mark.parametrize("whole", [False, True], ids=["chunks too", "whole prompts"])
    @pytest.mark.parametrize("decodes", [0, 8])
    def test_captured_prompts_equal_eager_ones(self, decodes: int, whole: bool) -> None:
        """Alone and mixed with decodes, in graphs of few and of many rows, full and padded."""
        if self.backend_class().capabilities.cuda_graphs != CudaGraphs.ALWAYS:
            pytest.skip("it declares that its prompts cannot be captured")
        prompts: list[Lens] = [
            [(1, 1)],
            [(300, 300), (211, 211)],
            [(64, 64), (1, 1), (447, 447)],
            [(100, 100), *[(3, 3)] * 6],
            [(512, 512)],
        ]
        chunks: list[Lens] = [[(300, 8000)], [(1, 600), (200, 201), (17, 17)], [(512, 1536)]]
        ran = False
        for spec in self._some_specs():
            backend, cache = self.build(spec), self._zeros(spec)
            if not backend.captures_prompts:
                continue
            few, many = (Captured(backend, cache, decodes, rows, 512, whole=whole) for rows in (8, 65))
            for seed, lens in enumerate([*prompts, *([] if whole else chunks)]):
                n = decodes - seed % 3 if decodes else 0
                for graph in (few, many):
                    self._replay(graph, Step(spec, random_lens(n, 4000, seed) + lens, n, seed=seed))
            ran = True
        if not ran:
            pytest.skip("it captures no prompts of such shapes")

    def _some_specs(self) -> list[AttentionSpec]:
        """The specs that are supported here; skips, with reasons, if none is."""
        specs = [self.spec("cuda", shape, max_num_seqs=64) for shape in self.shapes[:3]]
        specs += [replace(specs[0], kv_cache_dtype="fp8")]
        if not (runs := [spec for spec in specs if not self.reasons(spec)]):
            self.build(specs[0])
        return runs

    def _zeros(self, spec: AttentionSpec) -> torch.Tensor:
        """A zeroed KV cache."""
        blocks = 64 * cdiv(spec.max_model_len, spec.block_size) + 8
        shape = (2, 2, blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        return torch.zeros(shape, dtype=spec.cache_dtype, device="cuda")

    def _replay(self, graph: Captured, step: Step) -> None:
        graph.cache[:, :, : step.cache.shape[2]] = step.cache
        got, tolerance, about = graph.replay(step), self.tolerances[step.spec.dtype], (graph.decodes, step.lens)
        assert relative_error(got, step.expected()) < tolerance, about
        assert relative_error(got, step.run(self.build(step.spec))) < tolerance / 2, about

    # ------------------------------------------------------------------ in an engine

    @pytest.mark.parametrize("device", DEVICES)
    def test_an_engine_says_what_it_says_with_the_reference(self, device: str) -> None:
        if not isinstance(self.backend, str):
            pytest.skip("it is no registered name")
        self.build(self.spec(device, dtype="float32"))  # in float32, rounding does not change the greedy token
        prompts, params = ["Once upon a time", "The"], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        said = []
        for name in (self.backend, "torch"):
            with LLM("demo", attention=name, device=device, dtype="float32", max_model_len=64, max_num_seqs=8) as llm:
                assert llm.engine.describe()["attention"] == default_registry().get("attention", name).name
                said.append([list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)])
        assert said[0] == said[1]
