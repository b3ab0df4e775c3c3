"""LoRA adapters of single requests: gives a model's linear layers places for them, and loads one into a place.

``lora.py`` reads an adapter; ``layers/adapters.py`` has the tensors that steps read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple, cast

import torch
import xxhash
from torch import nn

from minivllm.core.adapter_rows import AdapterRows
from minivllm.core.interfaces import Model
from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError, ConfigError
from minivllm.layers.adapters import LinearAdapters
from minivllm.layers.linear import LinearBase
from minivllm.layers.parameter import ShardId, whole_of
from minivllm.layers.usual import usual_products
from minivllm.models.loader import targets_of
from minivllm.models.lora import Adapter, Change, Problems
from minivllm.models.lora_config import CONFIG, PATH, TENSORS


class _Part(NamedTuple):
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
    try:
        for _, module in products:
            module.adapters = LinearAdapters(module.weight, rows, places, rank, dtype)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is one of the former, and so is a CPU's
        nbytes = sum(LinearAdapters.nbytes(module.weight, places, rank, dtype) for _, module in products)
        raise ConfigError(
            f"max_loras={places} of max_lora_rank={rank} take {nbytes / 2**30:.1f} GiB beside the weights, and there "
            "is no room for that; lower one of them"
        ) from error


class FittingAdapter:
    """The adapter in a folder, which ``key`` names, all of it read and compared with a model, which may be one without
    weights. ``rank``, ``dtype``: as given to ``add_places``.

    Raises:
        CheckpointError: it is none, none of this model, of a higher rank, or it has more than linear layers can add.
    """

    def __init__(
        self, model: Model, model_config: ModelConfig, folder: Path, rank: int, dtype: torch.dtype, key: str = PATH
    ) -> None:
        self._model = model
        adapter = Adapter(folder, model_config, key)
        self._parts = _parts(model, adapter, rank, dtype)

    @property
    def fingerprint(self) -> str:
        """Of all that it has: ranks that have read the same numbers have the same."""
        digest = xxhash.xxh3_128()
        for part in self._parts:
            change = part.change
            digest.update(repr((change.names, change.factor)).encode())
            for tensor in (change.a, change.b):
                assert tensor is not None
                digest.update(repr((tensor.dtype, tensor.shape)).encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def load(self, place: int) -> None:
        """Write it into a place of the model's layers, in which there may be another."""
        for _, module in usual_products(cast(nn.Module, self._model)):
            assert module.adapters is not None
            module.adapters.clear(place)
        for module, shard_id, change in self._parts:
            assert module.adapters is not None
            norm: torch.Tensor | None = getattr(module, "folded_norm", None)
            module.adapters.load(place, shard_id, *_scaled(change), norm)


def check_adapter(
    folder: Path, model_config: ModelConfig, model_class: type[Model], rank: int, dtype: torch.dtype, key: str
) -> None:
    """Raises CheckpointError as ``FittingAdapter``."""
    FittingAdapter(_without_weights(model_class, model_config), model_config, folder, rank, dtype, key)


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


def _parts(model: Model, adapter: Adapter, rank: int, dtype: torch.dtype) -> list[_Part]:
    products = {id(module.weight): module for _, module in usual_products(cast(nn.Module, model))}
    targets = targets_of(cast(nn.Module, model), getattr(model, "packed", None) or {})
    found: list[_Part] = []
    problems: Problems = defaultdict(list)
    highest = 0
    for name, change in adapter.changes.items():
        _, param, shard_id = targets.get(name, ("", None, None))
        module = products.get(id(param))
        shape = None if param is None else whole_of(param, shard_id).shape
        if change.whole is not None:
            problems["whole tensors (modules_to_save), which requests cannot have of their own"] += change.names
        elif param is None:
            problems["for no tensor of the model"] += change.names
        elif module is None:
            problems["for what takes none of single requests, as embeddings, experts and their routers"] += change.names
        elif change.shapes != {shape}:
            its = " and ".join(str(list(one)) for one in change.shapes)
            problems["misshapen"].append(f"for {name} {its} where the model has {list(shape or ())}")
        elif change.a is not None and len(change.a) > rank:
            highest = max(highest, len(change.a))
        elif not all(part.to(dtype).isfinite().all() for part in _scaled(change)):  # other requests' rows would get NaN
            problems[f"too large for {str(dtype).removeprefix('torch.')}"].append(name)
        else:
            found.append(_Part(module, shard_id, change))
    adapter.refuse("cannot be an adapter of single requests", problems)
    if highest:
        raise CheckpointError(f"{adapter} is of rank {highest}; type max_lora_rank={highest}, which is {rank}")
    return found
