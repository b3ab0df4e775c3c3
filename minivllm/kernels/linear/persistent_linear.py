"""Linear layers with an epilogue on Hopper, for about a thousand rows or more: SiLU(gate) * up, or the norm of queries
and keys, rotary embedding and cache write. The product's rows may first be multiplied by a factor each
(``row_factors``: the norm in front, if its weight is folded into the product's). Rows and factors may still be arriving
from other ranks, part by part (``exchange.Arrival``): tiles whose rows are there come first. Also SiLU(gate) * up for
65 to 192 rows and large weights.

The kernel is CUDA C++ (``persistent_linear.cu``): one program per SM, alone or in clusters of two, loops over tiles of
128 or 192 rows by up to 256 lines (rows of the weight); structured like CUTLASS's warp-specialized GEMMs (NVIDIA,
2023). It saves writing the product and reading it again: for 8,192 tokens of Qwen3-0.6B 151 MB after gate and up, 134
MB after qkv, 35 and 31 µs at 4.3 TB/s. Floor: 2 * t * n * k operations; gate and up 103 GFLOP, 129 µs at 800 TFLOP/s.
For few rows the weight's bytes: Qwen3-14B's gate and up 356 MB, 85 µs at 4.2 TB/s.
"""

import ctypes
from functools import lru_cache

import torch

from minivllm.kernels import nvrtc
from minivllm.kernels._triton import compiling, num_sms
from minivllm.kernels.attention.rotary import Heads
from minivllm.kernels.collectives.exchange import Arrival
from minivllm.kernels.hopper import STEP, Plan, compile_ahead, heads_argument, launch_product, loads, plan_of
from minivllm.kernels.linear.persistent_config import GRID, UNIT, Cut, cut_kernel, parts_cut, persistent_cut
from minivllm.kernels.pdl import use_pdl
from minivllm.rounding import cdiv

HEAD_DIMS = (64, 128)  # of heads that it can norm, rotate and store


def use_persistent(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    gated: bool = False,
    head_dim: int = 0,
    parts: bool = False,
) -> bool:
    """Whether this is faster for (rows, k) @ (n, k).T and its epilogue than separate kernels; the only place that
    decides. ``parts``: the rows are still to arrive."""
    if dtype != torch.bfloat16 or n % (head_dim or 16) or k % 8 or not nvrtc.available(device):
        return False
    sms = num_sms(device)
    cut = parts_cut(rows, n, sms) if parts else persistent_cut(rows, n, k, sms, gated)
    if cut is None:
        return False
    return loads(cut_kernel(cut, gated, head_dim, parts), device)


def compile_for_parts(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Start compiling the kernels that a model may need for rows that are still to arrive."""
    if dtype == torch.bfloat16 and nvrtc.available(device):
        for gated, dim in ((True, 0), *([(False, head_dim)] if head_dim in HEAD_DIMS else [])):
            compile_ahead(cut_kernel(GRID, gated, dim, parts=True))


class ArrivalArgument(ctypes.Structure):
    """``Arrival`` of persistent_linear.cu."""

    _fields_ = [("arrived", ctypes.c_void_p), *((name, ctypes.c_int) for name in ("number", "rank", "ranks", "each"))]


@lru_cache(maxsize=1024)  # prompt steps may have any number of rows
def _plan(
    rows: int, lines: int, n: int, k: int, gated: bool, head_dim: int, parts: bool, cut: Cut | None,
    device: torch.device,
) -> Plan:  # fmt: skip
    sms = num_sms(device)
    cut = cut or persistent_cut(rows, lines, k, sms, gated) or GRID
    clusters, box_rows, narrow = sms // cut.sharing, cut.rows, cut.lines // 2
    if cut.rounds:
        assert gated and rows <= cut.rows and lines <= cut.rounds * cut.lines * clusters
        clusters = min(clusters, lines // UNIT)
        box_rows = 8 * cdiv(rows, 8)  # TMA writes rows in eights
        narrow = max(cut.lines - UNIT, UNIT) // 2  # of a round with one unit less
    else:
        clusters = min(clusters, cdiv(rows, 2 * cut.rows) * cdiv(lines, cut.lines))
    shape = nvrtc.LaunchShape(
        (cut.sharing * clusters, 1, 1), (cut.sharing, 1, 1), cut.threads, cut.shared_bytes, use_pdl(device)
    )
    boxes, ints = (cut.lines // 2, narrow, box_rows), (rows, n, cdiv(k, STEP), box_rows, cut.rounds)
    return plan_of(cut_kernel(cut, gated, head_dim, parts), device, shape, boxes, ints)


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
    cut: Cut | None = None,
    arrival: Arrival | None = None,
) -> None:
    """x (t, k), weight (n or 2 * n, k), factors (t,) float32; ``kept`` as in ``heads_argument``."""
    if compiling():
        return
    assert out.is_contiguous()
    (rows, k), head_dim = x.shape, 0 if heads is None else heads.head_dim
    structures: list[ctypes.Structure] = [heads_argument(heads, kept)]
    if arrival is not None:
        assert arrival.part_rows % (2 * GRID.rows) == 0 and arrival.arrived.is_contiguous()
        cut, ranks = GRID, len(arrival.arrived)
        structures.append(
            ArrivalArgument(arrival.arrived.data_ptr(), arrival.number, arrival.rank, ranks, arrival.part_rows)
        )
    plan = _plan(rows, weight.shape[0], n, k, gated, head_dim, arrival is not None, cut, x.device)
    launch_product(plan, x, weight, [out, factors], *structures)


def persistent_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    factors: torch.Tensor | None = None,
    cut: Cut | None = None,
    *,
    arrival: Arrival | None = None,
) -> torch.Tensor:
    """SiLU(gate) * up by ``persistent_linear``: weight (2 * n, k), gate's rows first; returns (t, n). With ``arrival``
    it waits for x and the factors, part by part; each part must have rows."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, out.shape[1], factors, gated=True, cut=cut, arrival=arrival)
    return out


def persistent_qkv(
    x: torch.Tensor,
    weight: torch.Tensor,
    heads: Heads,
    factors: torch.Tensor | None = None,
    *,
    keep: bool = False,
    arrival: Arrival | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """``qk_norm_rope_store`` by ``persistent_linear``: weight ((heads + 2 * kv heads) * head_dim, k). Returns q (t,
    heads, head_dim) and, with ``keep``, k and v (t, kv heads, head_dim) as they are in the cache. The whole head
    rotates; its dimension is one of ``HEAD_DIMS``. ``arrival`` as above."""
    t, kv_heads = x.shape[0], heads.num_kv_heads
    q = torch.empty((t, heads.num_heads, heads.head_dim), dtype=x.dtype, device=x.device)
    kept = torch.empty((t, 2 * kv_heads, heads.head_dim), dtype=x.dtype, device=x.device) if keep else None
    _launch(x, weight, q, weight.shape[0], factors, heads=heads, kept=kept, arrival=arrival)
    return (q, None, None) if kept is None else (q, kept[:, :kv_heads], kept[:, kv_heads:])
