"""Small random checkpoints in Hugging Face's layout, and transformers' outputs for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from minivllm.rounding import cdiv

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # logits far enough apart that rounding does not choose the token
}
END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_MOST = 20_000_000  # parameters: the limit for a tiny model


def random_checkpoint(
    folder: Path,
    model_class: type[Any],
    config: Mapping[str, Any],
    *,
    architecture: str | None = None,
    seed: int = 0,
    shards: int = 1,
    chat: bool = True,
) -> Path:
    """A random float32 checkpoint, with a byte-level tokenizer.

    Args:
        folder: where to write it; returned.
        model_class: transformers' class, or one like it (``config_class``, ``save_pretrained``).
        config: config.json's keys; the rest are taken from ``TINY``.
        architecture: the name written to config.json; by default the class's.
        shards: the minimum number of safetensors files.

    Raises:
        ValueError: the model is not tiny.
    """
    tokenizer = byte_level_tokenizer(chat=chat)
    end = tokenizer.eos_token_id
    special = {"eos_token_id": end, "bos_token_id": None, "pad_token_id": None}
    hf_config = model_class.config_class(**(TINY | special | dict(config)))
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(hf_config).parameters())
    if count > _MOST:
        raise ValueError(
            f"the config makes a {model_class.__name__} of {count:,} parameters, and a tiny one has at most {_MOST:,}; "
            "set the sizes that it leaves out"
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(hf_config).float()
        for param in model.parameters():
            if param.dim() == 1:  # norms and biases start at 1 and 0, which would hide an unused one
                param.data.add_(torch.randn_like(param), alpha=0.2)
    size = sum(p.numel() * 4 for p in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size=cdiv(size, shards) + 1 if shards > 1 else "1GB")
    tokenizer.save_pretrained(folder)
    if architecture is not None:
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"architectures": [architecture]}))
    return folder


@lru_cache
def byte_level_tokenizer(chat: bool = True) -> Any:
    """256 bytes, a few merges, three special tokens: encodes any text, with ids below 512."""
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


# --------------------------------------------------------------------------- the oracle


@lru_cache(maxsize=8)
def reference_model(folder: Path, model_class: Any = None) -> Any:
    """The checkpoint in transformers, in float32 on the CPU; by default of the class that its config names."""
    from transformers import AutoModelForCausalLM

    found = model_class or AutoModelForCausalLM
    return found.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def reference_tokens(folder: Path, prompt: Sequence[int], num_tokens: int, model_class: Any = None) -> list[int]:
    """transformers' greedy continuation of ``prompt``, ignoring end-of-sequence tokens."""
    return list(_reference_tokens(folder, tuple(prompt), num_tokens, model_class))


@lru_cache(maxsize=4096)
def _reference_tokens(folder: Path, prompt: tuple[int, ...], num_tokens: int, model_class: Any) -> tuple[int, ...]:
    model, tokens, cache = reference_model(folder, model_class), [], None
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(num_tokens):
            output = model(ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            ids = output.logits[:, -1:].argmax(-1)
            tokens.append(int(ids))
    return tuple(tokens)
