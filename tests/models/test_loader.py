"""Checkpoints: every way one can be broken is one sentence that names what and where; dummy weights; ranks."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PagedRun, attention_spec, edit_json, reference_tokens
from safetensors.torch import load_file, save_file

from minivllm.backends.torch import TorchBackend
from minivllm.config.engine_config import ModelOptions
from minivllm.core.interfaces import Model
from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError, ConfigError
from minivllm.models.checkpoint import download, fetch, read_model_config
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.loader import _refuse_too_large, build_model, iterate_safetensors, tensors_read
from minivllm.models.qwen3 import Qwen3ForCausalLM
from minivllm.models.tokenizer import tokenizer_folder

Checkpoints = Callable[..., Path]
CLASSES: dict[str, type[Model]] = {c.__name__: c for c in (Qwen3ForCausalLM, LlamaForCausalLM)}


@pytest.fixture
def folder(tiny_checkpoint: Checkpoints, tmp_path: Path) -> Path:
    """A checkpoint of one's own to break."""
    return shutil.copytree(tiny_checkpoint("qwen3"), tmp_path / "checkpoint")


def build(
    folder: Path,
    tp: TensorParallel | None = None,
    *,
    model_class: type[Model] | None = None,
    seed: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    config = read_model_config(folder)
    chosen = model_class or CLASSES[config.architecture]
    weights = iterate_safetensors(folder) if seed is None else seed
    return build_model(chosen, config, tp or TensorParallel(), "cpu", dtype, weights, 256)


def resave(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# --------------------------------------------------------------------------- the folder and its config


def test_reads_config_and_generation_config(folder: Path) -> None:
    edit_json(folder / "config.json", eos_token_id=5)
    edit_json(folder / "generation_config.json", eos_token_id=[7, 5, 9])
    assert read_model_config(folder).eos_token_ids == (7, 5, 9)
    edit_json(folder / "generation_config.json", eos_token_id=0)
    assert read_model_config(folder).eos_token_ids == (0, 5)
    (folder / "generation_config.json").unlink()
    assert read_model_config(folder).eos_token_ids == (5,)


@pytest.mark.parametrize(
    "breaks,message",
    [
        (lambda f: (f / "config.json").unlink(), r"has no config.json.*pass model.path=DIR"),
        (
            lambda f: (f / "config.json").rename(f / "adapter_config.json"),
            "holds an adapter .adapter_config.json., no model; pass its model as model.path, and model.lora=",
        ),
        (lambda f: (f / "config.json").write_text("{,"), r"config.json is not readable as JSON"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), r"config.json is not readable as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), r"holds a JSON list where an object is expected"),
        (lambda f: edit_json(f / "config.json", "hidden_size"), r"config.json lacks hidden_size"),
        (
            lambda f: edit_json(f / "config.json", num_hidden_layers=0),
            "num_hidden_layers=0 is not a whole number from 1",
        ),
        (
            lambda f: edit_json(f / "config.json", num_hidden_layers=10**9),
            "num_hidden_layers=1000000000 is more than 10,000",
        ),
        (lambda f: edit_json(f / "config.json", vocab_size="x"), "vocab_size=x is not a whole number from 1"),
        (lambda f: edit_json(f / "config.json", architectures=[]), r"architectures=\[\] is not a list of at least one"),
        (lambda f: edit_json(f / "config.json", rms_norm_eps="x"), "rms_norm_eps=x is not a number"),
        (lambda f: edit_json(f / "config.json", rms_norm_eps=-1), "rms_norm_eps=-1 is not above 0"),
        (lambda f: edit_json(f / "config.json", tie_word_embeddings="no"), "='no' is not true or false"),
        (lambda f: edit_json(f / "config.json", rope_scaling="yarn"), "rope_scaling='yarn' is not a mapping"),
        (
            lambda f: edit_json(f / "config.json", rope_parameters={"rope_type": "linear", "factor": 0}),
            "factor=0 is not above 0",
        ),
        (lambda f: edit_json(f / "config.json", eos_token_id="x"), r"/config.json: eos_token_id='x' is not a token id"),
        (
            lambda f: edit_json(f / "generation_config.json", eos_token_id=[1, "x"]),
            r"generation_config.json: eos_token_id=\[1, 'x'\] is not a token id or a list",
        ),
        (
            lambda f: edit_json(f / "config.json", rope_parameters={"rope_type": "linear", "factor": "x"}),
            "factor=x is not a number",
        ),
        (
            lambda f: edit_json(f / "config.json", max_position_embeddings=0),
            "max_position_embeddings=0 is not a whole number from 1",
        ),
        (lambda f: (f / "generation_config.json").write_text("x"), r"generation_config.json is not readable"),
        (
            lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "awq"}),
            r"quantized by awq, which minivllm does not read\. .* or its bfloat16 or float16 checkpoint",
        ),
    ],
)
def test_a_broken_config_is_one_sentence(folder: Path, breaks: Callable[[Path], Any], message: str) -> None:
    breaks(folder)
    with pytest.raises(CheckpointError, match=message):
        read_model_config(folder)


