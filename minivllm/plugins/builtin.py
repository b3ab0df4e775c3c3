"""minivllm's built-in components, registered like any plugin's. A pattern to copy for your own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minivllm.config.conf_dir import conf_dir
from minivllm.plugins.hookspecs import hookimpl
from minivllm.plugins.types import CONFIG_GROUPS, Component, ConfigOption, ModelComponent

MINIVLLM_API_VERSION = 1


def _qwen3_config(hf: dict[str, Any]) -> dict[str, Any]:
    """With transformers' defaults where they are not those of other models."""
    return {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28} | hf


@hookimpl
def minivllm_models() -> Iterator[ModelComponent]:
    yield ModelComponent(
        "qwen3",
        "minivllm.models.qwen3:Qwen3ForCausalLM",
        architectures=("Qwen3ForCausalLM",),
        description="Qwen3, dense",
        read_config=_qwen3_config,
    )
    yield ModelComponent(
        "llama",
        "minivllm.models.llama:LlamaForCausalLM",
        architectures=("LlamaForCausalLM",),
        description="Llama 2, 3 and what shares their architecture",
    )


@hookimpl
def minivllm_attention_backends() -> Iterator[Component]:
    yield Component(
        "torch", "minivllm.backends.torch:TorchBackend", priority=0, description="the reference, on any device"
    )
    yield Component(
        "triton",
        "minivllm.backends.triton:TritonBackend",
        requires=("triton",),
        gpu=True,
        priority=40,  # the fastest decode of the four on an H200: docs/performance.md
        description="paged prefill and split-KV decode kernels in Triton",
    )
    yield Component(
        "hopper",
        "minivllm.backends.hopper:HopperBackend",
        requires=("triton", "cuda.bindings"),
        gpu=True,
        priority=45,
        prefill_priority=60,  # faster than FlashAttention-3: docs/performance-log.md
        description="triton's decode, and prompts by a kernel in CUDA C++ for Hopper GPUs",
    )
    yield Component(
        "flash",
        "minivllm.backends.flash:FlashBackend",
        requires=("flash_attn_interface|sgl_kernel|flash_attn",),
        priority=20,
        prefill_priority=50,
        description="FlashAttention",
        install="pip install 'minivllm[flash]'",
        gpu=True,
    )
    yield Component(
        "flashinfer",
        "minivllm.backends.flashinfer:FlashInferBackend",
        requires=("flashinfer",),
        priority=30,
        description="FlashInfer",
        install="pip install 'minivllm[flashinfer]'",
        gpu=True,
    )


@hookimpl
def minivllm_schedulers() -> Iterator[Component]:
    yield Component(
        "mixed", "minivllm.core.scheduler:MixedScheduler", description="decodes and prompt chunks in one step"
    )
    yield Component(
        "prefill_first",
        "minivllm.core.scheduler:PrefillFirstScheduler",
        description="prompt-only steps, then decode-only steps",
    )


@hookimpl
def minivllm_samplers() -> Iterator[Component]:
    yield Component(
        "default",
        "minivllm.core.sampler:DefaultSampler",
        description="greedy, temperature, top-k, top-p, min-p, by the request's seed and position",
    )


@hookimpl
def minivllm_executors() -> Iterator[Component]:
    yield Component("single", "minivllm.executors.single:SingleExecutor", description="one process, one device")
    yield Component(
        "multiproc",
        "minivllm.executors.multiproc:MultiprocExecutor",
        description="a child process a rank, on one machine; what auto takes for tp>1",
        options=("devices", "start_timeout", "step_timeout", "all_reduce", "all_reduce_bytes"),
    )
    yield Component(
        "torchrun",
        "minivllm.executors.torchrun:TorchrunExecutor",
        description="this process is one rank of many, started by torchrun; every rank makes the same requests",
        options=("timeout",),
    )
    yield Component(
        "ray",
        "minivllm.executors.ray:RayExecutor",
        requires=("ray",),
        description="an actor a rank, on the nodes of a Ray cluster",
        options=("address", "start_timeout", "step_timeout"),
        install="pip install 'minivllm[ray]'",
    )


@hookimpl
def minivllm_configs() -> Iterator[ConfigOption]:
    for group in CONFIG_GROUPS:
        for file in sorted((conf_dir() / group).glob("*.yaml"), key=lambda file: file.stem):
            yield ConfigOption(group, file.stem, file)
