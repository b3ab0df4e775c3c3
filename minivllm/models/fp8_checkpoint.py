"""Reads checkpoints whose weights are in FP8: each is multiplied by its scale, in float32, on the device.

What arrives in a model is as large and as fast as that of a checkpoint in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from minivllm.errors import CheckpointError
from minivllm.models.checkpoint import read_quantization
from minivllm.models.fp8_config import Fp8Config
from minivllm.models.loader import iterate_safetensors, shapes_of
from minivllm.models.lora import Adapter
from minivllm.naming import listed
from minivllm.rounding import cdiv

_FP8 = torch.float8_e4m3fn
_OTHER_FP8 = (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
# A weight's scale has its module's name and one of these. The weight is multiplied by either: "inv" says that it is the
# inverse of what the weight was multiplied by when it was made.
_SCALES = (".weight_scale", ".weight_scale_inv")
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
# Scales of activations, which get their own here, and of the cache, which has none. The weights do not depend on them.
_NOT_OF_WEIGHTS = (
    ".input_scale", ".input_scale_ub", ".output_scale", ".activation_scale",
    ".q_scale", ".k_scale", ".v_scale", ".kv_scale",
)  # fmt: skip


def float_weights(
    folder: Path, device: torch.device | str, adapter: Adapter | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor of a checkpoint; weights in FP8 become float32 on ``device``. An ``adapter`` is
    merged into them; if it does not fit, CheckpointError is raised before any is read."""
    config = read_quantization(folder)
    weights = dequantized(iterate_safetensors(folder), config, device)
    if adapter is None:
        return weights
    for _ in adapter.merge(dequantized(shapes_of(folder), config, "meta"), "meta"):
        pass
    return adapter.merge(weights, device)


def dequantized(
    weights: Iterable[tuple[str, torch.Tensor]], config: Fp8Config | None, device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight in FP8 times its scale, as float32 on ``device``; scales are left out, all else is as it was.

    A weight and its scale may come in any order and from any file: the first one waits for the other.

    Raises:
        CheckpointError: after the last tensor, naming each in FP8 that has no scale or one of another shape, each scale
            without such a weight, and everything in FP8 if there is no ``config``.
    """
    if config is None:
        yield from _without_fp8(weights)
        return
    waiting: dict[str, torch.Tensor] = {}
    scales: dict[str, tuple[str, torch.Tensor]] = {}  # by the weight's name
    others: list[str] = []
    misfits: list[str] = []
    for name, tensor in weights:
        owner = _weight_of(name)
        if owner != name:
            if owner in scales:
                misfits.append(f"{name} beside {scales[owner][0]}")
            scales[owner] = name, tensor
        elif tensor.dtype == _FP8:
            waiting[name] = tensor
        elif tensor.dtype in _OTHER_FP8:
            others.append(_with_dtype(name, tensor))
        elif not name.endswith(_NOT_OF_WEIGHTS):
            yield name, tensor
        if owner in waiting and owner in scales:
            weight, (scale_name, scale) = waiting.pop(owner), scales.pop(owner)
            if (fitting := _fitting(scale, weight, config)) is not None:
                yield owner, _product(weight, fitting, config, torch.device(device))
            else:
                misfits.append(_misfit(owner, weight, scale_name, scale, config))
    _refuse(
        {
            "in FP8 other than e4m3": others,
            "misshapen": misfits,
            "in FP8 without a scale": list(waiting),
            "without a weight in FP8": [name for name, _ in scales.values()],
        }
    )


def _refuse(problems: dict[str, list[str]]) -> None:
    """Raises CheckpointError if there is any."""
    found = [f"{len(names)} {what}: {listed(names)}" for what, names in problems.items() if names]
    if found:
        raise CheckpointError(
            f"the checkpoint's weights in FP8 and their scales do not fit: {'; '.join(found)}. Are all its files "
            "there, and is config.json, with its quantization_config, of this checkpoint?"
        )


def _without_fp8(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    found: list[str] = []
    for name, tensor in weights:
        if tensor.dtype == _FP8 or tensor.dtype in _OTHER_FP8:
            found.append(_with_dtype(name, tensor))
        else:
            yield name, tensor
    if found:
        raise CheckpointError(
            f"the checkpoint has {len(found)} tensors in FP8, and its config.json no quantization_config: "
            f"{listed(found)}; fetch config.json again, or use the model's bfloat16 or float16 checkpoint"
        )


def _weight_of(name: str) -> str:
    """The weight that a scale belongs to; other names as they are."""
    module, dot, leaf = name.rpartition(".")
    return f"{module}.weight" if dot + leaf in _SCALES else name


def _with_dtype(name: str, tensor: torch.Tensor) -> str:
    return f"{name} of dtype {str(tensor.dtype).removeprefix('torch.')}"


# --------------------------------------------------------------------------- one weight


def _fitting(scale: torch.Tensor, weight: torch.Tensor, config: Fp8Config) -> torch.Tensor | None:
    """The scale in float32, as (), (rows, 1) or (blocks of rows, blocks of columns), whichever its shape fits.

    None if it fits none; where it fits two, they are the same.
    """
    if scale.dtype not in _SCALE_DTYPES:
        return None
    shape, scale = tuple(scale.shape), scale.to(torch.float32)
    if weight.dim() == 2 and shape in ((len(weight),), (len(weight), 1)):
        return scale.reshape(-1, 1)
    if config.block and weight.dim() == 2 and shape == _num_blocks(weight, config.block):
        return scale
    return scale.reshape(()) if shape in ((), (1,)) else None


def _num_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[int, ...]:
    """Along rows and columns. The last ones may be smaller."""
    return tuple(cdiv(size, of) for size, of in zip(weight.shape, block, strict=True))


def _misfit(name: str, weight: torch.Tensor, scale_name: str, scale: torch.Tensor, config: Fp8Config) -> str:
    if scale.dtype not in _SCALE_DTYPES:
        return _with_dtype(scale_name, scale)
    fit = ["[1]"]
    if weight.dim() == 2:
        fit.append(f"[{len(weight)}, 1]")
        if config.block:
            fit.append(f"{list(_num_blocks(weight, config.block))} (blocks of {list(config.block)})")
    return f"{scale_name} {list(scale.shape)} where {name} {list(weight.shape)} takes {' or '.join(fit)}"


def _product(weight: torch.Tensor, scale: torch.Tensor, config: Fp8Config, device: torch.device) -> torch.Tensor:
    """``weight`` times what ``_fitting`` returned, in float32 on ``device``, where it goes as bytes."""
    if device.type != "cpu":  # by copies of the kind that PinnedUpload does
        weight, scale = (torch.empty_like(tensor, device=device).copy_(tensor) for tensor in (weight, scale))
    value = weight.to(torch.float32)
    if not scale.dim() or scale.shape == (len(value), 1):
        return value.mul_(scale)
    assert config.block is not None
    rows, columns = config.block
    factors = scale.repeat_interleave(columns, 1)[:, : value.shape[1]]  # (blocks of rows, columns)
    whole = len(value) // rows
    value[: whole * rows].view(whole, rows, value.shape[1]).mul_(factors[:whole, None])
    value[whole * rows :].mul_(factors[whole:])
    return value
