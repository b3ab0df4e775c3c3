"""Products of many rows and what stands behind them: what the driver is told, without a GPU; on Hopper, the results
against float32 and, where the kernel rounds as the kernels that it replaces, against those' references."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from minivllm.kernels import hopper, nvrtc
from minivllm.kernels._triton import num_sms
from minivllm.kernels.attention.rotary import Heads, qk_norm_rope_store_reference
from minivllm.kernels.collectives.exchange import Arrival, part_rows
from minivllm.kernels.linear import persistent_linear as persistent
from minivllm.kernels.linear import products
from minivllm.kernels.linear.cluster_config import LARGE_WEIGHT
from minivllm.kernels.linear.persistent_config import GRID, busy, cut_kernel, even, even_cut, persistent_cut
from minivllm.kernels.linear.persistent_linear import persistent_gate_up, persistent_qkv
from minivllm.kernels.linear.products import linear, linear_add, norm_gate_up
from minivllm.kernels.linear.skinny_linear import norm_gate_up_reference
from minivllm.kernels.rms_norm import rms_norm, row_factors
from minivllm.rounding import cdiv

KINDS = [{"gated": True}, {"head_dim": 64}, {"head_dim": 128}]
ROWS = [1, 100, 1024, 1300, 8192]
SHAPES = [(272, 72), (6144, 1024), (3584, 5120), (17408, 2560)]  # lines of the weight, k; some fill no tile
LARGE = [(34816, 5120), (17408, 5120), (24576, 4096)]  # gate and up of Qwen3-14B, half of it, Qwen3-8B
SMALL = [(16 * 133, 264), (16 * 265, 72), (16 * 5, 5120), (16, 64)]  # even shares of little, some of nothing
SOME_ROWS = [65, 96, 128, 129, 160, 192]
MOST_ROWS = [128, 192]  # of two and of three warpgroups that multiply
HEADS = [(16, 8, 128, True, 1024), (32, 8, 64, False, 2048), (5, 1, 128, True, 72), (3, 1, 64, True, 640)]
RANKS = [(rank, ranks) for ranks in (2, 4) for rank in range(ranks)]
BF16, EPS, BLOCK_SIZE = torch.bfloat16, 1e-6, 16


# --------------------------------------------------------------------------- which products


@given(st.integers(1, 20000), st.integers(1, 4000), st.sampled_from([1, 39, 57, 66, 72]))
def test_a_share_is_positive_and_one_only_where_nothing_is_wasted(rows, n8, clusters):
    share = busy(rows, 8 * n8, clusters)
    assert 0 < share <= 1
    whole = rows % 256 == 0 and n8 % 32 == 0 and (rows // 256) * (n8 // 32) % clusters == 0
    assert (share == 1) == whole


@given(st.integers(1, 5000), st.sampled_from([39, 78, 114, 132, 144]), st.sampled_from(MOST_ROWS))
def test_even_shares_fit_the_chip_and_hold_each_line_once(units, sms, rows):
    cut = even_cut(rows, 16 * units, sms)
    assert cut.rows == rows and cut.sharing == 1
    assert cut.lines <= 256 and cut.shared_bytes <= hopper.SHARED_BYTES - 1024 and cut.stages >= 4
    outputs = np.zeros(8 * units, dtype=int)
    clusters = shares_of(units, min(sms, units), cut.rounds)
    sizes = [sum(there for _, there in rounds) for rounds in clusters]
    assert max(sizes) - min(sizes) <= 1
    for rounds in clusters:
        assert len(rounds) == cut.rounds
        for start, there in rounds:
            assert there in (cut.lines // 16, cut.lines // 16 - 1) and there > 0, "TMA has a box of each"
            outputs[8 * start : 8 * (start + there)] += 1
    assert (outputs == 1).all()
    assert math.isclose(even(16 * units, sms), units / sms / cdiv(units, sms))


def shares_of(units, clusters, rounds):
    """First unit and units of each program's rounds; as ``Tiles`` of the .cu."""
    starts = [units * c // clusters for c in range(clusters + 1)]
    return [
        [(start + mine * i // rounds, mine * (i + 1) // rounds - mine * i // rounds) for i in range(rounds)]
        for start, mine in ((start, end - start) for start, end in pairwise(starts))
    ]


@given(st.integers(1, 300), st.integers(1, 192), st.sampled_from([3, 7, 20]))
def test_even_shares_of_tiles_that_hold_old_lines_make_the_product(units, rows, sms):
    """What a program does, in numpy: loads into a tile that holds NaN, a product of all of it, and what is written."""
    cut, n, rng = even_cut(rows, 16 * units, sms), 8 * units, np.random.default_rng(units)
    x, weight = rng.standard_normal((rows, 3)), rng.standard_normal((2 * n, 3))
    out, half = np.full((rows, n), np.nan), cut.lines // 2
    for rounds in shares_of(units, min(sms, units), cut.rounds):
        lines, x_tile = np.full((cut.lines, 3), np.nan), np.full((cut.rows, 3), np.nan)
        for start, there in rounds:
            for part in (0, 1):  # gate, up
                first = 8 * start + part * n
                lines[part * half : part * half + 8 * there] = weight[first : first + 8 * there]
            x_tile[:rows], x_tile[rows : 8 * cdiv(rows, 8)] = x, 0
            product = (x_tile @ lines.T)[:rows, : half + 8 * there]
            out[:, 8 * start : 8 * (start + there)] = product[:, : 8 * there] * product[:, half:]
    np.testing.assert_allclose(out, (x @ weight[:n].T) * (x @ weight[n:].T))


@pytest.mark.parametrize("lines", range(16, 257, 16))
def test_parts_of_sums_meet_no_bank_conflicts(lines):
    """Eight rows of one part, which stmatrix writes at once, lie in different eighths of the banks."""
    parts, mixed_parts = lines // 8, 8 if lines % 64 == 0 else 4 if lines % 32 == 0 else 2
    at = np.array([[p ^ (r // (8 // mixed_parts) & (mixed_parts - 1)) for p in range(parts)] for r in range(8)])
    assert (np.sort(at, 1) == np.arange(parts)).all()
    eighths = (at + np.arange(8)[:, None] * parts) % 8
    assert (np.sort(eighths, 0) == np.arange(8)[:, None]).all()


def parted_tiles(rows, columns, each, rank, ranks, first, step):
    """Of one cluster: turns that it waits for, rows' pairs and columns; as ``PartedTiles`` of the .cu."""

    def take():
        start = (rank + turn if rank + turn < ranks else rank + turn - ranks) * each
        left = min(rows - start, each)
        return start, (cdiv(left, 256) * 8 if left > 0 else 0)

    turn = before = 0
    start, block = take()
    for tile in range(first, cdiv(rows, 256) * columns, step):
        last = turn
        while tile - before >= block // 8 * columns:
            before, turn = before + block // 8 * columns, turn + 1
            start, block = take()
        at, gone = tile - before, (tile - before) // block * 8
        beside = min(columns - gone, 8)
        yield (
            (None if turn == last else (rank + turn) % ranks),
            start // 256 + at % block // beside,
            (gone + at % block % beside),
        )


@given(st.integers(1, 20000), st.integers(1, 70), st.integers(2, 8), st.integers(0, 7), st.integers(1, 66))
def test_tiles_of_parts_are_each_computed_once_when_their_rows_have_arrived(rows, columns, ranks, rank, clusters):
    rank, each = rank % ranks, part_rows(rows, ranks)
    done = np.zeros((cdiv(rows, 256), columns), dtype=int)
    waited_for = set()
    for first in range(clusters):
        here, turns = {rank}, []
        for arrived, pair, column in parted_tiles(rows, columns, each, rank, ranks, first, clusters):
            here.add(arrived)
            assert pair * 256 // each in here
            turns.append((pair * 256 // each - rank) % ranks)
            done[pair, column] += 1
        assert turns == sorted(turns)
        waited_for |= here
    assert (done == 1).all()
    assert waited_for - {None} == {rank} | {part for part in range(ranks) if part * each < rows}


@pytest.fixture
def on_hopper(monkeypatch):
    """As if every CUDA device were one; which kernels were asked for, and what ``loads`` says."""
    asked = SimpleNamespace(kernels=[], loads=True)
    monkeypatch.setattr(nvrtc, "available", lambda device: device.type == "cuda")
    monkeypatch.setattr(persistent, "num_sms", lambda device: 132)
    monkeypatch.setattr(persistent, "loads", lambda kernel, device: asked.kernels.append(kernel) or asked.loads)
    return asked


def wanted(rows=8192, n=6144, k=1024, dtype=BF16, device="cuda", **kind):
    return persistent.use_persistent(rows, n, k, dtype, torch.device(device), **kind or {"gated": True})


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_many_rows_of_even_shares_are_taken_if_their_kernel_loads(on_hopper, kind):
    assert wanted(**kind) and wanted(dtype=BF16, rows=2048, n=8448, **kind)
    assert on_hopper.kernels == [cut_kernel(GRID, kind.get("gated", False), kind.get("head_dim", 0))] * 2
    on_hopper.loads = False
    assert not wanted(**kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_that_arrive_have_kernels_of_their_own(on_hopper, kind):
    assert wanted(**kind, parts=True)
    assert on_hopper.kernels == [cut_kernel(GRID, kind.get("gated", False), kind.get("head_dim", 0), parts=True)]
    assert not wanted(128, 34816, 5120, **kind, parts=True), "even shares wait for nobody"
    on_hopper.loads = False
    assert not wanted(**kind, parts=True)


def test_what_waits_for_rows_is_compiled_ahead(on_hopper, monkeypatch):
    monkeypatch.setattr(persistent, "compile_ahead", on_hopper.kernels.append)
    gate_up, heads = cut_kernel(GRID, True, 0, parts=True), cut_kernel(GRID, False, 128, parts=True)
    for head_dim, dtype, device, kernels in (
        (128, BF16, "cuda", [gate_up, heads]), (80, BF16, "cuda", [gate_up]), (128, torch.float16, "cuda", []),
        (128, BF16, "cpu", []),
    ):  # fmt: skip
        persistent.compile_for_parts(head_dim, dtype, torch.device(device))
        assert on_hopper.kernels == kernels
        on_hopper.kernels.clear()


@pytest.mark.parametrize(
    "what",
    [
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"rows": 1023, "n": 8448},  # shares even enough
        {"n": 6136},
        {"n": 6144 - 64, "head_dim": 128},
        {"n": 6144 - 32, "head_dim": 64},
        {"k": 1020},
        {"device": "cpu"},
    ],
    ids=str,
)
def test_few_rows_odd_sizes_other_dtypes_and_devices_are_left_to_others(on_hopper, what):
    assert busy(what.get("rows", 8192), what.get("n", 6144), 66) > 0.9
    assert not wanted(**what)
    assert not on_hopper.kernels


@pytest.mark.parametrize(("rows", "n"), [(1025, 6144), (1024, 6144), (1280, 4096), (8192, 256)])
def test_uneven_shares_are_left_to_the_library(on_hopper, rows, n):
    assert busy(rows, n, 66) < 0.9
    assert not wanted(rows, n) and not wanted(rows, n, head_dim=128)
    assert not on_hopper.kernels


@pytest.mark.parametrize(
    ("rows", "n", "k", "lines", "rounds"),
    [
        (65, 34816, 5120, 144, 2),
        (128, 34816, 5120, 144, 2),
        (129, 34816, 5120, 144, 2),
        (192, 34816, 5120, 144, 2),
        (160, 17408, 5120, 144, 1),
        (96, 24576, 4096, 192, 1),
    ],
)
def test_some_rows_of_large_weights_are_taken_in_even_shares(on_hopper, rows, n, k, lines, rounds):
    assert wanted(rows, n, k)
    cut = persistent_cut(rows, n, k, 132, True)
    assert on_hopper.kernels == [cut_kernel(cut, True, 0)]
    assert (cut.lines, cut.rounds, cut.rows) == (lines, rounds, 128 if rows <= 128 else 192)


@pytest.mark.parametrize(
    ("rows", "n", "k", "kind"),
    [
        (64, 34816, 5120, {"gated": True}),
        (193, 34816, 5120, {"gated": True}),
        (160, 34816, 5120, {"head_dim": 128}),
        (160, 4096, LARGE_WEIGHT // 4096, {"gated": True}),
        (160, 24576, 4096, {"gated": True}),  # shared memory has room for no wide tiles
        (160, 16 * 133, 1 << 14, {"gated": True}),  # one program has two units, the others one
    ],
)
def test_other_rows_small_weights_and_uneven_shares_are_not(on_hopper, rows, n, k, kind):
    assert not wanted(rows, n, k, **kind)
    assert not on_hopper.kernels


def test_a_gpu_that_is_not_hopper_is_left_to_the_library(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    nvrtc.available.cache_clear()
    try:
        assert not wanted()
    finally:
        nvrtc.available.cache_clear()


@pytest.mark.parametrize("folded", [True, False])
def test_gate_and_up_of_many_rows_go_here_with_their_norm(monkeypatch, folded):
    """Folded, as the rows' factors. With a reference in the kernel's place."""
    seen = []

    def gate_up(x, weight, factors=None):
        seen.append(factors is not None)
        gate, up = (F.linear(x, weight) * (1 if factors is None else factors[:, None])).chunk(2, -1)
        return F.silu(gate) * up

    x, weight = torch.randn(20, 40) * torch.logspace(-1, 1, 20)[:, None], torch.randn(64, 40) / 6
    norm_weight, bias = torch.ones(40) if folded else torch.randn(40), torch.randn(64)
    expected = norm_gate_up_reference(x, norm_weight, 1e-2, weight)
    asked = (20, 64, 40, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(products, "use_persistent", lambda *what, **kind: what == asked and kind == {"gated": True})
    monkeypatch.setattr(products, "persistent_gate_up", gate_up)
    torch.testing.assert_close(
        norm_gate_up(x, norm_weight, 1e-2, weight, folded=folded), expected, rtol=1e-4, atol=1e-5
    )
    assert seen == [folded]
    norm_gate_up(x, norm_weight, 1e-2, weight, bias)
    assert len(seen) == 1, "the kernel adds no bias"


# --------------------------------------------------------------------------- up to the driver


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_variant_compiles(compiled, reads_in_time, kind, parts):
    cubin = nvrtc.compile_cubin(cut_kernel(GRID, kind.get("gated", False), kind.get("head_dim", 0), parts).source)
    assert b"persistent_linear" in cubin
    reads_in_time(cubin)


@pytest.mark.parametrize("rows", MOST_ROWS)
def test_every_even_share_compiles(compiled, rows):
    for units in (1, 9, 13)[: 3 if rows == 128 else 2]:  # larger tiles leave three stages
        cut = even_cut(rows, 16 * units * 132, 132)
        assert cut.rounds == 1
        assert b"persistent_linear" in nvrtc.compile_cubin(cut_kernel(cut, True, 0).source)


def check_launch(told, config, pairs, sms):
    grid = config.gridDimX, config.gridDimY, config.gridDimZ
    assert grid == (min(2 * pairs, sms // 2 * 2), 1, 1)
    assert config.blockDimX == 384 and int(config.hStream) == 77
    assert config.sharedMemBytes == 3 * (128 + 256) * 128 + 128 * 256 * 2 + 128 * 16 + 1024 < hopper.SHARED_BYTES - 1024
    attributes, names = {a.id: a.value for a in config.attrs}, told.driver.CUlaunchAttributeID
    assert attributes[names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]
    size = attributes[names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION].clusterDim
    assert (size.x, size.y, size.z) == (2, 1, 1)


@pytest.mark.parametrize("sms", [132, 113])
@pytest.mark.parametrize("factored", [True, False])
@pytest.mark.parametrize(("rows", "n", "k", "pairs"), [(1, 8, 8, 1), (100, 136, 72, 2), (1300, 1536, 1024, 72)])
def test_the_driver_is_told_the_launch(told, monkeypatch, rows, n, k, pairs, factored, sms):
    """n: features of the result."""
    monkeypatch.setattr(persistent, "num_sms", lambda device: sms)
    x, weight = torch.zeros(rows, k + 64, dtype=BF16)[:, :k], torch.zeros(2 * n, k, dtype=BF16)
    factors = torch.ones(rows) if factored else None
    for _ in range(2):  # made, then kept
        out = persistent_gate_up(x, weight, factors)
        assert out.shape == (rows, n)
        config, kernel, (*values, heads) = told.seen.pop()
        assert kernel == cut_kernel(GRID, True, 0)
        pointers = [out.data_ptr(), factors.data_ptr() if factored else None]
        assert values == [5, 5, 5, *pointers, rows, n, cdiv(k, 64), 128, 0]
        assert not any(bytes(heads))
        check_launch(told, config, pairs, sms)
    assert not told.seen
    of_weight, of_x = (weight.data_ptr(), 2 * n, k, k, 128, 64), (x.data_ptr(), rows, k, k + 64, 128, 64)
    assert told.maps[:3] == [of_weight, of_weight, of_x]


@pytest.mark.parametrize(
    ("rows", "n", "k", "threads", "boxes"),
    [
        (65, 17408, 2048, 384, (72, 64, 72)),  # n: features of the result
        (128, 12288, 4096, 384, (96, 88, 128)),
        (129, 17408, 2048, 512, (72, 64, 136)),
        (192, 8704, 2048, 512, (72, 64, 192)),
    ],
)
def test_the_driver_is_told_even_shares(told, rows, n, k, threads, boxes):
    x, weight = torch.zeros(rows, k, dtype=BF16), torch.empty(2 * n, k, dtype=BF16)
    out = persistent_gate_up(x, weight)
    ((config, kernel, (*values, _)),) = told.seen
    cut = persistent_cut(rows, 2 * n, k, 132, True)
    assert cut.lines == 2 * boxes[0] and kernel == cut_kernel(cut, True, 0)
    assert values == [5, 5, 5, out.data_ptr(), None, rows, n, cdiv(k, 64), boxes[2], cut.rounds]
    assert (config.gridDimX, config.blockDimX, config.sharedMemBytes) == (132, threads, cut.shared_bytes)
    names = told.driver.CUlaunchAttributeID
    assert [a.id for a in config.attrs] == [names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION], "no cluster"
    assert [(at, box) for at, *_, box, _ in told.maps] == list(
        zip([weight.data_ptr(), weight.data_ptr(), x.data_ptr()], boxes, strict=True)
    )


def test_no_program_is_without_a_share(told):
    weight = torch.zeros(16 * 5, 64, dtype=BF16)
    for most in MOST_ROWS:
        persistent_gate_up(torch.zeros(70, 64, dtype=BF16), weight, None, even_cut(most, 16 * 5, 132))
        config, kernel, (*values, _) = told.seen.pop()
        assert config.gridDimX == 5 and values[-1] == 1 and ("LINES", 16) in kernel.macros
        assert [box for *_, box, _ in told.maps[-3:]] == [8, 8, 72]


def test_rows_that_tma_cannot_read_are_copied(told):
    weight, wide = torch.zeros(16, 64, dtype=BF16), torch.zeros(20, 128, dtype=BF16)
    for x in (wide[:, 1:65], torch.zeros(20, 66, dtype=BF16)[:, :64], torch.zeros(64, 20, dtype=BF16).T):
        persistent_gate_up(x, weight)
        at, *shape = told.maps[-1]
        assert shape == [20, 64, 64, 128, 64] and at != x.data_ptr() and at % 16 == 0


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_the_kernel_is_told_where_heads_go(told, normed, keep):
    """``HeadsArgument`` itself: test_cluster_linear.py."""
    rows, hidden, heads, kv_heads, dim = 300, 72, 6, 3, 64
    cache = torch.zeros(3, 2, 20, 16, kv_heads, dim, dtype=BF16)  # as an engine's, of three layers
    x, weight = torch.zeros(rows, hidden, dtype=BF16), torch.zeros((heads + 2 * kv_heads) * dim, hidden, dtype=BF16)
    weights, factors = torch.ones(2, dim, dtype=BF16) if normed else (None, None), torch.ones(rows)
    to = Heads(
        *weights, 0.25, torch.zeros(500, dim), torch.arange(rows), *cache[1], torch.arange(rows), heads, kv_heads, dim
    )
    q, k, v = persistent_qkv(x, weight, to, factors, keep=keep)
    assert q.shape == (rows, heads, dim)
    ((config, kernel, (*values, sent)),) = told.seen
    assert kernel == cut_kernel(GRID, False, dim)
    assert values == [5, 5, 5, q.data_ptr(), factors.data_ptr(), rows, len(weight), 2, 128, 0]
    check_launch(told, config, 2 * 3, 132)
    kept = None
    if keep:
        assert k.shape == v.shape == (rows, kv_heads, dim)
        assert k.stride() == v.stride() == (2 * kv_heads * dim, dim, 1)
        assert v.data_ptr() == k.data_ptr() + 2 * kv_heads * dim
        kept = k
    else:
        assert k is v is None
    assert bytes(sent) == bytes(hopper.heads_argument(to, kept)) and sent.kept == (kept.data_ptr() if keep else None)


def test_the_kernel_is_told_who_sends_which_rows(told):
    arrived = torch.zeros(2, 4, dtype=torch.int32)[1]
    arrival = Arrival(arrived, 777, 2, 512)
    x, weight = torch.zeros(1800, 72, dtype=BF16), torch.zeros(6 * 64, 72, dtype=BF16)
    persistent_gate_up(x, weight, torch.ones(1800), arrival=arrival)
    cache = torch.zeros(2, 200, 16, 1, 64, dtype=BF16)
    rows = torch.arange(1800)
    persistent_qkv(
        x, weight, Heads(None, None, 0.0, torch.zeros(1800, 64), rows, *cache, rows, 4, 1, 64), arrival=arrival
    )
    for (config, kernel, (*values, _, sent)), kind in zip(told.seen, [(True, 0), (False, 64)], strict=True):
        assert kernel == cut_kernel(GRID, *kind, parts=True)
        check_launch(told, config, 8 * 2, 132)
        assert values[5:] == [1800, 192 if kind[0] else 384, 2, 128, 0]
        sizes = sent.number, sent.rank, sent.ranks, sent.each
        assert (sent.arrived, *sizes) == (arrived.data_ptr(), 777, 2, 4, 512)
    with pytest.raises(AssertionError):
        persistent_gate_up(x, weight, arrival=Arrival(arrived, 1, 0, 384))  # a pair of tiles of two parts


def test_while_kernels_are_only_compiled_none_is_launched(told, monkeypatch):
    monkeypatch.setattr(persistent, "compiling", lambda: True)
    x = torch.zeros(2000, 64, dtype=BF16)
    assert persistent_gate_up(x, torch.zeros(32, 64, dtype=BF16)).shape == (2000, 16)
    assert not told.seen


# --------------------------------------------------------------------------- results


@pytest.fixture
def guarded(gpu, monkeypatch):
    """Outputs come filled with NaN, and what lies behind them in memory must stay as it is."""
    made, beyond = [], 1 << 16

    def empty(shape, *, dtype, device):
        size = math.prod(shape)
        made.append(torch.full((size + beyond,), 7.0, dtype=dtype, device=device))
        return made[-1][:size].fill_(float("nan")).view(shape)

    monkeypatch.setattr(persistent, "torch", SimpleNamespace(empty=empty, bfloat16=torch.bfloat16))
    yield
    assert made
    for whole in made:
        assert (whole[-beyond:] == 7).all(), "memory behind an output was written"


def drawn(gpu, rows, n, k):
    """x with a row stride, and a weight."""
    x = torch.randn(rows, k + 64, device=gpu, dtype=BF16)[:, :k]
    return x, (torch.randn(n, k, device=gpu) / k**0.5).bfloat16()


def error(out, expected):
    """NaN, which no limit allows, if an element was not written."""
    return ((out.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.gpu
@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gate_and_up(gpu, rows, n, k):
    x, weight = drawn(gpu, rows, n, k)
    factors = torch.rand(rows, device=gpu) * 3 + 0.1
    product = x.float() @ weight.float().T
    for given_factors in (None, factors):
        gate, up = (product if given_factors is None else product * factors[:, None]).chunk(2, -1)
        out = persistent_gate_up(x, weight, given_factors)
        assert error(out, F.silu(gate) * up) < 6e-3
        assert torch.equal(persistent_gate_up(x.contiguous(), weight, given_factors), out)


@pytest.mark.gpu
@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("rows", [*SOME_ROWS, 1])
@pytest.mark.parametrize(("n", "k"), LARGE + SMALL)
def test_gate_and_up_in_even_shares(gpu, rows, n, k):
    """Beside and behind x, and behind the factors, lies NaN."""
    weight, whole = drawn(gpu, 1, n, k)[1], torch.full((rows + 64, k + 64), float("nan"), device=gpu, dtype=BF16)
    x = whole[:rows, :k].normal_()
    factors = torch.full((rows + 64,), float("nan"), device=gpu)[:rows].uniform_(0.1, 3.1)
    product = x.float() @ weight.float().T
    torch.cuda.synchronize()  # the weight is no constant before: see pdl.py
    for given_factors in (None, factors):
        gate, up = (product if given_factors is None else product * factors[:, None]).chunk(2, -1)
        expected = F.silu(gate) * up
        for most in MOST_ROWS:
            if most < rows:
                continue
            cut = even_cut(most, n, num_sms(gpu))
            out = persistent_gate_up(x, weight, given_factors, cut)
            assert error(out, expected) < 6e-3, cut
            for _ in range(3):  # each starts while the one before runs
                again = persistent_gate_up(x, weight, given_factors, cut)
            assert torch.equal(again, out), cut


@pytest.mark.gpu
@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("factored", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "normed", "hidden"), HEADS)
def test_a_projection_that_norms_rotates_and_stores(gpu, rows, heads, kv_heads, head_dim, normed, hidden, factored):
    """Against the reference of the product in bfloat16, as which the kernel, too, keeps it. Factors are powers of two:
    the reference rounds no more often than the kernel does."""
    x, weight = drawn(gpu, rows, (heads + 2 * kv_heads) * head_dim, hidden)
    factors = 2.0 ** torch.randint(-3, 4, (rows,), device=gpu) if factored else None
    norms = (torch.rand(2, head_dim, device=gpu) + 0.5).bfloat16() if normed else (None, None)
    angles, positions = torch.randn(500, head_dim, device=gpu), torch.randint(500, (rows,), device=gpu)
    blocks = cdiv(rows, BLOCK_SIZE) + 5
    slots = torch.randperm(blocks * BLOCK_SIZE, device=gpu)[:rows]
    caches = torch.full((3, 3, 2, blocks, BLOCK_SIZE, kv_heads, head_dim), 7.0, device=gpu, dtype=BF16)
    expected, stored, stored_again = caches  # each as an engine's, of three layers
    sizes = (heads, kv_heads, head_dim)

    product = (x.float() @ weight.float().T).bfloat16()
    if factored:
        product = (product * factors[:, None]).bfloat16()
    wanted_q = qk_norm_rope_store_reference(product, *norms, EPS, angles, positions, *expected[1], slots, *sizes)
    to = Heads(*norms, EPS, angles, positions, *stored[1], slots, *sizes)
    q, k, v = persistent_qkv(x, weight, to, factors, keep=True)
    again = Heads(*norms, EPS, angles, positions, *stored_again[1], slots, *sizes)
    q_again, *nothing = persistent_qkv(x.contiguous(), weight, again, factors)

    limit = 2e-3 if rows > 1 else 6e-3  # one element that is rounded the other way counts for more
    rows_of = stored.flatten(2, 3)  # (layers, 2, slots, kv heads, head_dim)
    assert error(q, wanted_q) < limit
    for part in (0, 1):
        assert error(rows_of[1, part, slots], expected.flatten(2, 3)[1, part, slots]) < limit, ("keys", "values")[part]
    assert torch.equal(k, rows_of[1, 0, slots]) and torch.equal(v, rows_of[1, 1, slots])
    assert nothing == [None, None]
    assert torch.equal(q_again, q) and torch.equal(stored_again, stored)
    rows_of[1, :, slots] = 7.0
    assert (stored == 7).all(), "the cache of others was written"


@pytest.mark.gpu
@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize(("rows", "n", "k"), [(8192, 6144, 1024), (100, 34816, 5120), (180, 34816, 5120)])
def test_what_the_layers_call_is_right_for_many_rows(gpu, rows, n, k, folded):
    x, weight = drawn(gpu, rows, n, k)
    x = x * torch.logspace(-1, 1, len(x), device=gpu).bfloat16()[:, None]
    norm_weight = torch.ones(k, device=gpu, dtype=BF16)
    if not folded:
        norm_weight.uniform_(0.5, 1.5)
    torch.cuda.synchronize()
    assert persistent.use_persistent(rows, n, k, BF16, gpu, gated=True), "a case that tells nothing"
    expected = norm_gate_up_reference(x.float(), norm_weight.float(), EPS, weight.float())
    assert error(norm_gate_up(x, norm_weight, EPS, weight, folded=folded), expected) < 6e-3


class Others:
    """Who sends the rows of x and the factors that are not of ``rank``, late, as copy engines do: while the product
    holds every multiprocessor. Copies come from pinned memory, for which the driver takes no multiprocessor either."""

    def __init__(self, x, factors, rank, ranks):
        self.x, self.factors, self.rank, self.each = x, factors, rank, part_rows(len(x), ranks)
        self.lane, self.arrived = torch.cuda.Stream(), torch.zeros(ranks, dtype=torch.int32, device=x.device)
        self.sent = [None if tensor is None else tensor.cpu().pin_memory() for tensor in (x, factors)]
        self.numbers = torch.arange(1024, dtype=torch.int32).pin_memory()
        self.ballast, self.sink = torch.empty(8 << 20).pin_memory(), torch.empty(8 << 20, device=x.device)
        self.others = [(rank + i) % ranks for i in range(1, ranks)]

    def rows(self, rank):
        return slice(rank * self.each, (rank + 1) * self.each)

    def poison(self):
        for peer in self.others:
            for tensor in (self.x, self.factors):
                if tensor is not None:
                    tensor[self.rows(peer)] = float("nan")
        torch.cuda.synchronize()

    def send(self, number, order):
        """After some 10 ms, the last of which are between the parts. Returns the end's event."""
        with torch.cuda.stream(self.lane):
            torch.cuda._sleep(15_000_000)
            for peer in order:
                self.sink.copy_(self.ballast, non_blocking=True)
                for tensor, sent in zip((self.x, self.factors), self.sent, strict=True):
                    if tensor is not None:
                        tensor[self.rows(peer)].copy_(sent[self.rows(peer)], non_blocking=True)
                self.arrived[peer : peer + 1].copy_(self.numbers[number : number + 1], non_blocking=True)
            return self.lane.record_event()

    def calls(self, product):
        """What ``product(arrival)`` returns in several calls, numbers as an exchange's."""
        product(None)  # compiled and loaded: it must be launched while nothing has arrived
        self.arrived.fill_(1020)
        product(Arrival(self.arrived, 1020, self.rank, self.each))
        for i, number in enumerate((1021, 1022, 1023, 1, 2)):
            self.poison()
            end = self.send(number, self.others[:: 1 if i % 2 else -1])
            result = product(Arrival(self.arrived, number, self.rank, self.each))
            assert not end.query(), "a case that tells nothing: all had arrived"
            torch.cuda.synchronize()
            yield result


@pytest.mark.gpu
@pytest.mark.parametrize("factored", [True, False])
@pytest.mark.parametrize(("rank", "ranks"), RANKS)
@pytest.mark.parametrize(("rows", "n", "k"), [(8192, 17408, 5120), (4000, 272, 72), (1300, 6144, 1024)])
def test_gate_and_up_of_rows_that_arrive_late(gpu, rows, n, k, rank, ranks, factored):
    """The same bits as of rows that are there: they are of the same tiles."""
    x, weight = drawn(gpu, rows, n, k)
    x = x.contiguous()  # a part's rows are copied in one piece
    factors = torch.rand(rows, device=gpu) * 3 + 0.1 if factored else None
    torch.cuda.synchronize()
    expected = persistent_gate_up(x, weight, factors)
    others = Others(x, factors, rank, ranks)
    for result in others.calls(lambda arrival: persistent_gate_up(x, weight, factors, arrival=arrival)):
        assert torch.equal(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("rank", "ranks"), RANKS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "hidden"), [(20, 4, 128, 5120), (32, 8, 64, 2048)])
def test_a_projection_of_rows_that_arrive_late(gpu, heads, kv_heads, head_dim, hidden, rank, ranks):
    rows = 4300
    x, weight = drawn(gpu, rows, (heads + 2 * kv_heads) * head_dim, hidden)
    x, factors = x.contiguous(), torch.rand(rows, device=gpu) * 3 + 0.1
    norms, angles = (torch.rand(2, head_dim, device=gpu) + 0.5).bfloat16(), torch.randn(500, head_dim, device=gpu)
    positions, slots = torch.randint(500, (rows,), device=gpu), torch.randperm(rows + 40, device=gpu)[:rows]
    cache = torch.zeros(2, cdiv(rows + 40, BLOCK_SIZE), BLOCK_SIZE, kv_heads, head_dim, device=gpu, dtype=BF16)
    torch.cuda.synchronize()
    to = Heads(*norms, EPS, angles, positions, *cache, slots, heads, kv_heads, head_dim)
    expected = persistent_qkv(x, weight, to, factors, keep=True)
    expected_cache = cache.clone()
    others = Others(x, factors, rank, ranks)
    for result in others.calls(lambda arrival: persistent_qkv(x, weight, to, factors, keep=True, arrival=arrival)):
        assert all(torch.equal(got, want) for got, want in zip(result, expected, strict=True))
        assert torch.equal(cache, expected_cache)
        cache.copy_(expected_cache.where(expected_cache == 0, float("nan")))  # what is to be written again


@pytest.mark.gpu
def test_of_two_launches_into_one_output_the_second_stays(gpu):
    """The first multiplies long, the second hardly: who does not wait for the kernel before is overwritten by it."""
    long, long_weight = drawn(gpu, 1300, 2048, 8192)
    short, short_weight = drawn(gpu, 1300, 2048, 64)
    expected, out = persistent_gate_up(short, short_weight), torch.empty(1300, 1024, device=gpu, dtype=BF16)
    for _ in range(50):
        persistent._launch(long, long_weight, out, 1024, None, gated=True)
        persistent._launch(short, short_weight, out, 1024, None, gated=True)
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [96, 160])
def test_a_chain_of_even_shares_in_a_graph_gives_the_same_bits_every_time(gpu, captured, rows):
    """Products whose weights come while the kernel before still runs, 100 replays."""
    hidden, inner, layers = 2048, 8704, 4
    weights = [[drawn(gpu, 1, *size)[1] for size in ((2 * inner, hidden), (hidden, inner))] for _ in range(layers)]
    norm, start = torch.ones(hidden, device=gpu, dtype=BF16), torch.randn(rows, hidden, device=gpu).bfloat16()
    h = torch.empty_like(start)
    torch.cuda.synchronize()
    assert persistent_cut(rows, 2 * inner, hidden, num_sms(gpu), True), "a case that tells nothing"

    def chain():
        h.copy_(start)
        for first, down in weights:
            linear_add(persistent_gate_up(h, first, row_factors(h, EPS)), down, None, h)

    expected = start.float()
    for first, down in weights:
        gate, up = (rms_norm(expected, norm.float(), EPS) @ first.float().T).chunk(2, -1)
        expected = expected + (F.silu(gate) * up) @ down.float().T
    graph = captured(chain)
    graph.replay()
    first_result = h.clone()
    assert error(first_result, expected) < 2e-2
    for _ in range(100):
        graph.replay()
        assert torch.equal(h, first_result)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1024, 1300])
def test_a_chain_in_a_graph_gives_the_same_bits_every_time(gpu, rows):
    """Kernels that start while the one before still runs, some right behind their own kind, into the same caches: 100
    replays give what they give one by one, each waited for."""
    hidden, inner, heads, kv_heads, dim, layers = 1024, 3072, 16, 8, 128, 4
    sizes = [(2 * inner, hidden), (hidden, inner), ((heads + 2 * kv_heads) * dim, hidden), (2 * inner, heads * dim)]
    weights = [[drawn(gpu, 1, *size)[1] for size in (*sizes, sizes[1])] for _ in range(layers)]
    norm = torch.ones(hidden, device=gpu, dtype=BF16)
    start, angles = torch.randn(rows, hidden, device=gpu).bfloat16(), torch.randn(500, dim, device=gpu)
    positions, slots = torch.randint(500, (rows,), device=gpu), torch.randperm(rows + 40, device=gpu)[:rows]
    cache = torch.zeros(2, cdiv(rows + 40, BLOCK_SIZE), BLOCK_SIZE, kv_heads, dim, device=gpu, dtype=BF16)
    norms = (torch.rand(2, dim, device=gpu) + 0.5).bfloat16()
    torch.cuda.synchronize()
    to = Heads(*norms, EPS, angles, positions, *cache, slots, heads, kv_heads, dim)

    def chain(then=lambda result: result):
        """All queries, keys and values, and the last product. ``then`` takes what each kernel returns."""
        h, attended = start, []
        for first, down, qkv, second, last in weights:
            h = then(persistent_gate_up(h, first, then(row_factors(h, EPS))))
            h = then(rms_norm(then(linear(h, down)), norm, EPS))
            attended += then(persistent_qkv(h, qkv, to, keep=True))
            h = then(persistent_gate_up(attended[-3].flatten(1), second))
            h = then(linear(h, last))
        return [*attended, h]

    def waited_for(result):
        torch.cuda.synchronize()
        return result

    expected = chain(waited_for)
    expected_cache = cache.clone()
    assert all(tensor.isfinite().all() for tensor in expected)
    for got, want in zip(chain(), expected, strict=True):
        assert torch.equal(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = chain()
    for _ in range(100):
        cache.fill_(0)
        graph.replay()
        assert torch.equal(cache, expected_cache)
        assert all(torch.equal(got, want) for got, want in zip(results, expected, strict=True))
