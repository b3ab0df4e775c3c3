"""The same equality with the triton backend, in a process of its own: TRITON_INTERPRET is read at import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import reference_tokens
from test_equality import CHECKPOINTS

PROMPTS = [[5], [0, 1], list(range(40, 57)), [*range(100, 133), 7], [*range(100, 133), 8, 9]]
ALIKE = [[*range(100, 180), *range(i, 2 * i)] for i in range(5)]  # what these share, decodes read once
MAX_TOKENS = 5
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"cache.block_size": 16, "cache.num_blocks": 64, "scheduler.max_num_batched_tokens": 64}),
    (
        "llama-tied",
        {
            "cache.block_size": 4,
            "cache.num_blocks": 12,
            "scheduler.max_num_batched_tokens": 7,
            "scheduler": "prefill_first",
        },
    ),
    (
        "llama-tied",
        {"cache.block_size": 8, "cache.num_blocks": 64, "scheduler.max_num_batched_tokens": 128, "max_model_len": 128},
    ),
    (
        "llama-gqa1",
        {
            "cache.block_size": 1,
            "cache.num_blocks": 44,
            "scheduler.max_num_batched_tokens": 16,
            "scheduler.async_scheduling": "false",
            "cache.enable_prefix_caching": "false",
        },
    ),
]


def prompts_of(max_model_len: int) -> list[list[int]]:
    return ALIKE if max_model_len > 64 else PROMPTS


def main(job: str) -> None:
    import triton_patches  # noqa: F401

    from minivllm import LLM, SamplingParams
    from minivllm.backends import triton

    attend, rows = triton.attend_cascade, []

    def noted(q: torch.Tensor, *args: Any) -> Any:
        rows.append(len(q))
        return attend(q, *args)

    triton.attend_cascade, triton._CASCADE_BYTES = noted, 1  # type: ignore[attr-defined]
    given = json.loads(job)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    answers = []
    for folder, overrides in given:
        with LLM(folder, attention="triton", device="cpu", dtype="float32", overrides=overrides) as llm:
            outputs = llm.generate(prompts_of(llm.engine.max_model_len), params, use_tqdm=False)
            about = llm.engine.describe()
            answers.append({"tokens": [o.outputs[0].token_ids for o in outputs], "attention": about["attention"],
                            "cached": llm.engine.stats.cached_tokens, "together": max(rows, default=0)})  # fmt: skip
            rows.clear()
    print(json.dumps(answers))


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's interpreter comes with Triton")
def test_greedy_tokens_equal_transformers_with_the_triton_backend(tiny_checkpoint: Callable[..., Path]) -> None:
    pytest.importorskip("triton")
    folders = [tiny_checkpoint(**CHECKPOINTS[name]) for name, _ in CASES]
    common = {"scheduler.max_num_seqs": 8, "max_model_len": 64}
    job = [
        (str(folder), [f"{key}={value}" for key, value in (common | case).items()])
        for folder, (_, case) in zip(folders, CASES, strict=True)
    ]
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(job)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    for folder, (name, case), answer in zip(folders, CASES, answers, strict=True):
        prompts = prompts_of(case.get("max_model_len", 64))
        assert answer["tokens"] == [reference_tokens(folder, p, MAX_TOKENS) for p in prompts], name
        assert answer["together"] == (5 if prompts is ALIKE else 0)
        assert "triton" in answer["attention"]
        assert (answer["cached"] > 0) == (case.get("cache.enable_prefix_caching") != "false")


if __name__ == "__main__":
    main(sys.argv[1])
