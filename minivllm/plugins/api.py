"""The public API for plugins. These names are stable within a ``MINIVLLM_API_VERSION``; anything else may move.

``from minivllm.layers.decoder import CausalLM`` and ``from minivllm.plugins.api import CausalLM`` both work; the second
is looked up lazily and is untyped. ``docs/contract.md`` says what each interface promises.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# module -> what it exports
EXPORTS: dict[str, tuple[str, ...]] = {
    # what hooks yield
    "minivllm.plugins.hookspecs": ("hookimpl",),
    "minivllm.plugins.types": ("Component", "ConfigOption", "ModelComponent"),
    "minivllm.plugins.registry": ("Registry",),
    # errors
    "minivllm.errors": (
        "CheckpointError",
        "ConfigError",
        "EngineDeadError",
        "MinivllmError",
        "PluginError",
        "RequestError",
    ),
    # the interfaces, and the types they exchange
    "minivllm.core.interfaces": (
        "AttentionBackend",
        "AttentionLayer",
        "AttentionSpec",
        "BlockManager",
        "Capabilities",
        "Committed",
        "CudaGraphs",
        "DeviceLogprobs",
        "Executor",
        "Logprobs",
        "Model",
        "Sampler",
        "Scheduler",
        "StepHandle",
        "StepResult",
    ),
    "minivllm.core.batch": ("AttentionBatch", "Batch", "Cascade"),
    "minivllm.core.cascade": ("CascadeLimits",),
    "minivllm.core.sequence": ("FinishReason", "Sequence", "Status"),
    "minivllm.core.sampling_params": ("SamplingParams",),
    "minivllm.core.model_config": ("FrozenDict", "ModelConfig"),
    "minivllm.core.parallel": ("TensorParallel",),
    "minivllm.config.engine_config": (
        "AttentionOptions",
        "CacheOptions",
        "EngineConfig",
        "ExecutorOptions",
        "ModelOptions",
        "SamplerOptions",
        "SchedulerOptions",
    ),
    # built-in implementations to build on
    "minivllm.core.scheduler": ("MixedScheduler", "PrefillFirstScheduler", "SlotScheduler"),
    "minivllm.core.block_manager": ("PagedBlockManager",),
    "minivllm.core.sampler": ("DefaultSampler",),
    "minivllm.backends.torch": ("TorchBackend",),
    "minivllm.executors.single": ("SingleExecutor",),
    "minivllm.executors.worker": ("Worker",),
    # layers
    "minivllm.layers.decoder": ("CausalLM", "Decoder", "DecoderLayer", "LayerFactory", "SelfAttention"),
    "minivllm.layers.attention": ("Attention",),
    "minivllm.layers.experts": ("RoutedExperts", "RoutedMLP"),
    "minivllm.layers.embedding": ("ParallelLMHead", "VocabParallelEmbedding"),
    "minivllm.layers.linear": (
        "ColumnParallelLinear",
        "MergedColumnParallelLinear",
        "QKVParallelLinear",
        "ReplicatedLinear",
        "RowParallelLinear",
        "split_heads",
    ),
    "minivllm.layers.mlp": ("GatedMLP",),
    "minivllm.layers.norm": ("RMSNorm",),
    "minivllm.layers.rotary": ("RotaryTable",),
    "minivllm.layers.parameter": ("Piece", "ShardId", "load_piece", "pieces_of", "sharded_parameter", "split"),
    "minivllm.models.loader": ("load_weights",),
    # helpers for writing kernels, and the kernels: each runs on a GPU and, as a torch reference, on any device
    "minivllm.kernels._triton": ("HAVE_TRITON", "next_power_of_2", "tl", "triton"),
    "minivllm.rounding": ("cdiv",),
    "minivllm.kernels.pdl": ("use_pdl",),
    "minivllm.kernels.attention.cache_write": ("write_cache",),
    "minivllm.kernels.sampling.draws": ("gumbel_noise",),
    "minivllm.kernels.embedding": ("embedding",),
    "minivllm.kernels.attention.paged_decode": ("paged_decode",),
    "minivllm.kernels.attention.paged_prefill": ("paged_attention_reference", "paged_prefill"),
    "minivllm.kernels.linear.fp8_linear": ("Fp8Rows", "quantize"),
    "minivllm.kernels.rms_norm": ("rms_norm",),
    "minivllm.kernels.attention.rotary": ("qk_norm_rope", "qk_norm_rope_store"),
    "minivllm.kernels.sampling.sampling": ("sample_tokens",),
    "minivllm.kernels.silu_mul": ("silu_mul",),
    "minivllm.kernels.linear.products": ("linear", "linear_add", "norm_gate_up", "norm_linear"),
}
_HOMES = {name: module for module, names in EXPORTS.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"minivllm.plugins.api exports no {name!r}; what it exports: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
