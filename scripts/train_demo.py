"""Trains the bundled demo model from text that it writes itself, and saves it as a Hugging Face checkpoint folder.

    python scripts/train_demo.py            the whole run, into minivllm/models/demo
    python scripts/train_demo.py --smoke    a minute on two CPU cores, for checking that everything works

Nothing is downloaded: `demo/` beside this file holds the words, facts and templates, and everything is seeded. The
tokenizer is a byte-level BPE of 3,072 tokens. The model has the Qwen3 architecture (6 layers, hidden 256, 4 query and
2 key-value heads of 64, SwiGLU 768, tied embeddings): 5,509,120 parameters, kept in bfloat16.

The bundled checkpoint, on one NVIDIA H200: 73.7 million tokens of text (531,879 documents), composed in 22 seconds;
12,000 steps of 65,536 tokens (786 million tokens, nearly eleven epochs) in 200 seconds, 259 seconds for everything.
Held-out perplexity (documents from another seed, bfloat16 weights): 1.74 per token on stories and 1.55 on chats. It is
that low because the text comes from templates, which the model knows by the end; what remains is the choice between
them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from demo.corpus import (
    CHAT_TEMPLATE,
    END,
    TURN_END,
    TURN_START,
    Shard,
    build,
    chat_text,
    documents,
    encode,
    train_tokenizer,
)
from demo.model import DemoConfig, DemoModel, complete
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

OUT = Path(__file__).resolve().parent.parent / "minivllm" / "models" / "demo"
SEED, HELD_OUT_SEED = 1_000, 900_000
PLAIN_PROMPTS = [
    "Once upon a time", "The engine", "In a small village", "The old engine of the train", "The", "I", "My favourite",
    "It was raining", "The capital of France is", "A KV cache is", "Dear Anna,", "The ship", "When the dragon",
    "1, 2, 3,",
]  # fmt: skip
QUESTIONS = [
    "What is the capital of France?", "Hello, who are you?", "What is 7 plus 5?", "What is a KV cache?", "Hello",
    "Write a haiku",
    "Tell me a story about a dragon.", "Tell me a joke.", "What is 23 + 18?", "What is the opposite of hot?",
    "Thank you!",
    "Why is the sky blue?", "Can you explain string theory?", "What colour is a banana?", "What comes after Monday?",
    "How does a scheduler work?", "Name three animals.", "I am feeling a bit down today.",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a run. Training ends after `steps` or `minutes`, whichever comes first, and always decays fully."""

    steps: int = 12000
    minutes: float = 4.2
    rows: int = 32
    length: int = 2048
    peak: float = 3e-3
    warmup: int = 100
    characters: int = 300_000_000
    held_out: int = 2_000_000
    shards: int = 64


SMOKE = Plan(steps=60, minutes=2.0, rows=4, length=256, warmup=10, characters=600_000, held_out=20_000, shards=2)


def batches(corpus: Shard, plan: Plan, device: torch.device) -> Iterator[Tensor]:
    """Endless batches (rows, length + 1). Each row begins at the start of a document and runs on over the next ones."""
    tokens = torch.from_numpy(corpus.tokens.astype(np.int32)).to(device)
    rng = np.random.default_rng(SEED)
    offsets = torch.arange(plan.length + 1, device=device)
    while True:
        grid = np.arange(rng.integers(plan.length), len(corpus.tokens) - 2 * plan.length, plan.length)
        starts = corpus.starts[np.searchsorted(corpus.starts, grid, side="right") - 1]
        rng.shuffle(starts)
        for at in range(0, len(starts) - plan.rows + 1, plan.rows):
            rows = torch.from_numpy(starts[at : at + plan.rows]).to(device)
            yield tokens[rows[:, None] + offsets].long()


def rate(progress: float, step: int, plan: Plan) -> float:
    """Warm up, stay, and from 40 % of the run on fall along a cosine to zero."""
    falling = max(0.0, (min(progress, 1.0) - 0.4) / 0.6)
    return plan.peak * min(1.0, (step + 1) / plan.warmup) * (0.5 + 0.5 * math.cos(math.pi * falling))


def train(model: DemoModel, corpus: Shard, plan: Plan, device: torch.device) -> None:
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.peak, betas=(0.9, 0.95), fused=device.type == "cuda")
    loss_of = torch.compile(model.loss) if device.type == "cuda" else model.loss
    began, step, progress = time.perf_counter(), 0, 0.0
    source = batches(corpus, plan, device)
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = rate(progress, step, plan)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            began = time.perf_counter()  # the first step compiles
        step += 1
        if step % 20 == 0:  # .item() waits for the device, so that the clock below is honest
            value, elapsed = loss.item(), time.perf_counter() - began
            progress = max(step / plan.steps, elapsed / 60 / plan.minutes)
            if step % 200 == 0 or progress >= 1.0:
                speed = step * plan.rows * plan.length / elapsed
                print(f"step {step} loss {value:.4f} seconds {elapsed:.0f} tokens/s {speed:,.0f}", flush=True)


