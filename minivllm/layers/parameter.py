"""Parameters that know where a checkpoint's tensors go in them, so that stacking and sharding need no name tables.

A layer describes its parameter as ``Piece``s; loading, shape checks and dummy weights all follow from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
    """A checkpoint tensor's place in a parameter: its ``start:start + size`` along ``dim`` goes to ``offset``; in a
    parameter that stacks such tensors, (items, …), of ``item``."""

    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    dim: int = 0
    start: int = 0
    size: int = -1  # -1: all of it
    offset: int = 0
    item: int | None = None  # None: the parameter is no stack

    @property
    def length(self) -> int:
        return self.shape[self.dim] if self.size < 0 else self.size

    @property
    def numel(self) -> int:
        """How many elements of the parameter it fills."""
        return self.length * math.prod(self.shape[: self.dim]) * math.prod(self.shape[self.dim + 1 :])


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
        _place(param.data, piece).copy_(source)


def keep_in_fp8(param: nn.Parameter) -> None:
    """For a parameter that ``has_whole_rows`` and is not allocated yet: keep it in float8_e4m3fn, with ``param.scale``,
    one number per row, (*shape[:-1],) float32. It is still loaded from tensors of the model's dtype."""
    param.kept_in = FP8  # type: ignore[attr-defined]


def has_whole_rows(param: nn.Parameter) -> bool:
    """Whether ``load_piece`` fills all of a matrix, or of several, by pieces that are whole rows, so that each row can
    have a scale."""
    pieces = pieces_of(param).values()
    if param.dim() < 2 or any(its.dim == len(its.shape) - 1 and its.length < param.shape[-1] for its in pieces):
        return False
    return _covered(param) == param.numel() and getattr(param, "weight_loader", load_piece) is load_piece


def scales_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, scales) of each parameter that is kept in float8, from the modules that multiply by them."""
    for path, owner in module.named_modules():
        for name, param in owner.named_parameters(recurse=False):
            scale = vars(owner).get(f"{name}_scale")
            if param.dtype == FP8 and scale is not None:  # else it is something else of that name
                yield f"{path}.{name}".removeprefix("."), scale


def allocate(meta: nn.Parameter, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    """A parameter on ``device`` with the attributes of one on the meta device, of ``dtype`` unless it says another."""
    kept_in = getattr(meta, "kept_in", dtype)
    param = nn.Parameter(torch.empty(meta.shape, dtype=kept_in, device=device), requires_grad=False)
    param.__dict__.update(meta.__dict__)
    if kept_in == FP8:
        unloaded = torch.full(param.shape[:-1], float("nan"), dtype=torch.float32, device=device)
        param.scale = unloaded  # type: ignore[attr-defined]
        param.loaded_dtype = dtype  # type: ignore[attr-defined]
    zero_uncovered(param)
    return param


def _store_fp8(param: nn.Parameter, piece: Piece, source: torch.Tensor) -> None:
    if source.device != param.device:  # by a copy of the kind that PinnedUpload does
        source = torch.empty(source.shape, dtype=source.dtype, device=param.device).copy_(source)
    values, scales, _ = quantize(source.flatten(0, -2))
    _place(param.data, piece).copy_(values.view(source.shape))
    _place(param.scale, piece).copy_(scales.view(source.shape[:-1]))  # type: ignore[attr-defined]


def _place(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """What a piece fills of a parameter, or of its scales, which lack the last dimension: those of whole rows."""
    own = tensor if piece.item is None else tensor[piece.item]
    return own if piece.dim == own.dim() else own.narrow(piece.dim, piece.offset, piece.length)


def sharded_parameter(
    shape: Sequence[int], pieces: Mapping[ShardId, Piece], *, may_be_fp8: bool = False
) -> nn.Parameter:
    """A parameter of this rank's ``shape`` on the current device, made up of ``pieces``.

    ``may_be_fp8``: with ``quantization=fp8`` it is of float8_e4m3fn, if its pieces are whole rows. Its module, whose
    attribute NAME it is, then has NAME_scale, (*shape[:-1],) float32, and multiplies each row by that.
    """
    param = nn.Parameter(torch.empty(tuple(shape)), requires_grad=False)
    param.pieces = dict(pieces)  # type: ignore[attr-defined]
    param.may_be_fp8 = may_be_fp8  # type: ignore[attr-defined]
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
    if _covered(param) < param.numel():
        param.data.zero_()


def _covered(param: nn.Parameter) -> int:
    return sum(piece.numel for piece in pieces_of(param).values())


def split(what: str, count: int, tp: TensorParallel) -> int:
    """This rank's share of ``count``. Raises ConfigError if it is not divisible by the number of ranks."""
    if count % tp.size:
        fitting = [n for n in range(1, min(count, 64) + 1) if count % n == 0]
        raise ConfigError(
            f"tp={tp.size} does not divide the model's {what} ({count}); use tp={' or '.join(map(str, fitting))}"
        )
    return count // tp.size
