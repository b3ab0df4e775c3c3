"""Weights of 16 bits kept in 12: they come back bit for bit, from the torch code and from the kernel, which runs on the
CPU here; what cannot be kept exactly, or has too many exceptions, is refused."""

import ctypes
import itertools
import sys
from shutil import which

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.kernels import hopper, nvrtc
from minivllm.kernels.linear import packed_weights as packing
from minivllm.kernels.linear.packed_weights import (
    LINES,
    MOST_EXCEPTIONS,
    PACK_KERNEL,
    PIECE_BYTES,
    PIECE_LINES,
    STEP,
    Order,
    pack,
    pack_again,
    pack_all,
    unpack,
)

BF16 = torch.bfloat16


def random_weight(lines=512, k=384, device="cpu"):
    return (torch.randn(lines, k, device=device) * 0.02).to(BF16)


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def pack_each(weights, gated, order):
    return pack_all(weights, [gated] * len(weights), [order] * len(weights))


def strewn(weight, values, every=97):
    """Some places hold values that lie apart."""
    flat = weight.flatten()
    places = torch.arange(5, len(flat), every * 37)[: len(values) * 8]
    flat[places] = torch.tensor([values[i % len(values)] for i in range(len(places))], dtype=weight.dtype)
    return flat.view_as(weight)


def crowded(number, lines=(274, 279)):
    """So many exceptions of a piece, in two lines and any part of its k; of other pieces' lines as many. No others."""
    weight = random_weight()
    weight[weight.abs() < 1e-4] = 0.01
    for i in range(number):
        weight[lines[i % 2 :: 2], STEP + 17 * i % 128] = 0
    return weight


def by_eight(packed):
    """(eights, k / 128, PIECE_BYTES)."""
    return packed.units.transpose(1, 2).flatten(0, 1)


def exceptions(packed):
    """(eights, k / 128): how many."""
    return by_eight(packed)[..., -2 * (MOST_EXCEPTIONS + 1)].int()


def one(value, scale=1.0):
    weight = random_weight() * scale
    weight[300, 70] = value
    return weight


def with_lines(factor):
    """Some lines, of gate and of up, lie apart from all others."""
    weight = random_weight()
    for line in (0, 9, 100, 263, 264, 511):
        weight[line] *= factor
    return weight


def beyond(*far):
    """A line's exponents begin at 100; some weights lie so far from there."""
    weight = torch.randn(256, 256).sign() * 2.0 ** torch.randint(100 - 127, 116 - 127, (256, 256))
    weight = (weight * (1 + torch.rand(256, 256) * 0.99)).to(BF16)
    weight.view(torch.int16)[:, :16] = 100 << 7 | 3
    for i, its in enumerate(far):
        weight.view(torch.int16)[77 + 64 * (i % 2), 19 + 5 * i] = (100 + its) << 7 | (-32768 if i % 2 else 0) | 77
    assert (packing._bases(weight.view(torch.int16)) == 100).all()
    return weight


APART = [0.0, -0.0, 300.0, -1.5e-12, 7.25e-19]
CASES = {
    "plain": random_weight,
    "exceptions": lambda: strewn(random_weight(), APART),
    "exceptions in one piece": lambda: crowded(MOST_EXCEPTIONS),
    "exceptions in pieces beside each other": lambda: crowded(MOST_EXCEPTIONS, (274, 279, 282, 280, 24, 26, 23, 18)),
    "one exponent": lambda: torch.where(torch.rand(256, 128) < 0.5, 1.5, -1.0).to(BF16),
    "large": lambda: random_weight() * 1e30,
    "small": lambda: random_weight() * 1e-30,
    "lines near zero": lambda: with_lines(2.0**-90),
    "lines of zeros": lambda: with_lines(-0.0),
    "large lines": lambda: with_lines(2.0**90),
    "lines far apart": lambda: (random_weight() * 2.0 ** torch.randint(-80, 80, (512, 1))).to(BF16),
    "beyond": lambda: beyond(-47, -46, -1, 16, 17, 30, 31, -47, 31, -1, 16),
}


