"""Greedy and temperature sampling: the argmax of logits / temperature + Gumbel noise, the noise hashed from the seed.

Bytes moved: every logit once, 2 * vocab a row in bf16: 78 MB for 256 rows of Qwen3's 151,936, 18 µs at 4.3 TB/s.
The maximum of logits plus Gumbel noise is a draw from their softmax (Gumbel 1954; Maddison et al. 2014). The noise of
(seed, position, token) is a 32-bit integer hash, so a row's draw depends on nothing else in the batch. A second, tiny
kernel reduces each row's blocks.
"""

import torch

from minivllm.kernels._triton import next_power_of_2, tl, triton

_MASK = 0xFFFFFFFF
_M1, _M2 = 0x7FEB352D, 0x846CA68B  # "lowbias32" (Wellons, hash-prospector)
_GOLDEN, _SALT = 0x9E3779B9, 0x85EBCA6B
_C1, _C2, _CG, _CS = tl.constexpr(_M1), tl.constexpr(_M2), tl.constexpr(_GOLDEN), tl.constexpr(_SALT)
_BLOCK = 4096


@triton.jit
def _mix_kernel(x):
    x = x ^ (x >> 16)
    x = x * _C1
    x = x ^ (x >> 15)
    x = x * _C2
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["stride"])
def _best_of_block_kernel(
    logits, temperature, seeds, slots, positions, best, best_at, stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    slot = tl.load(slots + row)
    heat = tl.load(temperature + slot)
    if heat > 0:
        seed = tl.load(seeds + slot)
        key = _mix_kernel(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32)
        key = _mix_kernel(_mix_kernel(key) ^ tl.load(positions + row).to(tl.uint32))
        bits = _mix_kernel(key ^ (token.to(tl.uint32) * _CG + _CS))
        bits = _mix_kernel(bits + key)
        uniform = ((bits >> 8).to(tl.float32) + 0.5) * (1.0 / (1 << 24))
        score = score / heat - tl.log(-tl.log(uniform))
    at = tl.argmax(score, 0)
    tl.store(best + row * tl.num_programs(1) + block, tl.max(score, 0))
    tl.store(best_at + row * tl.num_programs(1) + block, block * BLOCK + at)


@triton.jit
def _best_of_row_kernel(best, best_at, out, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    score = tl.load(best + row * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))
    at = tl.argmax(score, 0)
    tl.store(out + row, tl.load(best_at + row * BLOCKS + at).to(tl.int64))


def sample_tokens_triton(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    n, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    best = torch.empty((n, blocks), dtype=torch.float32, device=logits.device)
    best_at = torch.empty((n, blocks), dtype=torch.int32, device=logits.device)
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        _best_of_block_kernel[(n, blocks)](
            logits, temperature, seeds, slots, positions, best, best_at, logits.stride(0), VOCAB=vocab, BLOCK=_BLOCK,
            num_warps=8,
        )  # fmt: skip
        _best_of_row_kernel[(n,)](best, best_at, out, BLOCKS=blocks, PADDED=next_power_of_2(blocks), num_warps=1)
    return out


def sample_tokens_reference(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    scores, heat = logits.float(), temperature[slots]
    if bool((heat > 0).any()):
        noise = gumbel_noise(seeds[slots], positions, logits.shape[1])
        scores = torch.where(heat[:, None] > 0, scores / heat[:, None] + noise, scores)
    return scores.argmax(dim=-1)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """The noise of every token: seeds, positions (n,) int64; returns (n, vocab) float32."""
    key = _mix(_mix(seeds & _MASK) ^ ((seeds >> 32) & _MASK))
    key = _mix(key ^ (positions & _MASK))[:, None]
    token = torch.arange(vocab, device=seeds.device, dtype=torch.int64)[None, :]
    bits = _mix(key ^ ((token * _GOLDEN + _SALT) & _MASK))
    bits = _mix((bits + key) & _MASK)
    uniform = ((bits >> 8).to(torch.float32) + 0.5) * (1.0 / (1 << 24))
    return -torch.log(-torch.log(uniform))


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
