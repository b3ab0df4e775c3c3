"""What a plugin's class raises or returns wrongly after it was made: one line with kind, component and package."""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_plugins import FakePlugin

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces import Sampler
from minivllm.core.sampler import DefaultSampler
from minivllm.core.sampler_overrides import undoes_sample
from minivllm.core.scheduler import MixedScheduler
from minivllm.errors import ConfigError, MinivllmError, PluginError, blamed, calling, named, place_of
from minivllm.plugins.manager import default_registry

HEAD = """
from dataclasses import replace
import numpy as np
import torch
from torch import nn
from minivllm.models.qwen3 import Qwen3ForCausalLM
from minivllm.plugins.api import *
from minivllm.plugins.api import Component, ModelComponent, hookimpl

class Base(Qwen3ForCausalLM):
    architectures = ("MineForCausalLM",)

class Altered:
    def __init__(self, step, change):
        self.step, self.change = step, change
    def result(self):
        found = self.step.result()
        return replace(found, token_ids=self.change(found.token_ids))

"""
HOOKS = {
    "model": "models(): yield ModelComponent('mine', __name__ + ':Mine', architectures=('MineForCausalLM',))",
    "attention": "attention_backends(): yield Component('mine', __name__ + ':Mine', priority=-1)",
    "scheduler": "schedulers(): yield Component('mine', __name__ + ':Mine')",
    "sampler": "samplers(): yield Component('mine', __name__ + ':Mine')",
    "executor": "executors(): yield Component('mine', __name__ + ':Mine')",
}
BASES = {
    "model": "Base",
    "attention": "TorchBackend",
    "scheduler": "MixedScheduler",
    "sampler": "DefaultSampler",
    "executor": "SingleExecutor",
}
SHORT, LONG = [[1, 2, 3], [4, 5]], [list(range(200)), [7] * 90]
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    default_registry.cache_clear()
    yield
    default_registry.cache_clear()


@pytest.fixture
def said(fake_plugin: FakePlugin, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., str]:
    """Of an engine with a plugin's component whose body is given: what it fails with, or its tokens."""

    def run(
        kind: str, body: str, params: SamplingParams = GREEDY, prompts: list[list[int]] = SHORT, tp: int = 1
    ) -> str:
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        shutil.rmtree(tmp_path / "site" / "minivllm_mine-1.0.dist-info", ignore_errors=True)  # another body's
        sys.modules.pop("minivllm_mine", None)
        default_registry.cache_clear()
        fake_plugin(
            "minivllm-mine", f"{HEAD}class Mine({BASES[kind]}):\n{lines}\n@hookimpl\ndef minivllm_{HOOKS[kind]}\n"
        )
        folder, overrides = tiny_checkpoint("qwen3"), [f"{kind}.name=mine"]
        if kind == "model":
            folder, overrides = as_mine(folder, tmp_path / "mine"), []
        try:
            with LLM(str(folder), device="cpu", overrides=overrides, tp=tp, num_gpu_blocks_override=64) as llm:
                outputs = llm.generate(prompts, params, use_tqdm=False)
        except MinivllmError as error:
            return str(error)
        return str([list(output.outputs[0].token_ids) for output in outputs])

    return run


def as_mine(folder: Path, copy: Path) -> Path:
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).symlink_to(file)
    text = (folder / "config.json").read_text().replace("Qwen3ForCausalLM", "MineForCausalLM")
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(text)
    return copy


def with_arrays(changes: str) -> str:
    """A scheduler whose batches have some arrays changed."""
    return f"""
def schedule(self):
    batch = super().schedule()
    return None if batch is None else replace(batch, {changes})
"""


def altered(change: str) -> str:
    return f"def launch(self, batch): return Altered(super().launch(batch), lambda ids: {change})"


RAISES = "raise ValueError('no\\nluck')"
WHO = {"attention": "attention backend"}


OWN = "@classmethod\ndef "


