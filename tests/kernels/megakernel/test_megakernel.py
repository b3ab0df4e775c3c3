"""All layers in one kernel: how they are cut, and what the driver is told, without a GPU; on Hopper, the results
against float32, with NaN wherever nothing was stored."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.kernels import hopper, nvrtc
from minivllm.kernels.collectives.peer_words import PeerWords
from minivllm.kernels.linear.fp8_linear import quantize_reference
from minivllm.kernels.linear.packed_weights import PIECE_BYTES, Order, pack_all
from minivllm.kernels.megakernel import megakernel as mega
from minivllm.kernels.megakernel.megakernel import (
    DecoderShape,
    DecodeTokens,
    Layers,
    LayerWeights,
    Routing,
    megakernel,
    megakernel_config,
    megakernel_reference,
    packed_megakernel_rows,
    use_megakernel,
)

BF16, EPS, HEADS_EPS = torch.bfloat16, 1e-6, 1e-2
SHAPES = {  # of published models
    "Qwen3-0.6B": DecoderShape(1024, 3072, 16, 8, 128),
    "Qwen3-1.7B": DecoderShape(2048, 6144, 16, 8, 128),
    "Qwen3-4B": DecoderShape(2560, 9728, 32, 8, 128),
    "Qwen3-8B": DecoderShape(4096, 12288, 32, 8, 128),
    "Qwen3-14B": DecoderShape(5120, 17408, 40, 8, 128),
    "Qwen3-32B": DecoderShape(5120, 25600, 64, 8, 128),
    "Llama-3.2-1B": DecoderShape(2048, 8192, 32, 8, 64),
    "Llama-3.2-3B": DecoderShape(3072, 8192, 24, 8, 128),
    "Llama-3.1-8B": DecoderShape(4096, 14336, 32, 8, 128),
    "Qwen2.5-7B": DecoderShape(3584, 18944, 28, 4, 128, biased=True),
    "Qwen3-30B-A3B": DecoderShape(2048, 768, 32, 4, 128, Routing(128, 8, True)),
}
PARTS = {  # of one rank of several
    "Qwen3-0.6B, 2": DecoderShape(1024, 1536, 8, 4, 128, ranks=2),
    "Qwen3-4B, 2": DecoderShape(2560, 4864, 16, 4, 128, ranks=2),
    "Llama-3.1-8B, 2": DecoderShape(4096, 7168, 16, 4, 128, ranks=2),
    "Qwen3-14B, 2": DecoderShape(5120, 8704, 20, 4, 128, ranks=2),
    "Qwen3-14B, 4": DecoderShape(5120, 4352, 10, 2, 128, ranks=4),
    "Qwen3-32B, 4": DecoderShape(5120, 6400, 16, 2, 128, ranks=4),
    "Llama-3.1-70B, 8": DecoderShape(8192, 3584, 8, 1, 128, ranks=8),
}
ROWS = dict.fromkeys(SHAPES, (1, 2, 4, 8)) | dict.fromkeys(["Qwen3-4B", "Qwen3-8B", "Llama-3.1-8B"], (1, 2, 4))
ROWS |= dict.fromkeys(["Qwen3-14B", "Qwen3-32B", "Qwen2.5-7B"], (1, 2)) | {"Qwen3-30B-A3B": (1, 2, 4)}


# --------------------------------------------------------------------------- how they are cut


def check(shape, rows, sms, packed=None):
    config = megakernel_config(shape, rows, sms, packed)
    width = 1 if shape.float8 else 2
    if config is None:
        return False
    assert rows <= config.rows <= 8
    assert shape.num_kv_heads * config.splits <= config.programs <= sms, "each split is a program's, all run at once"
    assert 8 <= config.splits <= 16
    for lines in (shape.hidden, shape.inner, shape.qkv):
        assert lines % (2 * config.programs) == 0, "as many lines each, and pairs of them"
    assert config.rows * shape.hidden // config.programs <= 256, "a thread each"
    assert shape.width >= 4 * 256 // config.rows, "no thread that takes a row takes nothing"
    for k, chunk in zip((shape.hidden, shape.width, shape.inner // config.pieces), config.chunks, strict=True):
        assert k % (chunk // 8) == 0 and width * chunk % 512 == 0 and (not packed or chunk == 1024)
        assert k % chunk == 0 or not shape.routing, "only the last stage has fewer"
    assert 1 <= config.pieces <= (1 if shape.float8 else 4)
    assert config.under_way >= 2 * 8 * width * max(config.chunks), "two stages under way"
    assert config.stages >= 4 and config.shared_bytes <= hopper.SHARED_BYTES - 1024
    assert config.stage_bytes % 1024 == config.memory_bytes % 1024 == 0, "what TMA swizzles"
    line_bytes = PIECE_BYTES if packed else width * max(config.chunks) + 64
    assert config.stage_bytes >= max(8 * line_bytes, (32 if shape.float8_cache else 64) * shape.head_dim)
    assert not packed or all(lines // config.programs % 4 == 0 for lines in (shape.hidden, shape.inner, shape.qkv))
    assert shape.num_heads // shape.num_kv_heads <= 8
    return True


@given(
    st.builds(
        DecoderShape,
        st.integers(1, 40).map(lambda i: 256 * i),
        st.integers(1, 120).map(lambda i: 256 * i),
        st.integers(1, 64),
        st.sampled_from([1, 2, 4, 8, 16]),
        st.sampled_from([64, 96, 128]),
        float8=st.booleans(),
        float8_cache=st.booleans(),
    ),
    st.integers(1, 9),
    st.sampled_from([2, 39, 114, 132]),
    st.sampled_from([None, *Order]),
)
def test_what_is_cut_fits_the_chip(shape, rows, sms, packed):
    check(shape, rows, sms, packed)


_PACKED = {
    "Qwen3-0.6B": (0, 0),
    "Qwen3-1.7B": (0, 8),
    "Llama-3.2-1B": (0, 8),
    "Qwen3-4B": (2, 8),
    "Llama-3.2-3B": (2, 8),
}
_PACKED |= {"Qwen3-14B": (2, 2), "Qwen3-32B": (2, 2), "Qwen3-30B-A3B": (0, 0)}  # rows in units, and in lines


@pytest.mark.parametrize("model", SHAPES)
def test_published_models_are_cut_for_packed_weights(model):
    for order, most in zip(Order, _PACKED.get(model, (4, 8)), strict=True):
        rows = packed_megakernel_rows(SHAPES[model], order)
        assert len(rows) == most and all(check(SHAPES[model], some, 132, order) for some in rows[: max(ROWS[model])])
    assert not megakernel_config(SHAPES["Qwen3-30B-A3B"], packed=Order.LINES), "experts are not packed"


@pytest.mark.parametrize("model", SHAPES)
def test_published_models_are_cut(model):
    for rows in ROWS[model]:
        assert check(SHAPES[model], rows, 132) and megakernel_config(SHAPES[model], rows).programs == 128
        assert rows == 8 or megakernel_config(SHAPES[model], rows).pieces == 1, "what is taken whole is not waited for"
    assert megakernel_config(SHAPES[model], 9) is None


@pytest.mark.parametrize("model", SHAPES | PARTS)
def test_published_models_are_cut_for_weights_in_float8(model):
    shape = replace((SHAPES | PARTS)[model], float8=True)
    most = 0 if shape.routing else 1 if model == "Qwen3-32B" else 2
    assert [check(shape, rows, 132) for rows in (1, 2, 3)] == [rows <= most for rows in (1, 2, 3)]
    assert not packed_megakernel_rows(shape, Order.LINES)


@pytest.mark.parametrize("model", PARTS)
def test_published_models_are_cut_for_several_ranks(model):
    for rows in (1, 2) if model.startswith(("Llama-3.1-70B", "Qwen3-32B")) else (1, 2, 4):
        assert check(PARTS[model], rows, 132) and megakernel_config(PARTS[model], rows).programs == 128


@pytest.mark.parametrize(
    "shape",
    [
        DecoderShape(1024, 3072, 16, 5, 128),  # heads that do not divide
        DecoderShape(1024, 3072, 72, 8, 128),  # nine query heads of a key head
        DecoderShape(1024, 3072, 16, 8, 96),
        DecoderShape(1024, 3072 + 64, 16, 8, 128),
        DecoderShape(1024, 3072, 64, 32, 128),  # more splits than programs
        DecoderShape(512, 1536, 4, 2, 64),  # an input of fewer words than threads that take it
    ],
    ids=str,
)
def test_others_are_not(shape):
    assert megakernel_config(shape) is None


def test_where_it_is_taken(monkeypatch):
    monkeypatch.setattr(nvrtc, "available", lambda device: device.type == "cuda")
    monkeypatch.setattr(mega, "num_sms", lambda device: 132)
    answer = SimpleNamespace(loads=True, programs=132)
    monkeypatch.setattr(mega, "loads", lambda kernel, device: answer.loads)
    monkeypatch.setattr(mega, "load", lambda kernel, device: kernel)
    monkeypatch.setattr(nvrtc, "programs_at_once", lambda function, shape, multiprocessors: answer.programs)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    shape, cuda = SHAPES["Qwen3-0.6B"], torch.device("cuda")
    mega._fits.cache_clear()
    assert all(use_megakernel(shape, rows, BF16, cuda) for rows in range(1, 9))
    assert not use_megakernel(shape, 9, BF16, cuda)
    assert not use_megakernel(shape, 1, torch.float16, cuda)
    assert not use_megakernel(shape, 1, BF16, torch.device("cpu"))
    assert not use_megakernel(DecoderShape(1024, 3072, 16, 8, 96), 1, BF16, cuda)
    answer.programs = 127
    mega._fits.cache_clear()
    assert not use_megakernel(shape, 1, BF16, cuda), "its programs wait for one that never runs"
    answer.loads, answer.programs = False, 132
    mega._fits.cache_clear()
    assert not use_megakernel(shape, 1, BF16, cuda)
    mega._fits.cache_clear()


@pytest.mark.parametrize("model", SHAPES)
def test_published_models_compile(compiled, reads_in_time, model):
    shape, rows_of = SHAPES[model], ROWS[model]
    for rows in rows_of[:: len(rows_of) - 1] if model == "Qwen3-0.6B" else rows_of[-1:]:
        cubin = nvrtc.compile_cubin(mega.megakernel_of(shape, megakernel_config(shape, rows)).source)
        assert b"megakernel" in cubin
        reads_in_time(cubin)


@pytest.mark.parametrize(("model", "rows", "order"), [("Qwen3-8B", 4, Order.UNITS), ("Qwen3-14B, 2", 1, Order.LINES)])
def test_packed_weights_compile(compiled, reads_in_time, model, rows, order):
    shape = (SHAPES | PARTS)[model]
    reads_in_time(nvrtc.compile_cubin(mega.megakernel_of(shape, megakernel_config(shape, rows, packed=order)).source))


@pytest.mark.parametrize(("model", "rows"), [("Qwen3-14B", 2), ("Qwen2.5-7B", 1)])
def test_weights_in_float8_compile(compiled, reads_in_time, model, rows):
    shape = replace(SHAPES[model], float8=True)
    reads_in_time(nvrtc.compile_cubin(mega.megakernel_of(shape, megakernel_config(shape, rows)).source))


@pytest.mark.parametrize("model", ["Qwen3-4B, 2", "Qwen3-14B, 4"])
def test_parts_of_published_models_compile(compiled, reads_in_time, model):
    reads_in_time(nvrtc.compile_cubin(mega.megakernel_of(PARTS[model], megakernel_config(PARTS[model], 1)).source))


# --------------------------------------------------------------------------- one step


class Step:
    """Layers, their cache, and a token at the end of each of ``lengths``; pages drawn from all over the cache, and NaN
    where no key was stored."""

    def __init__(self, shape, layers, lengths, device, normed=True, biased=False):
        self.shape, self.peers = replace(shape, biased=biased), None
        routing = shape.routing
        each = (routing.experts,) if routing else ()

        def weight(*size):
            return (torch.randn(*size, device=device) / size[-1] ** 0.5).to(BF16)

        def norm(size):
            return (1 + 0.2 * torch.randn(size, device=device)).to(BF16)

        pages = [-(-length // 16) for length in lengths]
        self.cache = torch.full(
            (layers, 2, sum(pages) + 1, 16, shape.num_kv_heads, shape.head_dim),
            float("nan"),
            dtype=BF16,
            device=device,
        )
        self.tables = torch.zeros(len(lengths), max(pages) + 3, dtype=torch.int32, device=device)
        drawn = (1 + torch.randperm(sum(pages), device=device)).int().split(pages)
        within, stored = torch.arange(16, device=device), []
        self.slots = torch.zeros(len(lengths), dtype=torch.int64, device=device)
        for i, (its, length) in enumerate(zip(drawn, lengths, strict=True)):
            self.tables[i, : len(its)] = its
            places = (its.long()[:, None] * 16 + within).flatten()[:length]
            self.slots[i] = places[-1]
            stored.append(places[:-1])
        old = torch.cat(stored)
        self.flat[:, :, old] = torch.randn(layers, 2, len(old), *self.cache.shape[4:], device=device).to(BF16)
        self.layers = [
            LayerWeights(
                weight(shape.qkv, shape.hidden),
                weight(shape.hidden, shape.width),
                weight(*each, 2 * shape.inner, shape.hidden),
                weight(*each, shape.hidden, shape.inner),
                norm(shape.head_dim) if normed else None,
                norm(shape.head_dim) if normed else None,
                *self.cache[i],
                weight(routing.experts, shape.hidden) if routing else None,
                norm(shape.hidden) if routing else None,
                qkv_bias=torch.randn(shape.qkv, device=device).to(BF16) if biased else None,
            )
            for i in range(layers)
        ]
        self.x = torch.randn(len(lengths), shape.hidden, device=device).to(BF16)
        self.cos_sin = torch.randn(max(lengths) + 1, shape.head_dim, device=device)
        self.positions = torch.tensor([length - 1 for length in lengths], device=device)
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=device)

    @property
    def flat(self):
        return self.cache.flatten(2, 3)

    def run(self, x=None, kernel=megakernel):
        layers = Layers(self.shape, self.layers, self.cos_sin, 0.1, EPS, HEADS_EPS, self.peers)
        tokens = DecodeTokens(self.positions, self.slots, self.lens, self.tables)
        return kernel(self.x if x is None else x, layers, tokens)

    def packed(self, order=Order.LINES):
        """The same step from packed weights."""
        own, gated = copy.copy(self), [False, False, True, False]
        own.layers = [
            replace(its, packed=tuple(pack_all([its.qkv, its.o, its.gate_up, its.down], gated, [order] * 4)))
            for its in self.layers
        ]
        return own

    def in_float8(self):
        """The same step with weights in float8, of lines of all sizes, and norms that are not folded in."""
        own = copy.copy(self)
        own.shape, own.layers = replace(self.shape, float8=True), []
        for its in self.layers:
            weights = [its.qkv, its.o, its.gate_up, its.down]
            weights = [w.float() * torch.exp2(torch.randint(-3, 2, (len(w), 1), device=w.device)) for w in weights]
            values, scales, _ = zip(*map(quantize_reference, weights), strict=True)
            input_norm, norm = (0.5 + torch.rand(2, self.shape.hidden, device=self.x.device)).to(BF16)
            own.layers.append(
                LayerWeights(
                    *values, its.q_norm, its.k_norm, its.keys, its.values, None, norm, None, its.qkv_bias, input_norm,
                    scales,
                )
            )  # fmt: skip
        return own

    def with_float8_cache(self):
        """The same step with keys and values in float8."""
        own = copy.copy(self)
        own.shape, own.cache = replace(self.shape, float8_cache=True), self.cache.to(torch.float8_e4m3fn)
        own.layers = [replace(its, keys=k, values=v) for its, (k, v) in zip(self.layers, own.cache, strict=True)]
        return own

    def take_new(self):
        """Each layer's new keys and values, (layers, 2, rows, kv heads, head_dim), out of the cache."""
        new = self.flat[:, :, self.slots].to(BF16)
        self.flat[:, :, self.slots] = torch.tensor(float("nan"), device=self.x.device).to(self.cache.dtype)
        return new


