"""Prompts' attention on Hopper: what the driver is told, without a GPU; there, the results against float32."""

import itertools
import re

import numpy as np
import pytest
import torch
from test_paged_attention import paged_world

from minivllm.kernels import nvrtc
from minivllm.kernels.attention import prompt_attention as module
from minivllm.kernels.attention.paged_prefill import paged_attention_reference, query_tiles
from minivllm.kernels.attention.prompt_attention import HEAD_DIMS, PromptWorkspace, prompt_attention

FLOAT8 = pytest.mark.parametrize("float8", [False, True], ids=["bf16", "fp8"])


def step_of(where, query_lens, seq_lens, heads, kv_heads, dim, no_more=0, float8=False):
    """Arguments but for ``out``, the workspace the last of them: in ``tiles`` stand ``no_more`` that are none, as in a
    captured step."""
    device, dtype = where
    k, v, tables, lens = paged_world(where, seq_lens, heads, kv_heads, dim, 16)
    if float8:
        k, v = (cache.to(torch.float8_e4m3fn) for cache in (k, v))
    q = torch.randn(sum(query_lens), heads, dim, device=device).to(dtype)
    start = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32, device=device)
    workspace = PromptWorkspace(heads, kv_heads, dim, torch.device(device))
    tiles = tiles_of(workspace, query_lens, seq_lens)
    tiles = torch.cat((tiles, torch.full((no_more, 4), -1, dtype=torch.int32)))
    return q, k, v, tables, start, lens, tiles.to(device), 0.1, workspace


def tiles_of(workspace, query_lens, seq_lens):
    return torch.from_numpy(workspace.key_parts(np.array(query_lens), np.array(seq_lens)))


# --------------------------------------------------------------------------- without a GPU


@FLOAT8
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_it_compiles_and_reads_shared_memory_in_time(dim, float8, compiled, reads_in_time):
    cubin = nvrtc.compile_cubin(module._kernel(dim, float8).source)
    assert b"prompt_attention" in cubin
    reads_in_time(cubin)


