"""One rank: selects the attention backend, loads the weights, sizes the KV cache, captures CUDA graphs."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from minivllm.backends.agree import build
from minivllm.backends.select import choose
from minivllm.core.adapter_rows import AdapterRows
from minivllm.core.drafter import Drafter
from minivllm.core.guides import masks_per_slot
from minivllm.core.interfaces import AttentionSpec
from minivllm.core.model_runner import ModelRunner
from minivllm.core.parallel import TensorParallel
from minivllm.core.sampler_overrides import undoes_sample
from minivllm.core.speculation import MOST_RUNNING
from minivllm.cores import usable_cores
from minivllm.errors import AdapterError, CheckpointError, ConfigError, PluginError, calling, was_shut_down
from minivllm.executors.first_calls import look_at_model, look_at_sampler
from minivllm.executors.memory import MemoryShare
from minivllm.executors.packing import compile_for_packing, pack_weights
from minivllm.executors.sleep import SleepingMemory
from minivllm.kernels._triton import compile_only, open_device
from minivllm.kernels.linear.persistent_linear import compile_for_parts
from minivllm.layers.attention import attention_scale
from minivllm.layers.decoder_layer import launch_all_heads
from minivllm.layers.packed import packed_tensors
from minivllm.layers.whole import attends_plainly
from minivllm.models.checkpoint import fetch
from minivllm.models.fp8_checkpoint import float_weights
from minivllm.models.loader import build_model, renew_copies
from minivllm.models.lora import Adapter
from minivllm.models.lora_config import lora_folder
from minivllm.models.reloading import outside_inference_mode, reload_model
from minivllm.models.request_adapters import FittingAdapter, add_places
from minivllm.rounding import cdiv

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig, ModelOptions
    from minivllm.core.batch import Batch, TokenMasks
    from minivllm.core.cuda_graphs import DecodeGraphs
    from minivllm.core.interfaces import Sampler, StepHandle
    from minivllm.core.mixed_graphs import MixedGraphs
    from minivllm.core.model_config import ModelConfig
    from minivllm.core.prompt_graphs import PromptGraphs
    from minivllm.plugins.registry import Registry

    _Graphs = tuple[DecodeGraphs | None, PromptGraphs | None, MixedGraphs | None]  # of one runner

_CPU_CACHE_BYTES = 1 << 30


def resolve_device(device: str) -> str:
    """auto, cuda or cpu → cuda or cpu. Raises ConfigError for cuda without a GPU."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError(
            "device=cuda, but torch sees no GPU here; use device=cpu, or check nvidia-smi and torch's build"
        )
    return "cuda" if device != "cpu" and available else "cpu"


def resolve_dtype(dtype: str, device: str, model_dtype: str) -> str:
    """``auto``: float32 on a CPU; on a GPU the checkpoint's dtype, or bfloat16 if that is float32."""
    if dtype != "auto":
        return dtype
    if device == "cpu":
        return "float32"
    return "bfloat16" if model_dtype == "float32" else model_dtype


