"""Products of some rows: every tile, shared loads and splits of k against float32, with all that they take in."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import MinivllmError
from minivllm.kernels import hopper
from minivllm.kernels.attention.rotary import Heads, qk_norm_rope_store_reference
from minivllm.kernels.linear import cluster_linear as cluster
from minivllm.kernels.linear.cluster_config import (
    LARGE,
    MEDIUM,
    MOST_FEATURES,
    SMALL,
    WIDE,
    ClusterConfig,
    Tile,
    cluster_config,
    received_bytes,
    tile_kernel,
    tile_rows,
)
from minivllm.kernels.linear.cluster_linear import Scales, cluster_qkv
from minivllm.kernels.linear.fp8_linear import FP8, quantize
from minivllm.kernels.linear.products import linear, linear_add, norm_gate_up, norm_linear, norm_linear_unscaled
from minivllm.kernels.rms_norm import rms_norm
from minivllm.rounding import cdiv

SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (2048, 8192), (3584, 5120), (272, 72), (8, 8)]
LARGE_SHAPES = [(17408, 5120), (5120, 8704), (19456, 2560), (4096, 12288)]
TILES = [SMALL, MEDIUM, LARGE, WIDE, Tile(1, 80, True, 1), Tile(2, 144, True, 1), Tile(3, 96, True, 1)]
EPS = 1e-6


@given(
    st.integers(1, 256),
    st.integers(1, 4500),
    st.integers(1, 2500),
    st.sampled_from([78, 114, 132, 144]),
    st.sampled_from([{}, {"gated": True}, {"head_dim": 64}, {"head_dim": 128}]),
)
def test_every_configuration_fits_the_chip(rows, n8, k8, sms, kind):
    n, k = (128 if "head_dim" in kind else 16 if kind else 8) * n8, 8 * k8
    config = cluster_config(rows, n, k, sms, **kind)
    if config is None:
        assert n * k > 1 << 24 and "head_dim" not in kind
        return
    tile, in_tile = config.tile, tile_rows(config.tile.rows, rows)
    assert (tile.gated, tile.head_dim) == (kind.get("gated", False), kind.get("head_dim", 0))
    used = config.stages * tile.stage_bytes + received_bytes(tile, rows, config.splits) + 1024
    assert used <= 227 * 1024 - 1024
    assert 1 <= config.stages <= 16
    assert config.sharing * config.splits <= 8
    assert cdiv(rows, in_tile) % config.sharing == 0
    assert tile.outputs // config.sharing % 8 == 0
    assert in_tile <= tile.rows
    assert cdiv(rows, in_tile) == cdiv(rows, tile.rows), "no row tile may be empty"
    assert config.splits <= cdiv(k, 64), "each split has some of k"
    # Sums of the rows that each split finishes stand where the stages were.
    assert cdiv(in_tile, config.splits) * config.splits * tile.pitch_bytes <= config.stages * tile.stage_bytes


def test_few_and_many_rows_other_dtypes_and_devices_are_left_to_others():
    cpu = torch.device("cpu")
    assert not cluster.use_cluster(64, 1024, 1024, torch.bfloat16, cpu)
    for rows, n, k, dtype in [
        (16, 1024, 1024, torch.bfloat16),
        (257, 1024, 1024, torch.bfloat16),
        (64, 1024, 1024, torch.float16),
        (64, 1020, 1024, torch.bfloat16),
        (64, 1024, 1020, torch.bfloat16),
    ]:
        assert not cluster.use_cluster(rows, n, k, dtype, torch.device("cuda"))


def test_a_kernel_that_does_not_compile_leaves_the_product_to_the_library(monkeypatch, caplog):
    def broken(kernel, device):
        raise MinivllmError("a kernel does not compile: no reason")

    monkeypatch.setattr(cluster.nvrtc, "available", lambda device: True)
    monkeypatch.setattr(hopper, "load", broken)
    monkeypatch.setattr(cluster, "num_sms", lambda device: 132)
    hopper._loaded.cache_clear()
    try:
        assert not cluster.use_cluster(64, 1024, 1024, torch.bfloat16, torch.device("cuda"))
        assert not cluster.use_cluster(60, 1024, 1024, torch.bfloat16, torch.device("cuda"))
    finally:
        hopper._loaded.cache_clear()
    assert caplog.text.count("no reason") == 1


def test_while_kernels_are_only_compiled_none_is_waited_for_or_launched(monkeypatch):
    asked = []
    monkeypatch.setattr(cluster.nvrtc, "available", lambda device: True)
    monkeypatch.setattr(cluster, "num_sms", lambda device: 132)
    for module in (cluster, hopper):
        monkeypatch.setattr(module, "compiling", lambda: True)
    monkeypatch.setattr(hopper, "_compiled", asked.append)
    assert cluster.use_cluster(64, 1024, 1024, torch.bfloat16, torch.device("cuda"))
    assert asked == [tile_kernel(cluster_config(64, 1024, 1024).tile)]
    x, residual = torch.zeros(64, 1024, dtype=torch.bfloat16), torch.ones(64, 1024, dtype=torch.bfloat16)
    assert cluster.cluster_linear_add(x, x, residual) is residual
    assert (residual == 1).all()


def test_every_tile_compiles_and_is_kept(compiled, reads_in_time):
    widest = [Tile(groups, most, True, programs, True) for (groups, programs), most in MOST_FEATURES.items()]
    tiles = [*TILES, *widest, replace(SMALL, gated=True), replace(WIDE, gated=True), Tile(2, 128, True, 1, head_dim=64)]
    tiles += [replace(tile, float8=True) for tile in (*widest[:2], LARGE, tiles[-1])]
    for i, tile in enumerate(tiles, 1):
        cubin = cluster.nvrtc.compile_cubin(tile_kernel(tile).source)
        assert b"cluster_linear" in cubin
        reads_in_time(cubin)
        assert len(list(compiled.iterdir())) == i
        assert cluster.nvrtc.compile_cubin(tile_kernel(tile).source) == cubin
        assert len(list(compiled.iterdir())) == i, "compiled again"


def test_a_cache_folder_that_cannot_be_written_is_done_without(compiled, monkeypatch):
    (compiled / "file").write_text("in the way")
    monkeypatch.setattr(cluster.nvrtc.triton.knobs.cache, "dir", str(compiled / "file" / "folder"))
    assert cluster.nvrtc.compile_cubin('extern "C" __global__ void kernel() {}')


def test_what_does_not_compile_says_where(compiled):
    with pytest.raises(MinivllmError, match=r'(?s)does not compile.*identifier "nothing" is undefined'):
        cluster.nvrtc.compile_cubin('extern "C" __global__ void kernel() { nothing(); }')
    assert not list(compiled.iterdir())


@pytest.mark.parametrize(
    ("rows", "gated", "add", "eps"), [(24, False, True, None), (100, True, False, 0.5), (256, False, False, None)]
)
def test_the_driver_is_told_the_launch(told, rows, gated, add, eps):
    driver, n, k = told.driver, 1024, 2048
    lines = 2 * n if gated else n
    x, weight = torch.zeros(rows, k, dtype=torch.bfloat16), torch.zeros(lines, k, dtype=torch.bfloat16)
    out = torch.zeros(rows, n, dtype=torch.bfloat16)
    for _ in range(2):  # made, then kept
        cluster._launch(x, weight, out, add=add, gated=gated, eps=eps)
    chosen = cluster_config(rows, lines, k, 132, gated)
    assert chosen.splits > 1 or chosen.sharing > 1, "no cluster: a case that tells too little"
    tile, in_tile = chosen.tile, tile_rows(chosen.tile.rows, rows)
    assert len(told.seen) == 2
    for config, kernel, (*values, heads) in told.seen:
        assert kernel == tile_kernel(tile)
        sizes = [rows, n, k // 64, in_tile, chosen.stages, chosen.sharing, chosen.splits, int(add)]
        assert values == [5, 5, out.data_ptr(), None, None, *sizes, 1 / k, eps or 0]
        assert not any(bytes(heads))
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        assert grid == (cdiv(lines, tile.features), cdiv(rows, in_tile), chosen.splits)
        assert config.blockDimX == 128 * tile.groups + 32 + (128 if eps else 0) and int(config.hStream) == 77
        assert config.sharedMemBytes > chosen.stages * tile.stage_bytes
        sizes = {a.id: a.value for a in config.attrs}
        assert sizes[driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]
        if chosen.sharing * chosen.splits > 1:
            size = sizes[driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION].clusterDim
            assert (size.x, size.y, size.z) == (1, chosen.sharing, chosen.splits)
    boxes = tile.features // (2 if gated else 1) // chosen.sharing
    assert told.maps[:2] == [(weight.data_ptr(), lines, k, k, boxes, 64), (x.data_ptr(), rows, k, k, in_tile, 64)]


def test_in_float8_the_driver_is_told_the_scales(told):
    """Of x and weight half as much as in bfloat16 is loaded, with the same boxes."""
    rows, n, k = 24, 1024, 4096
    x, weight = torch.zeros(rows, k, dtype=FP8), torch.zeros(n, k, dtype=FP8)
    scales = Scales(torch.ones(rows), torch.ones(n))
    out = cluster.cluster_linear(x, weight, scales)
    assert out.shape == (rows, n) and out.dtype == torch.bfloat16
    chosen = cluster_config(rows, n, k // 2)
    ((_, kernel, (*values, _)),) = told.seen
    assert kernel == tile_kernel(replace(chosen.tile, float8=True))
    assert "e4m3.e4m3" in kernel.source and "bf16.bf16 {" not in kernel.source
    assert values[2:8] == [out.data_ptr(), scales.rows.data_ptr(), scales.lines.data_ptr(), rows, n, k // 128]
    assert told.maps[0] == (weight.data_ptr(), n, k // 2, k // 2, chosen.tile.features // chosen.sharing, 64)


@pytest.mark.parametrize("normed", [True, False])
def test_the_kernel_is_told_where_heads_go(told, normed):
    rows, hidden, heads, kv_heads, dim = 40, 1024, 6, 2, 64
    cache = torch.zeros(3, 2, 9, 16, kv_heads, dim, dtype=torch.bfloat16)  # as an engine's, of three layers
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16)
    weight = torch.zeros((heads + 2 * kv_heads) * dim, hidden, dtype=torch.bfloat16)
    norms = torch.ones(2, dim, dtype=torch.bfloat16)
    q_weight, k_weight = norms if normed else (None, None)
    angles, positions, slots = torch.zeros(50, dim), torch.arange(rows), torch.arange(rows)
    q = cluster_qkv(
        x, weight, Heads(q_weight, k_weight, 0.25, angles, positions, *cache[1], slots, heads, kv_heads, dim), 0.5
    )
    assert q.shape == (rows, heads, dim)
    ((config, _, (*values, sent)),) = told.seen
    assert values[2:7] == [q.data_ptr(), None, None, rows, len(weight)] and values[-2:] == [1 / hidden, 0.5]
    assert config.blockDimX == 128 + 64 + 32, "threads that square x are missing"
    read = (angles, positions, slots, *cache[1])
    assert [sent.angles, sent.positions, sent.slots, sent.keys, sent.values] == [t.data_ptr() for t in read]
    assert [sent.query_norm, sent.key_norm] == ([w.data_ptr() for w in norms] if normed else [None, None])
    strides = [sent.angles_stride, sent.block_stride, sent.slot_stride, sent.head_stride]
    assert strides == [dim, *cache[1, 0].stride()[:3]]
    assert [sent.queries, sent.keys_each, sent.block_size, sent.eps] == [heads, kv_heads, 16, 0.25]


def launched(product, x, weight, *, add, gated, **kwargs):
    """What the kernel writes, into a guarded output, and what it should, of this product in float32."""
    rows, expected = len(x), product
    if gated:
        gate, up = product.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
    guarded = torch.full((rows + 8, expected.shape[1]), 7.0, device=x.device, dtype=torch.bfloat16)
    out = guarded[:rows].fill_(float("nan"))
    if add:
        out.normal_()
        expected = expected + out.float()
    cluster._launch(x, weight, out, add=add, gated=gated, **kwargs)
    assert (guarded[rows:] == 7).all(), "rows past the end were written"
    return out.float(), expected


def check(gpu, rows, n, k, config=None):
    """n: lines of the weight. All that the kernel can do, into guarded outputs."""
    wide = torch.randn(rows, k + 64, device=gpu, dtype=torch.bfloat16)
    x, weight = wide[:, :k], (torch.randn(n, k, device=gpu) / k**0.5).bfloat16()
    torch.cuda.synchronize()  # the weight is no constant before: see pdl.py
    product = x.float() @ weight.float().T
    rms = (x.float().square().mean(-1, keepdim=True) + EPS).sqrt()
    for add, gated, eps in [(False, False, None), (True, False, None), (False, True, None), (False, True, EPS)]:
        chosen = cluster_config(rows, n, k, gated=gated)
        if (n % 16 and gated) or chosen is None or (eps and not (config or chosen).tile.squaring):
            continue
        this = config and replace(config, tile=replace(config.tile, gated=gated))
        its = product / rms if eps else product
        out, expected = launched(its, x, weight, add=add, gated=gated, eps=eps, config=this)
        error = ((out - expected).norm() / expected.norm()).item()
        assert error < 3e-3, f"add={add} gated={gated} eps={eps}: {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_chosen_configurations_are_right(gpu, rows, n, k):
    check(gpu, rows, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 33, 64, 65, 128, 136, 192])
@pytest.mark.parametrize(("n", "k"), LARGE_SHAPES)
def test_even_shares_of_large_weights_are_right(gpu, rows, n, k):
    check(gpu, rows, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 33, 64, 65, 128, 200, 256])
@pytest.mark.parametrize(("n", "k"), [*SHAPES[:4], (272, 144), (16, 16), (5120, 17408), (34816, 5120)])
def test_products_of_float8_are_right(gpu, rows, n, k):
    """Rows and lines of very different scales, into guarded outputs."""
    x = quantize((torch.randn(rows, k, device=gpu) * torch.logspace(-2, 2, rows, device=gpu)[:, None]).bfloat16())
    weight = quantize(torch.randn(n, k, device=gpu) / k**0.5 * torch.logspace(-1, 1, n, device=gpu)[:, None])
    scales = Scales(x.scales, weight.scales)
    torch.cuda.synchronize()
    product = (x.values.float() * x.scales[:, None]) @ (weight.values.float() * weight.scales[:, None]).T
    for add, gated in [(False, False), (True, False), (False, True)]:
        if (n % 32 and gated) or cluster_config(rows, n, k // 2, gated=gated) is None:
            continue
        out, expected = launched(product, x.values, weight.values, add=add, gated=gated, scales=scales)
        for mine, its in zip(out, expected, strict=True):  # a row's error counts as much as another's
            error = ((mine - its).norm() / its.norm()).item()
            assert error < 1e-2, f"add={add} gated={gated}: {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 16, 17, 32, 64, 65, 100, 128, 200, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "hidden"),
    [(16, 8, 128, 1024), (32, 8, 64, 2048), (20, 4, 128, 5120), (2, 1, 128, 72), (3, 1, 64, 640)],
)
def test_a_projection_that_norms_rotates_and_stores(gpu, rows, heads, kv_heads, head_dim, hidden):
    """q and both caches against the product, the norms and the rotation one after another; nothing else is written."""
    if (heads + 2 * kv_heads) * head_dim % 128:
        heads += 1
    n = (heads + 2 * kv_heads) * head_dim
    x, weight = 3 * torch.randn(rows, hidden, device=gpu), torch.randn(n, hidden, device=gpu) / hidden**0.5
    x, weight = x.bfloat16(), weight.bfloat16()
    q_weight, k_weight = (torch.rand(2, head_dim, device=gpu) + 0.5).bfloat16()
    angles = torch.randn(500, head_dim, device=gpu)
    positions = torch.randint(0, 500, (rows,), device=gpu)
    slots = torch.randperm(64 * 16, device=gpu)[:rows]
    torch.cuda.synchronize()
    ways = [(None, (q_weight, k_weight)), (EPS, (q_weight, k_weight)), (EPS, (None, None))]
    ways += [] if hidden % 16 else [("float8", (q_weight, k_weight)), ("float8", (None, None))]
    for way, norms in ways:
        caches, expected = torch.full((2, 2, 64, 16, kv_heads, head_dim), 7.0, device=gpu)
        caches = caches.bfloat16()
        its_x, its_weight, eps, scales = x, weight, way, None
        if way == "float8":
            (its_x, of_rows, _), (its_weight, of_lines, _) = quantize(x), quantize(weight)
            eps, scales = None, Scales(of_rows, of_lines)
        product = its_x.float() @ its_weight.float().T
        if scales is not None:
            product *= scales.rows[:, None] * scales.lines
        if eps:
            product /= (x.float().square().mean(-1, keepdim=True) + eps).sqrt()
        wide = [w if w is None else w.float() for w in norms]
        wanted = qk_norm_rope_store_reference(
            product, *wide, EPS, angles, positions, *expected, slots, heads, kv_heads, head_dim
        )
        its_heads = Heads(*norms, EPS, angles, positions, *caches, slots, heads, kv_heads, head_dim)
        q = cluster_qkv(its_x, its_weight, its_heads, eps, scales)
        assert ((q.float() - wanted).norm() / wanted.norm()).item() < 6e-3
        assert ((caches.float() - expected).norm() / (expected - 7).norm()).item() < 6e-3
        untouched = expected == 7
        assert (caches[untouched] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 3, 4])
@pytest.mark.parametrize("sharing", [1, 2])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_shares_and_splits(gpu, tile, sharing, splits):
    for rows, n, k in [(tile.rows * 2 - 8, 768, 1096), (tile.rows * 2, 392, 1024), (tile.rows + 1, 1536, 328)]:
        for stages in (4, 5):
            config = ClusterConfig(tile, stages, sharing, splits)
            if stages * tile.stage_bytes + received_bytes(tile, rows, splits) < 225 * 1024:
                check(gpu, rows, n, k, config)


@pytest.mark.gpu
def test_what_the_layers_call_is_right_for_some_rows(gpu):
    """Against float32, with folded norms and without."""
    rows, hidden, inner = 48, 1024, 3072
    x, g = torch.randn(rows, hidden, device=gpu).bfloat16(), (torch.rand(hidden, device=gpu) + 0.5).bfloat16()
    w = (torch.randn(2 * inner, hidden, device=gpu) / 32).bfloat16()
    torch.cuda.synchronize()
    normed = x.float() / (x.float().square().mean(-1, keepdim=True) + EPS).sqrt()
    gate, up = (normed * g.float() @ w.float().T).chunk(2, -1)

    def close(out, expected):
        assert ((out.float() - expected).norm() / expected.norm()).item() < 1e-2

    close(linear(x, w), x.float() @ w.float().T)
    close(norm_linear(x, g, EPS, w), torch.cat([gate, up], -1))
    close(norm_gate_up(x, g, EPS, w), torch.nn.functional.silu(gate) * up)
    ones = torch.ones_like(g)
    gate, up = (normed @ w.float().T).chunk(2, -1)
    close(norm_gate_up(x, ones, EPS, w, folded=True), torch.nn.functional.silu(gate) * up)
    out, scale = norm_linear_unscaled(x, ones, EPS, w)
    close(scale.applied_to(out), torch.cat([gate, up], -1))
    residual = torch.randn(rows, 2 * inner, device=gpu).bfloat16()
    expected = residual.float() + x.float() @ w.float().T
    assert linear_add(x, w, None, residual) is residual
    close(residual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [24, 64, 128, 256])
def test_a_chain_in_a_graph_gives_the_same_bits_every_time(gpu, captured, rows):
    """Products that start while the one before still runs, in place on one stream, 200 replays: a missing wait, or a
    stage filled too early, would show."""
    hidden, inner, layers = 1024, 3072, 12
    weights = [((torch.randn(2 * inner, hidden, device=gpu) / 32).bfloat16(),
                (torch.randn(hidden, inner, device=gpu) / 60).bfloat16()) for _ in range(layers)]  # fmt: skip
    norm = torch.ones(hidden, device=gpu, dtype=torch.bfloat16)
    start = torch.randn(rows, hidden, device=gpu).bfloat16()
    h = torch.empty_like(start)

    def chain():
        h.copy_(start)
        for up, down in weights:
            if rows % 64:
                cluster.cluster_linear_add(cluster.cluster_gate_up(rms_norm(h, norm, EPS), up), down, h)
            else:  # the norm taken in
                cluster.cluster_linear_add(cluster.cluster_gate_up(h, up, EPS), down, h)

    expected = start.float()
    for up, down in weights:
        normed = expected / (expected.square().mean(-1, keepdim=True) + EPS).sqrt()
        gate, linear_up = (normed @ up.float().T).chunk(2, -1)
        expected = expected + (torch.nn.functional.silu(gate) * linear_up) @ down.float().T
    graph = captured(chain)
    graph.replay()
    first = h.clone()
    assert (first.float() - expected).norm() < 2e-2 * expected.norm()
    for _ in range(200):
        graph.replay()
        assert torch.equal(h, first)


def test_each_tile_is_chosen_somewhere():
    chosen = {cluster_config(rows, n, k).tile for rows in (24, 64, 128, 256) for n, k in SHAPES[:4]}
    assert chosen == {SMALL, MEDIUM, LARGE, WIDE}
