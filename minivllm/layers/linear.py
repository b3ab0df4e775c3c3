"""Tensor-parallel linear layers: each rank holds a slice. Column-parallel splits the output, row-parallel the input.

A decoder's matmuls are fused with their neighbours: column-parallel with the norm before (``after_norm``), row-parallel
with the residual addition after (``add_to``), so that each takes one kernel when there are few rows.

For many rows the norm's weight g can be folded into the matmul's: norm(x) @ w.T = (x @ (w * g).T) / rms(x). The matmul
then reads x itself, and the kernel that consumes its output divides by rms(x) and adds the bias (``unscaled``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple, TypeGuard

import torch
from torch import nn

from minivllm.core.parallel import TensorParallel
from minivllm.errors import ConfigError
from minivllm.kernels.capture import captured
from minivllm.kernels.linear.fp8_linear import Fp8Rows, fp8_linear, quantize
from minivllm.kernels.linear.packed_weights import PackedWeight
from minivllm.kernels.linear.products import (
    MAX_UNSCALED_ROWS,
    MAX_UNSCALED_SIZE,
    linear,
    linear_add,
    linear_into,
    norm_linear,
    norm_linear_unscaled,
)
from minivllm.kernels.rms_norm import RowScale
from minivllm.layers.adapters import LinearAdapters
from minivllm.layers.norm import RMSNorm
from minivllm.layers.parameter import Piece, ShardId, sharded_parameter, split
from minivllm.layers.plain import is_adapted, is_plain, is_plain_beside_adapters

# From this many tokens, the all-reduce runs in two halves, the first overlapping the matmul of the second: a matmul of
# half the tokens is still as fast per token; one of a quarter is not.
SUMMED_IN_HALVES = 4096


class LinearBase(nn.Module):
    """x (t, in) -> (t, out). ``weight`` is (out, in), as in checkpoints; ``packed_weight`` is a packed copy made at
    load time, for steps of few rows (``layers/packed.py``). If there is a ``weight_scale`` (out,) float32, by which it
    is still to be multiplied, ``weight`` is float8_e4m3fn (``layers/fp8.py``)."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    packed_weight: PackedWeight | None = None
    weight_scale: torch.Tensor | None = None
    adapters: LinearAdapters | None = None  # of requests; in steps that have any, ``is_plain`` is false

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x) if not is_adapted(self) else self._adapted(self._product, x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight_scale is not None:
            rows = quantize(x.flatten(0, -2))
            return fp8_linear(rows, self.weight, self.weight_scale, self.bias).unflatten(0, x.shape[:-1])
        return linear(x, self.weight, self.bias)

    def _adapted(self, product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """``product(x)``, to which the adapters of rows add theirs."""
        assert self.adapters is not None
        shrunk = self.adapters.shrink(x)
        y = product(x)
        self.adapters.expand(y, shrunk)
        return y


class ReplicatedLinear(LinearBase):
    """Every rank holds the whole weight and computes the whole output."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        shape = (out_features, in_features)
        self.weight = sharded_parameter(shape, {None: Piece(shape)})
        self.bias = sharded_parameter(shape[:1], {None: Piece(shape[:1])}) if bias else None


class _Rows(NamedTuple):
    """This rank's rows of a checkpoint's tensor."""

    whole: int  # the tensor's number of rows
    start: int
    size: int


class _StackedLinear(LinearBase):
    """Checkpoint tensors stacked along the output."""

    _bias_comes_behind: ClassVar[bool] = False  # whether the consumer of ``unscaled`` adds the bias

    def __init__(self, in_features: int, parts: Mapping[ShardId, _Rows], bias: bool) -> None:
        super().__init__()
        weight: dict[ShardId, Piece] = {}
        biases: dict[ShardId, Piece] = {}
        offset = 0
        for shard_id, (whole, start, size) in parts.items():
            weight[shard_id] = Piece((whole, in_features), 0, start, size, offset)
            biases[shard_id] = Piece((whole,), 0, start, size, offset)
            offset += size
        self.weight = sharded_parameter((offset, in_features), weight)
        self.bias = sharded_parameter((offset,), biases) if bias else None
        self.folded = False  # the preceding norm's weight is folded in
        self.folded_norm: torch.Tensor | None = None  # (in,) float32: that weight, for what is not folded, as adapters

    @property
    def foldable(self) -> bool:
        """Whether ``fold`` is sound and may pay off. In float16, a matmul of unnormalized x may overflow."""
        w = self.weight
        fits = w.is_cuda and w.dtype in (torch.bfloat16, torch.float32)
        return fits and self._may_fold() and type(self).after_norm is _StackedLinear.after_norm

    def _may_fold(self) -> bool:
        return self.bias is None or self._bias_comes_behind

    def fold(self, norm: RMSNorm) -> None:
        """Fold in the weight of ``norm``, which becomes ones. Call again after either is reloaded.

        Raises:
            ValueError: the norm is not a plain RMSNorm, or the matmul adds a bias itself.
        """
        if not is_plain(norm, RMSNorm):
            raise ValueError(f"a {type(norm).__name__} with a forward or a hook of its own is folded into nothing")
        if not self._may_fold():
            raise ValueError("this product takes no norm in: its bias would be scaled with it")
        its = norm.weight.data.to(torch.float32, copy=True)  # ones where it is folded in already
        self.folded_norm = its if self.folded_norm is None else self.folded_norm * its
        self.weight.data.copy_(self.weight.data * its)  # rounded once
        norm.weight.data.fill_(1.0)
        self.folded = True

    def after_norm(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """``self(norm(x))``."""
        if self.weight_scale is not None and is_plain(self, LinearBase) and is_plain(norm, RMSNorm):
            return fp8_linear(quantize(x, norm.weight, norm.eps), self.weight, self.weight_scale, self.bias)
        if not goes_with(self, norm):
            return self(norm(x))
        return norm_linear(x, norm.weight, norm.eps, self.weight, self.bias)

    def unscaled(self, x: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, RowScale | None]:
        """``after_norm``, and the scale its rows still need, if ``fold`` has left that to the caller."""
        if self.folded and is_adapted(self) and self._leaves_scale(x, norm):
            return self._adapted(lambda x: linear(x, self.weight), x), RowScale(x, norm.eps, self.bias)
        if not self.folded or not goes_with(self, norm):
            return self.after_norm(x, norm), None
        return norm_linear_unscaled(x, norm.weight, norm.eps, self.weight, self.bias)

    def _leaves_scale(self, x: torch.Tensor, norm: RMSNorm) -> bool:
        """Whether, with adapters, the caller scales rows: few and short ones."""
        few = x.shape[0] <= MAX_UNSCALED_ROWS and x.shape[1] <= MAX_UNSCALED_SIZE
        return few and is_plain_beside_adapters(self, LinearBase) and is_plain(norm, RMSNorm)


def goes_with(product: LinearBase, norm: RMSNorm) -> bool:
    """Whether one kernel may replace norm and matmul: neither overrides ``forward`` or has a hook, and the weight is as
    in the checkpoint."""
    return product.weight_scale is None and is_plain(product, LinearBase) and is_plain(norm, RMSNorm)


class ColumnParallelLinear(_StackedLinear):
    """(t, in) -> (t, out / tp)."""

    def __init__(
        self, in_features: int, out_features: int, tp: TensorParallel, *, bias: bool = False, what: str = "output size"
    ) -> None:
        size = split(what, out_features, tp)
        super().__init__(in_features, {None: _Rows(out_features, tp.rank * size, size)}, bias)


class MergedColumnParallelLinear(_StackedLinear):
    """Several column-parallel weights in one matmul: (t, in) -> (t, sum(outs) / tp). Shard ids are 0, 1, …"""

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
        rows = (_Rows(out, tp.rank * size, size) for out, size in zip(outs, sizes, strict=True))
        super().__init__(in_features, dict(enumerate(rows)), bias)


class QKVParallelLinear(_StackedLinear):
    """Queries, keys and values in one matmul: (t, in) -> (t, (heads + 2 * kv heads) * head_dim) for this rank.

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
        queries = _Rows(num_heads * head_dim, tp.rank * heads * head_dim, heads * head_dim)
        keys = _Rows(num_kv_heads * head_dim, first_kv * head_dim, kv_heads * head_dim)
        super().__init__(in_features, {"q": queries, "k": keys, "v": keys}, bias)
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, head_dim


class RowParallelLinear(LinearBase):
    """(t, in / tp) -> (t, out), all-reduced. Rank 0 holds the bias, the others zeros, so that it is added once."""

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
        return self.tp.all_reduce(super().forward(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """Add ``self(x)`` to residual (t, out) in place; every rank holds all of it. Returns residual. x may be rows of
        float8 if the weight is in it and the product ``adds_as_usual``."""
        if is_adapted(self) and is_plain_beside_adapters(self, RowParallelLinear):
            assert isinstance(x, torch.Tensor)
            return self._add_adapted(residual, x)
        if self.weight_scale is not None and is_plain(self, RowParallelLinear):
            rows = x if isinstance(x, Fp8Rows) else quantize(x)
            if self.tp.size == 1:
                return fp8_linear(rows, self.weight, self.weight_scale, self.bias, residual)
            return self.tp.all_reduce_add(residual, fp8_linear(rows, self.weight, self.weight_scale, self.bias))
        assert isinstance(x, torch.Tensor)
        if not is_plain(self, RowParallelLinear):
            return residual.add_(self(x))
        return self._add(residual, x)

    def _add_adapted(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.tp.size > 1:
            return self.tp.all_reduce_add(residual, super().forward(x))
        weight, scale = self.weight, self.weight_scale
        if scale is not None:
            return self._adapted(lambda x: fp8_linear(quantize(x), weight, scale, self.bias, residual), x)
        return self._adapted(partial(self._add_whole, residual), x)

    def _add_whole(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return linear_add(x, self.weight, self.bias, residual)

    def _add_part(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None and x.shape[0] >= SUMMED_IN_HALVES and not captured(x):
            return self._add_halves(residual, x)
        return self.tp.all_reduce_add(residual, super().forward(x))

    def _add_halves(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """All-reduce in the residual's memory, so that no addition follows: rank 0 adds to its residual, the others
        overwrite theirs."""
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
        """Add this rank's partial result to ``residual``, for very many rows, without bias or all-reduce."""
        linear_add(x, self.weight, None, residual)

    def write(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Write this rank's partial result to ``out``."""
        linear_into(out, x, self.weight)


def adds_as_usual(product: nn.Module) -> TypeGuard[RowParallelLinear]:
    """Whether it adds to the stream as ``RowParallelLinear`` does: no override or hook."""
    return is_plain(product, RowParallelLinear) and type(product).add_to is RowParallelLinear.add_to


def split_heads(num_heads: int, num_kv_heads: int, tp: TensorParallel) -> tuple[int, int]:
    """(query heads, kv heads) per rank. Raises ConfigError, with the numbers, if they cannot be split."""
    if num_heads % num_kv_heads:
        raise ConfigError(f"the model's {num_heads} attention heads do not divide into {num_kv_heads} kv heads")
    heads = split("attention heads", num_heads, tp)
    if num_kv_heads % tp.size and tp.size % num_kv_heads:
        raise ConfigError(
            f"tp={tp.size} neither divides nor is a multiple of the model's {num_kv_heads} kv heads; "
            f"use a tp that does, such as tp={num_kv_heads}"
        )
    return heads, max(1, num_kv_heads // tp.size)
