"""The gated feed-forward block: down(silu(gate(x)) * up(x)), gate and up in one product."""

from __future__ import annotations

import torch
from torch import nn

from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError
from minivllm.kernels.silu_mul import silu_mul
from minivllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear

ACTIVATIONS = {"silu": silu_mul, "swish": silu_mul}  # hidden_act: (t, 2 * i) -> (t, i), gate first


class GatedMLP(nn.Module):
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (t, hidden); returns the same shape."""
        return self.down_proj(self.activation(self.gate_up_proj(x)))
