"""What dense decoders share: the stack of layers, and the language-model head on top.

A model file subclasses ``DecoderLayer`` (``layers/decoder_layer.py``) for what is specific to it, and names that class
in its ``CausalLM``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import nn

from minivllm.core.interfaces import AttentionBackend, Model
from minivllm.core.model_config import ModelConfig
from minivllm.core.overrides import overrides_both
from minivllm.core.parallel import TensorParallel
from minivllm.kernels._triton import compiling
from minivllm.kernels.capture import only_loads
from minivllm.kernels.sampling.sampling import Shard
from minivllm.layers.decoder_layer import DecoderLayer, SelfAttention
from minivllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.fused import run_fused
from minivllm.layers.norm import RMSNorm
from minivllm.layers.parameter import ShardId
from minivllm.layers.plain import is_plain
from minivllm.layers.rotary import RotaryTable

__all__ = ["CausalLM", "Decoder", "DecoderLayer", "LayerFactory", "SelfAttention"]


class LayerFactory(Protocol):
    """Creates layer ``index`` of a decoder; a layer class is one."""

    def __call__(self, config: ModelConfig, tp: TensorParallel, index: int, rotary: RotaryTable, /) -> nn.Module: ...


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, layer: LayerFactory) -> None:
        super().__init__()
        self.tp = tp
        self.rotary = RotaryTable(config)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.layers = nn.ModuleList(layer(config, tp, i, self.rotary) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._windows = config.layer_windows()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        x: torch.Tensor = self.embed_tokens(input_ids)  # not shared: the layers add to it in place
        layers = self._different_layers if compiling() or only_loads() else list(self.layers)
        x, layers = run_fused(layers, x, positions, attention, self.tp)
        for layer in layers:
            x = layer(x, positions, attention)
        return self.norm(x)

    @cached_property
    def _different_layers(self) -> list[nn.Module]:
        """Layers that together launch every kernel: the first two, each one unlike those before it, and the last."""
        found: dict[object, nn.Module] = {}
        for i, layer in enumerate(self.layers):
            kind = type(layer), self._windows[i], *(weight.shape for weight in layer.parameters())
            found.setdefault(i if i in (0, 1, len(self.layers) - 1) else kind, layer)
        return list(found.values())


class CausalLM(nn.Module, Model):
    """A decoder with a language-model head, with the tensor names of Hugging Face's checkpoints.

    A subclass sets ``architectures``, which it can load, ``layer``, its layer class, and, if its checkpoints pack
    weights differently, ``packed``: a checkpoint's module name -> (ours, shard id).
    """

    architectures: ClassVar[tuple[str, ...]] = ()
    layer: ClassVar[LayerFactory]
    packed: ClassVar[Mapping[str, tuple[str, ShardId]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, tp, type(self).layer)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp)
        if config.tie_word_embeddings:
            self.lm_head.tie(self.model.embed_tokens)
        last = self.model.layers[-1]
        if type(self).forward is CausalLM.forward and isinstance(last, DecoderLayer):
            last.pick_last_tokens()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        return self.model(input_ids, positions, attention)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def compute_logits_shard(self, hidden: torch.Tensor) -> tuple[torch.Tensor, Shard] | None:
        kind = type(self.lm_head)
        if not overrides_both(kind, "forward", "shard") or not is_plain(self.lm_head, kind):
            return None  # a subclass's own head, or one with a hook
        return self.lm_head.shard(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from minivllm.models.loader import load_weights

        load_weights(self, weights, packed=self.packed)
