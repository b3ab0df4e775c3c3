"""Tokens equal transformers', with contexts several times as long as the window and two kinds of rotary embeddings."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from minivllm_gemma3.model import Gemma3ForCausalLM, ScaledEmbedding
from minivllm_gemma3.plugin import DEFAULTS, FULL, SLIDING, read_config

from minivllm import LLM, SamplingParams
from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError, ConfigError
from minivllm.layers.linear import QKVParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.models.checkpoint import read_model_config
from minivllm.models.loader import build_model, iterate_safetensors
from minivllm.plugins import default_registry
from minivllm.testing import ModelConformance
from minivllm.testing.checkpoints import random_checkpoint, reference_tokens

ONE = TensorParallel()
ARCHITECTURE = "Gemma3ForCausalLM"
PROMPTS = [list(range(5, 30)), [7], list(range(100, 160))]
# One layer in three attends to all. Heads are wider than hidden_size / heads, and the scale is not theirs.
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 8,
    "sliding_window_pattern": 3, "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip


class TestOneLayerInThree(ModelConformance):
    """As the published ones, but for sizes: one key head, which two ranks share; a window shorter than most prompts."""

    architecture = ARCHITECTURE
    config = CONFIG | {"num_key_value_heads": 1}
    prompt_lengths = (1, 7, 8, 9, 40, 65)


class TestUntied(ModelConformance):
    """Layers in another order, a head of its own, biases."""

    architecture = ARCHITECTURE
    config = CONFIG | {
        "num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL], "sliding_window": 2, "tie_word_embeddings": False,
        "attention_bias": True,
    }  # fmt: skip
    prompt_lengths = (1, 2, 20)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Gemma3ForCausalLM as Reference

    return random_checkpoint(tmp_path_factory.mktemp("gemma3"), Reference, CONFIG)


def changed(folder: Path, to: Path, *drop: str, **changes: object) -> Path:
    shutil.copytree(folder, to)
    config = {k: v for k, v in json.loads((to / "config.json").read_text()).items() if k not in drop}
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


def say(folder: Path, prompts: list[list[int]] = PROMPTS, max_tokens: int = 6, **options: Any) -> list[list[int]]:
    settings = ["cache.num_blocks=64", "scheduler.max_num_seqs=8", "max_model_len=128"]
    with LLM(str(folder), overrides=settings, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


def expected(folder: Path, prompts: list[list[int]] = PROMPTS, max_tokens: int = 6) -> list[list[int]]:
    return [reference_tokens(folder, prompt, max_tokens) for prompt in prompts]


def built(folder: Path) -> Any:
    config = read_model_config(folder, default_registry().read_config)
    return build_model(Gemma3ForCausalLM, config, ONE, "cpu", torch.float32, iterate_safetensors(folder), 64)


# --------------------------------------------------------------------------- each part matters


def factors_from_zero(part: str) -> Callable[[Any], None]:
    """As if a norm's weight in the checkpoint were the factor itself."""

    def poison(model: Any) -> None:
        norms = [param for name, param in model.named_parameters() if name.endswith(f"{part}norm.weight")]
        assert norms
        for param in norms:
            param.data -= 1

    return poison