@pytest.mark.parametrize("kind,body,told", [
    ("attention", f"def bind(self, cache): {RAISES}", "bind raised ValueError: no luck (minivllm_mine, line 21, in b"),
    ("executor", "def start(self): super().start()", "start returned None, not a number of cache blocks"),
    ("executor", "def start(self): return super().start() * -1", "start returned -64, not a number"),
    ("executor", "def describe(self): return {'device': 'x'}", "describe returned {'device': 'x'}, which lacks att"),
    ("executor", "def describe(self): return 'cpu'", "describe returned 'cpu', not a mapping"),
    ("executor", f"def describe(self): {RAISES}", "describe raised ValueError: no luck (minivllm_mine, line 21, in d"),
    ("executor", f"def check_health(self): {RAISES}", "check_health raised ValueError: no luck (minivllm_mine, line"),
    ("executor", f"def shutdown(self): {RAISES}", "shutdown raised ValueError: no luck (minivllm_mine, line 21, in s"),
    ("executor", f"told = 0\ndef check_health(self):\n    self.told += 1\n    if self.told > 1: {RAISES}",
     "check_health raised ValueError: no luck (minivllm_mine, line 24"),
    ("scheduler", f"def add(self, seq): {RAISES}", "add raised ValueError: no luck (minivllm_mine, line 21, in add)"),
    ("sampler", "row = np.dtype([('a', 'i2')])", "its row is [('a', '<i2')], 2 bytes, not a numpy dtype of a mul"),
    ("sampler", "row = 'i2'", "its row is int16, 2 bytes, not a numpy dtype"),
    ("sampler", "row = None", "its row is None, not a numpy dtype of a multiple of 4 bytes"),
    ("sampler", "extra_args = ['mood']", "its extra_args is ['mood'], not a frozenset of names"),
    ("sampler", "extra_args = 'mood'", "its extra_args is 'mood', not a frozenset of names"),
    ("sampler", "take_tokens = Sampler.take_tokens", "it overrides words, but not take_tokens, which gets them"),
    ("sampler", "take_masks = Sampler.take_masks", "its takes_masks is true, but it does not override take_masks"),
    ("sampler", f"{OWN}encode(cls, seq, seed): {RAISES}", "encode raised ValueError: no luck (minivllm_mine, line 22"),
    ("sampler", f"{OWN}words(cls, seq): {RAISES}", "words raised ValueError: no luck (minivllm_mine"),
    ("sampler", f"{OWN}encode(cls, seq, seed): return None", "encode returned None, not one item of its row"),
    ("sampler", f"{OWN}encode(cls, seq, seed): return np.zeros((), np.int32)", "encode returned array(0, dtype=int32)"),
])  # fmt: skip
def test_what_is_raised_or_wrong_outside_of_steps(said: Callable[..., str], kind: str, body: str, told: str) -> None:
    assert said(kind, body).startswith(f"{WHO.get(kind, kind)} 'mine' of minivllm-mine 1.0: {told}")


FORWARD, LOGITS = "def forward(self, *a): return super().forward(*a)", "def compute_logits(self, x): return super()"
SAMPLE = "def sample(self, *args): return super().sample(*args)"
REFINE = "def needs_refine(self, slots): return True\ndef refine(self, *args): return args[3]"


@pytest.mark.parametrize("kind,body,told", [
    ("model", f"{FORWARD}[:, :5]", "forward returned float32 (5, 5), not (5, 64), a hidden state for each token"),
    ("model", f"{FORWARD}, 1", "forward returned (tensor([["),
    ("model", f"{FORWARD}[:-1]", "forward returned float32 (4, 64), not (5, 64)"),
    ("model", f"{LOGITS}.compute_logits(x)[:, :7]", "compute_logits returned float32 (2, 7), not (2, "),
    ("model", f"{LOGITS}.compute_logits(x).long()", "compute_logits returned int64 (2, "),
    ("sampler", f"{SAMPLE}.repeat(2)", "sample returned int64 (4,), not int64 (2,), a token for each row"),
    ("sampler", f"{SAMPLE}.int()", "sample returned int32 (2,), not int64 (2,)"),
    ("sampler", f"{SAMPLE} + 99999", "sample returned token "),
    ("sampler", "def sample(self, *args): return None", "sample returned None, not int64 (2,)"),
    ("sampler", REFINE, "refine returned int64 (2,), not two: tokens, and their log-probabilities or None"),
    ("scheduler", "def schedule(self): return 'abc'", "schedule returned 'abc', not a Batch or None"),
    ("scheduler", with_arrays("slots=batch.slots.astype(np.int64)"), "schedule returned a Batch with slots int64 (2,)"),
    ("scheduler", with_arrays("samples=batch.samples[:1]"), "schedule returned a Batch with samples bool (1,), no"),
    ("scheduler", with_arrays("token_ids=batch.token_ids[1:]"), "schedule returned a Batch with token_ids int32 (4,)"),
    ("scheduler", with_arrays("block_ids=batch.slots[:0]"), "schedule returned a Batch with block_ids int32 (0,), not"),
    ("scheduler", with_arrays("admitted_params=batch.slots"), "schedule returned a Batch with admitted_params int32"),
    ("scheduler", with_arrays("known_lens=batch.slots + 1"), "schedule returned a Batch with known_ids int32 (0,), "),
    ("scheduler", with_arrays("generations=None"), "schedule returned a Batch with generations None, not int64 (2,)"),
    ("scheduler", with_arrays("slots=[0, 1]"), "schedule returned a Batch with slots [0, 1], not an array"),
    ("scheduler", "def commit(self, *args): super().commit(*args)", "commit returned None, not a Committed"),
    ("scheduler", "def place(self, seq): return 5", "place returned 5, not a tuple"),
    ("executor", "def launch(self, batch): super().launch(batch)", "launch returned None, not a StepHandle"),
    ("executor", altered("ids[:0]"), "a step that it launched returned token_ids int32 (0,), not int32 (2,), one for"),
    ("executor", altered("ids * 0 + 99999"), "a step that it launched returned token 99999, which is outside the voc"),
    ("executor", altered("ids * 0 - 1"), "a step that it launched returned token -1, which is outside the vocabulary"),
])  # fmt: skip
def test_what_a_first_step_returns_is_looked_at(said: Callable[..., str], kind: str, body: str, told: str) -> None:
    message = said(kind, body)
    assert message.startswith(f"{kind} 'mine' of minivllm-mine 1.0: {told}") and "\n" not in message


