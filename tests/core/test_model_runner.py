"""What a runner does beside steps: on the host, where no graph is captured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.core import sampler as sampler_module
from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import Sampler
from minivllm.core.model_runner import ModelRunner
from minivllm.core.parallel import TensorParallel
from minivllm.core.sampler import DefaultSampler

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


def runner_of(llm: LLM, sampler: Sampler | None = None, tp: TensorParallel | None = None) -> ModelRunner:
    """Another one, with this sampler instead, as one of these ranks."""
    inner = llm.engine.executor._worker.runner  # type: ignore[attr-defined]
    return ModelRunner(
        inner.model, inner.attention, sampler or inner.sampler, tp or inner.tp, num_slots=5, max_blocks=4,
        block_size=16, hidden_size=inner.hidden_size, device=inner.device,
    )  # fmt: skip


def test_what_a_sampler_may_do_beside_sampling_is_found_ahead(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(llm)
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(sampler_module, "logprobs", lambda logits, tokens, *_: found.append((len(logits), len(tokens))))
    monkeypatch.setattr(type(runner.sampler), "resample", lambda self, logits, slots, positions: found.append((0, 0)))
    runner.launch_all_refinements()
    assert [rows for rows in found if rows != (0, 0)] == [(1, 1), (16, 16)]
    assert found.count((0, 0)) == 2


def test_a_sampler_that_never_samples_again_is_not_asked_to(llm: LLM) -> None:
    class Greedy(Sampler):
        row = np.dtype([("none", "<i4")])

        def __init__(self) -> None:
            pass

        @classmethod
        def encode(cls, seq: Any, seed: int) -> Any: ...

        def prepare(self, *what: Any) -> None: ...

        def sample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return logits.argmax(-1)

    runner = runner_of(llm, Greedy())
    assert runner.captures_refine
    runner.launch_all_refinements()


def test_whose_refine_is_captured() -> None:
    """``refine_captured``, or ``resample``, stands for the ``refine`` that it was written beside, and for no other."""

    class Alone(DefaultSampler):
        def refine(self, *step: Any) -> Any: ...

    class Both(Alone):
        def refine(self, *step: Any) -> Any: ...

        def refine_captured(self, *step: Any) -> Any: ...

    class WithResample(Alone):  # what it inherits for a graph also finds log-probabilities, in its parent's way
        def refine(self, *step: Any) -> Any: ...

        def resample(self, *step: Any) -> Any: ...

    class OnlyResample(Sampler):
        def refine(self, *step: Any) -> Any: ...

        def resample(self, *step: Any) -> Any: ...

    kinds = (DefaultSampler, Both, OnlyResample, Alone, WithResample)
    made = [object.__new__(type("Whole", (kind,), dict.fromkeys(kind.__abstractmethods__))) for kind in kinds]
    assert [sampler.captures_refine() for sampler in made] == [True, True, True, False, False]


@pytest.mark.parametrize("kind", [None, "other"])
def test_tokens_that_are_chosen_again_are_rank_0s_on_all_ranks(llm: LLM, kind: str | None) -> None:
    given, others, logprobs = torch.tensor([1, 2]), torch.tensor([3, 4]), object()

    class Chooses(DefaultSampler):
        chosen = given

        def refine(self, *step: Any) -> Any:
            return self.chosen, logprobs

        def refine_captured(self, *step: Any) -> Any:
            assert step[-1] == kind
            return self.chosen, logprobs

    class Ranks(TensorParallel):
        def broadcast(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(10)

    sampler = object.__new__(Chooses)
    runner, none = runner_of(llm, sampler, Ranks(1, 2)), torch.empty(0)
    tokens, found = runner.refine(none, none, none, given, np.arange(2), kind)
    assert tokens is given and found is logprobs and tokens.tolist() == [1, 2]
    sampler.chosen = others
    tokens, found = runner.refine(none, none, none, given, np.arange(2), kind)
    assert tokens is others and found is logprobs and tokens.tolist() == [13, 14]
    assert runner_of(llm, sampler).refine(none, none, none, given, np.arange(2), kind)[0].tolist() == [13, 14]