# --------------------------------------------------------------------------- in torch


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_weight_comes_back_bit_for_bit(case, gated, order):
    weight = CASES[case]()
    packed = pack(weight, gated, order)
    lines, k = weight.shape
    inside = (k // STEP, 16) if order is Order.UNITS else (16, k // STEP)
    assert packed.data.shape == (lines // LINES, *inside, PIECE_BYTES) and packed.data.is_contiguous()
    assert packed.units.shape == (lines // LINES, k // STEP, 16, PIECE_BYTES) and packed.gated == gated
    assert packed.weight is weight and packed.data.numel() < 0.77 * 2 * weight.numel()
    assert same_bits(unpack(packed), weight) and exceptions(packed).max() <= MOST_EXCEPTIONS


def lines_of_piece(piece, scales):
    """Eight lines by 128 of k out of the bytes of one piece, element by element."""
    words, tail = piece[:1536].view(torch.int32).tolist(), piece[1536:].view(torch.int16).tolist()
    bits = {}  # of an element: (lane, word, pair, element)
    for lane, word in itertools.product(range(32), range(4)):
        planes = [words[plane * 128 + lane * 4 + word] & 0xFFFFFFFF for plane in range(3)]
        for element in range(2):
            first, second, third = halves = [plane >> 16 * element & 0xFFFF for plane in planes]
            for pair, half in enumerate(halves):
                bits[lane, word, pair, element] = half & 0x87FF | packing.FIRST_EXPONENT << 7
            exponent = (first >> 11 & 15) << 7 | packing.FIRST_EXPONENT << 7
            mantissa = (second >> 11 & 15) << 3 | third >> 11 & 7
            bits[lane, word, 3, element] = (third >> 14 & 1) << 15 | exponent | mantissa
    number, *entries = tail
    for entry in entries[:number]:
        shift = entry >> 10 & 63
        exponent = 0 if shift == 63 else packing.FIRST_EXPONENT + (-1 - shift if shift < 47 else shift - 31)
        its = entry & 31, entry >> 7 & 3, entry >> 5 & 3, entry >> 9 & 1
        assert bits[its] >> 7 & 255 == packing.FIRST_EXPONENT
        bits[its] = bits[its] & 0x807F | exponent << 7
    assert not any(entries[number:])
    lines = torch.zeros(PIECE_LINES, STEP, dtype=torch.int32)
    for (lane, word, pair, element), its in bits.items():
        lines[lane // 4, 32 * word + 8 * pair + 2 * (lane % 4) + element] = its
    return (lines.to(torch.int16).view(BF16).float() * scales[:, None]).to(BF16)


@pytest.mark.parametrize("gated", [False, True])
def test_a_piece_is_eight_lines_by_itself(gated):
    """For kernels that read no more: lines beside each other, in a gated weight eight of gate, then eight of up."""
    weight = CASES["exceptions in pieces beside each other"]()
    lines, k = weight.shape
    packed = pack(weight, gated)
    scales = packed.scales.view(-1, PIECE_LINES)
    assert exceptions(packed).max() == MOST_EXCEPTIONS
    most = (exceptions(packed) == MOST_EXCEPTIONS).nonzero().tolist()
    for eight, piece in (*most, (0, 0), (0, 1), (1, 0), (lines // PIECE_LINES - 1, k // STEP - 1)):
        first = eight * PIECE_LINES
        if gated:
            first = eight % 2 * lines // 2 + eight // 2 * PIECE_LINES
        expected = weight[first : first + PIECE_LINES, piece * STEP : (piece + 1) * STEP]
        assert same_bits(lines_of_piece(by_eight(packed)[eight, piece], scales[eight]), expected.contiguous())


@st.composite
def weights(draw):
    lines, k = LINES * draw(st.integers(1, 2)), STEP * draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale, spread = 2.0 ** draw(st.integers(-90, 90)), draw(st.integers(0, 20))
    of_lines = 2.0 ** torch.randint(-spread, spread + 1, (lines, 1), generator=generator)
    weight = (torch.randn(lines, k, generator=generator) * scale * of_lines).to(BF16)
    bits = weight.view(torch.int16).view(-1)
    values = draw(st.lists(st.integers(-(1 << 15), (1 << 15) - 1), max_size=40))
    places = torch.randint(len(bits), (len(values),), generator=generator)
    bits[places] = torch.tensor(values, dtype=torch.int16)
    return weight


@settings(max_examples=40, deadline=None)
@given(weight=weights(), gated=st.booleans())
def test_any_bits_come_back_or_are_refused(weight, gated):
    packed = pack(weight, gated)
    bits = weight.view(torch.int16)
    exponents, bases = bits.int() >> 7 & 0xFF, packing._bases(bits)[:, None]
    outside = (exponents < bases) | (exponents > bases + 15)
    lines, k = weight.shape
    of_pieces = outside.view(lines // PIECE_LINES, PIECE_LINES, k // STEP, STEP).sum((1, 3))
    if packed is not None:
        assert same_bits(unpack(packed), weight)
        assert exceptions(packed).flatten().sort()[0].tolist() == of_pieces.flatten().sort()[0].tolist()
        return
    crowded_out = of_pieces.max() > MOST_EXCEPTIONS
    far = (exponents < bases - 47) | (exponents > bases + 31) | (exponents == 0) | (exponents == 255)
    assert crowded_out or (outside & far & (bits & 0x7FFF != 0)).any() or (bases == 0).any()


REFUSED = {
    "too many exceptions": lambda: crowded(MOST_EXCEPTIONS + 1),
    "NaN": lambda: one(float("nan")),
    "denormals": lambda: torch.full((256, 128), 1e-40, dtype=BF16),
    "infinities": lambda: torch.full((256, 128), float("inf"), dtype=BF16),
    "too far": lambda: one(1e-35, 1e36),
    "too small": lambda: beyond(-48),
    "too large": lambda: beyond(32),
    "an infinity": lambda: one(float("-inf")),
    "an infinity near others": lambda: one(float("inf"), 2.0**118),
    "denormals of large ones": lambda: one(1e-40, 1e4),
    "denormals near others": lambda: one(-1e-40, 2.0**-98),
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused(case, gated):
    assert pack(REFUSED[case](), gated) is None


def test_the_base_of_a_line_is_that_of_most_of_its_weights():
    weight = random_weight(256, 128)
    of_all = packing._bases(weight.view(torch.int16))
    weight[:, ::3] *= 2.0**-60
    assert (packing._bases(weight.view(torch.int16)) - of_all).abs().max() <= 1
    weight[7, ::2] *= 2.0**-60  # two thirds of them
    bases = packing._bases(weight.view(torch.int16))
    assert (bases[7] - of_all[7] + 60).abs() <= 1 and (bases - of_all).abs().sum() < 400
    weight[9], weight[10] = 0, float("inf")
    assert packing._bases(weight.view(torch.int16))[9:11].tolist() == [0, 0]


@pytest.mark.parametrize("order", Order)
def test_it_is_packed_again_where_it_stands(order):
    first, second, third = random_weight(), strewn(random_weight(), APART), random_weight() * 1e30
    second[:256] *= 2.0**-30
    weights = [first.clone(), first.clone()]
    packed = pack_all(weights, [False, True], [order] * 2)
    places = [(its.data.data_ptr(), its.scales.data_ptr()) for its in packed]

    def again(*others):
        for weight, other in zip(weights, others, strict=True):
            weight.copy_(other)
        return pack_again(packed)

    assert again(second, third) == [True, True]
    assert all(same_bits(unpack(its), other) for its, other in zip(packed, (second, third), strict=True))
    assert again(REFUSED["too far"](), first) == [False, True] and same_bits(unpack(packed[1]), first)
    assert [(its.data.data_ptr(), its.scales.data_ptr()) for its in packed] == places


def test_of_several_weights_those_are_none_that_cannot_be_kept():
    given = [random_weight(), REFUSED["too far"](), random_weight(256, 128)]
    first, second, third = pack_all(given, [True, False, False], [*Order, Order.UNITS])
    assert second is None and first.gated and not third.gated
    assert same_bits(unpack(first), given[0]) and same_bits(unpack(third), given[2])


# --------------------------------------------------------------------------- the kernel


def test_it_compiles(compiled):
    assert b"pack_weights" in nvrtc.compile_cubin(PACK_KERNEL.source)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if sys.platform != "linux" or which("g++") is None:
        pytest.skip("no g++, or not on Linux")
    import emulator

    return emulator.build(PACK_KERNEL.source, tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def emulated(monkeypatch, built):
    """The kernel in the place of the torch code, on the CPU; the programs of each launch."""
    launches = []

    def launched(kernel, shape, addresses):
        launches.append(shape.grid[0])
        assert kernel is PACK_KERNEL and shape.shared_bytes == 8192
        wrong = built(1, shape.grid[0], shape.threads, len(launches), (ctypes.c_void_p * len(addresses))(*addresses))
        assert not wrong, wrong.decode()

    monkeypatch.setattr(nvrtc, "available", lambda device: True)
    monkeypatch.setattr(nvrtc, "launch", launched)
    monkeypatch.setattr(packing, "load", lambda kernel, device: kernel)
    monkeypatch.setattr(packing, "loads", lambda kernel, device: True)
    return launches


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("gated", [False, True])
def test_the_kernel_writes_the_same_bytes(emulated, gated, order):
    weights = [make() for make in CASES.values()]
    for packed, weight in zip(pack_each(weights, gated, order), weights, strict=True):
        expected = pack(weight, gated, order)
        assert torch.equal(packed.data, expected.data) and torch.equal(packed.scales, expected.scales)
        assert packed.gated == gated
    assert emulated == [len(weight) // LINES for weight in weights]


def test_the_kernel_refuses_the_same(emulated):
    weights = [random_weight(), *(make() for make in REFUSED.values()), random_weight()]
    gated, orders = ([its[i % 2] for i in range(len(weights))] for its in ([False, True], [*Order]))
    first, *others, last = pack_all(weights, gated, orders)
    assert first is not None and last is not None and others == [None] * len(REFUSED)
    assert same_bits(unpack(first), weights[0]) and same_bits(unpack(last), weights[-1])
    weights[0].copy_(weights[-1]), weights[-1].copy_(REFUSED["too far"]())
    assert pack_again([first, last]) == [True, False] and same_bits(unpack(first), weights[0])


@pytest.mark.gpu
@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("gated", [False, True])
def test_on_a_gpu_it_writes_the_same_bytes(gpu, gated, order):
    assert hopper.loads(PACK_KERNEL, gpu)
    weights = [make().to(gpu) for make in CASES.values()] + [
        random_weight(5120, 2048, gpu),
        random_weight(7168, 5120, gpu),
    ]
    for packed, weight in zip(pack_each(weights, gated, order), weights, strict=True):
        expected = pack(weight, gated, order)
        assert torch.equal(packed.data, expected.data) and torch.equal(packed.scales, expected.scales)
        assert same_bits(unpack(packed), weight)
    assert pack_each([make().to(gpu) for make in REFUSED.values()], gated, order) == [None] * len(REFUSED)
