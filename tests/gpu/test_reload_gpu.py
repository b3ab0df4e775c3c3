"""Other weights, adapters and sleep, with CUDA graphs, packed and folded copies and float8: answers are of the weights
that there are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import save_adapter
from safetensors.torch import load_file, save_file

from minivllm import LLM, SamplingParams
from minivllm.errors import RequestError
from minivllm.models.checkpoint import DEMO
from minivllm.testing.checkpoints import random_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

PROMPTS = [[5, 6, 7], list(range(10, 90)), *([n, 3] for n in range(20))]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
KINDS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "float32": {"dtype": "float32"},
    "fp8": {"quantization": "fp8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
}


def say(llm: LLM) -> list[Any]:
    """Alone, by the kernels for few rows, and together."""
    alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS[:2]]
    return [alone, [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with noise on its weights, which answers otherwise."""
    folder = tmp_path_factory.mktemp("changed") / "demo"
    shutil.copytree(DEMO, folder)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * 0.3
        tensors[name] = (tensor + noise).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


def answers_as_fresh(old: Path, new: Path, **options: Any) -> None:
    with LLM(str(new), device="cuda", **options) as llm:
        expected = say(llm)
    with LLM(str(old), device="cuda", **options) as llm:
        first = say(llm)
        assert first != expected
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        llm.reload_weights(new)
        assert torch.cuda.memory_allocated() == before
        assert say(llm) == expected
        llm.reload_weights()
        assert say(llm) == first
        given = {name: tensor.cuda() for name, tensor in load_file(new / "model.safetensors").items()}
        llm.reload_weights(weights_iterator=given.items())
        assert say(llm) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_a_new_engine(kind: str, changed: Path) -> None:
    options = KINDS[kind]
    answers_as_fresh(DEMO, changed, overrides=["cache.num_blocks=512"], **options)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of layers that are large enough to be packed, on Hopper."""
    tmp_path = tmp_path_factory.mktemp("large")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from minivllm.kernels import nvrtc

    if not nvrtc.available(torch.device("cuda")):
        pytest.skip("weights are packed on Hopper only")
    shape = {
        "vocab_size": 512, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "initializer_range": 0.05,
    }  # fmt: skip
    folders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        random_checkpoint(tmp_path / "tokenizer", Qwen3ForCausalLM, {"num_hidden_layers": 1})
        model = Qwen3ForCausalLM(Qwen3Config(**shape, eos_token_id=None)).bfloat16()
        folders.append(tmp_path / str(seed))
        model.save_pretrained(folders[-1])
        for file in (tmp_path / "tokenizer").glob("tokenizer*"):
            shutil.copy(file, folders[-1])
    return folders


PACKED = ["cache.num_blocks=512", "packed_weights=true"]


def test_packed_copies_are_made_anew(large: list[Path]) -> None:
    answers_as_fresh(*large, overrides=PACKED)


# --------------------------------------------------------------------------- sleep


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def answers_after_sleep(old: Path, new: Path, **options: Any) -> None:
    with LLM(str(new), device="cuda", **options) as llm:
        expected = say(llm)
    with LLM(str(old), device="cuda", enable_sleep_mode=True, **options) as llm:
        worker = llm.engine.executor._worker  # type: ignore[attr-defined]
        weights = worker._sleeping._regions["weights"].tensor
        first, awake, size = say(llm), free(), worker._sleeping.nbytes
        assert first != expected
        llm.sleep()
        asleep = free()
        assert asleep - awake >= size
        llm.wake_up()
        assert asleep - free() >= size
        assert say(llm) == first
        llm.sleep(level=2)
        llm.wake_up(["weights"])
        assert not weights.any(), "level 2 keeps nothing"
        llm.reload_weights(new)
        llm.wake_up(["kv_cache"])
        assert say(llm) == expected
    del weights
    with LLM(str(old), device="cuda", **options) as llm:  # the memory of the last is there again
        assert say(llm) == first


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_answer_after_sleep(kind: str, changed: Path) -> None:
    answers_after_sleep(DEMO, changed, overrides=["cache.num_blocks=2048"], **KINDS[kind])


def test_packed_copies_sleep(large: list[Path]) -> None:
    answers_after_sleep(*large, overrides=PACKED)


def test_a_draft_model_sleeps_too() -> None:
    drafts = {"model": "demo", "num_speculative_tokens": 3}
    with LLM("demo", device="cuda", enable_sleep_mode=True, speculative_config=drafts) as llm:
        first, stats = say(llm), llm.llm_engine.stats
        for level in (1, 2):
            before = free()
            llm.sleep(level)
            assert free() - before > 1 << 30
            llm.wake_up()
            if level == 2:
                llm.reload_weights()
            assert say(llm) == first
        assert stats.accepted_tokens > 0.9 * stats.draft_tokens > 0


def test_there_may_be_no_room_to_wake_up() -> None:
    with LLM("demo", device="cuda", enable_sleep_mode=True, gpu_memory_utilization=0.6) as llm:
        first = say(llm)
        llm.sleep()
        taken = torch.empty(free() - (64 << 20), dtype=torch.uint8, device="cuda")
        with pytest.raises(RequestError, match=r"wake_up: there is no room for kv_cache, .* GiB: .* MiB more"):
            llm.wake_up()
        del taken
        torch.cuda.empty_cache()
        llm.wake_up()
        assert say(llm) == first


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_answer_as_a_new_engine(changed: Path) -> None:
    with LLM(str(changed), device="cuda", tp=2) as llm:
        expected = say(llm)
    with LLM("demo", device="cuda", tp=2) as llm:
        first = say(llm)
        llm.reload_weights(changed)
        assert say(llm) == expected != first


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_sleep(changed: Path) -> None:
    with LLM(str(changed), device="cuda", tp=2) as llm:
        expected = say(llm)
    with LLM("demo", device="cuda", tp=2, enable_sleep_mode=True) as llm:
        first = say(llm)
        llm.sleep()
        llm.wake_up()
        assert say(llm) == first
        llm.sleep(level=2)
        llm.wake_up()
        llm.reload_weights(changed)
        assert say(llm) == expected != first


# --------------------------------------------------------------------------- LoRA


def test_an_adapter_is_merged_on_the_gpu(changed: Path, tmp_path: Path) -> None:
    """The same weights as merged by hand on the CPU; and those of the next adapter after a reload."""
    modules = ["q_proj", "o_proj", "up_proj", "down_proj"]
    folders = []
    for seed in (0, 1):
        products = save_adapter(tmp_path / str(seed), changed, modules, seed=seed)
        folders.append(tmp_path / f"by hand {seed}")
        shutil.copytree(changed, folders[-1])
        tensors = load_file(changed / "model.safetensors")
        for name, product in products.items():
            tensors[name] = (tensors[name].float() + 2 * product).to(tensors[name].dtype)
        save_file(tensors, folders[-1] / "model.safetensors")
    expected = []
    for folder in folders:
        with LLM(str(folder), device="cuda", dtype="float32", enforce_eager=True) as llm:
            expected.append(weights_of(llm))
    shutil.copytree(tmp_path / "0", tmp_path / "adapter")
    overrides = [f"model.lora={tmp_path / 'adapter'}"]
    with LLM(str(changed), device="cuda", dtype="float32", enforce_eager=True, overrides=overrides) as llm:
        torch.testing.assert_close(weights_of(llm), expected[0], rtol=0.01, atol=1e-6)  # a bfloat16 checkpoint
        shutil.copytree(tmp_path / "1", tmp_path / "adapter", dirs_exist_ok=True)
        llm.reload_weights()
        torch.testing.assert_close(weights_of(llm), expected[1], rtol=0.01, atol=1e-6)


def weights_of(llm: LLM) -> dict[str, torch.Tensor]:
    model = llm.engine.executor._worker.runner.model  # type: ignore[attr-defined]
    return {name: param.cpu().clone() for name, param in model.named_parameters()}
