"""What a config.json says, in the words of whichever transformers or architecture wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM
from minivllm.core.model_config import ModelConfig
from minivllm.errors import CheckpointError
from minivllm.layers.attention import Attention
from minivllm.layers.rotary import frequencies

USUAL: dict[str, Any] = {
    "architectures": ["X"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip


def read(**keys: Any) -> ModelConfig:
    return ModelConfig.from_hf({key: value for key, value in (USUAL | keys).items() if value != "absent"})


def test_a_part_of_the_head_that_rotates_is_read_where_transformers_4_wrote_it() -> None:
    for config in (read(partial_rotary_factor=0.5), read(rope_parameters={"partial_rotary_factor": 0.5})):
        assert frequencies(config)[0].shape == (4,)
    assert frequencies(read())[0].shape == (8,)
    both = read(partial_rotary_factor=0.5, rope_parameters={"partial_rotary_factor": 1.0})
    assert frequencies(both)[0].shape == (8,), "the newer form counts"


def test_other_names_are_read() -> None:
    gpt2 = {key: "absent" for key in USUAL if key.endswith(("_size", "_layers", "_heads"))} | {
        "vocab_size": 100, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_inner": None, "n_positions": 77,
        "layer_norm_epsilon": 1e-3, "activation_function": "gelu_new",
    }  # fmt: skip
    config = read(**gpt2)
    assert (config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads) == (32, 128, 3, 2)
    assert (config.max_position, config.rms_norm_eps, config.hidden_act) == (77, 1e-3, "gelu_new")
    opt = read(intermediate_size="absent", ffn_dim=80, layer_norm_eps=1e-4)
    assert (opt.intermediate_size, opt.rms_norm_eps) == (80, 1e-4)
    assert read(rms_norm_eps=1e-2, layer_norm_eps=1e-4).rms_norm_eps == 1e-2
    assert read(hidden_act=None, hidden_activation="gelu").hidden_act == "gelu"
    assert read(hidden_activation="gelu").hf_config["hidden_activation"] == "gelu"
    with pytest.raises(CheckpointError, match="lacks intermediate_size"):
        read(intermediate_size="absent")


def test_a_window_is_of_all_layers_or_none() -> None:
    assert read().sliding_window() is None and read(sliding_window=8).sliding_window() == 8
    assert read(sliding_window=8, layer_types=["sliding_attention"] * 2).sliding_window() == 8
    assert read(sliding_window=8, layer_types=["full_attention"] * 2).sliding_window() is None
    assert read(sliding_window=8, use_sliding_window=False).sliding_window() is None
    mixed = read(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(CheckpointError, match=r"several kinds \(full_attention, sliding_attention\).* to null"):
        mixed.sliding_window()


def test_scores_are_scaled_as_the_layers_say(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, own, scales = str(tiny_checkpoint("llama")), Attention.__init__, [0.75, 0.75]
    overrides = ["cache.num_blocks=16", "max_model_len=64"]

    def scaled(self: Attention, index: int, *args: Any, **kwargs: Any) -> None:
        own(self, index, *args, **kwargs | {"scale": scales[index]})

    monkeypatch.setattr(Attention, "__init__", scaled)
    with LLM(folder, device="cpu", overrides=overrides) as llm:
        assert llm.engine.executor._worker.spec.scale == 0.75  # type: ignore[attr-defined]
        assert llm.engine.executor._worker.runner.attention.spec.scale == 0.75  # type: ignore[attr-defined]
    scales[1] = 0.5
    with pytest.raises(Exception, match=r"different scales are not supported: \[0.5, 0.75\]"):
        LLM(folder, device="cpu", overrides=overrides)
