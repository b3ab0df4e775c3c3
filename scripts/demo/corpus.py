# Mixes the composers into documents, trains the tokenizer on them, and encodes shards of them on all processes.
# A shard depends on its seed alone, so the corpus is the same on any number of processes.
from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .chat import chat
from .prose import prose
from .stories import long_story, story

END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The split of Qwen's tokenizers: words with their space, single digits, punctuation, line ends.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Of tools the corpus knows nothing; the template tells of them as Qwen's do, and what has to be called can be.
CHAT_TEMPLATE = (
    "{%- set rest = messages[1:] if tools and messages[0].role == 'system' else messages %}"
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- 'These tools can be called:\\n<tools>\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}"
    '{{- \'</tools>\\nA call is written as:\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>\' }}'
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in rest %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{- '\\n' if message.content or not loop.first else '' }}"
    "{{- '<tool_call>\\n{\"name\": ' + call.function.name | tojson }}"
    "{{- ', \"arguments\": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# (kind, share of documents): by characters about 38 % stories, 12 % long ones, 10 % other prose and 40 % chat.
KINDS = ("story", "long", "prose", "chat")
SHARES = (62, 5, 55, 80)


@dataclass(frozen=True, slots=True)
class Shard:
    tokens: np.ndarray  # (tokens,) uint16, documents one after another, each with its end token
    starts: np.ndarray  # (documents,) int64, where each document begins


def chat_text(messages: list[dict[str, str]]) -> str:
    return "".join(f"{TURN_START}{one['role']}\n{one['content']}{TURN_END}\n" for one in messages)


def document(rng: random.Random, kind: str | None = None) -> str:
    kind = kind or rng.choices(KINDS, SHARES)[0]
    if kind == "story":
        return story(rng)
    if kind == "long":
        return long_story(rng)
    return prose(rng) if kind == "prose" else chat_text(chat(rng))


def documents(seed: int, characters: int, kind: str | None = None) -> Iterator[str]:
    rng = random.Random(seed)
    while characters > 0:
        text = document(rng, kind)
        characters -= len(text)
        yield text


def train_tokenizer(seed: int, vocab_size: int, characters: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(seed, characters), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterator[str]) -> Shard:
    end = tokenizer.token_to_id(END)
    ids = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(list(texts))]
    lengths = np.array([len(one) for one in ids], dtype=np.int64)
    return Shard(np.concatenate([np.array(one, dtype=np.uint16) for one in ids]), np.cumsum(lengths) - lengths)


def _shard(seed: int, tokenizer_json: str, characters: int) -> Shard:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return encode(Tokenizer.from_str(tokenizer_json), documents(seed, characters))


def build(tokenizer: Tokenizer, seed: int, characters: int, shards: int, processes: int) -> Shard:
    """The whole training corpus: `shards` shards of equal size, encoded on `processes` processes, joined in order."""
    work = partial(_shard, tokenizer_json=tokenizer.to_str(), characters=characters // shards)
    seeds = range(seed, seed + shards)
    if processes == 1:
        parts = [work(one) for one in seeds]
    else:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            parts = list(pool.map(work, seeds))
    offsets = np.cumsum([0] + [len(part.tokens) for part in parts[:-1]])
    starts = np.concatenate([part.starts + offset for part, offset in zip(parts, offsets, strict=True)])
    return Shard(np.concatenate([part.tokens for part in parts]), starts)
