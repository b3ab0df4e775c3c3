"""Shared by kernels that draw tokens: groups of tokens, and noise; see sampling.py."""

import torch

from minivllm.kernels._triton import LOG2E, tl, triton

GROUP = 1024  # tokens; changing it changes what seeds draw
_MASK = 0xFFFFFFFF
_M1, _M2 = 0x7FEB352D, 0x846CA68B  # "lowbias32" (Wellons, hash-prospector)
_GOLDEN = 0x9E3779B9
_UNIT, _HALF = 2.0**-32 - 2.0**-56, 2.0**-33  # bits * _UNIT + _HALF is in (0, 1) in float32
_SERIES = 1 / 64  # below it, a series is more accurate than log(1 - x)
_C1, _C2, _CG = tl.constexpr(_M1), tl.constexpr(_M2), tl.constexpr(_GOLDEN)
_CU, _CH, _CT = tl.constexpr(_UNIT), tl.constexpr(_HALF), tl.constexpr(_SERIES)
_L1, _L2, _L3 = (tl.constexpr(LOG2E / n) for n in (1, 2, 3))


@triton.jit
def log2_kernel(x, APPROX: tl.constexpr):
    if APPROX:  # one instruction; tl.log2 is a polynomial of twenty
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def exp2_kernel(x, APPROX: tl.constexpr):
    if APPROX:  # flushes denormals to 0
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def _mix_kernel(x):
    x = x ^ (x >> 16)
    x = x * _C1
    x = x ^ (x >> 15)
    x = x * _C2
    return x ^ (x >> 16)


@triton.jit
def keys_kernel(seed, position):
    """The two keys of a row's noise."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    key = _mix_kernel(_mix_kernel(_mix_kernel(low) ^ high) ^ position.to(tl.uint32))
    return key, _mix_kernel((key ^ high) + low)


@triton.jit
def noise_kernel(index, key, key2, APPROX: tl.constexpr):
    """log2(e) * Gumbel noise, up to a constant."""
    bits = index.to(tl.uint32) * _CG + key
    bits = (bits ^ (bits >> 16)) * _C1 + key2
    bits = (bits ^ (bits >> 15)) * _C2
    x = bits.to(tl.float32) * _CU + _CH  # uniform in (0, 1), finest near 0, where the winners are
    wait = x * (_L1 + x * (_L2 + x * _L3))
    wait = tl.where(x < _CT, wait, -log2_kernel(1.0 - x, APPROX))  # -log2(1 - x): exponentially distributed
    return -log2_kernel(wait, APPROX)


def noise_bits(seeds: torch.Tensor, positions: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The 32 random bits of tokens and groups: seeds, positions (n,), index (k,) or (n, k) int64; returns (n, k) int64.

    Each row is a keyed permutation of all 32-bit numbers, evaluated at the index: a token's number, or vocab + a
    group's. The two keys come from the row's seed and position. The last step of ``lowbias32`` is left out: the bits
    are converted to a float, and it changes only the low ones.
    """
    low, high, position = seeds & _MASK, (seeds >> 32) & _MASK, positions & _MASK
    key = _mix(_mix(_mix(low) ^ high) ^ position)[:, None]
    key2 = _mix(((key ^ high[:, None]) + low[:, None]) & _MASK)
    bits = (index * _GOLDEN + key) & _MASK
    bits = ((bits ^ (bits >> 16)) * _M1 + key2) & _MASK
    return ((bits ^ (bits >> 15)) * _M2) & _MASK


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """The noise of all tokens: seeds, positions (n,) int64; returns (n, vocab) float32."""
    return gumbel(seeds, positions, torch.arange(vocab, device=seeds.device))


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The noise at an index, as in ``noise_bits``."""
    x = noise_bits(seeds, positions, index).to(torch.float32) * _UNIT + _HALF
    return -torch.log(-torch.log1p(-x))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection on 32-bit integers, in int64 (products wrap; their low 32 bits are correct)."""
    x = x ^ (x >> 16)
    x = (x * _M1) & _MASK
    x = x ^ (x >> 15)
    x = (x * _M2) & _MASK
    return x ^ (x >> 16)
