"""An engine that sleeps gives memory back and takes no requests; awake, it answers as before, or with other weights."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces import Executor
from minivllm.errors import ConfigError, EngineDeadError, RequestError
from minivllm.executors.single import SingleExecutor
from minivllm.serve.async_engine import AsyncEngine

Checkpoints = Callable[..., Path]
PROMPTS = [[1, 5, 300], list(range(40, 80)), [7]]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
DEFAULTS: dict[str, Any] = {"enable_sleep_mode": True, "num_gpu_blocks_override": 64}


def say(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def make(folder: Path, tp: int = 1, **options: object) -> LLM:
    return LLM(str(folder), device="cpu", tp=tp, **DEFAULTS | options)


@pytest.fixture
def old(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3")


@pytest.fixture
def new(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3", seed=1)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("tp", [1, 2])
def test_it_answers_as_before_and_with_other_weights(tp: int, quantization: str, old: Path, new: Path) -> None:
    with make(new, tp, quantization=quantization, enable_sleep_mode=False) as llm:
        expected = say(llm)
    with make(old, tp, quantization=quantization) as llm:
        first = say(llm)
        assert first != expected
        for _ in range(2):
            llm.sleep()
            assert llm.llm_engine.is_sleeping()
            llm.wake_up()
            assert not llm.llm_engine.is_sleeping() and say(llm) == first
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.reload_weights(new)
        assert llm.llm_engine.is_sleeping()
        llm.wake_up(tags=["kv_cache"])
        assert say(llm) == expected
        llm.sleep(level=2)
        llm.wake_up()
        llm.reload_weights()
        assert say(llm) == first
        llm.llm_engine.scheduler.check()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_draft_model_sleeps_too(tp: int, old: Path, new: Path, forked_ranks: object) -> None:
    """It is as often right as before, also when the model's weights were given up and came again."""
    drafts = {"model": old, "num_speculative_tokens": 3}
    with make(old, tp, speculative_config=drafts) as llm:
        stats = llm.llm_engine.stats

        def accepted() -> int:
            before = stats.accepted_tokens
            assert say(llm) == first
            return stats.accepted_tokens - before

        first = say(llm)
        usual = accepted()
        assert usual > 10
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            if level == 2:
                llm.reload_weights()
            assert accepted() == usual
        llm.llm_engine.scheduler.check()


