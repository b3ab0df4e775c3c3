"""The Triton experts against the reference: any number of tokens, any choice of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from minivllm_qwen3_moe.experts import BACKENDS, Experts, Weights, choose
from minivllm_qwen3_moe.experts.torch import route as route_reference
from minivllm_qwen3_moe.kernels.grouped_linear import grouped_down, grouped_gate_up
from minivllm_qwen3_moe.kernels.pairs import pair_down, pair_gate_up, pick
from minivllm_qwen3_moe.kernels.routing import num_tiles, route
from minivllm_qwen3_moe.tiles import FP8_TABLE, TABLE, tiles_for

from minivllm.errors import ConfigError
from minivllm.kernels.linear.fp8_linear import Fp8Rows, fp8_linear_reference, quantize
from minivllm.layers.norm import RMSNorm

Where = tuple[str, torch.dtype]
GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"))


@pytest.fixture(params=[False, True], ids=["whole", "float8"])
def float8(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@dataclass
class World:
    """A layer and its input. The router reads each expert's logit off the input, where they stand apart: bfloat16, or
    another order of summing, must not change who is chosen."""

    x: torch.Tensor
    norm: RMSNorm
    weights: Weights

    @classmethod
    def make(
        cls, where: Where, tokens: int, experts: int, hidden: int = 32, inner: int = 24, float8: bool = False
    ) -> World:
        device = where[0]
        generator = torch.Generator(device).manual_seed(tokens)

        def uniform(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator, device=device)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5

        x, norm = normal(tokens, hidden), RMSNorm(hidden, 1e-6)
        x[:, :experts] = uniform(tokens, experts).argsort(1) / 16 - experts / 32
        norm.weight.data = uniform(hidden) + 0.5
        norm.weight.data[:experts] = 1
        weights = Weights(
            torch.eye(experts, hidden, device=device),
            normal(experts, 2 * inner, hidden),
            normal(experts, hidden, inner),
        )
        return cls(x, norm, in_float8(weights) if float8 else weights).to(*where)

    def to(self, device: str, dtype: torch.dtype) -> World:
        norm = RMSNorm(len(self.norm.weight), self.norm.eps)
        norm.weight.data = self.norm.weight.data.to(device, dtype)
        gate, *large = (its if its is None else its.to(device) for its in self.weights)
        if not self.weights.in_float8:
            large = [its if its is None else its.to(dtype) for its in large]
        moved = World(self.x.to(device, dtype), norm, Weights(gate.to(dtype), *large))
        if device == "cuda":  # weights that a kernel has just written may be read too early: see minivllm's pdl.py
            torch.cuda.synchronize()
        return moved

    def run(self, experts: Experts, *, add: bool = False) -> torch.Tensor:
        x = self.x.clone()
        out = experts(x, self.norm, self.weights, add=add)
        assert not len(x) or (out.data_ptr() == x.data_ptr()) == add
        return out


def in_float8(weights: Weights) -> Weights:
    """Of features of different sizes."""
    found = []
    for its in (weights.gate_up, weights.down):
        sizes = torch.linspace(0.1, 1, its.shape[1], device=its.device)
        values, scales, _ = quantize((its * sizes[:, None]).flatten(0, 1))
        found.append((values.view(its.shape), scales.view(its.shape[:2])))
    (gate_up, up_scale), (down, down_scale) = found
    return Weights(weights.gate, gate_up, down, up_scale, down_scale)


def check(where: Where, world: World, top_k: int, renormalize: bool = True) -> None:
    """With and without the residual; the reference computes in float32 from the same numbers. Of float8, what bfloat16
    rounds away, or another order of summing, makes some numbers round to their other neighbour."""
    reference, ours = (BACKENDS[name](top_k, renormalize) for name in ("torch", "triton"))
    limit = 1e-5 if where[1] == torch.float32 else 1e-2
    if world.weights.in_float8:
        limit = 3e-2 if where[1] == torch.bfloat16 else 3e-3
    wide = world.to("cpu", torch.float32)
    for add in (False, True):
        out, expected = world.run(ours, add=add), wide.run(reference, add=add)
        assert out.isfinite().all(), "not every element was written"
        error = (out.float().cpu() - expected).norm() / expected.norm()
        assert error < limit, f"relative error {error:.1e}"


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(t, 8, 2) for t in (1, 2, 4, 5, 7, 32, 33, 50)]
    + [(t, e, k) for t in (3, 40) for e, k in ((6, 4), (5, 1), (4, 4))],
)
def test_numbers_of_tokens_and_experts(where: Where, tokens: int, experts: int, top_k: int, float8: bool) -> None:
    check(where, World.make(where, tokens, experts, float8=float8), top_k)


@pytest.mark.parametrize("tokens", [3, 9, 40])
def test_weights_as_they_are(where: Where, tokens: int, float8: bool) -> None:
    check(where, World.make(where, tokens, 8, float8=float8), 3, renormalize=False)


@pytest.mark.parametrize(("hidden", "inner"), [(40, 24), (136, 20), (20, 136)])
@pytest.mark.parametrize("tokens", [2, 9])
def test_sizes_that_no_tile_divides(where: Where, hidden: int, inner: int, tokens: int, float8: bool) -> None:
    check(where, World.make(where, tokens, 6, hidden, inner, float8), 2)


@pytest.mark.parametrize("tokens", [2, 20, 70])
def test_all_tokens_to_the_same_experts(where: Where, tokens: int, float8: bool) -> None:
    """The others have no row; these have several tiles."""
    world = World.make(where, tokens, 8, float8=float8)
    world.x[:, [2, 7]] = 9
    check(where, world, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
@pytest.mark.parametrize("tokens", [1, 4, 8, 32, 150, 256, 1000, 3000])
def test_every_row_of_the_table_at_its_shape(tokens: int, float8: bool) -> None:
    where = ("cuda", torch.bfloat16)
    check(where, World.make(where, tokens, 128, 2048, 768, float8), 8)


def test_no_tokens(where: Where, float8: bool) -> None:
    world, ours = World.make(where, 0, 4, float8=float8), BACKENDS["triton"](2, True)
    assert world.run(ours).shape == world.x.shape


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_row_of_nan_spoils_itself_only(where: Where, tokens: int, float8: bool) -> None:
    world, ours = World.make(where, tokens, 8, float8=float8), BACKENDS["triton"](2, True)
    expected = world.run(ours)
    world.x[1] = float("nan")
    out = world.run(ours)
    others = [i for i in range(tokens) if i != 1]
    torch.testing.assert_close(out[others], expected[others])


# --------------------------------------------------------------------------- kernels in float8, one by one


def choices(kind: str, tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """(tokens, experts): logits that stand apart, of which the ``top_k`` largest are the choice."""
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.rand((tokens, experts), generator=generator).argsort(1) / 16.0
    if kind == "a few":  # most experts are chosen by nobody
        logits[:, : top_k + 1] += experts / 16
    elif kind == "the same":
        logits = logits[:1].expand(tokens, -1).contiguous()
    return logits


def floats(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return values.float() * scales[..., None]


def each_by_its_expert(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """x (t, top_k, k), weight (experts, n, k), ids (t, top_k); returns (t, top_k, n)."""
    out = torch.zeros((*ids.shape, weight.shape[1]), device=x.device)
    for expert in ids.unique().tolist():
        out[ids == expert] = x[ids == expert] @ weight[expert].T
    return out


@cache
def large_weights(device: str, experts: int, hidden: int, inner: int) -> Weights:
    generator = torch.Generator(device).manual_seed(inner)
    sizes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    large = (torch.randn(size, generator=generator, device=device) * size[-1] ** -0.5 for size in sizes)
    return in_float8(Weights(torch.empty(0), *large))


COUNTS = (1, 2, 3, 4, 5, 8, 17, 64, 256, 300)


@pytest.mark.parametrize("kind", ["any", "a few", "the same"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner"),
    [(t, 64, 48) for t in (1, 2, 4, 5, 33)]
    + [pytest.param(t, 2048, n, marks=GPU) for n in (768, 384, 96) for t in COUNTS]  # one rank, two, eight
    + [pytest.param(t, 2048, 768, marks=GPU) for t in (700, 2000)],  # larger tiles
)
def test_each_product_is_that_of_its_float8_numbers(
    where: Where, tokens: int, hidden: int, inner: int, kind: str, close: Callable[..., None]
) -> None:
    """From given float8 numbers, so that nothing rounds apart: gate and up, down, by pair and by expert."""
    if where[0] == "cpu" and hidden > 64:
        pytest.skip("too large for the interpreter")
    experts, top_k = (8, 3) if hidden == 64 else (128, 8)
    its, logits = large_weights(where[0], experts, hidden, inner), choices(kind, tokens, experts, top_k).to(*where)
    x = torch.randn(tokens, hidden).to(*where) * torch.logspace(-1, 1, tokens).to(*where)[:, None]
    norm_weight, eps = (torch.rand(hidden) + 0.5).to(*where), 1e-6
    if where[0] == "cuda":
        torch.cuda.synchronize()  # as above
    shares, ids = route_reference(logits, top_k, True)
    gate_up, down = (floats(*pair) for pair in ((its.gate_up, its.gate_up_scale), (its.down, its.down_scale)))

    h, got_shares, got_ids = pick(logits, x, norm_weight, eps, top_k, True, float8=True)
    assert torch.equal(got_ids.long(), ids) and isinstance(h, Fp8Rows)
    torch.testing.assert_close(got_shares, shares)
    rows = quantize(x, norm_weight, eps)
    torch.testing.assert_close(h.scales, rows.scales)
    assert (h.values.float() != rows.values.float()).float().mean() < 1e-3  # ties
    numbers = floats(h.values, h.scales)[:, None].expand(-1, top_k, -1)
    gate, up = each_by_its_expert(numbers, gate_up, ids).flatten(0, 1).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    rows = quantize(expected.to(where[1]))
    numbers = floats(rows.values, rows.scales).unflatten(0, (tokens, top_k))
    products = each_by_its_expert(numbers, down, ids) * shares[..., None]

    if tokens <= 5 or where[0] == "cuda":
        close(pair_gate_up(h, its.gate_up, got_ids, its.gate_up_scale), expected)
        close(pair_down(rows, its.down, got_ids, shares, None, its.down_scale), products.sum(1))
        stream = x.clone()
        assert pair_down(rows, its.down, got_ids, shares, stream, its.down_scale) is stream
        close(stream, x.float() + products.sum(1))

    tiles = tiles_for(tokens, top_k, experts, where[1], float8=True)
    routing = route(logits, top_k, True, tiles.rows)
    order = routing.pairs.long()
    close(grouped_gate_up(h, its.gate_up, routing, tiles.gate_up, its.gate_up_scale), expected[order])
    ordered = Fp8Rows(rows.values.view(torch.uint8)[order].view(rows.values.dtype), rows.scales[order], rows.dtype)
    close(grouped_down(ordered, its.down, routing, tiles.down, its.down_scale), products.flatten(0, 1))


def test_the_reference_rounds_weights_and_inputs() -> None:
    world = World.make(("cpu", torch.float32), 3, 4, float8=True)
    its, rows = world.weights, quantize(world.norm(world.x))
    shares, ids = route_reference(world.norm(world.x) @ its.gate.T, 2, True)
    expected = torch.zeros_like(world.x)
    for token in range(3):
        row = Fp8Rows(rows.values[token : token + 1], rows.scales[token : token + 1], torch.float32)
        for expert, share in zip(ids[token].tolist(), shares[token], strict=True):
            assert its.gate_up_scale is not None and its.down_scale is not None
            gate, up = fp8_linear_reference(row, its.gate_up[expert], its.gate_up_scale[expert]).chunk(2, 1)
            y = quantize(torch.nn.functional.silu(gate) * up)
            expected[token] += share * fp8_linear_reference(y, its.down[expert], its.down_scale[expert])[0]
    torch.testing.assert_close(world.run(BACKENDS["torch"](2, True)), expected)
    whole = Weights(
        its.gate, *(floats(*pair) for pair in ((its.gate_up, its.gate_up_scale), (its.down, its.down_scale)))
    )
    near = World(world.x, world.norm, whole).run(BACKENDS["torch"](2, True))
    error = float((near - expected).norm() / near.norm())
    assert 1e-3 < error < 0.1, "inputs are rounded, too"


# --------------------------------------------------------------------------- routing


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 8, 2), (32, 6, 3), (33, 6, 3), (300, 12, 5), (2100, 3, 1)]
)
def test_every_pair_stands_in_a_tile_of_its_expert(
    where: Where, tokens: int, experts: int, top_k: int, block: int, renormalize: bool
) -> None:
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0)).to(where[0])  # no equal ones
    routing = route(logits, top_k, renormalize, block)
    weights, ids = route_reference(logits, top_k, renormalize)
    torch.testing.assert_close(routing.weights, weights)
    pairs, tiles, flat = routing.pairs.cpu(), routing.tiles.cpu(), ids.flatten().cpu()
    assert sorted(pairs.tolist()) == list(range(tokens * top_k))
    keys = flat[pairs.long()] * tokens * top_k + pairs  # by expert, then by token
    assert bool((keys.diff() > 0).all())
    found = [(int(e), int(first), int(end)) for e, first, end in tiles.T if e >= 0]
    assert (tiles[0, len(found) :] == -1).all()
    rows: list[int] = []
    for expert, first, end in found:
        own = list(range(first, min(first + block, end)))
        assert own and flat[pairs[own].long()].eq(expert).all()
        assert end == tokens * top_k or flat[pairs[end]] != expert
        rows += own
    assert rows == list(range(tokens * top_k))


def test_equal_logits_choose_the_first_experts(where: Where) -> None:
    routing = route(torch.zeros(2, 4, device=where[0]), 3, True, 16)
    assert routing.tiles[0].tolist()[:3] == [0, 1, 2]
    torch.testing.assert_close(routing.weights.cpu(), torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("pairs", [1, 7, 100, 1000])
def test_the_bound_on_tiles_holds_and_is_reached(pairs: int) -> None:
    for experts in (1, 3, 8):
        for block in (16, 64):
            bound = num_tiles(pairs, experts, block)
            single = min(experts - 1, pairs - 1)  # the worst case: experts with one row each, the rest at one
            assert single + -(-(pairs - single) // block) <= bound
            assert bound <= pairs


# --------------------------------------------------------------------------- choosing


def test_auto_takes_what_is_meant_for_the_device() -> None:
    assert choose("auto", torch.device("cpu"), torch.float32) is BACKENDS["torch"]
    if pytest.importorskip("triton"):
        assert choose("auto", torch.device("cuda"), torch.bfloat16) is BACKENDS["triton"]


def test_a_backend_that_cannot_run_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"experts=triton cannot run here: .*TRITON_INTERPRET.*auto, torch"):
        choose("triton", torch.device("cpu"), torch.float32)


def test_tiles_are_powers_of_two_and_cover_any_number_of_tokens() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (1, 8, 100, 10**6):
            for float8 in (False, True):
                tiles = tiles_for(tokens, 8, 128, dtype, float8)
                sizes = (tiles.rows, *(s for t in (tiles.gate_up, tiles.down) for s in (t.n, t.k, t.warps)))
                assert all(size & (size - 1) == 0 for size in sizes)
    for table in (TABLE, FP8_TABLE):
        assert [most for most, _ in table] == sorted(most for most, _ in table)


# --------------------------------------------------------------------------- graphs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
@pytest.mark.parametrize("tokens", [1, 3, 24, 200])
def test_a_graph_follows_the_router_and_gives_the_same_bits_every_time(tokens: int, float8: bool) -> None:
    """Captured on some tokens, replayed on others that choose other experts."""
    world, ours = World.make(("cuda", torch.bfloat16), tokens, 128, 512, 256, float8), BACKENDS["triton"](8, True)

    def run() -> torch.Tensor:
        return ours(world.x, world.norm, world.weights, add=False)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        world.x.normal_()
        expected = run()
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(50):
            graph.replay()
            differing += (out != expected).any()
        assert differing.item() == 0
