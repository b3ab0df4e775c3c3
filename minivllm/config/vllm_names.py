"""What ``vllm.LLM`` calls our keys, and which of its keywords ask for nothing."""

from __future__ import annotations

from typing import Any

# vllm.LLM's keyword -> the key here.
VLLM_NAMES: dict[str, str] = {
    "tensor_parallel_size": "tp",
    "gpu_memory_utilization": "cache.gpu_memory_utilization",
    "block_size": "cache.block_size",
    "num_gpu_blocks_override": "cache.num_blocks",
    "enable_prefix_caching": "cache.enable_prefix_caching",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "max_num_partial_prefills": "scheduler.max_num_partial_prefills",
    "max_long_partial_prefills": "scheduler.max_long_partial_prefills",
    "long_prefill_token_threshold": "scheduler.long_prefill_token_threshold",
    "async_scheduling": "scheduler.async_scheduling",
    "attention_backend": "attention",
    "tokenizer": "model.tokenizer",
    "revision": "model.revision",
}

SAME_NAMES = ("max_model_len", "enforce_eager", "seed", "load_format")

# vllm.LLM's keywords that ask for nothing at this value, and for something that is not here at any other.
NEUTRAL: dict[str, tuple[Any, str]] = {
    "trust_remote_code": (False, "code from a checkpoint is never run; write a plugin with minivllm_models"),
    "enable_chunked_prefill": (True, "prompts are always chunked; scheduler.max_num_batched_tokens sets how"),
    "quantization": (None, "not supported yet"),
    "kv_cache_dtype": ("auto", "not supported yet"),
    "pipeline_parallel_size": (1, "not supported; use tp"),
    "enable_lora": (False, "not supported yet"),
    "speculative_config": (None, "not supported yet"),
    "tokenizer_mode": ("auto", "there is one tokenizer"),
    "skip_tokenizer_init": (False, "not supported yet"),
    "disable_log_stats": (True, "no statistics are logged"),
    "cpu_offload_gb": (0, "not supported"),
    "hf_overrides": ({}, "type overrides=['model.hf_config.KEY=VALUE'] with load_format=dummy"),
    "limit_mm_per_prompt": ({}, "there are no multimodal models"),
    "generation_config": ("auto", "nothing is taken from generation_config.json"),
}

DTYPES = {"half": "float16", "float": "float32"}

LOAD_FORMATS = {"safetensors": "auto"}
