"""LoRA adapters of single requests: each answers as a model into whose weights its adapter was merged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import edit_json, reference_tokens, save_adapter
from safetensors.torch import load_file, save_file

from minivllm import LLM, SamplingParams, cli
from minivllm.errors import AdapterError, BusyError, ConfigError, EngineDeadError, RequestError
from minivllm.executors.messages import Answer
from minivllm.executors.multiproc import MultiprocExecutor
from minivllm.layers.linear import _StackedLinear
from minivllm.lora.request import LoRARequest
from minivllm.models.checkpoint import DEMO
from minivllm.models.loader import iterate_safetensors

Checkpoints = Callable[..., Path]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHARED = [*range(100, 148)]  # three blocks
PROMPTS = [[1, 5, 300], [*SHARED, 7], [*SHARED, 9], [7]]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
Q_OF_0 = "base_model.model.model.layers.0.self_attn.q_proj"


class World:
    """A checkpoint, three adapters for it, of different layers and ranks, and what each of their models says."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home = folder, home
        self.requests: list[LoRARequest | None] = [None]
        self._said: dict[tuple[int, int], list[int]] = {}
        self._merged = [folder]
        for number, (modules, rank) in enumerate([(ALL, 4), (("q_proj", "down_proj"), 8), (("v_proj", "up_proj"), 2)]):
            name = f"adapter{number}"
            changes = save_adapter(home / name, folder, modules, rank=rank, seed=number)
            self.requests.append(LoRARequest(name, number + 1, str(home / name)))
            tensors = {its: tensor.clone() for its, tensor in iterate_safetensors(folder)}
            for its, change in changes.items():
                tensors[its] += 2 * change
            merged = home / f"merged{number}"
            merged.mkdir()
            for file in folder.iterdir():
                if file.suffix == ".json" and "index" not in file.name:
                    (merged / file.name).write_bytes(file.read_bytes())
            save_file(tensors, merged / "model.safetensors", {"format": "pt"})
            self._merged.append(merged)

    def says(self, adapter: int, prompt: int) -> list[int]:
        """What transformers says with this adapter (0: none) merged."""
        key = adapter, prompt
        if key not in self._said:
            self._said[key] = reference_tokens(self._merged[adapter], PROMPTS[prompt], GREEDY.max_tokens or 0)
        return self._said[key]

    def check(self, llm: LLM, adapters: list[int], **options: Any) -> None:
        """Every prompt with each of these adapters, all at once."""
        pairs = [(adapter, prompt) for prompt in range(len(PROMPTS)) for adapter in adapters]
        its = [self.requests[adapter] for adapter, _ in pairs]
        outputs = llm.generate([PROMPTS[p] for _, p in pairs], GREEDY, use_tqdm=False, lora_request=its, **options)
        assert [o.outputs[0].token_ids for o in outputs] == [self.says(*pair) for pair in pairs]
        assert [o.lora_request for o in outputs] == its
        llm.engine.scheduler.check()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def world(tiny_checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tiny_checkpoint("qwen3", shards=2), tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def make(world: World) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def new(folder: Path | None = None, *overrides: str, **options: Any) -> LLM:
        given = {"enable_lora": True, "max_loras": 3, "num_gpu_blocks_override": 64} | options
        made.append(LLM(str(folder or world.folder), device="cpu", overrides=list(overrides), **given))
        return made[-1]

    yield new
    for llm in made:
        llm.shutdown()


# --------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("scheduler.max_num_batched_tokens=16", "scheduler.max_num_seqs=5"),  # prompts in chunks, slots used again
        ("cache.num_blocks=12",),  # preemptions
        ("scheduler=prefill_first", "scheduler.async_scheduling=false"),
        ("scheduler.num_speculative_tokens=3", "scheduler.prompt_lookup_min=1"),
        ("attention=torch", "cache.enable_prefix_caching=false"),
    ],
    ids=str,
)
def test_requests_of_one_batch_have_their_own(world: World, make: Callable[..., LLM], overrides: tuple[str]) -> None:
    llm = make(None, *overrides)
    for _ in range(2):  # then with cached prefixes
        world.check(llm, [0, 1, 2, 3])
    assert llm.engine.list_loras() == {1, 2, 3}
    assert len({str(world.says(adapter, 1)) for adapter in range(4)}) == 4


