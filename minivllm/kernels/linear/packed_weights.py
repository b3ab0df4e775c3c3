"""Lossless compression of bfloat16 weights to 12 bits: a decode step of few rows is bound by reading its weights, of
which it then reads 23% less.

Sign and mantissa (7 bits) of a bfloat16 are practically random, but a matrix has few distinct exponents: in a trained
or a random line (row of the weight) a window of sixteen consecutive exponents covers all but some 0.01% of the weights.
So a weight is stored as its sign, its mantissa and four bits of exponent, relative to its line's ``base``. The
exceptions (up to 47 below the base, up to 31 above, or zero) are listed separately: where they are and how far their
exponent is off. A kernel decodes a weight times a power of two, its line's, and divides the sums by that: nothing is
rounded. A line that training has left near zero has its own base like any other; one of zeros decodes to anything,
times zero.

A piece is eight lines by 128 of k (``packed_piece.cuh``): three planes of 16 bytes for each of 32 lanes, then the
number of the piece's exceptions and 16 bits for each. Four lanes share a line; in each 32 of k a lane has four of its
pairs of adjacent weights, in the layout of wgmma's A operand in registers (two pieces: 16 lines). A plane's four words
are for four different 32 of k. Three words, one of each plane, hold one pair each, in place, in 24 of their 32 bits;
their other bits hold a fourth pair.

Kernels differ in which pieces they read together (``Order``): sixteen, a unit of 128 lines, or those of eight lines,
along whose k the warps take turns.

The packing kernel is CUDA C++ (``pack_weights.cu``). Bytes moved: it reads the weight twice and writes three quarters
of it.

Idea: DFloat11 (Zhang et al., 2025), whose Huffman-coded exponents take 11 bits and a separate decoding kernel; fixed
lengths are decoded in the product, in 1.4 instructions per weight.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels.hopper import Kernel, launch_kernel, load, loads

LINES, STEP = 128, 128  # of a unit: lines (rows of the weight), elements of k
PIECE_LINES, _LANES, _PLANES = 8, 32, 3
MOST_EXCEPTIONS = 15  # per piece
_EXCEPTIONS_AT = _PLANES * _LANES * 16
PIECE_BYTES = _EXCEPTIONS_AT + 2 * (1 + MOST_EXCEPTIONS)
_UNIT_PIECES = LINES // PIECE_LINES
UNIT_BYTES = _UNIT_PIECES * PIECE_BYTES
_WINDOW = 16  # exponents that four bits encode
_BELOW, _ABOVE = 47, 31  # how far an exception's exponent may be from the window's first
FIRST_EXPONENT = 0x70  # the decoded exponent of the window's first
_AT_ONCE = 1 << 25  # weights that are packed at a time
_THREADS = 256
_COUNT_BYTES = _THREADS // 32 * 256 * 4  # per warp, how many weights have each exponent
PACK_KERNEL = Kernel(
    "pack_weights",
    (),
    (
        ("PIECE_BYTES", PIECE_BYTES),
        ("MOST_EXCEPTIONS", MOST_EXCEPTIONS),
        ("WINDOW", _WINDOW),
        ("FIRST_EXPONENT", FIRST_EXPONENT),
    ),
    ("packed_piece",),
)


class Order(Enum):
    """The order of pieces in memory."""

    UNITS = "units"  # the sixteen pieces of 128 lines, then the next along k
    LINES = "lines"  # the pieces of eight lines, along k


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed copy of ``weight`` (lines, k). data (lines / 128, k / 128, 16, PIECE_BYTES) uint8, or, in
    ``Order.LINES``, (lines / 128, 16, k / 128, PIECE_BYTES), contiguous. A weight is its decoded value times its line's
    scale: ``scales`` (lines,) float32, powers of two or zero, in data's order of lines: the weight's, or, if ``gated``,
    eights of the first half (gate) and of the second (up) in turn."""

    weight: torch.Tensor
    data: torch.Tensor
    scales: torch.Tensor
    gated: bool
    order: Order

    @property
    def units(self) -> torch.Tensor:
        """data viewed in ``Order.UNITS``."""
        return self.data if self.order is Order.UNITS else self.data.transpose(1, 2)


