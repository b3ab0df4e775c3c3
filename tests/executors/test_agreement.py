"""A backend that one rank cannot build is built by none: with different ones they would hang, or differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from zygote import Zygote

from minivllm import LLM, SamplingParams
from minivllm.backends.agree import exchange
from minivllm.core.parallel import TensorParallel
from minivllm.errors import ConfigError
from minivllm.plugins.manager import default_registry

Checkpoints = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(30))]
PLUGIN = """
    import torch.distributed as dist
    from minivllm.backends.torch import TorchBackend
    from minivllm.plugins import Component, hookimpl

    class Taken(TorchBackend):
        def plan(self, batch):
            raise ArithmeticError("a rank took it")

    class Broken(Taken):
        def __init__(self, spec):
            if dist.get_rank() == {rank}:
                raise RuntimeError("no room")
            super().__init__(spec)

    class Fussy(Taken):
        @classmethod
        def unsupported(cls, spec):
            return ["no such chip"] if dist.get_rank() == {rank} else super().unsupported(spec)

    @hookimpl
    def minivllm_attention_backends():
        yield Component("lopsided", __name__ + ":{target}", {priority})
"""
BROKEN = (
    "attention backend 'lopsided' of minivllm-lopsided 1.0 cannot be built: RuntimeError: no room (minivllm_lopsided, "
    "line 13, in __init__)"
)


@pytest.fixture
def lopsided(fake_plugin: Callable[..., Path]) -> Iterator[Callable[..., None]]:
    """``lopsided("Broken" or "Fussy", rank)`` installs what that rank alone cannot build, or does not support."""

    def install(target: str, rank: int, priority: str = "priority=99") -> None:
        fake_plugin("minivllm-lopsided", PLUGIN.format(target=target, rank=rank, priority=priority))
        default_registry.cache_clear()

    yield install
    default_registry.cache_clear()


@pytest.fixture
def expected(tiny_checkpoint: Checkpoints) -> list[list[int]]:
    with LLM(str(tiny_checkpoint("qwen3")), attention="torch", device="cpu") as llm:
        return tokens(llm)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(
    ("target", "rank", "priority", "why"),
    [
        ("Broken", 0, "priority=99", f"not lopsided: on rank 0: {BROKEN}"),
        ("Broken", 1, "priority=99", f"not lopsided: on rank 1: {BROKEN}"),
        ("Broken", 1, "priority=-1, prefill_priority=99", f"not lopsided: on rank 1: {BROKEN}"),
        ("Fussy", 0, "priority=99", "not lopsided: no such chip"),
        ("Fussy", 1, "priority=99", "not lopsided: on rank 1: no such chip"),
    ],
)
def test_auto_takes_what_all_ranks_can_build(
    expected: list[list[int]], tiny_checkpoint: Checkpoints, forked_ranks: Zygote, lopsided: Callable[..., None],
    target: str, rank: int, priority: str, why: str, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    lopsided(target, rank, priority)
    with LLM(str(tiny_checkpoint("qwen3")), device="cpu", tp=2) as llm:
        about = llm.engine.describe()
        assert about["attention"] == "torch" and why in about["attention_why"]
        assert tokens(llm) == expected
    told = [record.getMessage() for record in caplog.records if record.name == "minivllm.plugins"]
    assert told == ([BROKEN] if target == "Broken" else [])


@pytest.mark.parametrize("keys", [["attention=lopsided"], ["attention=torch", "attention.prefill=lopsided"]])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_is_named_is_an_error_of_that_rank(
    tiny_checkpoint: Checkpoints, forked_ranks: Zygote, lopsided: Callable[..., None], keys: list[str], rank: int
) -> None:
    lopsided("Broken", rank)
    with pytest.raises(
        ConfigError, match=f"^attention(.prefill)?=lopsided cannot run this: on rank {rank}: {re.escape(BROKEN)}. Here"
    ):
        LLM(str(tiny_checkpoint("qwen3")), device="cpu", tp=2, overrides=keys)


def test_what_a_rank_says_is_cut_between_letters() -> None:
    alone, device = TensorParallel(), torch.device("cpu")
    assert exchange("", alone, device) == [""] and exchange("größer", alone, device) == ["größer"]
    assert exchange("a" + 600 * "ö", alone, device) == ["a" + 511 * "ö"]
