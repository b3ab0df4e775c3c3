"""RMSNorm, SiLU·gate, embedding, cache write, q/k-norm + rope + store, a decode step's end: each launcher against its
reference."""

import pytest
import torch

from minivllm.kernels import decode_inputs, embedding, rms_norm, silu_mul
from minivllm.kernels.attention import cache_write, rotary
from minivllm.kernels.rms_norm import RowScale

EPS = 1e-6


def row_scale(rows, n, device, dtype):
    """Rows of several sizes, each a slice of a wider one; and the same for the reference, in float32."""
    x = (torch.randn(rows, n + 24, device=device) * torch.logspace(-1, 1, rows, device=device)[:, None]).to(dtype)[
        :, :n
    ]
    return RowScale(x, 1e-3), RowScale(x.float(), 1e-3)


@pytest.mark.parametrize(("rows", "n"), [(1, 64), (7, 100), (33, 1024), (3, 5120)])
def test_rms_norm_equals_its_reference(where, close, rows, n):
    device, dtype = where
    x = torch.randn(rows, n, device=device, dtype=dtype)
    weight = torch.randn(n, device=device, dtype=dtype)
    close(rms_norm.rms_norm_triton(x, weight, EPS), rms_norm.rms_norm_reference(x.float(), weight.float(), EPS))


def test_rms_norm_takes_rows_with_a_stride(where, close):
    device, dtype = where
    x = torch.randn(5, 256, device=device, dtype=dtype)[:, :128]
    weight = torch.randn(128, device=device, dtype=dtype)
    close(rms_norm.rms_norm_triton(x, weight, EPS), rms_norm.rms_norm_reference(x.float(), weight.float(), EPS))


@pytest.mark.parametrize(("rows", "n"), [(0, 64), (1, 64), (7, 100), (130, 1000), (3, 4096), (5, 5120)])
def test_row_factors_equal_their_reference(where, close, rows, n):
    """Programs of one row and of several, the last one not full; rows of several sizes, with a stride."""
    device, dtype = where
    scale, wide = row_scale(rows, n, device, dtype)
    out = rms_norm.row_factors_triton(scale.x, scale.eps)
    assert out.shape == (rows,) and out.dtype == torch.float32
    close(out, rms_norm.row_factors_reference(wide.x, wide.eps))


def test_row_factors_are_what_a_norm_multiplies_by():
    x = torch.randn(5, 40)
    expected = torch.nn.functional.rms_norm(x, (40,), None, EPS)
    torch.testing.assert_close(x * rms_norm.row_factors_reference(x, EPS)[:, None], expected)


@pytest.mark.parametrize("others", [1, 3])
@pytest.mark.parametrize(("rows", "n"), [(0, 64), (1, 64), (7, 100), (130, 1000), (3, 4096), (5, 5120)])
def test_a_sum_and_its_rows_factors_equal_their_reference(where, close, rows, n, others):
    """Bit for bit the sum, rounded after each addend; what lies behind x, and behind its factors, stays."""
    device, dtype = where
    x = torch.randn(rows + 9, n, device=device).to(dtype)
    addends = torch.randn(others, rows + 5, n, device=device).to(dtype)
    factors = torch.full((rows + 9,), 7.0, device=device)
    expected, expected_factors = x.clone(), factors.clone()
    rms_norm.add_rows_factors_reference(expected[:rows], addends, expected_factors[:rows], 1e-3)
    rms_norm.add_rows_factors_triton(x[:rows], addends, factors[:rows], 1e-3)
    assert torch.equal(x, expected) and (factors[rows:] == 7).all()
    close(factors, expected_factors)


@pytest.mark.parametrize(("rows", "n"), [(1, 48), (5, 1500), (9, 3072)])
def test_silu_mul_equals_its_reference(where, close, rows, n):
    device, dtype = where
    gate_up = torch.randn(rows, 2 * n, device=device, dtype=dtype)
    close(silu_mul.silu_mul_triton(gate_up), silu_mul.silu_mul_reference(gate_up.float()))


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 48, 16), (5, 1500, 200), (9, 3072, 1024), (3, 8200, 1030)])
def test_silu_mul_scales_its_rows_first(where, close, rows, n, k):
    device, dtype = where
    scale, wide = row_scale(rows, k, device, dtype)
    gate_up = torch.randn(rows, 2 * n + 16, device=device, dtype=dtype)[:, : 2 * n]
    close(silu_mul.silu_mul_triton(gate_up, scale), silu_mul.silu_mul_reference(gate_up.float(), wide))


