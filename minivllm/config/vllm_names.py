"""Maps ``vllm.LLM``'s keywords to our keys, and lists those that have no effect here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from minivllm.errors import ConfigError, shown
from minivllm.naming import did_you_mean, listing

# vllm.LLM's keyword -> the key here.
VLLM_NAMES: dict[str, str] = {
    "tensor_parallel_size": "tp",
    "gpu_memory_utilization": "cache.gpu_memory_utilization",
    "block_size": "cache.block_size",
    "num_gpu_blocks_override": "cache.num_blocks",
    "enable_prefix_caching": "cache.enable_prefix_caching",
    "kv_cache_dtype": "cache.dtype",
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

SAME_NAMES = (
    "max_model_len",
    "enforce_eager",
    "max_cudagraph_capture_size",
    "seed",
    "load_format",
    "quantization",
    "enable_sleep_mode",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "max_logprobs",
)

# Values of attention_backend; case does not matter. Others, such as XFORMERS and those for MLA, have no equivalent.
ATTENTION = {
    "FLASH_ATTN": "flash",
    "FLASHINFER": "flashinfer",
    "TRITON_ATTN": "triton",
    "TORCH_SDPA": "torch",
    "CPU_ATTN": "torch",
    "AUTO": "auto",
}
DTYPES = {"half": "float16", "float": "float32"}
CACHE_DTYPES = {"fp8_e4m3": "fp8"}  # values of kv_cache_dtype
LOAD_FORMATS = {"safetensors": "auto"}
EXECUTORS = {"mp": "multiproc", "ray": "ray", "uni": "single", "external_launcher": "torchrun"}

_MULTIMODAL = "there are no multimodal models"
_ADAPTERS = (
    "With enable_lora=true requests have adapters of their own, by lora_path in a line of a .jsonl prompts file, or by "
    "lora_modules.NAME=DIR of a server; model.lora=DIR merges one into the weights."
)
_GRAMMARS = "llguidance makes all grammars; give StructuredOutputsParams"
_SPECULATION = "type speculative_config={'method': 'ngram', 'num_speculative_tokens': 5}"
_DRAFT_MODEL = "type speculative_config={'model': NAME, 'num_speculative_tokens': 5}"
_GRAPHS = "type enforce_eager or max_cudagraph_capture_size"

# vllm.LLM's keywords that have no effect at these values (and at None), and are not supported at others. A type stands
# for all its values.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "additional_config": (({},), "a plugin's own keys are .options of its group"),
    "allowed_local_media_path": (("",), _MULTIMODAL),
    "attention_config": (({},), "type attention_backend"),
    "calculate_kv_scales": ((False,), "not supported yet"),
    "chat_template": ((), "give it to llm.chat"),
    "compilation_config": (({}, int), f"nothing is compiled by torch; of CUDA graphs {_GRAPHS}"),  # an int is a level
    "config_format": (("auto", "hf"), "a checkpoint has config.json"),
    "convert": (("auto", "none"), "models generate"),
    "cpu_offload_gb": ((0,), "not supported"),
    "cuda_graph_sizes": (([],), _GRAPHS),
    "cudagraph_capture_sizes": (([],), _GRAPHS),
    "data_parallel_backend": (("mp",), "not supported; start several servers"),
    "data_parallel_size": ((1,), "not supported; start several servers"),
    "disable_async_output_proc": ((False,), "type scheduler.async_scheduling=false"),
    "disable_custom_all_reduce": ((False,), "type executor=multiproc executor.options.all_reduce=nccl"),
    "device_ids": ((), "type executor=multiproc executor.options.devices=[...], or set CUDA_VISIBLE_DEVICES"),
    "disable_log_requests": ((bool,), "it is True or False"),  # LLM logs none, as vLLM's
    "disable_log_stats": ((bool,), "it is True or False"),  # no statistics are logged; llm.engine.stats has them
    "download_dir": ((), "set HF_HOME"),
    "enable_chunked_prefill": ((True,), "prompts are always chunked; scheduler.max_num_batched_tokens sets how"),
    "enable_expert_parallel": ((False,), "not supported"),
    "enable_log_requests": ((False,), "type `minivllm serve log_requests=true`"),
    "enable_prompt_embeds": ((False,), "not supported"),
    "fully_sharded_loras": ((False,), "not supported"),
    # "auto" is vLLM's default; "vllm" is what happens here.
    "generation_config": (
        ("auto", "vllm"),
        "of generation_config.json only the end tokens are taken; give SamplingParams",
    ),
    "guided_decoding_backend": (("auto", "guidance"), _GRAMMARS),
    "guided_decoding_disable_any_whitespace": ((False,), _GRAMMARS),
    "guided_decoding_disable_fallback": ((bool,), "it is True or False"),  # there is one backend
    "hf_overrides": (({},), "type overrides=['model.hf_config.KEY=VALUE'] with load_format=dummy"),
    "hf_token": ((), "set HF_TOKEN"),
    "ignore_patterns": (([], "original/**/*", ["original/**/*"]), "of a repository only what is needed is fetched"),
    "kv_cache_memory_bytes": ((), "type cache.num_blocks or cache.gpu_memory_utilization"),
    "kv_transfer_config": ((), "not supported"),
    "limit_mm_per_prompt": (({},), _MULTIMODAL),
    "logits_processors": (([],), "write a sampler plugin"),
    "logprobs_mode": (("raw_logprobs",), "not supported"),
    "lora_dtype": (("auto",), "adapters are kept in dtype"),
    "lora_extra_vocab_size": ((int,), "not supported"),
    "master_addr": ((str,), "not supported; type executor=torchrun"),  # unused on one node
    "master_port": ((int,), "not supported; type executor=torchrun"),
    "max_context_len_to_capture": ((int,), "it is a whole number"),
    "max_num_queued_reqs": ((), "it is a key of mode serve: `minivllm serve max_waiting=N`"),
    "max_seq_len_to_capture": ((int,), "it is a whole number"),  # CUDA graphs are for all lengths
    "mm_encoder_fp8_scale_save_margin": ((int, float), _MULTIMODAL),
    "mm_hasher_algorithm": ((str,), _MULTIMODAL),
    "mm_ipc_gpu_memory_gb": ((int, float), _MULTIMODAL),
    "mm_processor_cache_gb": ((int, float), _MULTIMODAL),
    "mm_processor_kwargs": (({},), _MULTIMODAL),
    "model_impl": (("auto", "vllm"), "models are minivllm's own, and plugins'"),
    "multi_step_stream_outputs": ((bool,), "it is True or False"),
    "nnodes": ((1,), "not supported; type executor=ray or executor=torchrun"),
    "node_rank": ((0,), "not supported; type executor=ray or executor=torchrun"),
    "num_scheduler_steps": ((1,), "two steps are under way, unless scheduler.async_scheduling=false"),
    "num_speculative_tokens": ((0,), _SPECULATION),
    "optimization_level": ((int,), "nothing is compiled by torch"),
    "override_generation_config": (({},), "give SamplingParams"),
    "performance_mode": (("balanced",), "not supported"),
    "pipeline_parallel_size": ((1,), "not supported; use tp"),
    "preemption_mode": (("recompute",), "preempted requests are computed again, not swapped"),
    "prefix_caching_hash_algo": (
        ("builtin", "sha256", "sha256_cbor", "sha256_cbor_64bit", "xxhash", "xxhash_cbor"),
        "it is xxhash, 128 bits of it",
    ),
    "reasoning_parser": (("",), "it is a key of mode serve: `minivllm serve reasoning_parser=NAME`"),
    "rope_scaling": (({},), "it is in the checkpoint's config.json"),
    "rope_theta": ((), "it is in the checkpoint's config.json"),
    "runner": (("auto", "generate"), "models generate"),
    "safetensors_prefetch_block_size": ((int,), "it is a whole number"),  # how files are read changes nothing else
    "safetensors_prefetch_num_threads": ((int,), "it is a whole number"),
    "scheduler_cls": (
        ("vllm.core.scheduler.Scheduler", "vllm.v1.core.sched.scheduler.Scheduler"),
        "type scheduler=NAME of a plugin",
    ),
    "scheduling_policy": (("fcfs",), "type scheduler=NAME of a plugin that has priorities"),
    "served_model_name": ((), "it is a key of mode serve: `minivllm serve served_model_name=NAME`"),
    "skip_tokenizer_init": ((False,), "not supported yet"),
    "spec_method": ((), _SPECULATION),
    "spec_model": ((), _DRAFT_MODEL),
    "spec_tokens": ((), _SPECULATION),
    "speculative_model": ((), _DRAFT_MODEL),
    "stream_interval": ((1,), "each step's tokens are returned at once"),
    "structured_outputs_config": (({}, {"backend": "auto"}, {"backend": "guidance"}), _GRAMMARS),
    "swap_space": ((int, float), "preempted requests are computed again, not swapped"),
    "task": (("auto", "generate"), "models generate"),
    "tokenizer_mode": (("auto", "hf"), "there is one tokenizer"),
    "tokenizer_revision": ((), "one revision is for model and tokenizer"),
    # A permission that is never used: unregistered architectures are refused.
    "trust_remote_code": ((bool,), "it is True or False"),
    "use_tqdm_on_load": ((bool,), "it is True or False"),
    "use_v2_block_manager": ((bool,), "it is True or False"),
    "video_pruning_method": ((str,), _MULTIMODAL),
    "worker_cls": (("auto",), "write an executor plugin"),
    "worker_use_ray": ((False,), "type distributed_executor_backend='ray'"),
}

# Other keywords, current or former, with vLLM's default. They have no effect at it, and if None, False, 0 or empty.
DEFAULTS: dict[str, Any] = {
    "all2all_backend": "allgather_reducescatter",
    "cp_kv_cache_interleave_size": 1,
    "data_parallel_rpc_port": 29550,
    "data_parallel_size_local": 1,
    "dbo_decode_token_threshold": 32,
    "dbo_prefill_token_threshold": 512,
    "dcp_comm_backend": "ag_rs",
    "dcp_kv_cache_interleave_size": 1,
    "decode_context_parallel_size": 1,
    "dp_sync_interval": 16,
    "enable_flashinfer_autotune": True,
    "eplb_step_interval": 3000,
    "eplb_window_size": 1000,
    "expert_placement_strategy": "linear",
    "jit_monitor_mode": "warn",
    "kda_prefill_backend": "auto",
    "kv_cache_metrics_sample": 0.01,
    "kv_offloading_backend": "native",
    "linear_backend": "auto",
    "mamba_backend": "triton",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_ssm_cache_dtype": "auto",
    "max_prompt_adapters": 1,
    "mm_encoder_tp_mode": "weights",
    "mm_processor_cache_type": "lru",
    "mm_processor_device": "auto",
    "mm_shm_cache_max_object_size_mb": 128,
    "mm_tensor_ipc": "direct_rpc",
    "moe_backend": "auto",
    "offload_backend": "auto",
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "per_request_spec_decode_metrics": "none",
    "prefill_context_parallel_size": 1,
    "prefill_schedule_interval": 1,
    "pt_load_map_location": "cpu",
    "renderer_num_workers": 1,
    "replayssm_buffer_len": 16,
    "safetensors_load_strategy": "lazy",
    "scheduler_reserve_full_isl": True,
    "tokenizer_pool_type": "ray",
}
# Those whose default is None, False, 0 or empty.
_NOTHING_HERE = """
    aggregate_engine_logging allow_deprecated_quantization allowed_media_domains attn_group_size code_revision
    collect_detailed_traces cpu_distributed_timeout_seconds cpu_offload_params cudagraph_metrics
    data_parallel_address data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
    data_parallel_rank data_parallel_start_rank dcp_q_replicate default_mm_loras diffusion_config
    disable_chunked_mm_input disable_hybrid_kv_cache_manager disable_mm_preprocessor_cache
    disable_nccl_for_dp_synchronization disable_sliding_window distributed_timeout_seconds ec_manager_config
    ec_transfer_config enable_batch_sharded_sampling enable_bf16x3_router_gemm enable_cumem_allocator enable_dbo
    enable_elastic_ep enable_ep_weight_filter enable_eplb enable_fault_tolerance enable_layerwise_nvtx_tracing
    enable_logging_iteration_details enable_lora_bias enable_mamba_cache_stochastic_rounding
    enable_mamba_fine_grained_prefix_cache enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds
    enable_mm_processor_stats enable_moe_shared_loras enable_multimodal_encoder_data_parallel
    enable_nccl_comm_suspend enable_prompt_adapter enable_reasoning enable_return_routed_experts
    enable_tower_connector_lora enable_trace_replay eplb_config eplb_log_balancedness fail_on_environ_validation
    fault_tolerance_config gdn_prefill_backend guided_decoding_disable_additional_properties hf_config_path
    interleave_mm_strings io_processor_plugin ir_op_priority jit_monitor_verbose kernel_config
    kv_cache_dtype_skip_layers kv_cache_metrics kv_events_config kv_offloading_size kv_sharing_fast_prefill
    language_model_only logits_processor_pattern long_lora_scaling_factors lora_target_modules mamba_block_size
    mamba_cache_philox_rounds mamba_config mamba_ssu_algorithm max_num_queued_tokens max_num_scheduled_tokens
    max_parallel_loading_workers max_prompt_adapter_token media_io_kwargs mm_device_do_normalize
    mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
    mm_encoder_only model_class_overrides model_loader_extra_config model_weights num_lookahead_slots
    num_redundant_experts numa_bind numa_bind_cpus numa_bind_nodes offload_group_size
    offload_params otlp_traces_endpoint override_attention_dtype override_pooler_config pooler_config
    prefix_cache_retention_interval prefix_match_unit profiler_config qlora_adapter_name_or_path quantization_config
    ray_workers_use_nsight reasoning_config reasoning_parser_plugin scheduler_delay_factor
    show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling specialize_active_lora
    tokenizer_pool_extra_config tokenizer_pool_size tokens_only ubatch_size use_fp64_gumbel use_replayssm
    video_pruning_rate watermark weight_transfer_config worker_extension_cls