def distinct_step(*args, **kwargs):
    """One whose tokens choose experts that others are not nearly as good as, by the reference: sums in another order
    choose the same."""
    routed, gaps = mega._routed, []

    def noted(x, layer, routing, rounded):
        best = (x @ layer.router.float().T).topk(routing.top_k + 1).values
        gaps.append((best[:, -2] - best[:, -1]).min().item())
        return routed(x, layer, routing, rounded)

    for _ in range(200):
        step = Step(*args, **kwargs)
        gaps.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mega, "_routed", noted)
            step.run(kernel=megakernel_reference)
        step.take_new()
        if all(gap > 0.012 for gap in gaps):  # more than bfloat16's steps between 1 and 2
            return step
    raise AssertionError("no such step was drawn")


def nearly(out, expected):
    """In float8: a last bit of bfloat16 that differs decides how numbers behind it are rounded to float8. Noise of 2e-3
    in the reference's attention makes 0.009 to 0.066 of what comes out of two layers."""
    error = ((out - expected).float().norm() / expected.float().norm()).item()
    assert error < 0.1, f"relative error {error:.2e}"


@pytest.fixture
def agrees(close, monkeypatch):
    """Runs a step and compares with the reference; returns the stream."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args: empty_like(*args).fill_(float("nan")))

    def check(step):
        before = step.cache.clone()
        x = step.run(kernel=megakernel_reference)
        new = step.take_new()
        got = step.run()
        its_new = step.take_new()
        near = nearly if step.shape.float8 or step.shape.float8_cache else close
        near(got, x)
        near(its_new, new)
        # Of the first layer, whose input has no error yet.
        (nearly if step.shape.float8_cache else close)(its_new[0], new[0])
        torch.testing.assert_close(step.cache.float(), before.float(), rtol=0, atol=0, equal_nan=True)  # only the new
        return got

    return check


@pytest.mark.parametrize(("lengths", "rows"), [([40], 1), ([40, 7, 90], 4)])
def test_the_driver_is_told_the_launch(told, lengths, rows):
    shape = SHAPES["Qwen3-0.6B"]
    step = Step(shape, 3, lengths, "cpu", normed=False)
    y = step.run()
    ((config, kernel, values),) = told.seen
    cut = megakernel_config(shape, rows)
    assert kernel == mega.megakernel_of(shape, cut) and y.shape == (len(lengths), 1024) and cut.rows == rows
    table = mega._table(y.device, tuple(layer.pointers() for layer in step.layers))
    assert table[1].tolist()[:4] == [
        getattr(step.layers[1], name).data_ptr() for name in ("qkv", "o", "gate_up", "down")
    ]
    assert table[1].tolist()[4:] == [0, 0, *(cache.data_ptr() for cache in step.cache[1]), *[0] * 8]
    blocks, width = step.cache.shape[2], step.tables.shape[1]
    assert told.maps == [(cache.data_ptr(), blocks, 16, 1024, 128) for layer in step.cache for cache in layer]
    words, count = mega._words(y.device, 2048 * rows + 4 * (16 * (1024 + 16) + (1024 + 1536 + 1024) * rows), 0)
    tensors = (step.x, y, step.cos_sin, step.positions, step.slots, step.lens, step.tables, words, count)
    assert values[0] == table.data_ptr() and values[2:11] == [tensor.data_ptr() for tensor in tensors]
    assert values[11:16] == [128, width, len(lengths), 3, 0]
    assert values[16:19] == [pytest.approx(EPS), pytest.approx(HEADS_EPS), pytest.approx(0.1 * 1.4426950408889634)]
    assert values[19:] == [None, 0], "no other rank"
    assert (config.gridDimX, config.blockDimX, int(config.hStream)) == (128, 288, 77)
    assert config.sharedMemBytes == cut.shared_bytes and not words.any() and not count.any()


@pytest.mark.parametrize("order", Order)
def test_the_kernel_is_told_where_packed_weights_are(told, order):
    step = Step(DecoderShape(1024, 3072, 16, 8, 128), 1, [40], "cpu", biased=True).packed(order)
    step.run()
    ((_, kernel, values),) = told.seen
    assert kernel == mega.megakernel_of(step.shape, megakernel_config(step.shape, packed=order))
    assert ("BIASED", 1) in kernel.macros
    (layer,) = step.layers
    ((*products, _, _, _, _, _, _, a, b, c, d, bias, _),) = mega._table(step.x.device, (layer.pointers(),)).tolist()
    assert products == [its.data.data_ptr() for its in layer.packed]
    assert [a, b, c, d] == [its.scales.data_ptr() for its in layer.packed] and values[0]
    assert bias == layer.qkv_bias.data_ptr()


# --------------------------------------------------------------------------- emulated


SMALL = DecoderShape(512, 1024, 8, 2, 128)  # stages of 512; four query heads of a key head
ROUTED = DecoderShape(512, 512, 8, 2, 128, Routing(32, 3, True))
EMULATED = [
    (SMALL, [1]), (SMALL, [2500]), (SMALL, [300, 17]), (SMALL, [1, 400, 40]),
    (SMALL, [300, 17, 100, 128, 129, 1, 200, 40]), (SMALL, [600, 17, 40]),
    (DecoderShape(1024, 2048, 16, 2, 64), [20, 300, 6]),  # stages of 1,024; eight
    (DecoderShape(512, 1408, 8, 2, 128), [40, 7]),  # k that ends within a stage
    (ROUTED, [30, 2, 200]), (replace(ROUTED, inner=768, routing=Routing(32, 8, False)), [33]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "lengths"), EMULATED, ids=str)
def test_it_computes_what_the_layers_do_wherever_it_runs(emulated, agrees, shape, lengths):
    torch.manual_seed(0)
    step = distinct_step(shape, 2, lengths, "cpu", normed=len(lengths) != 2, biased=len(lengths) > 1)
    got = agrees(step)
    emulated.seed = 2
    assert torch.equal(step.run(), got), "in whatever order, with the words of the launch before"


PACKED = [
    (SMALL, 16, [300, 17]), (DecoderShape(1024, 2048, 16, 2, 64), 16, [20, 300, 6]), (SMALL, 16, [300, 17, 100, 1, 40]),
    (DecoderShape(640, 1152, 9, 3, 128), 32, [7, 300, 19]),  # 20 lines, 36, 60: they begin amid eights; k of nine
    (DecoderShape(2560, 640, 4, 2, 128), 32, [40, 7]),  # more lines of o and down than of gate and up
]  # fmt: skip


def spread(step, device="cpu"):
    """Lines of all sizes, and weights that are far from their line's others."""
    for layer in step.layers:
        for weight in (layer.qkv, layer.o, layer.gate_up, layer.down):
            weight *= torch.exp2(torch.randint(-8, 1, (len(weight), 1), device=device))
            drawn = torch.rand(weight.shape, device=device)
            weight[drawn < 1e-3] *= 2.0**-20
            weight[drawn > 1 - 2e-4] *= 64


