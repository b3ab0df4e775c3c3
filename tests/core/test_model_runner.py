"""What a runner does beside steps: on the host, where no graph is captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minivllm import LLM, SamplingParams
from minivllm.core.batch import AttentionBatch

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", attention="torch", max_num_seqs=5, num_gpu_blocks_override=40) as llm:
        yield llm


@pytest.mark.parametrize(
    ("tokens", "decodes", "lens"),
    [(100, 0, [50, 50]), (100, 3, [1, 1, 1, 50, 50]), (100, 4, [1, 1, 1, 1, 64]), (7, 1, [1, 7])],
)
def test_a_dry_run_is_a_step_of_any_kind_and_keeps_nothing(
    llm: LLM, tokens: int, decodes: int, lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = llm.engine.executor._worker.runner  # type: ignore[attr-defined]
    expected = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    planned: list[tuple[int, list[int]]] = []
    plan = runner.attention.plan

    def noted(batch: AttentionBatch) -> None:
        planned.append((batch.num_decodes, batch.host_query_lens.tolist()))
        plan(batch)

    monkeypatch.setattr(runner.attention, "plan", noted)
    runner.dry_run(tokens, 64, decodes)
    assert planned == [(decodes, lens)]
    assert not runner.last_token.any() and not runner.num_computed.any()
    llm.reset_prefix_cache()
    assert llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