@pytest.mark.parametrize("prompts", [SHORT, LONG])  # long enough for last tokens' hidden states alone
@pytest.mark.parametrize("kind", BASES)
def test_what_is_right_stays_as_it_is(
    said: Callable[..., str], tiny_checkpoint: Callable[..., Path], kind: str, prompts: list[list[int]]
) -> None:
    with LLM(str(tiny_checkpoint("qwen3")), device="cpu") as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert said(kind, "pass", prompts=prompts) == str([list(output.outputs[0].token_ids) for output in outputs])


def test_after_the_first_call_a_method_is_the_classes_again_or_the_objects(said: Callable[..., str]) -> None:
    body = """
def __init__(self, *args):
    super().__init__(*args)
    self.sample = self.compiled = lambda *args: DefaultSampler.sample(self, *args)
    self.calls = 0
def needs_refine(self, slots):
    self.calls += 1
    if self.calls == 3:
        raise ValueError([self.sample is self.compiled, 'refine' in vars(self)])
    return self.calls == 2
"""
    assert "ValueError: [True, False] (minivllm_mine, line" in said("sampler", body)


@pytest.mark.slow
@pytest.mark.parametrize("kind,body,told", [
    ("attention", f"def bind(self, cache): {RAISES}", "attention backend 'mine' of minivllm-mine 1.0: bind raised V"),
    ("attention", "def decode(self, *args): raise ValueError(1)",
     r"rank . failed in step .: ValueError: 1 \(minivllm_mine, line 21, in decode, of minivllm-mine 1.0\)$"),
    ("model", f"{LOGITS}.compute_logits(x)[:, :7]",
     r"rank . failed in step .: PluginError: model 'mine' of minivllm-mine 1.0: compute_logits returned float32 \(2"),
])  # fmt: skip
@pytest.mark.usefixtures("forked_ranks")
def test_the_same_on_ranks(said: Callable[..., str], kind: str, body: str, told: str) -> None:
    assert re.match(told, said(kind, body, tp=2))


@pytest.mark.parametrize("kind,body,told", [
    ("scheduler", f"def schedule(self): {RAISES}", "in schedule, of minivllm-mine 1.0)"),
    ("scheduler", "def take_decodes(self, *args): return []", ", in write_batch, for minivllm-mine 1.0)"),
    ("attention", f"def decode(self, q, layer, out): {RAISES}", "in decode, of minivllm-mine 1.0)"),
])  # fmt: skip
def test_a_step_that_fails_names_the_package(said: Callable[..., str], kind: str, body: str, told: str) -> None:
    assert (line := said(kind, body)).startswith("a step failed: ") and line.endswith(told)


def test_a_plugin_that_would_end_the_process_in_a_step_ends_the_engine(said: Callable[..., str]) -> None:
    line = said("scheduler", "def schedule(self): raise SystemExit(0)")
    assert line.startswith("a step failed: SystemExit: 0 (") and line.endswith("in schedule, of minivllm-mine 1.0)")


