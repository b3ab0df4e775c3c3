"""Weights of 16 bits kept in 12, exactly: a decode step of few rows waits for its weights, of which it then reads 24%
less.

Of a bfloat16 the sign and the seven bits of the mantissa are as good as random, but a matrix's exponents are few:
sixteen neighbours hold all but some 0.01% of a trained or a random one's. So a weight is its sign, its mantissa and
four bits of exponent, counted from the matrix's ``base``; the few others are kept beside, whole, with their places.
Where they are many, as in a line that training has left near zero, the weight itself is read. What a kernel makes of
the bits is the weight times a power of two, by which it divides the sums: nothing is rounded, nothing is lost.

Weights lie in units of 128 lines by 128 of k, one behind another along k, as ``packed_chain.cu`` reads them: four tiles
of 64 by 64, of each of which a thread of a warpgroup finds what wgmma takes from its registers, 32 weights, in 48
bytes. Of three words each has a pair of weights where it belongs, in 24 bits of 32; the other bits of all three are a
fourth pair. Behind the tiles stand the unit's exceptions, or that it is raw: to be read from the weight.

The kernel that packs is CUDA C++ (``pack_weights.cu``). Bytes moved: a weight's, once, and three quarters as many back.

Idea: DFloat11 (Zhang et al., 2025), whose exponents are Huffman-coded, which takes 11 bits and a kernel of its own to
decode; fixed lengths decode where they are multiplied, 1.4 instructions a weight.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import cdiv
from minivllm.kernels.hopper import Kernel, load, loads

LINES, STEP = 128, 128  # of a unit: lines of the weight, elements of k
_TILES, _TILE_BYTES = 4, 6144  # of 64 lines by 64 of k
_TAIL_BYTES = 256  # ends of the warps' lists of exceptions, one byte each, then exceptions of four bytes
MOST_EXCEPTIONS = _TAIL_BYTES // 4 - 2
_RAW_SHARE = 64  # of a weight's units one may be raw: reading it takes two trips to memory (2 µs, computed)
UNIT_BYTES = _TILES * _TILE_BYTES + _TAIL_BYTES
_RAW_ENDS = 0xFEFFFEFF  # of the lists of a raw unit's warps, of which none then looks empty
_WINDOW = 16  # exponents
FIRST_EXPONENT = 0x70  # that a kernel gives the first of them
_AT_ONCE = 1 << 25  # weights, whose bits are taken apart at the same time
_SAMPLE = 1 << 20  # weights, whose exponents are counted
_THREADS = 256
PACK_KERNEL = Kernel(
    "pack_weights",
    (),
    (
        ("UNIT_BYTES", UNIT_BYTES),
        ("MOST_EXCEPTIONS", MOST_EXCEPTIONS),
        ("RAW_ENDS", _RAW_ENDS),
        ("WINDOW", _WINDOW),
        ("FIRST_EXPONENT", FIRST_EXPONENT),
    ),
)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Of ``weight`` (lines, k). data (units, UNIT_BYTES) uint8, a unit's index (lines / 128) * (k / 128) + k / 128; a
    weight is what its bits say times ``scale``, () float32, a power of two. ``gated``: units have 64 lines of the first
    half (gate) and the same of the second (up), by eights."""

    weight: torch.Tensor
    data: torch.Tensor
    scale: torch.Tensor
    gated: bool


def packable(lines: int, k: int) -> bool:
    return lines % LINES == 0 and k % STEP == 0


def packed_bytes(lines: int, k: int) -> int:
    return lines // LINES * (k // STEP) * UNIT_BYTES


def pack(weight: torch.Tensor, gated: bool = False) -> PackedWeight | None:
    """Of weight (lines, k) bfloat16, contiguous. None: too many units would be raw, whose exponents lie apart in more
    than ``MOST_EXCEPTIONS`` places, or one lies so far apart that no power of two leaves it as exact."""
    return _packed([weight], [gated], _write)[0]


def pack_all(weights: Sequence[torch.Tensor], gated: Sequence[bool]) -> list[PackedWeight | None]:
    """``pack`` of each, all on one device; on Hopper by a kernel, whose answers the host waits for once."""
    return _packed(weights, gated, _writer(weights[0].device))