def test_a_path_that_is_no_checkpoint_says_what_to_type(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist; pass the folder"):
        fetch(ModelOptions(path=str(folder / "nowhere")))
    with pytest.raises(CheckpointError, match=rf"is a file; pass .*model.path={folder}\)"):
        fetch(ModelOptions(path=str(folder / "config.json")))
    with pytest.raises(CheckpointError, match=rf"did you mean model.path={folder}\?"):
        read_model_config(folder.parent)
    with pytest.raises(CheckpointError, match=r"set model\.path=DIR"):
        fetch(ModelOptions(name="mine"))
    assert fetch(ModelOptions(path=str(folder), repo="nobody/nothing")) == folder
    assert fetch(ModelOptions()).name == "demo"


def test_a_repository_out_of_reach_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"cannot fetch nobody/not.*`hf download nobody/not.*load_format=dummy"):
        fetch(ModelOptions(name="x", repo="nobody/nothing"))


def test_what_is_no_repositorys_name_is_not_to_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointError, match=r"^no such name! is not a repository's name, ORG/NAME; .* model.path=DIR"
    ):
        fetch(ModelOptions(name="x", repo="no such name!"))


def test_what_is_not_cached_is_known_without_the_hubs_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **options: asked.append(repo) or tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot fetch nobody/nothing: it is not in the local cache"):
        download("nobody/nothing", offline=True)
    assert not asked
    (tmp_path / "models--nobody--nothing").mkdir()
    assert download("nobody/nothing", offline=True) == tmp_path and asked == ["nobody/nothing"]


def test_a_tokenizers_repository_is_fetched_without_its_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **options: asked.append(options) or tmp_path)
    assert tokenizer_folder("some/model") == download("some/model") == tmp_path
    without, whole = (set(options["allow_patterns"]) - set(options["ignore_patterns"]) for options in asked)
    assert whole - without == {"*.safetensors"} and "tokenizer*" in without
    assert tokenizer_folder(str(tmp_path)) == tmp_path and len(asked) == 2
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"cannot fetch nobody/nothing: .* and pass model.tokenizer=DIR$"):
        tokenizer_folder("nobody/nothing")


# --------------------------------------------------------------------------- its files


def test_sharded_or_not_the_tensors_are_the_same(tiny_checkpoint: Checkpoints) -> None:
    one = dict(iterate_safetensors(tiny_checkpoint("qwen3")))
    many = dict(iterate_safetensors(tiny_checkpoint("qwen3", shards=4)))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_a_file_under_another_name_is_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    save_file({"other": torch.ones(1)}, folder / "consolidated.safetensors")
    build(folder)


def test_a_missing_shard_is_named(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint("qwen3", shards=4), tmp_path / "sharded")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=rf"lacks {gone.name}, which model.safetensors.index.json names \(1 of"):
        build(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    with pytest.raises(CheckpointError, match=r"index.json has no weight_map"):
        build(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model.safetensors \(\d+ bytes\) is damaged or truncated"):
        build(folder)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("folder", "Is a directory"), ("link", "No such file or directory, a link to .*gone")],
)
def test_a_file_that_cannot_be_read_is_named(folder: Path, kind: str, why: str) -> None:
    file = folder / "model.safetensors"
    file.unlink()
    if kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(folder / "gone")  # as in a cache of the Hub that was moved
    with pytest.raises(CheckpointError, match=rf"model\.safetensors cannot be read \({why}\); fetch the file again"):
        build(folder)


