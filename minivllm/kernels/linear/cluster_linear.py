"""Linear layers over 9 to 256 rows on Hopper, whose weights start loading before the input is ready.

Epilogues: the residual addition, SiLU(gate) * up, or all that stands between a projection and attention; the last two
optionally with the norm in front, if its weight is folded into theirs. Also used for fewer rows if the weight is large.
Also for float8 (e4m3), where the epilogue applies the scales of rows and weight.

The kernel is CUDA C++ (``cluster_linear.cu``): it needs thread-block clusters, whose programs share loads and reduce
through each other's shared memory, and Triton 3.6 cannot express that. Tiles are loaded by TMA and multiplied by wgmma;
sums are float32. Structured like CUTLASS's warp-specialized GEMMs (NVIDIA, 2023).

Bytes moved: the weight, n * k elements; from L2 to an SM (features + rows) of a tile * k elements, at 64 bytes a cycle,
which is the bound for 128 rows and more (separate warps have time to square x for the norm in front). Qwen3-0.6B's four
products per layer at 256 rows: 31 MB, 8 GFLOP, 11 µs. Latency matters as much: a program's first tiles of weights,
often all, are loaded before ``gdc_wait`` (see pdl.py), so that after a kernel of its own kind a product of 32 rows
takes 3.7 µs, 1.3 of them for the launch.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import compiling, num_sms
from minivllm.kernels.attention.rotary import Heads
from minivllm.kernels.hopper import STEP, Plan, heads_argument, launch_product, loads, plan_of
from minivllm.kernels.linear.cluster_config import (
    HEADS_TILE,
    LARGE_WEIGHT,
    SMALL_WEIGHT,
    ClusterConfig,
    cluster_config,
    is_long,
    received_bytes,
    tile_kernel,
    tile_rows,
)
from minivllm.kernels.pdl import use_pdl
from minivllm.rounding import cdiv

MIN_ROWS, MAX_ROWS = 9, 256
MIN_LONG_ROWS = 3  # for a long weight


def use_cluster(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    gated: bool = False,
    head_dim: int = 0,
    float8: bool = False,
) -> bool:
    """Whether this is faster for (rows, k) @ (n, k).T than the library; the only place that decides. ``dtype``: of the
    output; ``float8``: x and weight are."""
    if float8:
        if n % 16 or k % 16:
            return False
        k //= 2  # two count as one bfloat16
    if dtype != torch.bfloat16 or n % (16 if gated else 8) or k % 8 or not nvrtc.available(device):
        return False
    if head_dim:
        faster = n % HEADS_TILE == 0 and MIN_ROWS <= rows <= (128 if n * k > LARGE_WEIGHT else 64)
    elif float8:
        faster = 1 <= rows <= (64 if n * k > LARGE_WEIGHT else 128 if n * k > SMALL_WEIGHT else MAX_ROWS)
    elif n * k > LARGE_WEIGHT:
        faster = rows <= 64 or (rows <= 192 and not gated and k > n)  # persistent_linear does gated ones
    else:
        small = n * k <= SMALL_WEIGHT and (rows <= 128 or min(n, k) <= 1024)
        long = not gated and is_long(n, k)
        most = MAX_ROWS if small else 128 if long else 64  # with more, the library's larger tiles are as good
        faster = (MIN_LONG_ROWS if long else MIN_ROWS) <= rows <= most
    if not faster:
        return False
    config = cluster_config(rows, n, k, num_sms(device), gated, head_dim)
    return config is not None and loads(tile_kernel(replace(config.tile, float8=float8)), device)


class Scales(NamedTuple):
    """What a product of float8 is multiplied by: rows (t,) and lines (n,), both float32."""

    rows: torch.Tensor
    lines: torch.Tensor


def gate_up_takes_norm(rows: int, n: int, k: int) -> bool:
    """Whether ``cluster_gate_up`` with the norm fused is faster than after a norm kernel. If many programs square the
    same rows, or there are many rows, the tensor cores wait for the squares."""
    return rows <= 64 and n * k <= LARGE_WEIGHT


@cache
def _plan(
    rows: int, lines: int, n: int, k: int, add: bool, gated: bool, head_dim: int, eps: float | None, float8: bool,
    config: ClusterConfig | None, device: torch.device,
) -> Plan:  # fmt: skip
    config = config or cluster_config(rows, lines, k, num_sms(device), gated, head_dim)
    assert config is not None
    tile = replace(config.tile, float8=float8)
    assert (tile.gated, tile.head_dim) == (gated, head_dim) and (eps is None or tile.squaring)
    box_rows = tile_rows(tile.rows, rows)
    assert cdiv(rows, box_rows) % config.sharing == 0
    shape = nvrtc.LaunchShape(
        (cdiv(n, tile.outputs), cdiv(rows, box_rows), config.splits),
        (1, config.sharing, config.splits),
        128 * tile.groups + (0 if eps is None else tile.squaring) + 32,
        config.stages * tile.stage_bytes + received_bytes(tile, rows, config.splits) + 1024,
        use_pdl(device),
    )
    ints = (rows, n, cdiv(k, STEP), box_rows, config.stages, config.sharing, config.splits, int(add))
    boxes = (tile.outputs // config.sharing, box_rows)
    return plan_of(tile_kernel(tile), device, shape, boxes, ints, (1 / k, eps or 0.0))


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    features: int | None = None,
    add: bool = False,
    gated: bool = False,
    eps: float | None = None,
    heads: Heads | None = None,
    scales: Scales | None = None,
    config: ClusterConfig | None = None,
) -> torch.Tensor:
    """x (t, k), weight (n or 2 * n, k), out (t, n) contiguous; ``features``: n, if out holds fewer."""
    if compiling():
        return out
    assert out.is_contiguous()
    if scales is not None:  # two float8 move as one bfloat16
        x, weight = x.view(torch.bfloat16), weight.view(torch.bfloat16)
    (rows, k), n, head_dim = x.shape, features or out.shape[1], 0 if heads is None else heads.head_dim
    plan = _plan(rows, weight.shape[0], n, k, add, gated, head_dim, eps, scales is not None, config, x.device)
    launch_product(plan, x, weight, [out, *(scales or (None, None))], heads_argument(heads))
    return out


def cluster_linear(x: torch.Tensor, weight: torch.Tensor, scales: Scales | None = None) -> torch.Tensor:
    """x (t, k), weight (n, k), both bfloat16, or both float8_e4m3fn with ``scales``; returns (t, n) bfloat16."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16, device=x.device)
    return _launch(x, weight, out, scales=scales)


