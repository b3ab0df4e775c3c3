"""Linear layers whose weight nobody but their base class reads: only those may keep it otherwise, or add to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from torch import nn

from minivllm.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from minivllm.layers.mlp import GatedMLP

_KINDS = (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear)  # no routers
# What may read the weight itself.
_READERS = ("forward", "after_norm", "unscaled", "add_to", "add_own", "write")


def usual_products(model: nn.Module) -> Iterator[tuple[str, LinearBase]]:
    """Each such layer of the model, with its path. Left out are those that override any of ``_READERS``, and gate and
    up of an MLP whose activation gets their weight."""
    own = {mlp.gate_up_proj for mlp in model.modules() if isinstance(mlp, GatedMLP) and not mlp.takes_fp8()}
    for path, module in model.named_modules():
        if module not in own and _leaves_it_to_base(module):
            yield path, module


def _leaves_it_to_base(module: nn.Module) -> TypeGuard[LinearBase]:
    base = next((kind for kind in _KINDS if isinstance(module, kind)), None)
    return base is not None and all(getattr(type(module), name, None) is getattr(base, name, None) for name in _READERS)
