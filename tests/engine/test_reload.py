"""Other weights for a running engine: it answers as a new one would; or as before, and says why; or not any more."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import edit_json
from safetensors.torch import load_file, save_file
from torch import nn

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces import Executor
from minivllm.core.sampling_params import RequestOutputKind
from minivllm.errors import CheckpointError, EngineDeadError, RequestError
from minivllm.executors.single import SingleExecutor
from minivllm.layers.linear import _StackedLinear
from minivllm.serve.async_engine import AsyncEngine
from minivllm.serve.generation import Interrupted

Checkpoints = Callable[..., Path]
Engine = Callable[..., LLM]
Tensors = dict[str, torch.Tensor]
PROMPTS = [[1, 5, 300], list(range(40, 80)), [7]]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
DOWN = "model.layers.1.mlp.down_proj.weight"


def say(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture
def old(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3")


@pytest.fixture
def new(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3", seed=1, shards=3)


@pytest.fixture
def copy(new: Path, tmp_path: Path) -> Callable[..., Path]:
    """``copy(change) -> folder``: of the new checkpoint in one file, whose tensors ``change`` may change in place."""

    def make(change: Callable[[Tensors], Any] = lambda tensors: None) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(new, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        tensors = tensors_of(new)
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def as_before(llm: LLM, old: Path, engine: Engine) -> None:
    """The engine has the old weights, all of them."""
    assert say(llm) == say(engine(old))


def is_dead(llm: LLM, why: str) -> None:
    """Nothing is answered any more, and each call says why."""
    for call in (
        lambda: llm.engine.add_request("a", [1, 2]),
        llm.engine.step,
        lambda: say(llm),
        llm.reload_weights,
    ):
        with pytest.raises(EngineDeadError, match=f"stopped earlier.*some weights may be old and some new.*{why}"):
            call()


# --------------------------------------------------------------------------- answers


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_tokens_are_those_of_a_new_engine(quantization: str, old: Path, new: Path, engine: Engine) -> None:
    first, expected = (say(engine(folder, quantization=quantization)) for folder in (old, new))
    llm = engine(old, quantization=quantization)
    assert say(llm) == first != expected
    tensors = {id(param) for param in llm.engine.executor._worker.runner.model.parameters()}
    for folder, said in ((new, expected), (old, first), (str(new), expected)):
        llm.reload_weights(folder)
        assert say(llm) == said
    llm.reload_weights()  # its own
    assert say(llm) == first
    llm.reload_weights(weights_iterator=tensors_of(new).items())
    assert say(llm) == expected
    assert tensors == {id(param) for param in llm.engine.executor._worker.runner.model.parameters()}
    llm.engine.scheduler.check()


def test_a_checkpoint_in_fp8_is_read_as_at_the_start(old: Path, copy: Callable[..., Path], engine: Engine) -> None:
    def round_down(tensors: Tensors) -> None:
        tensors[DOWN.replace(".weight", ".weight_scale")] = torch.tensor([0.01])
        tensors[DOWN] = (tensors[DOWN] / 0.01).to(torch.float8_e4m3fn)

    folder = copy(round_down)
    edit_json(folder / "config.json", quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    llm = engine(old)
    llm.reload_weights(folder)
    assert say(llm) == say(engine(folder))


def test_what_a_trainer_may_change_in_config_json(old: Path, copy: Callable[..., Path], engine: Engine) -> None:
    folder = copy(lambda tensors: tensors.update({name: its.bfloat16() for name, its in tensors.items()}))
    edit_json(
        folder / "config.json", "eos_token_id", dtype="bfloat16", use_cache=False, transformers_version="1", new_key=3,
        attention_dropout=0.5, _name_or_path="elsewhere",
    )  # fmt: skip
    (folder / "generation_config.json").unlink(missing_ok=True)
    llm = engine(old)
    ends = llm.engine.model_config.eos_token_ids
    llm.reload_weights(folder)
    assert say(llm) == say(engine(folder)) and llm.engine.model_config.eos_token_ids == ends


def test_no_keys_of_the_former_weights_are_read(old: Path, new: Path, engine: Engine) -> None:
    llm = engine(old, **{"cache.block_size": 4})
    prompt, fresh = list(range(60)), engine(new, **{"cache.block_size": 4})
    expected = fresh.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    for cached in (0, 56):
        assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens == cached
    llm.reload_weights(new)
    for cached in (0, 56):
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        assert output.num_cached_tokens == cached and output.outputs[0].token_ids == expected


@pytest.mark.parametrize("model", [False, True], ids=["looked up", "draft model"])
def test_drafts_and_samples_are_those_of_a_new_engine(old: Path, new: Path, engine: Engine, model: bool) -> None:
    settings: dict[str, Any] = {"scheduler.num_speculative_tokens": 3}
    settings |= {"scheduler.draft_model": new} if model else {"scheduler.prompt_lookup_min": 1}
    params = [GREEDY.clone(max_tokens=40), SamplingParams(seed=3, max_tokens=20, ignore_eos=True, logprobs=2)]
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8]]
    llm, fresh = engine(old, **settings), engine(new, **settings)
    llm.generate(prompts, params, use_tqdm=False)
    llm.reload_weights(new)
    told = [[o.outputs[0] for o in one.generate(prompts, params, use_tqdm=False)] for one in (llm, fresh)]
    assert [o.token_ids for o in told[0]] == [o.token_ids for o in told[1]]
    assert told[0][1].logprobs == told[1][1].logprobs


def test_folded_norms_are_folded_again(old: Path, new: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(_StackedLinear, "foldable", property(_StackedLinear._may_fold))
    llm, fresh = engine(old), engine(new)
    llm.reload_weights(new)
    ours, theirs = (one.engine.executor._worker.runner.model.state_dict() for one in (llm, fresh))
    assert torch.equal(ours["model.layers.0.input_layernorm.weight"], torch.ones(64))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_engine_of_dummy_weights_gets_its_first(old: Path, engine: Engine) -> None:
    llm = engine(old, load_format="dummy")
    with pytest.raises(RequestError, match=r"load_format=dummy: the engine has no checkpoint.*weights_path=DIR"):
        llm.reload_weights()
    llm.reload_weights(old)
    assert say(llm) == say(engine(old))


def test_a_trainer_goes_on_with_what_its_iterator_made(old: Path, engine: Engine) -> None:
    """It is not run in inference mode, and parameters that are trained are taken."""
    made: list[torch.Tensor] = []
    tensors = {name: nn.Parameter(tensor) for name, tensor in tensors_of(old).items()}

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            made.append(tensor * 1)
            yield name, made[-1]

    llm = engine(old)
    llm.reload_weights(weights_iterator=weights())
    llm.reload_weights(weights_iterator=tensors.items())
    assert not any(tensor.is_inference() for tensor in made)
    sum(tensor.sum() for tensor in made).backward()  # type: ignore[union-attr]
    as_before(llm, old, engine)


# --------------------------------------------------------------------------- when


def test_a_step_in_flight_is_settled(old: Path, new: Path, engine: Engine) -> None:
    """Of a sequence that has ended by a token, or by an abort."""
    expected, llm = say(engine(new)), engine(old)
    for end in ("token", "abort"):
        llm.engine.add_request("a", [1, 2, 3], GREEDY.clone(stop_token_ids=[*range(512)] if end == "token" else []))
        llm.engine.step()
        if end == "abort":
            llm.engine.abort("a")
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        assert llm.engine.num_steps_under_way
        llm.reload_weights(new)
        assert not llm.engine.num_steps_under_way
        llm.engine.scheduler.check()
        assert llm.engine.scheduler.blocks.num_free == llm.engine.num_blocks
        assert say(llm) == expected


def test_not_while_requests_run(old: Path, engine: Engine) -> None:
    llm = engine(old)
    for name in "ab":
        llm.engine.add_request(name, [1, 2, 3], GREEDY)
    llm.engine.step()
    items = iter(tensors_of(old).items())
    with pytest.raises(RequestError, match="under 2 unfinished requests; step until they finish, or abort them"):
        llm.engine.reload_weights(weights_iterator=items)
    assert len(list(items)) == len(tensors_of(old)), "it was read"
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    llm.reload_weights()
    as_before(llm, old, engine)


def test_not_by_who_is_asked_for_weights(old: Path, new: Path, engine: Engine) -> None:
    """Half of them are in the engine, then."""
    llm = engine(old)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(tensors_of(new).items()):
            if number == 3:
                with pytest.raises(EngineDeadError, match="its weights are being replaced"):
                    say(llm)
            yield item

    llm.reload_weights(weights_iterator=weights())
    assert say(llm) == say(engine(new))


def test_other_threads_wait_for_each_other(old: Path, new: Path, engine: Engine) -> None:
    llm, said = engine(old), []
    first, expected = say(llm), say(engine(new))
    started = threading.Event()

    def generate() -> None:
        started.set()
        said.extend(say(llm) for _ in range(6))

    thread = threading.Thread(target=generate)
    thread.start()
    started.wait()
    llm.reload_weights(new)
    thread.join()
    assert all(one in (first, expected) for one in said) and say(llm) == expected


async def said_by(running: AsyncEngine, name: str = "") -> list[list[int]]:
    params = GREEDY.clone(output_kind=RequestOutputKind.FINAL_ONLY)
    told = {}
    ids = [f"{name}{i}" for i in range(len(PROMPTS))]
    async for output in await running.generate(ids, PROMPTS, params):
        told[output.request_id] = list(output.outputs[0].token_ids)
    return [told[one] for one in ids]


def test_an_async_engine_that_is_stopped_meanwhile(old: Path, new: Path, engine: Engine) -> None:
    async def session(running: AsyncEngine) -> list[list[int]]:
        running.start()
        return await said_by(running)

    llm = engine(old)
    running = AsyncEngine(llm.engine)
    for folder in (old, new):
        llm.reload_weights(folder)
        try:
            assert asyncio.run(session(running)) == say(engine(folder))
        finally:
            running.stop()


def test_an_async_engine_that_runs(old: Path, new: Path, engine: Engine) -> None:
    """Requests that wait for nothing but the reload are answered with the new weights, in the order of the calls."""
    llm = engine(old)
    first, expected = say(llm), say(engine(new))

    async def session(running: AsyncEngine) -> None:
        running.start()
        before = asyncio.create_task(said_by(running, "before"))
        while not llm.engine.has_request("before2"):
            await asyncio.sleep(0)
        reload = asyncio.create_task(running.reload_weights(new))
        while not (running.engine_loop._changes or reload.done()):  # its folder is looked at first
            await asyncio.sleep(0)
        assert await said_by(running, "behind") == expected and reload.done()
        assert await before == first
        with pytest.raises(CheckpointError, match="nowhere does not exist"):
            await running.reload_weights("nowhere")
        assert await said_by(running, "still") == expected
        calls = [running.reload_weights(weights_iterator=tensors_of(folder).items()) for folder in (new, old)]
        await asyncio.gather(*calls)
        assert await said_by(running, "again") == first

    running = AsyncEngine(llm.engine)
    try:
        asyncio.run(session(running))
    finally:
        running.stop()
    llm.engine.scheduler.check()


def test_an_async_engine_aborts_what_runs(old: Path, new: Path, engine: Engine) -> None:
    llm = engine(old)

    async def session(running: AsyncEngine) -> None:
        running.start()
        tasks = [asyncio.create_task(said_by(running, name)) for name in ("one", "two")]
        while not llm.engine.has_request("two0"):
            await asyncio.sleep(0)
        await running.reload_weights(new, abort=True)
        for task in tasks:
            with pytest.raises(Interrupted, match="send it again"):
                await task
        assert not llm.engine.has_unfinished_requests() and not running.num_completions
        assert await said_by(running) == say(engine(new))

    running = AsyncEngine(llm.engine)
    try:
        asyncio.run(session(running))
    finally:
        running.stop()


@pytest.mark.parametrize("how", ["dies", "stops"])
def test_whoever_waits_for_a_reload_is_told(how: str, old: Path, new: Path, engine: Engine) -> None:
    llm = engine(old)

    def faulty() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(tensors_of(new).items()))
        raise OSError("the disk is gone")

    async def session(running: AsyncEngine) -> None:
        running.start()
        if how == "dies":
            calls = [running.reload_weights(weights_iterator=faulty()), running.reload_weights(new)]
            errors = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(error, EngineDeadError) and "the disk is gone" in str(error) for error in errors)
            return
        runs = await running.generate(["a"], [[5]], GREEDY.clone(max_tokens=200))
        reload = asyncio.create_task(running.reload_weights(new))
        await asyncio.sleep(0)
        running.stop()
        with pytest.raises(EngineDeadError, match="the engine was stopped"):
            await reload
        del runs

    running = AsyncEngine(llm.engine)
    try:
        asyncio.run(session(running))
    finally:
        running.stop()
    assert how == "dies" or say(llm) == say(engine(old)), "it was not begun"


# --------------------------------------------------------------------------- errors before anything is written


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (("nowhere",), CheckpointError, "weights_path=.*nowhere does not exist; pass the folder that holds config.json"),
    ((3,), RequestError, "weights_path=3 is not the path of a folder"),
    (("",), RequestError, "weights_path='' is not the path of a folder"),
    (("x", []), RequestError, "weights_path and weights_iterator are both given"),
    ((None, {"a": 1}), RequestError, r"weights_iterator is a dict, .* STATE_DICT.items\(\)"),
    ((None, 3), RequestError, "weights_iterator is a int"),
    ((None, []), RequestError, "weights_iterator gives nothing"),
    ((None, ["a", "b"]), RequestError, "weights_iterator gives 'a', not a name with its tensor"),
    ((None, [("a", 1)]), RequestError, r"weights_iterator gives \('a', 1\), not a name with its tensor"),
])  # fmt: skip
def test_wrong_arguments_change_nothing(
    arguments: tuple[Any, ...], error: type[Exception], message: str, old: Path, engine: Engine
) -> None:
    llm = engine(old)
    with pytest.raises(error, match=message):
        llm.reload_weights(*arguments)
    as_before(llm, old, engine)


def test_a_folder_that_may_not_be_read_changes_nothing(
    old: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, exists = engine(old), Path.exists

    def refused(path: Path, **how: Any) -> bool:
        if path.name == "secret":
            raise PermissionError(13, "Permission denied")
        return exists(path, **how)

    monkeypatch.setattr(Path, "exists", refused)
    with pytest.raises(CheckpointError, match=r"^weights_path=.*secret cannot be read: Permission denied; pass"):
        llm.reload_weights(old / "secret")
    as_before(llm, old, engine)


def test_a_folder_that_is_no_checkpoint_changes_nothing(old: Path, copy: Callable[..., Path], engine: Engine) -> None:
    folder, llm = copy(), engine(old)
    file = folder / "model.safetensors"
    for path, message in (
        (folder.parent, f"has no config.json.*did you mean weights_path={folder}"),
        (file, f"weights_path={file} is a file; pass the folder"),
    ):
        with pytest.raises(CheckpointError, match=message):
            llm.reload_weights(path)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="is damaged or truncated"):
        llm.reload_weights(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"has no \.safetensors file"):
        llm.reload_weights(folder)
    as_before(llm, old, engine)


@pytest.mark.parametrize(("change", "message"), [
    (lambda tensors: tensors.pop(DOWN), f"1 missing: {DOWN}"),
    (lambda tensors: tensors.update(more=torch.ones(2)), "1 unexpected: more"),
    (lambda tensors: tensors.update({DOWN: tensors[DOWN][1:].contiguous()}), f"1 misshapen: {DOWN}"),
    (lambda tensors: tensors.update({DOWN: tensors[DOWN].to(torch.int8)}), f"1 misshapen: {DOWN} of dtype int8"),
    (lambda tensors: tensors.update({DOWN: tensors[DOWN].to(torch.float8_e4m3fn)}), "1 tensors in FP8"),
])  # fmt: skip
def test_tensors_that_do_not_fit_change_nothing(
    change: Callable[[Tensors], Any], message: str, old: Path, copy: Callable[..., Path], engine: Engine
) -> None:
    llm = engine(old)
    with pytest.raises(CheckpointError, match=message):
        llm.reload_weights(copy(change))
    as_before(llm, old, engine)


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_hidden_layers": 3}, "num_layers=3 instead of 2"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}, "rope_parameters=.*3.0.* instead of .*10000"),
    ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "layer_types": None},
     r"layer_windows=\(None, 8\) instead of \(None, None\)"),
    ({"architectures": ["LlamaForCausalLM"]}, "architecture='LlamaForCausalLM' instead of 'Qwen3ForCausalLM'"),
    ({"model_type": "other"}, "model_type='other' instead of 'qwen3'"),
    ({"vocab_size": 1, "hidden_size": 2, "intermediate_size": 3, "num_attention_heads": 1, "num_key_value_heads": 1},
     "vocab_size=1 instead of 512, hidden_size=2 instead of 64, .* and 1 more; make a new engine"),
])  # fmt: skip
def test_a_checkpoint_of_another_model_changes_nothing(
    changes: dict[str, Any], message: str, old: Path, copy: Callable[..., Path], engine: Engine
) -> None:
    folder, llm = copy(), engine(old)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=f"a checkpoint of another model than the engine's: {message}"):
        llm.reload_weights(folder)
    as_before(llm, old, engine)


def test_an_executor_without_it_says_so(old: Path, new: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(old)
    monkeypatch.setattr(SingleExecutor, "reload_weights", Executor.reload_weights)
    with pytest.raises(RequestError, match=r"SingleExecutor replaces no weights .*; make a new engine"):
        llm.reload_weights(new)
    as_before(llm, old, engine)


# --------------------------------------------------------------------------- errors half-way


@pytest.mark.parametrize("error", [ValueError, RequestError, CheckpointError])
def test_an_iterator_that_raises_ends_the_engine(error: type[Exception], old: Path, new: Path, engine: Engine) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors_of(new).items())[:5]
        raise error("the trainer ran out of memory")

    llm, why = engine(old), f"weights_iterator raised {error.__name__}: the trainer ran out of memory"
    with pytest.raises(EngineDeadError, match=why):
        llm.reload_weights(weights_iterator=weights())
    is_dead(llm, why)
    llm.shutdown()


def test_a_model_that_refuses_halfway_ends_the_engine(
    old: Path, new: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A RequestError of its own would say that nothing was written."""

    def refuses(self: Any, weights: Any) -> None:
        next(self.parameters()).data.zero_()
        raise RequestError("not these")

    llm = engine(old)
    model = type(llm.engine.executor._worker.runner.model)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "load_weights", refuses)
    tensors = tensors_of(new)
    with pytest.raises(EngineDeadError, match=r"load_weights raised .*not these"):
        llm.reload_weights(weights_iterator=tensors.items())
    is_dead(llm, "not these")