def packable(lines: int, k: int) -> bool:
    return lines % LINES == 0 and k % STEP == 0


def packed_bytes(lines: int, k: int) -> int:
    return lines // PIECE_LINES * (k // STEP) * PIECE_BYTES


def pack(weight: torch.Tensor, gated: bool = False, order: Order = Order.UNITS) -> PackedWeight | None:
    """Pack weight (lines, k) bfloat16, contiguous. None if a piece has more than ``MOST_EXCEPTIONS``, or a weight is
    too far from the others of its line, denormal, infinite or NaN."""
    return _packed([weight], [gated], [order], _write)[0]


def pack_all(
    weights: Sequence[torch.Tensor], gated: Sequence[bool], orders: Sequence[Order]
) -> list[PackedWeight | None]:
    """``pack`` each weight, all on one device; on Hopper by a kernel, with one synchronization for all results."""
    return _packed(weights, gated, orders, _writer(weights[0].device))


def pack_again(packed: Sequence[PackedWeight]) -> list[bool]:
    """Pack the weights' current values in place, so that captured graphs use them. Returns which succeeded; the data of
    those that failed is invalid."""
    return _fill(packed, _writer(packed[0].data.device))


# Packs ``weight`` into data and scales. failed, () int32, is set to 1 if that is impossible.
_Writer = Callable[[PackedWeight, torch.Tensor], None]


