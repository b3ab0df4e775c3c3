"""Other weights for a model that runs: what is checked before any is written, and the load itself, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minivllm.core.interfaces import Model
from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError, EngineDeadError, RequestError, described, shown
from minivllm.layers.parameter import scales_of
from minivllm.models.checkpoint import read_model_config, read_quantization
from minivllm.models.fp8_checkpoint import dequantized
from minivllm.models.loader import norm_pairs, refuse_nonfinite, refuse_unscaled, renew_copies, shapes_of
from minivllm.models.lora import Adapter
from minivllm.models.upload import PinnedUpload
from minivllm.naming import listed

Weights = Iterable[tuple[str, torch.Tensor]]

# --------------------------------------------------------------------------- before


def check_folder(
    folder: Path,
    model_config: ModelConfig,
    model_class: type[Model],
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    key: str,
    lora: Path | None = None,
) -> None:
    """Read all of a checkpoint but its tensors' numbers. ``read``, ``key``: as in ``read_model_config``. ``lora``: the
    folder of an adapter that is merged into it.

    Raises:
        CheckpointError: it is none, one of another model, or its files or tensors are not those that the model loads;
            or not those that the adapter changes.
    """
    if different := model_config.differences(read_model_config(folder, read, key)):
        raise CheckpointError(
            f"{key}={folder} is a checkpoint of another model than the engine's: {listed(different, 4)}; make a new "
            "engine of it"
        )
    weights = dequantized(shapes_of(folder), read_quantization(folder), "meta")
    if lora is not None:
        weights = Adapter(lora, model_config).merge(weights, "meta")
    with torch.device("meta"):
        model = model_class(model_config, TensorParallel())
    try:
        model.load_weights(weights)
    except CheckpointError:
        raise
    except Exception:  # a load_weights of its own may need the numbers
        return


def check_tensors(weights: Any) -> Weights:
    """``weights``, whose first item was looked at. Raises RequestError if they are no names with tensors."""
    if isinstance(weights, Mapping) or not isinstance(weights, Iterable):
        raise RequestError(
            f"weights_iterator is a {type(weights).__name__}, and names with tensors are needed, as STATE_DICT.items()"
        )
    its = iter(weights)
    for first in its:
        if not isinstance(first, tuple | list) or not _is_pair(*first):
            raise RequestError(f"weights_iterator gives {shown(first)}, not a name with its tensor")
        return chain([first], its)
    raise RequestError("weights_iterator gives nothing; an iterator that was read before is at its end")


def _is_pair(*items: Any) -> bool:
    return len(items) == 2 and isinstance(items[0], str) and isinstance(items[1], torch.Tensor)


# --------------------------------------------------------------------------- the load


def reload_model(model: Model, weights: Weights) -> None:
    """Load other weights into a model that runs, whose CUDA graphs read its tensors where they are.

    Raises:
        CheckpointError: the tensors do not fit; some are in the model by then.
        EngineDeadError: the model's ``load_weights`` raised a RequestError.
        TypeError: the model's ``load_weights`` replaced a tensor instead of writing to it.
    """
    assert isinstance(model, nn.Module)
    for _, scale in scales_of(model):
        scale.fill_(float("nan"))  # as before the first load: what stays so was not loaded
    for _, product in norm_pairs(model):
        product.folded_norm = None
    before = _addresses(model)
    with PinnedUpload():
        try:
            model.load_weights(weights)
        except RequestError as error:  # which would say that nothing was written
            raise EngineDeadError(f"{type(model).__name__}.load_weights raised {described(error)}") from error
    refuse_unscaled(model)
    refuse_nonfinite(model)
    renew_copies(model)  # a load_weights of the model's own may not have
    after = _addresses(model)
    if moved := [name for name, address in before.items() if after.get(name) != address]:
        raise TypeError(
            f"{type(model).__name__}.load_weights, called again, replaced {listed(moved)}; CUDA graphs read the former "
            "ones: write to the tensors that there are, with copy_"
        )


def _addresses(model: nn.Module) -> dict[str, int]:
    """Of every parameter, buffer and other tensor that a module has."""
    return {
        ".".join(filter(None, (path, name))): value.data_ptr()
        for path, module in model.named_modules()
        for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items())
        if isinstance(value, torch.Tensor)
    }


def outside_inference_mode(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, computed outside of inference mode, in which a trainer could not go on with what it made. Raises
    EngineDeadError for what the caller's iterator raises."""
    its = iter(weights)
    while True:
        try:
            with torch.inference_mode(False):
                item = next(its)
        except StopIteration:
            return
        except Exception as error:
            raise EngineDeadError(f"weights_iterator raised {described(error)}") from error
        yield item
