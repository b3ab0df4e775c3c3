"""Four products in one kernel: how they are cut, and what the driver is told, without a GPU; on Hopper, the results
against float32, from buffers full of NaN."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from minivllm.kernels import hopper, nvrtc
from minivllm.kernels.linear import chain_linear as chain
from minivllm.kernels.linear.chain_config import ChainShape, Unit, chain_config, chain_kernel
from minivllm.kernels.linear.chain_linear import chain_linear, use_chain
from minivllm.kernels.linear.cluster_config import tile_rows
from minivllm.rounding import cdiv

BF16, EPS, EPS_BEHIND = torch.bfloat16, 1e-6, 2e-2  # of the two norms
SHAPES = {  # of published models
    "Qwen3-0.6B": ChainShape(1024, 2048, 3072, 4096),
    "Qwen3-1.7B": ChainShape(2048, 2048, 6144, 4096),
    "Llama-3.2-1B": ChainShape(2048, 2048, 8192, 3072),
}
LLAMA_3B = ChainShape(3072, 3072, 8192, 5120)  # up to 128 rows
LARGE = {
    "Qwen3-8B": ChainShape(4096, 4096, 12288, 6144),
    "Llama-3.1-8B": ChainShape(4096, 4096, 14336, 6144),
    "Qwen3-14B": ChainShape(5120, 5120, 17408, 7168),
    "Qwen3-32B": ChainShape(5120, 8192, 25600, 10240),
}
ROWS = [33, 48, 64, 65, 72, 100, 128, 129, 160, 192, 200, 255, 256]
LARGE_ROWS = [33, 64, 65, 72, 100, 128, 161, 192]
CASES = [(name, rows) for name in SHAPES for rows in ROWS] + [(name, rows) for name in LARGE for rows in LARGE_ROWS]
CASES += [("Qwen3-0.6B", rows) for rows in (257, 300, 384, 449, 512)]
CASES += [("Qwen3-14B", rows) for rows in (17, 24, 129)] + [("Qwen3-32B", rows) for rows in (2, 9, 160)]


# --------------------------------------------------------------------------- how they are cut


def check(rows, shape, sms):
    config = chain_config(rows, shape, sms)
    if config is None:
        return False
    assert config.programs <= sms and config.programs % 2 == 0, "clusters of two, all of them at once"
    assert config.stages >= 4 and config.shared_bytes + 1024 <= hopper.SHARED_BYTES
    assert config.threads == 128 * (cdiv(config.add.rows, 64) if config.large else 2)
    outputs = (config.gate.features * config.rounds + config.last) // 2  # of gate, a program
    assert (config.rounds, config.last) == (1, 0) or config.large
    products = [  # the unit, gated, features, those of a program, k
        (config.add, False, shape.hidden, config.add.features, shape.width),
        (config.gate, True, shape.inner, outputs, shape.hidden),
        (config.add, False, shape.hidden, config.add.features, shape.inner),
        (config.qkv, False, shape.qkv, config.qkv.features, shape.hidden),
    ]
    for unit, gated, n, mine, k in products:
        assert n % mine == 0 and k % (unit.splits * 64 * unit.at_once) == 0
        assert cdiv(rows, unit.rows) * (n // mine) * unit.splits <= config.programs
        columns = unit.columns(config.groups)
        assert columns <= 256 and columns % (16 if gated else 8) == 0, "wgmma's, and boxes of whole swizzles"
        assert unit.features <= 256, "TMA's boxes"
        assert unit.at_once * unit.step_bytes <= config.stage_bytes
        box_rows = tile_rows(unit.rows, rows)
        assert box_rows <= unit.rows and box_rows % 8 == 0 and box_rows * cdiv(rows, unit.rows) >= rows
        if config.large:
            assert rows <= unit.rows and unit.at_once == 1, "one tile, whose rows that no input fills stay zeros"
            assert columns % (8 * unit.splits) == 0, "each split finishes as many eights of features"
        else:
            assert unit.rows in (64, 128) and unit.splits == (2 if unit is config.add else 1)
    assert config.last <= config.gate.features and config.last % 16 == 0
    assert config.row_parts(shape.hidden) % 16 == 0, "a row's squares are read in sixteens"
    return True


@given(
    st.integers(1, 256),
    st.builds(ChainShape, *[st.integers(1, 100).map(lambda i: 128 * i)] * 4),
    st.sampled_from([2, 39, 114, 132]),
)
def test_units_fit_the_chip_and_cut_the_products_evenly(rows, shape, sms):
    check(rows, shape, sms)


@given(
    st.integers(1, 256),
    st.builds(ChainShape, *[st.integers(1, n).map(lambda i: 1024 * i) for n in (8, 8, 32, 12)]),
    st.sampled_from([128, 132]),
)
def test_units_of_large_layers_do(rows, shape, sms):
    assert check(rows, shape, sms) <= (not shape.large or rows <= 192)


@pytest.mark.parametrize(("model", "rows"), CASES)
def test_published_models_are_cut(model, rows):
    shape = (SHAPES | LARGE)[model]
    assert check(rows, shape, 132) and chain_config(rows, shape).large == (model in LARGE)


def test_a_large_layer_is_cut_in_as_few_rounds_as_fit():
    cut = chain_config(144, LARGE["Qwen3-14B"])
    assert (cut.programs, cut.add, cut.qkv) == (128, Unit(192, 160, splits=4), Unit(192, 112, splits=2))
    assert (cut.gate, cut.rounds, cut.last) == (Unit(192, 144), 1, 128)
    assert cut.part_words * 4 == 3 * 5120 * 192 * 4, "each split's sums of what three others finish"
    cut = chain_config(72, LARGE["Qwen3-32B"])
    assert (cut.gate, cut.rounds, cut.last) == (Unit(128, 144), 2, 112)


def test_shapes_that_do_not_divide_have_none():
    assert chain_config(128, ChainShape(1024, 2048, 3072, 8 * 509)) is None
    assert chain_config(128, ChainShape(1024, 2048 + 64, 3072, 4096)) is None  # k in two
    assert chain_config(128, ChainShape(5120, 5120, 17408, 7168 + 128)) is None
    assert chain_config(128, ChainShape(5120, 5120 + 128, 17408, 7168)) is None  # k in four


def test_layers_of_other_numbers_of_rows_have_none():
    assert [rows for rows in ROWS if check(rows, LLAMA_3B, 132)] == [rows for rows in ROWS if rows <= 128]
    assert all(chain_config(rows, shape) is None for shape in SHAPES.values() for rows in (1, 32, 513))
    assert all(chain_config(257, SHAPES[name]) is None for name in ("Qwen3-1.7B", "Llama-3.2-1B"))
    assert all(chain_config(rows, shape) is None for shape in LARGE.values() for rows in (1, 193))
    assert chain_config(129, LARGE["Qwen3-8B"]) is None, "its third warpgroup would have one row"
    assert chain_config(32, LARGE["Qwen3-8B"]) is None and chain_config(16, LARGE["Qwen3-14B"]) is None


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
    assert use_chain(33, shape, BF16, cuda) and use_chain(256, shape, BF16, cuda)
    assert not use_chain(32, shape, BF16, cuda) and not use_chain(513, shape, BF16, cuda)
    assert not use_chain(128, shape, torch.float16, cuda) and not use_chain(128, shape, BF16, torch.device("cpu"))
    assert use_chain(96, LARGE["Qwen3-14B"], BF16, cuda) and not use_chain(200, LARGE["Qwen3-14B"], BF16, cuda)
    assert not use_chain(128, ChainShape(1024, 2048, 3072, 8 * 509), BF16, cuda)
    room.clusters = 63
    chain._fits.cache_clear()
    assert not use_chain(128, shape, BF16, cuda), "its programs wait for one that never runs"
    loading.works, room.clusters = False, 64
    chain._fits.cache_clear()
    assert not use_chain(128, shape, BF16, cuda)
    chain._fits.cache_clear()


@pytest.mark.parametrize(("model", "rows"), [
    *((model, rows) for model in SHAPES for rows in (72, 256)), ("Qwen3-0.6B", 300), ("Qwen3-0.6B", 512),
    ("Qwen3-8B", 72), ("Qwen3-14B", 24), ("Qwen3-14B", 144), ("Qwen3-32B", 192),
])  # fmt: skip
def test_published_models_compile(compiled, reads_in_time, model, rows):
    shape = (SHAPES | LARGE)[model]
    cubin = nvrtc.compile_cubin(chain_kernel(shape, chain_config(rows, shape)).source)
    assert (b"large_chain" if model in LARGE else b"chain_linear") in cubin
    reads_in_time(cubin)


# --------------------------------------------------------------------------- what the driver is told


class Tensors:
    """What the four products read and write."""

    def __init__(self, rows, shape, device):
        self.shape = shape

        def weight(n, k):
            return (torch.randn(n, k, device=device) / k**0.5).to(BF16)

        self.heads = torch.randn(rows, shape.width, device=device).to(BF16)
        self.x = torch.randn(rows, shape.hidden, device=device).to(BF16) * 2
        self.o, self.down = weight(shape.hidden, shape.width), weight(shape.hidden, shape.inner)
        self.gate_up, self.qkv = weight(2 * shape.inner, shape.hidden), weight(shape.qkv, shape.hidden)
        self.bias = torch.randn(shape.qkv, device=device).to(BF16) if rows % 16 else None

    def run(self, x):
        """The projection, whose rows a large layer's kernel divides, and adds their bias."""
        products = self.o, x, self.gate_up, EPS, self.down, self.qkv, EPS_BEHIND
        projection, scale = chain_linear(self.heads, *products, self.bias)
        assert (scale is None) == self.shape.large
        assert scale is None or (scale.x is x and scale.eps == EPS_BEHIND and scale.bias is self.bias)
        return projection

    def expected(self, x):
        """x and the projection, in float32, rounded where the kernel rounds."""
        heads, o, gate_up, down, qkv = (t.float() for t in (self.heads, self.o, self.gate_up, self.down, self.qkv))
        x = (x.float() + heads @ o.T).to(BF16).float()
        gate, up = (F.rms_norm(x, (x.shape[1],), eps=EPS) @ gate_up.T).chunk(2, dim=1)
        x = (x + (F.silu(gate) * up).to(BF16).float() @ down.T).to(BF16).float()
        if not self.shape.large:
            return x, x @ qkv.T
        bias = None if self.bias is None else self.bias.float()
        return x, F.linear(F.rms_norm(x, (x.shape[1],), eps=EPS_BEHIND), qkv, bias)


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


