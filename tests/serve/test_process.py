"""``python -m minivllm serve`` as a process: what it says, how it ends, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fake_plugins import FakePlugin
from running import OVERRIDES, until
from streams import events

from minivllm import cli
from minivllm.config.engine_config import EngineConfig
from minivllm.config.modes import ServeOptions
from minivllm.core.engine import LLMEngine
from minivllm.plugins.manager import default_registry
from minivllm.serve import engine_process

REPO = Path(__file__).resolve().parents[2]
LONG = {"prompt": "once upon", "max_tokens": 900, "ignore_eos": True, "stream": True}
FAULTY = """
    from minivllm.core.sampler import DefaultSampler
    from minivllm.plugins import Component, hookimpl

    class Faulty(DefaultSampler):
        calls = 0

        def __init__(self, slots, vocab_size, device, options):
            super().__init__(slots, vocab_size, device)

        def sample(self, *args):
            self.calls += 1
            if self.calls > 20:
                raise ArithmeticError("the numbers ran out")
            return super().sample(*args)

    @hookimpl
    def minivllm_samplers():
        yield Component("faulty", __name__ + ":Faulty")
"""


class Process:
    """One server: its output so far, and its end."""

    def __init__(self, folder: Path, errors: Path, *settings: str) -> None:
        env = os.environ | {"PYTHONPATH": str(REPO)}
        command = [sys.executable, "-m", "minivllm", "serve", "port=0", f"model.path={folder}", "device=cpu"]
        self.errors = errors
        with errors.open("w") as file:
            self.process = subprocess.Popen(
                [*command, *OVERRIDES, *settings], env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=file, start_new_session=True,
            )  # fmt: skip

    def hello(self) -> tuple[str, str]:
        """Its two lines."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline(), self.process.stdout.readline()
        assert said[1], self.errors.read_text()
        return said

    def url(self) -> str:
        found = re.search(r"on (http://127\.0\.0\.1:\d+) ", self.hello()[0])
        assert found
        return found[1]

    def end(self, within: float) -> tuple[int, str]:
        """Exit code and standard error; no process of its session is left."""
        code = self.process.wait(within)
        with pytest.raises(ProcessLookupError):
            os.killpg(self.process.pid, 0)
        return code, self.errors.read_text()


@pytest.fixture(scope="module")
def started(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Process]]:
    """All at once, because most of what a start takes is one core's."""
    folder = tmp_path_factory.mktemp("serve")
    short, endless = tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", max_position_embeddings=40_000)
    settings = {
        "drains": (short, "served_model_name=it's me", "log_requests=true", "shutdown_timeout=60"),
        "gives up": (endless, "cache.num_blocks=4000", "shutdown_timeout=600", "api_key=s3cret"),
    }
    processes = {name: Process(model, folder / name, *typed) for name, (model, *typed) in settings.items()}
    yield processes
    for one in processes.values():
        one.process.kill()
        one.process.wait()
        assert one.process.stdout is not None
        one.process.stdout.close()


def refused(url: str) -> bool:
    try:
        httpx.get(url + "/health")
    except httpx.HTTPError:
        return True
    return False


def test_it_says_what_to_type_and_ctrl_c_lets_a_stream_end(started: dict[str, Process]) -> None:
    server = started["drains"]
    hello, curl = server.hello()
    found = re.fullmatch(
        r"minivllm serves it's me on (http://\S+) \(cpu, attention torch, float32 weights\)\. Try:\n", hello
    )
    assert found
    url = found[1]
    program, address, header, content_type, data, body = shlex.split(curl)
    assert (program, header, content_type, data) == ("curl", "-H", "Content-Type: application/json", "-d")
    answer = httpx.post(address, content=body, headers={"Content-Type": "application/json"}).json()
    assert (answer["model"], answer["usage"]["completion_tokens"] > 0) == ("it's me", True)

    with httpx.stream("POST", url + "/v1/completions", json=LONG, timeout=60) as response:
        stream = events(response.iter_lines())
        next(stream)
        server.process.send_signal(signal.SIGINT)
        until(lambda: refused(url))
        assert server.process.poll() is None, "its stream goes on"
        *_, last = stream
    assert last["choices"][0]["finish_reason"] == "length"
    code, errors = server.end(20)
    assert code == 130
    assert "waiting up to 60 s for 1 running request; press Ctrl-C again to stop now" in errors
    assert errors.count('"POST /v1/completions HTTP/1.1" 200') == 2
    assert errors.endswith("minivllm: interrupted\n") and "Traceback" not in errors
    assert refused(url)


