"""LoRA adapters of single requests: gives a model's linear layers places for them, and loads one into a place.

``lora.py`` reads an adapter; ``layers/adapters.py`` has the tensors that steps read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn

from minivllm.core.adapter_rows import AdapterRows
from minivllm.core.interfaces import Model
from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import ConfigError
from minivllm.layers.adapters import LinearAdapters
from minivllm.layers.linear import LinearBase
from minivllm.layers.parameter import ShardId, whole_of
from minivllm.layers.usual import usual_products
from minivllm.models.loader import targets_of
from minivllm.models.lora import Adapter, Change, Problems
from minivllm.models.lora_config import CONFIG, TENSORS


class _Fitting(NamedTuple):
    """A linear layer's part, and what an adapter has for it."""

    module: LinearBase
    shard_id: ShardId
    change: Change


def add_places(model: Model, rows: AdapterRows, places: int, rank: int, dtype: torch.dtype) -> None:
    """Give each linear layer ``places`` for adapters, of this rank of adapters at most. Raises ConfigError if the model
    has no layer that takes any."""
    products = list(usual_products(cast(nn.Module, model)))
    if not products:
        raise ConfigError(
            f"enable_lora=true: {type(model).__name__} has no linear layer of minivllm.layers that takes adapters; "
            "leave it out"
        )
    for _, module in products:
        module.adapters = LinearAdapters(module.weight, rows, places, rank, dtype)


def load_adapter(
    model: Model, model_config: ModelConfig, place: int, folder: Path, rank: int, dtype: torch.dtype
) -> None:
    """Load an adapter into a place, in which there may be another. ``rank``, ``dtype``: as given to ``add_places``.

    Raises:
        CheckpointError: as ``check_adapter``; nothing was written.
    """
    fitting = _fitting(model, Adapter(folder, model_config, "lora_path"), rank, dtype)
    for _, module in usual_products(cast(nn.Module, model)):
        assert module.adapters is not None
        module.adapters.clear(place)
    for module, shard_id, change in fitting:
        assert module.adapters is not None
        norm: torch.Tensor | None = getattr(module, "folded_norm", None)
        module.adapters.load(place, shard_id, *_scaled(change), norm)


def check_adapter(
    folder: Path, model_config: ModelConfig, model_class: type[Model], rank: int, dtype: torch.dtype, key: str
) -> None:
    """Read all of an adapter, whose path ``key`` gives, and compare it with the model.

    Raises:
        CheckpointError: it is none, none of this model, of a higher rank, or it has more than linear layers can add.
    """
    _fitting(_without_weights(model_class, model_config), Adapter(folder, model_config, key), rank, dtype)


def write_random_adapter(
    folder: Path, model_config: ModelConfig, model_class: type[Model], rank: int, seed: int
) -> None:
    """Write an adapter of this rank, in PEFT's format and bfloat16, for all linear layers that take one."""
    from safetensors.torch import save_file

    model = cast(nn.Module, _without_weights(model_class, model_config))
    products = {id(module.weight) for _, module in usual_products(model)}
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (_, param, shard_id) in targets_of(model, getattr(model, "packed", None) or {}).items():
        if id(param) in products:
            out, inner = whole_of(param, shard_id).shape
            for letter, shape in (("A", (rank, inner)), ("B", (out, rank))):
                part = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
                tensors[f"base_model.model.{name.removesuffix('.weight')}.lora_{letter}.weight"] = part
    save_file(tensors, folder / TENSORS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def _scaled(change: Change) -> tuple[torch.Tensor, torch.Tensor]:
    """A, and B times its factor, in float32."""
    assert change.a is not None and change.b is not None
    return change.a.float(), change.b.float() * change.factor


def _without_weights(model_class: type[Model], model_config: ModelConfig) -> Model:
    with torch.device("meta"):
        return model_class(model_config, TensorParallel())


def _fitting(model: Model, adapter: Adapter, rank: int, dtype: torch.dtype) -> list[_Fitting]:
    products = {id(module.weight): module for _, module in usual_products(cast(nn.Module, model))}
    targets = targets_of(cast(nn.Module, model), getattr(model, "packed", None) or {})
    found: list[_Fitting] = []
    problems: Problems = defaultdict(list)
    for name, change in adapter.changes.items():
        _, param, shard_id = targets.get(name, ("", None, None))
        module = products.get(id(param))
        shape = None if param is None else whole_of(param, shard_id).shape
        if change.whole is not None:
            problems["whole tensors (modules_to_save), which requests cannot have of their own"] += change.names
        elif param is None:
            problems["for no tensor of the model"] += change.names
        elif module is None:
            problems["for a tensor that is of no linear layer of the decoder"] += change.names
        elif change.shapes != {shape}:
            its = " and ".join(str(list(one)) for one in change.shapes)
            problems["misshapen"].append(f"for {name} {its} where the model has {list(shape or ())}")
        elif change.a is not None and len(change.a) > rank:
            problems[f"of a rank above max_lora_rank={rank}"].append(f"{name} of {len(change.a)}")
        elif not all(part.to(dtype).isfinite().all() for part in _scaled(change)):  # other requests' rows would get NaN
            problems[f"too large for {str(dtype).removeprefix('torch.')}"].append(name)
        else:
            found.append(_Fitting(module, shard_id, change))
    adapter.refuse("cannot be an adapter of single requests", problems)
    return found