def test_the_driver_is_told_that_of_a_large_layer(told):
    shape = ChainShape(4096, 4096, 13312, 2048)  # 104 of gate a program
    tensors = Tensors(70, shape, "cpu")
    projection = tensors.run(tensors.x)
    ((config, kernel, values),) = told.seen
    cut = chain_config(70, shape)
    parts = chain._parts(tensors.x.device, cut.part_words)
    assert kernel == chain_kernel(shape, cut) and projection.shape == (70, 2048) and (parts == -1).all()
    assert values[:10] == [5] * 9 + [tensors.x.data_ptr()] and values[11] == projection.data_ptr()
    counts = chain._counts(tensors.x.device).data_ptr()
    assert values[13:16] == [parts.data_ptr(), tensors.bias.data_ptr(), counts]
    assert values[16:] == [70, pytest.approx(EPS), pytest.approx(EPS_BEHIND)]
    assert (config.gridDimX, config.blockDimX) == (128, 320)
    assert (cut.gate.features, cut.rounds, cut.last) == (112, 1, 96)
    assert [made[4] for made in told.maps] == [128, 56, 48, 128, 32, 72, 72, 72, 72]
    assert [made[0] for made in told.maps[1:3]] == [tensors.gate_up.data_ptr()] * 2


# --------------------------------------------------------------------------- on Hopper


