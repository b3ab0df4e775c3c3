"""Models whose layers have different sliding windows: each layer is handed to a backend built for its window."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.backends.select import HybridBackend
from minivllm.backends.torch import TorchBackend
from minivllm.backends.windows import WindowedBackend, for_layers
from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend, AttentionSpec
from minivllm.errors import ConfigError
from minivllm.testing.checkpoints import random_checkpoint, reference_tokens

PROMPTS = [list(range(5, 30)), [7], list(range(100, 160)), list(range(200, 209))]
LAYERS = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}
CONFIG = {"head_dim": 64, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8} | LAYERS


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3ForCausalLM

    return random_checkpoint(tmp_path_factory.mktemp("windows"), Qwen3ForCausalLM, CONFIG)


@pytest.fixture(scope="module")
def without(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, without windows."""
    to = shutil.copytree(folder, tmp_path_factory.mktemp("without") / "model")
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"use_sliding_window": False}))
    return to


def say(folder: Path, *overrides: str, turns: int = 2, **options: Any) -> list[list[int]]:
    """Twice, so that graphs are replayed and prefixes hit, with prompts that come while others decode."""
    settings = ["cache.num_blocks=64", "scheduler.max_num_seqs=8", "max_model_len=128", *overrides]
    said: dict[str, list[int]] = {}
    with LLM(str(folder), overrides=settings, **options) as llm:
        for turn in range(turns):
            for i, prompt in enumerate(PROMPTS):
                params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
                llm.engine.add_request(f"{turn}-{i}", {"prompt_token_ids": prompt}, params)
                for _ in range(3):
                    for output in llm.engine.step():
                        said[output.request_id] = list(output.outputs[0].token_ids)
            while llm.engine.has_unfinished_requests():
                for output in llm.engine.step():
                    said[output.request_id] = list(output.outputs[0].token_ids)
    first, *others = ([said[f"{turn}-{i}"] for i in range(len(PROMPTS))] for turn in range(turns))
    assert all(other == first for other in others)
    return first


def test_layers_see_what_their_window_shows(folder: Path, without: Path) -> None:
    """On a CPU, with torch; without windows the tokens would be others."""
    expected = [reference_tokens(folder, prompt, 12) for prompt in PROMPTS]
    assert say(folder, device="cpu", attention="torch") == expected
    chunked = say(folder, "scheduler.max_num_batched_tokens=16", device="cpu", attention="torch")
    assert chunked == expected
    assert say(without, device="cpu", attention="torch") != expected


def test_triton(folder: Path) -> None:
    """In its interpreter, if there is no GPU: decodes write keys and values within the attention kernel."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for CPUs")
    said = say(folder, "cache.num_blocks=32", device="cpu", attention="triton", dtype="float32", turns=1)
    assert said == [reference_tokens(folder, prompt, 12) for prompt in PROMPTS]


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("eager", [True, False])
def test_triton_on_a_gpu(folder: Path, eager: bool) -> None:
    """In float32 all tokens are those of transformers."""
    said = say(folder, f"enforce_eager={str(eager).lower()}", attention="triton", dtype="float32")
    assert said == [reference_tokens(folder, prompt, 12) for prompt in PROMPTS]


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("attention", ["auto", "triton", "flash", "flashinfer", "torch"])
def test_backends_on_a_gpu(folder: Path, without: Path, attention: str) -> None:
    """In bfloat16, which rounds: most tokens are those of float32, and few are with full attention in all layers."""
    right = [reference_tokens(folder, prompt, 12) for prompt in PROMPTS]
    try:
        said = say(folder, attention=attention, dtype="bfloat16")
    except ConfigError as refused:
        pytest.skip(str(refused))
    wrong = say(without, attention=attention, dtype="bfloat16")

    def agreement(answers: list[list[int]]) -> int:
        return sum(a == b for one, other in zip(answers, right, strict=True) for a, b in zip(one, other, strict=True))

    assert agreement(said) > 24 > agreement(wrong)


SPEC = AttentionSpec(
    device="cpu", dtype="float32", num_heads=1, num_kv_heads=1, head_dim=16, block_size=16, num_layers=3,
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, scale=0.25,
)  # fmt: skip


class Told(AttentionBackend):
    """Keeps what it is told."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.seen: list[Any] = []

    def prompt_words(self, query_lens: np.ndarray, seq_lens: np.ndarray, captured: int = 0) -> np.ndarray:
        return np.full(
            (self.spec.sliding_window or 1) * (captured or int(query_lens.sum())), self.spec.first_layer, "i4"
        )

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = batch
        self.seen.append((batch.cascade, batch.prompt_words))

    def decode(self, q: torch.Tensor, layer: Any, out: torch.Tensor) -> None:
        self.seen.append(("decode", layer.index))

    def prefill(self, q: torch.Tensor, layer: Any, out: torch.Tensor) -> None:
        self.seen.append(("prefill", layer.index))


