"""Four products in one kernel: how they are cut, and what the driver is told, without a GPU; on Hopper, the results
against float32, from buffers full of NaN."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from minivllm.kernels import chain_linear as chain
from minivllm.kernels import hopper, nvrtc
from minivllm.kernels._triton import cdiv
from minivllm.kernels.chain_linear import ChainShape, Unit, chain_config, chain_kernel, chain_linear, use_chain
from minivllm.kernels.cluster_config import tile_rows

BF16, EPS = torch.bfloat16, 1e-6
SHAPES = {  # of published models
    "Qwen3-0.6B": ChainShape(1024, 2048, 3072, 4096),
    "Qwen3-1.7B": ChainShape(2048, 2048, 6144, 4096),
    "Llama-3.2-1B": ChainShape(2048, 2048, 8192, 3072),
}
LLAMA_3B = ChainShape(3072, 3072, 8192, 5120)  # up to 128 rows
ROWS = [65, 72, 100, 128, 129, 160, 192, 200, 255, 256]


# --------------------------------------------------------------------------- how they are cut


def check(rows, shape, sms):
    config = chain_config(rows, shape, sms)
    if config is None:
        return False
    assert config.programs <= sms and config.programs % 2 == 0, "clusters of two, all of them at once"
    assert config.stages >= 4 and config.shared_bytes + 1024 <= hopper.SHARED_BYTES
    products = [  # the unit, gated, features, k of a program, programs a unit
        (config.add, False, shape.hidden, shape.width // 2, 2),
        (config.gate, True, 2 * shape.inner, shape.hidden, 1),
        (config.add, False, shape.hidden, shape.inner // 2, 2),
        (config.qkv, False, shape.qkv, shape.hidden, 1),
    ]
    for unit, gated, n, k, splits in products:
        assert unit.rows in (64, 128) and n % unit.features == 0 and k % (64 * unit.at_once) == 0
        assert cdiv(rows, unit.rows) * (n // unit.features) * splits <= config.programs
        assert unit.columns <= 256 and unit.columns % (16 if gated else 8) == 0, "wgmma's, and boxes of whole swizzles"
        assert unit.features <= 256, "TMA's boxes"
        assert unit.at_once * unit.step_bytes <= config.stage_bytes
        box_rows = tile_rows(unit.rows, rows)
        assert box_rows <= unit.rows and box_rows % 8 == 0 and box_rows * cdiv(rows, unit.rows) >= rows
    assert shape.hidden // config.add.columns % 16 == 0, "a row's squares are read in sixteens"
    return True


@given(
    st.integers(65, 256),
    st.builds(ChainShape, *[st.integers(1, 100).map(lambda i: 128 * i)] * 4),
    st.sampled_from([2, 39, 114, 132]),
)
def test_units_fit_the_chip_and_cut_the_products_evenly(rows, shape, sms):
    check(rows, shape, sms)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", SHAPES)
def test_published_models_are_cut(model, rows):
    assert check(rows, SHAPES[model], 132)
    assert check(rows, LLAMA_3B, 132) == (rows <= 128)


def test_shapes_that_do_not_divide_have_none():
    assert chain_config(128, ChainShape(1024, 2048, 3072, 8 * 509)) is None
    assert chain_config(128, ChainShape(1024, 2048 + 64, 3072, 4096)) is None  # k in two
    assert chain_config(256, ChainShape(5120, 5120, 17408, 7168)) is None  # Qwen3-14B: gate and up are too large


def test_where_it_is_faster(monkeypatch):
    monkeypatch.setattr(nvrtc, "available", lambda device: device.type == "cuda")
    monkeypatch.setattr(chain, "num_sms", lambda device: 132)
    loading, room = SimpleNamespace(works=True), SimpleNamespace(clusters=64)
    monkeypatch.setattr(chain, "loads", lambda kernel, device: loading.works)
    monkeypatch.setattr(chain, "load", lambda kernel, device: kernel)
    monkeypatch.setattr(nvrtc, "clusters_at_once", lambda function, shape: room.clusters)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    chain._fits.cache_clear()
    shape, cuda = SHAPES["Qwen3-0.6B"], torch.device("cuda")
    assert use_chain(65, shape, BF16, cuda) and use_chain(256, shape, BF16, cuda)
    assert not use_chain(64, shape, BF16, cuda) and not use_chain(257, shape, BF16, cuda)
    assert not use_chain(128, shape, torch.float16, cuda) and not use_chain(128, shape, BF16, torch.device("cpu"))
    assert not use_chain(96, ChainShape(4096, 4096, 12288, 6144), BF16, cuda), "Qwen3-8B: little stands between kernels"
    assert not use_chain(128, ChainShape(1024, 2048, 3072, 8 * 509), BF16, cuda)
    room.clusters = 63
    chain._fits.cache_clear()
    assert not use_chain(128, shape, BF16, cuda), "its programs wait for one that never runs"
    loading.works, room.clusters = False, 64
    chain._fits.cache_clear()
    assert not use_chain(128, shape, BF16, cuda)
    chain._fits.cache_clear()


@pytest.mark.parametrize("rows", [72, 256])
@pytest.mark.parametrize("model", SHAPES)
def test_published_models_compile(compiled, reads_in_time, model, rows):
    shape = SHAPES[model]
    cubin = nvrtc.compile_cubin(chain_kernel(shape, chain_config(rows, shape)).source)
    assert b"chain_linear" in cubin
    reads_in_time(cubin)


# --------------------------------------------------------------------------- what the driver is told


class Tensors:
    """What the four products read and write."""

    def __init__(self, rows, shape, device):
        def weight(n, k):
            return (torch.randn(n, k, device=device) / k**0.5).to(BF16)

        self.heads = torch.randn(rows, shape.width, device=device).to(BF16)
        self.x = torch.randn(rows, shape.hidden, device=device).to(BF16) * 2
        self.o, self.down = weight(shape.hidden, shape.width), weight(shape.hidden, shape.inner)
        self.gate_up, self.qkv = weight(2 * shape.inner, shape.hidden), weight(shape.qkv, shape.hidden)

    def run(self, x):
        return chain_linear(self.heads, self.o, x, self.gate_up, EPS, self.down, self.qkv)

    def expected(self, x):
        """x and the projection, in float32, rounded where the kernel rounds."""
        heads, o, gate_up, down, qkv = (
            t.float().cpu() for t in (self.heads, self.o, self.gate_up, self.down, self.qkv)
        )
        x = (x.float().cpu() + heads @ o.T).to(BF16).float()
        gate, up = (F.rms_norm(x, (x.shape[1],), eps=EPS) @ gate_up.T).chunk(2, dim=1)
        x = (x + (F.silu(gate) * up).to(BF16).float() @ down.T).to(BF16).float()
        return x, x @ qkv.T


def test_the_driver_is_told_the_launch(told):
    shape = SHAPES["Qwen3-0.6B"]
    tensors = Tensors(200, shape, "cpu")
    projection = tensors.run(tensors.x)
    ((config, kernel, values),) = told.seen
    cut = chain_config(200, shape)
    assert kernel == chain_kernel(shape, cut) and projection.shape == (200, 4096)
    assert values[:9] == [5] * 8 + [tensors.x.data_ptr()] and values[10] == projection.data_ptr()
    assert values[12:] == [chain._counts(tensors.x.device).data_ptr(), 200, pytest.approx(EPS)]
    assert (config.gridDimX, config.blockDimX, int(config.hStream)) == (cut.programs, 320, 77)
    assert config.attrs[0].value.clusterDim.x == 2
    weights = [(t, lines) for t, lines in ((tensors.o, 64), (tensors.gate_up, 48), (tensors.down, 64))]
    for made, (tensor, lines) in zip(told.maps, weights, strict=False):
        assert made == (tensor.data_ptr(), *tensor.shape, tensor.shape[1], lines, 64)
    boxes = [made[4] for made in told.maps[4:]]
    assert cut.gate == Unit(128, 96) and boxes == [56, 104, 56, 8 * cdiv(cdiv(200, cdiv(200, cut.qkv.rows)), 8)]


# --------------------------------------------------------------------------- on Hopper


@pytest.mark.gpu
@pytest.mark.parametrize("model", SHAPES)
def test_it_runs_on_this_gpu(gpu, model):
    assert all(use_chain(rows, SHAPES[model], BF16, gpu) for rows in ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", SHAPES)
def test_it_computes_what_the_four_products_do(gpu, close, monkeypatch, model, rows):
    shape = SHAPES[model]
    tensors = Tensors(rows, shape, gpu)
    x, projection = tensors.expected(tensors.x)
    empty, new_empty = torch.empty, torch.Tensor.new_empty
    nan = float("nan")
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(nan))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *args: new_empty(self, *args).fill_(nan))
    first = tensors.x.clone()
    got = tensors.run(first)
    close(first, x)
    close(got, projection)
    for _ in range(5):
        again = tensors.x.clone()
        assert torch.equal(tensors.run(again), got) and torch.equal(again, first)
    assert not chain._counts(gpu).any()


@pytest.mark.gpu
def test_launches_behind_each_other_wait_for_what_the_one_before_wrote(gpu, captured):
    """In a graph, each on the stream of the one before, of other numbers of rows, too."""
    shape = SHAPES["Qwen3-0.6B"]
    layers = [Tensors(256, shape, gpu) for _ in range(6)]
    starts = {rows: torch.randn(rows, shape.hidden, device=gpu).to(BF16) for rows in (256, 130, 72)}
    xs, outs = {rows: torch.empty_like(x) for rows, x in starts.items()}, {}

    def step():
        for rows, x in xs.items():
            x.copy_(starts[rows])
            for layer in layers:
                heads = outs[rows][:, : shape.width].contiguous() if layer is not layers[0] else layer.heads[:rows]
                outs[rows] = chain_linear(heads, layer.o, x, layer.gate_up, EPS, layer.down, layer.qkv)

    with torch.no_grad():
        step()
        torch.cuda.synchronize()
        expected = {rows: (xs[rows].clone(), outs[rows].clone()) for rows in xs}
        graph = captured(step)
        for _ in range(20):
            for x in xs.values():
                x.fill_(float("nan"))
            graph.replay()
        for rows, (x, out) in expected.items():
            assert torch.equal(xs[rows], x) and torch.equal(outs[rows], out) and out.isfinite().all()
