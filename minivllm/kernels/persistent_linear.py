"""Linear layers over a thousand rows and more, on Hopper, with what stands behind them: SiLU(gate) * up, or the norm of
queries and keys, rotary embedding and cache write. The product's rows may be multiplied by a factor each first
(``row_factors``: the norm in front, if its weight is folded into the product's).

The kernel is CUDA C++ (``persistent_linear.cu``): a program a multiprocessor, in clusters of two, goes through tiles of
128 rows by 256 features; structure after CUTLASS's warp-specialized GEMMs (NVIDIA, 2023). It saves a pass over the
product, read and written: of 8,192 tokens and Qwen3-0.6B 151 MB behind gate and up, 134 MB behind qkv, 35 and 31 µs at
4.3 TB/s. Floor: 2 * t * n * k operations; gate and up 103 GFLOP, 129 µs at 800 TFLOP/s.
"""

from functools import cache, lru_cache

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import cdiv, compiling, num_sms
from minivllm.kernels.hopper import STEP, Kernel, Plan, heads_argument, launch, loads, plan_of
from minivllm.kernels.pdl import use_pdl
from minivllm.kernels.rotary import Heads

MIN_ROWS = 1024
_BUSY = 0.9  # below, the library's smaller tiles save more than the pass over the product costs
_ROWS, _LINES, _STAGES = 128, 256, 3  # a tile's rows and lines of the weight, and stages of k; as in the .cu
_STAGE_BYTES = (_ROWS + _LINES) * 2 * STEP
_SUM_BYTES = _ROWS * _LINES * 2
_ROW_BYTES = _ROWS * 16  # a place in the cache, one among the angles, and a factor, of each
_THREADS = 384


def use_persistent(
    rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, *, gated: bool = False, head_dim: int = 0
) -> bool:
    """Whether (rows, k) @ (n, k).T and what stands behind it are faster here than apart; the one place that knows."""
    if rows < MIN_ROWS or dtype != torch.bfloat16 or n % (head_dim or 16) or k % 8 or not nvrtc.available(device):
        return False
    return busy(rows, n, num_sms(device) // 2) >= _BUSY and loads(_kernel(gated, head_dim), device)


def busy(rows: int, n: int, clusters: int) -> float:
    """The share of all programs' time that goes into rows and features that are there; the rest pads tiles, or idles in
    the last round. n: lines of the weight."""
    rounds = cdiv(cdiv(rows, 2 * _ROWS) * cdiv(n, _LINES), clusters)
    return rows * n / (rounds * clusters * 2 * _ROWS * _LINES)


@cache
def _kernel(gated: bool, head_dim: int) -> Kernel:
    return Kernel("persistent_linear", _LINES, (("GATED", int(gated)), ("HEAD", head_dim)))


@lru_cache(maxsize=1024)  # a step of prompts may have any number of rows
def _plan(rows: int, n: int, k: int, gated: bool, head_dim: int, device: torch.device) -> Plan:
    pairs = cdiv(rows, 2 * _ROWS) * cdiv(n, _LINES // 2 if gated else _LINES)
    shape = nvrtc.LaunchShape(
        (2 * min(pairs, num_sms(device) // 2), 1, 1),
        (2, 1, 1),
        _THREADS,
        _STAGES * _STAGE_BYTES + _SUM_BYTES + _ROW_BYTES + 1024,
        use_pdl(device),
    )
    return plan_of(_kernel(gated, head_dim), device, shape, (_LINES // 2, _ROWS), (rows, n, cdiv(k, STEP)))


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    n: int,
    factors: torch.Tensor | None,
    *,
    gated: bool = False,
    heads: Heads | None = None,
    kept: torch.Tensor | None = None,
) -> None:
    """x (t, k), weight (n or 2 * n, k), factors (t,) float32; ``kept`` as ``heads_argument`` has it."""
    if compiling():
        return
    assert out.is_contiguous()
    plan = _plan(x.shape[0], n, x.shape[1], gated, 0 if heads is None else heads.head_dim, x.device)
    launch(plan, x, weight, [out, factors], heads_argument(heads, kept))


def persistent_gate_up(x: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """SiLU(gate) * up of ``persistent_linear``: weight (2 * n, k), gate's rows first; returns (t, n)."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, out.shape[1], factors, gated=True)
    return out


def qkv_outputs(t: int, weight: torch.Tensor, heads: Heads, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What ``persistent_qkv`` of t rows writes: q (t, heads, head_dim) and, with ``keep``, keys and values side by side
    (t, 2 * kv heads, head_dim)."""
    q = weight.new_empty((t, heads.num_heads, heads.head_dim))
    return q, weight.new_empty((t, 2 * heads.num_kv_heads, heads.head_dim)) if keep else None


def persistent_qkv(
    x: torch.Tensor,
    weight: torch.Tensor,
    heads: Heads,
    factors: torch.Tensor | None = None,
    *,
    keep: bool = False,
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """``qk_norm_rope_store`` of ``persistent_linear``: weight ((heads + 2 * kv heads) * head_dim, k); returns q (t,
    heads, head_dim) and, with ``keep``, k and v (t, kv heads, head_dim) as they are in the cache; or writes them to
    ``out``, rows of ``qkv_outputs`` of more. All of a head rotates; its dimension is 64 or 128."""
    q, kept = qkv_outputs(x.shape[0], weight, heads, keep) if out is None else out
    assert kept is None or kept.is_contiguous()
    _launch(x, weight, q, weight.shape[0], factors, heads=heads, kept=kept)
    return (q, None, None) if kept is None else (q, *kept.split(heads.num_kv_heads, dim=1))