@FLOAT8
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_a_product_does_not_wait_for_its_descriptors(dim, float8, compiled, disassembled):
    """Where the compiler does not see that all lanes agree, it moves them to uniform registers before each product, ten
    instructions instead of three, and a tile takes up to a quarter longer."""

    def between_products(source):
        """Half of them have no more instructions than this between them and the next; and what is spilled there."""
        machine_code = disassembled(nvrtc.compile_cubin(source))
        lines = [line for line in machine_code.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/", line)]
        products = [i for i, line in enumerate(lines) if "HGMMA" in line]
        assert len(products) == (32 if dim == 128 else 24)
        gaps = sorted(after - one for one, after in itertools.pairwise(products))
        return gaps[len(gaps) // 2], sum("STL" in line for line in lines[products[0] : products[-1]])

    source = module._kernel(dim, float8).source
    gap, spilled = between_products(source)
    assert gap < 5 and spilled == 0
    planted = source.replace("__shfl_sync(~0u, threadIdx.x / 128, 0)", "threadIdx.x / 128")
    assert planted != source and between_products(planted)[0] > gap


@pytest.mark.parametrize(("queries", "programs"), [([40], 2), ([300, 5], 10), ([128 * 60], 132)])
def test_the_driver_is_told_the_launch(queries, programs, told):
    first, stride = 2, 640
    world = step_of(("cpu", torch.bfloat16), queries, [n + 7 for n in queries], 4, 2, 64, no_more=0)
    q, k, v, tables, start, lens, tiles, scale, workspace = world
    out = torch.empty(len(q), stride // 64, 64, dtype=q.dtype)[:, :4]
    prompt_attention(q, k, v, tables, start, lens, tiles, scale, out, workspace, first)
    ((config, kernel, (*maps, to, step)),) = told.seen
    assert (config.gridDimX, config.gridDimY, config.blockDimX, config.numAttrs) == (programs, 1, 512, 1)
    assert config.sharedMemBytes >= (2 * 192 + 4 * 128) * 64 * 2 + 1024
    assert kernel is module._kernel(64, False) and maps == [5, 5, 5] and to == out.data_ptr()
    assert told.maps == [
        (q.data_ptr(), len(q), 4, 64, 256, 2, 96),
        (k.data_ptr(), len(k), 16, 128, 64),
        (v.data_ptr(), len(v), 16, 128, 64),
    ]
    pointers = tiles.data_ptr(), start.data_ptr(), lens.data_ptr(), tables.data_ptr()
    assert (step.tiles, step.starts, step.lengths, step.tables) == pointers
    assert (step.table_stride, step.out_stride) == (tables.stride(0), stride)
    assert (step.count, step.first_row, step.heads, step.group, step.each) == (len(tiles), first, 2, 2, 96)
    assert (step.left, step.came) == (workspace.left.data_ptr(), workspace.came.data_ptr())
    assert step.scale == pytest.approx(scale * module.LOG2E)


def test_float8_pages_are_read_as_they_are_by_more_warps(told):
    world = step_of(("cpu", torch.bfloat16), [40], [47], 4, 2, 128, float8=True)
    q, k, v, *rest, workspace = world
    prompt_attention(q, k, v, *rest, torch.empty_like(q), workspace)
    ((config, kernel, _),) = told.seen
    assert config.blockDimX == 128 * 4 and kernel is module._kernel(128, True)
    assert config.sharedMemBytes >= (2 * 128 + 4 * 128) * 128 * 2 + 2 * 128 * 128 + 1024
    assert told.maps[1:] == [(cache.data_ptr(), len(k), 16, 256) for cache in (k, v)]


def test_queries_that_tma_cannot_read_are_copied_and_none_are_no_launch(told):
    q, *rest = step_of(("cpu", torch.bfloat16), [9], [9], 4, 2, 64)
    wide = torch.empty(9, 4 * 64 + 4, dtype=q.dtype)[:, 4:].view(9, 4, 64)
    *rest, workspace = rest
    prompt_attention(wide, *rest, torch.empty_like(q), workspace)
    assert told.maps[0][0] != wide.data_ptr() and told.maps[0][4] == 256
    k, v, tables, start, lens, tiles, scale = rest
    prompt_attention(q[:0], k, v, tables, start, lens, tiles[:0], scale, torch.empty_like(q[:0]), workspace)
    assert len(told.seen) == 1


@pytest.mark.parametrize("seed", range(40))
def test_each_query_sees_each_tile_of_its_keys_once(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(module, "num_sms", lambda device: 132)
    kv_heads, group, rows = int(rng.choice([1, 2, 8, 40])), int(rng.integers(1, 9)), int(rng.integers(1, 12))
    workspace = PromptWorkspace(kv_heads * group, kv_heads, 128, torch.device("cpu"))
    queries = rng.integers(1, rng.choice([4, 100, 3000]), rows)
    seqs = queries + rng.integers(0, rng.choice([2, 500, 100_000]), rows)
    tiles = workspace.key_parts(queries, seqs)
    assert tiles.dtype == np.int32 and len(tiles) <= workspace.most_tiles(int(queries.sum()), rows)
    parts, left, longest = {}, [], []
    for row, first, cut, place in tiles.tolist():
        part, count = cut % 65536, cut // 65536
        parts.setdefault((row, first, count), []).append(part)
        keys = -(-min(seqs[row] - queries[row] + first + 128 // group, seqs[row]) // 128)
        longest.append(keys * (part + 1) // count - keys * part // count)
        left += [place + part] * (count > 1)
    assert sorted(key[:2] for key in parts) == sorted(map(tuple, query_tiles(queries, seqs, 128 // group).tolist()))
    assert all(sorted(its) == list(range(count)) for (_, _, count), its in parts.items())
    assert len(set(left)) == len(left) and max(left, default=0) < workspace.parts
    assert max(longest) < max(8, 1.25 * sum(longest) * kv_heads / 132) + 1
    assert all(a >= b - 1 for a, b in itertools.pairwise(longest))


# --------------------------------------------------------------------------- emulated

STEPS = {  # query and key lengths, heads, key heads, head size
    "one query": ([1], [1], 2, 2, 64),
    "a chunk and a short prompt": ([130, 5], [300, 20], 4, 2, 64),
    "padding": ([40, 30], [40, 1], 2, 1, 128),
    "many items": ([70] * 5, [70, 90, 128, 129, 200], 4, 1, 64),
    "long": ([150], [520], 2, 1, 128),
    "five heads a key head": ([60, 3], [200, 300], 5, 1, 64),
}


@FLOAT8
@pytest.mark.parametrize("step", STEPS)
def test_it_attends_as_the_reference_does_wherever_it_runs(step, float8, emulated, close):
    check(close, *STEPS[step], no_more=2, device="cpu", float8=float8)


def test_queries_too_large_for_float16_are_the_largest_there_is(emulated, close):
    q, *step = step_of(("cpu", torch.bfloat16), *STEPS["a chunk and a short prompt"], float8=True)
    out, expected = (torch.full_like(q, float("nan")) for _ in range(2))
    q[::3] *= 1e9
    prompt_attention(q, *step[:-1], out, step[-1])
    prompt_attention(q.clamp(-65024, 65024), *step[:-1], expected, step[-1])
    close(out, expected.float())


IN_PARTS = {
    "three parts": ([20], [700], 2, 1, 128),
    "of two items, and one that is whole": ([20, 128, 3], [900, 128, 513], 5, 1, 64),
}


@pytest.mark.parametrize("step", IN_PARTS)
def test_parts_of_keys_are_added_up_by_whoever_is_the_last(step, emulated, close, monkeypatch):
    monkeypatch.setattr(module, "_LEAST", 1)
    for emulated.seed in range(3):
        check(close, *IN_PARTS[step], no_more=2, device="cpu")
    emulated.changes = [("if (came[group] != item.parts - 1)", "if (came[group] != 0)")]
    with pytest.raises(AssertionError):
        for emulated.seed in range(8):
            check(close, *IN_PARTS[step], no_more=2, device="cpu")


FLOAT8_MISTAKES = {
    "tiles written while they are read": [
        ("      barrier_wait(empty + 8 * turn.stage, turn.round ^ 1);\n#pragma unroll 1\n", "#pragma unroll 1\n")
    ],
    "pages read before they are there": [
        ("        barrier_wait(loads_full + 8 * of_loads.stage, of_loads.round);\n", "")
    ],
    "queries left in bfloat16": [("    if (!FLOAT8 || !item(items).tiles) return;\n", "    return;\n")],
}


@pytest.mark.parametrize("mistake", FLOAT8_MISTAKES)
def test_the_emulator_notices_mistakes_in_widening(mistake, emulated, close):
    emulated.changes = FLOAT8_MISTAKES[mistake]
    with pytest.raises((AssertionError, RuntimeError)):
        for emulated.seed in range(8):
            for step in ("padding", "long", "many items"):
                check(close, *STEPS[step], no_more=2, device="cpu", float8=True)


_GIVEN_UP = "    leave(keys_empty + 8 * of_keys.stage);\n"
MISTAKES = {
    "scores read too early": [("      wait_for_products<1>();\n", "")],
    "keys given up too early": [
        ("    arrived(s);\n" + _GIVEN_UP, "    arrived(s);\n"),
        ("    my_turn(group);\n", _GIVEN_UP + "    my_turn(group);\n"),
    ],
    "values that are no numbers": [("if (held >= KEYS) return;", "return;")],
    "no turn is given": [("  if (group == GROUPS - 1) next_turn(group);\n", "")],
    "an item that changes while it is read": [
        ("      barrier_wait(query_empty + 8 * place, items / AT_ONCE & 1 ^ 1);\n", "")
    ],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_emulator_notices(mistake, emulated, close):
    emulated.changes = MISTAKES[mistake]
    with pytest.raises((AssertionError, RuntimeError)):
        for emulated.seed in range(8):
            for step in ("padding", "long", "many items"):
                check(close, *STEPS[step], no_more=2, device="cpu")


# --------------------------------------------------------------------------- on Hopper


def check(close, query_lens, seq_lens, heads, kv_heads, dim, no_more=0, device="cuda", float8=False):
    step = step_of((device, torch.bfloat16), query_lens, seq_lens, heads, kv_heads, dim, no_more, float8)
    *step, workspace = step
    q, k, v, tables, start, lens, _, scale = step
    workspace.left.fill_(float("nan"))
    out = torch.full_like(q, float("nan"))
    prompt_attention(*step, out, workspace)
    assert not workspace.came.any()
    close(out, paged_attention_reference(q.float(), k.float(), v.float(), tables, start, lens, scale))


@pytest.mark.gpu
@FLOAT8
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1], [1]),
        ([128], [128]),
        ([128], [256]),
        ([129], [129]),
        ([300, 5, 128], [300, 700, 1024]),
        ([1000, 17, 3], [1000, 400, 2000]),
        ([60] * 20, [360] * 20),
        ([40, 30], [40, 1]),  # padding: more query tokens than keys
        ([2500], [2500]),
        ([64], [8256]),
        ([1, 30], [5000, 9000]),
        ([512], [4096]),
        ([100, 7, 900], [3000, 20_000, 900]),
    ],
)
def test_it_agrees_with_float32(dim, query_lens, seq_lens, float8, gpu, close):
    for heads, kv_heads in ((2, 2), (4, 2), (10, 2)):
        check(close, query_lens, seq_lens, heads, kv_heads, dim, no_more=3, float8=float8)


@pytest.mark.gpu
@FLOAT8
@pytest.mark.parametrize("seed", range(12))
def test_random_steps_agree_with_float32(seed, float8, gpu, close):
    rng = np.random.default_rng(seed)
    query_lens = rng.integers(1, 400, rng.integers(1, 9)).tolist()
    seq_lens = [n + int(rng.integers(0, 2000)) * int(rng.integers(0, 2)) for n in query_lens]
    kv_heads, dim = [1, 2, 4, 8][seed % 4], HEAD_DIMS[seed % 2]
    check(close, query_lens, seq_lens, 8, kv_heads, dim, no_more=seed % 3, float8=float8)


@pytest.mark.gpu
def test_rows_of_decodes_before_the_prompts_are_passed_over(gpu, close):
    q, k, v, tables, start, lens, _, scale, workspace = step_of(
        ("cuda", torch.bfloat16), [1, 1, 200, 30], [9, 40, 200, 530], 4, 2, 128
    )
    tiles = tiles_of(workspace, [200, 30], [200, 530]).cuda()
    out = torch.full_like(q, float("nan"))
    prompt_attention(q[2:], k, v, tables, start, lens, tiles, scale, out[2:], workspace, 2)
    expected = paged_attention_reference(q.float(), k.float(), v.float(), tables, start, lens, scale)
    close(out[2:], expected[2:])
    assert out[:2].isnan().all()


@pytest.mark.gpu
def test_a_captured_step_takes_what_its_buffers_hold(gpu, close, captured):
    *step, workspace = step_of(("cuda", torch.bfloat16), [300, 20], [300, 500], 4, 2, 128, no_more=70)
    q, k, v, tables, start, lens, tiles, scale = step
    out = torch.full_like(q, float("nan"))
    graph = captured(lambda: prompt_attention(*step, out, workspace))
    for queries, seqs in (([300, 20], [300, 500]), ([20, 300], [100, 420]), ([250, 70], [250, 71])):
        start.copy_(torch.tensor([0, *np.cumsum(queries)]))
        lens.copy_(torch.tensor(seqs))
        new = tiles_of(workspace, queries, seqs)
        tiles.fill_(-1)[: len(new)] = new
        out.fill_(float("nan"))
        graph.replay()
        close(out, paged_attention_reference(q.float(), k.float(), v.float(), tables, start, lens, scale))