def _packed(
    weights: Sequence[torch.Tensor], gated: Sequence[bool], orders: Sequence[Order], write: _Writer
) -> list[PackedWeight | None]:
    packed = []
    for weight, its, order in zip(weights, gated, orders, strict=True):
        assert weight.dtype == torch.bfloat16 and weight.is_contiguous() and packable(*weight.shape)
        lines, k = weight.shape
        inside = (k // STEP, _UNIT_PIECES) if order is Order.UNITS else (_UNIT_PIECES, k // STEP)
        data = weight.new_empty((lines // LINES, *inside, PIECE_BYTES), dtype=torch.uint8)
        packed.append(PackedWeight(weight, data, weight.new_empty(lines, dtype=torch.float32), its, order))
    return [its if fits else None for its, fits in zip(packed, _fill(packed, write), strict=True)]


def _fill(packed: Sequence[PackedWeight], write: _Writer) -> list[bool]:
    """Returns which of them could be packed."""
    failed = torch.zeros(len(packed), dtype=torch.int32, device=packed[0].data.device)
    for its, one in zip(packed, failed, strict=True):
        write(its, one)
    return [not one for one in failed.tolist()]


# --------------------------------------------------------------------------- the kernel


def _writer(device: torch.device) -> _Writer:
    return _launch if nvrtc.available(device) and loads(PACK_KERNEL, device) else _write


@cache
def _launch_shape(blocks: int) -> nvrtc.LaunchShape:
    return nvrtc.LaunchShape((blocks, 1, 1), (1, 1, 1), _THREADS, _COUNT_BYTES, False)


def _launch(packed: PackedWeight, failed: torch.Tensor) -> None:
    weight = packed.weight
    tensors = weight, packed.data, packed.scales, failed
    numbers = (ctypes.c_int * 4)(*weight.shape, packed.gated, packed.order is Order.LINES)
    launch_kernel(load(PACK_KERNEL, weight.device), _launch_shape(len(weight) // LINES), [], tensors, numbers)


# --------------------------------------------------------------------------- its reference


def _write(packed: PackedWeight, failed: torch.Tensor) -> None:
    eights, some = _by_eight(packed.weight, packed.gated), max(1, _AT_ONCE // (LINES * packed.weight.shape[1]))
    of_blocks = (its.split(some * _UNIT_PIECES) for its in (eights, _scales(packed)))
    for bits, scales, units in zip(*of_blocks, packed.units.split(some), strict=True):
        pieces = units.new_empty(len(bits), units.shape[1], PIECE_BYTES)
        _pack_eights(bits, scales, pieces, failed)
        units.copy_(pieces.unflatten(0, (-1, _UNIT_PIECES)).transpose(1, 2))


def _scales(packed: PackedWeight) -> torch.Tensor:
    """(eights, 8)."""
    return packed.scales.view(-1, PIECE_LINES)


def _bases(bits: torch.Tensor) -> torch.Tensor:
    """bits (..., k) int16 -> (...,) int64: for each line the first of the sixteen exponents that cover most of its
    weights, not counting zeros, denormals, infinities and NaN. 0: none count."""
    exponents = ((bits.int() >> 7) & 0xFF).long()
    counts = exponents.new_zeros(*bits.shape[:-1], 256).scatter_add_(-1, exponents, torch.ones_like(exponents))
    sums = counts.cumsum(-1)
    most, first = (sums[..., _WINDOW:-1] - sums[..., : -_WINDOW - 1]).max(-1)
    return torch.where(most > 0, first + 1, 0)


def _by_eight(weight: torch.Tensor, gated: bool) -> torch.Tensor:
    """(eights, 8, k) int16."""
    lines, k = weight.shape
    bits = weight.view(torch.int16)
    if gated:
        bits = bits.view(2, lines // 2 // PIECE_LINES, PIECE_LINES, k).transpose(0, 1)
    return bits.reshape(lines // PIECE_LINES, PIECE_LINES, k)


def _pack_eights(bits: torch.Tensor, scales: torch.Tensor, pieces: torch.Tensor, failed: torch.Tensor) -> None:
    """bits (eights, 8, k) -> scales (eights, 8), pieces (eights, k / 128, PIECE_BYTES)."""
    eights, _, k = bits.shape
    steps, bases = k // STEP, _bases(bits)
    scales.copy_((bases - FIRST_EXPONENT + 127 << 23).int().view(torch.float32).where(bases > 0, 0))
    failed |= ((bits & 0x7FFF).any(-1) & (bases == 0)).any()
    # A piece's k is (word 4, 16th 2, half 2, quarter 4, element 2); see wgmma's A.
    bits = bits.reshape(eights, PIECE_LINES, steps, 4, 2, 2, 4, 2).int() & 0xFFFF
    bits = bits.permute(0, 2, 1, 6, 3, 4, 5, 7)  # (eights, steps, line, quarter, word, 16th, half, element)
    far = ((bits >> 7) & 0xFF) - bases.int().view(eights, 1, PIECE_LINES, 1, 1, 1, 1, 1)
    inside = (far >= 0) & (far < _WINDOW)
    codes = (bits & 0x807F) | torch.where(inside, far << 7, 0)
    pairs = codes[..., 0] | codes[..., 1] << 16
    pairs = pairs.reshape(eights, steps, _LANES, 4, 4)  # (…, lane, word, pair)
    fourth = pairs[..., 3]
    exponent, sign = (fourth << 4) & 0x78007800, (fourth >> 1) & 0x40004000
    upper, lower = (fourth << 8) & 0x78007800, (fourth << 11) & 0x38003800
    planes = pairs[..., 0] | exponent, pairs[..., 1] | upper, pairs[..., 2] | lower | sign
    pieces[..., :_EXCEPTIONS_AT] = torch.stack(planes, dim=2).view(eights, steps, -1).view(torch.uint8)
    tails = pieces[..., _EXCEPTIONS_AT:]
    tails.copy_(_exceptions(bits, far, inside, failed).view(torch.uint8).view(tails.shape))


def _exceptions(bits: torch.Tensor, far: torch.Tensor, inside: torch.Tensor, failed: torch.Tensor) -> torch.Tensor:
    """(pieces, 1 + MOST_EXCEPTIONS) int16: the number of exceptions, then shift << 10 | element << 9 | word << 7 | pair
    << 5 | lane for each, ordered by lane, word and pair, then zeros. shift: the exponent, see ``_delta``."""
    at = (~inside).nonzero(as_tuple=True)
    eight, step, line, quarter, word, sixteenth, half, element = at
    weight, its = bits[at], far[at]
    zero, exponent = (weight & 0x7FFF) == 0, (weight >> 7) & 0xFF
    failed |= (~zero & ((exponent == 0) | (exponent == 0xFF) | (its < -_BELOW) | (its > _ABOVE))).any()
    shift = torch.where(zero, 63, torch.where(its < 0, -1 - its, _ABOVE + its)) & 63
    entry = shift << 10 | element << 9 | word << 7 | sixteenth << 6 | half << 5 | line << 2 | quarter
    number = bits.shape[0] * bits.shape[1]
    piece = eight * bits.shape[1] + step
    counts = torch.bincount(piece, minlength=number)
    place = torch.arange(len(piece), device=bits.device) - (counts.cumsum(0) - counts)[piece]
    failed |= (counts > MOST_EXCEPTIONS).any()
    halves = torch.zeros(number, 1 + MOST_EXCEPTIONS, dtype=torch.int16, device=bits.device)
    halves[:, 0] = counts.clamp(max=MOST_EXCEPTIONS)
    fits = place < MOST_EXCEPTIONS
    halves[piece[fits], place[fits] + 1] = entry[fits].to(torch.int16)
    return halves


def _delta(shift: torch.Tensor) -> torch.Tensor:
    """An exception's exponent relative to FIRST_EXPONENT: -1 to -47 or 16 to 31; -FIRST_EXPONENT for zero."""
    far = torch.where(shift < _BELOW, -1 - shift, shift - _ABOVE)
    return torch.where(shift == 63, -FIRST_EXPONENT, far)


def unpack(packed: PackedWeight) -> torch.Tensor:
    """The weight (lines, k), decoded as kernels decode it."""
    lines, k = packed.weight.shape
    pieces = packed.units.transpose(1, 2).reshape(-1, PIECE_BYTES)
    planes = pieces[:, :_EXCEPTIONS_AT].contiguous().view(torch.int32).view(-1, _PLANES, _LANES, 4).unbind(1)
    first = FIRST_EXPONENT << 7 | FIRST_EXPONENT << 23
    in_place = [(plane & -0x78007801) | first for plane in planes]  # 0x87FF87FF
    fourth = ((planes[0] >> 4) & 0x07800780) | first | ((planes[1] >> 8) & 0x00780078)
    fourth = fourth | ((planes[2] >> 11) & 0x00070007) | ((planes[2] << 1) & -0x7FFF8000)  # 0x80008000
    pairs = torch.stack((*in_place, fourth), dim=-1)  # (pieces, lane, word, pair)
    elements = torch.stack((pairs & 0xFFFF, (pairs >> 16) & 0xFFFF), dim=-1).flatten(2, 3)
    exceptions = pieces[:, _EXCEPTIONS_AT:].contiguous().view(torch.int16).int() & 0xFFFF
    numbers = torch.arange(MOST_EXCEPTIONS, device=pieces.device)
    piece, place = (numbers < exceptions[:, :1]).nonzero(as_tuple=True)
    entry = exceptions[piece, place + 1]
    elements[piece, entry & 31, entry >> 5 & 15, entry >> 9 & 1] += _delta(entry >> 10) << 7
    bits = elements.view(lines // PIECE_LINES, k // STEP, PIECE_LINES, 4, 4, 2, 2, 2).permute(0, 2, 1, 4, 5, 6, 3, 7)
    values = bits.reshape(-1, PIECE_LINES, k).to(torch.int16).view(torch.bfloat16)
    values = (values.float() * _scales(packed)[..., None]).to(torch.bfloat16)
    if packed.gated:
        values = values.view(-1, 2, PIECE_LINES, k).transpose(0, 1)
    return values.reshape(lines, k)
