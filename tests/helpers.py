"""Small worlds for tests beside those of ``minivllm.testing``: our checkpoints, and models stepped by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from minivllm import LLM
from minivllm.backends.torch import TorchBackend
from minivllm.core import prompt_graphs
from minivllm.core.batch import Batch
from minivllm.core.interfaces import AttentionBackend, AttentionSpec, Model
from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.layers.linear import split_heads
from minivllm.models.loader import iterate_safetensors
from minivllm.testing import checkpoints as testing
from minivllm.testing.checkpoints import (
    ASSISTANT,
    END,
    USER,
    byte_level_tokenizer,
    random_checkpoint,
    reference_model,
    reference_tokens,
)
from minivllm.testing.steps import attention_batch

__all__ = [
    "ASSISTANT",
    "END",
    "TINY",
    "USER",
    "PagedRun",
    "attention_batch",
    "attention_spec",
    "byte_level_tokenizer",
    "edit_json",
    "pass_over_empty_rows",
    "plan_late",
    "reference_model",
    "reference_tokens",
    "save_adapter",
    "save_checkpoint",
    "small_steps",
    "stand_in_for_prompt_graphs",
    "step_batch",
]

TINY: dict[str, Any] = testing.TINY | {"head_dim": 32}  # not hidden / heads


# --------------------------------------------------------------------------- checkpoints


def save_checkpoint(
    folder: Path, architecture: str = "qwen3", *, seed: int = 0, shards: int = 1, chat: bool = True, **config: Any
) -> Path:
    """A random float32 checkpoint in Hugging Face's layout, with a byte-level tokenizer; ``config`` overrides TINY."""
    from transformers import LlamaForCausalLM, Qwen3ForCausalLM

    model_class = {"qwen3": Qwen3ForCausalLM, "llama": LlamaForCausalLM}[architecture]
    return random_checkpoint(folder, model_class, TINY | config, seed=seed, shards=shards, chat=chat)


def save_adapter(
    folder: Path, checkpoint: Path, modules: Sequence[str], *, rank: int = 4, seed: int = 0, **config: Any
) -> dict[str, torch.Tensor]:
    """A random LoRA adapter, as PEFT's save_pretrained writes it; returns B @ A by the name of the checkpoint's tensor.

    ``modules``: ends of names. ``config``: keys of adapter_config.json, whose lora_alpha is twice the rank.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors, products = {}, {}
    for name, weight in iterate_safetensors(checkpoint):
        module = name.removesuffix(".weight")
        if module.endswith(tuple(modules)):
            a, b = (
                0.1 * torch.randn(shape, generator=generator)
                for shape in ((rank, weight.shape[1]), (len(weight), rank))
            )
            tensors |= {f"base_model.model.{module}.lora_{x}.weight": part for x, part in (("A", a), ("B", b))}
            products[name] = b @ a
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "some/model", "inference_mode": True,
        "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.05, "bias": "none", "use_rslora": False, "use_dora": False,
        "target_modules": list(modules), "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
        "fan_in_fan_out": False, "init_lora_weights": True, "layers_pattern": None, "layers_to_transform": None,
        "loftq_config": {}, "megatron_config": None, "megatron_core": "megatron.core", "revision": None,
        "auto_mapping": None, "peft_version": "0.18.0", "qalora_group_size": 16, "exclude_modules": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(said | config))
    return products


def edit_json(file: Path, *drop: str, **changes: Any) -> None:
    """Change a JSON file in place: keys dropped, keys set."""
    value = {k: v for k, v in json.loads(file.read_text()).items() if k not in drop} | changes
    file.write_text(json.dumps(value))


# --------------------------------------------------------------------------- attention by hand


def attention_spec(config: ModelConfig, *, tp: TensorParallel | None = None, **overrides: Any) -> AttentionSpec:
    heads, kv_heads = split_heads(config.num_heads, config.num_kv_heads, tp or TensorParallel())
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": config.head_dim,
        "block_size": 4,
        "num_layers": config.num_layers,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "max_model_len": config.max_position,
        "scale": config.head_dim**-0.5,
    }
    return AttentionSpec(**(values | overrides))


class PagedRun:
    """A model and a tiny paged cache, stepped by hand: every sequence's tokens so far, whole steps at a time."""

    def __init__(self, model: Model, backend: AttentionBackend, max_tokens: int, num_seqs: int) -> None:
        spec = backend.spec
        self.model, self.backend, self.size = model, backend, spec.block_size
        per_seq = -(-max_tokens // spec.block_size)
        blocks = np.random.default_rng(0).permutation(np.arange(1, num_seqs * per_seq + 1))
        self.tables = blocks.reshape(num_seqs, per_seq)
        shape = (spec.num_layers, 2, len(blocks) + 1, spec.block_size, spec.num_kv_heads, spec.head_dim)
        dtype = getattr(torch, spec.dtype)
        backend.bind(torch.full(shape, float("nan"), dtype=dtype, device=spec.device))  # unused slots must not be read
        self.computed = [0] * num_seqs

    @torch.inference_mode()
    def step(self, rows: Sequence[int], new: Sequence[Sequence[int]], num_decodes: int) -> torch.Tensor:
        """Compute ``new`` tokens for sequences ``rows`` (decodes first); returns each row's last logits (n, vocab)."""
        lens = [len(tokens) for tokens in new]
        seq_lens = [self.computed[row] + n for row, n in zip(rows, lens, strict=True)]
        device = self.backend.spec.device
        batch = attention_batch(lens, seq_lens, [self.tables[r] for r in rows], self.size, num_decodes, device)
        last = batch.query_start[1:].long() - 1
        batch.last_tokens = last if sum(lens) > len(rows) else None  # as the runner
        self.backend.plan(batch)
        ids = torch.tensor([t for tokens in new for t in tokens], device=device)
        places = [p for n, s in zip(lens, seq_lens, strict=True) for p in range(s - n, s)]
        hidden = self.model.forward(ids, torch.tensor(places, device=device), self.backend)
        for row, seq_len in zip(rows, seq_lens, strict=True):
            self.computed[row] = seq_len
        return self.model.compute_logits(hidden if len(hidden) == len(rows) else hidden[last])

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int, chunk: int) -> list[list[int]]:
        """Prefill in chunks, in steps that mix them with the decodes of sequences further on."""
        outputs: list[list[int]] = [[] for _ in prompts]
        while any(len(out) < num_tokens for out in outputs):
            active = [i for i, out in enumerate(outputs) if len(out) < num_tokens]
            decodes = [i for i in active if outputs[i]]
            prefills = [i for i in active if not outputs[i]]
            rows = decodes + prefills
            new = [outputs[i][-1:] for i in decodes]
            new += [list(prompts[i][self.computed[i] : self.computed[i] + chunk]) for i in prefills]
            tokens = self.step(rows, new, len(decodes)).argmax(-1).tolist()
            for i, token in zip(rows, tokens, strict=True):
                if self.computed[i] >= len(prompts[i]):
                    outputs[i].append(token)
        return outputs


