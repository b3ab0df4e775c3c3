"""The suites find what they are for: components with one fault each fail, and what is set wrongly is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from minivllm.backends.torch import TorchBackend
from minivllm.core.batch import NO_INTS, Batch
from minivllm.core.interfaces import AttentionLayer, AttentionSpec
from minivllm.core.scheduler import MixedScheduler
from minivllm.core.sequence import Sequence
from minivllm.models.qwen3 import Qwen3ForCausalLM
from minivllm.testing import AttentionConformance, ModelConformance, SchedulerConformance
from minivllm.testing.checkpoints import random_checkpoint

ROOT = Path(__file__).parents[2]

# --------------------------------------------------------------------------- attention


class SeesTheFuture(TorchBackend):
    def plan(self, batch: Any) -> None:
        super().plan(replace(batch, seq_lens=batch.seq_lens + 1, host_seq_lens=batch.host_seq_lens + 1))


class ForgetsARow(TorchBackend):
    def decode(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        kept = out[-1].clone()
        super().decode(q, layer, out)
        out[-1] = kept


class WritesElsewhere(TorchBackend):
    def plan(self, batch: Any) -> None:
        super().plan(batch)
        self.kv_cache[0, :, 1] = 0


class IgnoresTheWindow(TorchBackend):
    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(replace(spec, sliding_window=None))


class Monosyllabic(TorchBackend):
    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        return ["no"] if super().unsupported(spec) else []


@pytest.mark.parametrize(
    ("backend", "test", "arguments"),
    [
        (SeesTheFuture, "test_every_kind_of_step", ("cpu", "chunks")),
        (SeesTheFuture, "test_every_kind_of_step", ("cpu", "decodes")),
        (ForgetsARow, "test_every_kind_of_step", ("cpu", "mixed")),
        (WritesElsewhere, "test_every_kind_of_step", ("cpu", "prompts")),
        (IgnoresTheWindow, "test_a_sliding_window", ("cpu", "mixed")),
        (Monosyllabic, "test_unsupported_gives_sentences", ("cpu",)),
    ],
)
def test_a_faulty_backend_fails(backend: type[TorchBackend], test: str, arguments: tuple[str, ...]) -> None:
    suite = type("Faulty", (AttentionConformance,), {"backend": backend})()
    with pytest.raises((AssertionError, IndexError)):
        getattr(suite, test)(*arguments)


def test_a_reason_where_it_must_run_fails() -> None:
    class Never(TorchBackend):
        @classmethod
        def unsupported(cls, spec: AttentionSpec) -> list[str]:
            return ["it never runs"]

    suite = type("Faulty", (AttentionConformance,), {"backend": Never, "must_run_on": ("cpu",)})()
    with pytest.raises(pytest.fail.Exception, match=r"it must run on cpu: .*it never runs"):
        suite.test_every_kind_of_step("cpu", "mixed")
    suite.must_run_on = ()
    with pytest.raises(pytest.skip.Exception, match="it never runs"):
        suite.test_every_kind_of_step("cpu", "mixed")


# --------------------------------------------------------------------------- schedulers


class Leaks(MixedScheduler):
    def finish(self, seq: Sequence) -> None:
        free, self.blocks.free = self.blocks.free, lambda slot: None  # type: ignore[method-assign]
        super().finish(seq)
        self.blocks.free = free  # type: ignore[method-assign]


class TakesAnything(MixedScheduler):
    def add(self, seq: Sequence) -> None:
        self._by_id[seq.request_id] = seq
        self.waiting.add(seq)


class OverBudget(MixedScheduler):
    def take_chunks(self, budget: int) -> list[tuple[int, int]]:
        return super().take_chunks(budget + 1)


class SmallestFirst(MixedScheduler):
    def place(self, seq: Sequence) -> tuple[int, ...]:
        return len(seq.known), seq.arrival


class PromptsAlwaysFirst(MixedScheduler):
    def schedule(self) -> Batch | None:
        chunks = self.take_chunks(self.options.max_num_batched_tokens)
        decodes = NO_INTS if chunks else self.take_decodes(self.options.max_num_batched_tokens)
        return self.write_batch(decodes, chunks)


class KeepsItsGenerations(MixedScheduler):
    def _release(self, seq: Sequence) -> None:
        super()._release(seq)
        self.generation[:] = 0


@pytest.mark.parametrize(
    ("scheduler", "test", "arguments"),
    [
        (Leaks, "test_an_abort_at_any_moment_frees_all", (2,)),
        (TakesAnything, "test_what_can_never_fit_is_refused_with_the_numbers", ()),
        (OverBudget, "test_prompts_go_in_chunks_of_the_budget", (3,)),
        (SmallestFirst, "test_a_large_request_is_not_starved_by_small_ones", ()),
        (PromptsAlwaysFirst, "test_a_running_request_is_not_starved_by_prompts", (3,)),
        (KeepsItsGenerations, "test_a_pool_for_one_serves_many", (2,)),
    ],
)
def test_a_faulty_scheduler_fails(scheduler: type[MixedScheduler], test: str, arguments: tuple[int, ...]) -> None:
    suite = type("Faulty", (SchedulerConformance,), {"scheduler": scheduler, "examples": 30})()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(suite, test)(*arguments)


# --------------------------------------------------------------------------- models


class WithoutNorms(Qwen3ForCausalLM):
    """It leaves out q's and k's norms, whose tensors it takes."""

    def __init__(self, config: Any, tp: Any) -> None:
        super().__init__(config, tp)
        for layer in self.model.layers:
            layer.self_attn.attention.q_norm = layer.self_attn.attention.k_norm = None


class ForgetsAScale(Qwen3ForCausalLM):
    """Of its logits, whose order stays."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().compute_logits(hidden)


