"""Rows of float8, scales behind a product, and the product itself on a GPU: each launcher against its reference."""

import pytest
import torch

from minivllm.kernels.linear import fp8_linear as fp8
from minivllm.kernels.linear.fp8_linear import FP8

EPS = 1e-3


@pytest.fixture
def same(where):
    """Whether two ``Fp8Rows`` are the same, but for steps of the format in few places: a norm's last bit may differ,
    and the interpreter rounds ties up. It also loses the carry of what is rounded up to a power of two (Triton 3.6)."""
    device, _ = where

    def check(out, expected):
        torch.testing.assert_close(out.scales, expected.scales, rtol=1e-2, atol=0)
        mine, its = out.values.float(), expected.values.float()
        assert mine.isfinite().all(), "not every element was written"
        differ = mine != its
        step = (mine - its).abs() <= its.abs() / 8 + 2**-9
        carry = torch.frexp(its).mantissa.abs() == 0.5
        assert (step | carry if device == "cpu" else step).all()
        assert differ.sum() <= 1 + differ.numel() / 20

    return check


def rows_of(device, dtype, rows, n):
    """Rows of several sizes, one of zeros, each a slice of a wider one."""
    x = torch.randn(rows, n + 8, device=device) * torch.logspace(-2, 2, rows, device=device)[:, None]
    if rows > 1:
        x[1] = 0
    return x.to(dtype)[:, :n]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("rows", "n"), [(0, 64), (1, 16), (7, 100), (3, 1024), (2, 17408)])
def test_rows_of_float8_equal_their_reference(where, same, rows, n, normed):
    device, dtype = where
    x = rows_of(device, dtype, rows, n)
    norm_weight = (torch.rand(n, device=device) + 0.5).to(dtype) if normed else None
    out = fp8.quantize_triton(x, norm_weight, EPS)
    assert out.values.dtype == FP8 and out.values.shape == (rows, n) and out.dtype == dtype
    if rows:
        same(out, fp8.quantize_reference(x, norm_weight, EPS))


def test_the_largest_number_of_a_row_is_the_largest_of_the_format():
    x = torch.tensor([[3.0, -7.0, 0.5], [0.0, 0.0, 0.0], [1e-30, 0.0, 0.0]])
    rows = fp8.quantize_reference(x)
    assert rows.values[0].float().tolist() == [192.0, -448.0, 32.0]
    assert rows.values[1:].float().abs().max() == 0 and (rows.scales > 0).all()
    torch.testing.assert_close(rows.values.float() * rows.scales[:, None], x, rtol=1 / 16, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("rows", "n"), [(0, 64), (1, 16), (5, 1100)])
def test_scales_equal_their_reference(where, close, rows, n, added, biased):
    """What lies beside the columns of a residual that is a slice stays."""
    device, dtype = where
    y = torch.randn(rows, n, device=device, dtype=dtype)
    of_rows, of_columns = torch.rand(rows, device=device), torch.rand(n, device=device)
    bias = torch.randn(n, device=device, dtype=dtype) if biased else None
    wide = torch.randn(rows, n + 5, device=device, dtype=dtype)
    residual, before = (wide[:, :n], wide.clone()) if added else (None, None)
    floats = [y.float(), of_rows, of_columns, None if bias is None else bias.float()]
    expected = fp8.scale_reference(*floats, None if residual is None else residual.float())
    out = fp8.scale_triton(y, of_rows, of_columns, bias, residual)
    assert out is (y if residual is None else residual)
    close(out, expected)
    if before is not None:
        assert torch.equal(wide[:, n:], before[:, n:])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("rows", "n"), [(0, 64), (1, 16), (5, 1100), (2, 17408)])
def test_silu_of_products_in_float8_equals_its_reference(where, same, rows, n, scaled):
    device, dtype = where
    y = torch.randn(rows, 2 * n, device=device, dtype=dtype)
    of_both = (torch.rand(rows, device=device) * 3, torch.rand(2 * n, device=device)) if scaled else ()
    if rows > 1:
        y[1, n:] = 0
    out = fp8.silu_quantize_triton(y, *of_both)
    assert out.values.dtype == FP8 and out.values.shape == (rows, n) and out.dtype == dtype
    if rows:
        same(out, fp8.silu_quantize_reference(y, *of_both))


def test_a_product_is_that_of_the_numbers_in_float8():
    """And near that of the numbers themselves: e4m3 has three bits behind the leading one."""
    x, weight = torch.randn(5, 256), torch.randn(48, 256) * torch.logspace(-3, 1, 48)[:, None]
    bias, residual = torch.randn(48), torch.randn(5, 48)
    rows, (values, scale, _) = fp8.quantize(x), fp8.quantize(weight)
    floats = rows.values.float() * rows.scales[:, None], values.float() * scale[:, None]
    expected = floats[0] @ floats[1].t() + bias
    torch.testing.assert_close(fp8.fp8_linear(rows, values, scale, bias), expected)
    kept = residual.clone()
    assert fp8.fp8_linear(rows, values, scale, bias, residual) is residual
    torch.testing.assert_close(residual, kept + expected)
    exact = x @ weight.t()
    errors = (expected - bias - exact).norm(dim=0) / exact.norm(dim=0)
    assert 0.01 < errors[:16].mean() < 0.08 and 0.01 < errors[-16:].mean() < 0.08  # small columns as good as large


# --------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 16, 64, 200, fp8.MAX_SCALED_LATER, fp8.MAX_SCALED_LATER + 1, 1000])
@pytest.mark.parametrize(("n", "k"), [(256, 16), (5120, 17408), (4096, 1024)])
def test_products_equal_those_in_float32(close, rows, n, k):
    device = torch.device("cuda")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("no GPU with float8")
    x = rows_of(device, torch.bfloat16, rows, k)
    values, scale, _ = fp8.quantize(torch.randn(n, k, device=device) * torch.logspace(-2, 1, n, device=device)[:, None])
    bias, residual = (torch.randn(*of, device=device, dtype=torch.bfloat16) for of in ((n,), (rows, n)))
    quantized = fp8.quantize(x)
    wide = fp8.fp8_linear_reference(quantized._replace(dtype=torch.float32), values, scale)
    close(fp8.fp8_linear(quantized, values, scale), wide)
    close(fp8.fp8_linear(quantized, values, scale, bias), wide + bias.float())
    close(fp8.fp8_linear(quantized, values, scale, None, residual.clone()), wide + residual.float())
    gate, up = wide.chunk(2, 1)
    activated = torch.nn.functional.silu(gate) * up
    close(fp8.fp8_gate_up(quantized, values, scale), activated)
    behind = fp8.fp8_gate_up_rows(quantized, values, scale)
    assert behind.values.shape == (rows, n // 2)
    error = (behind.values.float() * behind.scales[:, None] - activated).norm()
    assert error <= 0.04 * activated.norm()