@pytest.mark.gpu
@pytest.mark.parametrize("model", SHAPES | LARGE)
def test_it_runs_on_this_gpu(gpu, model):
    assert all(use_chain(rows, (SHAPES | LARGE)[model], BF16, gpu) for name, rows in CASES if name == model)


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "rows"), CASES)
def test_it_computes_what_the_four_products_do(gpu, close, monkeypatch, model, rows):
    shape = (SHAPES | LARGE)[model]
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
    cut = chain_config(rows, shape)
    assert not cut.large or (chain._parts(gpu, cut.part_words) == -1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [100, 192])
def test_nan_come_out_as_nan_and_are_not_taken_for_sums_that_are_missing(gpu, rows):
    tensors = Tensors(rows, LARGE["Qwen3-8B"], gpu)
    clean, x = tensors.x.clone(), tensors.x.clone()
    expected = tensors.run(clean)
    tensors.heads[3] = torch.tensor(-1, dtype=torch.int16).view(BF16)  # the NaN whose bits are all set
    tensors.heads[rows - 1, 7] = float("nan")
    got = tensors.run(x)
    bad = torch.zeros(rows, dtype=torch.bool, device=gpu)
    bad[3] = bad[rows - 1] = True
    for out, one in ((x, clean), (got, expected)):
        assert out[bad].isnan().all() and torch.equal(out[~bad], one[~bad])
    assert (chain._parts(gpu, chain_config(rows, tensors.shape).part_words) == -1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-8B"])
def test_launches_behind_each_other_wait_for_what_the_one_before_wrote(gpu, captured, model):
    """In a graph, each on the stream of the one before, of other numbers of rows, too."""
    shape = (SHAPES | LARGE)[model]
    numbers = (192, 161, 72) if shape.large else (256, 130, 72)
    layers = [Tensors(numbers[0], shape, gpu) for _ in range(6)]
    starts = {rows: torch.randn(rows, shape.hidden, device=gpu).to(BF16) for rows in numbers}
    xs, outs = {rows: torch.empty_like(x) for rows, x in starts.items()}, {}

    def step():
        for rows, x in xs.items():
            x.copy_(starts[rows])
            for layer in layers:
                heads = outs[rows][:, : shape.width].contiguous() if layer is not layers[0] else layer.heads[:rows]
                outs[rows], _ = chain_linear(heads, layer.o, x, layer.gate_up, EPS, layer.down, layer.qkv, EPS)

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
