"""Other weights in a model: whoever loads them, they are folded and scaled anew, and stay where they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError
from minivllm.layers.linear import _StackedLinear
from minivllm.models.checkpoint import read_model_config
from minivllm.models.loader import build_model, iterate_safetensors, load_weights
from minivllm.models.qwen3 import Qwen3ForCausalLM
from minivllm.models.reloading import check_folder, reload_model

Checkpoints = Callable[..., Path]


def build(model_class: type[Any], folder: Path, quantization: str = "none") -> Any:
    config, weights = read_model_config(folder), iterate_safetensors(folder)
    return build_model(model_class, config, TensorParallel(), "cpu", torch.float32, weights, 64, quantization)


class OwnLoader(Qwen3ForCausalLM):
    """Knows nothing of folded norms."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            *path, last, leaf = name.split(".")
            ours, shard = self.packed.get(last, (last, None))
            param = self.get_parameter(".".join([*path, ours, leaf]))
            param.weight_loader(param, tensor, shard)  # type: ignore[attr-defined]


class OwnTensor(Qwen3ForCausalLM):
    """Keeps one beside its parameters."""

    largest: torch.Tensor

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        load_weights(self, weights, packed=self.packed)
        self.largest = self.lm_head.weight.amax()


class WritesItself(Qwen3ForCausalLM):
    """The second time, past the scales of weights in float8."""

    loaded = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self.loaded:
            super().load_weights(weights)
        for param in self.parameters() if self.loaded else ():
            param.data.zero_()
        self.loaded = True


def test_a_loader_of_its_own_need_not_know_of_folding(
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_StackedLinear, "foldable", property(_StackedLinear._may_fold))  # as on a GPU
    old, new = tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", seed=1)
    model, fresh = build(OwnLoader, old), build(OwnLoader, new).state_dict()
    for _ in range(2):
        with torch.inference_mode():
            reload_model(model, iterate_safetensors(new))
        assert all(torch.equal(fresh[name], value) for name, value in model.state_dict().items())


def test_scales_are_written_where_they_are(tiny_checkpoint: Checkpoints) -> None:
    old, new = tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", seed=1)
    model, fresh = (build(Qwen3ForCausalLM, folder, "fp8") for folder in (old, new))
    ours, theirs = (its.model.layers[0].mlp.down_proj for its in (model, fresh))
    scale, address = ours.weight_scale, ours.weight_scale.data_ptr()
    assert not torch.equal(scale, theirs.weight_scale)
    reload_model(model, iterate_safetensors(new))
    assert ours.weight_scale is ours.weight.scale is scale and scale.data_ptr() == address
    assert torch.equal(scale, theirs.weight_scale) and torch.equal(ours.weight.float(), theirs.weight.float())


def test_a_weight_in_float8_that_is_written_without_its_scale_is_found(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("qwen3")
    model = build(WritesItself, folder, "fp8")
    with pytest.raises(CheckpointError, match=r"its model's load_weights wrote to it itself"):
        reload_model(model, iterate_safetensors(folder))


def test_a_tensor_that_is_replaced_is_named(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("qwen3")
    model = build(OwnTensor, folder)
    with pytest.raises(TypeError, match=r"OwnTensor\.load_weights, called again, replaced largest; .* with copy_"):
        reload_model(model, iterate_safetensors(folder))


def test_a_loader_that_needs_numbers_is_not_asked_before(tiny_checkpoint: Checkpoints) -> None:
    class NeedsNumbers(Qwen3ForCausalLM):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, tensor) for name, tensor in weights if tensor.sum().item())

    class RefusesAll(Qwen3ForCausalLM):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            raise CheckpointError("none of these")

    folder = tiny_checkpoint("qwen3")
    config = read_model_config(folder)
    check_folder(folder, config, NeedsNumbers, dict, "weights_path")
    with pytest.raises(CheckpointError, match="none of these"):
        check_folder(folder, config, RefusesAll, dict, "weights_path")