def test_a_sampler_that_finds_no_logprobs_is_asked_for_none(said: Callable[..., str]) -> None:
    """They are a client's wish, which is refused; the engine lives."""
    inherits = "refine = Sampler.refine\nrefine_captured = Sampler.refine_captured"
    body = f"from minivllm.core.interfaces import Sampler\n{inherits}"
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1)
    assert said("sampler", body, params).endswith("sampler=mine returns no logprobs; leave it out")
    assert said("sampler", body).startswith("[[")


def test_one_that_has_just_ended_keeps_its_slot(said: Callable[..., str]) -> None:
    body = """
def commit(self, *args):
    found = super().commit(*args)
    for seq, _ in found.finished:
        seq.slot = -1
    return found
"""
    told = said("scheduler", body, SamplingParams(temperature=0, max_tokens=2, stop=["zzz"]))
    assert told.startswith("scheduler=mine committed a token in slot ") and "has just ended keeps its slot" in told


def test_a_stacked_layer_that_packed_does_not_name_is_told_with_what_to_write(said: Callable[..., str]) -> None:
    body = """
def __init__(self, config, tp):
    super().__init__(config, tp)
    self.w13 = MergedColumnParallelLinear(8, [4, 4], tp)
"""
    assert said("model", body).startswith(
        "model 'mine' of minivllm-mine 1.0 cannot be built: TypeError: w13 stacks tensors of a checkpoint, and packed "
        "does not name them: add w13 to it, as packed = {**CausalLM.packed, 'NAME': ('w13', 0), 'NAME': ('w13', 1)}, "
        "each NAME the checkpoint's"
    )


def test_a_model_that_is_registered_for_what_its_class_does_not_read(said: Callable[..., str]) -> None:
    assert said("model", "architectures = ('OtherForCausalLM',)") == (
        "model 'mine' of minivllm-mine 1.0 is registered for MineForCausalLM, and the architectures of "
        "minivllm_mine:Mine are OtherForCausalLM: let the ModelComponent and the class name the same"
    )


def test_an_engine_that_could_not_start_says_why_although_its_executor_cannot_end(said: Callable[..., str]) -> None:
    body = f"def describe(self): return {{}}\ndef shutdown(self): {RAISES}"
    assert said("executor", body).startswith("executor 'mine' of minivllm-mine 1.0: describe returned {}, which lacks")


# --------------------------------------------------------------------------- sample without resample


SAMPLES = "def sample(self, *args): return super().sample(*args)\n"


