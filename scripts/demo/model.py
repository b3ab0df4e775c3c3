# The Qwen3 architecture in plain torch, for training only. Parameter names are those of the Hugging Face checkpoint,
# so that exporting is saving the state dict.
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class DemoConfig:
    vocab_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x (batch, heads, tokens, head_dim); cos and sin are (tokens, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        heads, kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = _linear(config.hidden_size, heads * self.head_dim)
        self.k_proj = _linear(config.hidden_size, kv_heads * self.head_dim)
        self.v_proj = _linear(config.hidden_size, kv_heads * self.head_dim)
        self.o_proj = _linear(heads * self.head_dim, config.hidden_size)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.groups = heads // kv_heads

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DemoModel(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.max_position_embeddings), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * config.num_hidden_layers) ** 0.5 if out else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, tokens, vocabulary) for tokens (batch, tokens); the output matrix is the embedding."""
        x = self.model.embed_tokens(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy of predicting tokens[:, 1:] from those before."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.no_grad()
def complete(model: DemoModel, prompt: list[int], stop: set[int], limit: int, temperature: float = 0.0) -> list[int]:
    """The tokens that follow the prompt, greedy at temperature 0; without a cache, which is enough for samples."""
    tokens = torch.tensor([prompt], device=model.cos.device)
    for _ in range(limit):
        logits = model(tokens)[0, -1].float()
        if temperature == 0:
            token = logits.argmax().view(1, 1)
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1).view(1, 1)
        if token.item() in stop:
            break
        tokens = torch.cat((tokens, token), dim=1)
    return tokens[0, len(prompt) :].tolist()
