"""Prefixes that rows share, attended to together: with either decode kernel behind it, what the reference gives for the
whole contexts; garbage wherever nothing was stored or nobody may read."""

import numpy as np
import pytest
import torch

from minivllm.core.batch import Cascade
from minivllm.core.cascade import CascadeLimits, plan_cascade
from minivllm.kernels.attention import cascade as cascade_module
from minivllm.kernels.attention import paged_decode as decode_module
from minivllm.kernels.attention.cascade import BLOCK_M, CascadeWorkspace, attend_cascade, own_contexts
from minivllm.kernels.attention.stream_decode import StreamWorkspace, schedule_stream, stream_decode

# A row: a path of (prefix, tokens) from the root, whole blocks, then tokens of its own.
TREES = {
    "one prefix": [([("a", 320)], own) for own in (1, 40, 17, 16, 33)],
    "many rows": [([("a", 256)], 1 + i % 30) for i in range(70)],
    "two, and one alone": [([("a", 192)], 9), ([("b", 512)], 1), ([("a", 192)], 64), ([], 77), ([("b", 512)], 30)],
    "a tree": [
        ([("s", 128), ("a", 192)], 5),
        ([("s", 128), ("b", 1024)], 50),
        ([("s", 128), ("a", 192)], 1),
        ([], 1),
        ([("s", 128), ("b", 1024)], 16),
        ([("s", 128)], 300),
    ],
}


class World:
    """Caches, tables and queries of such rows, and how their cascade is cut."""

    def __init__(self, rows, heads, kv_heads, dim, size, device, dtype, busy=8):
        torch.manual_seed(0)
        most = sum(-(-own // size) for _, own in rows) + sum(
            {step: step[1] // size for row, _ in rows for step in row}.values()
        )
        fresh = iter((1 + torch.randperm(most)).tolist())
        known, tables = {}, []
        for path, own in rows:
            blocks = []
            for depth, (name, tokens) in enumerate(path):
                where = (depth, name)
                if where not in known:
                    known[where] = [next(fresh) for _ in range(tokens // size)]
                blocks += known[where]
            tables.append([*blocks, *(next(fresh) for _ in range(-(-own // size)))])
        self.lens = np.array([sum(t for _, t in path) + own for path, own in rows], dtype=np.int32)
        width = max(map(len, tables)) + 3
        host = np.full((len(rows), width), 2**30, dtype=np.int32)
        for table, blocks in zip(host, tables, strict=True):
            table[: len(blocks)] = blocks
        used = max(map(max, tables)) + 1
        cache = torch.full((2, used, size, kv_heads, dim), float("nan"))
        for table, n in zip(host, self.lens.tolist(), strict=True):
            at = torch.from_numpy(table[np.arange(n) // size].astype(np.int64)), torch.arange(n) % size
            empty = cache[0][at].isnan().all(-1).all(-1)
            for half in cache:
                half[at[0][empty], at[1][empty]] = torch.randn(int(empty.sum()), kv_heads, dim)
        self.cache = cache.to(device, dtype)
        self.q = torch.randn(len(rows), heads, dim).to(device, dtype)
        limits = CascadeLimits(BLOCK_M // (heads // kv_heads), 64, busy, busy, 60, 1024, 1)
        self.plan = plan_cascade(host.copy(), np.arange(len(rows)), self.lens - 1, size, limits)
        assert self.plan is not None
        self.tables, self.seq_lens = torch.from_numpy(host).to(device), torch.from_numpy(self.lens).to(device)
        self.space = CascadeWorkspace(len(rows), 1024, width, heads, dim, device)
        for buffer in (self.space.partial, self.space.lse):
            buffer.fill_(float("nan"))

    def cascade(self, beside=True):
        rows = len(self.lens)
        numbers = torch.from_numpy(self.plan.padded(rows, 60)).to(self.q.device)
        return Cascade.of(numbers, rows, beside)

    def expected(self):
        q, k, v = self.q.float().cpu(), *torch.nan_to_num(self.cache.float().cpu())
        return decode_module.paged_decode_reference(q, k, v, self.tables.cpu(), self.seq_lens.cpu(), 0.3)


@pytest.fixture
def few_programs(monkeypatch):
    """So that a program has several items."""
    monkeypatch.setattr(cascade_module, "programs_a_head", lambda kv_heads, device, beside: 3)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), [(4, 2, 64, 16), (5, 1, 80, 4), (24, 1, 32, 64)])
def test_rows_attend_to_what_they_share_and_what_they_do_not(
    where, close, few_programs, tree, heads, kv_heads, dim, size
):
    world = World(TREES[tree], heads, kv_heads, dim, size, *where)
    cascade, (k, v), rows = world.cascade(), world.cache, len(world.lens)
    decode = decode_module.DecodeWorkspace(rows, heads, kv_heads, dim, where[1], where[0])
    for _ in range(2):
        out = torch.full_like(world.q, float("nan"))
        tables, lens = own_contexts(world.space, cascade, world.tables, world.seq_lens, size)
        assert (lens.cpu().numpy() == world.lens - world.plan.skips * size).all() and (lens > 0).all()
        shared = attend_cascade(world.q, k, v, world.tables, cascade, 0.3, world.space)
        decode_module.schedule_decode(decode, lens, rows)
        decode_module.paged_decode_triton(world.q, k, v, tables, lens, 0.3, out, decode, shared=shared)
        close(out, world.expected())
        assert not decode.arrived.any()
    written = int(world.plan.parts[:, 1].sum())
    assert shared.partial[:written].isfinite().all() and shared.partial[written:].isnan().all(), "parts and no more"


def behind_a_stream(world, attend=attend_cascade, beside=True):
    cascade, (k, v), q = world.cascade(beside), world.cache, world.q
    rows, heads, dim = q.shape
    stream = StreamWorkspace(max(rows, 16), heads, k.shape[2], dim, q.device)
    out = torch.full_like(q, float("nan"))
    tables, lens = own_contexts(world.space, cascade, world.tables, world.seq_lens, 16)
    shared = attend(q, k, v, world.tables, cascade, 0.3, world.space)
    schedule_stream(stream, tables, lens, rows)
    stream_decode(q, k, v, tables, lens, 0.3, out, stream, shared=shared)
    return out


@pytest.mark.parametrize("tree", ["two, and one alone", "a tree"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (20, 4, 64)])
def test_a_stream_of_pages_goes_on_behind_shared_parts(emulated, close, tree, heads, kv_heads, dim):
    if type(cascade_module._own_kernel).__name__ != "InterpretedFunction":
        pytest.skip("Triton was imported without TRITON_INTERPRET=1")
    world = World(TREES[tree], heads, kv_heads, dim, 16, "cpu", torch.bfloat16)

    def in_float32(q, k, v, *rest):  # the interpreter's product of bfloat16 is wrong
        return attend_cascade(q.float(), torch.nan_to_num(k).float(), torch.nan_to_num(v).float(), *rest)

    close(behind_a_stream(world, in_float32), world.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(16, 8, 128), (40, 8, 128), (32, 8, 64), (16, 2, 128), (20, 4, 128)]
)
def test_a_stream_of_pages_goes_on_behind_shared_parts_on_hopper(gpu, close, tree, heads, kv_heads, dim):
    world = World(TREES[tree], heads, kv_heads, dim, 16, gpu, torch.bfloat16, busy=33)
    torch.cuda.synchronize()
    for beside in (True, False, True):
        close(behind_a_stream(world, beside=beside), world.expected())