@pytest.mark.parametrize(
    ("shape", "programs", "lengths", "order"), [(*its, order) for its in PACKED for order in Order], ids=str
)
@pytest.mark.slow
def test_packed_weights_are_the_same_weights(emulated, agrees, close, monkeypatch, shape, programs, lengths, order):
    monkeypatch.setattr(mega, "num_sms", lambda device: programs)
    torch.manual_seed(0)
    step = Step(shape, 2, lengths, "cpu", biased=len(lengths) > 2)
    spread(step)
    assert megakernel_config(shape, len(lengths), programs, packed=order).programs == programs
    step = step.packed(order)
    got = agrees(step)
    emulated.seed = 2
    assert torch.equal(step.run(), got), "whoever comes first"


FLOAT8 = [
    (SMALL, [1]), (SMALL, [300, 17]), (DecoderShape(1024, 2048, 16, 2, 64), [2500]),
    (DecoderShape(512, 1536, 16, 2, 64), [40, 600]), (DecoderShape(512, 2816, 8, 2, 128), [33]),  # k ends in a stage
]  # fmt: skip


@pytest.mark.parametrize(("shape", "lengths"), FLOAT8, ids=str)
@pytest.mark.slow
def test_weights_in_float8_are_multiplied_with_inputs_in_float8(emulated, agrees, shape, lengths):
    torch.manual_seed(0)
    step = Step(shape, 2, lengths, "cpu", normed=len(lengths) != 2, biased=len(lengths) > 1).in_float8()
    got = agrees(step)
    emulated.seed = 2
    assert torch.equal(step.run(), got), "whoever comes first"


