"""Four products of packed weights in one kernel: how they are cut, and what the driver is told, without a GPU; the
results against float32, on the CPU, where the kernel runs thread by thread, and on Hopper, from buffers full of NaN."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from minivllm.kernels import hopper, nvrtc
from minivllm.kernels.linear import packed_chain as packed
from minivllm.kernels.linear import packed_config
from minivllm.kernels.linear.chain_config import ChainShape
from minivllm.kernels.linear.packed_chain import (
    packed_chain,
    packed_chain_config,
    packed_kernel,
    packed_rows,
    use_packed,
)
from minivllm.kernels.linear.packed_weights import MOST_EXCEPTIONS, Order, pack_all

BF16, EPS, EPS_BEHIND = torch.bfloat16, 1e-6, 2e-2  # of the two norms
SHAPES = {  # of published models
    "Qwen3-4B": ChainShape(2560, 4096, 9728, 6144),
    "Qwen3-8B": ChainShape(4096, 4096, 12288, 6144),
    "Qwen3-14B": ChainShape(5120, 5120, 17408, 7168),
    "Qwen3-32B": ChainShape(5120, 8192, 25600, 10240),
    "Llama-3.1-8B": ChainShape(4096, 4096, 14336, 6144),
    "Llama-3.2-3B": ChainShape(3072, 3072, 8192, 5120),
}
ROWS = [1, 8, 9, 16, 24, 32, 33, 48]  # of the largest layers


# --------------------------------------------------------------------------- how they are cut


def check(rows, shape, sms):
    config = packed_chain_config(rows, shape, sms)
    if config is None:
        return False
    assert config.programs in (sms, sms - 1) and config.programs % 2 == 0, "clusters of two, all of them at once"
    assert config.stages > 4 and config.inputs >= 8 and config.shared_bytes + 1024 <= hopper.SHARED_BYTES
    assert rows <= config.rows and config.rows in (8, 16, 32, 48, 64)
    clusters = config.programs // 2
    products = (
        (shape.hidden, shape.width),
        (2 * shape.inner, shape.hidden),
        (shape.hidden, shape.inner),
        (shape.qkv, shape.hidden),
    )
    for lines, k in products:
        assert lines % 128 == 0 and k % 128 == 0, "whole units"
        steps, rest = k // 128, -(-lines // 256) % clusters
        starts = [cluster * rest * steps // clusters for cluster in range(clusters + 1)]
        if rest:
            assert all(a < b for a, b in itertools.pairwise(starts)), "each cluster has units of those that are cut"
            assert all((b - 1) // steps - a // steps <= 1 for a, b in itertools.pairwise(starts)), "of two pairs"
    return True


@given(
    st.integers(1, 80),
    st.builds(ChainShape, *[st.integers(1, 60).map(lambda i: 128 * i)] * 4),
    st.sampled_from([2, 39, 114, 132]),
)
def test_units_fit_the_chip_and_every_cluster_has_some(rows, shape, sms):
    check(rows, shape, sms)


@given(
    st.integers(1, 80),
    st.builds(ChainShape, *[st.integers(4, n).map(lambda i: 1024 * i) for n in (8, 8, 32, 12)]),
    st.sampled_from([78, 114, 132]),
)
def test_large_layers_of_few_rows_are_cut(rows, shape, sms):
    assert check(rows, shape, sms) <= (rows <= 64)


@pytest.mark.parametrize("model", SHAPES)
def test_published_models_are_cut(model):
    assert all(check(rows, SHAPES[model], 132) for rows in ROWS) and not check(65, SHAPES[model], 132)
    assert [packed_chain_config(rows, SHAPES[model], 132).rows for rows in ROWS] == [8, 8, 16, 16, 32, 32, 48, 48]


def test_shapes_that_do_not_divide_have_none():
    assert packed_chain_config(8, ChainShape(2560, 4096, 9728, 6144 + 128), 132) is not None  # an odd number of blocks
    assert packed_chain_config(8, ChainShape(2560, 4096, 9728, 6144 + 64), 132) is None
    assert packed_chain_config(8, ChainShape(2560, 4096 + 64, 9728, 6144), 132) is None
    assert packed_chain_config(8, ChainShape(256, 256, 9728, 6144), 132) is None  # two units, 66 clusters
    assert packed_chain_config(8, ChainShape(4096, 4096, 25600, 6144), 132) is None  # 64 units, beside whole blocks


def test_rows_of_which_packed_weights_are_faster_are_more_of_larger_layers():
    first = {model: packed_rows(shape)[0] for model, shape in SHAPES.items()}
    assert first == {
        "Qwen3-4B": 3, "Qwen3-8B": 1, "Qwen3-14B": 1, "Qwen3-32B": 1, "Llama-3.1-8B": 1, "Llama-3.2-3B": 3
    }  # fmt: skip
    last = {model: packed_rows(shape)[-1] for model, shape in SHAPES.items()}
    assert all(rows == (32 if model in ("Qwen3-4B", "Llama-3.2-3B") else 48) for model, rows in last.items())
    assert not packed_rows(ChainShape(2048, 2048, 6144, 4096))  # Qwen3-1.7B


def test_where_it_runs(monkeypatch):
    monkeypatch.setattr(nvrtc, "available", lambda device: device.type == "cuda")
    monkeypatch.setattr(packed, "num_sms", lambda device: 132)
    loading, room = SimpleNamespace(works=True), SimpleNamespace(clusters=66)
    monkeypatch.setattr(packed_config, "loads", lambda kernel, device: loading.works)
    monkeypatch.setattr(packed_config, "load", lambda kernel, device: kernel)
    monkeypatch.setattr(nvrtc, "clusters_at_once", lambda function, shape: room.clusters)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    packed_config._fits.cache_clear()
    shape, cuda = SHAPES["Qwen3-14B"], torch.device("cuda")
    assert all(use_packed(rows, shape, BF16, cuda) for rows in ROWS) and not use_packed(65, shape, BF16, cuda)
    assert not use_packed(8, shape, torch.float16, cuda) and not use_packed(8, shape, BF16, torch.device("cpu"))
    assert not use_packed(8, ChainShape(2560, 4096, 9728, 6144 + 64), BF16, cuda)
    room.clusters = 65
    packed_config._fits.cache_clear()
    assert not use_packed(8, shape, BF16, cuda), "its programs wait for one that never runs"
    loading.works, room.clusters = False, 66
    packed_config._fits.cache_clear()
    assert not use_packed(8, shape, BF16, cuda)
    packed_config._fits.cache_clear()


@pytest.mark.parametrize(("model", "rows"), [("Qwen3-14B", 48), ("Qwen3-4B", 8)])
def test_published_models_compile(compiled, reads_in_time, model, rows):
    shape = SHAPES[model]
    cubin = nvrtc.compile_cubin(packed_kernel(shape, packed_chain_config(rows, shape, 132)).source)
    assert b"packed_chain" in cubin
    reads_in_time(cubin)


# --------------------------------------------------------------------------- what the driver is told


class Tensors:
    """What the four products read and write; some weights lie apart from the others of their line, and some lines apart
    from the others."""

    def __init__(self, rows, shape, device):
        def weight(lines, k):
            made = (torch.randn(lines, k, device=device) / k**0.5).to(BF16)
            for value, every in ((0.0, 4999), (-8.0, 7919), (2.0**-30, 9973)):
                made.view(-1)[every // 2 :: every] = value
            made[lines - 100] *= 2.0**-40
            made[lines // 2 - 3] = 0
            made[10::64] *= 2.0
            return made

        self.heads = torch.randn(rows, shape.width, device=device).to(BF16)
        self.x = torch.randn(rows, shape.hidden, device=device).to(BF16) * 2
        self.weights = [
            weight(shape.hidden, shape.width),
            weight(2 * shape.inner, shape.hidden),
            weight(shape.hidden, shape.inner),
            weight(shape.qkv, shape.hidden),
        ]
        self.bias = None if rows == 8 else torch.randn(shape.qkv, device=device).to(BF16)
        self.packed = pack_all(self.weights, [False, True, False, False], [Order.UNITS] * 4)
        numbers = [its.data[..., -2 * (MOST_EXCEPTIONS + 1)] for its in self.packed]
        assert all(number.unique().numel() > 2 for number in numbers), "exceptions"
        assert all(its.scales.unique().numel() > 3 for its in self.packed), "zero, and several powers of two"
        self.config = packed_chain_config(rows, shape, packed.num_sms(self.x.device))

    def run(self, x, heads=None):
        o, gate_up, down, qkv = self.packed
        heads = self.heads if heads is None else heads
        return packed_chain(heads, o, x, gate_up, EPS, down, qkv, EPS_BEHIND, self.bias)

    def expected(self, x):
        """x and the projection, in float32, rounded where the kernel rounds."""
        heads, o, gate_up, down, qkv = (t.float() for t in (self.heads, *self.weights))
        x = (x.float() + heads @ o.T).to(BF16).float()
        gate, up = (F.rms_norm(x, (x.shape[1],), eps=EPS) @ gate_up.T).chunk(2, dim=1)
        x = (x + (F.silu(gate) * up).to(BF16).float() @ down.T).to(BF16).float()
        bias = None if self.bias is None else self.bias.float()
        return x, F.linear(F.rms_norm(x, (x.shape[1],), eps=EPS_BEHIND), qkv, bias)

    def check_words(self):
        """What stays between launches is as it was."""
        parts = self.config.parts(self.x.device)
        assert not packed._counts(self.x.device).any() and (parts == -1).all()
        return parts


@pytest.mark.parametrize(("rows", "columns", "box"), [(5, 8, 8), (9, 16, 16), (24, 32, 16), (40, 48, 24)])
def test_the_driver_is_told_the_launch(told, rows, columns, box):
    shape = ChainShape(2560, 2048, 2560, 2560)
    tensors = Tensors(rows, shape, "cpu")
    heads = torch.zeros(rows, 3000, dtype=BF16)[:, :2048]
    projection = tensors.run(tensors.x, heads)
    ((config, kernel, values),) = told.seen
    assert kernel == packed_kernel(shape, tensors.config) and projection.shape == (rows, 2560)
    assert tensors.config.rows == columns and dict(kernel.macros)["ROWS"] == columns
    of_weights = [getattr(its, name).data_ptr() for name in ("data", "scales") for its in tensors.packed]
    assert values[:12] == [5] * 3 + of_weights + [tensors.x.data_ptr()]
    hidden = told.maps[2][0]
    assert values[12:14] == [hidden, projection.data_ptr()]
    counts = packed._counts(tensors.x.device)
    assert values[15:19] == [tensors.check_words().data_ptr(), counts.data_ptr(), tensors.bias.data_ptr(), rows]
    assert values[19:] == [pytest.approx(EPS), pytest.approx(EPS_BEHIND)]
    assert told.maps[0] == (heads.data_ptr(), rows, 2048, 3000, box, 64)
    assert told.maps[1] == (tensors.x.data_ptr(), rows, 2560, 2560, box, 64)
    assert told.maps[2] == (hidden, rows, 2560, 2560, box, 64)
    assert (config.gridDimX, config.blockDimX, int(config.hStream)) == (132, 384, 77)
    assert config.attrs[0].value.clusterDim.x == 2 and config.sharedMemBytes == tensors.config.shared_bytes


# --------------------------------------------------------------------------- emulated

# Three clusters. Of o and down a cluster has parts of pairs of blocks, of two of them or one; of gate and up two whole
# blocks and a part, of the last one and a part.
SMALL = ChainShape(512, 384, 896, 1024)


def run_small(tensors, close):
    """x and the projection."""
    x, projection = tensors.expected(tensors.x)
    out = tensors.x.clone()
    outs = out, tensors.run(out)
    for one, expected in zip(outs, (x, projection), strict=True):
        close(one, expected)
    tensors.check_words()
    return outs


@pytest.mark.parametrize("rows", [1, 8, 27, 48])
def test_it_computes_what_the_four_products_do_wherever_it_runs(emulated, close, rows):
    tensors = Tensors(rows, SMALL, "cpu")
    first = run_small(tensors, close)
    emulated.seed = 2
    assert all(torch.equal(one, other) for one, other in zip(first, run_small(tensors, close), strict=True))


MISTAKES = {
    "registers written over while they are multiplied": ("wgmma.wait_group.sync.aligned 1", "wgmma.fence"),
    "an input that is not finished": ("        wait_for(counts + 2, PROGRAMS);\n", ""),
    "scales of other lines": ("(__ldg(at), __ldg(at + 8))", "(__ldg(at), __ldg(at))"),
    "biases of other lines": ("element(__ldg(at + 8))", "element(__ldg(at))"),
    "a program that goes before the other": ("inputs.drain();", ";"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_emulator_notices(emulated, close, mistake):
    emulated.changes = (MISTAKES[mistake],)
    tensors = Tensors(32, SMALL, "cpu")
    with pytest.raises((AssertionError, RuntimeError)):
        for emulated.seed in range(8):
            run_small(tensors, close)


# --------------------------------------------------------------------------- on Hopper


@pytest.mark.gpu
@pytest.mark.parametrize("model", SHAPES)
def test_it_runs_on_this_gpu(gpu, model):
    assert all(use_packed(rows, SHAPES[model], BF16, gpu) for rows in ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", SHAPES)
def test_it_computes_what_the_four_products_do(gpu, close, monkeypatch, model, rows):
    tensors = Tensors(rows, SHAPES[model], gpu)
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
    tensors.check_words()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [7, 16, 30])
def test_nan_come_out_as_nan_and_are_not_taken_for_sums_that_are_missing(gpu, rows):
    tensors = Tensors(rows, SHAPES["Qwen3-8B"], gpu)
    clean, x = tensors.x.clone(), tensors.x.clone()
    expected = tensors.run(clean)
    tensors.heads[3] = torch.tensor(-1, dtype=torch.int16).view(BF16)  # the NaN whose bits are all set
    tensors.heads[rows - 1, 7] = float("nan")
    got = tensors.run(x)
    bad = torch.zeros(rows, dtype=torch.bool, device=gpu)
    bad[3] = bad[rows - 1] = True
    for out, one in ((x, clean), (got, expected)):
        assert out[bad].isnan().all() and torch.equal(out[~bad], one[~bad])
    tensors.check_words()


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["Qwen3-4B", "Qwen3-14B"])
def test_launches_behind_each_other_wait_for_what_the_one_before_wrote(gpu, captured, model):
    """In a graph, each on the stream of the one before, of other numbers of rows, too."""
    shape, numbers = SHAPES[model], (1, 8, 40)
    layers = [Tensors(numbers[-1], shape, gpu) for _ in range(4)]
    starts = {rows: torch.randn(rows, shape.hidden, device=gpu).to(BF16) for rows in numbers}
    xs, outs = {rows: torch.empty_like(x) for rows, x in starts.items()}, {}

    def step():
        for rows, x in xs.items():
            x.copy_(starts[rows])
            for layer in layers:
                heads = outs[rows][:, : shape.width] if layer is not layers[0] else layer.heads[:rows]
                outs[rows] = layer.run(x, heads)

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
