"""Which steps with prompts are replayed as a graph: judged on the host, without a GPU. Replays: ``tests/gpu``."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minivllm.core.batch import Batch
from minivllm.core.prompt_graphs import PromptGraphs, prompt_sizes


def batch(decodes: list[int], prompts: list[int]) -> Batch:
    """Decodes with contexts so long, and prompts of so many tokens."""
    none = np.empty(0, dtype=np.int32)
    n = len(decodes) + len(prompts)
    return Batch(
        step=0, slots=np.arange(n, dtype=np.int32), generations=np.zeros(n, dtype=np.int64),
        num_computed=np.array([*decodes, *[0] * len(prompts)], dtype=np.int32),
        num_new=np.array([*[1] * len(decodes), *prompts], dtype=np.int32), samples=np.ones(n, dtype=bool),
        num_decodes=len(decodes), token_ids=np.zeros(sum(prompts), dtype=np.int32), block_slots=none,
        block_indices=none, block_ids=none, admitted_slots=none, admitted_params=none,
    )  # fmt: skip


@pytest.fixture
def graphs() -> PromptGraphs:
    made = object.__new__(PromptGraphs)  # what chooses, without a runner
    made.sizes, made.full, made.waste = prompt_sizes(1024, 1600), 1600, 300
    return made


def test_sizes_are_powers_of_two_up_to_the_most_and_a_full_step() -> None:
    assert prompt_sizes(1024) == [32, 64, 128, 256, 512, 1024]
    assert prompt_sizes(300, 8000) == [32, 64, 128, 256, 8000]
    assert prompt_sizes(31) == []


@pytest.mark.parametrize(
    ("decodes", "prompts", "size"),
    [
        ([], [1], 32),
        ([], [32], 32),
        ([], [33], 64),
        ([10, 20], [100, 26], 128),
        ([10, 20], [100, 27], 256),
        ([], [1024], 1024),
        ([], [1025], None),  # too far from the full step
        ([], [1499], None),
        ([], [1500], 1600),
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
    assert graphs.size_for(batch(decodes, prompts)) == size


@pytest.mark.parametrize("others", [10**7, 10**10, 10**12])
def test_ranks_of_different_weights_take_the_same_graphs(others: int) -> None:
    def sizes(weights: int, other: int) -> tuple[list[int], int, int]:
        """Of a rank, where the other has so many weights."""
        layer = torch.nn.Parameter(torch.empty(weights, 1, device="meta"))
        runner = SimpleNamespace(
            device=torch.device("cpu"), num_slots=4, block_table=torch.empty(5, 512), block_size=16,
            model=SimpleNamespace(named_parameters=lambda: [("layer.weight", layer)]),
        )  # fmt: skip
        tp = SimpleNamespace(minimum=lambda number, device: min(number, -other))
        graphs = PromptGraphs(runner, 8192, tp)  # type: ignore[arg-type]
        return graphs.sizes, graphs.full, graphs.waste

    few = 10**9
    assert sizes(few, others) == sizes(others, few)
    assert sizes(few, few) != sizes(10**10, 10**10) != sizes(10**12, 10**12)


def test_no_sizes_no_graph(graphs: PromptGraphs) -> None:
    graphs.sizes = []
    assert graphs.size_for(batch([], [3])) is None