FLOAT8_CACHES = [(SMALL, [1], False), (SMALL, [2500], False), (SMALL, [300, 17, 100], False), (SMALL, [40, 33], True)]


@pytest.mark.parametrize(("shape", "lengths", "weights"), FLOAT8_CACHES, ids=str)
@pytest.mark.slow
def test_a_cache_in_float8_is_read_and_written(emulated, agrees, shape, lengths, weights):
    torch.manual_seed(0)
    step = Step(shape, 2, lengths, "cpu").with_float8_cache()
    step = step.in_float8() if weights else step
    got = agrees(step)
    emulated.seed = 2
    assert torch.equal(step.run(), got), "whoever comes first"


CACHE_MISTAKES = {
    "queries in another order": ("word(q[w / 2], w % 2 * 2), 0,", "word(q[w / 2], w % 2 * 2 + 1), 0,"),
    "the new key left out": ("if (key_of(half) == left - 1)", "if (false)"),
    "the second of two values twice": ("t % 2 ? 0x7362 : 0x5140", "0x7362"),
    "another head's new value": ("u16* to = (u16*)((unsigned char*)kept + at) + lane;", "u16* to = kept + at + lane;"),
}


@pytest.mark.parametrize("mistake", CACHE_MISTAKES)
def test_the_emulator_notices_those_of_a_cache_in_float8(emulated, agrees, mistake):
    torch.manual_seed(0)
    step = Step(SMALL, 2, [40, 300], "cpu").with_float8_cache()
    agrees(step)
    emulated.changes = (CACHE_MISTAKES[mistake],)
    with pytest.raises((AssertionError, RuntimeError)):
        agrees(step)