def test_who_changes_sample_and_not_what_chooses_again_is_told(
    said: Callable[..., str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said("sampler", SAMPLES + "def resample(self, *args): return super().resample(*args)")
    assert not caplog.records
    said("sampler", SAMPLES)
    (record,) = [r for r in caplog.records if r.name == "minivllm.plugins" and r.levelno == logging.WARNING]
    assert record.getMessage().startswith(
        "sampler 'mine' of minivllm-mine 1.0: Mine overrides sample and leaves the refine of DefaultSampler"
    )
    monkeypatch.setenv("MINIVLLM_STRICT_PLUGINS", "1")
    assert "override resample, too" in said("sampler", SAMPLES)


@pytest.mark.parametrize(
    "params", [{}, {"presence_penalty": 1.0}, {"logit_bias": {"5": 9.0}}, {"bad_words": ["a b c"]}]
)
def test_what_sample_and_resample_do_alike_holds_for_every_request(said: Callable[..., str], params: Any) -> None:
    only = "\n    only = torch.full_like(logits, -torch.inf)\n    only[:, 7] = logits[:, 7]\n    return super()"
    body = "".join(f"def {name}(self, logits, *rest):{only}.{name}(only, *rest)\n" for name in ("sample", "resample"))
    assert said("sampler", body, SamplingParams(temperature=0, max_tokens=2, **params)) == "[[7, 7], [7, 7]]"
    if params:
        alone = said(
            "sampler", body.partition("def resample")[0], SamplingParams(temperature=0, max_tokens=2, **params)
        )
        assert alone != "[[7, 7], [7, 7]]"


def test_which_samplers_undo_what_they_sample() -> None:
    def sampler(*bases: type, **members: object) -> type[Any]:
        return type("Some", bases, {name: lambda self: None for name in members})

    changes = sampler(DefaultSampler, sample=1)
    assert undoes_sample(changes) and undoes_sample(sampler(changes)) and undoes_sample(sampler(changes, sample=1))
    mixin = type("Mixin", (), {"sample": lambda self: None})
    assert undoes_sample(sampler(mixin, DefaultSampler))
    for also in ("refine", "refine_captured", "resample", "needs_refine"):
        assert undoes_sample(sampler(DefaultSampler, sample=1, **{also: 1})) is None
        assert undoes_sample(sampler(changes, **{also: 1})) is None
    assert undoes_sample(DefaultSampler) is None and undoes_sample(sampler(DefaultSampler, encode=1)) is None
    assert undoes_sample(sampler(Sampler, sample=1)) is None
    assert undoes_sample(sampler(sampler(Sampler, sample=1), sample=1)) is None  # there is no refine


# --------------------------------------------------------------------------- the helpers


def test_errors_of_ours_and_of_what_is_built_in_stay_as_they_are() -> None:
    assert named("scheduler", "mixed", MixedScheduler) == "scheduler 'mixed'"
    for error in (ValueError("x"), ConfigError("x")):
        with pytest.raises(type(error), match=r"^x$") as caught, calling("scheduler", "mixed", MixedScheduler, "add"):
            raise error
        assert caught.value is error and caught.value.__cause__ is None
    assert place_of(ValueError("never raised")) == "nowhere"


def test_a_component_is_blamed_by_its_class_and_a_built_in_one_by_what_it_calls(fake_plugin: FakePlugin) -> None:
    fake_plugin("minivllm-mine", "class Mine:\n    def add(self): return 1 / 0\n")
    import minivllm_mine  # type: ignore[import-not-found]

    mine = minivllm_mine.Mine()
    told = "attention backend 'x' of minivllm-mine 1.0: add raised ZeroDivisionError: division by zero (minivllm_mine, "
    for component in (mine, minivllm_mine.Mine, MixedScheduler):
        with pytest.raises(PluginError) as caught, calling("attention backend", "x", component, "add"):
            mine.add()
        assert str(caught.value) == told + "line 2, in add)"
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert str(blamed(ValueError("x"), "scheduler", "s", mine, "abort")) == (
        "scheduler 's' of minivllm-mine 1.0: abort raised ValueError: x"
    )


CONFIG = """
def read(hf):
    sizes = hf.pop("sizes")
    return BODY

@hookimpl
def minivllm_models():
    yield ModelComponent("mine", __name__ + ":Base", architectures=("MineForCausalLM",), read_config=read)
"""


@pytest.mark.parametrize("dummy", [False, True])
def test_a_model_reads_a_config_of_its_own_kind(
    fake_plugin: FakePlugin, tiny_checkpoint: Callable[..., Path], tmp_path: Path, dummy: bool
) -> None:
    """What other architectures' files lack is made from what they have, for weights and for dummy ones."""
    fake_plugin("minivllm-mine", HEAD + CONFIG.replace("BODY", "hf | {'intermediate_size': sizes['mlp']}"))
    usual = tiny_checkpoint("qwen3")
    folder, file = as_mine(usual, tmp_path / "mine"), tmp_path / "mine" / "config.json"
    tree = json.loads(file.read_text())
    file.write_text(json.dumps(tree | {"sizes": {"mlp": tree.pop("intermediate_size")}}))
    said = []
    for path in (usual, folder):
        load = "dummy" if dummy else "auto"
        with LLM(str(path), device="cpu", load_format=load, num_gpu_blocks_override=64) as llm:
            said.append([output.outputs[0].token_ids for output in llm.generate(SHORT, GREEDY, use_tqdm=False)])
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("None", "read_config returned None, not a mapping"),
        ("1 / 0", "cannot be built: ZeroDivisionError"),
        ("{}", "config.json lacks architectures"),
    ],
)
def test_a_config_that_is_read_wrongly_is_the_plugins_fault(
    fake_plugin: FakePlugin, tiny_checkpoint: Callable[..., Path], tmp_path: Path, body: str, told: str
) -> None:
    fake_plugin("minivllm-mine", HEAD + CONFIG.replace("BODY", body))
    folder, file = as_mine(tiny_checkpoint("qwen3"), tmp_path / "mine"), tmp_path / "mine" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sizes": {}}))
    with pytest.raises(MinivllmError, match=told):
        LLM(str(folder), device="cpu")
