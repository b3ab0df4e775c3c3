"""Weights of 16 bits kept in 12, exactly: a decode step of few rows waits for its weights, of which it then reads 24%
less.

Of a bfloat16 the sign and the seven bits of the mantissa are as good as random, but a matrix's exponents are few:
sixteen neighbours hold all but some 0.01% of a trained or a random line's. So a weight is its sign, its mantissa and
four bits of exponent, counted from its line's ``base``; the few others are kept beside, whole, with their places. What
a kernel makes of the bits is the weight times a power of two, its line's, by which it divides the sums: nothing is
rounded, nothing is lost. A line that training has left near zero has its own base, as any other; one of zeros is
whatever, times zero.

Weights lie in units of 128 lines by 128 of k, one behind another along k, as ``packed.cuh`` reads them: four tiles
of 64 by 64, of each of which a thread of a warpgroup finds what wgmma takes from its registers, 32 weights, in 48
bytes. Of three words each has a pair of weights where it belongs, in 24 bits of 32; the other bits of all three are a
fourth pair. Behind the tiles stand the unit's exceptions.

The kernel that packs is CUDA C++ (``pack_weights.cu``). Bytes moved: a weight's, twice, and three quarters as many
back.

Idea: DFloat11 (Zhang et al., 2025), whose exponents are Huffman-coded, which takes 11 bits and a kernel of its own to
decode; fixed lengths decode where they are multiplied, 1.4 instructions a weight.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels.hopper import Kernel, load, loads

LINES, STEP = 128, 128  # of a unit: lines of the weight, elements of k
_TILES, _TILE_BYTES = 4, 6144  # of 64 lines by 64 of k
_TAIL_BYTES = 256  # ends of the warps' lists of exceptions, one byte each, then exceptions of four bytes
MOST_EXCEPTIONS = _TAIL_BYTES // 4 - 2
UNIT_BYTES = _TILES * _TILE_BYTES + _TAIL_BYTES
_WINDOW = 16  # exponents
FIRST_EXPONENT = 0x70  # that a kernel gives the first of them
_AT_ONCE = 1 << 25  # weights, whose bits are taken apart at the same time
_THREADS = 256
_COUNT_BYTES = _THREADS // 32 * 256 * 4  # of each warp, how many weights have each exponent
PACK_KERNEL = Kernel(
    "pack_weights",
    (),
    (
        ("UNIT_BYTES", UNIT_BYTES),
        ("MOST_EXCEPTIONS", MOST_EXCEPTIONS),
        ("WINDOW", _WINDOW),
        ("FIRST_EXPONENT", FIRST_EXPONENT),
    ),
)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Of ``weight`` (lines, k). data (units, UNIT_BYTES) uint8, a unit's index (lines / 128) * (k / 128) + k / 128; a
    weight is what its bits say times its line's scale, of ``scales`` (lines,) float32, powers of two or zero, as units
    have their lines: those of a warp, 16, behind each other. ``gated``: units have 64 lines of the first half (gate)
    and the same of the second (up), by eights."""

    weight: torch.Tensor
    data: torch.Tensor
    scales: torch.Tensor
    gated: bool


def packable(lines: int, k: int) -> bool:
    return lines % LINES == 0 and k % STEP == 0


def packed_bytes(lines: int, k: int) -> int:
    return lines // LINES * (k // STEP) * UNIT_BYTES


def pack(weight: torch.Tensor, gated: bool = False) -> PackedWeight | None:
    """Of weight (lines, k) bfloat16, contiguous. None: a unit has more than ``MOST_EXCEPTIONS``, or a weight of a line
    lies so far from the others that no power of two leaves it as exact, or is no number."""
    return _packed([weight], [gated], _write)[0]


def pack_all(weights: Sequence[torch.Tensor], gated: Sequence[bool]) -> list[PackedWeight | None]:
    """``pack`` of each, all on one device; on Hopper by a kernel, whose answers the host waits for once."""
    return _packed(weights, gated, _writer(weights[0].device))


