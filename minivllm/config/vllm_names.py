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
    "distributed_executor_backend": "executor",
}
NEGATED = {"disable_cascade_attn": "attention.cascade"}  # the opposite of a key here

SAME_NAMES = ("max_model_len", "enforce_eager", "max_cudagraph_capture_size", "seed", "load_format")

EXECUTORS = {"mp": "multiproc", "ray": "ray", "uni": "single", "external_launcher": "torchrun"}

# vllm.LLM's keywords that ask for nothing at these values (and at None), and for something that is not here at others.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "compilation_config": (({},), "nothing is compiled by torch"),
    "config_format": (("auto", "hf"), "a checkpoint has config.json"),
    "cpu_offload_gb": ((0,), "not supported"),
    "data_parallel_size": ((1,), "not supported; start several servers"),
    "disable_async_output_proc": ((False,), "type scheduler.async_scheduling=false"),
    "disable_custom_all_reduce": ((False,), "type executor=multiproc executor.options.all_reduce=nccl"),
    "disable_log_requests": ((True,), "no requests are logged"),
    "disable_log_stats": ((True,), "no statistics are logged"),
    "download_dir": ((), "set HF_HOME"),
    "enable_chunked_prefill": ((True,), "prompts are always chunked; scheduler.max_num_batched_tokens sets how"),
    "enable_expert_parallel": ((False,), "not supported"),
    "enable_lora": ((False,), "not supported yet"),
    "enable_prompt_embeds": ((False,), "not supported"),
    "enable_sleep_mode": ((False,), "not supported"),
    # "auto" is vLLM's default, "vllm" asks for what happens here.
    "generation_config": (
        ("auto", "vllm"),
        "of generation_config.json only the end tokens are taken; give SamplingParams",
    ),
    "hf_overrides": (({},), "type overrides=['model.hf_config.KEY=VALUE'] with load_format=dummy"),
    "hf_token": ((), "set HF_TOKEN"),
    "kv_cache_dtype": (("auto",), "not supported yet"),
    "kv_cache_memory_bytes": ((), "type cache.num_blocks or cache.gpu_memory_utilization"),
    "kv_transfer_config": ((), "not supported"),
    "limit_mm_per_prompt": (({},), "there are no multimodal models"),
    "logits_processors": (([],), "write a sampler plugin"),
    "logprobs_mode": (("raw_logprobs",), "not supported"),
    "max_logprobs": ((20,), "20 are the most"),
    "mm_processor_kwargs": (({},), "there are no multimodal models"),
    "model_impl": (("auto",), "models are minivllm's own, and plugins'"),
    "override_generation_config": (({},), "give SamplingParams"),
    "pipeline_parallel_size": ((1,), "not supported; use tp"),
    "quantization": ((), "not supported yet"),
    "runner": (("auto", "generate"), "models generate"),
    "scheduling_policy": (("fcfs",), "type scheduler=NAME of a plugin that has priorities"),
    "skip_tokenizer_init": ((False,), "not supported yet"),
    "speculative_config": ((), "not supported yet"),
    "swap_space": ((0, 4), "preempted requests are computed again, not swapped"),
    "task": (("auto", "generate"), "models generate"),
    "tokenizer_mode": (("auto",), "there is one tokenizer"),
    "tokenizer_revision": ((), "one revision is for model and tokenizer"),
    # A permission, which is not used: an architecture that nobody registered is refused.
    "trust_remote_code": ((False, True), "it is True or False"),
}

DTYPES = {"half": "float16", "float": "float32"}

LOAD_FORMATS = {"safetensors": "auto"}