FLOAT8_MISTAKES = {
    "norm weights read before they are there": ("if (FLOAT8 && SQUARED) wait_for_copies();", ""),
    "the first layer's": ("wait_for_copies(), meet();", "meet();"),
    "norm weights left out": ("if constexpr (NORMED) {", "if constexpr (false) {"),
    "the largest of one warp": ("top = fmaxf(top, memory.largest[row * TEAM_WARPS + w]);", ""),
    "another order of words": ("at & ~3 | (at & 1) << 1 | at >> 1 & 1", "at"),
    "up's scales for gate's": ("up * INNER + line", "line"),
    "the row before's scale": ("memory.x_scales[row] : 1.f", "memory.x_scales[0] : 1.f"),
}


@pytest.mark.parametrize("mistake", FLOAT8_MISTAKES)
def test_the_emulator_notices_those_of_float8(emulated, close, mistake):
    torch.manual_seed(0)
    step = Step(SMALL, 2, [40, 300], "cpu").in_float8()
    step.x[1] *= 5
    x = step.run(kernel=megakernel_reference)
    step.take_new()
    nearly(step.run(), x)
    step.take_new()
    emulated.changes = (FLOAT8_MISTAKES[mistake],)
    with pytest.raises((AssertionError, RuntimeError)):
        nearly(step.run(), x)


