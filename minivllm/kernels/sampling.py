"""Greedy and temperature sampling: the argmax of logits / temperature + Gumbel noise, the noise hashed from the seed.

Bytes moved: every logit once, 2 * vocab a row in bf16: 78 MB for 256 rows of Qwen3's 151,936, 18 µs at 4.3 TB/s; the
noise takes about 25 instructions an element, 35 µs there. A greedy row takes none of them.
The maximum of logits plus Gumbel noise is a draw from their softmax (Gumbel 1954; Maddison et al. 2014). The noise of
(seed, position, token) is an integer hash, so a row's draw depends on nothing else in the batch. The first kernel finds
the best score of each block of a row and no more; the second looks only into the best block for the token.
"""

import torch

from minivllm.kernels._triton import cdiv, next_power_of_2, tl, triton
from minivllm.kernels.pdl import use_pdl

_MASK = 0xFFFFFFFF
_M1, _M2 = 0x7FEB352D, 0x846CA68B  # "lowbias32" (Wellons, hash-prospector)
_GOLDEN = 0x9E3779B9
_LOG2E = 1.4426950408889634
_UNIT, _HALF = 2.0**-32 - 2.0**-56, 2.0**-33  # bits * _UNIT + _HALF is in (0, 1) in float32
_SERIES = 1 / 64  # below it, a series is more exact than the logarithm of one minus it
_C1, _C2, _CG = tl.constexpr(_M1), tl.constexpr(_M2), tl.constexpr(_GOLDEN)
_CU, _CH, _CT = tl.constexpr(_UNIT), tl.constexpr(_HALF), tl.constexpr(_SERIES)
_L1, _L2, _L3 = (tl.constexpr(_LOG2E / n) for n in (1, 2, 3))


@triton.jit
def _mix_kernel(x):
    x = x ^ (x >> 16)
    x = x * _C1
    x = x ^ (x >> 15)
    x = x * _C2
    return x ^ (x >> 16)


@triton.jit
def _log2(x, APPROX: tl.constexpr):
    if APPROX:  # one instruction; tl.log2 is a polynomial of twenty
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def _scores(
    logits, temperature, seeds, slots, positions, row, token, stride, VOCAB: tl.constexpr, APPROX: tl.constexpr
):
    """log2(e) * (logits / temperature + Gumbel noise) of a row's tokens, up to a constant; greedy: the logits."""
    score = tl.load(logits + row * stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    slot = tl.load(slots + row)
    heat = tl.load(temperature + slot)
    if heat > 0:
        seed = tl.load(seeds + slot)
        low, high, position = seed.to(tl.uint32), (seed >> 32).to(tl.uint32), tl.load(positions + row).to(tl.uint32)
        key = _mix_kernel(_mix_kernel(_mix_kernel(low) ^ high) ^ position)
        key2 = _mix_kernel((key ^ high) + low)
        bits = token.to(tl.uint32) * _CG + key
        bits = (bits ^ (bits >> 16)) * _C1 + key2
        bits = (bits ^ (bits >> 15)) * _C2
        x = bits.to(tl.float32) * _CU + _CH  # uniform in (0, 1), finest near 0, where the winners are
        wait = x * (_L1 + x * (_L2 + x * _L3))
        wait = tl.where(x < _CT, wait, -_log2(1.0 - x, APPROX))  # -log2(1 - x): exponentially distributed
        score = score * (_L1 / heat) - _log2(wait, APPROX)
    return score


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _best_of_block_kernel(
    logits, temperature, seeds, slots, positions, best, stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    APPROX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = _scores(logits, temperature, seeds, slots, positions, row, token, stride, VOCAB, APPROX)
    tl.store(best + row * tl.num_programs(1) + block, tl.max(score, 0))


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _best_of_row_kernel(
    logits, temperature, seeds, slots, positions, best, out, stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, PADDED: tl.constexpr, APPROX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    block = tl.argmax(tl.load(best + row * BLOCKS + i, mask=i < BLOCKS, other=float("-inf")), 0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = _scores(logits, temperature, seeds, slots, positions, row, token, stride, VOCAB, APPROX)
    tl.store(out + row, (block * BLOCK + tl.argmax(score, 0)).to(tl.int64))


def sample_tokens_triton(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    n, vocab = logits.shape
    block = 1024 if n < 16 else 4096  # few rows: more programs, each sooner done
    blocks, pdl = cdiv(vocab, block), use_pdl(logits.device)
    approx = logits.is_cuda and torch.version.cuda is not None  # whether there is PTX
    best = torch.empty((n, blocks), dtype=torch.float32, device=logits.device)
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        args = (logits, temperature, seeds, slots, positions, best)
        _best_of_block_kernel[(n, blocks)](
            *args, logits.stride(0), VOCAB=vocab, BLOCK=block, APPROX=approx, PDL=pdl, num_warps=block // 512,
            launch_pdl=pdl,
        )  # fmt: skip
        _best_of_row_kernel[(n,)](
            *args, out, logits.stride(0), VOCAB=vocab, BLOCK=block, BLOCKS=blocks, PADDED=next_power_of_2(blocks),
            APPROX=approx, PDL=pdl, num_warps=8, launch_pdl=pdl,
        )  # fmt: skip
    return out


def sample_tokens_reference(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    scores, heat = logits.float(), temperature[slots]
    if bool((heat > 0).any()):
        noise = gumbel_noise(seeds[slots], positions, logits.shape[1])
        scores = torch.where(heat[:, None] > 0, scores / heat[:, None] + noise, scores)
    return scores.argmax(dim=-1)


def noise_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """The 32 bits of every token: seeds, positions (n,) int64; returns (n, vocab) int64.

    Each row is a keyed permutation of all 32-bit numbers, read at the tokens; the two keys are its seed's and
    position's. The last step of ``lowbias32`` is left out: the bits become a number, and it changes only the low ones.
    """
    low, high, position = seeds & _MASK, (seeds >> 32) & _MASK, positions & _MASK
    key = _mix(_mix(_mix(low) ^ high) ^ position)[:, None]
    key2 = _mix(((key ^ high[:, None]) + low[:, None]) & _MASK)
    token = torch.arange(vocab, device=seeds.device, dtype=torch.int64)[None, :]
    bits = (token * _GOLDEN + key) & _MASK
    bits = ((bits ^ (bits >> 16)) * _M1 + key2) & _MASK
    return ((bits ^ (bits >> 15)) * _M2) & _MASK


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """The noise of every token: seeds, positions (n,) int64; returns (n, vocab) float32."""
    x = noise_bits(seeds, positions, vocab).to(torch.float32) * _UNIT + _HALF
    return -torch.log(-torch.log1p(-x))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection on 32-bit integers, held in int64 (products wrap; their low 32 bits are right)."""
    x = x ^ (x >> 16)
    x = (x * _M1) & _MASK
    x = x ^ (x >> 15)
    x = (x * _M2) & _MASK
    return x ^ (x >> 16)


def sample_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Draw one token a row.

    logits (n, vocab) any float; temperature (slots,) float32, 0 is greedy; seeds (slots,) int64; slots (n,) int64: each
    row's index into both; positions (n,) int64. Returns (n,) int64. Ties go to the lowest token id.
    """
    run = sample_tokens_triton if logits.is_cuda else sample_tokens_reference
    return run(logits, temperature, seeds, slots, positions)