def test_a_row_scale_is_what_a_norm_multiplies_by():
    x, y = torch.randn(5, 40), torch.randn(5, 7)
    ratio = torch.nn.functional.rms_norm(x, (40,), None, EPS) / x
    torch.testing.assert_close(RowScale(x, EPS).applied_to(y), y * ratio[:, :1])
    torch.testing.assert_close(RowScale(x, EPS, y[0]).applied_to(y), y * ratio[:, :1] + y[0])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_embedding_gathers_rows(where, index):
    device, dtype = where
    weight = torch.randn(50, 96, device=device, dtype=dtype)
    ids = torch.tensor([0, 49, 7, 7, 0], dtype=index, device=device)
    assert torch.equal(embedding.embedding_triton(ids, weight), weight[ids])


def caches(block_size, heads, dim, device, dtype, blocks=12):
    """One layer's keys and values, a view into a cache of three layers."""
    cache = torch.randn(3, 2, blocks, block_size, heads, dim, device=device, dtype=dtype)
    return cache, cache[1, 0], cache[1, 1]


@pytest.mark.parametrize(("block_size", "heads", "dim"), [(1, 2, 16), (4, 3, 80), (16, 8, 128)])
def test_write_cache_touches_its_slots_and_no_other(where, block_size, heads, dim):
    device, dtype = where
    cache, k_cache, v_cache = caches(block_size, heads, dim, device, dtype)
    expected = cache.clone()
    qkv = torch.randn(5, 4 * heads * dim, device=device, dtype=dtype)
    k = qkv[:, heads * dim : 2 * heads * dim].unflatten(1, (heads, dim))
    v = qkv[:, 3 * heads * dim :].unflatten(1, (heads, dim))
    slots = torch.randperm(12 * block_size)[:5].to(device)
    cache_write.write_cache_triton(k, v, k_cache, v_cache, slots)
    cache_write.write_cache_reference(k, v, expected[1, 0], expected[1, 1], slots)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rot", "norms"),
    [(16, 8, 128, 128, "qk"), (5, 1, 64, 64, ""), (4, 4, 80, 80, "qk"), (8, 2, 64, 32, "q"), (2, 1, 96, 48, "k")],
)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 0), (6, 0), (1, 64), (6, 1000)])
def test_qk_norm_rope_store_equals_its_reference(where, close, heads, kv_heads, dim, rot, norms, tokens, hidden):
    """``hidden``: of the x that scales the rows first; 0: there is none. With heads of other sizes than their turned
    part, and with some tokens, a bias comes behind it."""
    device, dtype = where
    block_size = 4
    cache, k_cache, v_cache = caches(block_size, kv_heads, dim, device, dtype)
    before = cache.clone()
    expected_cache = cache.float()
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
    weights = {c: torch.rand(dim, device=device, dtype=dtype) + 0.5 if c in norms else None for c in "qk"}
    angle = torch.rand(100, rot // 2, device=device) * 6.28
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=-1)
    positions = torch.randint(100, (tokens,), device=device)
    slots = torch.randperm(12 * block_size)[:tokens].to(device)
    sizes, wide_sizes = ((heads, kv_heads, dim),) * 2
    if hidden:
        scale, wide_scale = row_scale(tokens, hidden, device, dtype)
        if rot != dim or tokens > 1:
            bias = torch.randn(qkv.shape[1], device=device, dtype=dtype)
            scale, wide_scale = scale._replace(bias=bias), wide_scale._replace(bias=bias.float())
        sizes, wide_sizes = (*sizes, scale), (*sizes, wide_scale)

    q = rotary.qk_norm_rope_store_triton(
        qkv, weights["q"], weights["k"], EPS, cos_sin, positions, k_cache, v_cache, slots, *sizes
    )
    wide = {c: None if w is None else w.float() for c, w in weights.items()}
    args = (qkv.float(), wide["q"], wide["k"], EPS, cos_sin, positions)
    expected = rotary.qk_norm_rope_store_reference(
        *args, expected_cache[1, 0], expected_cache[1, 1], slots, *wide_sizes
    )
    close(q, expected)
    close(cache, expected_cache)
    changed = (cache != before).flatten(-2).any(-1)[1]  # (2, blocks, block_size)
    assert changed.sum().item() == 2 * tokens

    at, given = (slots // block_size, slots % block_size), (weights["q"], weights["k"], EPS, cos_sin, positions)
    for store in (rotary.qk_norm_rope_store_triton, rotary.qk_norm_rope_store_reference):
        kept = qkv.clone()
        close(store(kept, *given, k_cache, v_cache, slots, *sizes, keep=True), expected)
        q_kept, k_kept, v_kept = kept.view(tokens, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
        assert torch.equal(q_kept.flatten(1), qkv[:, : heads * dim])
        assert torch.equal(k_kept, k_cache[at]) and torch.equal(v_kept, v_cache[at])
        close(cache, expected_cache)

    q, k, v = rotary.qk_norm_rope_triton(qkv, weights["q"], weights["k"], EPS, cos_sin, positions, *sizes)
    for out, want in zip((q, k, v), rotary.qk_norm_rope_reference(*args, *wide_sizes), strict=True):
        close(out, want)


@pytest.mark.parametrize(("rows", "live", "count"), [(1, 1, 0), (8, 5, 2), (200, 130, 5), (600, 149, 1 << 40)])
def test_finish_decode_equals_its_reference(where, rows, live, count):
    device, _ = where
    padding, ring = 150, 3
    slots = torch.randperm(padding).repeat(4)[:rows]
    slots[live:] = padding
    tokens, positions = torch.randint(1000, (rows,)), torch.randint(1000, (rows,))
    tokens[live:] = 5  # several padding rows, one padding slot
    args = [x.to(device) for x in (tokens, slots, positions)]
    got, want = (
        [torch.full((n,), -7, dtype=torch.int64, device=device) for n in (padding + 1, padding + 1)]
        + [torch.tensor([count], device=device)]
        + [torch.full((ring, rows + 4), -7, dtype=torch.int64, pin_memory=device == "cuda")]
        for _ in range(2)
    )
    for _ in range(ring + 1):  # each row of the ring, and one again
        args[0] += 1
        decode_inputs.finish_decode_triton(*args, *got, padding)
        decode_inputs.finish_decode_reference(*args, *want, padding)
    if device == "cuda":
        torch.cuda.synchronize()
    for name, a, b in zip(("last_token", "num_computed", "steps", "landing"), got, want, strict=True):
        assert torch.equal(a, b), name
    assert got[1][padding] == (0 if live < rows else -7)
    newest = got[3][(count + ring + 1) % ring]
    assert newest[0] == got[2] == count + ring + 1
    assert torch.equal(newest[1 : rows + 1], args[0].cpu()) and (newest[rows + 1 :] == -7).all()


@pytest.mark.gpu
def test_finish_decode_refuses_memory_that_the_device_cannot_write():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    row = torch.zeros(1, dtype=torch.int64, device="cuda")
    pageable = torch.zeros((2, 2), dtype=torch.int64)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        decode_inputs.finish_decode_triton(row, row, row, row, row, row, pageable, 5)


def test_decode_inputs_say_where_the_next_token_will_stand(where):
    device, _ = where
    long = {"dtype": torch.int64, "device": device}
    slots, last_token = torch.tensor([2, 0], device=device), torch.tensor([5, 6, 7], device=device)
    num_computed, table = torch.tensor([3, 0, 8], device=device), torch.ones((3, 4), dtype=torch.int32, device=device)
    out = [torch.zeros(2, **long), torch.zeros(2, **long), torch.zeros(2, dtype=torch.int32, device=device)]
    out += [torch.zeros(2, **long), torch.zeros((2, 4), dtype=torch.int32, device=device)]
    after = torch.zeros(2, **long)
    decode_inputs.decode_inputs_triton(slots, last_token, num_computed, table, *out, 4, after)
    assert after.tolist() == [9, 4]


def test_on_the_cpu_the_public_functions_are_the_references():
    x, w = torch.randn(3, 32), torch.randn(32)
    assert torch.equal(rms_norm.rms_norm(x, w, EPS), rms_norm.rms_norm_reference(x, w, EPS))
    assert torch.equal(rms_norm.row_factors(x, EPS), rms_norm.row_factors_reference(x, EPS))
    assert torch.equal(silu_mul.silu_mul(x), silu_mul.silu_mul_reference(x))
    assert torch.equal(embedding.embedding(torch.tensor([1]), x), x[1:2])
