"""The end of a step with a few prompts as a graph, with a stand-in for graphs: what it finds, and which steps take it.
On a GPU: ``tests/gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import small_steps, stand_in_for_prompt_graphs, step_batch
from recorded import Recorded

from minivllm import LLM, SamplingParams
from minivllm.core import prompt_graphs, sample_graphs
from minivllm.core.batch import Batch
from minivllm.core.cuda_graphs import DecodeGraphs
from minivllm.core.model_runner import ModelRunner
from minivllm.core.parallel import TensorParallel
from minivllm.core.prompt_graphs import PromptGraphs
from minivllm.core.sample_graphs import DRAFTED_ROWS, SampleGraphs
from minivllm.errors import MinivllmError
from minivllm.layers.decoder_layer import _all_tokens

Log = list[tuple[int, int, int]]  # of each replay its rows; the rows and the tokens of its step


def stand_in_for_graphs(monkeypatch: pytest.MonkeyPatch, hidden_size: int) -> None:
    def capture_graph(run: Any, pool: Any) -> tuple[Recorded, torch.Tensor]:
        result = torch.full((run.args[0],), -1)
        return Recorded(lambda: [run()], [result], lambda: None), result

    def hidden(decodes: DecodeGraphs, size: int) -> torch.Tensor:
        return torch.full((size, hidden_size), float("nan"))

    monkeypatch.setattr(sample_graphs, "capture_graph", capture_graph)
    monkeypatch.setattr(DecodeGraphs, "hidden", hidden)


@pytest.fixture
def graphs(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> SampleGraphs:
    stand_in_for_graphs(monkeypatch, runner.hidden_size)
    return SampleGraphs(runner, DecodeGraphs(runner, 10))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    said: Log = []
    launch = SampleGraphs.launch

    def logged(self: SampleGraphs, size: int, hidden: torch.Tensor, sent: torch.Tensor, batch: Batch) -> Any:
        said.append((size, len(batch.slots), batch.num_tokens))
        return launch(self, size, hidden, sent, batch)

    monkeypatch.setattr(SampleGraphs, "launch", logged)
    return said


def test_a_step_of_few_rows_takes_the_smallest_graph_unless_nobody_samples(graphs: SampleGraphs) -> None:
    assert graphs.sizes == [1, 2, 4, 8]
    for rows, size in ((1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, None)):
        assert graphs.size_for(step_batch([4] * (rows - 1), [30])) == size
    step = step_batch([], [30, 5])
    step.samples[:] = False
    assert graphs.size_for(step) is None


@pytest.mark.parametrize("picks", [True, False])
@pytest.mark.parametrize("wanted", [{}, {"logprobs": 2}, {"frequency_penalty": 0.7}], ids=["", "logprobs", "penalties"])
def test_replays_find_what_eager_steps_find(
    llm: LLM, runner: ModelRunner, graphs: SampleGraphs, log: Log, wanted: dict[str, Any], picks: bool
) -> None:
    """Of prompts, chunks that do not sample and decodes beside them, of all rows' hidden states and of the last ones;
    who asks for more than tokens has it."""
    rng = np.random.default_rng(0)
    lens = [5, 9, 700, 30, 100, 3, 12, 60, 290, 40, 14, 33]
    prompts = [rng.integers(5, 1000, n).tolist() for n in lens]
    params = [
        SamplingParams(
            temperature=0.7 * (i % 3 == 1), seed=i, max_tokens=2 + 3 * i, ignore_eos=True,
            **(wanted if i % 4 == 2 else {}),
        )
        for i in range(len(prompts))
    ]  # fmt: skip

    def say() -> list[Any]:
        outputs = [llm.generate(prompts[:3], params[:3], use_tqdm=False), llm.generate(prompts, params, use_tqdm=False)]
        return [
            (o.outputs[0].token_ids, [{t: lp.rank for t, lp in at.items()} for at in o.outputs[0].logprobs or []])
            for some in outputs
            for o in some
        ]

    if not picks:
        runner.model.model.layers[-1].self_attn._pick = _all_tokens  # type: ignore[attr-defined]
    eager = say()
    graphs.capture()
    runner.sample_graphs = graphs
    proofs = graphs.landing.replays
    assert say() == eager
    assert say() == eager
    assert log
    if not wanted:  # else most steps have one that asks for more
        assert {size for size, *_ in log} == {1, 2, 4, 8} and any(rows < size for size, rows, _ in log)
        assert any(tokens > 100 for *_, tokens in log) and any(tokens <= 9 for *_, tokens in log)
    assert graphs.landing.replays == int(graphs.landing.steps) == proofs + len(log)
    assert int(runner.num_computed[-1]) == 0, "of padding"


@pytest.mark.parametrize(("slots", "drafts"), [*((n, 0) for n in (1, 2, 3, 4, 6, 9)), (20, 5), (60, 5)])
def test_graphs_of_prompts_end_with_them_however_few_slots_there_are(
    folder: Path, slots: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are rounded up beyond the slots; what graphs of prompts have is as wide as the slots. Rows of drafts are
    more than the layers see."""
    replays: list[Any] = []

    def made(run: Any, result: torch.Tensor) -> Recorded:
        return Recorded(lambda: [run()], [result], lambda: replays.append(run.args[0]))

    model = "demo" if drafts else folder  # the demo says what it said before, which drafts take
    lookup = {"prompt_lookup_min": 1} if drafts else {}
    with small_steps(model, 300, slots, num_speculative_tokens=drafts, **lookup) as llm:
        runner: ModelRunner = llm.engine.executor._worker.runner  # type: ignore[attr-defined]
        prompts = [[7 + i] * n for i, n in enumerate((5, 40, 30, 100, 3, 260, 60, 7, 9))]
        params = [SamplingParams(temperature=0.7, seed=i, max_tokens=2 + i, ignore_eos=True) for i in range(9)]

        def say() -> list[list[int]]:
            return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

        eager = say()
        stand_in_for_graphs(monkeypatch, runner.hidden_size)
        stand_in_for_prompt_graphs(monkeypatch, runner.attention, made)
        prompts_graphs = PromptGraphs(runner, 300, TensorParallel())
        prompts_graphs.capture(llm.engine.num_blocks, 1000)
        samples = SampleGraphs(runner, DecodeGraphs(runner, slots), *([DRAFTED_ROWS] if drafts else []))
        samples.capture()
        launches: list[int] = []
        launch = samples.launch
        monkeypatch.setattr(samples, "launch", lambda size, *args: (launches.append(size), launch(size, *args))[1])
        runner.prompt_graphs, runner.sample_graphs = prompts_graphs, samples
        del replays[:]
        before = samples.landing.replays
        assert say() == eager
        assert replays and samples.landing.replays > before
        assert (llm.engine.stats.accepted_tokens > 0) == (drafts > 0)
        assert (max(launches) > 8) == (drafts > 0)


