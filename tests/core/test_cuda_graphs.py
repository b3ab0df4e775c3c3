"""Capturing decode steps, with a stand-in for the graphs: what comes in which order, and what is compared. On a GPU:
``tests/gpu``."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import plan_late, save_adapter
from recorded import Recorded

from minivllm import LLM, SamplingParams
from minivllm.core import cuda_graphs
from minivllm.core.batch import NO_INTS, AttentionBatch
from minivllm.core.cascade import CascadeLimits, CascadePlanner
from minivllm.core.cuda_graphs import DecodeGraphs, Kept, Key, adapter_sizes, cascade_sizes, graph_sizes
from minivllm.core.landing import IN_FLIGHT, Layout, Packed
from minivllm.core.model_runner import ModelRunner
from minivllm.errors import MinivllmError
from minivllm.kernels.capture import only_loads
from minivllm.lora.request import LoRARequest

BLOCKS, VOCAB = 40, 1000
PENALTIES = {"frequency_penalty": 0.7, "repetition_penalty": 1.3}
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    """With the options that are the parameter, if there is one."""
    options = {"max_num_seqs": 11, "num_gpu_blocks_override": BLOCKS} | getattr(request, "param", {})
    with LLM(str(folder), device="cpu", attention="torch", dtype="float32", **options) as llm:
        yield llm


@pytest.fixture
def runner(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """With the one backend of a CPU, made to plan when the block tables are there: a captured one reads them late."""
    made: ModelRunner = llm.engine.executor._worker.runner  # type: ignore[attr-defined]
    plan_late(monkeypatch, made.attention, cuda_graphs)
    monkeypatch.setattr(made.attention, "plans_on_host", True)
    return made


@pytest.fixture
def log(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened to which size."""
    said: list[str] = []
    step, vocab = DecodeGraphs._step, len(runner.model.lm_head.weight)  # type: ignore[attr-defined]

    def capture_graph(run: partial[Any], pool: Any) -> tuple[Recorded, Any]:
        if isinstance(run.args[0], Kept):
            _, size, kind, _ = run.args
            words = torch.full((size * (2 + 2 * (kind.best > 0) + 2 * kind.best),), -1, dtype=torch.int32)
            packed = Packed(words, Layout(size, np.arange(size) if kind.best else NO_INTS, kind.best))
            line = f"refine {size} adjusts={kind.adjusts} best={kind.best}"
            return Recorded(run, packed, partial(said.append, line)), packed
        (key,) = run.args
        size, mark = key.rows, " with adapters" * key.adapted
        said.append(f"capture {size}{mark}")
        hidden, logits = (torch.full((size, n), float("nan")) for n in (runner.hidden_size, vocab))
        result = Kept(hidden, torch.full((size,), -1), logits if size <= 32 else None)
        return Recorded(run, result, partial(said.append, f"replay {size}{mark}")), result

    def logged(self: DecodeGraphs, size: int) -> Kept:
        said.append(f"{'load' if only_loads() else 'step'} {size}")
        return step(self, size)

    monkeypatch.setattr(cuda_graphs, "capture_graph", capture_graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(DecodeGraphs, "_step", logged)
    return said


def test_each_size_runs_before_its_capture_and_replays_when_all_are_captured(
    runner: ModelRunner, log: list[str]
) -> None:
    DecodeGraphs(runner, 11).capture(BLOCKS, VOCAB)
    sizes = [16, 8, 4, 2, 1]
    captured = [f"{what} {size}" for size in sizes for what in ("step", "capture")]
    replayed = [f"{what} {size}" for size in reversed(sizes) for what in ("replay", "step")]
    assert log == captured + replayed


@pytest.mark.parametrize("llm", [{"max_num_seqs": 41}], indirect=True)
def test_sizes_whose_kernels_others_have_are_only_loaded(runner: ModelRunner, log: list[str]) -> None:
    """And compared with the next of those: the same rows."""
    DecodeGraphs(runner, 41).capture(BLOCKS, VOCAB)
    sizes = [48, 40, 32, 24, 16, 8, 4, 2, 1]
    assert log[:18] == [f"{what} {size}" for size in sizes for what in ("load" if size == 32 else "step", "capture")]
    assert log[18::2] == [f"replay {size}" for size in reversed(sizes)]


@pytest.mark.parametrize("llm", [{"max_num_seqs": 41}], indirect=True)
def test_a_size_that_is_far_from_the_next_is_compared_with_itself(
    runner: ModelRunner, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other kernels may round otherwise, layer by layer, which is no fault of a capture."""
    step = DecodeGraphs._step

    def rounds(self: DecodeGraphs, size: int) -> Kept:
        kept = step(self, size)
        return kept._replace(hidden=kept.hidden * 1.5) if size == 40 else kept

    monkeypatch.setattr(DecodeGraphs, "_step", rounds)
    graphs = DecodeGraphs(runner, 41)
    graphs.capture(BLOCKS, VOCAB)
    assert "step 32" in log[18:] and log.count("replay 32") == 2
    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "parameters", lambda: [torch.zeros(1, dtype=torch.float8_e4m3fn)])
        log.clear()
        DecodeGraphs(runner, 41).capture(BLOCKS, VOCAB)
        assert log.count("replay 32") == 1, "float8 rounds more"
    recorded: Any = graphs._graphs[Key(32)]
    run = recorded.run
    recorded.run = lambda: Kept(*(x * 1.05 for x in run()))
    with pytest.raises(MinivllmError, match="graph of 32 rows"):
        graphs.verify(BLOCKS, VOCAB)


@pytest.mark.parametrize("llm", [{"max_model_len": 10}, {"max_model_len": 50}], indirect=True)
def test_proofs_stay_within_a_models_length(llm: LLM, runner: ModelRunner, log: list[str]) -> None:
    """Which need not be whole blocks: beyond it there are no angles to turn by."""
    DecodeGraphs(runner, 11).capture(BLOCKS, VOCAB)
    assert log.count("replay 16") == 1


def test_engines_beside_each_other_capture_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a stream."""
    inside, most = [0], [0]

    class Graph:
        def capture_begin(self, **_: Any) -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.01)

        def capture_end(self) -> None:
            inside[0] -= 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_graphs, "_capture_stream", lambda device: None)
    threads = [threading.Thread(target=cuda_graphs.capture_graph, args=(lambda: None, None)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_nothing_is_left_behind(runner: ModelRunner, log: list[str]) -> None:
    graphs = DecodeGraphs(runner, 11)
    graphs.capture(BLOCKS, VOCAB)
    graphs.verify(BLOCKS, VOCAB)
    left = (runner.attention.kv_cache[:, :, 1:], runner.last_token, runner.num_computed, runner.block_table)
    assert not any(bool(t.any()) for t in left) and not runner.host_tables.any()
    assert graphs.slots.tolist() == [graphs.padding] * 16


@pytest.mark.parametrize(
    "wanted",
    [{}, {"logprobs": 1}, PENALTIES, {"logprobs": 2, **PENALTIES}],
    ids=["landed", "logprobs", "penalties", "both"],
)
def test_replays_give_the_tokens_of_eager_steps(
    llm: LLM, runner: ModelRunner, log: list[str], wanted: dict[str, Any]
) -> None:
    """Of steps of all kinds: answers end at different lengths, and prompts that wait come in between. A second run
    finds the landing rows where the first has left them."""
    prompts = ["Once upon a time", "The sea was", "Hello", *["In a small village"] * 10]
    params = [SamplingParams(temperature=0, max_tokens=4 + 3 * i) for i in range(len(prompts))]
    params[2] = params[2].clone(**wanted)
    params[8] = params[8].clone(temperature=0.8, seed=5, **wanted)

    def say() -> list[Any]:
        outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        return [
            (out.token_ids, [{token: lp.rank for token, lp in at.items()} for at in out.logprobs or []])
            for out in outputs
        ]

    eager = say()
    for i, (tokens, asked) in enumerate(eager):
        assert len(asked) == (len(tokens) if "logprobs" in wanted and i in (2, 8) else 0)
    llm.reset_prefix_cache()
    graphs = DecodeGraphs(runner, 11)
    graphs.capture(BLOCKS, VOCAB)
    runner.graphs = graphs
    del log[:]
    assert say() == say() == eager
    assert {"replay 16", "replay 8", "replay 4", "replay 2", "replay 1"} <= set(log)
    refined = {line.split(" ", 2)[2] for line in log if line.startswith("refine")}
    kind = f"adjusts={'repetition_penalty' in wanted} best={wanted.get('logprobs', 0)}"
    assert refined == ({kind} if wanted else set())
    replays = len([line for line in log if line.startswith("replay")]) + 5
    assert graphs.landing.replays == int(graphs.landing.steps) == replays


@pytest.mark.parametrize("llm", [{"enable_lora": True, "max_loras": 2}], indirect=True)
def test_steps_with_lora_adapters_are_graphs_of_their_own(
    llm: LLM, runner: ModelRunner, log: list[str], folder: Path, tmp_path: Path
) -> None:
    """Slots of ended sequences go to others, which have other adapters, or none; and steps without any are as ever."""
    for number in (1, 2):
        save_adapter(tmp_path / str(number), folder, ["q_proj", "v_proj", "up_proj", "o_proj"], seed=number)
    adapters = [None, *(LoRARequest(str(n), n, str(tmp_path / str(n))) for n in (1, 2))]
    prompts = ["Once upon a time", "The sea was", "Hello", *["In a small village"] * 10]
    its = [adapters[i % 3] for i in range(len(prompts))]
    params = [SamplingParams(temperature=0, max_tokens=4 + 3 * i, ignore_eos=True) for i in range(len(prompts))]
    params[2] = params[2].clone(logprobs=1, **PENALTIES)

    def say(its: list[LoRARequest | None]) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=its)
        return [list(output.outputs[0].token_ids) for output in outputs]

    plain, eager, other = say([None] * 13), say(its), say(its[::-1])
    assert plain != eager != other
    llm.reset_prefix_cache()
    graphs = DecodeGraphs(runner, 11)
    graphs.capture(BLOCKS, VOCAB)
    captured = [line for line in log if line.startswith("capture")]
    sizes = (16, 8, 4, 2, 1)
    assert captured == [*(f"capture {n} with adapters" for n in sizes), *(f"capture {n}" for n in sizes)]
    runner.graphs = graphs
    for given, expected in ((its, eager), ([None] * 13, plain), (its[::-1], other), (its, eager)):
        del log[:]
        assert say(given) == expected
        marks = {"with adapters" in line for line in log if line.startswith("replay")}
        assert (True in marks) == any(given)
    assert adapter_sizes(graph_sizes(400)) == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 400]


