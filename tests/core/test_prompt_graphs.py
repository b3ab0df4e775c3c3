"""Which steps with prompts are replayed as a graph, and what a replay gives: on the host, with a stand-in for the
graphs. On a GPU: ``tests/gpu``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import save_adapter, small_steps, stand_in_for_prompt_graphs, step_batch

from minivllm import LLM, SamplingParams
from minivllm.core import prompt_graphs
from minivllm.core.batch import Batch
from minivllm.core.landing import PendingStep, StepApart
from minivllm.core.model_runner import ModelRunner
from minivllm.core.parallel import TensorParallel
from minivllm.core.prompt_graphs import GraphInput, PromptGraphs, prompt_sizes
from minivllm.errors import MinivllmError
from minivllm.layers.decoder_layer import _all_tokens
from minivllm.lora.request import LoRARequest

VOCAB = 1000
NO_WORDS: Any = SimpleNamespace(  # a backend that wants none
    prompt_words=lambda *lens: np.empty(0, dtype=np.int32), spec=SimpleNamespace(num_layers=28)
)
Replayed = tuple[int, int, str]  # a graph's tokens, rows of its result, and for which steps it is


@pytest.fixture
def graphs() -> PromptGraphs:
    made = object.__new__(PromptGraphs)  # what chooses, without a runner
    made.sizes, made.full, made.most_padding, made.apart = prompt_sizes(1024, 1024, 1600), 1600, 300, True
    made.runner = SimpleNamespace(attention=SimpleNamespace(most_captured_context=None))  # type: ignore[assignment]
    made.adapted_sizes = []
    return made


def test_sizes_double_and_are_then_equally_far_apart_up_to_the_most_and_a_full_step() -> None:
    assert prompt_sizes(1024, 8192) == [32, 64, 128, 256, 512, 1024]
    assert prompt_sizes(700, 128) == [32, 64, 128, 256, 384, 512, 640]
    assert prompt_sizes(300, 256, 8000) == [32, 64, 128, 256, 8000]
    assert prompt_sizes(128, 32, 100) == [32, 64, 96, 100]
    assert prompt_sizes(31, 32) == []
    assert prompt_sizes(300, 128, drafts=True) == [8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize(
    ("decodes", "prompts", "size"),
    [
        ([], [1], 32),
        ([], [32], 32),
        ([], [33], 64),
        ([10, 20], [100, 26], 128),
        ([10, 20], [100, 27], 256),
        ([], [1024], 1024),
        ([], [1299], None),  # too far from the full step
        ([], [1300], 1600),
        ([10, 20], [1000, 598], 1600),
        ([], [1601], None),  # larger than any
        ([], [600], None),  # too much padding
        ([10] * 33, [40], None),  # too many decodes for the kernel of prompts
        ([5000], [40], None),  # and too long ones
    ],
)
def test_a_step_takes_the_smallest_graph_that_holds_it_or_none(
    graphs: PromptGraphs, decodes: list[int], prompts: list[int], size: int | None
) -> None:
    assert graphs.size_for(step_batch(decodes, prompts)) == size


def test_steps_with_adapters_have_sizes_of_their_own(graphs: PromptGraphs) -> None:
    graphs.adapted_sizes, graphs.most_adapted_padding, graphs._graphs = [32, 2048], 1000, {}
    for adapted, tokens, key in (
        (False, 33, (64, "any")),
        (True, 32, (32, "adapted")),
        (True, 1047, None),
        (True, 1048, (2048, "adapted")),
        (True, 2049, None),
        (False, 1700, None),
        (True, 1700, (2048, "adapted")),
    ):
        graphs.runner.has_adapters = lambda batch, adapted=adapted: adapted  # type: ignore[method-assign, misc]
        assert graphs.key_for(step_batch([], [tokens])) == key


def test_prompts_of_long_contexts_are_no_graphs_if_the_backend_says_so(graphs: PromptGraphs) -> None:
    graphs.runner.attention.most_captured_context = 100
    few, many = [10], [10] * 33
    for decodes in (few, many):
        step = step_batch(decodes, [40, 30])
        assert graphs.size_for(step) == (None if decodes is many else 128)
        assert graphs.takes_apart(step) == (decodes is many)
        step.num_computed[-1] = 71  # and 30 new ones
        assert graphs.size_for(step) is None and not graphs.takes_apart(step)
    assert graphs.size_for(step_batch([3000], [40])) == 64, "decodes do not count"


@pytest.mark.parametrize(
    ("decodes", "prompts", "apart"),
    [
        ([10] * 33, [40], True),
        ([5000], [40], True),
        ([10] * 33, [1590], True),
        ([10] * 32, [40], False),  # one graph holds them
        ([10] * 33, [600], False),  # no graph for so many tokens
        ([], [600], False),
    ],
)
def test_many_decodes_and_prompts_go_apart_where_each_has_a_graph(
    graphs: PromptGraphs, decodes: list[int], prompts: list[int], apart: bool
) -> None:
    step = step_batch(decodes, prompts)
    assert graphs.takes_apart(step) == apart
    graphs.apart = False  # of a model whose weights take long to read
    assert not graphs.takes_apart(step)


def test_the_parts_of_a_batch_make_it_up() -> None:
    step = step_batch([10, 20, 30], [4, 5])
    blocks, ids = np.arange(2, dtype=np.int32), np.arange(9, dtype=np.int32)
    step = replace(step, token_ids=ids, block_slots=blocks, block_ids=blocks, admitted_slots=blocks, known_ids=ids)
    decodes, prompts = step.apart()
    assert (decodes.num_decodes, prompts.num_decodes) == (3, 0)
    assert (decodes.num_tokens, prompts.num_tokens) == (3, 9)
    for name in (field.name for field in fields(step)):
        whole, first, second = (getattr(part, name) for part in (step, decodes, prompts))
        if isinstance(whole, np.ndarray):
            assert np.concatenate([first, second]).tolist() == whole.tolist(), name
    assert len(decodes.block_slots) == len(prompts.admitted_slots) == 2 and len(prompts.known_ids) == 9


def made_for(
    weights: dict[str, tuple[int, ...]], others: tuple[int, int], ranks: int = 1, adapters: Any = None
) -> PromptGraphs:
    """Of a rank with weights of these shapes, where another has so many for products, and so many bytes."""
    tensors = [(name, torch.nn.Parameter(torch.empty(shape, device="meta"))) for name, shape in weights.items()]
    runner = SimpleNamespace(
        device=torch.device("cpu"), num_slots=4, block_table=torch.empty(5, 512), block_size=16,
        model=SimpleNamespace(named_parameters=lambda: tensors), attention=NO_WORDS, adapters=adapters,
    )  # fmt: skip
    their = iter(others)
    tp = SimpleNamespace(size=ranks, minimum=lambda number, device: min(number, -next(their)))
    return PromptGraphs(runner, 8192, tp)  # type: ignore[arg-type]


@pytest.mark.parametrize("others", [10**7, 10**10, 10**12])
def test_ranks_of_different_weights_take_the_same_graphs(others: int) -> None:
    def sizes(weights: int, other: int) -> tuple[list[int], int, int, bool]:
        graphs = made_for({"layer.weight": (weights, 1)}, (other, 4 * other))
        return graphs.sizes, graphs.full, graphs.most_padding, graphs.apart

    few = 10**9
    assert sizes(few, others) == sizes(others, few)
    assert sizes(few, few) != sizes(10**10, 10**10) != sizes(10**12, 10**12)


@pytest.mark.parametrize(
    ("weights", "most"),
    [
        (10**8, (8192, 8192)),  # captured anyhow
        (3 * 10**9, (1664, 4608)),
        (10**10, (512, 1408)),
        (10**11, (32, 128)),
    ],
)
def test_several_ranks_launch_fewer_steps_kernel_by_kernel(weights: int, most: tuple[int, int]) -> None:
    for ranks, tokens in zip((1, 4), most, strict=True):
        made = made_for({"layer.weight": (weights, 1)}, (0, 0), ranks)
        assert made.sizes[-1] == tokens
        if ranks > 1:
            assert all(made._smallest(each, step_batch([], [1])) for each in range(1, tokens + 1)), "not launched"


def test_sizes_with_adapters() -> None:
    """Of one rank they are further apart, and reach further; ranks capture all they do without."""
    for weights, sizes in (
        (44 * 10**7, [32, 64, 128, 256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192]),
        (13 * 10**9, [32, 64, 128, 256, 384, 512, 640, 768]),
    ):
        one = made_for({"layer.weight": (weights, 1)}, (0, 0), adapters=object())
        assert one.adapted_sizes == sizes and one.sizes != sizes
        assert one.positions.shape == (max(sizes),)
        two = made_for({"layer.weight": (weights, 1)}, (0, 0), 2, adapters=object())
        assert two.adapted_sizes == two.sizes
        assert made_for({"layer.weight": (weights, 1)}, (0, 0)).adapted_sizes == []


@pytest.mark.parametrize(("experts", "apart"), [(0, True), (40, True), (80, False)])
def test_steps_go_apart_where_all_weights_are_read_quickly(experts: int, apart: bool) -> None:
    weights = {"embed_tokens.weight": (10**10, 1), "layer.weight": (10**8, 1), "experts": (experts, 5000, 5000)}
    graphs = made_for(weights, (0, 0))
    assert graphs.apart == apart  # 0.4 GB and 0.1 an expert
    assert graphs.sizes == made_for(weights | {"experts": (0, 1, 1)}, (0, 0)).sizes


def test_no_sizes_no_graph(graphs: PromptGraphs) -> None:
    graphs.sizes = []
    assert graphs.size_for(step_batch([], [3])) is None


# --------------------------------------------------------------------------- replays


class Recorded:
    """Replays by running the step."""

    def __init__(self, run: Callable[[], torch.Tensor], result: torch.Tensor, log: list[Replayed]) -> None:
        self.run, self.result, self.log = run, result, log

    def replay(self) -> None:
        (size, kind), rows = self.run.args[0], len(self.result)  # type: ignore[attr-defined]
        self.log.append((size, rows, kind))
        self.result.copy_(self.run())


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with small_steps(folder, 512, 4) as llm:
        yield llm


@pytest.fixture
def log(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    said: list[Replayed] = []
    attention = llm.engine.executor._worker.runner.attention  # type: ignore[attr-defined]
    stand_in_for_prompt_graphs(monkeypatch, attention, lambda run, result: Recorded(run, result, said))
    return said


@pytest.mark.parametrize(
    ("slots", "picks"), [(4, [512, 768, 1024]), (256, [512, 768, 1024]), (257, [768, 1024]), (600, [])]
)
def test_graphs_pick_last_tokens_where_that_leaves_work_out(slots: int, picks: list[int]) -> None:
    layer = torch.nn.Parameter(torch.empty(10**9, 1, device="meta"))
    runner = SimpleNamespace(
        device=torch.device("cpu"), num_slots=slots, block_table=torch.empty(slots + 1, 512), block_size=16,
        model=SimpleNamespace(named_parameters=lambda: [("layer.weight", layer)]), attention=NO_WORDS, adapters=None,
    )  # fmt: skip
    graphs = PromptGraphs(runner, 1024, TensorParallel())  # type: ignore[arg-type]
    assert graphs.sizes == [32, 64, 128, 256, 512, 768, 1024]
    asked = {size: plan.last_tokens for (size, kind), plan in graphs._plans.items() if kind == "any"}
    assert [size for size, last in asked.items() if last is not None] == picks
    assert all(last is None or len(last) == slots for last in asked.values())


@pytest.mark.parametrize(
    ("weights", "most", "launched"),
    [
        (10**9, 8192, [*((n, False) for n in (32, 768, *range(1024, 4865, 256), 8192)), (8192, True)]),
        (10**9, 512, [(32, False), (512, False), (512, True)]),
        (10**10, 8192, [(32, False), (512, False)]),  # too large a model for a full step
        (10**11, 60, [(32, False), (60, False), (60, True)]),
    ],
)
def test_ahead_steps_are_run_that_take_every_kernel(weights: int, most: int, launched: list[tuple[int, bool]]) -> None:
    said: list[tuple[int, bool]] = []
    attention = SimpleNamespace(**vars(NO_WORDS), batch=None, plan=lambda plan: None, plans_on_host=False)

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, backend: Any) -> None:
        assert len(input_ids) == len(positions) == len(backend.batch.slot_mapping) == backend.batch.graph_size
        assert int(backend.batch.host_query_lens.sum()) == len(input_ids)
        said.append((len(input_ids), backend.batch.graph_whole))

    layer = torch.nn.Parameter(torch.empty(weights, 1, device="meta"))
    runner = SimpleNamespace(
        device=torch.device("cpu"), num_slots=4, block_table=torch.zeros(5, 512, dtype=torch.int32), block_size=16,
        model=SimpleNamespace(named_parameters=lambda: [("layer.weight", layer)], forward=forward), attention=attention,
        adapters=None,
    )  # fmt: skip
    for name in ("hand_over", "with_adapters"):
        setattr(runner, name, partial(getattr(ModelRunner, name), runner))
    PromptGraphs(runner, most, TensorParallel()).launch_all_kinds()  # type: ignore[arg-type]
    assert said == launched


@pytest.mark.parametrize("picks", [True, False])
def test_replays_give_what_eager_steps_give(llm: LLM, log: list[Replayed], picks: bool) -> None:
    """Full and padded graphs, of all rows and of the last ones; and of a model that returns all though few are asked
    for."""
    rng = np.random.default_rng(0)
    runner = llm.engine.executor._worker.runner  # type: ignore[attr-defined]
    # a step of 512 tokens, with a chunk that does not sample; decodes beside the rest; few rows after many
    lens = [300, 150, 40, 60, 290, 20]
    prompts = [rng.integers(5, 1000, n).tolist() for n in lens]
    params = [
        SamplingParams(temperature=0, max_tokens=3 + i, ignore_eos=True, logprobs=1 if i % 2 else None)
        for i in range(len(prompts))
    ]

    def say() -> list[Any]:
        outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        return [(o.token_ids, [next(iter(at.values())).logprob for at in o.logprobs or []]) for o in outputs]

    if not picks:
        runner.model.model.layers[-1].self_attn._pick = _all_tokens
    eager = say()
    graphs = PromptGraphs(runner, 512, TensorParallel())
    graphs.capture(llm.engine.num_blocks, VOCAB)
    runner.prompt_graphs = graphs
    del log[:]
    replayed = say()
    assert [tokens for tokens, _ in replayed] == [tokens for tokens, _ in eager]
    for (_, got), (_, expected) in zip(replayed, eager, strict=True):
        assert got == pytest.approx(expected, abs=1e-4)
    assert {rows for size, rows, _ in log if size == 512} == {4 if picks else 512}
    smaller = [(size, rows) for size, rows, _ in log if size < 512]
    assert smaller and all(size == rows for size, rows in smaller)


def test_steps_with_lora_adapters_are_graphs_of_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep all hidden states; prompts with and without one, chunks, decodes beside them, and cached prefixes."""
    for number in (1, 2):
        save_adapter(tmp_path / str(number), folder, ["q_proj", "o_proj", "up_proj", "down_proj"], seed=number)
    adapters = [None, *(LoRARequest(str(n), n, str(tmp_path / str(n))) for n in (1, 2))]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 1000, n).tolist() for n in (300, 150, 40, 60, 290, 20)]
    params = [SamplingParams(temperature=0, max_tokens=3 + i, ignore_eos=True) for i in range(len(prompts))]
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_num_batched_tokens": 512}
    with LLM(
        str(folder), device="cpu", attention="torch", dtype="float32", max_num_seqs=4, enable_prefix_caching=False,
        **options,
    ) as llm:  # fmt: skip
        runner = llm.engine.executor._worker.runner  # type: ignore[attr-defined]
        log: list[Replayed] = []
        stand_in_for_prompt_graphs(monkeypatch, runner.attention, lambda run, result: Recorded(run, result, log))

        def say(first: int) -> list[list[int]]:
            its = [adapters[(first + i) % 3] for i in range(len(prompts))]
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=its)
            return [list(output.outputs[0].token_ids) for output in outputs]

        eager = [say(first) for first in range(3)]
        assert eager[0] != eager[1] != eager[2]
        llm.reset_prefix_cache()
        graphs = PromptGraphs(runner, 512, TensorParallel())
        graphs.capture(llm.engine.num_blocks, VOCAB)
        runner.prompt_graphs = graphs
        assert {size for size, kind in graphs._graphs if kind == "adapted"} == set(graphs.sizes)
        del log[:]
        assert [say(first) for first in (0, 1, 2, 2, 1)] == [*eager, eager[2], eager[1]]
        assert log and {rows for size, rows, _ in log if size == 512} == {512}
        del log[:]
        llm.generate(prompts, params, use_tqdm=False)
        assert {rows for size, rows, _ in log if size == 512} == {4}, "without adapters, as ever"


