"""The products that layers call, with the norm before and the addition or SiLU * up after: chooses a kernel for each.

``skinny_linear`` for 1 to 8 rows, or 16. Otherwise, where faster: ``cluster_linear`` for 9 to 256 rows, and for fewer
with long or large weights; ``persistent_linear`` for gate and up of 1,024 rows and more, or with large weights. All
else, and other devices, use the library. For weights in FP8, ``fp8_linear`` chooses.
"""

import torch
from torch.nn import functional as F

from minivllm.kernels.linear.cluster_linear import MIN_ROWS as MIN_CLUSTER_ROWS
from minivllm.kernels.linear.cluster_linear import (
    cluster_gate_up,
    cluster_linear,
    cluster_linear_add,
    gate_up_takes_norm,
    use_cluster,
)
from minivllm.kernels.linear.persistent_linear import persistent_gate_up, use_persistent
from minivllm.kernels.linear.skinny_linear import (
    linear_add_reference,
    linear_add_triton,
    linear_triton,
    norm_gate_up_reference,
    norm_gate_up_triton,
    norm_linear_triton,
    use_skinny,
)
from minivllm.kernels.rms_norm import RowScale, rms_norm, row_factors
from minivllm.kernels.silu_mul import silu_mul

# Dividing by a row's rms may be left to whoever reads the product, which must then read the row of x as well, sometimes
# several times. With more rows, or longer ones, that costs more than the norm's kernel.
MAX_UNSCALED_ROWS, MAX_UNSCALED_SIZE = 1024, 2048


def _few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False) -> bool:
    rows = x.shape[0]
    if not use_skinny(rows, weight.shape[0], weight.shape[1], x.dtype, x.device):
        return False
    return rows <= 2 or bias is not None or not _some_rows(x, weight, gated)


def _some_rows(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> bool:
    return use_cluster(x.shape[0], weight.shape[0], weight.shape[1], x.dtype, x.device, gated=gated)


def _many_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product alone, for more rows than ``skinny_linear`` supports."""
    if bias is None and _some_rows(x, weight):
        return cluster_linear(x, weight)
    return F.linear(x, weight, bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (t, k), weight (n, k); returns (t, n)."""
    if _few_rows(x, weight, bias):
        return linear_triton(x, weight, bias)
    return _many_rows(x, weight, bias)


def linear_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """``linear`` for very many rows, written to ``out`` (t, n)."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def norm_linear(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``linear(rms_norm(x), weight, bias)``: x (t, k), norm_weight (k,), weight (n, k); returns (t, n)."""
    if _few_rows(x, weight, bias):
        return norm_linear_triton(x, norm_weight, eps, weight, bias)
    return _many_rows(rms_norm(x, norm_weight, eps), weight, bias)


def norm_linear_unscaled(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, RowScale | None]:
    """``norm_linear`` if norm_weight is folded into weight, and is ones; also returns the scale and bias that are still
    to be applied to the rows, if any. Many rows then need no norm kernel; very many keep it, since it takes little
    beside the product."""
    some = MIN_CLUSTER_ROWS <= x.shape[0] <= MAX_UNSCALED_ROWS and x.shape[1] <= MAX_UNSCALED_SIZE
    if some and not _few_rows(x, weight, bias):
        return _many_rows(x, weight), RowScale(x, eps, bias)
    return norm_linear(x, norm_weight, eps, weight, bias), None


def norm_gate_up(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    folded: bool = False,
) -> torch.Tensor:
    """SiLU(gate) * up of ``norm_linear``: weight (2 * i, k), gate's rows first; returns (t, i). ``folded``: as above,
    without bias."""
    if _few_rows(x, weight, bias, gated=True):
        return norm_gate_up_triton(x, norm_weight, eps, weight, bias)
    if bias is None and _some_rows(x, weight, gated=True):
        if folded and gate_up_takes_norm(x.shape[0], weight.shape[0], weight.shape[1]):
            return cluster_gate_up(x, weight, eps)
        return cluster_gate_up(rms_norm(x, norm_weight, eps), weight)
    if bias is None and use_persistent(x.shape[0], weight.shape[0], weight.shape[1], x.dtype, x.device, gated=True):
        if folded:
            return persistent_gate_up(x, weight, row_factors(x, eps))
        return persistent_gate_up(rms_norm(x, norm_weight, eps), weight)
    if folded:
        return silu_mul(*norm_linear_unscaled(x, norm_weight, eps, weight))
    return norm_gate_up_reference(x, norm_weight, eps, weight, bias)


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """Add ``linear(x, weight, bias)`` to ``residual`` (t, n) in place; returns it."""
    if _few_rows(x, weight, bias):
        return linear_add_triton(x, weight, bias, residual)
    if bias is None and _some_rows(x, weight):
        return cluster_linear_add(x, weight, residual)
    return linear_add_reference(x, weight, bias, residual)
