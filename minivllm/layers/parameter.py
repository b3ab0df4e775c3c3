"""Parameters that know where a checkpoint's tensors go in them, so that stacking and sharding need no name tables.

A layer describes its parameter as ``Piece``s; loading, shape checks and dummy weights all follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from minivllm.core.parallel import TensorParallel
from minivllm.errors import ConfigError
from minivllm.kernels.linear.fp8_linear import FP8, quantize

# The part of a stacked parameter: "q", "k", "v"; 0, 1. None: the only part, or all parts, stacked.
ShardId = str | int | None


@dataclass(frozen=True, slots=True)
class Piece:
    """A checkpoint tensor's place in a parameter: its ``start:start + size`` along ``dim`` goes to ``offset``."""

    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    dim: int = 0
    start: int = 0
    size: int = -1  # -1: all of it
    offset: int = 0

    @property
    def length(self) -> int:
        return self.shape[self.dim] if self.size < 0 else self.size


def load_piece(param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId = None) -> None:
    """Copy this rank's slice of a checkpoint tensor into its place, converting dtype and device; to float8 with a scale
    per row (``keep_in_fp8``)."""
    pieces, piece = pieces_of(param), whole_of(param, shard_id)
    if tuple(loaded.shape) != piece.shape:
        raise ValueError(f"shape {tuple(loaded.shape)} where {piece.shape} is expected")
    if shard_id not in pieces:
        for part, tensor in zip(pieces, loaded.split([its.shape[0] for its in pieces.values()]), strict=True):
            load_piece(param, tensor, part)
        return
    source = loaded.narrow(piece.dim, piece.start, piece.length)
    if param.dtype == FP8:
        _store_fp8(param, piece, source)
    else:
        param.data.narrow(piece.dim, piece.offset, piece.length).copy_(source)


def keep_in_fp8(param: nn.Parameter) -> None:
    """For a matrix that ``has_whole_rows`` and is not allocated yet: keep it in float8_e4m3fn, with ``param.scale``
    (rows,) float32. It is still loaded from tensors of the model's dtype."""
    param.kept_in = FP8  # type: ignore[attr-defined]


def has_whole_rows(param: nn.Parameter) -> bool:
    """Whether ``load_piece`` fills all of a matrix by pieces that are whole rows, so that each row can have a scale."""
    pieces = pieces_of(param).values()
    by_rows = param.dim() == 2 and all(piece.dim == 0 or piece.length == param.shape[1] for piece in pieces)
    by_rows = by_rows and sum(len(param) if piece.dim else piece.length for piece in pieces) == len(param)
    return by_rows and getattr(param, "weight_loader", load_piece) is load_piece


def allocate(meta: nn.Parameter, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    """A parameter on ``device`` with the attributes of one on the meta device, of ``dtype`` unless it says another."""
    kept_in = getattr(meta, "kept_in", dtype)
    param = nn.Parameter(torch.empty(meta.shape, dtype=kept_in, device=device), requires_grad=False)
    param.__dict__.update(meta.__dict__)
    if kept_in == FP8:
        unloaded = torch.full((len(param),), float("nan"), dtype=torch.float32, device=device)
        param.scale = unloaded  # type: ignore[attr-defined]
        param.loaded_dtype = dtype  # type: ignore[attr-defined]
    zero_uncovered(param)
    return param


def _store_fp8(param: nn.Parameter, piece: Piece, source: torch.Tensor) -> None:
    rows = slice(piece.offset, piece.offset + piece.length) if piece.dim == 0 else slice(None)
    if source.device != param.device:  # by a copy of the kind that PinnedUpload does
        source = torch.empty(source.shape, dtype=source.dtype, device=param.device).copy_(source)
    values, scales, _ = quantize(source)
    param.data[rows] = values
    param.scale[rows] = scales  # type: ignore[attr-defined]


def sharded_parameter(shape: Sequence[int], pieces: Mapping[ShardId, Piece]) -> nn.Parameter:
    """A parameter of this rank's ``shape`` on the current device, made up of ``pieces``."""
    param = nn.Parameter(torch.empty(tuple(shape)), requires_grad=False)
    param.pieces = dict(pieces)  # type: ignore[attr-defined]
    param.weight_loader = load_piece  # type: ignore[attr-defined]
    if not param.is_meta:
        zero_uncovered(param)
    return param


def pieces_of(param: nn.Parameter) -> dict[ShardId, Piece]:
    """A parameter's pieces; a parameter not made by ``sharded_parameter`` is one whole piece."""
    pieces = getattr(param, "pieces", None)
    return {None: Piece(tuple(param.shape))} if pieces is None else pieces


def whole_of(param: nn.Parameter, shard_id: ShardId) -> Piece:
    """The piece ``shard_id``; for None in a stacked parameter, all its parts in order as one tensor."""
    pieces = pieces_of(param)
    if shard_id in pieces:
        return pieces[shard_id]
    assert shard_id is None
    first, *others = pieces.values()
    return Piece((first.shape[0] + sum(its.shape[0] for its in others), *first.shape[1:]))


def zero_uncovered(param: nn.Parameter) -> None:
    """Zero the rows that no checkpoint tensor fills (vocabulary padding, another rank's bias)."""
    if sum(p.length for p in pieces_of(param).values()) < param.shape[next(iter(pieces_of(param).values())).dim]:
        param.data.zero_()


def split(what: str, count: int, tp: TensorParallel) -> int:
    """This rank's share of ``count``. Raises ConfigError if it is not divisible by the number of ranks."""
    if count % tp.size:
        fitting = [n for n in range(1, min(count, 64) + 1) if count % n == 0]
        raise ConfigError(
            f"tp={tp.size} does not divide the model's {what} ({count}); use tp={' or '.join(map(str, fitting))}"
        )
    return count // tp.size