def test_steps_of_few_sequences_are_graphs_of_their_own(
    llm: LLM, log: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row is the padding's; a prompt that starts anew, chunks behind a context, and decodes beside both."""
    monkeypatch.setattr(prompt_graphs, "_FEW_ROWS", 3)
    monkeypatch.setattr(prompt_graphs, "_FEW_TOKENS", 256)
    rng = np.random.default_rng(0)
    runner = llm.engine.executor._worker.runner  # type: ignore[attr-defined]
    prompts = [rng.integers(5, 1000, n).tolist() for n in (40, 600, 100, 30, 30, 30)]
    params = [SamplingParams(temperature=0, max_tokens=4 + 2 * i, ignore_eos=True) for i in range(len(prompts))]

    def say() -> list[list[int]]:
        alone = llm.generate(prompts[:2], params[:2], use_tqdm=False)
        return [o.outputs[0].token_ids for o in (*alone, *llm.generate(prompts[2:], params[2:], use_tqdm=False))]

    eager = say()
    graphs = runner.prompt_graphs = PromptGraphs(runner, 512, TensorParallel())
    assert {key: len(plan.seq_lens) for key, plan in graphs._plans.items() if key[0] in (256, 512)} == {
        (256, "any"): 5, (256, "few"): 3, (512, "any"): 5, (512, "whole"): 5,
    }  # fmt: skip
    graphs.capture(llm.engine.num_blocks, VOCAB)
    replayed: list[tuple[int, str, int]] = []
    launch = PromptGraphs.launch

    def noted(
        self: PromptGraphs, key: tuple[int, str], given: GraphInput, decodes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = launch(self, key, given, decodes)
        replayed.append((key[0], log[-1][2], given.num_seqs))
        return found

    monkeypatch.setattr(PromptGraphs, "launch", noted)
    assert say() == eager
    assert {n for _, kind, n in replayed if kind == "few"} == {1, 2}
    assert all((kind == "few") == (size <= 256 and n < 3) for size, kind, n in replayed)
    assert any(kind == "any" and size <= 256 for size, kind, _ in replayed)


def test_a_backend_that_plans_on_the_host_finds_each_rows_blocks_there(
    llm: LLM, log: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the device has, while graphs are proven and in steps of chunks and decodes; padding has none."""
    rng = np.random.default_rng(0)
    runner = llm.engine.executor._worker.runner  # type: ignore[attr-defined]
    monkeypatch.setattr(runner.attention, "plans_on_host", True)
    rows: list[tuple[int, int]] = []
    hand_over = PromptGraphs._hand_over

    def hand_over_and_look(self: PromptGraphs, key: tuple[int, str], given: GraphInput) -> None:
        hand_over(self, key, given)
        plan, n = self._plans[key], int((given.slots < runner.num_slots).sum())
        for row, length in enumerate(plan.host_seq_lens[: n + 1]):
            used = -(-int(length) // runner.block_size)
            held = runner.block_table[int(given.slots[row]), :used]
            assert plan.host_block_tables[row, :used].tolist() == held.tolist()
        assert plan.host_block_tables[:n, 0].all() and not plan.host_block_tables[n:].any()
        rows.append((n, len(plan.host_block_tables)))

    monkeypatch.setattr(PromptGraphs, "_hand_over", hand_over_and_look)
    graphs = runner.prompt_graphs = PromptGraphs(runner, 512, TensorParallel())
    graphs.capture(llm.engine.num_blocks, VOCAB)
    assert not runner.host_tables.any()
    proven = len(rows)
    prompts = [rng.integers(5, 1000, n).tolist() for n in (300, 700, 40, 60, 290, 20)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert {n for n, _ in rows[proven:]} >= {1, 2, 3} and {total for _, total in rows} == {5}


def test_steps_apart_give_what_whole_ones_give(llm: LLM, log: list[Replayed], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, and log-probabilities of different numbers of the best on either side."""
    rng = np.random.default_rng(0)
    runner = llm.engine.executor._worker.runner  # type: ignore[attr-defined]
    prompts = [rng.integers(5, 1000, n).tolist() for n in (30, 15, 40, 60, 29, 20, 31)]
    params = [
        SamplingParams(temperature=0, max_tokens=3 + i, ignore_eos=True, logprobs=(None, 1, 3)[i % 3])
        for i in range(len(prompts))
    ]

    def say() -> list[Any]:
        return [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]

    expected = say()
    decodes: list[int] = []

    def launch(batch: Batch) -> PendingStep:
        decodes.append(len(batch.slots))
        return runner._launch_eager(batch)  # type: ignore[no-any-return]

    runner.graphs = SimpleNamespace(launch=launch, takes=lambda batch: True)
    runner.prompt_graphs = PromptGraphs(runner, 512, TensorParallel())
    runner.prompt_graphs.capture(llm.engine.num_blocks, VOCAB)
    monkeypatch.setattr(prompt_graphs, "_MAX_DECODES", 0)
    whole = ModelRunner.launch
    apart: list[tuple[int, int]] = []

    def noted(self: ModelRunner, batch: Batch) -> Any:
        step = whole(self, batch)
        if isinstance(step, StepApart):
            apart.append((batch.num_decodes, len(batch.slots)))
        return step

    monkeypatch.setattr(ModelRunner, "launch", noted)
    for ours, theirs in zip(say(), expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        for got, wanted in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert got.keys() == wanted.keys()
            for token in wanted:
                assert got[token].logprob == pytest.approx(wanted[token].logprob, abs=1e-4)
                assert got[token].rank == wanted[token].rank
    assert apart and all(0 < d < n for d, n in apart) and len(decodes) > len(apart)


# --------------------------------------------------------------------------- proofs


@pytest.fixture
def whole(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend with a way of its own for prompts that start in the step, and a model of which a full step is large."""
    attention, plan = runner.attention, runner.attention.plan

    def plan_and_say(plan_of: Any) -> None:
        plan(plan_of)
        attention.fresh_prompts = plan_of.whole_prompts

    monkeypatch.setattr(attention, "plan", plan_and_say)
    monkeypatch.setattr(attention, "prefill_fresh", lambda q, k, v, layer, out: attention.prefill(q, layer, out))
    flop = 2 * sum(p.numel() for name, p in runner.model.named_parameters() if p.dim() == 2 and "layers" in name)  # type: ignore[attr-defined]
    monkeypatch.setattr(prompt_graphs, "_LAYER_FLOP", flop * 100 / runner.attention.spec.num_layers)


@pytest.mark.parametrize("blocks", [1, 3, 7, 500])
def test_every_graph_is_replayed_when_all_are_captured_and_nothing_is_left_behind(
    runner: ModelRunner, log: list[Replayed], whole: None, blocks: int
) -> None:
    """Even if the cache holds far less than a step."""
    graphs = PromptGraphs(runner, 512, TensorParallel())
    graphs.capture(blocks, VOCAB)
    assert list(graphs._graphs) == [(512, "whole"), (512, "any"), (64, "any"), (32, "any")]
    assert [size for size, *_ in log] == [32, 64, 512, 512]
    graphs.verify(blocks, VOCAB)
    left = (runner.attention.kv_cache[:, :, 1:], runner.last_token, runner.num_computed, runner.block_table)
    assert not any(bool(t.any()) for t in (*left, graphs.block_tables)) and not runner.host_tables.any()


def test_proofs_are_full_steps_of_several_sequences_behind_contexts(runner: ModelRunner, whole: None) -> None:
    graphs = PromptGraphs(runner, 512, TensorParallel())
    blocks = 1 + np.arange(4 * 128, dtype=np.int32).reshape(4, 128)
    for (size, kind), told in {
        key: graphs._random_step(key, blocks, VOCAB, np.random.default_rng(0)) for key in graphs._plans
    }.items():
        new, computed = told.query_lens[:4], (told.seq_lens - told.query_lens)[:4]
        assert told.num_seqs == 4 and size - 3 < told.num_tokens == new.sum() <= size and new[0] == 1
        assert (computed == 0).all() if kind == "whole" else (computed > 0).all()
        assert (
            told.query_lens.sum() == size
            and (told.seq_lens[4:] == 1).all()
            and (told.slots[4:] == runner.num_slots).all()
        )


@pytest.mark.parametrize(
    ("key", "what"),
    [((32, "any"), "32 tokens of prompts"), ((512, "any"), "512 tokens of prompts"),
     ((512, "whole"), "512 tokens of prompts from their start")],
)  # fmt: skip
def test_a_graph_that_gives_something_else_is_noticed(
    runner: ModelRunner, log: list[Replayed], whole: None, key: tuple[int, str], what: str
) -> None:
    graphs = PromptGraphs(runner, 512, TensorParallel())
    graphs.capture(500, VOCAB)
    recorded: Any = graphs._graphs[key]
    run = recorded.run
    recorded.replay = lambda: recorded.result.copy_(run() * 1.05)
    with pytest.raises(MinivllmError, match=f"graph of {what} with attention=TorchBackend differs .* enforce_eager"):
        graphs.verify(500, VOCAB)


def test_a_graph_that_remembers_its_capture_is_noticed(runner: ModelRunner, log: list[Replayed]) -> None:
    graphs = PromptGraphs(runner, 512, TensorParallel())
    graphs.capture(500, VOCAB)
    recorded: Any = graphs._graphs[64, "any"]
    recorded.replay = lambda: None
    with torch.inference_mode():
        recorded.result.fill_(float("nan"))
    with pytest.raises(MinivllmError, match="graph of 64 tokens of prompts"):
        graphs.verify(500, VOCAB)