class Fresh(Told):
    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self.fresh_prompts = self.spec.sliding_window is None

    def prefill_fresh(self, q: Any, k: Any, v: Any, layer: Any, out: Any) -> None:
        self.seen.append(("fresh", layer.index))


def batch(words: torch.Tensor | None, graph_size: int = 0) -> AttentionBatch:
    lens = np.array([1, 2, 3], dtype=np.int32)
    start = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    tables, mapping = torch.zeros((3, 1), dtype=torch.int32), torch.zeros(6, dtype=torch.int64)
    return AttentionBatch(
        1, start, torch.from_numpy(lens), tables, mapping, lens, lens, tables.numpy(), graph_size, prompt_words=words
    )


def test_each_backend_gets_its_own_words_and_layers() -> None:
    made = for_layers(Fresh, replace(SPEC, sliding_window=4, layer_windows=(4, None, 4)))
    assert isinstance(made, WindowedBackend)
    close, far = made._each
    assert isinstance(close, Told) and isinstance(far, Told)
    assert (close.spec.sliding_window, close.spec.first_layer, far.spec.sliding_window, far.spec.first_layer) == (
        4, 0, None, 1
    )  # fmt: skip
    assert close.spec.layer_windows == far.spec.layer_windows == ()
    lens = batch(None).host_query_lens[1:]
    for captured in (0, 8, 16, 0, 8):
        words = torch.from_numpy(made.prompt_words(lens, lens, captured))
        made.prompt_words(lens, lens, 32)  # another graph's
        made.plan(batch(words, captured))
        (_, its), (_, others) = close.seen.pop(), far.seen.pop()
        assert its.tolist() == [0] * (4 * (captured or 5)) and others.tolist() == [1] * (captured or 5)
    made.plan(batch(None))
    assert close.seen.pop()[1] is None and far.seen.pop()[1] is None
    assert made.fresh_prompts
    q, new = torch.zeros(6, 1, 1), torch.zeros(6, 1, 1)
    for index in range(3):
        made.attend(q, SimpleNamespace(index=index), new, new)
    assert close.seen == [("decode", 0), ("prefill", 0), ("decode", 2), ("prefill", 2)]
    assert far.seen == [("decode", 1), ("fresh", 1)]


def test_only_decodes_are_left_to_it() -> None:
    """Beside another backend for prompts, whose words are not its own."""
    decode = for_layers(Told, replace(SPEC, sliding_window=4, layer_windows=(4, None, 4)))
    hybrid = HybridBackend(Fresh(SPEC), decode)
    lens = batch(None).host_query_lens[1:]
    hybrid.plan(batch(torch.from_numpy(hybrid.prompt_words(lens, lens))))
    for index in range(3):
        hybrid.attend(torch.zeros(6, 1, 1), SimpleNamespace(index=index))
    assert isinstance(decode, WindowedBackend)
    assert [[what for what in one.seen if what[0] == "decode"] for one in decode._each] == [  # type: ignore[attr-defined]
        [("decode", 0), ("decode", 2)], [("decode", 1)]
    ]  # fmt: skip


def test_layers_that_are_alike_have_one_backend() -> None:
    made = for_layers(TorchBackend, replace(SPEC, sliding_window=4))
    assert type(made) is TorchBackend and made.spec.sliding_window == 4


def test_a_cache_of_ones_own_cannot_be_shared() -> None:
    class Own(TorchBackend):
        def write(self, k: torch.Tensor, v: torch.Tensor, layer: Any) -> None: ...

    with pytest.raises(TypeError, match="Own writes the cache in its own way, and layers with different windows share"):
        for_layers(Own, replace(SPEC, sliding_window=4, layer_windows=(4, None, 4)))