"""
NOT_HERE = frozenset(_NOTHING_HERE.split())

_LOOKUP_KEYS = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
_CALLED = {int: "a whole number", float: "a number", bool: "True, False", str: "text"}


def check_neutral(name: str, value: Any) -> bool:
    """Whether this is a ``vllm.LLM`` keyword that has no effect here. Raises ConfigError if its value asks for
    something unsupported."""
    if other := name in NOT_HERE or name in DEFAULTS:
        neutral, why = (DEFAULTS[name],) if name in DEFAULTS else (), "not supported; leave it out"
    elif name in NEUTRAL:
        neutral, why = NEUTRAL[name]
    else:
        return False
    if not (value is None or any(map(partial(_is_of, value), neutral)) or (other and not value)):
        raise ConfigError(f"{name}={shown(value)}: {why}. Allowed: {', '.join(map(_shown, neutral)) or None}")
    return True


def speculative_keys(config: Any) -> dict[str, Any]:
    """Our keys and values for vLLM's ``speculative_config``. Raises ConfigError for what is not supported."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative_config={shown(config)} is not a dict; {_SPECULATION}, or leave it out")
    model, allowed = config.get("model"), ("method", "model", *_LOOKUP_KEYS)
    model = None if model in ("ngram", "[ngram]") else model  # as in vLLM
    if (ranks := config.get("draft_tensor_parallel_size")) not in (None, 1):
        raise ConfigError(
            f"speculative_config: draft_tensor_parallel_size={shown(ranks)}: each GPU has all of the draft model. "
            "Allowed: 1"
        )
    there = [name for name, value in config.items() if value is not None and name != "draft_tensor_parallel_size"]
    if unknown := next((name for name in there if name not in allowed), None):
        raise ConfigError(
            f"speculative_config has {unknown}, which is not supported.{did_you_mean(str(unknown), allowed)} Allowed: "
            f"{listing(allowed)}"
        )
    method = config.get("method") or ("ngram" if model is None else "draft_model")
    if method not in ("ngram", "draft_model"):
        raise ConfigError(f"speculative_config: method={shown(method)} is not supported. Allowed: ngram, draft_model")
    if not isinstance(model, str | os.PathLike | None):
        what = "an option's name, a folder or a Hub repository"
        raise ConfigError(f"speculative_config: model={shown(model)} is not {what}")
    if (method == "ngram") != (model is None):
        what = "lacks model, a smaller one" if model is None else f"has model={shown(model)}, which it does not use"
        raise ConfigError(f"speculative_config: method={method} {what}")
    if config.get("num_speculative_tokens") is None:
        raise ConfigError("speculative_config lacks num_speculative_tokens, the most tokens of a draft; 5 is usual")
    given = {name: config[name] for name in _LOOKUP_KEYS if config.get(name) is not None}
    lengths = [given[name] for name in ("prompt_lookup_max", "prompt_lookup_min") if name in given]
    if len(lengths) == 1:  # as in vLLM, both
        given |= dict.fromkeys(("prompt_lookup_max", "prompt_lookup_min"), lengths[0])
    if model is not None:
        given["draft_model"] = os.fspath(model)
    return {f"scheduler.{name}": value for name, value in given.items()}


def lora_hint(name: str) -> str:
    """What to type for adapters, with a leading space; empty for other names."""
    return f" {_ADAPTERS}" if "lora" in name.lower() else ""


def _is_of(value: Any, neutral: Any) -> bool:
    if isinstance(neutral, type):
        return isinstance(value, neutral)
    return bool(value == neutral)


def _shown(neutral: Any) -> str:
    if isinstance(neutral, type):
        return _CALLED[neutral]
    return repr(neutral)