PACKED_MISTAKES = {
    "scales of gate's lines for up's": ("up * 8 + line % 8", "line % 8"),
    "scales of the layer before": ("    scales.put(memory);\n", "    if (!l) scales.put(memory);\n"),
    "lines that begin amid an eight": ("LINES % 8 ? blockIdx.x * LINES % 8 : 0", "0"),
    "the k behind": ("i / ALL_EIGHTS * SOME;", "i / ALL_EIGHTS * SOME + 1;"),
    "where k ends": ("mine ? read_tail(piece) : 0", "read_tail(piece)"),
    "exceptions left out": ("if (tail) seen |= put_exceptions(w, piece, tail);", ""),
    "the first exception alone": ("} while (at != end);", "} while (false);"),
}


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("mistake", PACKED_MISTAKES)
def test_the_emulator_notices_those_of_packed_weights(emulated, close, monkeypatch, mistake, order):
    monkeypatch.setattr(mega, "num_sms", lambda device: 32)
    torch.manual_seed(0)
    step = Step(DecoderShape(640, 1152, 9, 3, 128), 2, [40], "cpu")
    spread(step)
    x = step.run(kernel=megakernel_reference)
    step.take_new()
    step = step.packed(order)
    emulated.changes = (PACKED_MISTAKES[mistake],)
    with pytest.raises((AssertionError, RuntimeError)):
        close(step.run(), x)


@pytest.mark.slow
def test_what_is_padding_asks_for_no_experts(emulated):
    """It stands in page 0, behind the others: what comes out for them is the same."""
    torch.manual_seed(0)
    step = Step(ROUTED, 2, [40, 17, 1], "cpu")
    whole = step.run()
    step.tables[2], step.slots[2] = 0, 0
    got = step.run()
    assert torch.equal(got[:2], whole[:2]) and got.isfinite().all() and not torch.equal(got[2], whole[2])


@pytest.fixture
def in_pieces(emulated, monkeypatch):
    """A shape whose down takes its input, of eight rows, in three pieces."""
    monkeypatch.setattr(mega, "_MANY_ROWS_STAGES", 5)
    megakernel_config.cache_clear()
    shape = DecoderShape(512, 3072, 8, 2, 64)
    assert megakernel_config(shape, 8, 16).pieces == 3
    yield shape
    megakernel_config.cache_clear()


@pytest.mark.slow
def test_what_does_not_fit_whole_is_taken_in_pieces(emulated, in_pieces, agrees, close):
    torch.manual_seed(0)
    step = Step(in_pieces, 2, [300, 17, 100, 128, 1], "cpu")
    got = agrees(step)
    emulated.changes = (("all = adds ? all + sum : sum;", "all = sum;"),)
    step.take_new()
    with pytest.raises(AssertionError, match=r"error|element"):
        close(step.run(), got)


