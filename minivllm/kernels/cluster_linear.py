"""Linear layers over 9 to 256 rows, on Hopper: products whose weights are on their way before the input is there.

With the residual addition behind, SiLU(gate) * up, or all that stands between a projection and attention; the last two
with the norm in front, if its weight is folded into theirs. Large weights are read so for fewer rows, too.

The kernel is CUDA C++ (``cluster_linear.cu``): it needs programs that share their loads and add up through each other's
shared memory (thread-block clusters), which Triton 3.6 has no words for. Tiles come by TMA; the tensor cores multiply
(wgmma); sums are float32. Structure after CUTLASS's warp-specialized GEMMs (NVIDIA, 2023).

Bytes moved: the weight, n * k elements; from L2 to a multiprocessor (features + rows) of a tile * k elements, at 64
bytes a cycle, which bounds 128 rows and more (warps of their own have time to square x for the norm in front).
Qwen3-0.6B's four products a layer at 256 rows: 31 MB, 8 GFLOP, 11 µs.
What stands around it counts as much: a program's first tiles of weights, often all, are asked for before ``gdc_wait``
(see pdl.py), so that behind a kernel of its own kind a product of 32 rows takes 3.7 µs, of which the launch is 1.3.
"""

from functools import cache

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import cdiv, compiling, num_sms
from minivllm.kernels.cluster_config import (
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
from minivllm.kernels.hopper import STEP, Plan, heads_argument, launch, loads, plan_of
from minivllm.kernels.pdl import use_pdl
from minivllm.kernels.rotary import Heads

MIN_ROWS, MAX_ROWS = 9, 256
MIN_LONG_ROWS = 3  # of a long weight


def use_cluster(
    rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, *, gated: bool = False, head_dim: int = 0
) -> bool:
    """Whether (rows, k) @ (n, k).T is faster here than in the library; the one place that knows."""
    if dtype != torch.bfloat16 or n % (16 if gated else 8) or k % 8 or not nvrtc.available(device):
        return False
    if head_dim:
        faster = n % HEADS_TILE == 0 and MIN_ROWS <= rows <= (128 if n * k > LARGE_WEIGHT else 64)
    elif n * k > LARGE_WEIGHT:
        faster = rows <= 64 or (rows <= 192 and not gated and k > n)  # gated: persistent_linear's
    else:
        small = n * k <= SMALL_WEIGHT and (rows <= 128 or min(n, k) <= 1024)
        long = not gated and is_long(n, k)
        most = MAX_ROWS if small else 128 if long else 64  # beyond, the library's larger tiles are as good
        faster = (MIN_LONG_ROWS if long else MIN_ROWS) <= rows <= most
    if not faster:
        return False
    config = cluster_config(rows, n, k, num_sms(device), gated, head_dim)
    return config is not None and loads(tile_kernel(config.tile), device)


def gate_up_takes_norm(rows: int, n: int, k: int) -> bool:
    """Whether ``cluster_gate_up`` with the norm taken in is faster than behind the norm's kernel. Where many programs
    square the same rows, or rows are many, its tensor cores wait for that."""
    return rows <= 64 and n * k <= LARGE_WEIGHT


@cache
def _plan(
    rows: int, lines: int, n: int, k: int, add: bool, gated: bool, head_dim: int, eps: float | None,
    config: ClusterConfig | None, device: torch.device,
) -> Plan:  # fmt: skip
    config = config or cluster_config(rows, lines, k, num_sms(device), gated, head_dim)
    assert config is not None
    tile = config.tile
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
    config: ClusterConfig | None = None,
) -> torch.Tensor:
    """x (t, k), weight (n or 2 * n, k), out (t, n) contiguous; ``features`` is n where out holds fewer of them."""
    if compiling():
        return out
    assert out.is_contiguous()
    (rows, k), n, head_dim = x.shape, features or out.shape[1], 0 if heads is None else heads.head_dim
    plan = _plan(rows, weight.shape[0], n, k, add, gated, head_dim, eps, config, x.device)
    launch(plan, x, weight, [out], heads_argument(heads))
    return out


def cluster_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (t, k), weight (n, k), both bfloat16; returns (t, n)."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out)


def cluster_gate_up(x: torch.Tensor, weight: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    """SiLU(gate) * up of ``cluster_linear``: weight (2 * n, k), gate's rows first; returns (t, n). With ``eps``, of
    the rows of x divided by their rms."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, gated=True, eps=eps)


def cluster_linear_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """``residual`` (t, n) += x @ weight.T, in place and rounded once; returns it."""
    return _launch(x, weight, residual, add=True)


def cluster_qkv(
    x: torch.Tensor,
    weight: torch.Tensor,
    heads: Heads,
    eps: float | None = None,
) -> torch.Tensor:
    """``qk_norm_rope_store`` of ``cluster_linear``: weight ((heads + 2 * kv heads) * head_dim, k); returns q (t, heads,
    head_dim). All of a head rotates; its dimension is 64 or 128. With ``eps`` as above."""
    out = torch.empty((x.shape[0], heads.num_heads, heads.head_dim), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, features=weight.shape[0], heads=heads, eps=eps)
