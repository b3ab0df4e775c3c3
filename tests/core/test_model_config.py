"""What a config.json says, in the words of whichever transformers or architecture wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import attention_spec

from minivllm import LLM
from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError, EngineDeadError
from minivllm.layers.attention import Attention, attention_scale
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryTable, frequencies
from minivllm.models.checkpoint import read_model_config
from minivllm.models.llama import LlamaForCausalLM

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
    neox = read(rotary_pct=0.25, rotary_emb_base=500.0, norm_epsilon=1e-3)
    assert neox.rope_parameters["rope_theta"] == 500.0 and neox.rope_parameters["partial_rotary_factor"] == 0.25
    assert neox.rms_norm_eps == 1e-3
    assert read(intermediate_size="absent", ffn_hidden_size=72).intermediate_size == 72
    assert read(rms_norm_eps=1e-2, layer_norm_eps=1e-4).rms_norm_eps == 1e-2
    assert read(hidden_act=None, hidden_activation="gelu").hidden_act == "gelu"
    assert read(hidden_activation="gelu").hf_config["hidden_activation"] == "gelu"
    with pytest.raises(CheckpointError, match="lacks intermediate_size"):
        read(intermediate_size="absent")


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, [None, None, None]),
        ({"sliding_window": 8}, [8, 8, 8]),
        ({"sliding_window": 0}, [None, None, None]),
        ({"sliding_window": 8, "use_sliding_window": False}, [None, None, None]),
        ({"sliding_window": 8, "layer_types": [SLIDING] * 3}, [8, 8, 8]),
        ({"sliding_window": 8, "layer_types": [FULL] * 3}, [None, None, None]),
        ({"sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING, FULL]}, [8, None, 8]),  # fewer layers than named
        ({"sliding_window": None, "layer_types": ["linear_attention", FULL]}, [None, None, None]),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, [8, None, 8]),
        ({"sliding_window": 8, "_sliding_window_pattern": 3}, [8, 8, None]),
        ({"sliding_window": 8, "sliding_window_pattern": 1}, [None, None, None]),  # as in transformers
        ({"sliding_window": 8, "max_window_layers": 2}, [None, None, 8]),
        ({"sliding_window": 8, "max_window_layers": 2, "layer_types": [SLIDING] * 3}, [8, 8, 8]),
    ],
    ids=str,
)
def test_which_layers_have_a_window(keys: dict[str, Any], windows: list[int | None]) -> None:
    config = read(num_hidden_layers=3, **keys)
    assert list(config.layer_windows()) == windows
    if len(set(windows)) == 1:
        assert config.sliding_window() == windows[0]
    else:
        with pytest.raises(CheckpointError, match="layers have different sliding windows"):
            config.sliding_window()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sliding_window": "x"}, "sliding_window='x' is not a whole number"),
        ({"use_sliding_window": "false"}, "use_sliding_window='false' is not true or false"),
        ({"layer_types": [FULL]}, r"layer_types=\['full_attention'\] is not a list of .* for each of 3 layers"),
        ({"layer_types": [SLIDING, FULL, "chunked_attention"]}, "is not a list of sliding_attention or full_attention"),
        ({"layer_types": SLIDING}, "layer_types='sliding_attention' is not a list"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0 is not a whole number from 1"),
        ({"max_window_layers": "2"}, "max_window_layers='2' is not a whole number from 0"),
    ],
    ids=str,
)
def test_windows_that_cannot_be_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(num_hidden_layers=3, **{"sliding_window": 8} | keys).layer_windows()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"partial_rotary_factor": "x"}, "partial_rotary_factor=x is not a number"),
        ({"partial_rotary_factor": -1}, "partial_rotary_factor=-1 is not above 0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}}, "beta_fast=0 is not above 0"),
        ({"rope_theta": 1}, "rope_theta=1 is not above 1"),
    ],
)
def test_rotary_numbers_that_cannot_be(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        read(**keys)


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


def _one_kv_head(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.attention.num_kv_heads = 1


def _same_place(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.attention.index = 0


def _no_place(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.attention.index = 2


def _scaled_in_a_list(model: LlamaForCausalLM) -> None:
    layer = model.model.layers[1].self_attn
    layer.attention.scale = 0.5
    layer.kept = [layer.attention]
    del layer.attention


def _own_rotary(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.attention.rotary = RotaryTable(model.config)


def _replaced_norm(model: LlamaForCausalLM) -> None:
    model.model.layers[1].self_attn.attention.q_norm = RMSNorm(32, 1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_one_kv_head, "layer 1 has 4 heads and 1 KV heads of 32, where config.json says 4, 2 and 32 for each rank"),
        (_same_place, r"layers share a place in the cache: the indices of their attention are \[0, 0\]"),
        (_no_place, "layer 2 has no place in a cache of 2 layers"),
        (_scaled_in_a_list, r"different scales are not supported: .*, 0.5"),
        (_own_rotary, "rotary of the attention of layer 1 is not one of the model's modules"),
        (_replaced_norm, "q_norm of the attention of layer 1 is not one of the model's modules"),
    ],
)
def test_attention_that_the_cache_is_not_made_for(
    tiny_checkpoint: Callable[..., Path], change: Callable[[LlamaForCausalLM], None], message: str
) -> None:
    config = read_model_config(tiny_checkpoint("llama"))
    with torch.device("meta"):
        model = LlamaForCausalLM(config, TensorParallel())
    assert attention_scale(model, attention_spec(config)) == 32**-0.5
    change(model)
    with pytest.raises(ValueError, match=message):
        attention_scale(model, attention_spec(config))


def test_attention_that_is_kept_where_nobody_finds_it_is_looked_at_in_its_first_step(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Attention.__init__

    def scaled(self: Attention, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs | {"scale": 0.75})

    monkeypatch.setattr(Attention, "__init__", scaled)
    monkeypatch.setattr("minivllm.layers.attention._attentions", lambda model: [])
    llm = LLM(str(tiny_checkpoint("llama")), device="cpu", overrides=["cache.num_blocks=16", "max_model_len=64"])
    with llm, pytest.raises(EngineDeadError, match=r"scale=0.75 of layer 0 is not the backend's, 0.1767"):
        llm.generate([[1, 2]], use_tqdm=False)