class Worker:
    """Everything that one rank holds. ``start`` returns the number of cache blocks that fit."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        max_model_len: int,
        registry: Registry,
        tp: TensorParallel,
        device_index: int = 0,
        drafts: bool = False,
    ) -> None:
        """``drafts``: for the draft model of another worker, of whose steps none has both decodes and prompts."""
        self._drafts = drafts
        self.device_index, self.num_blocks, self.packed_weights = device_index, 0, False
        self.config, self.model_config, self.registry, self.tp = config, model_config, registry, tp
        self.device_type = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, self.device_type, model_config.dtype)
        self.max_model_len = max_model_len
        heads, kv_heads = model_config.num_heads // tp.size, max(model_config.num_kv_heads // tp.size, 1)
        windows = model_config.layer_windows()
        self.spec = AttentionSpec(
            device=self.device_type,
            dtype=self.dtype,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=model_config.head_dim,
            block_size=config.cache.block_size,
            num_layers=model_config.num_layers,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=max_model_len,
            scale=model_config.head_dim**-0.5,
            sliding_window=min((window for window in windows if window is not None), default=None),
            layer_windows=windows if len(set(windows)) > 1 else (),
            needs_graphs=self.device_type == "cuda" and config.enforce_eager is False,
            cascade=config.attention.cascade and config.cache.enable_prefix_caching,
            kv_cache_dtype=config.cache.dtype,
        )
        self.choice = choose(config.attention, self.spec, registry)
        self.runner: ModelRunner | None = None
        self._drafter: Drafter | None = None
        self._draft_worker = None if config.draft_model is None else self._make_draft_worker(config, config.draft_model)
        self._memory: MemoryShare | None = None
        self._sleeping: SleepingMemory | None = None
        if self.device_type == "cuda":
            open_device(device_index)
            if not drafts:  # which counts in the share of the worker that it drafts for
                self._memory = MemoryShare(torch.device("cuda", device_index), config.cache.gpu_memory_utilization)
        elif "OMP_NUM_THREADS" not in os.environ:
            # Torch counts the machine's cores; threads beyond a container's CPU quota would wait for each other.
            torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))

    def _make_draft_worker(self, config: EngineConfig, draft_model: ModelOptions) -> Worker:
        """That of the draft model. Each rank has all of it, as so small a model takes longer on several GPUs."""
        assert self.model_config.draft is not None
        its = replace(
            config, model=draft_model, draft_model=None, tp=1, enable_lora=False, dtype=self.dtype,
            scheduler=replace(config.scheduler, num_speculative_tokens=0, draft_model=None),
            packed_weights="false" if config.packed_weights == "false" else "auto",
            max_cudagraph_capture_size=min(config.max_cudagraph_capture_size or MOST_RUNNING, MOST_RUNNING),
        )  # fmt: skip
        model_config, tp = self.model_config.draft, TensorParallel()
        try:
            return Worker(its, model_config, self.max_model_len, self.registry, tp, self.device_index, drafts=True)
        except ConfigError as error:
            raise ConfigError(f"scheduler.draft_model={config.scheduler.draft_model}: {error}") from error

    def use_device(self) -> None:
        """Make this rank's GPU the calling thread's current device (torch keeps it per thread)."""
        if self.device_type == "cuda":
            torch.cuda.set_device(self.device_index)

    def _on_device(self) -> AbstractContextManager[Any]:
        """A context in which this rank's GPU is the calling thread's current device."""
        if self.device_type != "cuda" or torch.cuda.current_device() == self.device_index:
            return nullcontext()
        return torch.cuda.device(self.device_index)

    def launch(self, batch: Batch) -> StepHandle:
        """Launch a step, from any thread, whatever its current device.

        Raises:
            EngineDeadError: the worker was shut down.
        """
        if self.runner is None:
            raise was_shut_down()
        with self._on_device():
            if self._drafter is not None and batch.num_drafts:
                return self._drafter.launch(batch)
            return self.runner.launch(batch)

    def guide(self, masks: TokenMasks) -> None:
        """See ``Executor.guide``; from any thread, like ``launch``."""
        if self.runner is None:
            raise was_shut_down()
        with self._on_device():
            self.runner.guide(masks)

    def reload_weights(self, weights: Path | Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """See ``Executor.reload_weights``; from any thread, like ``launch``."""
        if self.runner is None:
            raise was_shut_down()
        with self._on_device():
            self._reload(self.runner, weights)

    @torch.inference_mode()
    def _reload(self, runner: ModelRunner, weights: Path | Iterable[tuple[str, torch.Tensor]] | None) -> None:
        if weights is None:
            given = self._checkpoint(runner.device)
        elif isinstance(weights, Path):
            given = float_weights(weights, runner.device)
        else:
            given = outside_inference_mode(weights)
        reload_model(runner.model, given)
        if self.device_type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what loading took for a while: the cache of blocks has most of the memory

    def load_adapter(self, place: int, folder: Path) -> None:
        """See ``Executor.load_adapter``; from any thread, like ``launch``."""
        self.place_adapter(place, self.read_adapter(folder))

    def read_adapter(self, folder: Path) -> FittingAdapter:
        """For ``place_adapter``. Raises AdapterError if the folder has changed since it was checked."""
        if self.runner is None:
            raise was_shut_down()
        model, dtype = self.runner.model, getattr(torch, self.dtype)
        try:
            return FittingAdapter(model, self.model_config, folder, self.config.max_lora_rank, dtype)
        except CheckpointError as error:
            raise AdapterError(str(error)) from error

    def place_adapter(self, place: int, adapter: FittingAdapter) -> None:
        """Write what was read into a place."""
        with self._on_device(), torch.inference_mode():
            adapter.load(place)

    def _checkpoint(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the engine's own checkpoint, with its adapter merged."""
        options = self.config.model
        lora = lora_folder(options.lora)
        return float_weights(fetch(options), device, None if lora is None else Adapter(lora, self.model_config))

    def sleep(self, level: int) -> None:
        """See ``Executor.sleep``; from any thread, like ``launch``."""
        if self._sleeping is None or self.runner is None:
            raise was_shut_down()
        with self._on_device(), torch.inference_mode():
            self._sleeping.sleep(level)
            if self._draft_worker is not None:
                self._draft_worker.sleep(1)  # nobody has other weights for it

    def wake_up(self, tags: Sequence[str]) -> None:
        """See ``Executor.wake_up``; from any thread, like ``launch``."""
        if self._sleeping is None or self.runner is None:
            raise was_shut_down()
        with self._on_device(), torch.inference_mode():
            if self._sleeping.wake_up(tags):
                renew_copies(cast(nn.Module, self.runner.model))
            if self._draft_worker is not None:
                self._draft_worker.wake_up(tags)

    def start(self) -> int:
        """Build everything; returns the number of cache blocks that fit."""
        with self._on_device():
            return self._start()

    @torch.inference_mode()
    def _start(self) -> int:
        device = torch.device("cuda", self.device_index) if self.device_type == "cuda" else torch.device("cpu")
        runner = self.runner = self._build(device, None)
        ours = [(self, runner)]
        if (other := self._draft_worker) is not None:
            other.runner = other._build(device, runner)
            ours.append((other, other.runner))
            self._drafter = Drafter(other.runner, self.tp)
        for worker, its in ours:
            worker._pack(its, device, self._memory, self._least_cache_bytes())
            if self._memory is not None and worker._sleeping is not None:
                self._memory.beside += worker._sleeping.nbytes
        graphs = [worker._ready_to_run(its, device) for worker, its in ours]
        self.num_blocks = self.tp.minimum(self._num_blocks(device), device)
        for (worker, its), its_graphs in zip(ours, graphs, strict=True):
            worker.num_blocks = self.num_blocks
            worker._bind(its, self.num_blocks, device)
            worker._capture(its, *its_graphs)
        return self.num_blocks

    def _pack(self, runner: ModelRunner, device: torch.device, memory: MemoryShare | None, cache_bytes: int) -> None:
        """Pack weights, and move them to where they can sleep."""
        self.packed_weights = pack_weights(
            runner.model, self.config, self.tp, getattr(torch, self.dtype), device, memory, cache_bytes,
            attends_plainly(runner.attention),
        )  # fmt: skip
        if self.config.enable_sleep_mode:
            self._sleeping = SleepingMemory(device)
            self._sleeping.take("weights", dict(cast(nn.Module, runner.model).named_parameters()))
            self._sleeping.take("copies", dict(packed_tensors(cast(nn.Module, runner.model))))

    def _ready_to_run(self, runner: ModelRunner, device: torch.device) -> _Graphs:
        """Have all kernels, and a cache of one block, so that steps can run. Returns what is left to ``_capture``."""
        if self.device_type == "cuda":
            self._bind(runner, 0, device)
        graphs = self._graphs(runner)
        if self.device_type == "cuda":
            self._find_kernels(runner, *graphs)
        return graphs

    def _build(self, device: torch.device, beside: ModelRunner | None) -> ModelRunner:
        """The model with its weights, the sampler and the attention backend, in a runner. ``beside``: that of the model
        that it drafts for."""
        config, model_config = self.config, self.model_config
        model_name = self.registry.model_for_architecture(model_config.architecture).name
        model_class = self.registry.resolve("model", model_name)
        dummy = config.load_format == "dummy"
        if self.tp.exchange is not None and config.quantization == "none":
            compile_for_parts(model_config.head_dim, getattr(torch, self.dtype), device)  # while weights load
        compile_for_packing(config, model_config, getattr(torch, self.dtype), device)
        with self.registry.building("model", model_name):
            model = build_model(
                model_class, model_config, self.tp, device, getattr(torch, self.dtype),
                config.seed if dummy else self._checkpoint(device), self.max_model_len,
                config.quantization,
            )  # fmt: skip
            self.spec = replace(self.spec, scale=attention_scale(cast(nn.Module, model), self.spec))
        adapters = None
        if config.enable_lora:
            adapters = AdapterRows()
            add_places(model, adapters, config.max_loras, config.max_lora_rank, getattr(torch, self.dtype))
        look_at_model(
            self.registry.entry("model", model_name), model, model_config.hidden_size, model_config.vocab_size
        )
        num_slots = config.scheduler.max_num_seqs
        sampler = self._sampler(num_slots, device) if beside is None else beside.sampler
        self.choice, attention = build(self.choice, config.attention, self.spec, self.registry, self.tp, device)
        runner = ModelRunner(
            model,
            attention,
            sampler,
            self.tp,
            num_slots=num_slots,
            max_blocks=cdiv(self.max_model_len, self.spec.block_size),
            block_size=self.spec.block_size,
            hidden_size=model_config.hidden_size,
            device=device,
            beside=beside,
        )
        runner.adapters = adapters
        return runner

    def _sampler(self, num_slots: int, device: torch.device) -> Sampler:
        config, vocab_size = self.config, self.model_config.vocab_size
        sampler_class = self.registry.resolve("sampler", config.sampler.name)
        with self.registry.building("sampler", config.sampler.name):
            sampler: Sampler = sampler_class(num_slots + 1, vocab_size, device, config.sampler.options)
        entry = self.registry.entry("sampler", config.sampler.name)
        sampler.masks_per_slot = masks_per_slot(sampler_class, config.scheduler)
        look_at_sampler(entry, sampler, vocab_size)
        if why := undoes_sample(sampler_class):
            self.registry.pass_over(PluginError(f"{entry}: {why}"))
        return sampler

    def _bind(self, runner: ModelRunner, num_blocks: int, device: torch.device) -> None:
        cache = self._cache(num_blocks, device)
        with calling("attention backend", self.choice.name, runner.attention, "bind"):
            runner.attention.bind(cache)

    def _graphs(self, runner: ModelRunner) -> _Graphs:
        """The graphs for this device, backend and configuration, not yet captured."""
        if self.device_type != "cuda" or self.config.enforce_eager or not self.choice.cuda_graphs():
            return None, None, None
        from minivllm.core.cuda_graphs import DecodeGraphs
        from minivllm.core.mixed_graphs import MixedGraphs
        from minivllm.core.prompt_graphs import PromptGraphs

        seqs = self.config.scheduler.max_num_seqs
        decodes = DecodeGraphs(runner, min(seqs, self.config.max_cudagraph_capture_size or seqs))
        most = self.spec.max_num_batched_tokens
        if not self.choice.prompt_graphs() or not runner.attention.captures_prompts:
            return decodes, None, None
        prompts = PromptGraphs(runner, most, self.tp, drafts=self.config.scheduler.num_speculative_tokens > 0)
        if self._drafts or not self.choice.mixed_graphs():
            return decodes, prompts, None
        return decodes, prompts, MixedGraphs(runner, decodes, prompts, most)

    def _find_kernels(
        self, runner: ModelRunner, decodes: DecodeGraphs | None, prompts: PromptGraphs | None, mixed: MixedGraphs | None
    ) -> None:
        """Compile all kernels that steps will launch, without launching any."""
        most, num_slots = self.spec.max_num_batched_tokens, runner.num_slots
        with compile_only():
            for beside in dict.fromkeys((1, 5, 17, num_slots - 1)):  # decodes, whose kernels take longest to compile
                if 0 < beside < num_slots:
                    runner.dry_run(min(most, 512), self.max_model_len, beside)
            for graphs in (decodes, prompts, mixed):
                if graphs is not None:
                    graphs.launch_all_kinds()
            runner.launch_all_refinements()
            for adapted in (False, True) if self.config.enable_lora else (False,):
                for tokens in (512, 1025):  # some; and many in uneven shares, which use library matmuls
                    runner.dry_run(min(most, tokens), self.max_model_len, adapted=adapted)
            launch_all_heads(runner.model, runner.attention)

    def _capture(
        self, runner: ModelRunner, decodes: DecodeGraphs | None, prompts: PromptGraphs | None, mixed: MixedGraphs | None
    ) -> None:
        """Capture what is captured in advance, and hand it to the runner."""
        vocab_size = self.model_config.vocab_size
        if decodes is not None:
            from minivllm.core.sample_graphs import DRAFTED_ROWS, FEW_ROWS, SampleGraphs

            decodes.capture(self.num_blocks, vocab_size)
            runner.graphs = decodes
            most = DRAFTED_ROWS if self.config.scheduler.num_speculative_tokens else FEW_ROWS
            samples = runner.sample_graphs = SampleGraphs(runner, decodes, most)
            samples.capture()
        if prompts is not None:
            prompts.capture(self.num_blocks, vocab_size)
            runner.prompt_graphs = prompts
        runner.mixed_graphs = mixed

    def _weights(self) -> str:
        """What is kept how, for people."""
        kept = self.dtype if self.config.quantization == "none" else self.config.quantization
        cache = ", fp8 cache" if self.config.cache.dtype == "fp8" else ""
        lora = ", LoRA merged" if self.config.model.lora is not None else ""
        draft = "" if self.config.draft_model is None else f", drafts of {self.config.scheduler.draft_model}"
        return f"{kept} weights{lora}{', packed' if self.packed_weights else ''}{cache}{draft}"

    def describe(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name(self.device_index) if self.device_type == "cuda" else "cpu"
        graphs = self.runner is not None and self.runner.graphs is not None
        return {
            "device": name,
            "dtype": self.dtype,
            "attention": self.choice.name,
            "attention_why": self.choice.why,
            "cuda_graphs": graphs,
            "packed_weights": self.packed_weights,
            "kv_cache_dtype": str(self.spec.cache_dtype).removeprefix("torch."),
            "weights": self._weights(),
        }

    def shutdown(self) -> None:
        """Drop the weights, cache and graphs, and return their memory to the device."""
        runner, self.runner, self._sleeping = self.runner, None, None
        self._draft_worker = self._drafter = None
        with self._on_device():
            if self.device_type == "cuda":
                torch.cuda.synchronize()  # a step in flight writes to host memory, too
            del runner
            gc.collect()
            if self.device_type == "cuda":
                torch.cuda.empty_cache()

    # ------------------------------------------------------------------ memory

    def _cache(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """Keys and values of all layers; block 0 is for padding. Zeroed, as a masked zero times garbage may be NaN."""
        spec = self.spec
        shape = (spec.num_layers, 2, num_blocks + 1, spec.block_size, spec.num_kv_heads, spec.head_dim)
        dtype = spec.cache_dtype
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            if self._sleeping is not None and num_blocks:
                return self._sleeping.cache(nbytes).view(dtype).view(shape)
            if device.type == "cpu":  # numpy's zeros are allocated when first written to
                return torch.from_numpy(np.zeros(nbytes, np.uint8)).view(dtype).view(shape)
            return torch.zeros(nbytes, dtype=torch.uint8, device=device).view(dtype).view(shape)
        except (MemoryError, OSError, ValueError, OverflowError, torch.OutOfMemoryError) as error:
            raise ConfigError(
                f"a cache of {num_blocks} blocks of {spec.block_size} tokens takes {nbytes / 2**30:.1f} GiB, and there "
                "is no room for that; lower cache.num_blocks or cache.block_size, or leave them out"
            ) from error

    def _block_bytes(self) -> int:
        """Of keys and values, the draft model's included."""
        spec, itemsize = self.spec, self.spec.cache_dtype.itemsize
        drafts = 0 if self._draft_worker is None else self._draft_worker._block_bytes()
        return 2 * spec.num_layers * spec.block_size * spec.num_kv_heads * spec.head_dim * itemsize + drafts

    def _least_cache_bytes(self) -> int:
        """The bytes of ``cache.num_blocks``, or of one sequence of the user's ``max_model_len``."""
        tokens = self.config.max_model_len or 1
        return self._block_bytes() * (1 + (self.config.cache.num_blocks or cdiv(tokens, self.spec.block_size)))

    def _num_blocks(self, device: torch.device) -> int:
        """The number of usable blocks: ``cache.num_blocks``, or as many as fit.

        Raises:
            ConfigError: not even one sequence of the user's ``max_model_len`` fits; says how many tokens do.
        """
        cache, spec = self.config.cache, self.spec
        block_bytes = self._block_bytes()
        if cache.num_blocks is not None:
            return cache.num_blocks
        most = spec.max_num_seqs * cdiv(spec.max_model_len, spec.block_size)
        if device.type == "cpu":
            return max(min(_CPU_CACHE_BYTES // block_bytes, most), 1)
        room = self._free_bytes_at_peak()
        blocks = int(room // block_bytes) - 1
        wanted = self.config.max_model_len or 1
        if blocks * spec.block_size < wanted:
            raise ConfigError(
                f"{max(blocks, 0) * spec.block_size} tokens of cache fit into the {max(room, 0) / 2**30:.2f} GiB that "
                f"are left, and max_model_len={wanted} needs more: lower max_model_len, "
                f"scheduler.max_num_batched_tokens={spec.max_num_batched_tokens} or "
                f"scheduler.max_num_seqs={spec.max_num_seqs}, or raise "
                f"cache.gpu_memory_utilization={cache.gpu_memory_utilization}"
                f"{', or type packed_weights=false' if self.packed_weights else ''}"
            )
        return min(blocks, most)

    def _free_bytes_at_peak(self) -> float:
        """Run the largest batch once, on the bound one-block cache, and measure the memory left."""
        assert self.runner is not None and self._memory is not None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.runner.dry_run(self.spec.max_num_batched_tokens, self.max_model_len, adapted=self.config.enable_lora)
        if self._drafter is not None:
            self._drafter.runner.dry_run(self.spec.max_num_batched_tokens, self.max_model_len)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return self._memory.left() - peak
