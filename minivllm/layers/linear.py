"""Linear layers that hold this rank's slice of a weight. Columns split the output, rows split the input.

A decoder's products come with what stands around them: columns with the norm before (``after_norm``), rows with the
residual addition behind (``add_to``), so that a few rows take one kernel each.

For many rows the norm's weight g can be folded into the product's: norm(x) @ w.T = (x @ (w * g).T) / rms(x). Then the
product reads x itself, and the kernel that reads the product divides it, and adds its bias (``unscaled``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from minivllm.core.parallel import TensorParallel
from minivllm.errors import ConfigError
from minivllm.kernels.capture import captured
from minivllm.kernels.packed_weights import PackedWeight
from minivllm.kernels.rms_norm import RowScale
from minivllm.kernels.skinny_linear import linear, linear_add, linear_into, norm_linear, norm_linear_unscaled
from minivllm.layers.norm import RMSNorm
from minivllm.layers.parameter import Piece, ShardId, sharded_parameter, split
from minivllm.layers.plain import is_plain

# So many tokens are summed over the ranks in halves, one beside the product of the other: a product of half of them is
# still as fast a token, which one of a quarter is not.
SUMMED_IN_HALVES = 4096


class LinearBase(nn.Module):
    """x (t, in) -> (t, out). ``weight`` is (out, in), as checkpoints hold it; ``packed_weight`` what it was when the
    model was loaded, for steps of few rows (``layers/packed.py``)."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    packed_weight: PackedWeight | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class ReplicatedLinear(LinearBase):
    """Every rank holds, and computes, the whole."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        shape = (out_features, in_features)
        self.weight = sharded_parameter(shape, {None: Piece(shape)})
        self.bias = sharded_parameter(shape[:1], {None: Piece(shape[:1])}) if bias else None


class _StackedLinear(LinearBase):
    """Checkpoint tensors stacked along the output. A part is (shard id, rows in all, first row, rows of this rank)."""

    _bias_comes_behind: ClassVar[bool] = False  # whoever reads the product unscaled adds the bias, too

    def __init__(self, in_features: int, parts: Sequence[tuple[ShardId, int, int, int]], bias: bool) -> None:
        super().__init__()
        weight: dict[ShardId, Piece] = {}
        biases: dict[ShardId, Piece] = {}
        offset = 0
        for shard_id, whole, start, size in parts:
            weight[shard_id] = Piece((whole, in_features), 0, start, size, offset)
            biases[shard_id] = Piece((whole,), 0, start, size, offset)
            offset += size
        self.weight = sharded_parameter((offset, in_features), weight)
        self.bias = sharded_parameter((offset,), biases) if bias else None
        self.folded = False  # the weight holds that of the norm in front

    @property
    def foldable(self) -> bool:
        """Whether to ``fold`` is sound and may pay. In float16 a product of what no norm has seen may overflow."""
        w = self.weight
        fits = w.is_cuda and w.dtype in (torch.bfloat16, torch.float32)
        return fits and self._may_fold() and type(self).after_norm is _StackedLinear.after_norm

    def _may_fold(self) -> bool:
        return self.bias is None or self._bias_comes_behind

    def fold(self, norm: RMSNorm) -> None:
        """Take in the weight of ``norm``, which becomes ones; again after either is loaded anew.

        Raises:
            ValueError: the norm is not RMSNorm's own, or the product adds a bias itself.
        """
        if not is_plain(norm, RMSNorm):
            raise ValueError(f"a {type(norm).__name__} with a forward or a hook of its own is folded into nothing")
        if not self._may_fold():
            raise ValueError("this product takes no norm in: its bias would be scaled with it")
        self.weight.data.copy_(self.weight.data * norm.weight.data.float())  # rounded once
        norm.weight.data.fill_(1.0)
        self.folded = True

    def after_norm(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """``self(norm(x))``."""
        if not goes_with(self, norm):
            return self(norm(x))
        return norm_linear(x, norm.weight, norm.eps, self.weight, self.bias)

    def unscaled(self, x: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, RowScale | None]:
        """``after_norm``, and what its rows are still to be multiplied by, if ``fold`` has left that to the caller."""
        if not self.folded or not goes_with(self, norm):
            return self.after_norm(x, norm), None
        return norm_linear_unscaled(x, norm.weight, norm.eps, self.weight, self.bias)


def goes_with(product: LinearBase, norm: RMSNorm) -> bool:
    """Whether one kernel may stand for the product behind the norm: neither has a forward of its own, or a hook."""
    return is_plain(product, LinearBase) and is_plain(norm, RMSNorm)


class ColumnParallelLinear(_StackedLinear):
    """(t, in) -> (t, out / tp)."""

    def __init__(
        self, in_features: int, out_features: int, tp: TensorParallel, *, bias: bool = False, what: str = "output size"
    ) -> None:
        size = split(what, out_features, tp)
        super().__init__(in_features, [(None, out_features, tp.rank * size, size)], bias)


class MergedColumnParallelLinear(_StackedLinear):
    """Several column-parallel weights in one product: (t, in) -> (t, sum(outs) / tp). Shard ids are 0, 1, …"""

    def __init__(
        self,
        in_features: int,
        outs: Sequence[int],
        tp: TensorParallel,
        *,
        bias: bool = False,
        what: str = "output size",
    ) -> None:
        sizes = [split(what, out, tp) for out in outs]
        parts = [(i, out, tp.rank * size, size) for i, (out, size) in enumerate(zip(outs, sizes, strict=True))]
        super().__init__(in_features, parts, bias)


class QKVParallelLinear(_StackedLinear):
    """Queries, keys and values in one product: (t, in) -> (t, (heads + 2 * kv heads) * head_dim) of this rank.

    Shard ids are "q", "k", "v". With more ranks than kv heads, several ranks hold the same kv head.
    """

    _bias_comes_behind = True

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        tp: TensorParallel,
        *,
        bias: bool = False,
    ) -> None:
        heads, kv_heads = split_heads(num_heads, num_kv_heads, tp)
        first_kv = tp.rank * num_kv_heads // tp.size  # ranks that share a kv head get the same one
        queries = (num_heads * head_dim, tp.rank * heads * head_dim, heads * head_dim)
        keys = (num_kv_heads * head_dim, first_kv * head_dim, kv_heads * head_dim)
        super().__init__(in_features, [("q", *queries), ("k", *keys), ("v", *keys)], bias)
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, head_dim


class RowParallelLinear(LinearBase):
    """(t, in / tp) -> (t, out), summed over the ranks. Rank 0 holds the bias, the others zeros: it is added once."""

    def __init__(
        self, in_features: int, out_features: int, tp: TensorParallel, *, bias: bool = False, what: str = "input size"
    ) -> None:
        super().__init__()
        self.tp = tp
        size = split(what, in_features, tp)
        piece = Piece((out_features, in_features), 1, tp.rank * size, size)
        self.weight = sharded_parameter((out_features, size), {None: piece})
        held = out_features if tp.rank == 0 else 0
        self.bias = sharded_parameter((out_features,), {None: Piece((out_features,), size=held)}) if bias else None
        self._add = self._add_whole if tp.size == 1 else self._add_part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(linear(x, self.weight, self.bias))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual + self(x)``, in place of residual (t, out), which every rank holds whole."""
        if not is_plain(self, RowParallelLinear):
            return residual.add_(self(x))
        return self._add(residual, x)

    def _add_whole(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return linear_add(x, self.weight, self.bias, residual)

    def _add_part(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        many = self.bias is None and x.shape[0] >= SUMMED_IN_HALVES
        if many and not captured(x):
            return self._add_halves(residual, x)
        return self.tp.all_reduce_add(residual, linear(x, self.weight, self.bias))

    def _add_halves(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Summed where the residual stands, so that nothing is added behind: rank 0 brings it in, the others overwrite
        theirs."""
        sums = []
        for part, rows in zip(residual.chunk(2), x.chunk(2), strict=True):
            if self.tp.rank == 0:
                self.add_own(part, rows)
            else:
                self.write(part, rows)
            sums.append(self.tp.start_all_reduce(part))
        for half in sums:
            half.wait()
        return residual

    def add_own(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add what this rank computes of very many rows, alone and without bias."""
        linear_add(x, self.weight, None, residual)

    def write(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """The same written to ``out`` instead."""
        linear_into(out, x, self.weight)


def split_heads(num_heads: int, num_kv_heads: int, tp: TensorParallel) -> tuple[int, int]:
    """(query heads, kv heads) of one rank. Raises ConfigError, with the numbers, where they cannot be split."""
    if num_heads % num_kv_heads:
        raise ConfigError(f"the model's {num_heads} attention heads do not divide into {num_kv_heads} kv heads")
    heads = split("attention heads", num_heads, tp)
    if num_kv_heads % tp.size and tp.size % num_kv_heads:
        raise ConfigError(
            f"tp={tp.size} neither divides nor is a multiple of the model's {num_kv_heads} kv heads; "
            f"use a tp that does, such as tp={num_kv_heads}"
        )
    return heads, max(1, num_kv_heads // tp.size)
