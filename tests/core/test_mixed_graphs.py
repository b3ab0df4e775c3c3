"""Steps of decodes and prompts as one graph, with a stand-in for the graphs: which steps are, and what they give. On a
GPU: ``tests/gpu``."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import pass_over_empty_rows, plan_late, step_batch
from recorded import Recorded

from minivllm import LLM, SamplingParams
from minivllm.core import cuda_graphs, mixed_graphs
from minivllm.core.batch import AttentionBatch, Batch
from minivllm.core.cuda_graphs import DecodeGraphs, Kept
from minivllm.core.interfaces import StepHandle
from minivllm.core.mixed_graphs import MixedGraphs
from minivllm.core.model_runner import ModelRunner
from minivllm.kernels.capture import captured
from minivllm.layers.decoder_layer import _all_tokens

_Key = tuple[int, int, bool]
Log = list[tuple[str, _Key]]


@pytest.fixture
def runner(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """With the one backend of a CPU, made to plan when lengths and block tables are there: a captured one reads them
    late."""
    made: ModelRunner = llm.engine.executor._worker.runner  # type: ignore[attr-defined]
    plan_late(monkeypatch, made.attention, mixed_graphs, cuda_graphs, lengths=True)
    pass_over_empty_rows(monkeypatch)
    return made


@pytest.fixture
def log(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> Log:
    said: Log = []

    def capture_graph(run: Any, pool: Any) -> tuple[Recorded, Kept]:
        (key,) = run.args
        rows = key[0]
        result = Kept(torch.full((rows, runner.hidden_size), float("nan")), torch.full((rows,), -1), None)
        said.append(("capture", key))
        return Recorded(run, result, lambda: said.append(("replay", key))), result

    monkeypatch.setattr(mixed_graphs, "capture_graph", capture_graph)
    monkeypatch.setattr(mixed_graphs, "_ROWS", 4)
    monkeypatch.setattr(mixed_graphs, "_OFTEN", 1)
    monkeypatch.setattr(mixed_graphs, "_TOKENS", (16, 64, 128, 256, 512))
    return said


def take_graphs(runner: ModelRunner) -> MixedGraphs:
    """Only those of mixed steps."""
    decodes = DecodeGraphs(runner, 10)
    prompts = SimpleNamespace(flop=1, most_padding=1000, longest=1000, size_for=lambda batch: None)
    prompts.sees_too_much = lambda batch: False
    runner.mixed_graphs = MixedGraphs(runner, decodes, prompts, 300)  # type: ignore[arg-type]
    return runner.mixed_graphs


@pytest.mark.parametrize(("picks", "whole"), [(True, True), (False, False)])
@pytest.mark.parametrize(
    "wanted",
    [{}, {"logprobs": 2}, {"frequency_penalty": 0.7, "repetition_penalty": 1.3}],
    ids=["tokens", "logprobs", "penalties"],
)
def test_replays_give_what_eager_steps_give(
    llm: LLM,
    runner: ModelRunner,
    log: Log,
    wanted: dict[str, Any],
    picks: bool,
    whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of prompts that end in a step and chunks that do not, sampled and greedy, in graphs of several sizes. ``whole``:
    by a backend with a way of its own for prompts that start in the step."""
    rng = np.random.default_rng(0)
    lens = [5, 9, 7, 30, 100, 3, 12, 60, 290, 40, 14, 33, 21, 8, 400, 25, 2, 1, 17, 50]
    prompts = [rng.integers(5, 1000, n).tolist() for n in lens]
    params = [
        SamplingParams(
            temperature=0.7 * (i % 3 == 1), seed=i, max_tokens=5 + 7 * i % 30, ignore_eos=True,
            **(wanted if i % 4 == 2 else {}),
        )
        for i in range(len(prompts))
    ]  # fmt: skip

    def say() -> list[Any]:
        outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        return [(o.token_ids, [{t: lp.rank for t, lp in at.items()} for at in o.logprobs or []]) for o in outputs]

    if not picks:
        runner.model.model.layers[-1].self_attn._pick = _all_tokens  # type: ignore[attr-defined]
    if whole:
        attention, plan = runner.attention, runner.attention.plan

        def plan_and_say(batch: AttentionBatch) -> None:
            plan(batch)
            attention.fresh_prompts = batch.whole_prompts

        monkeypatch.setattr(attention, "plan", plan_and_say)
        monkeypatch.setattr(attention, "prefill_fresh", lambda q, k, v, layer, out: attention.prefill(q, layer, out))
    # As they come, chunks of long prompts stand beside many kinds of others.
    monkeypatch.setattr("minivllm.llm.longest_first", lambda engine, sizes, params: range(len(params)))
    eager = say()
    graphs = take_graphs(runner)
    assert say() == eager
    assert say() == eager
    taken = {key for _, key in log}
    assert {size for _, size, _ in taken} == {16, 64, 128, 256} and len({rows for rows, *_ in taken}) > 1
    assert {whole for *_, whole in taken} == ({True, False} if whole else {False})
    assert sorted(key for what, key in log if what == "capture") == sorted(taken) == sorted(graphs._graphs)
    replays = len([key for what, key in log if what == "replay"])
    assert graphs.landing.replays == int(graphs.landing.steps) == replays
    assert int(runner.num_computed[-1]) == 0, "of padding"