def test_a_second_ctrl_c_does_not_wait(started: dict[str, Process]) -> None:
    server = started["gives up"]
    url, key = server.url(), {"Authorization": "Bearer s3cret"}
    assert httpx.get(url + "/v1/models").status_code == 401
    body = LONG | {"max_tokens": 30_000}
    with httpx.stream("POST", url + "/v1/completions", json=body, headers=key, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith('data: {"id')
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        *_, last = (line for line in lines if line)
    assert '"message":"the server is shutting down"' in last
    code, errors = server.end(10)
    assert code == 130 and "press Ctrl-C again to stop now" in errors
    assert "Traceback" not in errors, errors


# --------------------------------------------------------------------------- in this process, which saves a start


def serve_and(ask: Callable[[str], None], *settings: str) -> int:
    """Run the command line while a thread calls ``ask`` with the server's address; returns the exit code."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

    def client() -> None:
        until(lambda: not refused(url))
        ask(url)

    thread = threading.Thread(target=client)
    thread.start()
    code = cli.main(["serve", f"port={url.rpartition(':')[2]}", "device=cpu", *OVERRIDES, *settings])
    thread.join()
    return code


def test_sigterm_ends_what_takes_too_long(
    tiny_checkpoint: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def ask(url: str) -> None:
        with httpx.stream("POST", url + "/v1/completions", json=LONG | {"max_tokens": 30_000}, timeout=60) as response:
            for line in response.iter_lines():
                if not said:
                    os.kill(os.getpid(), signal.SIGTERM)
                said.append(line)

    model = f"model.path={tiny_checkpoint('qwen3', max_position_embeddings=40_000)}"
    began = time.monotonic()
    assert serve_and(ask, model, "cache.num_blocks=4000", "shutdown_timeout=0.3") == 0
    assert time.monotonic() - began < 20
    assert '"message":"the server is shutting down"' in said[-2] and said[-1] == ""
    err = capfd.readouterr().err
    assert "waiting up to 0.3 s for 1 running request" in err and "Traceback" not in err


def test_sigterm_ends_what_waits_for_an_engine_that_sleeps(
    tiny_checkpoint: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    answers: list[httpx.Response] = []

    def ask(url: str) -> None:
        assert httpx.post(url + "/sleep", timeout=60).status_code == 200
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        answers.append(httpx.post(url + "/v1/completions", json=LONG | {"stream": False}, timeout=60))

    began = time.monotonic()
    typed = (f"model.path={tiny_checkpoint('qwen3')}", "enable_sleep_mode=true", "shutdown_timeout=600")
    assert serve_and(ask, *typed) == 0
    assert time.monotonic() - began < 60
    assert answers[0].status_code == 503 and "the server is shutting down" in answers[0].text
    assert "ending 1 running request, as the engine sleeps" in capfd.readouterr().err


def test_a_dead_engine_ends_the_process_with_an_error(
    tiny_checkpoint: Callable[..., Path], fake_plugin: FakePlugin, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_plugin("minivllm-faulty", FAULTY)
    default_registry.cache_clear()
    answers: list[httpx.Response] = []
    code = serve_and(
        lambda url: answers.append(httpx.post(f"{url}/v1/completions", json=LONG | {"stream": False})),
        f"model.path={tiny_checkpoint('qwen3')}", "sampler.name=faulty",
    )  # fmt: skip
    default_registry.cache_clear()
    assert code == 1
    place = "(minivllm_faulty, line 14, in sample, of minivllm-faulty 1.0)"
    why = f"the engine has stopped: a step failed: ArithmeticError: the numbers ran out {place}"
    assert capsys.readouterr().err.endswith(f"minivllm: {why}\n")
    assert (answers[0].status_code, answers[0].json()["error"]["message"]) == (503, why)


def test_the_end_of_the_process_that_speaks_http_is_an_error(
    tiny_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def kill_it(url: str) -> None:
        for task in Path("/proc/self/task").iterdir():
            for child in (task / "children").read_text().split():
                if b"minivllm.serve.http_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(int(child), signal.SIGKILL)

    assert serve_and(kill_it, f"model.path={tiny_checkpoint('qwen3')}") == 1
    assert capsys.readouterr().err.endswith("minivllm: the HTTP process was killed by SIGKILL\n")


# --------------------------------------------------------------------------- before anything is loaded


def test_a_taken_port_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", f"port={port}"]) == 1
    assert capsys.readouterr().err == (
        f"minivllm: cannot listen on host=127.0.0.1 port={port}: Address already in use; type port=0 for any free one\n"
    )


def test_of_two_servers_that_load_at_once_one_is_told(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bound = engine_process._bind("127.0.0.1", 0)  # the other one: bound, and not listening yet
    port = bound.getsockname()[1]
    load = LLMEngine.from_config

    def slower(config: EngineConfig) -> LLMEngine:
        bound.listen()
        return load(config)

    monkeypatch.setattr(LLMEngine, "from_config", slower)
    with bound:
        assert cli.main(["serve", f"port={port}", f"model.path={tiny_checkpoint('qwen3')}", "device=cpu"]) == 1
    assert f"port={port}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "told"), [
    (["port=70000"], "port=70000 is too large: the most is 65535"),
    (["port=-1"], "port=-1 is too small"),
    (["host=no.such.host.invalid"], "type host=127.0.0.1 to be reached from this machine only, host=0.0.0.0"),
    (["api_key="], "api_key=: the value is missing"),
    (["executor=torchrun"], "executor=torchrun in serve"),
    (["shutdown_timeout=-1"], "shutdown_timeout=-1"),
    (["allowed_origins=5"], "allowed_origins: '5' is not a web site; type https://example.com, or '*' for any"),
    (["allowed_origins=['*',https://a.b/c]"], "allowed_origins: 'https://a.b/c' is not a web site"),
    (["max_tokens=5"], "max_tokens"),
])  # fmt: skip
def test_a_wrong_command_line(typed: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", *typed]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


def test_an_address_of_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "host=192.0.2.1"]) == 1
    err = capsys.readouterr().err
    assert "cannot listen on host=192.0.2.1" in err and "type host=127.0.0.1" in err and err.count("\n") == 1


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_missing_package_is_one_line(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("minivllm.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["serve"]) == 1
    err = capsys.readouterr().err
    assert err == (
        f"minivllm: mode=serve needs the package {package!r}, which is not installed; "
        "install it with: pip install 'minivllm[serve]'\n"
    )


def test_the_key_is_read_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_API_KEY", "from the environment")
    assert engine_process.find_key(ServeOptions()) == "from the environment"
    assert engine_process.find_key(ServeOptions(api_key="typed")) == "typed"
    monkeypatch.setenv("MINIVLLM_API_KEY", "")
    assert engine_process.find_key(ServeOptions()) is None


def test_the_curl_line_has_the_key_only_where_one_is_needed() -> None:
    line = engine_process.curl_line("http://[::1]:80", "m", key=True)
    assert '-H "Authorization: Bearer $MINIVLLM_API_KEY"' in line
    assert json.loads(shlex.split(line)[-1])["model"] == "m"