# --------------------------------------------------------------------------- steps


def step_batch(decodes: list[int], prompts: list[int]) -> Batch:
    """Decodes with contexts so long, and prompts of so many tokens."""
    none = np.empty(0, dtype=np.int32)
    n = len(decodes) + len(prompts)
    return Batch(
        step=0, slots=np.arange(n, dtype=np.int32), generations=np.zeros(n, dtype=np.int64),
        num_computed=np.array([*decodes, *[0] * len(prompts)], dtype=np.int32),
        num_new=np.array([*[1] * len(decodes), *prompts], dtype=np.int32), samples=np.ones(n, dtype=bool),
        num_decodes=len(decodes), token_ids=np.zeros(sum(prompts), dtype=np.int32), block_slots=none,
        block_indices=none, block_ids=none, admitted_slots=none, admitted_params=none,
    )  # fmt: skip


def pass_over_empty_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch backend knows of no prompt rows without queries, which a graph's padding may have."""
    plan = TorchBackend._plan_chunk

    def plan_chunk(self: TorchBackend, batch: Any, i: int, start: int, count: int) -> list[Any]:
        return plan(self, batch, i, start, count) if count else []

    monkeypatch.setattr(TorchBackend, "_plan_chunk", plan_chunk)


def plan_late(
    monkeypatch: pytest.MonkeyPatch, attention: AttentionBackend, *modules: ModuleType, lengths: bool = False
) -> None:
    """Make the torch backend plan, as often as it takes, when a step that these modules capture has found its block
    tables, and ``lengths``: a captured backend reads them late."""

    def and_plan(gather: Callable[..., None]) -> Callable[..., None]:
        def gather_and_plan(*args: Any) -> None:
            gather(*args)
            batch = attention.batch
            assert batch is not None
            if lengths:
                batch.host_seq_lens[:] = batch.seq_lens
            attention.plan(batch)

        return gather_and_plan

    for module in modules:
        for name in ("decode_inputs", "prompt_inputs"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, and_plan(getattr(module, name)))


def small_steps(model: Path | str, tokens: int, slots: int, **scheduler: int) -> LLM:
    """An engine on a CPU whose steps are small, and which computes every prompt."""
    options = [f"scheduler.max_num_batched_tokens={tokens}", "cache.enable_prefix_caching=false"]
    options += [f"scheduler.{name}={value}" for name, value in scheduler.items()]
    return LLM(str(model), device="cpu", attention="torch", dtype="float32", max_num_seqs=slots, overrides=options)


def stand_in_for_prompt_graphs(
    monkeypatch: pytest.MonkeyPatch, attention: AttentionBackend, made: Callable[[Any, torch.Tensor], Any]
) -> None:
    """``made`` (what is captured, its result): what has ``replay``, which fills the result."""

    def capture_graph(run: Callable[[], torch.Tensor], pool: Any) -> tuple[Any, torch.Tensor]:
        result = torch.full_like(run(), float("nan"))
        return made(run, result), result

    pass_over_empty_rows(monkeypatch)
    plan_late(monkeypatch, attention, prompt_graphs)
    monkeypatch.setattr(prompt_graphs, "capture_graph", capture_graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