def test_a_backend_that_plans_on_the_host_finds_each_rows_blocks_there(
    llm: LLM, runner: ModelRunner, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the device gathers, and how long contexts are; padding has no blocks."""
    monkeypatch.setattr(runner.attention, "plans_on_host", True)
    graphs = take_graphs(runner)
    assert not graphs._reads_fresh  # it plans once to find out
    load, launch = MixedGraphs._load, MixedGraphs.launch
    told: list[list[list[int]]] = []  # of each step, each row's context and its blocks
    gathered: list[list[list[int]]] = []

    def rows(tables: np.ndarray, lens: np.ndarray) -> list[list[int]]:
        return [[n, *table[: -(-n // 16)].tolist()] for table, n in zip(tables, lens.tolist(), strict=True)]

    def load_and_note(self: MixedGraphs, key: _Key, batch: Batch) -> None:
        load(self, key, batch)
        told.append(rows(self._plan(key).host_block_tables, self._plan(key).host_seq_lens))

    def launch_and_note(self: MixedGraphs, key: _Key, batch: Batch) -> StepHandle:
        handle = launch(self, key, batch)
        gathered.append(rows(self._plan(key).block_tables.numpy(), self._plan(key).seq_lens.numpy()))
        return handle

    monkeypatch.setattr(MixedGraphs, "_load", load_and_note)
    monkeypatch.setattr(MixedGraphs, "launch", launch_and_note)
    prompts = [[i + 5] * (10 + 9 * i) for i in range(14)]
    params = [SamplingParams(temperature=0, max_tokens=4 + 4 * i, ignore_eos=True) for i in range(14)]
    llm.generate(prompts, params, use_tqdm=False)
    assert len(told) > 3 and told == gathered
    assert all([1, 0] in rows and max(map(len, rows)) > 3 for rows in told)


def test_a_capture_is_led_by_a_few_layers_and_followed_by_its_step(
    llm: LLM, runner: ModelRunner, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model's five layers those that differ, and nothing of it is told: neither a token nor a length."""
    attend, layers, before = runner.attention.attend, [], []
    forward = MixedGraphs._forward

    def noted(q: torch.Tensor, layer: Any, *args: Any) -> torch.Tensor:
        layers.append(layer.index)
        return attend(q, layer, *args)

    def forward_and_note(self: MixedGraphs, key: _Key) -> torch.Tensor:
        if key not in self._graphs:
            state = runner.last_token, runner.num_computed, self.landing.steps
            before[:] = [t.clone() for t in state]
            del layers[:]
            hidden = forward(self, key)
            assert layers == [0, 1, 2, 4] and all(map(torch.equal, before, state))
            return hidden
        return forward(self, key)

    monkeypatch.setattr(runner.attention, "attend", noted)
    monkeypatch.setattr(MixedGraphs, "_forward", forward_and_note)
    graphs = take_graphs(runner)
    prompts = [[i + 5] * 10 for i in range(14)]
    params = [SamplingParams(temperature=0, max_tokens=4 + 4 * i, ignore_eos=True) for i in range(14)]
    llm.generate(prompts, params, use_tqdm=False)
    assert graphs._graphs and log[1][0] == "replay" and before


def test_ahead_a_step_of_more_rows_than_decodes_have_is_run(
    runner: ModelRunner, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, forward, said = take_graphs(runner), runner.model.forward, []

    def told(input_ids: torch.Tensor, positions: torch.Tensor, attention: Any) -> torch.Tensor:
        batch = attention.batch
        said.append((len(input_ids), batch.num_decodes, batch.query_start.tolist(), captured(input_ids)))
        return forward(input_ids, positions, attention)

    monkeypatch.setattr(runner.model, "forward", told)
    graphs.launch_all_kinds()
    tops, tokens = graphs._rows[-1], graphs._tokens[0]
    starts = [*range(tops), *range(tops, tops + tokens + 1, tokens // 8)]
    assert said == [(tops + tokens, tops, starts, True)]


def test_steps_before_a_graph_is_wanted_often_are_as_before(
    llm: LLM, runner: ModelRunner, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_graphs, "_OFTEN", 3)
    graphs = take_graphs(runner)
    prompts = [[i + 5] * 10 for i in range(14)]
    params = [SamplingParams(temperature=0, max_tokens=4 + 4 * i, ignore_eos=True) for i in range(14)]
    llm.generate(prompts, params, use_tqdm=False)
    replays = {key: log.count(("replay", key)) for key in graphs._wanted}
    assert any(replays.values())
    for key, count in graphs._wanted.items():
        assert log.count(("capture", key)) == (count >= 3) and replays[key] == max(count - 2, 0)


def test_when_there_are_many_graphs_no_more_are_captured(graphs: MixedGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_graphs, "_OFTEN", 2)
    monkeypatch.setattr(mixed_graphs, "_MOST_GRAPHS", 1)
    graphs._graphs = {(64, 64, True): None}  # type: ignore[dict-item]
    assert graphs.key_for(step_batch([10] * 60, [30])) == (64, 64, True)
    assert [graphs.key_for(step_batch([10] * 60, [100])) for _ in range(3)] == [None] * 3


@pytest.fixture
def graphs() -> MixedGraphs:
    made = object.__new__(MixedGraphs)  # what chooses, without a runner
    made._rows, made._tokens, made._most, made._wanted = [64, 128, 200], [64, 128, 256, 512], 600, Counter()
    others: Any = SimpleNamespace(most_padding=150, size_for=lambda batch: 32 if batch.num_decodes < 20 else None)
    others.sees_too_much = lambda batch: False
    runner: Any = SimpleNamespace(cascade=None)
    made._prompts, made.runner, made._reads_fresh, made._graphs = others, runner, True, {}
    return made


@pytest.mark.parametrize(
    ("decodes", "prompts", "key"),
    [
        (60, [30], (64, 64)),
        (63, [64], (64, 64)),
        (64, [64], (128, 64)),  # a prompt that ends samples, too
        (60, [10, 20, 40], (64, 128)),
        (60, [10] * 5, (128, 64)),
        (193, [10] * 7, (200, 128)),
        (192, [10] * 8, None),  # more prompts than have rows
        (200, [300], None),  # more rows than there are
        (60, [513], None),  # more tokens than any
        (128, [500], None),  # a step that the host launches fast enough
        (40, [130], (64, 256)),
        (20, [140], None),  # 160 of padding
        (19, [30], None),  # for which the others have a graph
        (60, [], None),
    ],
)
def test_a_step_takes_the_smallest_graph_that_holds_it_or_none(
    graphs: MixedGraphs, decodes: int, prompts: list[int], key: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_graphs, "_OFTEN", 2)
    step = step_batch([10] * decodes, prompts)
    assert graphs.key_for(step) is None, "the first of a kind"
    expected = None if key is None else (*key, True)
    assert graphs.key_for(step) == expected == graphs.key_for(step)
    later = replace(step, num_computed=step.num_computed + 5)
    assert graphs.key_for(later) is None
    assert graphs.key_for(later) == (None if key is None else (*key, False))
    graphs._reads_fresh = False  # of a backend to which all prompts are alike
    assert graphs.key_for(step) == (None if key is None else (*key, False))


def test_rows_that_share_prefixes_are_read_once_instead(graphs: MixedGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_graphs, "_OFTEN", 1)
    shared: list[Any] = ["a plan"]
    graphs.runner.cascade = SimpleNamespace(plan=lambda batch: shared[0])  # type: ignore[assignment]
    assert graphs.key_for(step_batch([10] * 60, [30])) is None
    shared[0] = None
    assert graphs.key_for(step_batch([10] * 60, [30])) == (64, 64, True)


def test_graphs_read_no_more_than_they_are_told(runner: ModelRunner, log: Log) -> None:
    """Plans of one size are views of the same memory, and as long as the graph is."""
    graphs = take_graphs(runner)
    plan: AttentionBatch = graphs._plan((8, 64, False))
    assert plan.num_decodes == 8 and plan.num_seqs == 8 + mixed_graphs._PROMPTS and plan.graph_size == 72
    assert len(plan.query_start) == plan.num_seqs + 1 and len(plan.seq_lens) == len(plan.block_tables) == plan.num_seqs
    assert len(plan.slot_mapping) == 72 and plan.last_tokens is not None and len(plan.last_tokens) == 8
    assert graphs._plan((8, 64, False)) is plan
