"""POST /reload_weights: what runs ends first or is aborted, what comes waits and is answered with the new weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import Running, serving, told, until
from test_process import Process

from minivllm import LLM
from minivllm.errors import EngineDeadError

COMPLETIONS, RELOAD = "/v1/completions", "/reload_weights"
SHORT = {"prompt": [5, 9, 300], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = SHORT | {"max_tokens": 400}


@pytest.fixture
def old(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("qwen3")


@pytest.fixture
def new(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("qwen3", seed=1)


@pytest.fixture
def reloading(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server whose steps take a while, until ``monkeypatch.undo``: ``LONG`` takes 8 seconds."""
    with serving(make_llm(), allow_reload=True) as running:
        running.slow_down(monkeypatch, 0.02)
        yield running


@pytest.fixture(scope="module")
def answers(make_llm: Callable[..., LLM]) -> dict[str, dict[str, str]]:
    """Of both checkpoints: to ``SHORT`` and to ``LONG``."""
    found = {}
    for name, options in (("old", {}), ("new", {"seed": 1})):
        with serving(make_llm(**options)) as running:
            found[name] = {"short": answer_to(running, SHORT), "long": answer_to(running, LONG)}
    assert found["old"]["short"] != found["new"]["short"]
    return found


def answer_to(running: Running, body: dict[str, Any]) -> str:
    response = running.post(COMPLETIONS, **body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


class Asked(threading.Thread):
    """A request in the background, and the answer to it."""

    def __init__(self, running: Running, path: str, **body: Any) -> None:
        super().__init__()
        self.running, self.path, self.body = running, path, body
        self.start()

    def run(self) -> None:
        self.response = self.running.post(self.path, **self.body)

    def answer(self) -> httpx.Response:
        self.join(60)
        return self.response


def test_what_runs_ends_with_the_old_weights_and_what_comes_waits_for_the_new(
    reloading: Running, new: Path, old: Path, answers: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Asked(reloading, COMPLETIONS, **LONG)
    until(lambda: reloading.engine_loop.num_running == 1)
    reload = Asked(reloading, RELOAD, weights_path=str(new))
    until(lambda: bool(reloading.engine_loop._changes))
    comes = Asked(reloading, COMPLETIONS, **SHORT)
    until(lambda: reloading.engine_client.num_completions == 2)
    assert reloading.engine.num_unfinished_requests == 1 and runs.is_alive()
    monkeypatch.undo()
    assert runs.answer().json()["choices"][0]["text"] == answers["old"]["long"]
    done = reload.answer()
    assert done.status_code == 200 and done.json().keys() == {"weights_path", "seconds"}, done.text
    assert comes.answer().json()["choices"][0]["text"] == answers["new"]["short"]
    reloading.settled()
    for body, said in (({"weights_path": str(old)}, "old"), ({"weights_path": str(new)}, "new"), ({}, "old")):
        assert reloading.post(RELOAD, **body).status_code == 200
        assert answer_to(reloading, SHORT) == answers[said]["short"], "no cached prefix of other weights"
    reloading.settled()


def test_with_abort_what_runs_ends_with_an_error(
    reloading: Running, new: Path, answers: dict[str, dict[str, str]]
) -> None:
    runs = Asked(reloading, COMPLETIONS, **LONG)
    lines: list[str] = []

    def read() -> None:
        with reloading.client.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
            lines.extend(line for line in response.iter_lines() if line)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: reloading.engine_loop.num_running == 2 and bool(lines))
    assert reloading.post(RELOAD, weights_path=str(new), abort=True).status_code == 200
    error = told(runs.answer(), 503, "the request was aborted, as the weights are being replaced; send it again")
    assert error["code"] == "interrupted" and runs.response.headers["retry-after"] == "1"
    reader.join(20)
    assert '"code":"interrupted"' in lines[-1] and "[DONE]" not in lines[-1]
    assert answer_to(reloading, SHORT) == answers["new"]["short"]
    reloading.settled()


def test_what_cannot_be_loaded_changes_nothing(
    reloading: Running, new: Path, tmp_path: Path, answers: dict[str, dict[str, str]]
) -> None:
    told(reloading.post(RELOAD, weights_path=str(tmp_path / "no")), 400, "no does not exist", "weights_path")
    told(reloading.post(RELOAD, weights_path=str(tmp_path)), 400, "config.json", "weights_path")
    told(reloading.post(RELOAD, weights_path=3), 400, "weights_path: ", "weights_path")
    told(reloading.post(RELOAD, folder=str(new)), 400, "there is no field 'folder'", "folder")
    assert answer_to(reloading, SHORT) == answers["old"]["short"]
    reloading.settled()


def test_nobody_waits_or_is_aborted_for_a_folder_that_is_refused(
    reloading: Running, new: Path, tmp_path: Path, answers: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Asked(reloading, COMPLETIONS, **LONG)
    until(lambda: reloading.engine_loop.num_running == 1)
    for abort in (True, False):
        reply = reloading.post(RELOAD, weights_path=str(tmp_path / "no"), abort=abort)
        told(reply, 400, "does not exist", "weights_path")
    assert runs.is_alive() and reloading.engine_loop.num_running == 1
    reload = Asked(reloading, RELOAD, weights_path=str(new))
    until(lambda: bool(reloading.engine_loop._changes))
    comes = Asked(reloading, COMPLETIONS, **SHORT)
    until(lambda: reloading.engine_loop.num_waiting == 1)
    told(reloading.post(RELOAD, weights_path=str(tmp_path), abort=True), 400, "config.json", "weights_path")
    assert runs.is_alive() and reload.is_alive(), "the refusal was told while another reload waits"
    monkeypatch.undo()
    assert runs.answer().json()["choices"][0]["text"] == answers["old"]["long"]
    assert reload.answer().status_code == 200
    assert comes.answer().json()["choices"][0]["text"] == answers["new"]["short"]
    reloading.settled()


def test_without_the_option_it_is_refused(server: Running, new: Path) -> None:
    told(server.post(RELOAD, weights_path=str(new)), 403, "start it with allow_reload=true")


def test_if_loading_fails_the_engine_is_dead(
    make_llm: Callable[..., LLM], new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()

    def fail(weights: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(llm.engine.executor, "reload_weights", fail)
    with serving(llm, allow_reload=True) as running:
        error = told(running.post(RELOAD, weights_path=str(new)), 503, "loading failed: OSError: the disk is gone")
        assert error["code"] == "engine_dead"
        told(running.post(COMPLETIONS, **SHORT), 503, "make a new engine")
        assert isinstance(running.engine_loop.error, EngineDeadError)


def test_a_server_of_two_processes(old: Path, new: Path, tmp_path: Path, answers: dict[str, dict[str, str]]) -> None:
    server = Process(old, tmp_path / "errors", "allow_reload=true", "api_key=s3cret", "dtype=float32")
    try:
        url, headers = server.url(), {"Authorization": "Bearer s3cret"}
        assert httpx.post(url + RELOAD, json={"weights_path": str(new)}).status_code == 401
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            told(client.post(RELOAD, json={"weights_path": "nowhere"}), 400, "does not exist", "weights_path")
            for body, said in (({"weights_path": str(new)}, "new"), ({"abort": True}, "old")):
                assert client.post(RELOAD, json=body).status_code == 200
                choices = client.post(COMPLETIONS, json=SHORT).json()["choices"]
                assert choices[0]["text"] == answers[said]["short"]
        server.process.terminate()
        assert server.end(within=20)[0] == 0
    finally:
        server.process.kill()
        server.process.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()
