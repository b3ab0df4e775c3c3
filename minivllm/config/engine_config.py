"""What an engine is built from: frozen all the way down, plain values only, so that it crosses process borders."""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.core.model_config import FrozenDict


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model. ``hf_config`` is its published config.json, so that ``load_format=dummy`` needs no download."""

    name: str = "demo"
    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    hf_config: FrozenDict = field(default_factory=FrozenDict)
    options: FrozenDict = field(default_factory=FrozenDict)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """``prefill`` and ``decode`` name backends of their own, None: ``name``. ``cascade``: shared prefixes are read once
    a step where that is faster."""

    name: str = "auto"
    prefill: str | None = None
    decode: str | None = None
    cascade: bool = True
    options: FrozenDict = field(default_factory=FrozenDict)


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """vLLM's names. ``max_num_seqs`` sequences run at once; a step has ``max_num_batched_tokens`` tokens at most."""

    name: str = "mixed"
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 8192
    async_scheduling: bool = True
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    options: FrozenDict = field(default_factory=FrozenDict)


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """``num_blocks=None`` measures: ``gpu_memory_utilization`` of the GPU, or 1 GiB of a CPU's memory."""

    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """``options`` are the sampler's own."""

    name: str = "default"
    options: FrozenDict = field(default_factory=FrozenDict)


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """``options`` are the executor's own: devices, time limits, addresses."""

    name: str = "auto"
    options: FrozenDict = field(default_factory=FrozenDict)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an ``LLMEngine`` needs to know.

    ``device`` is auto, cuda or cpu; ``dtype`` is auto, float32, bfloat16 or float16; ``load_format`` is auto or dummy;
    ``max_model_len=None`` takes the model's own limit; ``enforce_eager=None`` captures CUDA graphs where the attention
    backend allows it, False refuses one that does not. ``max_cudagraph_capture_size`` limits the sequences of a
    captured decode step; None: no limit. ``packed_weights`` is auto, true (or an error) or false.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    attention: AttentionOptions = field(default_factory=AttentionOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    executor: ExecutorOptions = field(default_factory=ExecutorOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    tp: int = 1
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    enforce_eager: bool | None = None
    load_format: str = "auto"
    max_cudagraph_capture_size: int | None = None
    packed_weights: str = "auto"