def one_rotary(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention.rotary = model.model.rotary


def unscaled_tokens(model: Any) -> None:
    model.model.embed_tokens.weight.data /= 8


POISONS = {
    "rotary": one_rotary, "embedding": unscaled_tokens,
    **{part: factors_from_zero(part) for part in ("layer", "post_attention_layer", "q_", "k_", "model.")},
}  # fmt: skip


@pytest.mark.parametrize("poison", POISONS)
def test_each_part_matters(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, poison: str) -> None:
    """Else the suites above would pass without it."""
    load = Gemma3ForCausalLM.load_weights

    def load_and_poison(self: Gemma3ForCausalLM, weights: Any) -> None:
        load(self, weights)
        POISONS[poison](self)

    monkeypatch.setattr(Gemma3ForCausalLM, "load_weights", load_and_poison)
    assert say(checkpoint, device="cpu") != expected(checkpoint)


def test_the_window_matters(checkpoint: Path, tmp_path: Path) -> None:
    """Without it only the prompt that is shorter says the same: the rotary tables are those of the layers' types."""
    whole = say(changed(checkpoint, tmp_path / "whole", sliding_window=None), device="cpu")
    assert [a == b for a, b in zip(whole, expected(checkpoint), strict=True)] == [False, True, False]


def test_sliding_layers_share_one_rotary_table(checkpoint: Path) -> None:
    model: Any = built(checkpoint)
    tables = [layer.self_attn.attention.rotary for layer in model.model.layers]
    assert len({*map(id, tables)}) == 2 and tables[0] is tables[1] is tables[3] is not tables[2] is tables[5]
    assert torch.equal(tables[2].cos_sin[:64:8, 0], tables[0].cos_sin[:8, 0]), "squeezed eight times"


def test_embeddings_are_scaled_by_what_transformers_rounds_to(checkpoint: Path) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    ours, ids = ScaledEmbedding(50, 40, ONE).bfloat16(), torch.arange(50)
    theirs = Gemma3TextScaledWordEmbedding(50, 40, 0, embed_scale=40**0.5).bfloat16()
    ours.weight.data.copy_(theirs.weight.data)
    assert torch.equal(ours(ids), theirs(ids))


def test_the_first_norm_folds_into_the_projection(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(QKVParallelLinear, "foldable", True)
    model = built(checkpoint)
    for layer in model.model.layers:
        assert layer.self_attn.qkv_proj.folded and not layer.mlp.gate_up_proj.folded
        ones = [name for name, norm in layer.named_children() if isinstance(norm, RMSNorm) and (norm.weight == 1).all()]
        assert ones == ["input_layernorm"]
    assert say(checkpoint, device="cpu") == expected(checkpoint)


# --------------------------------------------------------------------------- backends


def test_the_triton_backend(checkpoint: Path) -> None:
    """On a CPU in Triton's interpreter, which conftest.py chooses."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter must be chosen before Triton is imported; test_backends_on_a_gpu covers it")
    pytest.importorskip("triton")
    prompts, tokens = PROMPTS[:1], 2
    assert say(checkpoint, prompts, tokens, device="cpu", attention="triton") == expected(checkpoint, prompts, tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
@pytest.mark.parametrize("attention", ["torch", "triton", "flash", "flashinfer"])
def test_backends_on_a_gpu(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, attention: str) -> None:
    """Heads as published. In bfloat16, which rounds: most tokens are those of float32, and few without the window."""
    from transformers import Gemma3ForCausalLM as Reference

    folder = random_checkpoint(tmp_path_factory.mktemp("wide"), Reference, CONFIG | {"head_dim": 256})
    try:
        said = say(folder, attention=attention, dtype="bfloat16")
    except ConfigError as refused:
        pytest.skip(str(refused))
    wrong = say(changed(folder, tmp_path / "whole", sliding_window=None), attention=attention, dtype="bfloat16")

    def agreement(answers: list[list[int]]) -> int:
        both = zip(answers, expected(folder), strict=True)
        return sum(a == b for one, other in both for a, b in zip(one, other, strict=True))

    assert agreement(said) > 12 > agreement(wrong)


# --------------------------------------------------------------------------- config.json


def test_a_config_as_published_reads_the_same(checkpoint: Path, tmp_path: Path) -> None:
    """transformers 5 saves rope parameters by layer type, and every layer's type; published checkpoints do not."""
    saved = json.loads((checkpoint / "config.json").read_text())
    assert saved["rope_parameters"].keys() == {FULL, SLIDING} and len(saved["layer_types"]) == 6
    assert "rope_local_base_freq" not in saved
    older = {
        "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    for pattern in ("sliding_window_pattern", "_sliding_window_pattern"):
        folder = changed(
            checkpoint, tmp_path / pattern, "layer_types", "rope_parameters", "sliding_window_pattern",
            "_sliding_window_pattern", **older, **{pattern: 3},
        )  # fmt: skip
        one, other = (read_model_config(its, default_registry().read_config) for its in (checkpoint, folder))
        assert one.rope_parameters == other.rope_parameters
        assert one.layer_windows() == other.layer_windows() == (8, 8, None, 8, 8, None)
        ours, published = (built(its) for its in (checkpoint, folder))
        assert [*rotary_tables(ours)] == [*rotary_tables(published)]


def rotary_tables(model: Any) -> Iterator[list[float]]:
    for layer in model.model.layers:
        yield layer.self_attn.attention.rotary.cos_sin[63].tolist()


def test_what_a_config_leaves_out_is_as_in_transformers() -> None:
    from transformers import Gemma3TextConfig

    for given in ({}, {"rope_theta": 5000.0, "rope_local_base_freq": 300.0, "sliding_window_pattern": 4}):
        theirs, ours = Gemma3TextConfig(**given), read_config({"architectures": [ARCHITECTURE], **given})
        assert {key: getattr(theirs, key) for key in DEFAULTS} == DEFAULTS
        assert ours["layer_types"] == theirs.layer_types
        for key, kind in (("rope_parameters", FULL), ("local_rope_parameters", SLIDING)):
            assert {"rope_type": "default"} | ours[key] == theirs.rope_parameters[kind]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 .*Set it to null"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 .*Set it to null"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention .*set it to false"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu'"),
        ({"rope_parameters": {SLIDING: 3}}, "sliding_attention=3 is not a mapping"),
        ({"rope_parameters": {SLIDING: {"rope_theta": "low"}}}, "rope_theta=low is not a number"),
        ({"rope_parameters": {SLIDING: {"rope_type": "spiral"}}}, "rope_type='spiral' is not supported"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types=.*is not a list of sliding_attention or full"),
        ({"layer_types": None, "sliding_window_pattern": 2.5}, "sliding_window_pattern=2.5 is not a whole number"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 is not a number above 0"),
    ],
)
def test_configs_that_cannot_run_are_refused(
    checkpoint: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        built(changed(checkpoint, tmp_path / "changed", **changes))


# --------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("name", "parameters", "full"), [("gemma3-270m", 268_098_176, 3), ("gemma3-1b", 999_885_952, 4)]
)
def test_options_have_the_published_sizes(name: str, parameters: int, full: int) -> None:
    node = default_registry().config_options("model")[name].option.node
    config = ModelConfig.from_hf(read_config(dict(node["hf_config"])))
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config, ONE)
    assert node["repo"] == f"google/gemma-3-{name.removeprefix('gemma3-')}-it"
    assert sum(param.numel() for param in model.parameters()) == parameters
    assert config.layer_windows()[:6] == (512,) * 5 + (None,) and config.layer_windows().count(None) == full


@pytest.mark.slow
def test_the_command_of_the_readme(tmp_path: Path) -> None:
    """From another folder, with no tokenizer and no network; it leaves nothing behind."""
    command = "-m minivllm model=gemma3 load_format=dummy device=cpu max_tokens=4 ignore_eos=true"
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "12 tokens" in done.stdout
    assert not list(tmp_path.iterdir())
