"""LoRA adapters: merged weights are those merged by hand; whatever cannot be merged, all of it, is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import edit_json, reference_tokens, save_adapter
from safetensors.torch import load_file, save_file

from minivllm import LLM, SamplingParams
from minivllm.errors import CheckpointError, ConfigError
from minivllm.models.checkpoint import read_model_config
from minivllm.models.fp8_checkpoint import float_weights
from minivllm.models.loader import iterate_safetensors
from minivllm.models.lora import Adapter
from minivllm.models.lora_config import lora_folder, read_lora_config

Checkpoints = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = [[1, 5, 300], list(range(40, 80)), [7]]
DOWN, Q = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"
A_OF_Q, B_OF_Q = (f"base_model.model.{Q}.lora_{letter}.weight" for letter in "AB")
FP8 = torch.float8_e4m3fn


@pytest.fixture
def folder(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3", shards=3)


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    """One to break."""
    save_adapter(tmp_path / "adapter", folder, ALL)
    return tmp_path / "adapter"


def merged(folder: Path, adapter: Path) -> Tensors:
    return dict(float_weights(folder, "cpu", Adapter(adapter, read_model_config(folder))))


def by_hand(checkpoint: Path, to: Path, changes: Tensors) -> Path:
    """A copy of the checkpoint, whose tensors of these names have these added."""
    shutil.copytree(checkpoint, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: tensor.clone() for name, tensor in iterate_safetensors(checkpoint)}
    for name, change in changes.items():
        tensors[name] += change
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def resave(folder: Path, change: Callable[[Tensors], object], file: str = "adapter_model.safetensors") -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def make(folder: Path, *overrides: str) -> LLM:
    return LLM(str(folder), device="cpu", overrides=list(overrides), num_gpu_blocks_override=64)


def say(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def tokens(folder: Path) -> list[list[int]]:
    return [reference_tokens(folder, prompt, 12) for prompt in PROMPTS]


# --------------------------------------------------------------------------- merged


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_tokens_are_those_of_transformers_with_weights_merged_by_hand(
    tiny_checkpoint: Checkpoints, tmp_path: Path, architecture: str, tied: bool
) -> None:
    folder = tiny_checkpoint(architecture, tie_word_embeddings=tied)
    products = save_adapter(tmp_path / "adapter", folder, ALL)
    assert len(products) == 2 * len(ALL)
    expected = by_hand(folder, tmp_path / "merged", {name: 2 * product for name, product in products.items()})
    with make(folder, f"model.lora={tmp_path / 'adapter'}") as llm:
        assert say(llm) == tokens(expected) != tokens(folder)
        assert llm.engine.describe()["weights"] == "float32 weights, LoRA merged"


def test_one_module_at_a_time_changes_its_own_tensors(folder: Path, tmp_path: Path) -> None:
    plain = dict(iterate_safetensors(folder))
    for module in ALL:
        [one, name] = products = save_adapter(tmp_path / module, folder, [module])
        assert one.split(".")[2] != name.split(".")[2]  # of either layer
        found = merged(folder, tmp_path / module)
        assert {its for its, tensor in found.items() if not torch.equal(tensor, plain[its])} == products.keys()
        torch.testing.assert_close(found[name], plain[name] + 2 * products[name])


@pytest.mark.parametrize(
    ("config", "factors"),
    [
        ({"lora_alpha": 12}, (3, 3)),
        ({"lora_alpha": 0.5}, (0.125, 0.125)),
        ({"lora_alpha": 12, "use_rslora": True}, (6, 6)),
        ({"alpha_pattern": {"down_proj": 40}}, (2, 10)),
        ({"alpha_pattern": {"proj": 40}}, (2, 2)),  # no module's whole name
        ({"alpha_pattern": {DOWN: 40, "self_attn.q_proj": 20}}, (5, 10)),
        ({"alpha_pattern": {r"^model\.layers\.[0-3]\.mlp.*": 40}}, (2, 10)),
        ({"alpha_pattern": {"q_proj|down_proj": 16, "down_proj": 40}}, (4, 4)),  # the first
        ({"alpha_pattern": {"q_proj": 16}, "use_rslora": True}, (8, 4)),
        ({"r": 64, "rank_pattern": {"q_proj": 4, r".*\.down_proj": 4}, "lora_alpha": 64}, (16, 16)),
        ({"r": 64, "rank_pattern": {"q_proj|down_proj": 4}, "use_rslora": True}, (4, 4)),
        ({"rank_pattern": None, "alpha_pattern": None, "use_rslora": None, "bias": None}, (2, 2)),
        ({"init_lora_weights": "gaussian", "task_type": "X", "new_key": [], "another": 0}, (2, 2)),
    ],
    ids=str,
)  # fmt: skip
def test_factors_are_pefts(folder: Path, tmp_path: Path, config: dict[str, Any], factors: tuple[float, float]) -> None:
    products = save_adapter(tmp_path / "adapter", folder, [Q, DOWN], **config)
    plain, found = dict(iterate_safetensors(folder)), merged(folder, tmp_path / "adapter")
    assert found.keys() == plain.keys()
    for name, factor in zip((f"{Q}.weight", f"{DOWN}.weight"), factors, strict=True):
        torch.testing.assert_close(found[name], plain[name] + factor * products[name])


def test_ranks_may_differ(folder: Path, tmp_path: Path) -> None:
    products = save_adapter(tmp_path / "adapter", folder, [Q, DOWN], rank_pattern={"down_proj": 6})
    a, b = torch.randn(6, 96), torch.randn(64, 6)
    its = {f"base_model.model.{DOWN}.lora_{letter}.weight": t for letter, t in (("A", a), ("B", b))}
    resave(tmp_path / "adapter", lambda tensors: tensors.update(its))
    plain, found = dict(iterate_safetensors(folder)), merged(folder, tmp_path / "adapter")
    torch.testing.assert_close(found[f"{DOWN}.weight"], plain[f"{DOWN}.weight"] + 8 / 6 * b @ a)
    torch.testing.assert_close(found[f"{Q}.weight"], plain[f"{Q}.weight"] + 2 * products[f"{Q}.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_computed_in_float32_is_rounded_once(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """Half a unit in the last place and a little: rounded before it is added, it would be half a unit, and lost."""
    base, half = tmp_path / "base", torch.finfo(dtype).eps / 2
    by_hand(folder, base, {})
    resave(
        base, lambda its: its.update({n: torch.ones_like(t, dtype=dtype) for n, t in its.items()}), "model.safetensors"
    )
    save_adapter(tmp_path / "adapter", base, [Q], rank=1, lora_alpha=1)
    little = half * (1 + (2**-10 if dtype != torch.float32 else 0))
    resave(
        tmp_path / "adapter", lambda its: its.update({A_OF_Q: torch.ones(1, 64), B_OF_Q: torch.full((128, 1), little)})
    )
    found = merged(base, tmp_path / "adapter")[f"{Q}.weight"]
    assert found.dtype == dtype
    assert torch.all(found == (1 + 2 * half if dtype != torch.float32 else 1))


def test_whole_tensors_replace_the_checkpoints(folder: Path, tmp_path: Path) -> None:
    """Of modules_to_save; and what PEFT saves beside lora_A and lora_B of an LM head."""
    save_adapter(tmp_path / "adapter", folder, [Q, "lm_head"], modules_to_save=["embed_tokens", "norm"])
    prefix, generator = "base_model.model.", torch.Generator().manual_seed(5)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in (
        ("model.embed_tokens.weight", (512, 64)), ("lm_head.base_layer.weight", (512, 64)), ("model.norm.weight", [64]),
    )}  # fmt: skip
    resave(tmp_path / "adapter", lambda tensors: tensors.update({prefix + name: t for name, t in whole.items()}))
    its = load_file(tmp_path / "adapter/adapter_model.safetensors")
    found = merged(folder, tmp_path / "adapter")
    assert torch.equal(found["model.embed_tokens.weight"], whole["model.embed_tokens.weight"])
    assert torch.equal(found["model.norm.weight"], whole["model.norm.weight"])
    b, a = (its[f"{prefix}lm_head.lora_{letter}.weight"] for letter in "BA")
    torch.testing.assert_close(found["lm_head.weight"], whole["lm_head.base_layer.weight"] + 2 * b @ a)
    expected = by_hand(folder, tmp_path / "merged", {})
    resave(expected, lambda tensors: tensors.update(found), "model.safetensors")
    with make(folder, f"model.lora={tmp_path / 'adapter'}") as llm:
        assert say(llm) == tokens(expected)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_weights_in_fp8_are_those_of_merged_ones(
    folder: Path, adapter: Path, tmp_path: Path, quantization: str
) -> None:
    expected = by_hand(folder, tmp_path / "merged", {})
    resave(expected, lambda tensors: tensors.update(merged(folder, adapter)), "model.safetensors")
    states = []
    for its, lora in ((folder, str(adapter)), (expected, "null"), (folder, "null")):
        with make(its, f"quantization={quantization}", f"model.lora={lora}") as llm:
            states.append({n: t.float() for n, t in llm.engine.executor._worker.runner.model.state_dict().items()})  # type: ignore[attr-defined]
    ours, theirs, plain = states
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not torch.equal(
        ours["model.layers.0.self_attn.o_proj.weight"], plain["model.layers.0.self_attn.o_proj.weight"]
    )


# --------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"use_dora": True}, "use_dora=True, and DoRA also scales the merged weights. Allowed: False or null; merge"),
        ({"bias": "all"}, "bias='all', so that it has biases of its own. Allowed: 'none'; merge it with PEFT's"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"lora_bias": True}, "lora_bias=True, so that it has biases"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA', which is no LoRA adapter. Allowed: 'LORA'"),
        ({"peft_type": None}, "says no peft_type"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True, so that its weights are transposed"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4', so that it belongs to other"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication="),
        ({"trainable_token_indices": [5]}, "trainable_token_indices="),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters="),
        ({"megatron_config": {"a": 1}}, "megatron_config="),
        ({"use_something_new": True}, "use_something_new=True, which minivllm does not merge. Allowed: False or null"),
        ({"r": 0}, "r=0 is not a whole number from 1"),
        ({"r": None}, "r=None is not a whole number from 1"),
        ({"r": True}, "r=True is not"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern.q_proj='8' is not a whole number"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern=\['q_proj'\] is not a mapping"),
        ({"alpha_pattern": {"q_(": 8}}, "alpha_pattern has 'q_\\(', no regular expression"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern.q_proj=None is not a number"),
        ({"lora_alpha": "16"}, "lora_alpha='16' is not a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan is not a number"),
        pytest.param({"lora_alpha": 10**400}, "lora_alpha=10+… is not a number", id="no float"),
        ({"use_rslora": "yes"}, "use_rslora='yes' is not true or false"),
        ({"modules_to_save": "lm_head"}, "modules_to_save='lm_head' is not a list of names"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_more_than_lora_is_refused_by_name(adapter: Path, config: dict[str, Any], told: str) -> None:
    read_lora_config(adapter)
    edit_json(adapter / "adapter_config.json", **config)
    with pytest.raises(CheckpointError, match=f"adapter_config.json.*{told}") as caught:
        read_lora_config(adapter)
    assert "\n" not in str(caught.value)


def rename(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda its: its.pop(A_OF_Q), f"cannot be used; of its tensors 1 missing: {A_OF_Q}. Is it"),
        (lambda its: its.pop(B_OF_Q), f"cannot be used; of its tensors 1 missing: {B_OF_Q}. Is it"),
        (lambda its: its.clear(), "1 missing: all"),
        (lambda its: its.update({A_OF_Q: torch.ones(5, 64)}), rf"1 misshapen: {A_OF_Q} \[5, 64\] where .* rank 4"),
        (lambda its: its.update({B_OF_Q: torch.ones(128, 2)}), rf"1 misshapen: {B_OF_Q} \[128, 2\] where .* rank 4"),
        (lambda its: its.update({B_OF_Q: torch.ones(128, 4, 1)}), rf"1 misshapen: {B_OF_Q} \[128, 4, 1\]"),
        (lambda its: its.update({A_OF_Q: its[A_OF_Q].to(FP8)}), f"1 misshapen: {A_OF_Q} of dtype float8_e4m3fn"),
        (lambda its: its[B_OF_Q][-1, -1].fill_(float("nan")), f"of its tensors 1 with infinity or NaN: {B_OF_Q}"),
        (lambda its: its[A_OF_Q].fill_(-float("inf")), f"of its tensors 1 with infinity or NaN: {A_OF_Q}"),
        (
            lambda its: its.update({A_OF_Q: torch.ones(4, 65)}),
            rf"does not fit the checkpoint; of its .* 1 misshapen: for {Q}.weight \[128, 65\] where .* \[128, 64\]",
        ),
        (
            lambda its: its.update({f"base_model.model.{Q}.weight": torch.ones(3)}),
            rf"1 misshapen: for {Q}.weight \[3\] where the checkpoint has \[128, 64\]",
        ),
        (
            lambda its: [rename(name, name.replace("layers.0", "layers.9"))(its) for name in (A_OF_Q, B_OF_Q)],
            "does not fit the checkpoint; of its tensors 2 for no tensor of the checkpoint: .*layers.9.*lora_A.weight",
        ),
        (
            lambda its: its.update({"base_model.model.score.weight": torch.ones(2, 64)}),
            "1 for no tensor of the checkpoint: base_model.model.score.weight",
        ),
        (
            lambda its: its.update({f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(128)}),
            f"1 neither lora_A and lora_B of linear layers nor whole tensors: .*{Q}.lora_magnitude_vector",
        ),
        (lambda its: its.update({B_OF_Q.replace("weight", "bias"): torch.ones(128)}), "1 neither lora_A .*lora_B.bias"),
        (
            lambda its: its.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 512)}),
            "1 neither lora_A .*embed_tokens.lora_embedding_A",
        ),
        (lambda its: rename(A_OF_Q, A_OF_Q.removeprefix("base_model.model."))(its), "1 neither lora_A .*; 1 missing"),
        (
            lambda its: its.update({A_OF_Q.replace(".lora_A", x): torch.ones(128, 64) for x in ("", ".base_layer")}),
            "1 beside another of the same place",
        ),
    ],
)  # fmt: skip
def test_a_tensor_that_cannot_be_used_is_named(
    folder: Path, adapter: Path, change: Callable[[Tensors], Any], told: str
) -> None:
    merged(folder, adapter)
    resave(adapter, change)
    with pytest.raises(CheckpointError, match=f"model.lora={adapter} .*{told}") as caught:
        merged(folder, adapter)
    assert "\n" not in str(caught.value)


def test_modules_to_save_that_were_not_saved_are_named(folder: Path, adapter: Path) -> None:
    edit_json(adapter / "adapter_config.json", modules_to_save=["lm_head"])
    with pytest.raises(CheckpointError, match="1 missing: lm_head, which modules_to_save names"):
        merged(folder, adapter)
    resave(adapter, lambda its: its.update({"base_model.model.lm_head.weight": torch.ones(512, 64)}))
    assert torch.equal(merged(folder, adapter)["lm_head.weight"], torch.ones(512, 64))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "lm_head"])
def test_of_tied_embeddings_none_is_changed_alone(
    tiny_checkpoint: Checkpoints, adapter: Path, tmp_path: Path, name: str
) -> None:
    """Even if the checkpoint has both, of which one is not read."""
    tied = shutil.copytree(tiny_checkpoint("qwen3", tie_word_embeddings=True), tmp_path / "tied")
    resave(
        tied, lambda its: its.update({"lm_head.weight": its["model.embed_tokens.weight"].clone()}), "model.safetensors"
    )
    merged(tied, adapter)
    low_rank = {f"{name}.lora_A.weight": torch.ones(4, 64), f"{name}.lora_B.weight": torch.ones(512, 4)}
    its = low_rank if name == "lm_head" else {name: torch.ones(512, 64)}
    resave(adapter, lambda tensors: tensors.update({f"base_model.model.{n}": t for n, t in its.items()}))
    with pytest.raises(CheckpointError, match=rf"{len(its)} for the embeddings or the head alone.*: .*{name}"):
        merged(tied, adapter)


def test_a_tensor_that_the_checkpoint_has_twice_is_named(folder: Path, adapter: Path, tmp_path: Path) -> None:
    """The one read last would be the one that counts."""
    twice = by_hand(folder, tmp_path / "twice", {})
    (twice / "model.safetensors").rename(twice / "a.safetensors")
    save_file({f"{Q}.weight": torch.ones(128, 64)}, twice / "b.safetensors")
    with pytest.raises(CheckpointError, match=f"2 for a tensor that the checkpoint has twice: {A_OF_Q}"):
        merged(twice, adapter)


def test_an_adapter_is_merged_into_what_the_numbers_of_a_checkpoint_in_fp8_mean(folder: Path, tmp_path: Path) -> None:
    products = save_adapter(adapter := tmp_path / "adapter", folder, [Q, DOWN])
    in_fp8 = by_hand(folder, tmp_path / "fp8", {})

    def round_down(its: Tensors) -> None:
        its[f"{DOWN}.weight_scale"] = torch.tensor([0.01])
        its[f"{DOWN}.weight"] = (its[f"{DOWN}.weight"] / 0.01).to(FP8)

    resave(in_fp8, round_down, "model.safetensors")
    edit_json(in_fp8 / "config.json", quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    plain, found = dict(float_weights(in_fp8, "cpu")), merged(in_fp8, adapter)
    assert plain.keys() == found.keys() and plain[f"{DOWN}.weight"].dtype == torch.float32
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor + 2 * products[name] if name in products else tensor)
    with make(in_fp8, f"model.lora={adapter}") as llm, make(in_fp8) as without:
        first = say(llm)
        assert first != say(without)
        llm.reload_weights()
        assert say(llm) == first


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 100)
    with pytest.raises(CheckpointError, match=f"^model.lora={folder} cannot be read: File name too long; pass"):
        lora_folder(str(folder))


def test_missing_files_are_named_with_what_to_do(folder: Path, adapter: Path) -> None:
    assert lora_folder(None) is None and lora_folder(str(adapter)) == adapter
    for path, told in (
        (adapter / "nowhere", "does not exist; pass a folder that holds adapter_config.json, or ORG/NAME"),
        (adapter / "adapter_model.safetensors", rf"is a file; .* \(model.lora={adapter}\)"),
        (adapter.parent, rf"has no adapter_config.json.* did you mean model.lora={adapter}\?"),
        (folder, rf"holds a checkpoint .*, no adapter \(adapter_config.json\); pass model.path={folder}"),
    ):
        with pytest.raises(CheckpointError, match=f"^model.lora={path} {told}"):
            lora_folder(str(path))
    (adapter / "adapter_model.safetensors").rename(adapter / "kept")
    with pytest.raises(CheckpointError, match=r"has no adapter_model.safetensors; save the adapter again"):
        lora_folder(str(adapter))
    (adapter / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(CheckpointError, match=r"only adapter_model.bin, and minivllm does not unpickle weights; save"):
        make(folder, f"model.lora={adapter}")
    (adapter / "adapter_model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="is a Git LFS pointer"):
        make(folder, f"model.lora={adapter}")


def test_a_repository_is_fetched(monkeypatch: pytest.MonkeyPatch, adapter: Path) -> None:
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **options: asked.append(repo) or adapter)
    assert lora_folder("some/adapter") == adapter and asked == ["some/adapter"]
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"cannot fetch nobody/nothing: .* and pass model.lora=DIR$"):
        lora_folder("nobody/nothing")


def test_a_config_is_refused_before_ranks_start(folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minivllm.executors.processes.start_children", lambda *args: pytest.fail("ranks were started"))
    edit_json(adapter / "adapter_config.json", use_dora=True)
    with pytest.raises(CheckpointError, match="use_dora=True"):
        LLM(str(folder), device="cpu", tp=2, overrides=[f"model.lora={adapter}"])


def test_an_adapter_is_no_model_and_dummy_weights_take_none(folder: Path, adapter: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"no model; pass its model as model.path, and model.lora={adapter}$"):
        make(adapter)
    with pytest.raises(ConfigError, match=rf"model.lora={adapter} with load_format=dummy: .* leave one out"):
        make(folder, f"model.lora={adapter}", "load_format=dummy")
    with pytest.raises(ConfigError, match=r"LLM\(lora='x'\): .* type overrides=\['model.lora=x'\]"):
        LLM(str(folder), lora="x")


# --------------------------------------------------------------------------- other weights


@pytest.fixture
def llm(folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """Made where its adapter is, and used elsewhere."""
    monkeypatch.chdir(adapter.parent)
    with make(folder, f"model.lora={adapter.name}") as its:
        monkeypatch.chdir("/")
        yield its


def test_the_engines_own_checkpoint_is_read_again_with_its_adapter_as_it_is_then(
    llm: LLM, folder: Path, adapter: Path, tmp_path: Path
) -> None:
    first = say(llm)
    products = save_adapter(adapter, folder, ALL, seed=1)
    assert say(llm) == first
    llm.reload_weights()
    expected = by_hand(folder, tmp_path / "merged", {name: 2 * product for name, product in products.items()})
    assert say(llm) == tokens(expected) != first


def test_weights_that_are_given_are_taken_as_they_are(llm: LLM, folder: Path, tiny_checkpoint: Checkpoints) -> None:
    with_adapter, other = say(llm), tiny_checkpoint("qwen3", seed=1)
    for given in ({"weights_path": folder}, {"weights_iterator": iterate_safetensors(folder)}):
        llm.reload_weights(**given)  # type: ignore[arg-type]
        assert say(llm) == tokens(folder) != with_adapter
        llm.reload_weights()
        assert say(llm) == with_adapter
    llm.reload_weights(other)
    assert say(llm) == tokens(other)


def test_an_adapter_that_does_not_fit_is_refused_before_anything_is_written(
    llm: LLM, folder: Path, adapter: Path
) -> None:
    first = say(llm)
    for change, told in (
        (lambda its: its.update({A_OF_Q: torch.ones(4, 65)}), "1 misshapen"),
        (lambda its: its.pop(A_OF_Q), "1 missing"),
        (lambda its: its.update({A_OF_Q: torch.full((4, 64), float("nan"))}), "1 with infinity or NaN"),
    ):
        resave(adapter, change)
        with pytest.raises(CheckpointError, match=told):
            llm.reload_weights()
        assert say(llm) == first
    shutil.rmtree(adapter)
    with pytest.raises(CheckpointError, match=f"model.lora={adapter} does not exist"):
        llm.reload_weights()
    assert say(llm) == first


def test_an_adapter_is_no_checkpoint_to_reload(llm: LLM, adapter: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model; it takes whole checkpoints; an engine with model.lora reads"):
        llm.reload_weights(adapter)