def test_a_git_lfs_pointer_is_recognized(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version git-lfs spec v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="is a Git LFS pointer; run `git lfs pull`"):
        build(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pytorch_model.bin; minivllm does not unpickle"):
        build(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"has no .safetensors file; .*load_format=dummy"):
        build(folder)


# --------------------------------------------------------------------------- its tensors


def test_all_that_does_not_fit_is_in_one_error(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.self_attn.k_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(128)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(95, 64)
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 96, dtype=torch.int8)

    resave(folder, change)
    with pytest.raises(CheckpointError) as caught:
        build(folder)
    message = str(caught.value)
    assert "does not fit Qwen3ForCausalLM" in message
    assert "2 missing: model.layers.0.self_attn.k_proj.weight, model.norm.weight;" in message
    assert "1 unexpected: model.layers.1.self_attn.q_proj.bias;" in message
    assert "2 misshapen: " in message
    assert "model.layers.1.mlp.up_proj.weight [95, 64] where the model has [96, 64]" in message
    assert "model.layers.1.mlp.down_proj.weight of dtype int8" in message


def test_a_long_list_is_cut(folder: Path) -> None:
    resave(folder, lambda tensors: tensors.update({f"extra.{i}": torch.zeros(1) for i in range(50)}))
    with pytest.raises(CheckpointError, match=r"50 unexpected: (extra\.\d+, ){7}extra\.\d+ and 42 more"):
        build(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_named(folder: Path, value: float) -> None:
    names = ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"]

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            tensors[name].view(-1)[7] = value

    resave(folder, spoil)
    found = f"2 weights of the model hold infinity or NaN, in float32: {', '.join(names)}; the checkpoint is damaged"
    with pytest.raises(CheckpointError, match=found):
        build(folder)


def test_large_weights_are_numbers_and_float16_may_have_none_for_them(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    resave(folder, lambda tensors: tensors[name].view(-1)[:8].fill_(3e38))
    build(folder)  # their sum is none
    with pytest.raises(CheckpointError, match=r"1 weights .* in float16: .*gate_up_proj.* as bfloat16 where float16"):
        build(folder, dtype=torch.float16)


def test_old_rotary_tables_are_ignored(folder: Path) -> None:
    resave(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}))
    build(folder)


def test_a_model_larger_than_memory_is_refused_before_it_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(tensor.numel() for _, tensor in iterate_safetensors(folder))
    for pages, advice in ((2 * size, "model=qwen3, or dtype=bfloat16"), (2 * size - 1, "model=qwen3")):
        monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": pages}.__getitem__)
        with pytest.raises(ConfigError, match=rf"in float32, more than the 0\.0 GiB that this .* {advice}$"):
            build(folder)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 12, 1 << 40))
    model, cuda = torch.nn.Linear(64, 64, device="meta"), torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"of each of 2 ranks take .* are free on this GPU; .* or more GPUs: tp=4"):
        _refuse_too_large(model, cuda, torch.bfloat16, TensorParallel(rank=0, size=2))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * 65 * 64, 1 << 40))
    _refuse_too_large(model, cuda, torch.bfloat16, TensorParallel())


@pytest.mark.parametrize("kind,tensors", [("q_norm", "qwen3"), ("q_norm", "llama")])
def test_another_models_checkpoint_is_refused(tiny_checkpoint: Checkpoints, kind: str, tensors: str) -> None:
    folder = tiny_checkpoint(tensors)
    wrong = LlamaForCausalLM if tensors == "qwen3" else Qwen3ForCausalLM
    with pytest.raises(
        CheckpointError, match=rf"names {CLASSES[read_model_config(folder).architecture].__name__}, but"
    ):
        build(folder, model_class=wrong)
    config = replace(read_model_config(folder), architecture=wrong.__name__)  # a config.json that lies
    with pytest.raises(CheckpointError, match=kind):
        build_model(wrong, config, TensorParallel(), "cpu", torch.float32, iterate_safetensors(folder), 64)


@pytest.mark.parametrize("shared", ["absent", "present", "before the embedding"])
def test_a_tied_head_may_be_in_the_checkpoint(tiny_checkpoint: Checkpoints, shared: str) -> None:
    folder = tiny_checkpoint("qwen3", tie_word_embeddings=True)
    config, tensors = read_model_config(folder), dict(iterate_safetensors(folder))
    assert "lm_head.weight" not in tensors
    embedding = tensors["model.embed_tokens.weight"]
    head = [] if shared == "absent" else [("lm_head.weight", torch.zeros_like(embedding))]
    stream = [*head, *tensors.items()] if shared.startswith("before") else [*tensors.items(), *head]
    model = build_model(Qwen3ForCausalLM, config, TensorParallel(), "cpu", torch.float32, stream, 64)
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, embedding)


