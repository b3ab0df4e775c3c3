"""Builds an engine from a frozen config: the one place where names are resolved and components are connected."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.config.settle import check_lora, check_options
from minivllm.core.block_manager import PagedBlockManager
from minivllm.core.engine import LLMEngine
from minivllm.core.interfaces import Sampler
from minivllm.core.model_config import ModelConfig
from minivllm.core.overrides import definer
from minivllm.errors import (
    CheckpointError,
    ConfigError,
    MinivllmError,
    PluginError,
    RequestError,
    calling,
    described,
    named,
    shown,
)
from minivllm.models.checkpoint import fetch, read_model_config
from minivllm.models.lora_config import PATH, adapter_folder, lora_folder, read_lora_config
from minivllm.models.tokenizer import load_tokenizer
from minivllm.naming import listing
from minivllm.rounding import cdiv

if TYPE_CHECKING:
    import torch

    from minivllm.config.engine_config import EngineConfig, ModelOptions
    from minivllm.core.interfaces import Executor
    from minivllm.executors.processes import Child
    from minivllm.plugins.registry import Entry

_DESCRIBED = ("device", "attention", "dtype")  # the required keys of ``Executor.describe``


def build_engine(config: EngineConfig) -> LLMEngine:
    """Load weights, size the cache, capture graphs; returns when the engine can take requests.

    Raises:
        ConfigError, CheckpointError, PluginError: as early as possible, before weights are read.
    """
    from minivllm.plugins.manager import default_registry

    registry = default_registry()
    check_lora(config)
    _check_adapter(config)
    path, model_config = find_model(config)
    component, option = registry.model_for_architecture(model_config.architecture), config.model.name
    check_options("model", config.model.options, [component], typed=None if option == "checkpoint" else option)
    model_config = replace(model_config, options=config.model.options)
    max_model_len = model_length(config, model_config)
    if config.draft_model is not None:
        draft = find_draft_model(config, config.draft_model, model_config, max_model_len)
        model_config = replace(model_config, draft=draft)
    executor_name = config.executor.name
    if executor_name == "auto":
        executor_name = "single" if config.tp == 1 else "multiproc"
    if executor_name == "single" and config.device != "cpu":  # other executors' ranks open their own devices
        from minivllm.kernels._triton import open_device

        open_device(0)  # concurrently with importing torch
    with ExitStack() as undo:
        children: list[Child] = []
        plausible = model_config.num_heads % config.tp == 0 and config.tp <= (os.cpu_count() or 1)
        if executor_name == "multiproc" and plausible:  # so that they import torch concurrently with this process
            from minivllm.executors.processes import start_children

            children = start_children(config.tp, config.device != "cpu" and "devices" not in config.executor.options)
            for child in children:
                undo.callback(child.kill)
        executor_class = registry.resolve("executor", executor_name)
        sampler_class = registry.resolve("sampler", config.sampler.name)
        scheduler_class = registry.resolve("scheduler", config.scheduler.name)
        if config.scheduler.num_speculative_tokens and not scheduler_class.speculates:
            raise ConfigError(
                f"scheduler.num_speculative_tokens={config.scheduler.num_speculative_tokens} is not supported by "
                f"scheduler={config.scheduler.name}; leave it out"
            )
        if config.draft_model is not None and not scheduler_class.asks_draft_models:
            raise ConfigError(
                f"scheduler.draft_model={config.scheduler.draft_model} is not supported by "
                f"scheduler={config.scheduler.name}; leave it out"
            )
        with registry.building("sampler", config.sampler.name):
            entry = registry.entry("sampler", config.sampler.name)
            row = _row_of(entry, sampler_class.row)
            _check_sampler(entry, sampler_class)
        with registry.building("executor", executor_name):
            executor = executor_class(config, model_config, max_model_len, registry)
        if children:
            executor.take(children)
        undo.pop_all()
    try:
        tokenizer = load_tokenizer(config.model, path, model_config, config.load_format)  # while the device opens
        with registry.building("executor", executor_name):
            num_blocks = executor.start()
        _check_started(executor_name, executor, num_blocks)
        blocks = PagedBlockManager(
            num_blocks,
            config.cache.block_size,
            config.scheduler.max_num_seqs,
            cdiv(max_model_len, config.cache.block_size),
            prefix_caching=config.cache.enable_prefix_caching,
        )
        with registry.building("scheduler", config.scheduler.name):
            scheduler = scheduler_class(config.scheduler, blocks, max_model_len, row)
        from minivllm.executors.first_calls import look_at_executor, look_at_scheduler

        look_at_scheduler(registry.entry("scheduler", config.scheduler.name), scheduler, row)
        look_at_executor(registry.entry("executor", executor_name), executor, model_config.vocab_size)
        return LLMEngine(
            config,
            model_config,
            max_model_len,
            tokenizer=tokenizer,
            scheduler=scheduler,
            sampler_class=sampler_class,
            executor=executor,
            num_blocks=num_blocks,
        )
    except BaseException as error:
        try:
            executor.shutdown()
        except Exception as another:
            error.add_note(f"then, in {named('executor', executor_name, executor)}: {described(another)}")
        raise


def _row_of(entry: Entry, row: Any) -> np.dtype:
    """A sampler's ``row`` as a dtype. Raises PluginError if it is not one."""
    try:
        found = None if row is None else np.dtype(row)
    except TypeError:
        found = None
    if found is None or not found.itemsize or found.itemsize % 4:
        said = shown(row) if found is None else f"{found}, {found.itemsize} bytes"
        raise PluginError(f"{entry}: its row is {said}, not a numpy dtype of a multiple of 4 bytes")
    return found