def test_steps_of_more_than_graphs_take_are_launched_eagerly(llm: LLM, runner: ModelRunner, log: list[str]) -> None:
    # Each less than a block: capturing writes over what is cached.
    prompts = ["Once upon", "The sea was", "Hello", *["In a village"] * 8]
    params = [SamplingParams(temperature=0, max_tokens=4 + 3 * i, ignore_eos=True) for i in range(len(prompts))]

    def say() -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    eager = say()
    runner.graphs = DecodeGraphs(runner, 3)
    runner.graphs.capture(BLOCKS, VOCAB)
    del log[:]
    assert say() == eager
    replayed = {line for line in log if line.startswith("replay")}
    assert replayed == {"replay 8", "replay 2", "replay 1"} and runner.graphs.sizes == [1, 2, 8]


def test_steps_of_rows_that_share_prefixes_are_graphs_of_their_own(
    llm: LLM, runner: ModelRunner, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured behind the first of a size; few rows are padded, for which all kernels are there."""
    long = list(range(100, 200))
    prompts = [*([*long, i] for i in range(8)), [5], [6, 7]]
    params = [SamplingParams(temperature=0, max_tokens=5 + 2 * i, ignore_eos=True) for i in range(len(prompts))]
    params[3].frequency_penalty = 0.7

    def say() -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    eager = say()
    llm.reset_prefix_cache()
    planner = CascadePlanner(runner.host_tables, runner.block_size, CascadeLimits(4, 16, 6, 12, 12, 100, 300))
    runner.cascade = planner
    graphs = DecodeGraphs(runner, 11)
    graphs.capture(BLOCKS, VOCAB)
    runner.graphs = graphs
    seen: list[int | str] = []
    plan_attention = runner.attention.plan

    def checked(batch: AttentionBatch) -> None:
        if batch.cascade is not None and graphs.slots[0] != graphs.padding:
            plan = planner._plan
            assert plan is not None and batch.cascade.order.shape == batch.seq_lens.shape
            flat = [t.flatten() for t in (batch.cascade.order, batch.cascade.skips, batch.cascade.parts)]
            rows = len(batch.seq_lens)
            if not torch.equal(torch.cat(flat), torch.from_numpy(plan.padded(rows, 12)[: 4 * rows])):
                seen.append("stale")
            seen.append(int((batch.cascade.items[:, 1] > 0).sum()))
        plan_attention(batch)

    monkeypatch.setattr(runner.attention, "plan", checked)
    del log[:]
    assert say() == eager
    assert set(graphs._graphs) == {*map(Key, (1, 2, 4, 8, 16)), Key(16, False)}
    assert log.count("capture 16") == 1 and "replay 16" in log and set(seen) == {12}
    assert "replay 8" in log and "replay 4" in log, "as rows end, until what they share is too little"
    assert "refine 16 adjusts=True best=0" in log
    assert graphs.landing.replays == int(graphs.landing.steps)


def test_larger_steps_are_further_apart() -> None:
    assert graph_sizes(512)[-17:] == list(range(256, 513, 16)) and len(graph_sizes(512)) == 51
    assert (graph_sizes(1), graph_sizes(9), graph_sizes(257)[-2:]) == ([1, 8], [1, 2, 4, 8, 16], [256, 272])


def test_shared_prefixes_take_few_graphs() -> None:
    assert cascade_sizes(graph_sizes(256)) == [16, 32, 64, 128, 192, 256]
    assert cascade_sizes(graph_sizes(100)) == [16, 32, 64, 104]
    assert cascade_sizes(graph_sizes(8)) == []


@pytest.mark.parametrize("wrong", [1, 8, 16])
def test_a_graph_that_gives_something_else_is_noticed(runner: ModelRunner, log: list[str], wrong: int) -> None:
    graphs = DecodeGraphs(runner, 11)
    graphs.capture(BLOCKS, VOCAB)
    recorded: Any = graphs._graphs[Key(wrong)]
    run = recorded.run
    recorded.run = lambda: Kept(*(x * 1.05 for x in run()))
    with pytest.raises(MinivllmError, match=f"graph of {wrong} rows with attention=TorchBackend differs"):
        graphs.verify(BLOCKS, VOCAB)


def test_a_step_whose_tokens_are_overwritten_is_noticed(llm: LLM, runner: ModelRunner, log: list[str]) -> None:
    """By as many later ones as there are rows to land in."""
    graphs = runner.graphs = DecodeGraphs(runner, 11)
    graphs.capture(BLOCKS, VOCAB)
    llm.engine.add_request("0", "Hello", GREEDY)
    llm.engine.step()
    replayed = llm.engine._under_way[0].handle
    with torch.inference_mode():
        for _ in range(IN_FLIGHT):
            graphs._replay(Key(1))
    with pytest.raises(MinivllmError, match="tokens of replay 6 are not on the host, those of replay 10 are"):
        replayed.result()


def test_replays_that_leave_no_tokens_on_the_host_are_noticed(runner: ModelRunner, log: list[str]) -> None:
    graphs = DecodeGraphs(runner, 11)
    graphs.landing.rows = np.zeros_like(graphs.landing.rows)
    with pytest.raises(MinivllmError, match="left tokens of replay 0 on the host, not those of replay 5"):
        graphs.capture(BLOCKS, VOCAB)


def test_a_graph_that_computes_nothing_is_noticed(runner: ModelRunner, log: list[str]) -> None:
    graphs = DecodeGraphs(runner, 11)
    graphs.capture(BLOCKS, VOCAB)
    recorded: Any = graphs._graphs[Key(4)]
    recorded.replay = lambda: None
    with torch.inference_mode():
        recorded.result.hidden.fill_(float("nan"))
    with pytest.raises(MinivllmError, match="graph of 4 rows"):
        graphs.verify(BLOCKS, VOCAB)
