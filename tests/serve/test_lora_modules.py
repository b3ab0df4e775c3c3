"""Adapters by name on a server: a request's ``model`` chooses one, and they may come and go while it runs."""

from __future__ import annotations

import asyncio
import queue
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers import edit_json, save_adapter
from running import OVERRIDES, Running, serving, told, until
from streams import joined, streamed, whole
from test_process import Process
from test_reload_weights import Asked

from minivllm import LLM, SamplingParams, cli
from minivllm.core.lora_request import LoRARequest
from minivllm.errors import BusyError, CheckpointError, ConfigError, ContextLengthError, RequestError
from minivllm.serve.app import create_app
from minivllm.serve.async_engine import AsyncEngine
from minivllm.serve.engine_loop import EngineLoop
from minivllm.serve.handshake import ServerOptions
from minivllm.serve.messages import Abort, Add

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = [5, 9, 300, 17, 42]
SHORT = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = SHORT | {"max_tokens": 400}
HELLO = [{"role": "user", "content": "hello"}]
NAMES = ("sql", "poet", "chess")
WITH_LORA = ("enable_lora=true", "max_loras=2")


@pytest.fixture(scope="module")
def adapters(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    home, found = tmp_path_factory.mktemp("adapters"), []
    for number, name in enumerate(NAMES, start=1):
        save_adapter(home / name, tiny_checkpoint("qwen3"), ["q_proj", "o_proj", "up_proj"], seed=number)
        found.append(LoRARequest(name, number, str(home / name)))
    return found


@pytest.fixture(scope="module")
def says(make_llm: Callable[..., LLM], adapters: list[LoRARequest]) -> dict[str, str]:
    """What ``LLM.generate`` says to ``SHORT`` with each of them, and without."""
    llm = make_llm("enable_lora=true", "max_loras=3", "cache.enable_prefix_caching=false")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    named: list[LoRARequest | None] = [None, *adapters]
    outputs = llm.generate([PROMPT] * len(named), params, use_tqdm=False, lora_request=named)
    found = {its.lora_name if its else "tiny": o.outputs[0].text for its, o in zip(named, outputs, strict=True)}
    assert len(set(found.values())) == len(named)
    return found


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm(*WITH_LORA, "enable_sleep_mode=true")


@pytest.fixture
def server(llm: LLM, adapters: list[LoRARequest]) -> Iterator[Running]:
    """It has more adapters than places."""
    options = {"allow_runtime_lora_updating": True, "enable_sleep_mode": True, "allow_reload": True}
    with serving(llm, adapters=tuple(adapters), **options) as running:
        yield running
        running.settled()
    for number in llm.engine.list_loras():
        llm.engine.remove_lora(number)


def answer_of(running: Running, model: str, **more: Any) -> str:
    response = running.post(COMPLETIONS, **SHORT, model=model, **more)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    text: str = response.json()["choices"][0]["text"]
    return text


def names(running: Running) -> list[str]:
    return [model["id"] for model in running.get("/v1/models").json()["data"]]


def path_of(adapters: Sequence[LoRARequest], name: str) -> str:
    return next(one.lora_path for one in adapters if one.lora_name == name)


# --------------------------------------------------------------------------- requests


def test_the_model_of_a_request_may_be_an_adapter(server: Running, says: dict[str, str]) -> None:
    for name in ("tiny", *NAMES, *NAMES, "tiny"):  # they take turns in the two places
        assert answer_of(server, name) == says[name], name
    together = [Asked(server, COMPLETIONS, **SHORT, model=name) for name in ("sql", "tiny", "poet", "sql")]
    for one, name in zip(together, ("sql", "tiny", "poet", "sql"), strict=True):
        assert one.answer().json()["choices"][0]["text"] == says[name]


def test_of_a_stream_and_of_several_prompts(server: Running, says: dict[str, str]) -> None:
    chunks = streamed(server.client, COMPLETIONS, SHORT | {"model": "poet"})
    assert {chunk["model"] for chunk in chunks} == {"poet"}
    assert joined(chunks, chat=False)[0]["text"] == says["poet"]
    answer = server.post(COMPLETIONS, **SHORT | {"prompt": [PROMPT, PROMPT]}, model="sql").json()
    assert [choice["text"] for choice in answer["choices"]] == [says["sql"]] * 2


def test_a_chat(server: Running, adapters: list[LoRARequest], make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    theirs = make_llm("enable_lora=true").chat(HELLO, params, use_tqdm=False, lora_request=adapters[1])
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 8, "model": "poet"}
    answer = server.post(CHAT, **body).json()
    chunks = streamed(server.client, CHAT, body)
    assert answer["model"] == "poet" and {chunk["model"] for chunk in chunks} == {"poet"}
    for choices in (whole(answer, chat=True), joined(chunks, chat=True)):
        assert choices[0]["text"] == theirs[0].outputs[0].text
    assert server.post(CHAT, **body | {"model": "tiny"}).json()["choices"] != answer["choices"]


def test_tokens_are_the_model_s(server: Running) -> None:
    tokens = server.post("/tokenize", prompt="hello", model="sql").json()
    assert tokens == server.post("/tokenize", prompt="hello").json()
    assert server.post("/detokenize", tokens=tokens["tokens"], model="sql").json() == {"prompt": "hello"}


def test_another_name_is_not_found(server: Running) -> None:
    there = "there is no model 'sq' here; this server has 'tiny', 'sql', 'poet', 'chess'"
    for path, body in ((COMPLETIONS, SHORT), (CHAT, {"messages": HELLO}), ("/tokenize", {"prompt": "a"})):
        error = told(server.post(path, **body, model="sq"), 404, there, "model")
        assert error["code"] == "model_not_found"


def test_who_finds_no_place_waits_for_one(
    server: Running, says: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody for them: the model's own requests, and those of the adapters that are there, go on."""
    server.slow_down(monkeypatch, 0.02)
    run = [Asked(server, COMPLETIONS, **LONG, model=name) for name in ("sql", "poet")]
    until(lambda: server.engine_loop.num_running == 2)
    waiting = [
        Asked(server, COMPLETIONS, **SHORT | {"prompt": prompt}, model="chess") for prompt in (PROMPT, [PROMPT, PROMPT])
    ]
    until(lambda: server.engine_loop.num_waiting == 3)
    told(server.post(UNLOAD, lora_name="chess"), 400, "is not removed under waiting requests that have it", "lora_name")
    assert [answer_of(server, name) for name in ("tiny", "sql")] == [says["tiny"], says["sql"]]
    assert server.engine_loop.num_waiting == 3 and not any(not one.is_alive() for one in waiting)
    monkeypatch.undo()
    assert [one.answer().status_code for one in run] == [200, 200]
    texts = [[choice["text"] for choice in one.answer().json()["choices"]] for one in waiting]
    assert texts == [[says["chess"]], [says["chess"]] * 2]


def test_others_go_before_them_only_so_often(
    server: Running, says: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.slow_down(monkeypatch, 0.02)
    run = [Asked(server, COMPLETIONS, **LONG, model=name) for name in ("sql", "poet")]
    until(lambda: server.engine_loop.num_running == 2)
    first = Asked(server, COMPLETIONS, **SHORT, model="chess")
    until(lambda: server.engine_loop.num_waiting == 1)
    monkeypatch.setattr(server.engine_loop, "_overtaken", server.engine.config.scheduler.max_num_seqs)
    behind = Asked(server, COMPLETIONS, **SHORT, model="sql")
    until(lambda: server.engine_loop.num_waiting == 2)
    assert answer_of(server, "tiny") == says["tiny"]
    assert server.engine_loop.num_waiting == 2
    monkeypatch.undo()
    answers = [one.answer().json()["choices"][0]["text"] for one in (first, behind)]
    assert answers == [says["chess"], says["sql"]]
    assert [one.answer().status_code for one in run] == [200, 200]
    assert server.engine_loop._overtaken == 0


def test_each_prompt_that_goes_before_them_counts(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.slow_down(monkeypatch, 0.02)
    run = [Asked(server, COMPLETIONS, **LONG, model=name) for name in ("sql", "poet")]
    until(lambda: server.engine_loop.num_running == 2)
    first = Asked(server, COMPLETIONS, **SHORT, model="chess")
    until(lambda: server.engine_loop.num_waiting == 1)
    assert server.post(COMPLETIONS, **SHORT | {"prompt": [PROMPT] * 3, "max_tokens": 1}, model="sql").status_code == 200
    assert server.engine_loop._overtaken == 3
    monkeypatch.undo()
    assert [one.answer().status_code for one in (first, *run)] == [200, 200, 200]


def test_a_batch_that_is_refused_leaves_its_place(llm: LLM, adapters: list[LoRARequest]) -> None:
    """After its first prompt was accepted, when nobody else has its adapter any more."""
    loop = EngineLoop(llm.engine, queue.SimpleQueue(), lambda message: None)
    forever = SamplingParams(max_tokens=400, ignore_eos=True)

    def add(name: str, adapter: LoRARequest, *prompts: list[int]) -> None:
        names = tuple(f"{name}{number}" for number in range(len(prompts)))
        loop._do(Add(names, prompts, forever, None, 0, time.perf_counter(), adapter))

    sql, poet, chess = adapters
    for name, adapter in (("a", sql), ("b", poet), ("waits", chess)):
        add(name, adapter, PROMPT)
        assert loop._add_next() == ([(f"{name}0", None)] if name != "waits" else [])
    add("refused", poet, PROMPT, [5] * 10_000)
    assert loop._add_next() == []
    loop._do(Abort(("b0",)))
    assert len(loop._placeless) == 1
    ((name, error),) = loop._add_next()
    assert (name, type(error)) == ("refused0", ContextLengthError)
    assert not loop._placeless and loop._add_next() == [("waits0", None)]
    llm.engine.abort(["a0", "waits0"])
    for number in llm.engine.list_loras():
        llm.engine.remove_lora(number)


def test_its_folder_is_gone_when_it_is_needed_again(
    server: Running, adapters: list[LoRARequest], says: dict[str, str], tmp_path: Path
) -> None:
    """Its client has done nothing wrong, and others are answered."""
    folder = tmp_path / "here"
    shutil.copytree(path_of(adapters, "sql"), folder)
    assert server.post(LOAD, lora_name="x", lora_path=str(folder)).status_code == 200
    assert answer_of(server, "x") == says["sql"]
    assert [answer_of(server, name) for name in ("poet", "chess")] == [says["poet"], says["chess"]]
    folder.rename(tmp_path / "elsewhere")
    error = told(server.post(COMPLETIONS, **SHORT, model="x"), 500, "this model's adapter cannot be loaded, or no lo")
    assert (error["type"], error["code"]) == ("server_error", "adapter_lost")
    assert answer_of(server, "poet") == says["poet"]
    (tmp_path / "elsewhere").rename(folder)
    assert answer_of(server, "x") == says["sql"]
    assert server.post(UNLOAD, lora_name="x").status_code == 200


def test_who_goes_away_waits_no_more(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.slow_down(monkeypatch, 0.02)
    run = [Asked(server, COMPLETIONS, **LONG, model=name) for name in ("sql", "poet")]
    until(lambda: server.engine_loop.num_running == 2)
    with pytest.raises(httpx.ReadTimeout):
        server.client.post(COMPLETIONS, json=SHORT | {"model": "chess"}, timeout=0.3)
    until(lambda: server.engine_loop.num_waiting == 0)
    monkeypatch.undo()
    assert [one.answer().status_code for one in run] == [200, 200]


def test_with_other_weights_and_after_sleep_they_are_read_again(server: Running, says: dict[str, str]) -> None:
    assert answer_of(server, "sql") == says["sql"]
    assert server.post("/reload_weights").status_code == 200
    assert answer_of(server, "sql") == says["sql"]
    assert server.post("/sleep").status_code == server.post("/wake_up").status_code == 200
    assert answer_of(server, "sql") == says["sql"]


# --------------------------------------------------------------------------- models


def test_they_are_listed_as_models(server: Running, adapters: list[LoRARequest]) -> None:
    base, *others = server.get("/v1/models").json()["data"]
    assert (base["id"], base["root"], base["parent"]) == ("tiny", "somewhere", None)
    assert [(one["id"], one["root"], one["parent"]) for one in others] == [
        (one.lora_name, one.lora_path, "tiny") for one in adapters
    ]
    assert {one["object"] for one in others} == {"model"} and all(one.keys() == base.keys() for one in others)
    assert server.get("/v1/models/poet").json() == others[1]
    assert server.client.head("/v1/models/poet").status_code == 200


# --------------------------------------------------------------------------- while it runs


def test_load_and_unload(server: Running, adapters: list[LoRARequest], says: dict[str, str]) -> None:
    loaded = server.post(LOAD, lora_name="knight", lora_path=path_of(adapters, "chess"))
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'knight' added successfully.")
    assert names(server) == ["tiny", *NAMES, "knight"]
    assert server.get("/v1/models/knight").json()["root"] == path_of(adapters, "chess")
    assert answer_of(server, "knight") == says["chess"] and server.engine.list_loras() == {4}
    again = server.post(LOAD, lora_name="knight", lora_path=path_of(adapters, "sql"))
    said = "lora_name: 'knight' is loaded already; add \"load_inplace\": true to replace it"
    told(again, 400, said, "lora_name")
    assert answer_of(server, "knight") == says["chess"]
    for id_of_it, ends in ((3, False), (4, True)):
        gone = server.post(UNLOAD, lora_name="knight", lora_int_id=id_of_it)
        if not ends:
            told(gone, 400, "lora_int_id=3 is not 'knight', which is 4; leave it out", "lora_int_id")
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'knight' removed successfully.")
    assert names(server) == ["tiny", *NAMES] and server.engine.list_loras() == set()
    told(server.post(COMPLETIONS, **SHORT, model="knight"), 404, "there is no model 'knight' here", "model")
    there = "there is no adapter 'knight' here; this server has 'sql', 'poet', 'chess'"
    error = told(server.post(UNLOAD, lora_name="knight"), 404, there, "lora_name")
    assert error["code"] == "model_not_found"
    assert server.post(UNLOAD, lora_name="poet").status_code == 200, "it was named at the start, and not in a place"
    assert names(server) == ["tiny", "sql", "chess"]


def test_in_place_of_another(
    server: Running,
    adapters: list[LoRARequest],
    says: dict[str, str],
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also from the same folder; who has begun ends with what was loaded then."""
    before = server.post(COMPLETIONS, **LONG, model="sql").json()["choices"][0]["text"]
    server.slow_down(monkeypatch, 0.02)
    runs = Asked(server, COMPLETIONS, **LONG, model="sql")
    until(lambda: server.engine_loop.num_running == 1)
    load = server.post(LOAD, lora_name="sql", lora_path=path_of(adapters, "poet"), load_inplace=True)
    assert load.status_code == 200 and runs.is_alive()
    assert answer_of(server, "sql") == says["poet"] and len(server.engine.list_loras()) == 2
    monkeypatch.undo()
    assert runs.answer().json()["choices"][0]["text"] == before
    for seed in (3, 1):
        save_adapter(tmp_path, tiny_checkpoint("qwen3"), ["q_proj", "o_proj", "up_proj"], seed=seed)
        assert server.post(LOAD, lora_name="mine", lora_path=str(tmp_path), load_inplace=True).status_code == 200
        assert answer_of(server, "mine") == says[NAMES[seed - 1]]
    (tmp_path / "adapter_model.safetensors").unlink()
    broken = server.post(LOAD, lora_name="mine", lora_path=str(tmp_path), load_inplace=True)
    told(broken, 400, "has no adapter_model.safetensors", "lora_path")
    assert answer_of(server, "mine") == says["sql"]


def test_what_requests_have_is_not_unloaded(
    server: Running, says: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.slow_down(monkeypatch, 0.02)
    runs = Asked(server, COMPLETIONS, **LONG, model="sql")
    until(lambda: server.engine_loop.num_running == 1)
    why = "lora_name='sql': lora_int_id=1 is not removed under unfinished requests that have it"
    told(server.post(UNLOAD, lora_name="sql"), 400, why, "lora_name")
    monkeypatch.undo()
    assert runs.answer().status_code == 200
    assert server.post("/sleep").status_code == 200
    waits = Asked(server, COMPLETIONS, **SHORT, model="sql")
    until(lambda: server.engine_loop.num_waiting == 1)
    told(server.post(UNLOAD, lora_name="sql"), 400, "is not removed under waiting requests that have it", "lora_name")
    assert server.post("/wake_up").status_code == 200
    assert waits.answer().json()["choices"][0]["text"] == says["sql"]
    assert server.post(UNLOAD, lora_name="sql").status_code == 200


def test_what_cannot_be_loaded(
    server: Running, adapters: list[LoRARequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = path_of(adapters, "sql")
    told(server.post(LOAD, lora_name="x", lora_path="/nowhere"), 404, "/nowhere does not exist; pass a", "lora_path")
    told(server.post(LOAD, lora_name="x", lora_path="a\0b"), 404, "does not exist", "lora_path")
    told(server.post(LOAD, lora_name="x", lora_path="/dev/null"), 400, "/dev/null is no folder; pass a", "lora_path")
    told(server.post(LOAD, lora_name="x", lora_path=str(tmp_path)), 400, "has no adapter_config.json", "lora_path")
    told(server.post(LOAD, lora_name="tiny", lora_path=there), 400, "is the name of the model itself", "lora_name")
    told(server.post(LOAD, lora_name="", lora_path=there), 400, "lora_name='' is not a name", "lora_name")
    told(server.post(LOAD, lora_name="a\r\n", lora_path=there), 400, r"lora_name='a\r\n' is not a name", "lora_name")
    told(server.post(LOAD, lora_name="x", lora_path=""), 400, "lora_path='' is not the path", "lora_path")
    told(server.post(LOAD, lora_name="x"), 400, "lora_path: Field required", "lora_path")
    told(server.post(LOAD, lora_name=5, lora_path=there), 400, "lora_name: ", "lora_name")
    told(server.post(LOAD, lora_name="x", lora_path=there, lora_int_id=5), 400, "there is no field", "lora_int_id")
    told(server.post(UNLOAD), 400, "lora_name: Field required", "lora_name")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told(server.post(LOAD, lora_name="x", lora_path="some/adapter"), 404, "some/adapter", "lora_path")
    assert names(server) == ["tiny", *NAMES]


def test_a_repository(server: Running, adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is downloaded before the engine hears of it."""
    there = path_of(adapters, "poet")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **_: there)
    assert server.post(LOAD, lora_name="x", lora_path="some/adapter").status_code == 200
    assert server.get("/v1/models/x").json()["root"] == there


def test_a_rank_that_is_too_high(
    server: Running, says: dict[str, str], tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    save_adapter(tmp_path, tiny_checkpoint("qwen3"), ["q_proj"], rank=32)
    said = "is of rank 32; type max_lora_rank=32, which is 16"
    told(server.post(LOAD, lora_name="x", lora_path=str(tmp_path)), 400, said, "lora_path")
    assert answer_of(server, "sql") == says["sql"]


def test_loading_needs_a_place_and_an_engine_that_is_awake(
    server: Running, adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = {"lora_name": "x", "lora_path": path_of(adapters, "chess")}
    server.slow_down(monkeypatch, 0.02)
    run = [Asked(server, COMPLETIONS, **LONG, model=name) for name in ("sql", "poet")]
    until(lambda: server.engine_loop.num_running == 2)
    error = told(server.post(LOAD, **mine), 503, "all of max_loras=2 adapters are in use")
    assert error["code"] == "overloaded"
    monkeypatch.undo()
    assert [one.answer().status_code for one in run] == [200, 200]
    assert server.post("/sleep").status_code == 200
    told(server.post(LOAD, **mine), 400, "the engine sleeps; call wake_up() first (of a server: POST /wake_up)")
    assert server.post("/wake_up").status_code == server.post("/sleep?level=2").status_code == 200
    assert server.post("/wake_up").status_code == 200
    told(server.post(LOAD, **mine), 400, "call reload_weights first (of a server: POST /reload_weights)")
    assert server.post("/reload_weights").status_code == 200
    assert server.post(LOAD, **mine).status_code == 200


def test_only_where_it_is_allowed(llm: LLM, adapters: list[LoRARequest]) -> None:
    with serving(llm, adapters=tuple(adapters)) as server:
        needs = "start it with enable_lora=true allow_runtime_lora_updating=true"
        told(server.post(LOAD, lora_name="x", lora_path=adapters[0].lora_path), 403, needs)
        told(server.post(UNLOAD, lora_name="sql"), 403, needs)
        assert names(server) == ["tiny", *NAMES]


def test_options_that_contradict_themselves(llm: LLM, adapters: list[LoRARequest]) -> None:
    def refused(why: str, *given: Any) -> None:
        with pytest.raises(ConfigError, match=why):
            create_app(AsyncEngine(llm.engine), ServerOptions("tiny", "root", adapters=given))

    sql, poet, _ = adapters
    refused("adapters: lora_name='sql' is another's; give each its own", sql, replace(poet, lora_name="sql"))
    refused("lora_name='tiny' is another's, or the model's own name; give", replace(sql, lora_name="tiny"))
    refused("adapters: lora_int_id=2 is another's; give each its own", replace(sql, lora_int_id=2), poet)
    refused(r"adapters=\('sql',\) is not a tuple of LoRARequest\(NAME, ID, DIR\)", "sql")
    with pytest.raises(ConfigError, match=r"adapters=LoRARequest\(.*\) is not a tuple of LoRARequest"):
        create_app(AsyncEngine(llm.engine), ServerOptions("tiny", "root", adapters=sql))  # type: ignore[arg-type]


def test_adapters_that_the_engine_could_not_have(
    llm: LLM, make_llm: Callable[..., LLM], adapters: list[LoRARequest], tmp_path: Path
) -> None:
    def make(llm: LLM, *given: LoRARequest) -> None:
        create_app(AsyncEngine(llm.engine), ServerOptions("tiny", "root", adapters=given))

    with pytest.raises(ConfigError, match="without adapters of single requests; add enable_lora=True"):
        make(make_llm(), adapters[0])
    make(make_llm())
    for path, why in (("/nowhere", "/nowhere does not exist; pass a folder"), (tmp_path, "has no adapter_config.json")):
        with pytest.raises(CheckpointError, match=f"lora_path=.*{why}"):
            make(llm, adapters[0], replace(adapters[1], lora_path=str(path)))


def test_fields_that_name_no_adapter(server: Running) -> None:
    for name in ("lora_path", "lora_request", "adapter"):
        said = f"there is no field '{name}'. A request's adapter is named by its \"model\"."
        told(server.post(COMPLETIONS, **SHORT, **{name: "sql"}), 400, said, name)


def test_fields_of_a_load_that_are_misspelt(server: Running) -> None:
    said = "there is no field 'lora_pth'. Did you mean lora_path?"
    told(server.post(LOAD, lora_name="x", lora_pth="/x"), 400, said, "lora_pth")


def test_where_the_engine_takes_none(make_llm: Callable[..., LLM], adapters: list[LoRARequest]) -> None:
    with serving(make_llm(), allow_runtime_lora_updating=True) as server:
        response = server.post(LOAD, lora_name="x", lora_path=adapters[0].lora_path)
        told(response, 400, "the engine was made without adapters of single requests; type enable_lora=true")


# --------------------------------------------------------------------------- in an application


def test_an_async_engine(llm: LLM, adapters: list[LoRARequest], says: dict[str, str]) -> None:
    sql, poet, chess = adapters
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    async def session() -> None:
        engine = AsyncEngine(llm.engine)
        engine.start()
        try:
            assert await engine.list_loras() == set()
            assert await engine.add_lora(sql) is True and await engine.list_loras() == {1}
            for its in (sql, poet, None):
                [output] = [o async for o in await engine.generate([str(its)], [PROMPT], params, lora_request=its)][-1:]
                assert output.outputs[0].text == says[its.lora_name if its else "tiny"]
                assert output.lora_request == its
            assert await engine.list_loras() == {1, 2}
            assert await engine.remove_lora(1) is True and await engine.remove_lora(1) is False
            with pytest.raises(RequestError, match="lora_path=/nowhere does not exist"):
                await engine.add_lora(replace(sql, lora_path="/nowhere"))
            wrong: Any = "sql"
            with pytest.raises(RequestError, match=r"lora_request='sql' is not LoRARequest"):
                await engine.generate(["w"], [PROMPT], params, lora_request=wrong)
            long = params.clone(max_tokens=900)
            runs = [await engine.generate([one.lora_name], [PROMPT], long, lora_request=one) for one in (sql, poet)]
            with pytest.raises(BusyError, match="all of max_loras=2"):
                await engine.add_lora(chess)
            for one in runs:
                one.abort()
            assert await engine.remove_lora(1) and await engine.remove_lora(2)
        finally:
            engine.stop()

    asyncio.run(session())


# --------------------------------------------------------------------------- the command line


def test_a_server_of_two_processes(
    tiny_checkpoint: Callable[..., Path], adapters: list[LoRARequest], says: dict[str, str], tmp_path: Path
) -> None:
    sql, poet, chess = (one.lora_path for one in adapters)
    typed = (
        f"lora_modules={{sql: {sql}, poet: {poet}}}",
        "served_model_name=tiny",
        "dtype=float32",
        "enable_lora=true",
    )
    server = Process(tiny_checkpoint("qwen3"), tmp_path / "errors", *typed, "allow_runtime_lora_updating=true")
    try:
        with httpx.Client(base_url=server.url(), timeout=60) as client:

            def said(name: str) -> str:
                answer = client.post(COMPLETIONS, json=SHORT | {"model": name})
                assert answer.status_code == 200, answer.text
                text: str = answer.json()["choices"][0]["text"]
                return text

            for name in ("poet", "tiny", "sql"):
                assert said(name) == says[name]
            body = {"lora_name": "chess", "lora_path": chess}
            assert client.post(LOAD, json=body).text == "Success: LoRA adapter 'chess' added successfully."
            assert said("chess") == says["chess"]
            assert client.post(UNLOAD, json={"lora_name": "sql"}).status_code == 200
            models = client.get("/v1/models").json()["data"]
            assert [(one["id"], one["root"]) for one in models[1:]] == [("poet", poet), ("chess", chess)]
        server.process.terminate()
        assert server.end(within=20)[0] == 0
    finally:
        server.process.kill()
        server.process.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()


@pytest.mark.parametrize(("typed", "why"), [
    (["lora_modules.sql=/x"], "lora_modules needs an engine whose requests may have adapters; add enable_lora=true"),
    (["allow_runtime_lora_updating=true"], "allow_runtime_lora_updating=true needs an engine whose"),
    (["enable_lora=true", "lora_modules.demo=/x"], "lora_modules: 'demo' is the name of the model itself; choose"),
    (["enable_lora=true", "served_model_name=a", "lora_modules.a=/x"], "'a' is the name of the model itself"),
    (["enable_lora=true", "lora_modules={a: 5}"], "lora_modules: 'a': 5 is no name with a folder or a repository"),
    (["enable_lora=true", "lora_modules={a\tb: /x}"], r"lora_modules: 'a\tb': '/x' is no name with a folder or a repo"),
    (["enable_lora=true", "lora_modules={a: {b: /x}}"], "type 'lora_modules={NAME: DIR, NAME: ORG/NAME}'"),
    (["lora_modules.v1.5=~/my x"], """a name with a dot needs braces; type 'lora_modules={v1.5: "~/my x"}'"""),
    (["lora_modules.'v1.5'='x'"], """a name with a dot needs braces; type 'lora_modules={v1.5: "x"}'"""),
    (["lora_modules={1.5: /x}"], "1.5 is not read as a key's name there; choose another"),
    (["enable_lora=true", "lora_modules={1: /x}"], "1 is not read as a key's name there; type lora_modules.1=VALUE"),
    (["enable_lora=true", "lora_modules=a=/x"], "lora_modules is a mapping; type lora_modules.a=/x"),
    (["enable_lora=true", "lora_module.a=/x"], "there is no key lora_module.a. Did you mean lora_modules?"),
    (["enable_lora=true", "lora_path=/x"], "by lora_path in a line of a .jsonl prompts file, or by lora_modules.NAME="),
    (["enable_lora=true", "lora_modules=a"], "type lora_modules={key: value} or lora_modules.KEY=VALUE"),
])  # fmt: skip
def test_a_wrong_command_line(typed: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", *typed]) == 2
    err = capsys.readouterr().err
    assert why in err and err.count("\n") == 1


def test_a_name_with_a_dot_may_be_typed_in_braces(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--cfg", 'lora_modules={v1.5: "~/my x"}', "lora_modules.b=/y"]) == 0
    assert "lora_modules:\n  v1.5: ~/my x\n  b: /y\n" in capsys.readouterr().out


def test_one_that_cannot_be_used_stops_the_start(
    tiny_checkpoint: Callable[..., Path], adapters: list[LoRARequest], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Whichever it is of more than there are places."""
    typed = ["serve", "port=0", "device=cpu", f"model.path={tiny_checkpoint('qwen3')}", *OVERRIDES, "enable_lora=true"]
    modules = [f"lora_modules.{one.lora_name}={one.lora_path}" for one in adapters]
    assert cli.main([*typed, *modules, "lora_modules.bad=/no where"]) == 1
    err = capsys.readouterr().err
    assert "minivllm: lora_modules.bad=/no where does not exist; pass a folder that holds" in err
    assert err.count("\n") == 1
    assert cli.main([*typed, *modules, "max_lora_rank=2"]) == 1
    assert "is of rank 4; type max_lora_rank=4, which is 2" in capsys.readouterr().err
    folder = tmp_path / "bad"
    shutil.copytree(adapters[0].lora_path, folder)
    edit_json(folder / "adapter_config.json", r="four")
    assert cli.main([*typed, *modules, f"lora_modules.bad={folder}"]) == 1
    assert f"minivllm: lora_modules.bad: {folder}/adapter_config.json: r='four'" in capsys.readouterr().err