def test_an_iterator_that_lacks_a_tensor_ends_the_engine(old: Path, new: Path, engine: Engine) -> None:
    tensors, llm = tensors_of(new), engine(old)
    del tensors[DOWN]
    with pytest.raises(EngineDeadError, match=f"make a new engine.*1 missing: {DOWN}") as e:
        llm.reload_weights(weights_iterator=tensors.items())
    assert isinstance(e.value.__cause__, CheckpointError)
    is_dead(llm, f"1 missing: {DOWN}")


@pytest.mark.parametrize(("quantization", "why"), [("none", "hold infinity or NaN"), ("fp8", "no finite number")])
def test_what_is_no_number_ends_the_engine(
    quantization: str, why: str, old: Path, copy: Callable[..., Path], engine: Engine
) -> None:
    llm = engine(old, quantization=quantization)
    with pytest.raises(EngineDeadError, match=why):
        llm.reload_weights(copy(lambda tensors: tensors[DOWN].fill_(float("inf"))))
    is_dead(llm, why)


def test_ctrl_c_ends_the_engine_if_it_does_not_wait(old: Path, new: Path, engine: Engine) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors_of(new).items())[:5]
        raise KeyboardInterrupt

    llm = engine(old)
    with pytest.raises(KeyboardInterrupt):
        llm.reload_weights(weights_iterator=weights())
    is_dead(llm, "KeyboardInterrupt")