class TakesWhatComes(Qwen3ForCausalLM):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name in parameters and parameters[name].shape == tensor.shape:
                parameters[name].data.copy_(tensor)


class KeepsTheFirst(Qwen3ForCausalLM):
    loaded = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self.loaded:
            super().load_weights(weights)
        self.loaded = True


class LoadsElsewhere(Qwen3ForCausalLM):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        self.model.norm.weight = nn.Parameter(self.model.norm.weight.clone(), requires_grad=False)


@pytest.mark.parametrize(
    ("model", "test", "more"),
    [
        (WithoutNorms, "test_greedy_tokens_equal_transformers", ("cpu",)),
        (ForgetsAScale, "test_log_probabilities_equal_transformers", ()),
        (TakesWhatComes, "test_a_missing_tensor_is_named", ()),
        (TakesWhatComes, "test_an_unknown_tensor_is_named", ()),
        (TakesWhatComes, "test_a_misshapen_tensor_is_named", ()),
        (TakesWhatComes, "test_weights_in_any_order_and_file", None),
        (KeepsTheFirst, "test_weights_loaded_again", None),
        (LoadsElsewhere, "test_weights_loaded_again", None),
    ],
)
def test_a_faulty_model_fails(
    model: type[Qwen3ForCausalLM], test: str, more: tuple[str, ...] | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    class Faulty(ModelConformance):
        architecture = "Qwen3ForCausalLM"
        config: dict[str, Any] = {"num_hidden_layers": 1}

    (tmp_path / "other").mkdir()
    folder = random_checkpoint(tmp_path / "checkpoint", Faulty.reference_class(), Faulty.config)
    monkeypatch.setattr("minivllm.models.qwen3.Qwen3ForCausalLM", model)
    with pytest.raises((AssertionError, TypeError, pytest.fail.Exception)):
        getattr(Faulty(), test)(folder, *((tmp_path / "other",) if more is None else more))


def test_a_model_that_is_not_tiny_is_refused(tmp_path: Path) -> None:
    class Large(ModelConformance):
        architecture = "LlamaForCausalLM"

    with pytest.raises(ValueError, match="set the sizes that it leaves out"):
        random_checkpoint(tmp_path, Large.reference_class(), {"hidden_size": 4096, "num_hidden_layers": 32})


def test_an_architecture_that_transformers_lacks_is_told() -> None:
    class Foreign(ModelConformance):
        architecture = "NobodysForCausalLM"

    with pytest.raises(AttributeError, match=r"has no NobodysForCausalLM; upgrade it, or override Foreign\.reference"):
        Foreign.reference_class()


# --------------------------------------------------------------------------- what is set


def test_skips_name_tests_and_say_why() -> None:
    with pytest.raises(TypeError, match=r"skips names 'test_speed', which is no test of it; its tests: test_a_large"):
        type("Wrong", (SchedulerConformance,), {"skips": {"test_speed": "it has none"}})
    with pytest.raises(TypeError, match=r"\['test_preemption'\] must say why"):
        type("Wrong", (ModelConformance,), {"skips": {"test_preemption": " "}})


def test_a_plugins_tests_are_collected_skipped_and_told(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from minivllm.testing import SchedulerConformance, ModelConformance, AttentionConformance\n"
        "class TestOne(SchedulerConformance):\n"
        "    scheduler = 'mixed'\n"
        "    skips = {'test_every_row_reads_its_own_history_and_every_request_ends': 'no time'}\n"
        "class TestTwo(SchedulerConformance): pass\n"
    )
    chosen = "every_row or taken_once"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "test_it.py", "-k", chosen],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "1 passed, 1 skipped" in done.stdout and "2 errors" in done.stdout, done.stdout
    assert "no time" in done.stdout and "TestTwo must set the class attribute 'scheduler'" in done.stdout
    assert "Warning" not in done.stdout


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_without_pytest_or_hypothesis_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import minivllm; import minivllm.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    last = done.stderr.splitlines()[-1]
    told = (
        f"ImportError: minivllm.testing needs {missing}, which is not installed; pip install 'minivllm[test]' brings it"
    )
    assert last == told


def test_the_simulated_world_is_strict_about_numbers() -> None:
    """A token that is sampled twice, or a step that is larger than it says, would slip through sums."""
    from minivllm.testing.simulation import Ask

    world = SchedulerConformance.make(type("Mixed", (SchedulerConformance,), {"scheduler": "mixed"})())
    world.add(Ask((1, 2, 3), max_tokens=3))
    batch = world.scheduler.schedule()
    assert batch is not None
    with pytest.raises(AssertionError):
        world.launch(replace(batch, token_ids=np.array([1, 2, 4], np.int32)))