def test_tied_weights_are_given_up_and_loaded_by_name(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint("llama", tie_word_embeddings=True)
    with make(folder) as llm:
        first = say(llm)
        llm.sleep(level=2)
        llm.wake_up()
        llm.reload_weights(weights_iterator=load_file(folder / "model.safetensors").items())
        assert say(llm) == first


def test_what_is_asleep_is_refused(old: Path) -> None:
    with make(old) as llm:
        first = say(llm)
        llm.sleep(level=2)
        llm.sleep(level=1)  # nothing is left to keep
        with pytest.raises(RequestError, match=r"^the engine sleeps; call wake_up\(\) first"):
            say(llm)
        with pytest.raises(RequestError, match=r"the engine's weights sleep; call wake_up\(\) or wake_up\(\['weights'"):
            llm.reload_weights()
        llm.wake_up(["kv_cache"])
        with pytest.raises(RequestError, match=r"sleeps \(its weights not yet woken\)"):
            say(llm)
        llm.wake_up()
        llm.wake_up()
        with pytest.raises(RequestError, match=r"^sleep\(level=2\) gave the weights up; call reload_weights first"):
            say(llm)
        llm.reload_weights()
        assert say(llm) == first


def test_who_sleeps_keeps_what_it_has(old: Path) -> None:
    """A second call changes nothing, whatever its level; a tag may be named twice."""
    with make(old) as llm:
        first = say(llm)
        llm.sleep(level=1)
        llm.sleep(level=2)
        llm.wake_up(["kv_cache", "kv_cache"])
        llm.sleep(level=2)
        llm.wake_up(["weights", "weights"])
        llm.wake_up()
        assert say(llm) == first


def test_ctrl_c_while_it_falls_asleep_or_wakes_up_is_raised_once_that_is_done(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def struck(name: str) -> None:
        inner = getattr(SingleExecutor, name)

        def act(self: object, *arguments: object) -> None:
            os.kill(os.getpid(), signal.SIGINT)  # as a terminal does it
            inner(self, *arguments)

        monkeypatch.setattr(SingleExecutor, name, act)

    with make(old) as llm:
        first = say(llm)
        for name in ("sleep", "wake_up", "reload_weights"):
            struck(name)
        with pytest.raises(KeyboardInterrupt):
            llm.sleep(level=2)
        with pytest.raises(RequestError, match="the engine sleeps; call"):
            say(llm)
        with pytest.raises(KeyboardInterrupt):
            llm.wake_up(["weights"])
        with pytest.raises(RequestError, match=r"sleeps \(its kv_cache not yet woken\)"):
            say(llm)
        with pytest.raises(KeyboardInterrupt):
            llm.reload_weights()
        with pytest.raises(KeyboardInterrupt):
            llm.wake_up()
        assert say(llm) == first


def test_a_cache_that_is_too_large_is_refused(old: Path) -> None:
    with pytest.raises(ConfigError, match=r"and there is no room for that; lower cache\.num_blocks"):
        make(old, num_gpu_blocks_override=10**12)


def test_no_prefix_is_found_in_a_cache_that_was_given_back(old: Path) -> None:
    prompt = list(range(40, 90))
    with make(old) as llm:
        for cached in (0, 48):
            assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == cached
        llm.sleep()
        llm.wake_up()
        assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_mistakes_change_nothing(old: Path) -> None:
    with make(old) as llm:
        first = say(llm)
        for level in (0, 3, "1", True, None):
            with pytest.raises(RequestError, match=r"level=.* is neither 1, .* nor 2"):
                llm.sleep(level)  # type: ignore[arg-type]
        for tags in (["weight"], [], "cache", 5, [["weights"]]):
            with pytest.raises(RequestError, match=r"tags=.*: name some of weights, kv_cache"):
                llm.wake_up(tags)  # type: ignore[arg-type]
        llm.engine.add_request("runs", [1, 2], GREEDY)
        with pytest.raises(RequestError, match="the engine cannot sleep under 1 unfinished requests"):
            llm.engine.sleep()
        llm.engine.abort("runs")
        assert not llm.engine.is_sleeping() and say(llm) == first
    with make(old, enable_sleep_mode=False) as llm:
        with pytest.raises(RequestError, match="made without it; type enable_sleep_mode=true"):
            llm.sleep()
        assert say(llm)
        llm.wake_up()


def test_executors_may_not_sleep_and_may_fail(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(old) as llm:
        first = say(llm)
        with monkeypatch.context() as patch:
            patch.setattr(SingleExecutor, "sleep", Executor.sleep)
            with pytest.raises(RequestError, match="SingleExecutor does not sleep"):
                llm.sleep()
        assert say(llm) == first

        def fails(self: object, level: int) -> None:
            raise MemoryError("no memory for copies")

        monkeypatch.setattr(SingleExecutor, "sleep", fails)
        with pytest.raises(EngineDeadError, match="make a new engine: falling asleep failed: MemoryError: no memory"):
            llm.sleep()
        with pytest.raises(EngineDeadError, match="falling asleep failed"):
            say(llm)


def test_there_may_be_no_room_to_wake_up(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(old) as llm:
        first = say(llm)
        llm.sleep()
        with monkeypatch.context() as patch:

            def full(self: object, tags: object) -> None:
                raise RequestError("there is no room")

            patch.setattr(SingleExecutor, "wake_up", full)
            with pytest.raises(RequestError, match="there is no room; free memory and call wake_up again"):
                llm.wake_up()
        assert llm.engine.is_sleeping()
        llm.wake_up()
        assert say(llm) == first


def test_requests_of_an_async_engine_wait(old: Path) -> None:
    async def ask(engine: AsyncEngine, name: str) -> list[int]:
        async for output in await engine.generate([name], [PROMPTS[0]], GREEDY):
            last = output
        return list(last.outputs[0].token_ids)

    async def run(llm: LLM) -> None:
        engine = AsyncEngine(llm.engine)
        engine.start()
        try:
            first = await ask(engine, "first")
            runs = asyncio.create_task(ask(engine, "runs"))
            while not llm.engine.has_request("runs"):
                await asyncio.sleep(0)
            await engine.sleep()
            comes = asyncio.create_task(ask(engine, "comes"))
            assert await runs == first
            await asyncio.sleep(0.3)
            assert engine.is_sleeping and not comes.done()
            await engine.wake_up()
            assert await comes == first and not engine.is_sleeping
            with pytest.raises(RequestError, match="level=3 is neither"):
                await engine.sleep(3)
        finally:
            engine.stop()

    with make(old) as llm:
        asyncio.run(run(llm))


def test_an_async_engine_knows_that_its_engine_sleeps_already(old: Path) -> None:
    async def run(llm: LLM) -> None:
        engine = AsyncEngine(llm.engine)
        for sleeps, between in ((True, llm.wake_up), (False, llm.sleep), (True, llm.wake_up)):
            engine.start()
            assert engine.is_sleeping == sleeps
            engine.stop()
            between()

    with make(old) as llm:
        llm.sleep()
        asyncio.run(run(llm))


def test_no_request_ends_for_a_sleep_that_is_refused(old: Path) -> None:
    async def run(llm: LLM) -> None:
        engine = AsyncEngine(llm.engine)
        engine.start()
        try:
            outputs = await engine.generate(["runs"], [PROMPTS[0]], GREEDY.clone(max_tokens=400))
            for abort in (True, False):
                with pytest.raises(RequestError, match="made without it; type enable_sleep_mode=true"):
                    await engine.sleep(abort=abort)
                assert llm.engine.has_request("runs")
            assert [output.finished async for output in outputs][-1]
        finally:
            engine.stop()

    with make(old, enable_sleep_mode=False) as llm:
        asyncio.run(run(llm))
