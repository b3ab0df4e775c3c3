"""Every installed attention backend on the GPU against attention in float32, eager and captured.

What a backend itself says it cannot run is skipped with its reasons.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # for the other files: before triton is imported

from importlib import import_module

import numpy as np
import pytest
from steps import LAYER, Step, relative_error, spec_of

from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend, AttentionSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]

BACKENDS = {
    "torch": "TorchBackend",
    "triton": "TritonBackend",
    "flash": "FlashBackend",
    "flashinfer": "FlashInferBackend",
}
LIMIT = 1e-2


def random_lens(n: int, most: int, seed: int = 0) -> list[tuple[int, int]]:
    return [(1, int(length)) for length in np.random.default_rng(seed).integers(1, most + 1, n)]


STEPS = {
    "one decode": ([(1, 1)], 1),
    "a long decode": ([(1, 8192)], 1),
    "decodes of 1 to 8192": ([*random_lens(20, 8192), (1, 1), (1, 8192), (1, 4096)], 23),
    "300 decodes": (random_lens(300, 1024), 300),
    "prompts": ([(1, 1), (17, 17), (128, 128), (1000, 1000), (65, 65)], 0),
    "a long prompt": ([(4096, 4096)], 0),
    "chunks": ([(64, 8192), (1, 100), (200, 1000), (33, 97), (512, 1536)], 0),
    "mixed": ([(1, 700), (1, 1), (1, 3000), (50, 50), (300, 900), (1, 1), (127, 8000)], 3),
}
SHAPES = [  # heads, kv heads, head size, block size
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
]
# Every shape with the steps that differ most, every step with the two shapes that are used most.
PAIRS = [
    *((shape, step) for shape in SHAPES for step in ("decodes of 1 to 8192", "mixed")),
    *((shape, step) for shape in (SHAPES[0], SHAPES[1], SHAPES[10]) for step in STEPS),
]
PAIRS = list(dict.fromkeys(PAIRS))


def build(name: str, spec: AttentionSpec) -> AttentionBackend:
    backend = getattr(import_module(f"minivllm.backends.{name}"), BACKENDS[name])
    reasons = backend.unsupported(spec)
    if reasons:
        pytest.skip(f"{name}: {'; '.join(reasons)}")
    return backend(spec)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("shape", "step"), PAIRS, ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else x)
def test_equals_attention_in_float32(name, shape, step):
    spec = spec_of(*shape)
    backend = build(name, spec)
    lens, decodes = STEPS[step]
    world = Step(spec, lens, decodes, poison=name == "triton")
    assert relative_error(world.run(backend), world.expected()) < LIMIT


@pytest.mark.parametrize("name", BACKENDS)
def test_one_backend_runs_step_after_step(name):
    spec = spec_of(4, 2, 128, 16)
    backend = build(name, spec)
    for seed, step in enumerate([*STEPS, "mixed", "300 decodes", "mixed"]):
        lens, decodes = STEPS[step]
        world = Step(spec, lens, decodes, seed=seed)
        assert relative_error(world.run(backend), world.expected()) < LIMIT, step


@pytest.mark.parametrize("name", ["torch", "triton", "flash"])
@pytest.mark.parametrize("step", ["decodes of 1 to 8192", "mixed"])
def test_in_a_sliding_window(name, step):
    spec = spec_of(4, 2, 128, 16, sliding_window=333)
    backend = build(name, spec)
    lens, decodes = STEPS[step]
    world = Step(spec, lens, decodes)
    assert relative_error(world.run(backend), world.expected()) < LIMIT


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(4, 2, 128, 1), (4, 2, 80, 16), (3, 1, 96, 4), (4, 2, 256, 16), (4, 2, 16, 16)],
)
@pytest.mark.parametrize("step", ["decodes of 1 to 8192", "mixed"])
def test_triton_takes_unusual_shapes(heads, kv_heads, head_dim, block_size, step):
    spec = spec_of(heads, kv_heads, head_dim, block_size)
    lens, decodes = STEPS[step]
    world = Step(spec, lens, decodes, poison=True)
    assert relative_error(world.run(build("triton", spec)), world.expected()) < LIMIT


@pytest.mark.parametrize("step", ["decodes of 1 to 8192", "mixed"])
def test_triton_in_float32(step):
    spec = spec_of(4, 2, 64, 16, dtype="float32")
    lens, decodes = STEPS[step]
    world = Step(spec, lens, decodes, poison=True)
    assert relative_error(world.run(build("triton", spec)), world.expected()) < 1e-5


class Captured:
    """A decode step of ``size`` rows, captured as the runner captures it: static buffers, plan, warm-up, capture."""

    def __init__(self, backend: AttentionBackend, size: int, cache: torch.Tensor) -> None:
        spec, device = backend.spec, cache.device
        self.backend, self.size, self.width = backend, size, -(-spec.max_model_len // spec.block_size)
        self.query_start = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.ones(size, dtype=torch.int32, device=device)
        self.tables = torch.zeros((size, self.width), dtype=torch.int32, device=device)
        self.slots = torch.zeros(size, dtype=torch.int64, device=device)
        self.q = torch.zeros((size, spec.num_heads, spec.head_dim), dtype=cache.dtype, device=device)
        self.out = torch.empty_like(self.q)
        backend.bind(cache)
        self._plan(np.ones(size, np.int32), np.zeros((size, 1), np.int32))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._attend()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._attend()

    def _plan(self, seq_lens: np.ndarray, tables: np.ndarray) -> None:
        self.backend.plan(
            AttentionBatch(
                num_decodes=self.size,
                query_start=self.query_start,
                seq_lens=self.seq_lens,
                block_tables=self.tables,
                slot_mapping=self.slots,
                host_query_lens=np.ones(self.size, np.int32),
                host_seq_lens=seq_lens,
                host_block_tables=tables,
                graph_size=self.size,
            )
        )

    def _attend(self) -> None:
        for index in (0, 1):  # as a model: layer 0 first
            self.backend.decode(self.q, type(LAYER)(index=index), self.out)

    def replay(self, world: Step) -> torch.Tensor:
        n, b = len(world.lens), world.batch
        seq_lens = np.ones(self.size, np.int32)
        seq_lens[:n] = b.host_seq_lens
        tables = np.zeros((self.size, b.host_block_tables.shape[1]), np.int32)
        tables[:n] = b.host_block_tables
        self.seq_lens.copy_(torch.from_numpy(seq_lens))
        self.tables[:, : tables.shape[1]].copy_(torch.from_numpy(tables)[:, : self.width])
        self.q[:n] = world.q
        self.out.fill_(float("nan"))
        if self.backend.plans_on_host:
            self._plan(seq_lens, tables)
        self.graph.replay()
        return self.out[:n].clone()


@pytest.mark.parametrize("name", ["triton", "flash", "flashinfer"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_a_captured_decode_step_equals_the_eager_one(name, head_dim, heads):
    spec = spec_of(*heads, head_dim, 16, max_num_seqs=64)
    backend = build(name, spec)
    graphs, worlds = {}, {}
    cache = torch.zeros((2, 2, 40_000, 16, heads[1], head_dim), dtype=torch.bfloat16, device="cuda")
    for size in (64, 8, 1):
        graphs[size] = Captured(backend, size, cache)
    for seed, (size, n, most) in enumerate(
        [(64, 64, 8192), (8, 8, 100), (1, 1, 8192), (8, 5, 8192), (64, 57, 30), (1, 1, 1), (64, 64, 4000), (8, 6, 3000)]
    ):
        world = worlds[seed] = Step(spec, random_lens(n, most, seed), n, seed=seed)
        cache[:, :, : world.cache.shape[2]] = world.cache
        got = graphs[size].replay(world)
        assert relative_error(got, world.expected()) < LIMIT, (size, n)
        eager = build(name, spec)
        assert relative_error(got, world.run(eager)) < 5e-3, (size, n)
