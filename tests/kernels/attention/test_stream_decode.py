"""Decode attention on a stream of pages: what the driver is told, without a GPU; on Hopper, the results against the
reference, with garbage wherever nothing was stored."""

import ctypes
import random
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from minivllm.kernels import nvrtc
from minivllm.kernels.attention import stream_decode as stream
from minivllm.kernels.attention.paged_decode import NewTokens, paged_decode_reference
from minivllm.kernels.attention.rotary import qk_norm_rope_store, qk_norm_rope_store_reference
from minivllm.kernels.attention.stream_decode import StreamWorkspace, fits_stream, schedule_stream, stream_decode
from minivllm.kernels.rms_norm import RowScale

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = [(16, 8, 128), (40, 8, 128), (20, 4, 128), (16, 2, 128), (32, 8, 64), (16, 2, 64)]  # heads, kv heads, head_dim


# --------------------------------------------------------------------------- which attention


def fits(heads=16, kv_heads=8, dim=128, block_size=16, dtype=BF16, device="cuda", window=None, rows=256, cache=BF16):
    return fits_stream(heads, kv_heads, dim, block_size, torch.device(device), window, rows, dtype, cache)


@pytest.fixture
def on_hopper(monkeypatch):
    """As if every CUDA device were one; whether kernels load there."""
    answer = SimpleNamespace(loads=True)
    monkeypatch.setattr(nvrtc, "available", lambda device: device.type == "cuda")
    monkeypatch.setattr(stream, "num_sms", lambda device: 132)
    monkeypatch.setattr(stream, "loads", lambda kernel, device: answer.loads)
    return answer


def test_attention_of_few_key_heads_fits(on_hopper):
    assert fits() and fits(64, 8) and fits(20, 4) and fits(8, 2, 64)
    assert fits(cache=FP8)


@pytest.mark.parametrize(
    "what",
    [
        {"kv_heads": 1},  # pages too small to keep eight warps busy
        {"heads": 64, "kv_heads": 16},
        {"heads": 72},
        {"dim": 96},
        {"block_size": 32},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"device": "cpu"},
        {"window": 512},
        {"rows": stream.MAX_ROWS + 1},
        {"cache": torch.float16},
        {"dtype": torch.float16, "cache": FP8},
    ],
    ids=str,
)
def test_other_attention_is_left_to_the_other_kernel(on_hopper, what):
    assert not fits(**what)


def test_it_is_taken_where_it_loads(on_hopper):
    workspace = StreamWorkspace(256, 16, 8, 128, "cpu")
    assert workspace.takes_heads() and workspace.takes_qkv()
    on_hopper.loads = False
    assert not workspace.takes_heads() and not workspace.takes_qkv()