def test_an_untied_head_must_be_in_the_checkpoint(folder: Path) -> None:
    resave(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head.weight"):
        build(folder)


def test_dtype_is_converted_and_nothing_trains(folder: Path) -> None:
    config = read_model_config(folder)
    stream = iterate_safetensors(folder)
    model = build_model(Qwen3ForCausalLM, config, TensorParallel(), "cpu", torch.bfloat16, stream, 64)
    assert isinstance(model, Qwen3ForCausalLM)
    params = list(model.parameters())
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad and not p.is_meta for p in params)
    assert model.model.rotary.cos_sin.dtype == torch.float32
    assert not model.training


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"hidden_act": "relu"}, r"hidden_act='relu' .*knows silu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, r"rope_type='dynamic' .*linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, r"'llama3' needs low_freq_factor, high_freq"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer type"),
    ],
)
def test_what_the_layers_cannot_do_is_refused_by_name(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        build(folder)


# --------------------------------------------------------------------------- dummy weights


def test_dummy_weights_follow_from_the_seed_and_the_names(folder: Path) -> None:
    one, again, other = (build(folder, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    for name, value in one.items():
        if "norm" in name:
            assert torch.equal(value, torch.ones_like(value))
        else:
            assert not torch.equal(value, other[name])
            assert 0.015 < float(value.std()) < 0.025
    assert not torch.equal(one["model.layers.0.mlp.down_proj.weight"], one["model.layers.1.mlp.down_proj.weight"])


# --------------------------------------------------------------------------- ranks


@dataclass(frozen=True, slots=True)
class ThreadRank(TensorParallel):
    """A rank that is a thread: what each sends lies in ``board``, and a barrier stands for the network."""

    board: list[Any] = field(default_factory=list)
    barrier: Any = None

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.board[self.rank] = x.clone()
        self.barrier.wait(30)
        parts = list(self.board)
        self.barrier.wait(30)
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._exchange(x)).sum(0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)


def on_ranks(size: int, work: Callable[[TensorParallel], Any]) -> list[Any]:
    board, barrier = [None] * size, threading.Barrier(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRank(rank, size, board=board, barrier=barrier))
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize(
    "architecture,config",
    [
        ("qwen3", {"vocab_size": 511}),  # not a multiple of tp: padded, and cut from the logits
        ("qwen3", {"tie_word_embeddings": True, "vocab_size": 509, "num_key_value_heads": 1}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 4}),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_give_the_tokens_of_one(
    tiny_checkpoint: Checkpoints, architecture: str, config: dict[str, Any], size: int
) -> None:
    folder = tiny_checkpoint(architecture, **config)
    shape, prompts = read_model_config(folder), [[1, 5, 300], list(range(40, 90))]

    def work(tp: TensorParallel) -> tuple[list[list[int]], torch.Size]:
        run = PagedRun(build(folder, tp), TorchBackend(attention_spec(shape, tp=tp)), 64, 2)
        return run.greedy(prompts, 6, 20), run.step([0], [[3]], 0).shape

    want = [reference_tokens(folder, prompt, 6) for prompt in prompts]
    assert on_ranks(size, work) == [(want, (1, shape.vocab_size))] * size


def test_dummy_weights_do_not_depend_on_tp(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("llama", attention_bias=True)
    config = read_model_config(folder)

    def work(tp: TensorParallel) -> torch.Tensor:
        return PagedRun(build(folder, tp, seed=3), TorchBackend(attention_spec(config, tp=tp)), 64, 1).step(
            [0], [[1, 2, 3]], 0
        )

    whole = work(TensorParallel())
    for part in on_ranks(2, work):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-6)


class NoModule:
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None: ...


class WithConstants(Qwen3ForCausalLM):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.model.scale = torch.ones(3)


def test_a_tensor_that_nobody_fills_is_named(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"model.scale is a tensor made in __init__, on the meta device"):
        build_model(WithConstants, read_model_config(folder), TensorParallel(), "cpu", torch.float32, 0, 64)
    with pytest.raises(TypeError, match=r"NoModule is not a torch.nn.Module"):
        build_model(NoModule, read_model_config(folder), TensorParallel(), "cpu", torch.float32, 0, 64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes,size,message",
    [
        ({}, 3, r"tp=3 does not divide the model's attention heads \(4\); use tp=1 or 2 or 4"),
        ({"intermediate_size": 99}, 2, r"tp=2 does not divide the model's intermediate_size \(99\)"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, r"tp=4 neither divides nor is a multiple of the model's 6 kv heads"),
        ({"num_heads": 5}, 1, r"5 attention heads do not divide into 2 kv heads"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_numbers(
    folder: Path, changes: dict[str, int], size: int, message: str
) -> None:
    config: ModelConfig = replace(read_model_config(folder), **changes)
    with pytest.raises(ConfigError, match=message):
        build_model(Qwen3ForCausalLM, config, TensorParallel(0, size), "cpu", torch.float32, 0, 64)


class Stacked(LlamaForCausalLM):
    """Reads checkpoints that have q, k and v in one tensor, and gate and up, as Phi-3's."""

    packed = {"qkv_proj": ("qkv_proj", None), "gate_up": ("gate_up_proj", None)}


STACKS = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up": ("gate_proj", "up_proj")}


def stacked_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights = dict(iterate_safetensors(folder))
    for layer in range(2):
        for name, parts in STACKS.items():
            where, _ = name.split(".")
            for leaf in ("weight", "bias"):
                names = [f"model.layers.{layer}.{where}.{part}.{leaf}" for part in parts]
                if names[0] in weights:
                    weights[f"model.layers.{layer}.{name}.{leaf}"] = torch.cat([weights.pop(each) for each in names])
    return weights


def build_stacked(folder: Path, weights: Any, tp: TensorParallel) -> Any:
    return build_model(Stacked, read_model_config(folder), tp, "cpu", torch.float32, weights, 256)


@pytest.mark.parametrize("biased", [False, True])
def test_tensors_that_the_checkpoint_stacks_are_cut(tiny_checkpoint: Checkpoints, biased: bool) -> None:
    folder = tiny_checkpoint("llama", attention_bias=biased, mlp_bias=biased)
    weights = stacked_weights(folder)
    for tp in (TensorParallel(), TensorParallel(0, 2), TensorParallel(1, 2)):
        plain, own = build(folder, tp).state_dict(), build_stacked(folder, weights.items(), tp).state_dict()
        assert plain.keys() == own.keys() and all(torch.equal(value, own[name]) for name, value in plain.items())
    parts = [build_stacked(folder, 3, TensorParallel(rank, 2)) for rank in range(2)]
    whole = build_stacked(folder, 3, TensorParallel())
    for part in ("gate", "up"):
        halves = [p.model.layers[0].mlp.gate_up_proj.weight.chunk(2)[part == "up"] for p in parts]
        one = whole.model.layers[0].mlp.gate_up_proj.weight.chunk(2)[part == "up"]
        assert torch.equal(torch.cat(halves), one), "dummy weights do not depend on tp"


def test_a_stacked_tensor_that_does_not_fit_is_named_as_the_checkpoint_does(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("llama")
    weights = stacked_weights(folder)
    del weights["model.layers.0.mlp.gate_up.weight"]
    weights["model.layers.1.self_attn.qkv_proj.weight"] = torch.zeros(127, 64)
    with pytest.raises(CheckpointError) as caught:
        build_stacked(folder, weights.items(), TensorParallel())
    assert "1 missing: model.layers.0.mlp.gate_up.weight;" in str(caught.value)
    assert "qkv_proj.weight [127, 64] where the model has [256, 64]" in str(caught.value)


def test_a_file_that_is_emptied_while_it_is_read(tmp_path: Path) -> None:
    """As by a trainer, in place. A mapped one would end the process."""
    saved = {name: torch.randn(4096) for name in "abc"}
    save_file(saved, tmp_path / "file")
    reading = tensors_read(tmp_path / "file")
    read = dict([next(reading)])
    (tmp_path / "file").write_bytes(b"")
    read.update(reading)
    assert all(torch.equal(read[name], its) for name, its in saved.items()) and read.keys() == saved.keys()