def cluster_gate_up(
    x: torch.Tensor, weight: torch.Tensor, eps: float | None = None, scales: Scales | None = None
) -> torch.Tensor:
    """SiLU(gate) * up by ``cluster_linear``: weight (2 * n, k), gate's rows first; returns (t, n). With ``eps``, x's
    rows are first divided by their rms; not in float8."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=torch.bfloat16, device=x.device)
    return _launch(x, weight, out, gated=True, eps=eps, scales=scales)


def cluster_linear_add(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, scales: Scales | None = None
) -> torch.Tensor:
    """``residual`` (t, n) += ``cluster_linear``, in place and rounded once; returns it."""
    return _launch(x, weight, residual, add=True, scales=scales)


def cluster_qkv(
    x: torch.Tensor,
    weight: torch.Tensor,
    heads: Heads,
    eps: float | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """``qk_norm_rope_store`` by ``cluster_linear``: weight ((heads + 2 * kv heads) * head_dim, k); returns q (t, heads,
    head_dim). The whole head rotates; its dimension is 64 or 128. ``eps`` and ``scales`` as above."""
    out = torch.empty((x.shape[0], heads.num_heads, heads.head_dim), dtype=torch.bfloat16, device=x.device)
    return _launch(x, weight, out, features=weight.shape[0], heads=heads, eps=eps, scales=scales)