def test_other_architectures(tiny_checkpoint: Checkpoints, tmp_path: Path, make: Callable[..., LLM]) -> None:
    its = World(tiny_checkpoint("llama", tie_word_embeddings=True), tmp_path)
    its.check(make(its.folder), [0, 1, 2, 3])


@pytest.mark.usefixtures("forked_ranks")
def test_on_two_ranks(world: World, make: Callable[..., LLM]) -> None:
    llm = make(tp=2)
    for _ in range(2):
        world.check(llm, [0, 1, 2, 3])


@pytest.mark.usefixtures("forked_ranks")
def test_a_folder_that_changes_while_ranks_read_it(
    world: World, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is refused; nothing was written, and the engine runs on."""
    its = world.requests[1]
    assert its is not None
    llm, folder, tell_all = make(tp=2, max_loras=1), tmp_path / "moving", MultiprocExecutor.tell_all
    save_adapter(folder, world.folder, ["q_proj"])
    world.check(llm, [1])

    def gone(self: MultiprocExecutor, method: str, argument: str) -> list[Answer]:
        (folder / "adapter_model.safetensors").rename(tmp_path / "kept")
        try:
            return tell_all(self, method, argument)
        finally:
            (tmp_path / "kept").rename(folder / "adapter_model.safetensors")

    def two_versions(self: MultiprocExecutor, method: str, argument: str) -> list[Answer]:
        first, _ = tell_all(self, method, argument)
        save_adapter(folder, world.folder, ["q_proj"], seed=9)
        return [first, tell_all(self, method, argument)[1]]

    for tells, why in ((gone, "moving/adapter_model.safetensors cannot be read"), (two_versions, "moving was written")):
        monkeypatch.setattr(MultiprocExecutor, "tell_all", tells)
        with pytest.raises(AdapterError, match=why):
            llm.engine.add_lora(LoRARequest("moving", 9, str(folder)))
        monkeypatch.undo()
        assert llm.engine.list_loras() == {its.lora_int_id}
        world.check(llm, [1])
    assert llm.engine.add_lora(LoRARequest("moving", 9, str(folder)))


def test_norms_that_are_folded_into_weights(
    world: World, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a GPU; also after other weights were loaded, whose norms are others."""
    monkeypatch.setattr(_StackedLinear, "foldable", property(_StackedLinear._may_fold))
    llm = make()
    world.check(llm, [0, 1, 2, 3])
    (tmp_path / "other").mkdir()
    for file in world.folder.glob("*.json"):
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    tensors = dict(iterate_safetensors(world.folder))
    for name in tensors:
        if name.endswith("layernorm.weight"):
            tensors[name] = tensors[name] * torch.linspace(0.5, 2, len(tensors[name]))
    (tmp_path / "other" / "model.safetensors.index.json").unlink()
    save_file(tensors, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    (tmp_path / "adapters").mkdir()
    others = World(tmp_path / "other", tmp_path / "adapters")
    others.requests = world.requests  # the same numbers
    llm.reload_weights(others.folder)
    assert llm.engine.list_loras() == set()
    others.check(llm, [0, 1, 2, 3])
    assert others.says(1, 1) != world.says(1, 1)


def test_the_checkpoint_in_fp8(world: World, make: Callable[..., LLM]) -> None:
    """Weights are rounded, adapters are not: what an adapter changes in log-probabilities is as without."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    its, found = world.requests[1], []
    for quantization in ("none", "fp8"):
        llm = make(quantization=quantization)
        both = [llm.generate([SHARED], params, use_tqdm=False, lora_request=one)[0] for one in (None, its)]
        plain, adapted = (
            torch.tensor([next(iter(one.values())).logprob for one in o.prompt_logprobs[1:]]) for o in both
        )
        found.append(adapted - plain)
    assert found[0].norm() > 1
    assert (found[1] - found[0]).norm() < 0.5 * found[0].norm()


def test_scores_of_prompts_and_samples(world: World, make: Callable[..., LLM]) -> None:
    llm, merged = make(), make(None, f"model.lora={world.home / 'adapter0'}", enable_lora=False, max_loras=1)
    params = SamplingParams(seed=3, n=2, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    [ours], [theirs] = (
        one.generate([SHARED], params, use_tqdm=False, lora_request=its)
        for one, its in ((llm, world.requests[1]), (merged, None))
    )
    for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
        assert mine.token_ids == other.token_ids
    for a, b in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
        assert a.keys() == b.keys()
        assert all(abs(a[token].logprob - b[token].logprob) < 1e-3 for token in a)


def test_a_conversation(make: Callable[..., LLM], tmp_path: Path) -> None:
    llm = make(Path("demo"))
    save_adapter(tmp_path / "one", DEMO, ALL, seed=3)
    one = LoRARequest("one", 1, str(tmp_path / "one"))
    say = [{"role": "user", "content": "What is the capital of France?"}]
    plain = llm.chat(say, GREEDY, use_tqdm=False)[0].outputs[0].text
    other = llm.chat(say, GREEDY, use_tqdm=False, lora_request=one)[0].outputs[0].text
    assert other != plain == llm.chat(say, GREEDY, use_tqdm=False)[0].outputs[0].text


# --------------------------------------------------------------------------- places


def test_more_adapters_than_places(world: World, make: Callable[..., LLM]) -> None:
    llm = make(max_loras=2)
    for adapters in ([1, 2], [0, 3], [1, 2], [2, 3], [1], [3]):
        world.check(llm, adapters)
    assert llm.engine.list_loras() == {1, 3}
    why = "all of max_loras=2 adapters are in use by unfinished requests; raise max_loras, or ask again when some have"
    for adapters in ([1, 2, 3], [3, 0, 2, 1]):  # some wait for others
        world.check(llm, adapters)
    for adapter in (1, 2):
        llm.engine.add_request(str(adapter), PROMPTS[0], GREEDY, lora_request=world.requests[adapter])
    with pytest.raises(BusyError, match=why):
        llm.engine.add_request("3", PROMPTS[0], GREEDY, lora_request=world.requests[3])
    world.check(llm, [3])


def test_who_waits_for_a_place_may_be_refused(world: World, make: Callable[..., LLM], tmp_path: Path) -> None:
    """The others are then dropped, as ever."""
    llm, gone = make(max_loras=1), LoRARequest("gone", 9, str(tmp_path / "gone"))
    with pytest.raises(RequestError, match=r"prompt 1: lora_path=.*/gone does not exist"):
        llm.generate([[1], [2]], GREEDY, use_tqdm=False, lora_request=[world.requests[1], gone])
    assert not llm.engine.has_unfinished_requests()
    world.check(llm, [1, 2, 0])


def test_one_arrives_while_others_run(world: World, make: Callable[..., LLM]) -> None:
    """Its place may be one that steps in flight have just read."""
    llm = make(max_loras=2)
    engine, said = llm.engine, {}
    order = [1, 2, 1, 0, 3, 2, 3, 1]
    waiting = list(enumerate(order))
    while waiting or engine.has_unfinished_requests():
        while waiting:
            at, adapter = waiting[0]
            try:
                engine.add_request(str(at), PROMPTS[1], GREEDY, lora_request=world.requests[adapter])
            except RequestError:
                break
            waiting.pop(0)
            for output in engine.step():
                said[int(output.request_id)] = output.outputs[0].token_ids
        for output in engine.step():
            said[int(output.request_id)] = output.outputs[0].token_ids
    assert said == {at: world.says(adapter, 1) for at, adapter in enumerate(order)}


def test_add_remove_and_list(world: World, make: Callable[..., LLM], tmp_path: Path) -> None:
    engine = (llm := make(max_loras=1)).engine
    one, two = world.requests[1:3]
    assert one is not None and two is not None
    assert engine.list_loras() == set() and engine.add_lora(one) and engine.list_loras() == {1}
    with pytest.raises(
        RequestError, match=r"lora_int_id=1 is adapter0 of .*, not other of .*; choose another, or call rem"
    ):
        engine.add_lora(LoRARequest("other", 1, two.lora_path))
    assert engine.remove_lora(1) and not engine.remove_lora(1)
    other = LoRARequest("other", 1, two.lora_path)
    assert engine.add_lora(other)
    told = llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False, lora_request=other)
    assert told[0].outputs[0].token_ids == world.says(2, 1)
    engine.add_request("a", PROMPTS[0], GREEDY, lora_request=other)
    with pytest.raises(RequestError, match="lora_int_id=1 is not removed under unfinished requests that have it"):
        engine.remove_lora(1)
    with pytest.raises(RequestError, match="lora_int_id=1 is not loaded again under unfinished requests that have it"):
        engine.add_lora(LoRARequest("other", 1, two.lora_path, load_inplace=True))
    engine.abort("a")
    assert engine.remove_lora(1)


def test_a_folder_is_read_again_if_it_shall_be(world: World, make: Callable[..., LLM], tmp_path: Path) -> None:
    llm, folder = make(), tmp_path / "trained"
    save_adapter(folder, world.folder, ALL, seed=0)
    mine = LoRARequest("mine", 9, str(folder), load_inplace=True)
    plain = replace(mine, load_inplace=False)

    def say() -> list[int]:
        return list(llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False, lora_request=plain)[0].outputs[0].token_ids)

    assert say() == world.says(1, 1)
    save_adapter(folder, world.folder, ["q_proj", "down_proj"], rank=8, seed=1)
    assert say() == world.says(1, 1)
    assert llm.engine.add_lora(mine)
    assert say() == world.says(2, 1)  # and no prefix that is cached of the former
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(RequestError, match=f"lora_path={folder} has no adapter_model.safetensors"):
        llm.engine.add_lora(mine)
    assert say() == world.says(2, 1)


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_up(world: World, make: Callable[..., LLM], level: int) -> None:
    llm = make(enable_sleep_mode=True)
    world.check(llm, [0, 1, 2])
    llm.sleep(level)
    with pytest.raises(RequestError, match=r"the engine sleeps; call wake_up\(\) first"):
        llm.engine.add_lora(world.requests[3])
    llm.wake_up()
    if level == 2:
        llm.reload_weights()
    world.check(llm, [0, 1, 2, 3])


# --------------------------------------------------------------------------- what cannot be


def test_without_enable_lora(world: World, make: Callable[..., LLM]) -> None:
    llm = make(enable_lora=False, max_loras=1)
    for call in (
        lambda: llm.generate([[1]], GREEDY, use_tqdm=False, lora_request=world.requests[1]),
        lambda: llm.engine.add_lora(world.requests[1]),
    ):
        with pytest.raises(RequestError, match=r"made without adapters of single requests; type enable_lora=true"):
            call()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("", 1, "x"), "lora_name='' is not a name"),
        ((5, 1, "x"), "lora_name=5 is not a name"),
        (("a\nb", 1, "x"), r"lora_name='a\\nb' is not a name, which is text without control characters"),
        (("a\x7f", 1, "x"), r"lora_name='a\\x7f' is not a name"),
        (("a\u2028b", 1, "x"), r"lora_name='a\\u2028b' is not a name"),
        (("a", 0, "x"), "lora_int_id=0 is not a whole number from 1 on"),
        (("a", True, "x"), "lora_int_id=True is not a whole number from 1 on"),
        (("a", "1", "x"), "lora_int_id='1' is not a whole number from 1 on"),
        (("a", 1, ""), "lora_path='' is not the path of a folder, nor ORG/NAME"),
        (("a", 1, None), "lora_path=None is not the path of a folder, nor ORG/NAME"),
        (("a", 1, "x", "yes"), "load_inplace='yes' is not True or False"),
    ],
)
def test_what_is_no_request(given: tuple[Any, ...], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        LoRARequest(*given)


@pytest.mark.parametrize("name", ["sql", "my sql: v1.5/ä", "🏳\ufe0f\u200d🌈"])
def test_names(name: str) -> None:
    assert LoRARequest(name, 1, "x").name == name


@pytest.mark.parametrize("name", ["base_model_name", "tensorizer_config_dict"])
def test_fields_that_change_nothing(name: str) -> None:
    assert LoRARequest("a", 1, "x", **{name: None}) == LoRARequest("a", 1, "x")
    with pytest.raises(RequestError, match=f"{name}='y' is not supported; leave it out"):
        LoRARequest("a", 1, "x", **{name: "y"})


def test_requests_that_are_refused(world: World, make: Callable[..., LLM], tmp_path: Path) -> None:
    llm = make(max_lora_rank=4)

    def refused(its: Any, why: str, prompts: int = 1) -> None:
        with pytest.raises(RequestError, match=why):
            llm.generate([[1]] * prompts, GREEDY, use_tqdm=False, lora_request=its)
        assert not llm.engine.has_unfinished_requests()

    def adapter(modules: tuple[str, ...] = ("q_proj",), change: Callable[[dict], object] | None = None, **config: Any):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        save_adapter(folder, world.folder, modules, **config)
        if change is not None:
            tensors = load_file(folder / "adapter_model.safetensors")
            change(tensors)
            save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        return LoRARequest("x", 7, str(folder))

    refused(str(world.home / "adapter0"), r"lora_request='.*' is not LoRARequest\(NAME, ID, DIR\)")
    its = world.requests[1]
    assert its is not None
    refused(replace(its, load_inplace=True), "load_inplace=True is for add_lora: call that, and leave it out of req")
    with pytest.raises(TypeError, match=r"there is no argument 'lora_requests'\. Did you mean lora_request\?"):
        llm.generate([[1]], GREEDY, lora_requests=[its])
    refused([None], "2 prompts with 1 lora_requests; give one for all or one per prompt", 2)
    refused(LoRARequest("x", 7, "/nowhere"), "lora_path=/nowhere does not exist; pass a folder that holds adapter_conf")
    refused(LoRARequest("x", 7, str(world.folder)), r"lora_path=.* holds a checkpoint \(config.json\), no adapter")
    refused(world.requests[2], r"lora_path=.*/adapter1 is of rank 8; type max_lora_rank=8, which is 4$")
    refused(adapter(("q_proj", "lm_head")), "2 for what takes none of single requests, as embeddings.*: .*lm_head")
    refused(adapter(("q_proj", "embed_tokens")), "for what takes none of single requests.*embed_tok")
    refused(adapter(modules_to_save=["norm"]), "1 missing: norm, which modules_to_save names")
    whole = {"base_model.model.model.norm.weight": torch.ones(64)}
    refused(
        adapter(change=lambda its: its.update(whole), modules_to_save=["norm"]),
        r"1 whole tensors \(modules_to_save\), which requests cannot have of their own: base_model.model.model.norm",
    )
    wide = {f"{Q_OF_0}.lora_A.weight": torch.ones(4, 65)}
    refused(
        adapter(change=lambda its: its.update(wide)), r"misshapen: for model.*q_proj.weight \[128, 65\] where the m"
    )
    far = {
        f"{Q_OF_0.replace('.0.', '.9.')}.lora_{x}.weight": torch.ones(s) for x, s in (("A", (4, 64)), ("B", (128, 4)))
    }
    refused(adapter(change=lambda its: its.update(far)), "2 for no tensor of the model: .*layers.9")
    refused(adapter(use_dora=True), "use_dora=True, and DoRA also scales the merged weights")
    nan = {f"{Q_OF_0}.lora_A.weight": torch.full((4, 64), float("nan"))}
    refused(adapter(change=lambda its: its.update(nan)), "1 with infinity or NaN")
    broken = adapter()
    edit_json(Path(broken.lora_path) / "adapter_config.json", r="four")
    refused(broken, "lora_path: .*adapter_config.json: r='four'")
    (Path(broken.lora_path) / "adapter_config.json").write_text("[" * 100_000)
    refused(broken, "lora_path: .*adapter_config.json is not readable as JSON .maximum recursion depth")
    with pytest.raises(RequestError, match=r"lora_int_id=\[1\] is not a whole number"):
        llm.engine.remove_lora([1])  # type: ignore[arg-type]
    world.check(llm, [0, 1])


@pytest.mark.parametrize(("dtype", "alpha"), [("float16", 2e6), ("float32", 1e41)])
def test_what_is_too_large_for_the_dtype(
    world: World, make: Callable[..., LLM], tmp_path: Path, dtype: str, alpha: float
) -> None:
    """In a kernel's block it would make NaN of other requests' rows, too."""
    llm, large = make(dtype=dtype), LoRARequest("large", 9, str(tmp_path / "large"))
    save_adapter(tmp_path / "large", world.folder, ["q_proj"], lora_alpha=alpha)
    with pytest.raises(RequestError, match=f"2 too large for {dtype}: model.layers.0.self_attn.q_proj.weight"):
        llm.engine.add_lora(large)
    save_adapter(tmp_path / "large", world.folder, ["q_proj"], lora_alpha=1000)
    assert llm.engine.add_lora(large)


def test_places_that_take_too_much(make: Callable[..., LLM]) -> None:
    with pytest.raises(
        ConfigError, match=r"max_loras=1000000000 of max_lora_rank=16 take \d+\.\d GiB beside the weights"
    ):
        make(max_loras=1_000_000_000)


def test_values_of_the_keys() -> None:
    with pytest.raises(ConfigError, match="max_loras=0"):
        LLM("demo", device="cpu", enable_lora=True, max_loras=0)
    with pytest.raises(ConfigError, match="lora_dtype='float32': adapters are kept in dtype"):
        LLM("demo", device="cpu", enable_lora=True, lora_dtype="float32")


def test_an_executor_that_takes_none(world: World, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    from minivllm.core.interfaces import Executor
    from minivllm.executors.single import SingleExecutor

    llm = make()
    monkeypatch.setattr(SingleExecutor, "load_adapter", Executor.load_adapter)
    with pytest.raises(RequestError, match="SingleExecutor takes no LoRA adapters of single requests"):
        world.check(llm, [1])
    world.check(llm, [0])

    assert llm.engine.list_loras() == set()
    monkeypatch.undo()
    world.check(llm, [1, 2, 3])

    def changed(self: SingleExecutor, place: int, folder: Path) -> None:
        raise RequestError("the folder has changed")

    monkeypatch.setattr(SingleExecutor, "load_adapter", changed)
    its = world.requests[2]
    assert its is not None
    for again in (replace(its, load_inplace=True), replace(its, lora_name="other", lora_int_id=9)):
        with pytest.raises(RequestError, match="the folder has changed"):
            llm.engine.add_lora(again)
    assert llm.engine.list_loras() == {1, 2, 3}, "what a refused load would have replaced is still there"
    world.check(llm, [1, 2, 3])

    def fails(self: SingleExecutor, place: int, folder: Path) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(SingleExecutor, "load_adapter", fails)
    assert llm.engine.remove_lora(1)
    with pytest.raises(
        EngineDeadError, match="make a new engine: loading an adapter failed: OSError: the disk is gone"
    ):
        world.check(llm, [1])


# --------------------------------------------------------------------------- the command line


def test_a_line_that_is_refused_is_named(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('"ok"\n\n\n{"prompt": "a", "lora_path": "/nowhere"}\n')
    assert cli.main(["device=cpu", "enable_lora=true", f"prompts_file={tmp_path}/in.jsonl", "output=-"]) == 1
    assert f"minivllm: {tmp_path}/in.jsonl, line 4: lora_path=/nowhere does not exist" in capsys.readouterr().err
    assert cli.main(["device=cpu", "lora_modules.sql=/x"]) == 2
    assert "lora_modules is a key of mode serve, not of mode generate" in capsys.readouterr().err
    assert cli.main(["device=cpu", "max_lora_rank=32"]) == 2
    assert "max_lora_rank=32: the engine would have no adapters of single requests; add" in capsys.readouterr().err


def test_a_line_that_names_another_model(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server would have an adapter of that name; without adapters the key means nothing."""
    its, file = world.requests[1], tmp_path / "in.jsonl"
    assert its is not None
    lines = [
        {"prompt": "a", "model": str(world.folder)}, {"prompt": "a", "model": None},
        {"prompt": "a", "model": "sql", "lora_path": its.lora_path},
    ]  # fmt: skip
    typed = [f"model.path={world.folder}", "device=cpu", f"prompts_file={file}", "cache.num_blocks=64", "max_tokens=1"]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert cli.main([*typed, "enable_lora=true"]) == 0
    file.write_text('{"prompt": "a"}\n{"prompt": "a", "model": "sql"}')
    assert cli.main(typed) == 0
    capsys.readouterr()
    assert cli.main([*typed, "enable_lora=true"]) == 2
    said = f"{file}, line 2 has model='sql', which is another than the one that runs; a line's adapter is its lora_path"
    assert said in capsys.readouterr().err


def test_lines_of_a_prompts_file(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        {"prompt_token_ids": PROMPTS[1]} | ({"lora_path": its.lora_path} if its else {})
        for its in (*world.requests, world.requests[1])
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    typed = [f"model.path={world.folder}", "device=cpu", f"prompts_file={tmp_path}/in.jsonl", "cache.num_blocks=64"]
    typed += ["max_tokens=10", "temperature=0", "ignore_eos=true", f"output={tmp_path}/out.jsonl"]
    assert cli.main([*typed, "enable_lora=true", "max_loras=2"]) == 0
    said = [json.loads(line)["token_ids"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert said == [world.says(adapter, 1) for adapter in (0, 1, 2, 3, 1)]
    capsys.readouterr()
    assert cli.main(typed) == 1
    assert "in.jsonl, line 2: lora_request: the engine was made without" in capsys.readouterr().err