def pack_again(packed: Sequence[PackedWeight]) -> list[bool]:
    """What their weights are by now, written to where they are, as graphs know it, with as many raw units as it takes.
    Of each, whether it could be; what could not is nothing sensible."""
    return [not lost for _, lost in _fill(packed, _writer(packed[0].data.device))]


# what is packed, whose data is written; its base () int64; told (2,) int32: to the first is added how many units are
# raw, the second becomes 1 if something is lost
_Writer = Callable[[PackedWeight, torch.Tensor, torch.Tensor], None]


def _packed(weights: Sequence[torch.Tensor], gated: Sequence[bool], write: _Writer) -> list[PackedWeight | None]:
    packed = []
    for weight, its in zip(weights, gated, strict=True):
        assert weight.dtype == torch.bfloat16 and weight.is_contiguous() and packable(*weight.shape)
        data = weight.new_empty((packed_bytes(*weight.shape) // UNIT_BYTES, UNIT_BYTES), dtype=torch.uint8)
        packed.append(PackedWeight(weight, data, weight.new_empty((), dtype=torch.float32), its))
    found = zip(packed, _fill(packed, write), strict=True)
    return [None if lost or raw > cdiv(len(its.data), _RAW_SHARE) else its for its, (raw, lost) in found]


def _fill(packed: Sequence[PackedWeight], write: _Writer) -> list[tuple[int, int]]:
    """Raw units, and whether something is lost, of each."""
    bases = torch.stack([_base(its.weight) for its in packed])
    scales = (bases - FIRST_EXPONENT + 127 << 23).int().view(torch.float32)  # powers of two
    told = torch.zeros((len(packed), 2), dtype=torch.int32, device=bases.device)
    for its, base, scale, its_own in zip(packed, bases, scales, told, strict=True):
        its.scale.copy_(scale)
        write(its, base, its_own)
    return [(raw, lost) for raw, lost in told.tolist()]


def _base(weight: torch.Tensor) -> torch.Tensor:
    """() int64: the first of the sixteen exponents that most of a sample's weights have. Zeros, denormals, infinities
    and NaN have none."""
    bits = weight.view(torch.int16).flatten()
    sample = bits[:: cdiv(len(bits), _SAMPLE) | 1]  # odd, so that all columns are in it
    counts = torch.histc(((sample.int() >> 7) & 0xFF).float(), 256, 0, 256)  # bincount waits for a GPU
    sums = counts.cumsum(0)
    return 1 + (sums[_WINDOW:-1] - sums[: -_WINDOW - 1]).argmax()


# --------------------------------------------------------------------------- the kernel


def _writer(device: torch.device) -> _Writer:
    return _launch if nvrtc.available(device) and loads(PACK_KERNEL, device) else _write


@cache
def _launch_shape(units: int) -> nvrtc.LaunchShape:
    return nvrtc.LaunchShape((units, 1, 1), (1, 1, 1), _THREADS, 0, False)


def _launch(packed: PackedWeight, base: torch.Tensor, told: torch.Tensor) -> None:
    weight, data = packed.weight, packed.data
    pointers = (ctypes.c_void_p * 4)(*(tensor.data_ptr() for tensor in (weight, data, base, told)))
    numbers = (ctypes.c_int * 3)(*weight.shape, packed.gated)
    addresses = [
        *(ctypes.addressof(pointers) + 8 * i for i in range(len(pointers))),
        *(ctypes.addressof(numbers) + 4 * i for i in range(len(numbers))),
    ]
    nvrtc.launch(load(PACK_KERNEL, weight.device), _launch_shape(len(data)), addresses)


# --------------------------------------------------------------------------- its reference


def _write(packed: PackedWeight, base: torch.Tensor, told: torch.Tensor) -> None:
    lines, k = packed.weight.shape
    blocks = lines // LINES
    by_block, units = _by_block(packed.weight, packed.gated), packed.data.view(blocks, k // STEP, UNIT_BYTES)
    some = max(1, _AT_ONCE // (LINES * k))
    for first in range(0, blocks, some):
        _pack_blocks(by_block[first : first + some], base, units[first : first + some], told)


def _by_block(weight: torch.Tensor, gated: bool) -> torch.Tensor:
    """(blocks, 8 warps, 2 eights of lines, 8, k)."""
    lines, k = weight.shape
    bits = weight.view(torch.int16)
    if not gated:
        return bits.view(lines // LINES, 8, 2, 8, k)
    return bits.view(2, lines // LINES, 8, 8, k).permute(1, 2, 0, 3, 4)


def _pack_blocks(bits: torch.Tensor, base: torch.Tensor, data: torch.Tensor, told: torch.Tensor) -> None:
    """bits (blocks, 8, 2, 8, k) -> data (blocks, k / 128, UNIT_BYTES)."""
    blocks, k = bits.shape[0], bits.shape[-1]
    steps = k // STEP
    # A unit's lines are (warpgroup 2, warp 4, half 2, eighth 8), its k is (tile 2, 16th 4, half 2, quarter 4, pair 2);
    # see wgmma's A.
    bits = bits.reshape(blocks, 2, 4, 2, 8, steps, 2, 4, 2, 4, 2).int() & 0xFFFF
    # -> (blocks, steps, warpgroup, tile, warp, eighth, quarter, 16th, half of k, half of lines, pair)
    bits = bits.permute(0, 5, 1, 6, 2, 4, 9, 7, 8, 3, 10)
    exponents = ((bits >> 7) & 0xFF) - base
    inside = (exponents >= 0) & (exponents < _WINDOW)
    codes = torch.where(inside, (bits & 0x807F) | exponents << 7, 0)
    pairs = codes[..., 0] | codes[..., 1] << 16
    pairs = pairs.reshape(blocks, steps, 2, 2, 4, 32, 4, 4)  # (…, warp, lane, 16th, register)
    fourth = pairs[..., 3]
    exponent, sign = (fourth << 4) & 0x78007800, (fourth >> 1) & 0x40004000
    upper, lower = (fourth << 8) & 0x78007800, (fourth << 11) & 0x38003800
    words = torch.stack((pairs[..., 0] | exponent, pairs[..., 1] | upper, pairs[..., 2] | lower | sign), dim=-1)
    tiles = words.permute(0, 1, 2, 3, 7, 4, 5, 6).contiguous()  # (blocks, steps, wg, tile, word, warp, lane, 16th)
    data[..., : _TILES * _TILE_BYTES] = tiles.view(blocks, steps, -1).view(torch.uint8)
    _put_exceptions(bits, inside, base, data[..., _TILES * _TILE_BYTES :], told)


def _put_exceptions(
    bits: torch.Tensor, inside: torch.Tensor, base: torch.Tensor, tails: torch.Tensor, told: torch.Tensor
) -> None:
    """Of a warp of a unit those of one list, as value << 16 | half << 10 | tile << 9 | 16th << 7 | register << 5 |
    lane, in the order of tiles, lanes and the rest."""
    blocks, steps = bits.shape[:2]
    # (blocks, steps, warpgroup, tile, warp, eighth, quarter, 16th, half of k, half of lines, pair), by warps
    block, step, group, tile, warp, eighth, quarter, sixteenth, back, lower, pair = (~inside).nonzero(as_tuple=True)
    value = bits[block, step, group, tile, warp, eighth, quarter, sixteenth, back, lower, pair]
    exponent = (value >> 7) & 0xFF
    moved = exponent - base + FIRST_EXPONENT  # as the others are
    zero, denormal = (value & 0x7FFF) == 0, (exponent == 0) & ((value & 0x7F) != 0)
    odd = denormal | (exponent == 0xFF)  # the last are infinite, or no numbers
    lost = torch.where(odd, denormal & (base > FIRST_EXPONENT), ~zero & ((moved < 1) | (moved > 0xFE)))
    value = torch.where(zero, value, (value & 0x807F) | moved << 7)
    entry = value << 16 | pair << 10 | tile << 9 | sixteenth << 7 | back << 6 | lower << 5 | eighth << 2 | quarter
    unit, its_warp = block * steps + step, group * 4 + warp
    order = (unit * 8 + its_warp).argsort(stable=True)
    unit, its_warp, entry = unit[order], its_warp[order], entry[order]
    counts = torch.zeros(blocks * steps, 8, dtype=torch.int64, device=bits.device)
    counts.view(-1).scatter_add_(0, unit * 8 + its_warp, torch.ones_like(unit))
    ends = counts.cumsum(1)
    firsts = ends[:, -1].cumsum(0) - ends[:, -1]
    place = torch.arange(len(unit), device=bits.device) - firsts[unit]
    raw = ends[:, -1] > MOST_EXCEPTIONS
    raw[(block * steps + step)[odd]] = True
    tail = torch.zeros(blocks * steps, _TAIL_BYTES // 4, dtype=torch.int32, device=bits.device)
    fits = place < MOST_EXCEPTIONS
    tail[unit[fits], place[fits] + 2] = entry[fits].int()
    tail.view(torch.uint8)[:, :8] = ends.clamp(max=MOST_EXCEPTIONS).to(torch.uint8)
    tail[raw] = 0
    tail[raw, :2] = _RAW_ENDS - (1 << 32)
    tails.copy_(tail.view(torch.uint8).view(blocks, steps, _TAIL_BYTES))
    told[0] += raw.sum()
    told[1] |= lost.any()


def unpack(packed: PackedWeight) -> torch.Tensor:
    """The weight (lines, k) again, by the arithmetic of the kernels that read it."""
    lines, k = packed.weight.shape
    blocks, steps = lines // LINES, k // STEP
    data = packed.data.view(blocks, steps, UNIT_BYTES)
    tiles = data[..., : _TILES * _TILE_BYTES].contiguous().view(torch.int32)
    words = tiles.view(blocks, steps, 2, 2, 3, 4, 32, 4).permute(4, 0, 1, 2, 3, 5, 6, 7)
    first = FIRST_EXPONENT << 7 | FIRST_EXPONENT << 23
    in_place = [(word & -0x78007801) | first for word in words]  # 0x87FF87FF
    fourth = ((words[0] >> 4) & 0x07800780) | first | ((words[1] >> 8) & 0x00780078)
    fourth = fourth | ((words[2] >> 11) & 0x00070007) | ((words[2] << 1) & -0x7FFF8000)  # 0x80008000
    pairs = torch.stack((*in_place, fourth), dim=-1)  # (blocks, steps, wg, tile, warp, lane, 16th, register)
    halves = torch.stack((pairs & 0xFFFF, (pairs >> 16) & 0xFFFF), dim=-1)
    tails = data[..., _TILES * _TILE_BYTES :].contiguous()
    entries = tails.view(torch.int32)
    raw = tails[..., 7] > MOST_EXCEPTIONS
    for block, step in ((tails[..., 7] > 0) & ~raw).nonzero().tolist():
        begin = 0
        for warp, end in enumerate(tails[block, step, :8].tolist()):
            for entry in entries[block, step, 2 + begin : 2 + end].tolist():
                at = warp // 4, entry >> 9 & 1, warp % 4, entry & 31, entry >> 7 & 3, entry >> 5 & 3, entry >> 10 & 1
                halves[block, step][at] = entry >> 16 & 0xFFFF
            begin = end
    bits = halves.view(blocks, steps, 2, 2, 4, 8, 4, 4, 2, 2, 2).permute(0, 2, 4, 9, 5, 1, 3, 7, 8, 6, 10)
    bits = bits.reshape(blocks, 8, 2, 8, k)
    if packed.gated:
        bits = bits.permute(2, 0, 1, 3, 4)
    values = bits.reshape(lines, k).to(torch.int16).view(torch.bfloat16)
    weight = (values.float() * packed.scale).to(torch.bfloat16)
    to, of = (_by_block(t, packed.gated).unflatten(-1, (steps, STEP)) for t in (weight, packed.weight))
    to.copy_(torch.where(raw[:, None, None, None, :, None], of, to))
    return weight
