"""Linear layers over few rows: each launcher in each shape of the kernels against the float32 reference."""

import os

import pytest
import torch

from minivllm.kernels.linear import cluster_linear
from minivllm.kernels.linear import skinny_linear as skinny
from minivllm.kernels.linear.skinny_linear import SkinnyConfig
from minivllm.kernels.pdl import use_pdl

EPS = 1e-6
VECTOR, MATRIX = SkinnyConfig(2, 4, 2), SkinnyConfig(0, 2, 1, slice=16)


def tensors(where, rows, n, k, *, bias=False):
    """x, norm weight, weight, bias, residual; x a slice of a wider tensor."""
    device, dtype = where

    def normal(*shape):
        return torch.randn(shape, device=device).to(dtype)

    x = normal(rows, k + 8)[:, :k]
    weight = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
    made = x, normal(k) + 1, weight, normal(n) if bias else None
    if device == "cuda":  # a weight that a kernel has just written may be read too early: see pdl.py
        torch.cuda.synchronize()
    return made


def wide(*values):
    return [v.float() if torch.is_tensor(v) else v for v in values]


def check_all(where, close, rows, n, k, config, bias=False):
    x, g, w, b = tensors(where, rows, n, k, bias=bias)
    close(skinny.linear_triton(x, w, b, config), torch.nn.functional.linear(*wide(x, w, b)))
    close(skinny.norm_linear_triton(x, g, EPS, w, b, config), skinny.norm_linear_reference(*wide(x, g, EPS, w, b)))
    residual = torch.randn(rows, n, device=x.device).to(x.dtype)
    expected = skinny.linear_add_reference(*wide(x, w, b), residual.float().clone())
    out = skinny.linear_add_triton(x, w, b, residual, config)
    assert out.data_ptr() == residual.data_ptr()
    close(out, expected)
    x, g, w, b = tensors(where, rows, 2 * n, k, bias=bias)
    close(skinny.norm_gate_up_triton(x, g, EPS, w, b, config), skinny.norm_gate_up_reference(*wide(x, g, EPS, w, b)))


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_the_vector_kernel_of_every_number_of_rows(where, close, rows):
    check_all(where, close, rows, 21, 512, VECTOR)


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 16])
def test_the_matrix_kernel_of_every_number_of_rows(where, close, rows):
    check_all(where, close, rows, 21, 64, MATRIX)


@pytest.mark.parametrize("k", [8, 520, 1032])
@pytest.mark.parametrize("config", [VECTOR, SkinnyConfig(1, 2, 3), SkinnyConfig(4, 1, 1), MATRIX], ids=str)
def test_k_that_no_step_divides(where, close, k, config):
    if where == ("cuda", torch.float32):
        pytest.skip("as in bfloat16; each shape is compiled for a second")
    check_all(where, close, 3, 9, k, config)


@pytest.mark.parametrize("config", [SkinnyConfig(1, 4, 1), SkinnyConfig(2, 2, 2), SkinnyConfig(1, 1, 8)], ids=str)
def test_weights_in_chunks_and_all_at_once(where, close, config):
    check_all(where, close, 2, 9, 2048, config)


@pytest.mark.parametrize("config", [SkinnyConfig(0, 4, 4, 16), SkinnyConfig(0, 2, 1, 32, 2), SkinnyConfig(0, 4, 2, 16)])
def test_the_matrix_kernel_pipelines_what_registers_do_not_hold(where, close, config):
    check_all(where, close, 6, 40, 256, config)


@pytest.mark.parametrize("config", [VECTOR, MATRIX], ids=str)
def test_bias_is_added_before_the_activation_and_once(where, close, config):
    check_all(where, close, 3, 19, 256, config, bias=True)


@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1024, 3072), (2048, 8192), (5120, 17408)])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_chosen_configurations_cover_their_shape(rows, n, k):
    for gated in (False, True):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            config = skinny.skinny_config(rows, n, k, dtype, gated, 132)
            lanes = rows * config.per_warp
            assert lanes <= 32 and config.depth >= 1 and config.warps in (1, 2, 4, 8)
            if rows > 8:
                assert not config.per_warp or dtype == torch.float16


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1024, 3072), (3072, 2048), (2048, 8192), (151936, 1024)])
@pytest.mark.parametrize("rows", [1, 4, 6, 16])
def test_chosen_configurations_are_right(where, close, rows, n, k):
    if where != ("cuda", torch.bfloat16):
        pytest.skip("too large for the interpreter")
    check_all(where, close, rows, n, k, None)


@pytest.mark.parametrize(
    ("rows", "n", "k", "taken"),
    [(8, 1024, 3072, False), (9, 1024, 3072, True), (2, 2048, 8192, False), (3, 2048, 8192, True)],
)
def test_from_where_on_clusters_are_taken(monkeypatch, rows, n, k, taken):
    monkeypatch.setattr(cluster_linear.nvrtc, "available", lambda device: True)
    monkeypatch.setattr(cluster_linear, "num_sms", lambda device: 132)
    monkeypatch.setattr(cluster_linear, "loads", lambda kernel, device: True)
    assert cluster_linear.use_cluster(rows, n, k, torch.bfloat16, torch.device("cuda")) == taken


@pytest.mark.skipif(not os.environ.get("TRITON_INTERPRET"), reason="on a GPU the case cuda-bf16 covers it")
@pytest.mark.parametrize("config", [VECTOR, SkinnyConfig(1, 2, 3)], ids=str)
def test_pairs_of_bfloat16_are_unpacked(config):
    """The vector kernel has no dot, so that the interpreter can run it in bfloat16."""
    x, g, w, b = tensors(("cpu", torch.bfloat16), 3, 13, 520, bias=True)
    out = skinny.norm_linear_triton(x, g, EPS, w, b, config)
    expected = skinny.norm_linear_reference(*wide(x, g, EPS, w, b))
    assert (out.float() - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_chain_in_a_graph_gives_the_same_bits_every_time(rows):
    """Layers launched programmatically, in place on one residual stream, 200 replays: a missing wait would show."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    device, hidden, inner, layers = torch.device("cuda"), 1024, 3072, 12

    def weight(n, k):
        return (torch.randn(n, k, device=device) / k**0.5).bfloat16()

    norm = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    weights = [(weight(hidden, hidden), weight(hidden, hidden), weight(2 * inner, hidden), weight(hidden, inner))
               for _ in range(layers)]  # fmt: skip
    start = torch.randn(rows, hidden, device=device).bfloat16()
    h = torch.empty_like(start)

    def chain():
        h.copy_(start)
        for qkv, o, gate_up, down in weights:
            skinny.linear_add_triton(skinny.norm_linear_triton(h, norm, EPS, qkv), o, None, h)
            skinny.linear_add_triton(skinny.norm_gate_up_triton(h, norm, EPS, gate_up), down, None, h)

    expected = start.float()
    for qkv, o, gate_up, down in weights:
        expected = expected + skinny.norm_linear_reference(*wide(expected, norm, EPS, qkv)) @ o.float().T
        expected = expected + skinny.norm_gate_up_reference(*wide(expected, norm, EPS, gate_up)) @ down.float().T
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    graph.replay()
    first = h.clone()
    assert (first.float() - expected).norm() < 2e-2 * expected.norm()
    differing = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(200):
        graph.replay()
        differing += (h != first).any()
    assert differing.item() == 0


def test_only_cuda_is_launched_programmatically():
    assert not use_pdl(torch.device("cpu"))
