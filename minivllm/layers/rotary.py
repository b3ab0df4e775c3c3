"""Rotary position embeddings (RoPE): a table of cosines and sines that layers share, with RoPE scaling for long
contexts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from minivllm.core.model_config import ModelConfig
from minivllm.errors import CheckpointError


class RotaryTable(nn.Module):
    """``cos_sin``: (positions, rot_dim) float32; the first half cosines, the second half sines.

    All layers of a model share one table, except those that use ``other``. It has no parameters and is built once the
    weights are on their device.
    """

    cos_sin: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.others = nn.ModuleList()  # so that they are built, too
        frequencies(config)  # refuses an unknown rope_type before any weight is loaded

    def other(self, rope: Mapping[str, Any]) -> RotaryTable:
        """The table for other ``rope_parameters``, as config.json has them: the same one for all layers that ask.

        Raises:
            CheckpointError: one of them is invalid.
        """
        config = self.config.with_rope(rope)
        for table in self.modules():
            if isinstance(table, RotaryTable) and table.config.rope_parameters == config.rope_parameters:
                return table
        self.others.append(made := RotaryTable(config))
        return made

    def build(self, num_positions: int, device: torch.device | str) -> None:
        """Compute the table for positions [0, num_positions)."""
        with torch.device("cpu"):  # the same bits on every device
            inv_freq, factor = frequencies(self.config)
            angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq  # (positions, rot_dim / 2)
            table = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
        self.cos_sin = table.to(device)


def frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """(inverse frequencies (rot_dim / 2,) float32, the factor on cosines and sines)."""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"rope_parameters of {config.architecture} differ by layer type; that is not supported")
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"rope_type={kind!r} is not supported; known are {', '.join(ROPE_TYPES)}")
    scale, needed = ROPE_TYPES[kind]
    missing = [key for key in needed if rope.get(key) is None]
    if missing:
        raise CheckpointError(f"rope_type={kind!r} needs {', '.join(missing)} in config.json's rope_parameters")
    rot_dim = int(config.head_dim * float(rope.get("partial_rotary_factor", 1.0)))
    if rot_dim % 2 or not 0 < rot_dim <= config.head_dim:
        raise CheckpointError(f"rotary dimension {rot_dim} must be even and at most head_dim={config.head_dim}")
    exponents = torch.arange(0, rot_dim, 2, dtype=torch.float32, device="cpu") / rot_dim
    return scale(1.0 / (float(rope["rope_theta"]) ** exponents), config)


def _default(inv_freq: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, float]:
    return inv_freq, 1.0


def _linear(inv_freq: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, float]:
    """All positions are divided by ``factor``."""
    return inv_freq / float(config.rope_parameters["factor"]), 1.0


def _llama3(inv_freq: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Long wavelengths are scaled by ``factor``, short ones kept, and those between interpolated."""
    rope = config.rope_parameters
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = _original_length(config) * inv_freq / (2 * math.pi)  # rotations within the original context
    if high == low:
        kept = (turns >= high).float()
    else:
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * kept + inv_freq / float(rope["factor"]) * (1 - kept), 1.0


def _yarn(inv_freq: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Dimensions with many rotations are kept, those with few are scaled, with a ramp between; longer contexts also
    sharpen the attention, by a factor on cosines and sines."""
    rope, half = config.rope_parameters, len(inv_freq)
    original = _original_length(config)
    factor = float(rope.get("factor") or config.max_position / original)
    base = float(rope["rope_theta"])

    def dimension(turns: float) -> float:  # the one with this many rotations in the original context
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    low, high = dimension(float(rope.get("beta_fast") or 32)), dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 0.001
    squeezed = ((torch.arange(half, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    return inv_freq * (1 - squeezed) + inv_freq / factor * squeezed, _yarn_attention_factor(config, factor)


def _yarn_attention_factor(config: ModelConfig, factor: float) -> float:
    rope = config.rope_parameters
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(float(rope["mscale"])) / mscale(float(rope["mscale_all_dim"]))
    return mscale(1.0)


def _original_length(config: ModelConfig) -> int:
    return int(config.rope_parameters.get("original_max_position_embeddings") or config.max_position)


_Scale = Callable[[torch.Tensor, ModelConfig], tuple[torch.Tensor, float]]
ROPE_TYPES: dict[str, tuple[_Scale, tuple[str, ...]]] = {  # rope_type: (its function, the config keys it requires)
    "default": (_default, ()),
    "linear": (_linear, ("factor",)),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
    "yarn": (_yarn, ()),
}
