"""``Attention.of_stream``: whichever kernel takes in norm, rotary and the cache write, backend and cache get the same.
With references in the kernels' places; the kernels themselves: ``tests/kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from minivllm.backends.torch import TorchBackend
from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionSpec
from minivllm.core.parallel import TensorParallel
from minivllm.kernels.attention.rotary import Heads, qk_norm_rope_store_reference
from minivllm.kernels.linear.cluster_linear import Scales
from minivllm.kernels.linear.fp8_linear import Fp8Rows, fp8_linear_reference, quantize
from minivllm.kernels.rms_norm import row_factors_reference
from minivllm.layers import attention as module
from minivllm.layers import decoder_layer
from minivllm.layers.attention import Attention
from minivllm.layers.decoder_layer import SelfAttention, launch_all_heads
from minivllm.layers.linear import QKVParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.testing.steps import spec_of

HIDDEN, HEADS, KV_HEADS, DIM, BLOCK = 48, 4, 2, 64, 16
LENS = [9, 14]  # of two prompts; more rows than those that always keep their norm


class Own(Attention):
    def __call__(self, *args: Any) -> torch.Tensor:
        return super().__call__(*args)


class OwnWrite(TorchBackend):
    def write(self, *args: Any) -> None:
        super().write(*args)


class Told(TorchBackend):
    """It keeps what it is given, and attends to the cache."""

    def __init__(self, spec: AttentionSpec, fresh: bool) -> None:
        super().__init__(spec)
        self.fresh_prompts = fresh
        self.given: list[tuple[torch.Tensor | None, ...]] = []

    def attend(self, q: torch.Tensor, layer: Any, k: Any = None, v: Any = None) -> torch.Tensor:
        self.given.append((q, k, v))
        return super().attend(q, layer)


class ToldOwnWrite(Told, OwnWrite):
    pass


class World:
    """One layer, two prompts."""

    def __init__(self, folded: bool) -> None:
        torch.manual_seed(0)
        self.norm, q_norm, k_norm = RMSNorm(HIDDEN, 1e-2), RMSNorm(DIM, 1e-5), RMSNorm(DIM, 1e-5)
        self.projection = QKVParallelLinear(HIDDEN, HEADS, KV_HEADS, DIM, TensorParallel())
        for parameter in (self.norm.weight, q_norm.weight, k_norm.weight, self.projection.weight):
            parameter.data.normal_()
        self.projection.weight.data /= HIDDEN**0.5
        if folded:
            self.projection.fold(self.norm)
        rotary = SimpleNamespace(cos_sin=torch.randn(40, DIM))
        self.attention = Attention(1, HEADS, KV_HEADS, DIM, rotary, q_norm=q_norm, k_norm=k_norm)  # type: ignore[arg-type]
        self.x = torch.randn(sum(LENS), HIDDEN) * torch.logspace(-1, 1, sum(LENS))[:, None]
        self.positions = torch.cat([torch.arange(n) for n in LENS])
        self.cache = torch.randn(2, 2, 6, BLOCK, KV_HEADS, DIM)

    def backend(self, fresh: bool, kind: type[Told] | None = None) -> Told:
        """It has planned both prompts."""
        backend = (kind or Told)(
            AttentionSpec("cpu", "float32", HEADS, KV_HEADS, DIM, BLOCK, 2, 4, 64, 64, self.attention.scale), fresh
        )
        backend.bind(self.cache.clone())
        lens, tables = np.array(LENS, dtype=np.int32), torch.tensor([[2], [5]], dtype=torch.int32)
        slots = torch.cat([block * BLOCK + torch.arange(n) for block, n in zip((2, 5), LENS, strict=True)])
        start = torch.tensor([0, LENS[0], sum(LENS)], dtype=torch.int32)
        backend.plan(AttentionBatch(0, start, torch.from_numpy(lens), tables, slots, lens, lens, tables.numpy()))
        return backend

    @torch.inference_mode()
    def run(self, fresh: bool) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """What is attended, the cache afterwards, and what the backend was given."""
        backend = self.backend(fresh)
        out = self.attention.of_stream(self.x, self.norm, self.projection, self.positions, backend)
        (given,) = backend.given
        return out, backend.kv_cache, given


def cluster_reference(x: torch.Tensor, weight: torch.Tensor, heads: Heads, eps: float | None = None) -> torch.Tensor:
    product = F.linear(x, weight)
    if eps is not None:
        product *= row_factors_reference(x, eps)[:, None]
    return qk_norm_rope_store_reference(product, *heads)


def float8_reference(x: torch.Tensor, weight: torch.Tensor, heads: Heads, *, scales: Scales) -> torch.Tensor:
    product = fp8_linear_reference(Fp8Rows(x, scales.rows, torch.float32), weight, scales.lines)
    return qk_norm_rope_store_reference(product, *heads)


def persistent_reference(
    x: torch.Tensor, weight: torch.Tensor, heads: Heads, factors: torch.Tensor | None = None, *, keep: bool = False
) -> tuple[torch.Tensor | None, ...]:
    product = F.linear(x, weight)
    if factors is not None:
        product *= factors[:, None]
    q = qk_norm_rope_store_reference(product, *heads, keep=True)
    parts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    _, k, v = product.unflatten(1, (-1, heads.head_dim)).split(parts, 1)
    return (q, k, v) if keep else (q, None, None)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``open``: the kernels that say that they are faster, none at first; ``taken``: those that were called."""
    ways = SimpleNamespace(open=set(), taken=[])
    n = (HEADS + 2 * KV_HEADS) * DIM
    asked = (sum(LENS), n, HIDDEN, torch.float32, torch.device("cpu"))

    def answer(name: str, **more: bool) -> Any:
        return lambda *what, **kind: what == asked and kind == {"head_dim": DIM, **more} and name in ways.open

    def call(name: str, reference: Any) -> Any:
        return lambda *args, **kwargs: ways.taken.append(name) or reference(*args, **kwargs)

    def cluster(*args: Any, **kwargs: Any) -> torch.Tensor:
        return (float8_reference if "scales" in kwargs else cluster_reference)(*args, **kwargs)

    kinds = {False: answer("cluster", float8=False), True: answer("cluster in float8", float8=True)}
    monkeypatch.setattr(module, "use_cluster", lambda *what, **kind: kinds[kind["float8"]](*what, **kind))
    monkeypatch.setattr(module, "use_persistent", answer("persistent"))
    monkeypatch.setattr(module, "cluster_qkv", call("cluster", cluster))
    monkeypatch.setattr(module, "persistent_qkv", call("persistent", persistent_reference))
    return ways


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("open_to", "way", "fresh_way"),
    [
        ({"persistent"}, ["persistent"], ["persistent"]),
        ({"cluster"}, ["cluster"], []),  # which has no k and v to give
        ({"cluster", "persistent"}, ["cluster"], ["persistent"]),
    ],
    ids=["persistent", "cluster", "both"],
)
def test_every_way_gives_and_stores_the_same(
    ways: SimpleNamespace, open_to: set[str], way: list[str], fresh_way: list[str], fresh: bool, folded: bool
) -> None:
    world = World(folded)
    apart, apart_cache, apart_given = world.run(fresh)
    assert not ways.taken
    ways.open = open_to
    out, cache, given = world.run(fresh)
    assert ways.taken == (fresh_way if fresh else way)
    assert out.shape == (sum(LENS), HEADS * DIM)
    torch.testing.assert_close(out, apart, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache, apart_cache, rtol=1e-4, atol=1e-5)
    assert [t is None for t in given] == [t is None for t in apart_given] == [False, not fresh, not fresh]
    for got, expected in zip(given, apart_given, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    changed = (cache != world.cache).flatten(-2).any(-1)  # (layers, 2, blocks, block_size)
    assert changed[1].sum() == 2 * sum(LENS) and not changed[0].any()


def test_a_projection_in_float8_gives_and_stores_the_same(ways: SimpleNamespace) -> None:
    """It takes none of the kernels for bfloat16, and its own only where the backend does not need k and v."""
    world = World(folded=False)
    values, scales, _ = quantize(world.projection.weight.data)
    world.projection.weight = torch.nn.Parameter(values, requires_grad=False)
    world.projection.weight_scale = scales
    ways.open = {"cluster", "persistent"}
    apart, apart_cache, _ = world.run(fresh=False)
    assert not ways.taken
    ways.open |= {"cluster in float8"}
    world.run(fresh=True)
    assert not ways.taken
    out, cache, given = world.run(fresh=False)
    assert ways.taken == ["cluster"]
    torch.testing.assert_close(out, apart, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache, apart_cache, rtol=1e-4, atol=1e-5)
    assert [t is None for t in given] == [False, True, True]


def test_the_projection_takes_in_what_nobody_overrides() -> None:
    rotary, half = SimpleNamespace(cos_sin=torch.zeros(9, 64)), SimpleNamespace(cos_sin=torch.zeros(9, 32))
    usual = QKVParallelLinear(12, 2, 2, 64, TensorParallel())
    biased, plain = QKVParallelLinear(12, 2, 2, 64, TensorParallel(), bias=True), RMSNorm(12, 1e-6)

    def takes_in(
        attention: type[Attention] = Attention,
        projection: QKVParallelLinear = usual,
        backend: type[TorchBackend] = TorchBackend,
        dim: int = 64,
        rotary: SimpleNamespace = rotary,
        norm: RMSNorm = plain,
        cache: str = "auto",
    ) -> bool:
        spec = spec_of(2, 2, dim, BLOCK, device="cpu", dtype="float32", kv_cache_dtype=cache)
        return attention(0, 2, 2, dim, rotary)._usual(norm, projection, backend(spec))  # type: ignore[arg-type]

    assert takes_in()
    assert takes_in(dim=128, rotary=SimpleNamespace(cos_sin=torch.zeros(9, 128)))
    assert not takes_in(Own)
    assert not takes_in(projection=biased)
    assert not takes_in(projection=type("OwnProjection", (QKVParallelLinear,), {})(12, 2, 2, 64, TensorParallel()))
    assert not takes_in(norm=type("OwnNorm", (RMSNorm,), {"forward": lambda self, x: x})(12, 1e-6))
    assert not takes_in(backend=OwnWrite)
    assert not takes_in(cache="fp8")
    assert not takes_in(rotary=half)
    assert not takes_in(dim=32, rotary=half)


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("fresh", [True, False])
def test_ahead_all_kinds_of_the_kernel_before_attention_are_found(
    fresh: bool, folded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, kinds = World(folded), []

    def store(qkv: torch.Tensor, *args: Any) -> torch.Tensor:
        kinds.append((args[-2] is not None, args[-1]))
        return qk_norm_rope_store_reference(qkv, *args)

    monkeypatch.setattr(module, "qk_norm_rope_store", store)
    with torch.inference_mode():
        module.launch_all_kinds(world.attention, world.projection, world.backend(fresh))
        assert sorted(kinds) == [
            (scaled, keep) for scaled in (False, True)[: 1 + folded] for keep in (False, True)[: 1 + fresh]
        ]
        kinds.clear()
        module.launch_all_kinds(world.attention, world.projection, world.backend(fresh, ToldOwnWrite))
        assert not kinds, "such a backend is handed q, k and v"


class OwnProjection(QKVParallelLinear):
    pass


@pytest.mark.parametrize(
    ("attention", "projection", "found"),
    [(Attention, QKVParallelLinear, True), (Own, QKVParallelLinear, False), (Attention, OwnProjection, False)],
)
def test_kernels_are_found_for_layers_of_ours_only(
    attention: type[Attention], projection: type[QKVParallelLinear], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another's projection or attention does nobody knows."""
    world, said = World(False), []
    layer = SelfAttention.__new__(SelfAttention)
    torch.nn.Module.__init__(layer)
    layer.attention, layer.qkv_proj = world.attention, world.projection
    layer.attention.__class__, layer.qkv_proj.__class__ = attention, projection
    monkeypatch.setattr(decoder_layer, "launch_all_kinds", lambda *args: said.append(args))
    model: Any = torch.nn.ModuleList([torch.nn.Identity(), layer, layer])
    backend = world.backend(True)
    launch_all_heads(model, backend)
    assert said == ([(world.attention, world.projection, backend)] if found else [])