def _check_sampler(entry: Entry, cls: type[Sampler]) -> None:
    """Raise PluginError if its ``extra_args`` is not a set of names, or if a hook that it needs is not overridden."""
    names: Any = cls.extra_args
    if not isinstance(names, frozenset | set) or not all(isinstance(name, str) for name in names):
        raise PluginError(f"{entry}: its extra_args is {shown(names)}, not a frozenset of names")
    for given in ("words", "wants_tokens"):
        if definer(cls, given) is not Sampler and cls.take_tokens is Sampler.take_tokens:
            raise PluginError(f"{entry}: it overrides {given}, but not take_tokens, which gets them")
    if cls.takes_masks and cls.take_masks is Sampler.take_masks:
        raise PluginError(f"{entry}: its takes_masks is true, but it does not override take_masks")


def _check_started(name: str, executor: Executor, num_blocks: Any) -> None:
    """Validate what the executor's ``start`` and ``describe`` returned. Raises PluginError."""
    if isinstance(num_blocks, bool) or not isinstance(num_blocks, Integral) or num_blocks < 0:
        who = named("executor", name, executor)
        raise PluginError(f"{who}: start returned {shown(num_blocks)}, not a number of cache blocks")
    with calling("executor", name, executor, "describe"):
        about = executor.describe()
    if not isinstance(about, Mapping) or (missing := [key for key in _DESCRIBED if key not in about]):
        lacks = f", which lacks {listing(missing)}" if isinstance(about, Mapping) else ", not a mapping"
        raise PluginError(f"{named('executor', name, executor)}: describe returned {shown(about)}{lacks}")
    with calling("executor", name, executor, "check_health"):
        executor.check_health()


def find_model(config: EngineConfig, key: str = "model.path") -> tuple[Path | None, ModelConfig]:
    """The checkpoint's folder and config; with dummy weights the published config is enough, and the folder is None.
    ``key``: where the user could give a folder."""
    from minivllm.plugins.manager import default_registry

    options, read = config.model, default_registry().read_config
    if config.load_format == "dummy" and options.path is None and options.hf_config:
        return None, ModelConfig.from_hf(read(options.hf_config), where="model.hf_config")
    path = fetch(options, key)
    return path, read_model_config(path, read, key)


