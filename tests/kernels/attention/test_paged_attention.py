"""Paged decode and prefill attention: each launcher against the float32 reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from minivllm.kernels.attention import paged_decode as decode_module
from minivllm.kernels.attention import paged_prefill as prefill_module
from minivllm.kernels.attention import rotary


def paged_world(where, seq_lens, heads, kv_heads, dim, block_size, poison=True):
    """One layer's caches (views into a cache of two layers) with shuffled block tables.

    What no context holds is NaN, and table entries past a context point nowhere.
    """
    device, dtype = where
    counts = [-(-n // block_size) for n in seq_lens]
    blocks = sum(counts) + 2
    cache = torch.randn(2, 2, blocks, block_size, kv_heads, dim, device=device).to(dtype)
    order = torch.randperm(blocks - 1)[: sum(counts)] + 1
    tables = torch.full((len(seq_lens), max([*counts, 1]) + 2), 2**31 - 1, dtype=torch.int32)
    held = torch.zeros(blocks, block_size, dtype=torch.bool)
    for row, (ids, n) in enumerate(zip(order.split(counts), seq_lens, strict=True)):
        tables[row, : len(ids)] = ids
        slots = (ids[:, None] * block_size + torch.arange(block_size)).flatten()[:n]
        held.view(-1)[slots] = True
    if poison:
        cache[:, :, ~held.to(device)] = float("nan")
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return cache[1, 0], cache[1, 1], tables.to(device), lens


def run_decode(where, close, seq_lens, heads, kv_heads, dim, block_size, window=None, **config):
    device, dtype = where
    k, v, tables, lens = paged_world(where, seq_lens, heads, kv_heads, dim, block_size)
    q = torch.randn(len(seq_lens), heads, dim, device=device).to(dtype)
    fields = {"programs": 8 * kv_heads} if device == "cpu" else {}
    usual = decode_module.decode_config(dim, dtype, 132)
    chosen = replace(usual, **{**fields, **config})
    space = decode_module.DecodeWorkspace(len(seq_lens) + 1, heads, kv_heads, dim, dtype, device, window, chosen)
    expected = decode_module.paged_decode_reference(q.float(), k.float(), v.float(), tables, lens, 0.3, window)
    for _ in range(2):  # the second time with what the first one left behind
        out = torch.full_like(q, float("nan"))
        decode_module.schedule_decode(space, lens, len(seq_lens))
        decode_module.paged_decode_triton(q, k, v, tables, lens, 0.3, out, space)
        close(out, expected)
        assert not space.arrived.any()
    return space


@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (5, 1, 32)])
def test_decode_in_every_block_size(where, close, block_size, heads, kv_heads, dim):
    run_decode(where, close, [1, 130, 17, 64], heads, kv_heads, dim, block_size)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1), (5, 1), (8, 1), (24, 1)])
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_decode_of_head_groups_and_sizes(where, close, heads, kv_heads, dim):
    if where == ("cuda", torch.float32):
        pytest.skip("as in bfloat16; each shape is compiled for seconds")
    run_decode(where, close, [3, 70], heads, kv_heads, dim, 16)


def test_decode_cuts_long_contexts_and_merges_them(where, close):
    space = run_decode(where, close, [700, 1, 33], 4, 2, 32, 16, block_n=16, min_tiles=2)
    rows = space.items[:, 0].tolist()
    assert rows.count(0) > 4
    assert rows.count(1) == rows.count(2) == 1


def test_decode_of_padding_rows_writes_zeros(where, close):
    run_decode(where, close, [5, 0, 0, 40], 4, 2, 16, 4)
    run_decode(where, close, [0, 0], 4, 2, 16, 4)


@pytest.mark.parametrize("window", [1, 20, 64, 1000])
def test_decode_in_a_sliding_window(where, close, window):
    run_decode(where, close, [300, 7, 65], 4, 2, 32, 16, window=window, block_n=16)


@pytest.mark.parametrize(
    ("seq_lens", "heads", "kv_heads", "dim", "rot", "norms", "config"),
    [
        ([1, 130, 17, 64, 65], 4, 2, 64, 64, "qk", {}),
        ([300, 7, 65, 129], 5, 1, 32, 32, "", {"block_n": 16}),
        ([33, 2], 4, 4, 80, 80, "qk", {"block_n": 16}),
        ([129, 128, 40], 8, 2, 64, 32, "q", {"block_n": 16, "window": 20, "block_size": 1}),
        ([500, 1, 33], 4, 2, 32, 16, "k", {"block_n": 16, "window": 1, "block_size": 64}),
    ],
    ids=["qwen3", "five heads", "odd size", "window", "window of one"],
)
def test_decode_from_the_projection_is_norm_rotary_write_and_decode(
    where, close, seq_lens, heads, kv_heads, dim, rot, norms, config
):
    device, dtype = where
    if where == ("cuda", torch.float32):
        pytest.skip("as in bfloat16; each shape is compiled for seconds")
    block_size, window, rows = config.pop("block_size", 16), config.pop("window", None), len(seq_lens)
    k, v, tables, lens = paged_world(where, seq_lens, heads, kv_heads, dim, block_size)
    positions = lens.long() - 1
    slots = tables.long()[torch.arange(rows), positions // block_size] * block_size + positions % block_size
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    weights = [(torch.rand(dim, device=device) + 0.5).to(dtype) if c in norms else None for c in "qk"]
    angle = torch.rand(max(seq_lens), rot // 2, device=device) * 6.28
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=-1)

    wide, k_wide, v_wide = [None if w is None else w.float() for w in weights], k.float(), v.float()
    q = rotary.qk_norm_rope_store_reference(
        qkv.float(), *wide, 1e-6, cos_sin, positions, k_wide, v_wide, slots, heads, kv_heads, dim
    )
    expected = decode_module.paged_decode_reference(q, k_wide, v_wide, tables, lens, 0.3, window)
    usual = decode_module.decode_config(dim, dtype, 132)
    chosen = replace(usual, peel=True, **({"programs": 8 * kv_heads} if device == "cpu" else {}), **config)
    space = decode_module.DecodeWorkspace(rows + 1, heads, kv_heads, dim, dtype, device, window, chosen)
    space.items.fill_(2**30)  # what longer contexts left behind
    new = decode_module.NewTokens(*weights, 1e-6, cos_sin, positions, slots)
    for early in (False, True):
        k.view(-1, kv_heads, dim)[slots] = v.view(-1, kv_heads, dim)[slots] = float("nan")
        out = torch.full((rows, heads, dim), float("nan"), device=device, dtype=dtype)
        decode_module.schedule_decode(space, lens, rows)
        if device == "cuda":
            torch.cuda.synchronize()  # the kernel before lets this one start at once, which early must not meet
        decode_module.paged_decode_triton(qkv, k, v, tables, lens, 0.3, out, space, new, early=early)
        close(out, expected)
        close(k.nan_to_num(), k_wide.nan_to_num())
        close(v.nan_to_num(), v_wide.nan_to_num())
        assert torch.equal(k.isnan(), k_wide.isnan()), "wrote somewhere else"


def test_a_context_is_cut_only_where_each_piece_is_worth_its_merge(where):
    device, dtype = where
    config = decode_module.DecodeConfig(block_n=64, num_warps=4, num_stages=2, programs=1000, min_tiles=2)
    space = decode_module.DecodeWorkspace(4, 1, 1, 16, dtype, device, config=config)
    lens = torch.tensor([64, 192, 256, 640], dtype=torch.int32, device=device)
    decode_module.schedule_decode(space, lens, 4)
    rows = space.items[: 4 + space.extra(4), 0].tolist()
    assert [rows.count(row) for row in range(4)] == [1, 1, 2, 5]


def test_a_small_batch_gets_no_more_programs_than_its_longest_context_can_use():
    config = decode_module.DecodeConfig(block_n=64, num_warps=4, num_stages=2, programs=1000, min_tiles=2)
    space = decode_module.DecodeWorkspace(64, 8, 8, 16, torch.float32, "cpu", config=config, max_len=1024)
    assert (space.extra(1), space.extra(8), space.extra(64)) == (7, 56, 125)


@pytest.mark.parametrize(
    "seq_lens", [[1], [0], [5000], [1] * 20, [3000, 1, 1, 1], [64 * i for i in range(12)], [7] * 5 + [10_000]]
)
@pytest.mark.parametrize("extra", [1, 3, 40])
def test_items_cover_every_context_once_and_fit_the_grid(where, seq_lens, extra):
    device, dtype = where
    config = decode_module.DecodeConfig(block_n=64, num_warps=4, num_stages=2, programs=extra)
    space = decode_module.DecodeWorkspace(32, 1, 1, 16, dtype, device, config=config)
    space.items.fill_(7)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    decode_module.schedule_decode(space, lens, len(seq_lens))
    items = space.items[: len(seq_lens) + extra].cpu().numpy()
    live = items[items[:, 0] >= 0]
    assert (items[len(live) :, 0] == -1).all()
    for row, length in enumerate(seq_lens):
        mine = live[live[:, 0] == row]
        assert mine[0, 1] == 0
        assert mine[-1, 2] == length
        assert np.array_equal(mine[1:, 1], mine[:-1, 2])
        assert (mine[:, 3] == len(mine)).all()
        assert (mine[:, 4] == np.flatnonzero(items[:, 0] == row)[0]).all()
        assert len(mine) <= decode_module.MAX_SPLITS
        assert (mine[:, 1] % 64 == 0).all()
        assert length == 0 or (mine[:, 1] < mine[:, 2]).all()


def run_prefill(where, close, lens, heads, kv_heads, dim, block_size, window=None, decodes=0, captured=False, **config):
    """lens: (query tokens, context) of each row; the first ``decodes`` rows are left to the decode kernel.
    ``captured``: with the tiles that a graph has room for."""
    device, dtype = where
    query_lens, seq_lens = (list(x) for x in zip(*lens, strict=True))
    k, v, tables, device_lens = paged_world(where, seq_lens, heads, kv_heads, dim, block_size)
    start = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32, device=device)
    q = torch.randn(sum(query_lens), heads, dim, device=device).to(dtype)
    chosen = replace(prefill_module.prefill_config(dim, heads // kv_heads, dtype), **config)
    block_q = chosen.block_m // (heads // kv_heads)
    tiles = prefill_module.query_tiles(np.array(query_lens[decodes:]), np.array(seq_lens[decodes:]), block_q)
    if captured:
        padded = np.full((sum(query_lens) // block_q + len(lens), 2), -1, dtype=np.int32)
        padded[: len(tiles)] = tiles
        tiles = padded
    expected = prefill_module.paged_attention_reference(
        q.float(), k.float(), v.float(), tables, start, device_lens, 0.3, window
    )
    d = sum(query_lens[:decodes])
    out = torch.full_like(q[d:], float("nan"))
    tiles = torch.from_numpy(tiles).to(device)
    prefill_module.paged_prefill_triton(
        q[d:], k, v, tables, start, device_lens, tiles, 0.3, out, chosen, decodes, window
    )
    close(out, expected[d:])


@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 256])
def test_prefill_in_every_block_size(where, close, block_size):
    run_prefill(where, close, [(20, 20), (1, 1), (7, 90)], 4, 2, 32, block_size)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (5, 1), (8, 1), (24, 1)])
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_prefill_of_head_groups_and_sizes(where, close, heads, kv_heads, dim):
    if where == ("cuda", torch.float32):
        pytest.skip("as in bfloat16; each shape is compiled for seconds")
    run_prefill(where, close, [(11, 45), (3, 3)], heads, kv_heads, dim, 16)


@pytest.mark.parametrize("block_n", [16, 32])
def test_prefill_of_a_chunk_on_a_cached_prefix_sees_the_right_corner(where, close, block_n):
    run_prefill(where, close, [(16, 160), (33, 97), (1, 64), (64, 64), (5, 37)], 4, 2, 16, 16, block_n=block_n)


@pytest.mark.parametrize("window", [1, 9, 40, 1000])
def test_prefill_in_a_sliding_window(where, close, window):
    run_prefill(where, close, [(30, 100), (50, 50), (1, 5)], 4, 2, 16, 16, window=window)


def test_prefill_leaves_the_decode_rows_of_a_mixed_batch_out(where, close):
    run_prefill(where, close, [(1, 50), (1, 3), (20, 33), (6, 6)], 4, 2, 16, 4, decodes=2)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    "lens",
    [
        [(7, 40), (57, 1), (0, 1), (0, 1)],  # as in a captured step: padding's tokens in the row behind the last
        [(20, 20), (1, 33), (11, 1)],
        [(1, 1), (63, 1)],
        [(64, 64), (0, 1)],
        [(50, 19), (0, 0), (3, 0), (5, 9)],
    ],
)
def test_prefill_of_more_queries_than_keys_gives_zeros_before_the_first_key(where, close, lens, window):
    run_prefill(where, close, lens, 4, 2, 16, 4, window=window, captured=True)


def test_the_reference_gives_zeros_to_queries_before_the_first_key():
    q, k, v = torch.randn(6, 1, 8), torch.randn(2, 4, 1, 8), torch.randn(2, 4, 1, 8)
    table, start, lens = (torch.tensor(x, dtype=torch.int32) for x in ([[1]], [0, 6], [2]))
    out = prefill_module.paged_attention_reference(q, k, v, table, start, lens, 1.0)
    assert not out[:4].any()
    assert torch.allclose(out[4], v[1, 0])
    both = (k[1, :2, 0] @ q[5, 0]).softmax(0) @ v[1, :2, 0]
    assert torch.allclose(out[5, 0], both, atol=1e-5)


def test_query_tiles_cover_every_token_longest_first():
    query, seq = np.array([5, 1, 8]), np.array([5, 100, 30])
    tiles = prefill_module.query_tiles(query, seq, 4)
    assert tiles.tolist() == [[1, 0], [2, 4], [2, 0], [0, 4], [0, 0]]