def pack_again(packed: Sequence[PackedWeight]) -> list[bool]:
    """What their weights are by now, written to where they are, as graphs know it. Of each, whether it could be; what
    could not is nothing sensible."""
    return _fill(packed, _writer(packed[0].data.device))


# what is packed, whose data and scales are written; failed () int32, which becomes 1 if it cannot be packed
_Writer = Callable[[PackedWeight, torch.Tensor], None]


def _packed(weights: Sequence[torch.Tensor], gated: Sequence[bool], write: _Writer) -> list[PackedWeight | None]:
    packed = []
    for weight, its in zip(weights, gated, strict=True):
        assert weight.dtype == torch.bfloat16 and weight.is_contiguous() and packable(*weight.shape)
        data = weight.new_empty((packed_bytes(*weight.shape) // UNIT_BYTES, UNIT_BYTES), dtype=torch.uint8)
        packed.append(PackedWeight(weight, data, weight.new_empty(len(weight), dtype=torch.float32), its))
    return [its if fits else None for its, fits in zip(packed, _fill(packed, write), strict=True)]


def _fill(packed: Sequence[PackedWeight], write: _Writer) -> list[bool]:
    """Whether each could be packed."""
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
    pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    numbers = (ctypes.c_int * 3)(*weight.shape, packed.gated)
    addresses = [
        *(ctypes.addressof(pointers) + 8 * i for i in range(len(pointers))),
        *(ctypes.addressof(numbers) + 4 * i for i in range(len(numbers))),
    ]
    nvrtc.launch(load(PACK_KERNEL, weight.device), _launch_shape(len(weight) // LINES), addresses)


# --------------------------------------------------------------------------- its reference


def _write(packed: PackedWeight, failed: torch.Tensor) -> None:
    lines, k = packed.weight.shape
    blocks = lines // LINES
    by_block, units = _by_block(packed.weight, packed.gated), packed.data.view(blocks, k // STEP, UNIT_BYTES)
    scales, some = packed.scales.view(blocks, LINES), max(1, _AT_ONCE // (LINES * k))
    for first in range(0, blocks, some):
        those = slice(first, first + some)
        _pack_blocks(by_block[those], scales[those], units[those], failed)


def _bases(bits: torch.Tensor) -> torch.Tensor:
    """bits (..., k) int16 -> (...,) int64: of each line the first of the sixteen exponents that most of its weights
    have; zeros, denormals, infinities and NaN have none. 0: no weight has any."""
    exponents = ((bits.int() >> 7) & 0xFF).long()
    counts = exponents.new_zeros(*bits.shape[:-1], 256).scatter_add_(-1, exponents, torch.ones_like(exponents))
    sums = counts.cumsum(-1)
    most, first = (sums[..., _WINDOW:-1] - sums[..., : -_WINDOW - 1]).max(-1)
    return torch.where(most > 0, first + 1, 0)


def _by_block(weight: torch.Tensor, gated: bool) -> torch.Tensor:
    """(blocks, 8 warps, 2 eights of lines, 8, k)."""
    lines, k = weight.shape
    bits = weight.view(torch.int16)
    if not gated:
        return bits.view(lines // LINES, 8, 2, 8, k)
    return bits.view(2, lines // LINES, 8, 8, k).permute(1, 2, 0, 3, 4)


def _pack_blocks(bits: torch.Tensor, scales: torch.Tensor, data: torch.Tensor, failed: torch.Tensor) -> None:
    """bits (blocks, 8, 2, 8, k) -> scales (blocks, 128), data (blocks, k / 128, UNIT_BYTES)."""
    blocks, k = bits.shape[0], bits.shape[-1]
    steps, bases = k // STEP, _bases(bits)
    of_lines = (bases - FIRST_EXPONENT + 127 << 23).int().view(torch.float32).where(bases > 0, 0)
    scales.copy_(of_lines.view(blocks, LINES))
    failed |= ((bits & 0x7FFF).any(-1) & (bases == 0)).any()
    # A unit's lines are (warpgroup 2, warp 4, half 2, eighth 8), its k is (tile 2, 16th 4, half 2, quarter 4, pair 2);
    # see wgmma's A.
    bits = bits.reshape(blocks, 2, 4, 2, 8, steps, 2, 4, 2, 4, 2).int() & 0xFFFF
    # -> (blocks, steps, warpgroup, tile, warp, eighth, quarter, 16th, half of k, half of lines, pair)
    bits = bits.permute(0, 5, 1, 6, 2, 4, 9, 7, 8, 3, 10)
    bases, of_lines = (its.view(blocks, 1, 2, 1, 4, 2, 8, 1, 1, 1, 1).movedim(5, 9) for its in (bases, of_lines))
    exponents = ((bits >> 7) & 0xFF) - bases.int()
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
    _put_exceptions(bits, inside, of_lines.expand(bits.shape), data[..., _TILES * _TILE_BYTES :], failed)


def _put_exceptions(
    bits: torch.Tensor, inside: torch.Tensor, scales: torch.Tensor, tails: torch.Tensor, failed: torch.Tensor
) -> None:
    """Of a warp of a unit those of one list, as value << 16 | half << 10 | tile << 9 | 16th << 7 | register << 5 |
    lane, in the order of tiles, lanes and the rest."""
    blocks, steps = bits.shape[:2]
    # (blocks, steps, warpgroup, tile, warp, eighth, quarter, 16th, half of k, half of lines, pair), by warps
    at = (~inside).nonzero(as_tuple=True)
    block, step, group, tile, warp, eighth, quarter, sixteenth, back, lower, pair = at
    weight, scale = bits[at].to(torch.int16).view(torch.bfloat16).float(), scales[at]
    moved = (weight / scale).to(torch.bfloat16)
    failed |= (moved.float() * scale != weight).any()
    value = moved.view(torch.int16).int() & 0xFFFF
    entry = value << 16 | pair << 10 | tile << 9 | sixteenth << 7 | back << 6 | lower << 5 | eighth << 2 | quarter
    unit, its_warp = block * steps + step, group * 4 + warp
    order = (unit * 8 + its_warp).argsort(stable=True)
    unit, its_warp, entry = unit[order], its_warp[order], entry[order]
    counts = torch.zeros(blocks * steps, 8, dtype=torch.int64, device=bits.device)
    counts.view(-1).scatter_add_(0, unit * 8 + its_warp, torch.ones_like(unit))
    ends = counts.cumsum(1)
    firsts = ends[:, -1].cumsum(0) - ends[:, -1]
    place = torch.arange(len(unit), device=bits.device) - firsts[unit]
    failed |= (ends[:, -1] > MOST_EXCEPTIONS).any()
    tail = torch.zeros(blocks * steps, _TAIL_BYTES // 4, dtype=torch.int32, device=bits.device)
    fits = place < MOST_EXCEPTIONS
    tail[unit[fits], place[fits] + 2] = entry[fits].int()
    tail.view(torch.uint8)[:, :8] = ends.clamp(max=MOST_EXCEPTIONS).to(torch.uint8)
    tails.copy_(tail.view(torch.uint8).view(blocks, steps, _TAIL_BYTES))


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
    for block, step in (tails[..., 7] > 0).nonzero().tolist():
        begin = 0
        for warp, end in enumerate(tails[block, step, :8].tolist()):
            for entry in entries[block, step, 2 + begin : 2 + end].tolist():
                at = warp // 4, entry >> 9 & 1, warp % 4, entry & 31, entry >> 7 & 3, entry >> 5 & 3, entry >> 10 & 1
                halves[block, step][at] = entry >> 16 & 0xFFFF
            begin = end
    bits = halves.view(blocks, steps, 2, 2, 4, 8, 4, 4, 2, 2, 2).permute(0, 2, 4, 9, 5, 1, 3, 7, 8, 6, 10)
    values = bits.reshape(blocks, 8, 2, 8, k).to(torch.int16).view(torch.bfloat16)
    values = (values.float() * packed.scales.view(blocks, 8, 2, 8, 1)).to(torch.bfloat16)
    if packed.gated:
        values = values.permute(2, 0, 1, 3, 4)
    return values.reshape(lines, k)
