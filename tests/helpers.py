"""Small worlds for tests: random checkpoints, transformers as the oracle, batches built by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend, AttentionSpec, Model
from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.layers.linear import split_heads

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden / heads
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # logits far enough apart that rounding does not choose the token
}
END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


# --------------------------------------------------------------------------- checkpoints


def save_checkpoint(
    folder: Path, architecture: str = "qwen3", *, seed: int = 0, shards: int = 1, chat: bool = True, **config: Any
) -> Path:
    """A random float32 checkpoint in Hugging Face's layout, with a byte-level tokenizer; ``config`` overrides TINY."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    classes = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
    config_class, model_class = classes[architecture]
    tokenizer = byte_level_tokenizer(chat=chat)
    end = tokenizer.eos_token_id
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**(TINY | {"eos_token_id": end, "bos_token_id": None} | config))).float()
        for name, param in model.named_parameters():
            if param.dim() == 1:  # norms and biases start at 1 and 0, which would hide that one is not used
                param.data.add_(torch.randn_like(param), alpha=0.2)
            assert param.dtype == torch.float32, name
    size = sum(p.numel() * 4 for p in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size=-(-size // shards) + 1 if shards > 1 else "1GB")
    tokenizer.save_pretrained(folder)
    return folder


@lru_cache
def byte_level_tokenizer(chat: bool = True) -> Any:
    """256 bytes, a few merges, three special tokens: any text, ids below 512."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    inner.train_from_iterator(["the quick brown fox jumps over the lazy dog, once upon a time there was"] * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def edit_json(file: Path, *drop: str, **changes: Any) -> None:
    """Change a JSON file in place: keys dropped, keys set."""
    value = {k: v for k, v in json.loads(file.read_text()).items() if k not in drop} | changes
    file.write_text(json.dumps(value))


# --------------------------------------------------------------------------- the oracle


@lru_cache(maxsize=8)
def reference_model(folder: Path) -> Any:
    """The checkpoint in transformers, float32, on the CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def reference_tokens(folder: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers continues ``prompt`` with, greedily, running past any end-of-sequence token."""
    return list(_reference_tokens(folder, tuple(prompt), num_tokens))


@lru_cache(maxsize=4096)
def _reference_tokens(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    model, tokens, cache = reference_model(folder), [], None
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(num_tokens):
            output = model(ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            ids = output.logits[:, -1:].argmax(-1)
            tokens.append(int(ids))
    return tuple(tokens)


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


def attention_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int,
    num_decodes: int,
    device: torch.device | str = "cpu",
) -> AttentionBatch:
    """A step by hand: row i's last ``query_lens[i]`` of ``seq_lens[i]`` tokens are new; unused table entries: junk."""
    n, width = len(seq_lens), max(map(len, tables))
    table = np.full((n, width), 2**30, dtype=np.int32)
    for i, blocks in enumerate(tables):
        table[i, : len(blocks)] = blocks
    positions = [np.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)]
    slots = [table[i, p // block_size].astype(np.int64) * block_size + p % block_size for i, p in enumerate(positions)]
    lens, starts = np.asarray(seq_lens, np.int32), np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    return AttentionBatch(
        num_decodes=num_decodes,
        query_start=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lens).to(device),
        block_tables=torch.from_numpy(table).to(device),
        slot_mapping=torch.from_numpy(np.concatenate(slots)).to(device),
        host_query_lens=np.asarray(query_lens, np.int32),
        host_seq_lens=lens,
        host_block_tables=table,
    )


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
        self.backend.plan(batch)
        ids = torch.tensor([t for tokens in new for t in tokens], device=device)
        places = [p for n, s in zip(lens, seq_lens, strict=True) for p in range(s - n, s)]
        hidden = self.model.forward(ids, torch.tensor(places, device=device), self.backend)
        for row, seq_len in zip(rows, seq_lens, strict=True):
            self.computed[row] = seq_len
        return self.model.compute_logits(hidden[batch.query_start[1:].long() - 1])

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