@pytest.mark.parametrize(("qkv", "float8"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_every_kind_compiles(compiled, reads_in_time, heads, kv_heads, dim, qkv, float8):
    kernel = stream._kernel(kv_heads, heads // kv_heads, dim, qkv, float8=float8)
    cubin = nvrtc.compile_cubin(kernel.source)
    assert b"stream_decode" in cubin
    reads_in_time(cubin)


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_the_stages_fit_a_multiprocessor_and_parts_their_buffer(monkeypatch, heads, kv_heads, dim, float8):
    monkeypatch.setattr(stream, "num_sms", lambda device: 132)
    workspace = StreamWorkspace(stream.MAX_ROWS, heads, kv_heads, dim, "cpu", float8)
    page = (2 if float8 else 4) * 16 * kv_heads * dim
    static = 8 * (2 * 24 + 4) + 8  # barriers, a length
    row = (heads + 2 * kv_heads) * dim * 2
    assert 2 <= workspace.stages <= 24
    assert workspace.shape.shared_bytes >= workspace.stages * page + row + 4 * 1025
    assert workspace.shape.shared_bytes + static <= 227 * 1024
    tiles = dim * kv_heads // 8 // 16  # of 16 dimensions that one of eight warps has
    assert workspace.parts[0, 0].numel() == 32 * (4 * tiles + 4)
    assert holds_no_part(workspace)


def test_the_driver_is_told_the_launch(told):
    workspace = StreamWorkspace(64, 20, 4, 128, "cpu")
    q, out = torch.zeros(2, 40, 20, 128, dtype=BF16)
    k_cache, v_cache = torch.zeros(2, 9, 16, 4, 128, dtype=BF16)
    tables, lens = torch.zeros(40, 33, dtype=torch.int32)[:, :7], torch.ones(40, dtype=torch.int32)
    stream_decode(q, k_cache, v_cache, tables, lens, 0.5, out, workspace, early=True)
    ((config, kernel, values),) = told.seen
    assert kernel == stream._kernel(4, 5, 128) and bytes(values.pop()) == bytes(ctypes.sizeof(stream._NewArgument))
    tensors = (q, out, tables, lens, workspace.starts, workspace.shares, workspace.parts)
    numbers = [33, 20 * 128, 20 * 128, 40, workspace.stages, 1]
    assert values[:-1] == [5, 5, *(t.data_ptr() for t in tensors), *numbers]
    assert values[-1] == pytest.approx(0.5 * 1.4426950408889634)
    assert (config.gridDimX, config.gridDimY, config.blockDimX, int(config.hStream)) == (132, 1, 384, 77)
    assert told.maps == [(cache.data_ptr(), 9, 16, 512) for cache in (k_cache, v_cache)]
    told.seen.clear()
    told.maps.clear()
    stream_decode(
        q, k_cache.to(FP8), v_cache.to(FP8), tables, lens, 0.5, out, StreamWorkspace(64, 20, 4, 128, "cpu", True)
    )
    assert told.seen.pop()[1] == stream._kernel(4, 5, 128, float8=True)
    assert [its[1:] for its in told.maps] == [(9, 16, 256)] * 2, "two numbers of float8 for one of bfloat16"
    x, weights, angles = torch.zeros(40, 64, dtype=BF16), torch.zeros(2, 128, dtype=BF16), torch.zeros(99, 128)
    positions, slots = torch.zeros(2, 40, dtype=torch.int64)
    new = NewTokens(weights[0], None, 1e-6, angles, positions, slots, RowScale(x, 1e-5))
    qkv = torch.zeros(40, 28 * 128, dtype=BF16)
    stream_decode(qkv, k_cache, v_cache, tables, lens, 0.5, out, workspace, new)
    ((_, kernel, values),) = told.seen
    assert kernel == stream._kernel(4, 5, 128, True)
    assert values[2] == qkv.data_ptr() and values[10:15] == [28 * 128, 20 * 128, 40, workspace.stages, 0]
    its = values[-1]
    assert (its.x, its.query_norm, its.key_norm) == (x.data_ptr(), weights.data_ptr(), None)
    assert (its.angles, its.positions, its.slots) == (angles.data_ptr(), positions.data_ptr(), slots.data_ptr())
    assert (its.keys, its.values) == (k_cache.data_ptr(), v_cache.data_ptr())
    assert (its.x_stride, its.angles_stride, its.size) == (64, 128, 64)
    assert (its.eps, its.x_eps) == (pytest.approx(1e-6), pytest.approx(1e-5))
    for unread in (
        torch.ones(40, 60, dtype=BF16),
        torch.ones(40, 65, dtype=BF16)[:, 1:],
    ):  # applied before
        told.seen.clear()
        of_unread = replace(new, scale=RowScale(unread, 0.0))
        stream_decode(qkv, k_cache, v_cache, tables, lens, 0.5, out, workspace, of_unread)
        ((_, kernel, values),) = told.seen
        assert kernel == stream._kernel(4, 5, 128, True) and values[-1].x is None and values[2] != qkv.data_ptr()


SHARED_OUT = [  # lengths, programs, and whether each has one sequence
    ([1, 16, 17, 0, 300, 32], 6, False), ([700, 3, 5000], 6, False), ([40] * 8, 6, False), ([1] * 8, 7, False),
    ([160] * 4, 7, False), ([1], 6, True), ([1, 16, 17, 0, 300, 32], 40, True), ([700, 3, 5000], 132, True),
    ([40] * 8, 8, True), ([6000], 132, True), ([190, 170, 20, 300], 10, True),
]  # fmt: skip


@pytest.mark.parametrize(("lens", "programs", "apart"), SHARED_OUT, ids=str)
def test_pages_are_counted_and_shared_out(where, lens, programs, apart, monkeypatch):
    device, _ = where
    monkeypatch.setattr(stream, "num_sms", lambda device: programs)
    workspace = StreamWorkspace(8, 16, 8, 128, device)
    tables = torch.arange(8 * 400, dtype=torch.int32, device=device).view(8, 400)
    schedule_stream(workspace, tables, torch.tensor(lens, dtype=torch.int32, device=device), len(lens))
    pages = [max(-(-n // 16), 1) for n in lens]  # of an empty sequence one is read, and not heeded
    starts = [sum(pages[:i]) for i in range(len(pages) + 1)]
    assert workspace.starts[: len(starts)].tolist() == starts
    where_page = [(row, i) for row, n in enumerate(pages) for i in range(n)]
    busy = {}  # programs of each sequence, and how many pages of it each has
    for program, told in enumerate(workspace.shares.tolist()):
        first, last = told[:2]
        if first == last:
            assert told[4] == 0
            continue
        assert first == sum(sum(its.values()) for its in busy.values()), "each page once"
        for row, _ in where_page[first:last]:
            its = busy.setdefault(row, {})
            its[program] = its.get(program, 0) + 1
        rows = where_page[first][0], where_page[last - 1][0]
        own = [(row, i) for row, i in where_page[first:last] if row == rows[1]][:32]  # it begins with its last sequence
        assert told[2:7] == [*rows, len(own), own[-1][1] == pages[rows[1]] - 1, min(busy[rows[0]])]
        assert told[8 : 8 + len(own)] == [row * 400 + i for row, i in own]
    assert [sum(its.values()) for its in busy.values()] == pages
    if apart:
        assert len({program for its in busy.values() for program in its}) == sum(map(len, busy.values()))
        for its in map(list, map(dict.values, busy.values())):
            assert max(its) - its[-1] <= 1 and its[-1] == min(its), "who puts parts together has the fewest pages"
    else:
        shares = [last - first for first, last, *_ in workspace.shares.tolist() if first < last]
        assert max(shares) - min(shares) <= 1


# --------------------------------------------------------------------------- on Hopper


def holds_no_part(workspace):
    return bool((workspace.parts.view(torch.int32) == -1).all())


DTYPES = {"bfloat16": BF16, "float8": FP8}  # of the cache
_draw = random.Random(0)
LENGTHS = {
    "one key": [1],
    "ends of pages": [5, 15, 16, 17, 31, 32, 33],
    "some": [_draw.randint(1, 300) for _ in range(40)],
    "long and short": [3000, 1, 2, 5000, 16, 700] + [40] * 12,
    "many": [_draw.randint(1, 900) for _ in range(200)],
    "one a row": [1] * 300,
    "few and long": [6000] * 3,
}


class Case:
    """Rows of such lengths; pages drawn from all over the cache, and NaN where no key was stored."""

    def __init__(self, lens, heads, kv_heads, dim, device, dtype=BF16):
        pages = [-(-max(n, 1) // 16) for n in lens]
        blocks = 1 + torch.randperm(sum(pages), device=device).int()
        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)
        self.tables = torch.zeros(len(lens), max(pages) + 3, dtype=torch.int32, device=device)
        self.cache = torch.full((2, sum(pages) + 1, 16, kv_heads, dim), float("nan"), dtype=BF16, device=device)
        for row, (n, some) in enumerate(zip(lens, blocks.split(pages), strict=True)):
            self.tables[row, : len(some)] = some
            keys = torch.randn(2, len(some) * 16, kv_heads, dim, device=device, dtype=BF16)
            keys[:, n:] = float("nan")
            self.cache[:, some.long()] = keys.unflatten(1, (-1, 16))
        self.cache = self.cache.to(dtype)
        self.q = torch.randn(len(lens), heads, dim, device=device, dtype=BF16)
        self.workspace = StreamWorkspace(max(len(lens), 16), heads, kv_heads, dim, device, dtype == FP8)
        assert fits_stream(heads, kv_heads, dim, 16, self.q.device, None, len(lens), BF16, dtype)

    def sibling(self):
        """Another layer's: keys, values and queries of its own, all else the same."""
        other = copy(self)
        stored, keys = self.cache.to(BF16), torch.randn(self.cache.shape, device=self.q.device, dtype=BF16)
        other.cache = torch.where(stored.isnan(), stored, keys).to(self.cache.dtype)
        other.q = torch.randn_like(self.q)
        return other

    def run(self, out=None, schedule=True, early=False):
        out = torch.full_like(self.q, float("nan")) if out is None else out
        if schedule:
            schedule_stream(self.workspace, self.tables, self.lens, len(self.lens))
        scale = self.q.shape[-1] ** -0.5
        stream_decode(self.q, *self.cache, self.tables, self.lens, scale, out, self.workspace, early=early)
        return out

    def expected(self):
        k, v = torch.nan_to_num(self.cache.float()).cpu()
        scale = self.q.shape[-1] ** -0.5
        return paged_decode_reference(self.q.float().cpu(), k, v, self.tables.cpu(), self.lens.cpu(), scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_it_attends_as_the_reference_does(gpu, close, lens, heads, kv_heads, dim, dtype):
    case = Case(LENGTHS[lens], heads, kv_heads, dim, gpu, DTYPES[dtype])
    expected = case.expected()
    torch.cuda.synchronize()
    first = case.run()
    close(first, expected)
    for _ in range(5):  # what it leaves in its workspace is what it found, and parts are put together in one order
        assert torch.equal(case.run(), first)
    assert holds_no_part(case.workspace)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [-1, 0x7FFF])
def test_parts_that_are_no_numbers_arrive(gpu, close, bits):
    """Words that are not there are NaN of one sign: no product, sum or maximum of NaN may be taken for one."""
    case = Case([4000, 900, 40], 16, 8, 128, gpu)
    case.cache.view(torch.int16)[:, case.tables[0, :250].long()] = bits
    expected = case.expected()
    result = case.run()
    assert result[0].isnan().all() and holds_no_part(case.workspace)
    close(result[1:], expected[1:])


@pytest.mark.gpu
def test_a_sequence_without_keys_gives_zeros(gpu):
    case = Case([0, 20, 0], 16, 8, 128, gpu)
    torch.cuda.synchronize()
    out = case.run()
    assert not out[0].any() and not out[2].any() and out[1].isfinite().all()


@pytest.mark.gpu
def test_launches_ahead_of_the_kernel_before_read_what_it_writes(gpu, captured, close):
    """In a graph, each behind a kernel that writes the newest keys and starts the next one late (the rotary kernel)."""
    lens = [_draw.randint(1, 700) for _ in range(60)]
    cases = [Case(lens, 16, 8, 128, gpu)]
    cases += [cases[0].sibling() for _ in range(2)]
    qkv = [torch.randn(len(lens), 32 * 128, device=gpu, dtype=BF16) for _ in cases]
    cos_sin = torch.cat([torch.ones(1000, 64, device=gpu), torch.zeros(1000, 64, device=gpu)], 1)  # no turn
    positions = cases[0].lens.long() - 1
    slots = [c.tables.gather(1, positions[:, None] // 16)[:, 0].long() * 16 + positions % 16 for c in cases]
    outs = [torch.empty_like(case.q) for case in cases]

    def step():
        for i, (case, out) in enumerate(zip(cases, outs, strict=True)):
            args = (None, None, 1e-6, cos_sin, positions, *case.cache, slots[i], 16, 8, 128)
            case.q = qk_norm_rope_store(qkv[i], *args)
            case.run(out, schedule=True, early=False) if not i else case.run(out, schedule=False, early=True)

    graph = captured(step)
    for _ in range(4):
        for case, packed, slot in zip(cases, qkv, slots, strict=True):
            packed.normal_()
            case.cache.flatten(1, 2)[:, slot] = float("nan")  # the newest: what is read too early shows
        graph.replay()
        for case, out in zip(cases, outs, strict=True):
            close(out, case.expected())


class Packed(Case):
    """A case whose newest keys are still in the projection, and NaN in the cache."""

    def __init__(self, lens, heads, kv_heads, dim, device, normed, scaled, dtype=BF16):
        super().__init__(lens, heads, kv_heads, dim, device, dtype)
        rows, turns = len(lens), torch.rand(max(lens), dim // 2, device=device) * 6
        self.qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=device, dtype=BF16)
        weights = [torch.rand(dim, device=device).to(BF16) + 0.5 for _ in range(2)] if normed else [None, None]
        self.x = torch.randn(rows, 1024, device=device, dtype=BF16).mul_(3) if scaled else None
        positions = self.lens.long() - 1
        self.slots = self.tables.gather(1, positions[:, None] // 16)[:, 0].long() * 16 + positions % 16
        scale = RowScale(self.x, 1e-5) if scaled else None
        self.new = NewTokens(*weights, 1e-6, torch.cat([turns.cos(), turns.sin()], 1), positions, self.slots, scale)
        self.forget_newest()

    def forget_newest(self):
        self.cache.flatten(1, 2)[:, self.slots] = torch.tensor(float("nan"), device=self.q.device).to(self.cache.dtype)

    def sibling(self):
        other = super().sibling()
        other.qkv, other.x = torch.randn_like(self.qkv), torch.randn_like(self.x)
        other.new = replace(self.new, scale=RowScale(other.x, 1e-5))
        return other

    def run(self, out=None, schedule=True, early=False):
        out = torch.full_like(self.q, float("nan")) if out is None else out
        if schedule:
            schedule_stream(self.workspace, self.tables, self.lens, len(self.lens))
        args = (*self.cache, self.tables, self.lens, self.q.shape[-1] ** -0.5, out, self.workspace)
        stream_decode(self.qkv, *args, self.new, early)
        return out

    def expected(self):
        """Of attention, and the cache, which is written here, too, in float32; or rounded to float8, then attention of
        what a run has stored."""
        cpu = [None if t is None else t.cpu() for t in (self.new.q_weight, self.new.k_weight, self.qkv, self.x)]
        q_weight, k_weight, qkv, x = (None if t is None else t.float() for t in cpu)
        scale, cache = None if x is None else RowScale(x, 1e-5), self.cache.float().cpu()
        heads, dim, kv_heads = *self.q.shape[1:], self.cache.shape[3]
        tables, positions, slots = self.new.cos_sin.cpu(), self.new.positions.cpu(), self.slots.cpu()
        args = (q_weight, k_weight, 1e-6, tables, positions, *cache, slots, heads, kv_heads, dim, scale)
        q = qk_norm_rope_store_reference(qkv, *args)
        if self.cache.dtype == FP8:
            cache = cache.to(BF16).to(FP8).float()
        k, v = torch.nan_to_num(self.cache.float().cpu() if self.cache.dtype == FP8 else cache)
        return paged_decode_reference(q, k, v, self.tables.cpu(), self.lens.cpu(), dim**-0.5), cache


def close_to_stored(close, case, cache):
    """Whether it stored what the reference did. In float8 what lies between two numbers may become either."""
    stored, expected = case.cache.flatten(1, 2)[:, case.slots].cpu(), cache.flatten(1, 2)[:, case.slots.cpu()]
    if stored.dtype == FP8:
        assert (stored.float() == expected).float().mean() > 0.95
        assert ((stored.float() - expected).abs() <= expected.abs() / 7 + 0.03).all()
    else:
        close(stored, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("normed", "scaled"), [(True, True), (False, False), (True, False), (False, True)])
@pytest.mark.parametrize("lens", LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_a_packed_projection_is_normed_turned_stored_and_attended(
    gpu, close, lens, heads, kv_heads, dim, normed, scaled, dtype
):
    case = Packed(LENGTHS[lens], heads, kv_heads, dim, gpu, normed, scaled, DTYPES[dtype])
    before = case.cache.clone()
    torch.cuda.synchronize()
    first = case.run()
    expected, cache = case.expected()
    close(first, expected)
    close_to_stored(close, case, cache)
    case.cache.flatten(1, 2)[:, case.slots] = before.flatten(1, 2)[:, case.slots]
    assert torch.equal(case.cache.view(torch.uint8), before.view(torch.uint8)), "it wrote where nobody asked it to"
    for _ in range(3):
        assert torch.equal(case.run(), first)
    assert holds_no_part(case.workspace)


@pytest.mark.gpu
def test_launches_ahead_of_a_projection_read_what_it_writes(gpu, captured, close):
    """In a graph, each behind a product that starts the next kernel early."""
    from minivllm.kernels.linear.cluster_linear import cluster_linear

    lens = [_draw.randint(1, 700) for _ in range(60)]
    cases = [Packed(lens, 16, 8, 128, gpu, True, True)]
    cases += [cases[0].sibling() for _ in range(2)]
    weights = [torch.randn(4096, 1024, device=gpu).mul_(1 / 32).to(BF16) for _ in cases]
    outs = [torch.empty_like(case.q) for case in cases]

    def step():
        for i, (case, weight, out) in enumerate(zip(cases, weights, outs, strict=True)):
            case.qkv = cluster_linear(case.x, weight)
            case.run(out, schedule=not i, early=bool(i))

    graph = captured(step)
    for _ in range(4):
        for case in cases:
            case.x.normal_()
            case.qkv.fill_(float("nan"))
            case.forget_newest()
        graph.replay()
        for case, out in zip(cases, outs, strict=True):
            close(out, case.expected()[0])


# --------------------------------------------------------------------------- emulated


EMULATED = [[1], [400], [5, 16, 17, 33], [300, 1, 40, 0, 129, 700]]


def scheduled(case):
    if type(stream._shares_kernel).__name__ != "InterpretedFunction":
        pytest.skip("Triton was imported without TRITON_INTERPRET=1")
    return case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", EMULATED, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (20, 4, 64)])
def test_it_attends_as_the_reference_does_wherever_it_runs(emulated, close, lens, heads, kv_heads, dim, dtype):
    torch.manual_seed(0)
    case = scheduled(Case(lens, heads, kv_heads, dim, "cpu", DTYPES[dtype]))
    first = case.run()
    close(first, case.expected())
    emulated.seed = 2
    assert torch.equal(case.run(), first) and holds_no_part(case.workspace)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", [lens for lens in EMULATED if 0 not in lens] + [[300, 1, 700]], ids=str)
def test_a_packed_projection_is_attended_wherever_it_runs(emulated, close, lens, dtype):
    torch.manual_seed(0)
    case = scheduled(Packed(lens, 16, 8, 128, "cpu", True, True, DTYPES[dtype]))
    out = case.run()
    expected, cache = case.expected()
    close(out, expected)
    close_to_stored(close, case, cache)
    assert holds_no_part(case.workspace)


MISTAKES = {
    "parts not waited for": ("!__all_sync(~0u, !holds || coming.is_whole())", "false"),
    "the new key left out": ("if (has_new) write1(there, new_key[i]), write1", "if (has_new) write1"),
    "queries not waited for": ("    barrier_wait(made, n & 1);\n", ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_emulator_notices(emulated, close, mistake):
    torch.manual_seed(0)
    case = scheduled(Packed([300, 1, 700], 16, 8, 128, "cpu", True, True))
    expected, _ = case.expected()
    emulated.changes = (MISTAKES[mistake],)
    with pytest.raises((AssertionError, RuntimeError), match=r"error|element"):
        close(case.run(), expected)
