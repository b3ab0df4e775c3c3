"""The gated MLP block: x + down(silu(gate(norm(x))) * up(norm(x))), gate and up in one matmul."""

from __future__ import annotations

import torch
from torch import nn

from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError
from minivllm.kernels.linear.fp8_linear import fp8_gate_up, fp8_gate_up_rows, quantize
from minivllm.kernels.linear.persistent_linear import persistent_gate_up, use_persistent
from minivllm.kernels.linear.products import norm_gate_up
from minivllm.kernels.silu_mul import silu_mul
from minivllm.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    RowParallelLinear,
    adds_as_usual,
    goes_with,
)
from minivllm.layers.norm import RMSNorm
from minivllm.layers.parts import PartedStream
from minivllm.layers.plain import is_plain

ACTIVATIONS = {"silu": norm_gate_up, "swish": norm_gate_up}  # hidden_act: norm, gate and up, activation


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) of the normalized stream, added to the stream; gate and up are one matmul. Raises
    CheckpointError for an unknown activation."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        if config.hidden_act not in ACTIVATIONS:
            raise CheckpointError(
                f"hidden_act={config.hidden_act!r} of {config.architecture} is not supported; "
                f"the gated MLP knows {', '.join(ACTIVATIONS)}"
            )
        self.activation = ACTIVATIONS[config.hidden_act]
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        what = "intermediate_size"
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], tp, bias=bias, what=what)
        self.down_proj = RowParallelLinear(inner, hidden, tp, bias=bias, what=what)

    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """x: (t, hidden), the residual stream, to which the block's output is added in place."""
        up, down = self.gate_up_proj, self.down_proj
        if self._in_fp8(norm) and adds_as_usual(down) and down.weight_scale is not None:
            rows = quantize(x, norm.weight, norm.eps)
            assert up.weight_scale is not None
            return down.add_to(x, fp8_gate_up_rows(rows, up.weight, up.weight_scale, up.bias))
        return down.add_to(x, self._activated(x, norm))

    def takes_fp8(self) -> bool:
        """Whether gate and up may be in float8, or have adapters: an activation of one's own reads their weight
        itself."""
        return self.activation is norm_gate_up

    def in_parts(self, stream: PartedStream, norm: RMSNorm, eps: float) -> None:
        """``forward`` in parts (``layers/fused.py``); returns with sums in flight. ``eps``: of the next norm."""
        up = self.gate_up_proj
        product = (stream.shape[0], *up.weight.shape, up.weight.dtype, up.weight.device)
        waits = stream.under_way and up.folded and self.activation is norm_gate_up
        if waits and use_persistent(*product, gated=True, parts=True):
            x, factors, arrival = stream.hand_over(norm.eps)
            y = persistent_gate_up(x, up.weight, factors, arrival=arrival)
            stream.add(self.down_proj, [y[part.rows] for part in stream.parts], eps)
            return
        ys = {part.rank: self._activated(x, norm) for part, x in stream.arriving()}
        stream.add(self.down_proj, [ys[part.rank] for part in stream.parts], eps)

    def _in_fp8(self, norm: RMSNorm) -> bool:
        """Whether gate and up are in float8, and nobody has a forward or a hook of their own."""
        up = self.gate_up_proj
        usual = self.takes_fp8() and up.weight_scale is not None
        return usual and is_plain(up, LinearBase) and is_plain(norm, RMSNorm)

    def _activated(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        up = self.gate_up_proj
        if self._in_fp8(norm):
            assert up.weight_scale is not None
            return fp8_gate_up(quantize(x, norm.weight, norm.eps), up.weight, up.weight_scale, up.bias)
        if self.activation is norm_gate_up and not goes_with(up, norm):
            y, scale = up.unscaled(x, norm)
            return silu_mul(y, scale)
        if up.weight_scale is not None:
            raise TypeError("an activation of one's own gets the weight of gate and up, which quantization=fp8 changes")
        return self.activation(x, norm.weight, norm.eps, up.weight, up.bias, up.folded)
