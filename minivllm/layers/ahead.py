"""Which weight is read next: a sum over the ranks leaves memory idle, and can bring that weight near meanwhile."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from minivllm.layers.linear import LinearBase, RowParallelLinear


def link_ahead(module: nn.Module) -> None:
    """Tell every RowParallelLinear in ``module`` which linear comes next, in the order in which they were made.

    Where they run in another order, sums stay right and fetch in vain; the last one fetches nothing.
    """
    linears = [m for m in module.modules() if isinstance(m, LinearBase)]
    for one, following in pairwise(linears):
        if isinstance(one, RowParallelLinear):
            one.is_followed_by(following)