@torch.no_grad()
def perplexity(model: DemoModel, held_out: Shard, length: int) -> float:
    device = model.cos.device
    tokens = torch.from_numpy(held_out.tokens.astype(np.int64))
    rows = tokens[: (len(tokens) - 1) // length * length].view(-1, length)
    losses = [model.loss(chunk.to(device)).item() * len(chunk) for chunk in rows.split(16)]
    return math.exp(sum(losses) / len(rows))


def export(model: DemoModel, tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in model.named_parameters()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    ids = {name: tokenizer.token_to_id(name) for name in (END, TURN_START, TURN_END)}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(model.config),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": ids[TURN_END],
        "pad_token_id": ids[END],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }
    generation = {"eos_token_id": [ids[TURN_END], ids[END]], "pad_token_id": ids[END]}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    tokenizer.save(str(out / "tokenizer.json"))
    for name, content in (
        ("config", config),
        ("generation_config", generation),
        ("tokenizer_config", tokenizer_config),
    ):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def check_export(model: DemoModel, tokenizer: Tokenizer, out: Path) -> None:
    """Loads the folder with transformers and compares its tokens and logits with the trained model's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    loaded_tokenizer = AutoTokenizer.from_pretrained(out)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "It's 12 o'clock.\n\nHow are you?"},
    ]
    text = loaded_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text).ids
    if text != chat_text(messages) + f"{TURN_START}assistant\n" or loaded_tokenizer.encode(text) != ids:
        raise RuntimeError(f"the exported tokenizer or chat template differs on {text!r}")
    rounded = DemoModel(model.config)
    rounded.load_state_dict(
        {name: weight.to("cpu", torch.bfloat16).float() for name, weight in model.state_dict().items()}
    )
    tokens = torch.tensor([ids])
    difference = (loaded(tokens).logits - rounded(tokens)).abs().max().item()
    print(f"exported logits differ from the trained model's by at most {difference:.2e}")
    if difference > 1e-3:
        raise RuntimeError(f"the exported checkpoint computes other logits: {difference:.3f} apart")


def show(model: DemoModel, tokenizer: Tokenizer, limit: int) -> None:
    stop = {tokenizer.token_to_id(END), tokenizer.token_to_id(TURN_END)}
    chats = [chat_text([{"role": "user", "content": one}]) + f"{TURN_START}assistant\n" for one in QUESTIONS]
    for prompt in PLAIN_PROMPTS + chats:
        ids = tokenizer.encode(prompt).ids
        for temperature in (0.0, 0.8):
            text = tokenizer.decode(complete(model, ids, stop, limit, temperature), skip_special_tokens=False)
            print(f"--- temperature {temperature}: {prompt!r}\n{text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--steps", type=int, help="end after this many steps")
    parser.add_argument("--minutes", type=float, help="end after this much training, compilation not counted")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="for composing the text")
    parser.add_argument("--smoke", action="store_true", help="a tiny run that shows only that everything works")
    args = parser.parse_args()
    base = SMOKE if args.smoke else Plan()
    given = {name: getattr(args, name) for name in ("steps", "minutes") if getattr(args, name) is not None}
    plan = Plan(**{**asdict(base), **given})
    device, began = torch.device(args.device), time.perf_counter()
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")

    config = DemoConfig()
    tokenizer = train_tokenizer(SEED - 1, config.vocab_size, min(plan.characters, 20_000_000))
    corpus = build(tokenizer, SEED, plan.characters, plan.shards, args.processes)
    held_out = {kind: encode(tokenizer, documents(HELD_OUT_SEED, plan.held_out, kind)) for kind in ("story", "chat")}
    model = DemoModel(config).to(device)
    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{parameters:,} parameters, {len(corpus.tokens):,} tokens in {len(corpus.starts):,} documents")
    print(f"text composed after {time.perf_counter() - began:.0f} seconds", flush=True)

    train(model, corpus, plan, device)
    export(model, tokenizer, args.out)
    print(f"saved after {time.perf_counter() - began:.0f} seconds", flush=True)
    model.load_state_dict({name: weight.to(torch.bfloat16).float() for name, weight in model.state_dict().items()})
    for kind, shard in held_out.items():
        print(f"held-out perplexity, {kind}: {perplexity(model, shard, plan.length):.3f}", flush=True)
    check_export(model, tokenizer, args.out)
    show(model, tokenizer, 40 if args.smoke else 160)
    print(f"done after {time.perf_counter() - began:.0f} seconds")


if __name__ == "__main__":
    main()
