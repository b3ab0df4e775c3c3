"""An engine's configuration: deeply frozen, plain values only, so that it can be sent to other processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.core.model_config import FrozenDict
from minivllm.core.sampling_params import MAX_LOGPROBS


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
    lora: str | None = None


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """``prefill`` and ``decode`` override ``name`` unless None. ``cascade``: read shared prefixes once per step where
    that is faster."""

    name: str = "auto"
    prefill: str | None = None
    decode: str | None = None
    cascade: bool = True
    options: FrozenDict = field(default_factory=FrozenDict)


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """vLLM's names. At most ``max_num_seqs`` sequences run at once; a step has at most ``max_num_batched_tokens``."""

    name: str = "mixed"
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 8192
    async_scheduling: bool = True
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    options: FrozenDict = field(default_factory=FrozenDict)
    num_speculative_tokens: int = 0
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 3
    draft_model: str | None = None


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """``num_blocks=None``: as many as fit, beside the weights and what a step needs, in ``gpu_memory_utilization`` of
    the GPU's memory; on a CPU in 1 GiB. ``dtype`` is auto or fp8."""

    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """``options`` are specific to the sampler."""

    name: str = "default"
    options: FrozenDict = field(default_factory=FrozenDict)


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """``options`` are specific to the executor: devices, timeouts, addresses."""

    name: str = "auto"
    options: FrozenDict = field(default_factory=FrozenDict)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an ``LLMEngine`` needs to know.

    ``device`` is auto, cuda or cpu; ``dtype`` is auto, float32, bfloat16 or float16; ``load_format`` is auto or dummy;
    ``max_model_len=None`` means the model's own limit; ``enforce_eager=None`` captures CUDA graphs if the attention
    backend allows it, False refuses a backend that does not. ``max_cudagraph_capture_size`` limits the sequences of a
    captured decode step; None: no limit. ``packed_weights`` is auto, true (an error if impossible) or false;
    ``quantization`` is none or fp8. ``enable_sleep_mode`` allows ``LLMEngine.sleep``.
    ``enable_lora`` allows LoRA adapters of single requests: ``max_loras`` at once, of ranks up to ``max_lora_rank``.
    ``draft_model`` is what ``scheduler.draft_model`` names.
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
    quantization: str = "none"
    enable_sleep_mode: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    draft_model: ModelOptions | None = None
    max_logprobs: int = MAX_LOGPROBS