def find_draft_model(
    config: EngineConfig, options: ModelOptions, model_config: ModelConfig, max_model_len: int
) -> ModelConfig:
    """The config of the draft model.

    Raises:
        ConfigError, CheckpointError: it cannot draft for this model, or is none.
    """
    from minivllm.plugins.manager import default_registry

    key = "scheduler.draft_model"
    what = f"{key}={config.scheduler.draft_model}"
    _, draft = find_model(replace(config, model=options), key)
    try:
        default_registry().model_for_architecture(draft.architecture)
    except MinivllmError as error:
        raise type(error)(f"{what}: {error}") from error
    if draft.vocab_size != model_config.vocab_size:
        raise ConfigError(
            f"{what} has a vocabulary of {draft.vocab_size} tokens, and the model one of {model_config.vocab_size}; a "
            "draft model needs the same one (vocab_size in config.json): take another, as a smaller one of its family"
        )
    if draft.max_position < max_model_len:
        raise ConfigError(
            f"{what} was made for {draft.max_position} positions, and the model has {max_model_len}; type "
            f"max_model_len={draft.max_position}"
        )
    return draft


def _check_adapter(config: EngineConfig) -> None:
    """Raise what can be said against ``model.lora`` without reading tensors."""
    if config.model.lora is not None and config.load_format == "dummy":
        raise ConfigError(
            f"model.lora={config.model.lora} with load_format=dummy: an adapter is merged into a model's weights, and "
            "random ones are none; leave one out"
        )
    if (folder := lora_folder(config.model.lora)) is not None:
        read_lora_config(folder)


def find_weights(
    config: EngineConfig, model_config: ModelConfig, weights_path: Any, weights_iterator: Any
) -> Path | Iterable[tuple[str, torch.Tensor]] | None:
    """What ``Executor.reload_weights`` gets for these arguments of ``LLMEngine.reload_weights``, after all checks that
    are possible before a weight is written.

    Raises:
        RequestError: the arguments contradict each other, or there is nothing to load.
        CheckpointError: the folder is no checkpoint, or not one of this model.
    """
    from minivllm.models.reloading import check_folder, check_tensors
    from minivllm.plugins.manager import default_registry

    if weights_path is not None and weights_iterator is not None:
        raise RequestError("weights_path and weights_iterator are both given; give one of them")
    if weights_iterator is not None:
        return check_tensors(weights_iterator)
    if weights_path is None and config.load_format == "dummy":
        raise RequestError(
            "load_format=dummy: the engine has no checkpoint to read again; pass weights_path=DIR (in Python, also "
            "weights_iterator)"
        )
    if not isinstance(weights_path, str | os.PathLike | None) or weights_path == "":
        raise RequestError(f"weights_path={shown(weights_path)} is not the path of a folder")
    lora = None  # weights that are given are taken as they are
    if weights_path is None:
        folder, key, lora = fetch(config.model), "model.path", lora_folder(config.model.lora)
    else:  # ranks may run in another folder
        folder, key = Path(os.path.abspath(os.path.expanduser(weights_path))), "weights_path"
    registry = default_registry()
    model_class = registry.model_class_for(model_config.architecture)
    check_folder(folder, model_config, model_class, registry.read_config, key, lora)
    return None if weights_path is None else folder  # each rank finds its own itself


def find_adapter(config: EngineConfig, model_config: ModelConfig, path: str, key: str = PATH) -> Path:
    """The folder of a request's LoRA adapter, whose path ``key`` gives, after all checks that are possible before a
    rank reads it.

    Raises:
        CheckpointError: it has no adapter, or none of this model that single requests may have.
    """
    import torch

    from minivllm.executors.worker import resolve_device, resolve_dtype
    from minivllm.models.request_adapters import check_adapter
    from minivllm.plugins.manager import default_registry

    folder = Path(os.path.abspath(adapter_folder(path, key)))  # ranks may run in another one
    model_class = default_registry().model_class_for(model_config.architecture)
    dtype = getattr(torch, resolve_dtype(config.dtype, resolve_device(config.device), model_config.dtype))
    try:
        check_adapter(folder, model_config, model_class, config.max_lora_rank, dtype, key)
    except CheckpointError as error:
        if str(error).startswith(key):
            raise
        raise CheckpointError(f"{key}: {error}") from error  # it names a file
    return folder


def model_length(config: EngineConfig, model_config: ModelConfig) -> int:
    """``max_model_len``, or the model's limit. Raises ConfigError for more positions than the model supports."""
    wanted = config.max_model_len
    if wanted is not None and wanted > model_config.max_position:
        raise ConfigError(
            f"max_model_len={wanted} is more than the {model_config.max_position} positions that the model was made "
            "for; lower it"
        )
    return wanted or model_config.max_position
