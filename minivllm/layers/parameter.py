"""Parameters that know where a checkpoint's tensors go in them, so that packing and slicing need no table of names.

A layer describes its parameter as ``Piece``s; loading, shape checks and dummy weights all follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from minivllm.core.parallel import TensorParallel
from minivllm.errors import ConfigError

ShardId = str | int | None  # which part of a packed parameter: "q", "k", "v"; 0, 1; None for a parameter of one part


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor's place in a parameter: along ``dim``, ``start:start + size`` of it goes to ``offset``."""

    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    dim: int = 0
    start: int = 0
    size: int = -1  # -1: all of it
    offset: int = 0

    @property
    def length(self) -> int:
        return self.shape[self.dim] if self.size < 0 else self.size


def load_piece(param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId = None) -> None:
    """Copy this rank's slice of a checkpoint tensor into its place; converts dtype and device on the way."""
    piece: Piece = pieces_of(param)[shard_id]
    if tuple(loaded.shape) != piece.shape:
        raise ValueError(f"shape {tuple(loaded.shape)} where {piece.shape} is expected")
    source = loaded.narrow(piece.dim, piece.start, piece.length)
    param.data.narrow(piece.dim, piece.offset, piece.length).copy_(source)


def sharded_parameter(shape: Sequence[int], pieces: Mapping[ShardId, Piece]) -> nn.Parameter:
    """A parameter of ``shape`` (this rank's) on the current device that takes ``pieces``."""
    param = nn.Parameter(torch.empty(tuple(shape)), requires_grad=False)
    param.pieces = dict(pieces)  # type: ignore[attr-defined]
    param.weight_loader = load_piece  # type: ignore[attr-defined]
    if not param.is_meta:
        zero_uncovered(param)
    return param


def pieces_of(param: nn.Parameter) -> dict[ShardId, Piece]:
    """A parameter's pieces; one that no layer of ours made is one whole piece."""
    pieces = getattr(param, "pieces", None)
    return {None: Piece(tuple(param.shape))} if pieces is None else pieces


def zero_uncovered(param: nn.Parameter) -> None:
    """Rows that no checkpoint tensor fills (a padded vocabulary, another rank's bias) are zero."""
    if sum(p.length for p in pieces_of(param).values()) < param.shape[next(iter(pieces_of(param).values())).dim]:
        param.data.zero_()


def split(what: str, count: int, tp: TensorParallel) -> int:
    """This rank's share of ``count``. Raises ConfigError where it does not divide."""
    if count % tp.size:
        fitting = [n for n in range(1, min(count, 64) + 1) if count % n == 0]
        raise ConfigError(
            f"tp={tp.size} does not divide the model's {what} ({count}); use tp={' or '.join(map(str, fitting))}"
        )
    return count // tp.size