MISTAKES = {
    "a wait left out": (
        "  meet();\n  return square;\n}\n\n__device__ constexpr",
        "  return square;\n}\n\n__device__ constexpr",
        "error|element",
    ),
    "queries read otherwise than keys": (
        "read16(query_at + head_at(i));",
        "read16(query_at + threadIdx.x % 4 * 16 + 64 * i);",
        "relative error",
    ),
    "a stage kept": ("    if (lane == 0) here_arrive(bar + (seen & nothing));\n", "", "waits for a barrier"),
    "parts not waited for": ("both(two[i][s], flag)", "true", "error|element"),
    "parts joined before they are there": ("!both(two, flag) || !has(sum, flag)", "false", "error|element"),
    "biases of another program": ("blockIdx.x * QKV_LINES + (threadIdx.x + j", "(threadIdx.x + j", "error"),
    "words of the layer before": ("its_copy + STREAM, flag - 1)", "its_copy + STREAM, flag)", "waits for two words"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_emulator_notices(emulated, close, mistake):
    old, new, error = MISTAKES[mistake]
    torch.manual_seed(0)
    step = Step(SMALL, 2, [600 if "joined" in mistake else 300], "cpu", biased=True)
    x = step.run(kernel=megakernel_reference)
    step.take_new()
    emulated.changes = ((old, new),)
    with pytest.raises((AssertionError, RuntimeError), match=error):
        close(step.run(), x)


# --------------------------------------------------------------------------- several GPUs


def part_of(step, rank, ranks, peers):
    """What one rank has of a step: some heads and their cache, and some of the MLP."""
    own, shape = copy.copy(step), step.shape
    heads, kv_heads, dim, inner = shape.num_heads // ranks, shape.num_kv_heads // ranks, shape.head_dim, shape.inner
    own.shape = replace(shape, num_heads=heads, num_kv_heads=kv_heads, inner=inner // ranks, ranks=ranks)
    own.peers = peers
    own.cache = step.cache.chunk(ranks, dim=4)[rank].contiguous()

    def cut(layer, cache):
        sizes = shape.width, shape.num_kv_heads * dim, shape.num_kv_heads * dim
        heads = [its.split(sizes) for its in (layer.qkv, layer.qkv_bias) if its is not None]
        stacked = (torch.cat([each.chunk(ranks)[rank] for each in some]) for some in (layer.gate_up.chunk(2), *heads))
        along = (weight.chunk(ranks, dim=1)[rank].contiguous() for weight in (layer.o, layer.down))
        (gate_up, qkv, *bias), (o, down) = stacked, along
        own = LayerWeights(qkv, o, gate_up, down, layer.q_norm, layer.k_norm, *cache)
        return replace(own, qkv_bias=bias[0]) if bias else own

    own.layers = [cut(layer, cache) for layer, cache in zip(step.layers, own.cache, strict=True)]
    return own


class Ranks:
    """All ranks' parts of a step, each with words in memory that the others reach, as they are on one device."""

    def __init__(self, step, ranks):
        shape, device = step.shape, step.x.device
        self.memory = torch.zeros(ranks, PeerWords.nbytes(ranks, shape.hidden), dtype=torch.uint8, device=device)
        addresses = [each.data_ptr() for each in self.memory]
        self.whole = step
        self.parts = [part_of(step, rank, ranks, PeerWords(rank, addresses, device)) for rank in range(ranks)]

    def check(self, run, close):
        """All ranks say the same, what the layers say, and leave the keys and values that they leave."""
        expected = self.whole.run(kernel=megakernel_reference)
        new = self.whole.take_new()
        first, *others = run(self.parts)
        close(first, expected)
        assert all(torch.equal(first, other) for other in others)
        close(torch.cat([part.take_new() for part in self.parts], dim=3), new)
        return first


def side_by_side(parts):
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(Step.run, parts))


OF_RANKS = [
    (DecoderShape(512, 1024, 16, 2, 128), 2, [300]),
    (DecoderShape(512, 1024, 12, 2, 128), 2, [129, 1]),  # a width that the threads of a row do not divide
    (DecoderShape(256 * 3, 2048, 32, 4, 64), 4, [40, 7]),
]


@pytest.mark.parametrize(("shape", "ranks", "lengths"), OF_RANKS, ids=str)
@pytest.mark.slow
def test_several_gpus_say_what_one_says(emulated, close, monkeypatch, shape, ranks, lengths):
    torch.manual_seed(0)
    one = len(lengths) == 1
    whole = Ranks(Step(shape, 2, lengths, "cpu", normed=one, biased=not one), ranks)
    emulated.gpus = ranks
    monkeypatch.setattr(mega, "num_sms", lambda device: 8)
    got = whole.check(side_by_side, close)
    emulated.seed = 2
    again = side_by_side(whole.parts)
    assert all(torch.equal(got, other) for other in again), "in whatever order, with the words of the launch before"


@pytest.mark.slow
def test_one_buffer_of_words_would_not_do(emulated, close, monkeypatch):
    torch.manual_seed(0)
    shape, ranks, lengths = OF_RANKS[0]
    whole = Ranks(Step(shape, 2, lengths, "cpu"), ranks)
    monkeypatch.setattr(mega, "num_sms", lambda device: 8)
    emulated.gpus, emulated.changes = ranks, (("BEHIND_MLP = 1", "BEHIND_MLP = 0"),)
    with pytest.raises((AssertionError, RuntimeError), match=r"waits for a word|relative error"):
        whole.check(side_by_side, close)


# --------------------------------------------------------------------------- on Hopper


LENGTHS = [1, 2, 16, 17, 40, 128, 129, 130, 300, 500, 1000, 1024, 1025, 3000, 8192, 8193, 20000]
SEVERAL = [
    [1, 1], [300, 17], [16, 4000], [1, 2, 3], [128, 129, 130, 131], [1, 20000, 1, 40], [700] * 4, [5000, 256, 257, 1],
    [9000, 9000, 9000], [1, 2, 3, 4, 5], [300, 17, 1000, 128, 129, 1, 2000, 40], [3, 3, 12000, 3, 3, 3, 3], [2000] * 8,
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("model", SHAPES)
def test_it_runs_on_this_gpu(gpu, model):
    assert all(use_megakernel(SHAPES[model], rows, BF16, gpu) for rows in ROWS[model])


@pytest.mark.gpu
@pytest.mark.parametrize("model", SHAPES)
def test_it_computes_what_the_layers_do(gpu, agrees, model):
    some = [lengths for lengths in SEVERAL if len(lengths) <= max(ROWS[model])]
    for lengths in [[length] for length in LENGTHS[:: 1 if model in ("Qwen3-0.6B", "Llama-3.2-1B") else 4]] + some:
        kind = {"normed": model.startswith("Qwen3"), "biased": model.startswith("Qwen2")}
        step = distinct_step(SHAPES[model], 2, lengths, gpu, **kind)
        got = agrees(step)
        for _ in range(5):
            assert torch.equal(step.run(), got)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "order"),
    [("Qwen3-14B", Order.LINES)] + [
        (model, Order.UNITS if shape.products.weights >= 100_000_000 else Order.LINES)
        for model, shape in SHAPES.items() if shape.routing is None
    ],
)  # fmt: skip
def test_packed_weights_are_the_same_weights_here(gpu, agrees, model, order):
    shape = SHAPES[model]
    all_lengths = [1], [1000], [40, 300], [1, 700, 33], SEVERAL[-1]
    configs = {len(lengths): megakernel_config(shape, len(lengths), packed=order) for lengths in all_lengths}
    for config in filter(None, configs.values()):  # side by side
        hopper.compile_ahead(mega.megakernel_of(shape, config))
    for lengths in all_lengths:
        if configs[len(lengths)] is None:
            assert len(lengths) > 2
            continue
        kind = {"normed": model.startswith("Qwen3"), "biased": model.startswith("Qwen2")}
        step = Step(shape, 2, lengths, gpu, **kind)
        spread(step, gpu)
        step = step.packed(order)
        got = agrees(step)
        for _ in range(5):
            assert torch.equal(step.run(), got)


@pytest.mark.gpu
@pytest.mark.parametrize("model", [model for model, shape in SHAPES.items() if shape.routing is None])
def test_weights_in_float8_are_multiplied_here(gpu, agrees, model):
    for lengths in [1], [1000], [40, 300], [5000, 17]:
        kind = {"normed": model.startswith("Qwen3"), "biased": model.startswith("Qwen2")}
        step = Step(SHAPES[model], 2, lengths, gpu, **kind).in_float8()
        if megakernel_config(step.shape, len(lengths)) is None:
            assert model == "Qwen3-32B" and len(lengths) == 2
            continue
        got = agrees(step)
        for _ in range(5):
            assert torch.equal(step.run(), got)


@pytest.mark.gpu
@pytest.mark.parametrize("model", [model for model, shape in SHAPES.items() if shape.head_dim == 128])
def test_a_cache_in_float8_is_read_and_written_here(gpu, agrees, model):
    for lengths in [1], [1000], [40, 300], [5000, 17], [700] * 4:
        kind = {"normed": model.startswith("Qwen3"), "biased": model.startswith("Qwen2")}
        if len(lengths) > max(ROWS[model]):
            continue
        step = distinct_step(SHAPES[model], 2, lengths, gpu, **kind).with_float8_cache()
        got = agrees(step)
        for _ in range(5):
            assert torch.equal(step.run(), got)


@pytest.mark.gpu
def test_nan_come_out_as_nan_and_nobody_waits_for_them(gpu):
    step = Step(SHAPES["Qwen3-0.6B"], 2, [700, 40, 300], gpu)
    expected = step.run()
    bad = step.x.clone()
    bad.view(torch.int16)[1, 5] = -1  # the NaN whose bits are all set
    got = step.run(bad)
    assert got[1].isnan().all() and torch.equal(got[::2], expected[::2]), "of that row alone"
    step.take_new()  # of the bad token, too
    assert torch.equal(step.run(), expected)


@pytest.mark.gpu
def test_launches_behind_each_other_wait_for_what_the_one_before_wrote(gpu, captured):
    """In a graph, each on the stream of the one before, of other models' layers in turn."""
    steps = [Step(SHAPES["Qwen3-0.6B"], 3, [400], gpu), Step(SHAPES["Llama-3.2-1B"], 2, [90, 300], gpu, normed=False)]
    steps.append(Step(SHAPES["Llama-3.2-1B"], 3, [30, 100], gpu).packed(Order.UNITS))
    starts, ends = [step.x.clone() for step in steps], {}

    def step_all():
        xs = list(starts)
        for _ in range(3):
            for i, step in enumerate(steps):
                xs[i] = step.run(xs[i])
        ends.update(enumerate(xs))

    step_all()
    torch.cuda.synchronize()
    expected = [ends[i].clone() for i in range(3)]
    graph = captured(step_all)
    for _ in range(30):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(ends[i], expected[i]) for i in range(3)) and ends[0].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "lengths"), [("Qwen3-0.6B", [300, 17]), ("Qwen3-14B", [40]), ("Llama-3.2-1B", [1000])]
)
def test_ranks_say_what_one_says_beside_each_other_on_one_gpu(gpu, close, monkeypatch, model, lengths):
    """Each on half of the multiprocessors; many launches with nothing between, one rank late by turns."""
    half = torch.cuda.get_device_properties(gpu).multi_processor_count // 2
    monkeypatch.setattr(mega, "num_sms", lambda device: half)
    streams = [torch.cuda.Stream(gpu) for _ in range(2)]
    whole = Ranks(Step(SHAPES[model], 2, lengths, gpu, normed=model.startswith("Qwen")), 2)

    def run(parts):
        torch.cuda.synchronize()
        ys = []
        for part, stream in zip(parts, streams, strict=True):
            with torch.cuda.stream(stream):
                ys.append(part.run())
        torch.cuda.synchronize()
        return ys

    expected = whole.check(run, close)
    for turn in range(20):
        ends = []
        for rank in (turn % 2, 1 - turn % 2):
            with torch.cuda.stream(streams[rank]):
                y = whole.whole.x
                for _ in range(5):
                    y = whole.parts[rank].run(y)
                ends += [y, whole.parts[rank].run()]
        torch.cuda.synchronize()
        assert torch.equal(ends[0], ends[2]) and torch.equal(ends[1], expected) and torch.equal(ends[3], expected)