def test_a_draft_beside_prompts_whose_graph_keeps_last_tokens_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_steps(folder, 300, 16, num_speculative_tokens=5, prompt_lookup_min=1) as llm:
        runner: ModelRunner = llm.engine.executor._worker.runner  # type: ignore[attr-defined]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, allowed_token_ids=[70, 71])
        replays: list[tuple[int, bool]] = []

        def made(run: Any, result: torch.Tensor) -> Recorded:
            return Recorded(lambda: [run()], [result], lambda: replays.append((run.args[0][0], len(result) < 300)))

        def say() -> list[list[int]]:
            said: dict[str, list[int]] = {}
            for i in range(30):
                if i % 6 == 0:
                    llm.engine.add_request(f"{i}", [7 + i] * (210 if i else 9), params)
                said |= {o.request_id: o.outputs[0].token_ids for o in llm.engine.step()}
            while llm.engine.has_unfinished_requests():
                said |= {o.request_id: o.outputs[0].token_ids for o in llm.engine.step()}
            return list(said.values())

        eager = say()
        stand_in_for_prompt_graphs(monkeypatch, runner.attention, made)
        monkeypatch.setattr(prompt_graphs, "prompt_sizes", lambda *_, **__: [32, 64, 128, 300])
        graphs = PromptGraphs(runner, 300, TensorParallel())
        graphs.capture(llm.engine.num_blocks, 1000)
        runner.prompt_graphs = graphs
        asked: list[int] = []
        key_for = graphs.key_for
        monkeypatch.setattr(graphs, "key_for", lambda batch: (asked.append(batch.step), key_for(batch))[1])
        assert say() == eager
        assert len(set(asked)) < len(asked), "no step had its rows joined and taken apart again"
        assert (300, True) in replays


def test_chunks_that_do_not_sample_say_nothing(llm: LLM, runner: ModelRunner, graphs: SampleGraphs, log: Log) -> None:
    """The second prompt of a step is cut by its budget."""
    graphs.capture()
    results: list[list[int]] = []
    step = graphs.landing.step

    def noted(n: int, *args: Any) -> Any:
        handle = step(n, *args)
        results.append(handle.result().token_ids.tolist())
        return handle

    graphs.landing.step = noted  # type: ignore[method-assign]
    runner.sample_graphs = graphs
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate([[7] * 200, [9] * 200], params, use_tqdm=False)
    (first, cut), (last,) = results
    assert first >= 0 and cut == -1 and last >= 0


def test_a_graph_that_finds_other_tokens_is_noticed(graphs: SampleGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SampleGraphs._run
    monkeypatch.setattr(SampleGraphs, "_run", lambda self, size: run(self, size) + (size == 4))
    with pytest.raises(MinivllmError, match="samples finds other tokens"):
        graphs.capture()
