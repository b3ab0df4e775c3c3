"""Ranks whose steps are graphs, with a stand-in for these: they choose alike, and say what one rank says. With graphs:
``tests/gpu/test_tensor_parallel.py``."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from zygote import Zygote

from minivllm import LLM, SamplingParams

REQUESTS = 40


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(0)
    found = []
    for i in range(REQUESTS):
        prompt = [rng.randrange(500) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(
            temperature=0.8 if i % 2 else 0, seed=i, max_tokens=40 - 4 * i // 5, ignore_eos=True,
            top_k=5 if i % 4 == 1 else 0, logprobs=2 if i % 7 == 0 else None,
            frequency_penalty=0.9 if i in (2, 38) else 0, logit_bias={7: 2.5, 9: -1.5} if i == 30 else None,
            bad_words=["the", "a"] if i == 12 else None,
        )  # fmt: skip
        found.append((prompt, params))
    return found


def say(folder: Path, tp: int, seqs: int) -> list[Any]:
    overrides = ["scheduler.max_num_batched_tokens=64"]
    prompts, params = zip(*requests(), strict=True)
    with LLM(str(folder), device="cpu", tp=tp, max_num_seqs=seqs, overrides=overrides) as llm:
        assert llm.engine.describe()["cuda_graphs"] == (tp > 1)
        outputs = [o.outputs[0] for o in llm.generate(list(prompts), list(params), use_tqdm=False)]
    return [(o.token_ids, [[lp.rank for lp in at.values()] for at in o.logprobs or []]) for o in outputs]


@pytest.mark.parametrize("seqs", [8, 24], ids=["whole logits", "shards"])
def test_ranks_take_the_same_graphs_and_say_what_one_says(
    tiny_checkpoint: Callable[..., Path], forked_ranks: Zygote, fake_plugin: Callable[..., Path], seqs: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = tiny_checkpoint("qwen3", vocab_size=2048)  # of which each rank has whole groups
    expected = say(folder, 1, seqs)
    fake_plugin("minivllm-recorded", "import recorded_ranks")
    monkeypatch.setenv("RECORDED", str(tmp_path / "graphs"))
    assert say(folder, 2, seqs) == expected
    first, second = (Path(f"{tmp_path}/graphs.{rank}").read_text() for rank in range(2))
    assert first == second
    captured, replayed = (
        {line.removeprefix(what) for line in first.splitlines() if line.startswith(what)}
        for what in ("capture ", "replay ")
    )
    assert {f"step {size}" for size in (1, 2, 4, 8)} <= replayed <= captured
    assert any(name.startswith("step (") for name in replayed), "decodes and prompts in one"
    refined = {name.split(" ", 2)[2] for name in replayed if name.startswith("refine")}
    kinds = [kind.strip("()").split(", ") for kind in refined]  # the fields of a Refinement
    assert ["False", "True"] in [kind[:2] for kind in kinds], "penalties"
    assert "True" in [kind[3] for kind in kinds], "biases"
    assert "True" in [kind[4] for kind in kinds], "masks"
    assert any(kind.startswith("(True, False") for kind in refined) == (seqs >= 16), "filters behind shards"
