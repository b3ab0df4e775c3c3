"""However a rank ends, the caller gets one clear error, soon, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from faults import FAULTY, fault_on
from helpers import edit_json
from zygote import Zygote

from minivllm import LLM, SamplingParams
from minivllm.config.compose import compose_engine_config
from minivllm.errors import CheckpointError, ConfigError, EngineDeadError, RequestError
from minivllm.executors import multiproc, processes
from minivllm.executors.group import open_store
from minivllm.executors.messages import Failed, Hello, Still
from minivllm.executors.processes import Child, RankProcesses, start_children
from minivllm.executors.progress import Progress, nobody_moves
from minivllm.executors.single import SingleExecutor
from minivllm.plugins.manager import default_registry

Checkpoints = Callable[..., Path]
FakePlugin = Callable[..., Path]
TIMEOUT = ["executor=multiproc", "+executor.options.step_timeout=2", "+executor.options.start_timeout=3"]
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)


@pytest.fixture
def faulty(fake_plugin: FakePlugin) -> Iterator[None]:
    fake_plugin("minivllm-faulty", FAULTY)
    default_registry.cache_clear()
    yield
    default_registry.cache_clear()


@pytest.fixture(autouse=True)
def nothing_left(zygote: Zygote) -> Iterator[None]:
    def there() -> set[str]:
        processes = children() | children(zygote.process.pid)
        return {f"process {pid}" for pid in processes} | open_files() | shared_memory()

    open_store("127.0.0.1")  # torch opens a pipe with the first store of a process, and keeps it
    gc.collect()
    before = there()
    yield
    assert there() <= before, "what earlier tests of this process left to the collector may be gone by now"


def children(pid: int | str | None = None) -> set[int]:
    """Processes whose parent is ``pid`` (this one), dead ones that nobody waited for included."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == int(pid or os.getpid()):
                found.add(int(entry.name))
    return found


def open_files() -> set[str]:
    """What each open file is: ``7: socket:[81234]``."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder's own, while it was listed
            found.add(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def gone(pids: set[int], within: float) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def make(folder: Path, *overrides: str, tp: int = 2) -> LLM:
    return LLM(str(folder), device="cpu", tp=tp, overrides=list(overrides), num_gpu_blocks_override=64)


def pids_of(llm: LLM) -> list[int]:
    return [rank.process.pid for rank in llm.engine.executor._ranks.ranks]  # type: ignore[attr-defined]


def dies(llm: LLM, within: float) -> EngineDeadError:
    """Step until the engine dies; all is gone then, and it says the same again."""
    pids = set(pids_of(llm))
    if not llm.engine.has_unfinished_requests():
        llm.engine.add_request("long", [1, 2, 3], LONG)
    began = time.monotonic()
    with pytest.raises(EngineDeadError) as caught:
        while True:
            llm.engine.step()
    assert time.monotonic() - began < within
    assert gone(pids, 0.1)
    with pytest.raises(EngineDeadError, match="stopped earlier"):
        llm.engine.add_request("next", [1], LONG)
    with pytest.raises(EngineDeadError):
        llm.engine.step()
    return caught.value


def kill_and_see(llm: LLM, rank: int) -> None:
    llm.engine.add_request("a", [1, 2, 3], LONG)
    for _ in range(3):
        llm.engine.step()
    victim = pids_of(llm)[rank]
    os.kill(victim, signal.SIGKILL)
    assert f"rank {rank} (process {victim}) was killed by SIGKILL" in str(dies(llm, 5))


def test_a_killed_rank_ends_every_call_and_a_new_engine_starts(tiny_checkpoint: Checkpoints) -> None:
    """Ranks as they are started outside of tests, too. What a group is sent to end is for its parent."""
    folder = tiny_checkpoint("qwen3")
    with make(folder) as llm:
        for pid in pids_of(llm):
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(pid, number)
        kill_and_see(llm, 1)
        with make(folder) as new:
            said = new.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        assert len(said[0].outputs[0].token_ids) == 4


def test_rank_0_killed(tiny_checkpoint: Checkpoints, forked_ranks: Zygote) -> None:
    with make(tiny_checkpoint("qwen3")) as llm:
        kill_and_see(llm, 0)


def test_a_rank_killed_while_nothing_runs_is_noticed_by_the_next_call(
    tiny_checkpoint: Checkpoints, forked_ranks: Zygote
) -> None:
    with make(tiny_checkpoint("qwen3")) as llm:
        pids = pids_of(llm)
        os.kill(pids[1], signal.SIGKILL)
        time.sleep(0.2)
        with pytest.raises(EngineDeadError, match="rank 1"):
            llm.engine.add_request("a", [1, 2, 3], LONG)
        assert gone(set(pids), 0.1)


def test_a_rank_that_fails_between_a_step_and_its_sampling(
    tiny_checkpoint: Checkpoints, forked_ranks: Zygote, faulty: None
) -> None:
    with make(tiny_checkpoint("qwen3"), *fault_on(1, "masks"), *TIMEOUT) as llm:
        with pytest.raises(EngineDeadError, match=r"rank 1 failed in step \d+: ArithmeticError: no masks today"):
            llm.generate([[1, 2]] * 3, SamplingParams(max_tokens=9, bad_words=["a"]), use_tqdm=False)
        with pytest.raises(EngineDeadError):
            llm.engine.step()


@pytest.mark.parametrize("fault,rank,message", [
    ("raise", 1, r"rank 1 failed in step \d+: ArithmeticError: the numbers ran out "
                 r"\(minivllm_faulty, line \d+, in sample, of minivllm-faulty 1.0\)"),
    ("raise late", 0, r"rank 0 failed in step \d+: ArithmeticError: the numbers were none \(minivllm_faulty, "),
    ("exit", 0, r"rank 0 \(process \d+\) ended with exit code 7"),
    ("hang", 1, r"rank 1 .* did not finish a step"),
])  # fmt: skip
def test_a_fault_in_a_step(
    tiny_checkpoint: Checkpoints, forked_ranks: Zygote, faulty: None, fault: str, rank: int,
    message: str, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with make(tiny_checkpoint("qwen3"), *fault_on(rank, fault), *TIMEOUT) as llm:
        error = dies(llm, 6)
    assert error.__class__ is EngineDeadError

    assert re.search(message, str(error)), error
    if fault == "raise":
        assert any("sample(" in note or "in sample" in note for note in error.__notes__)
    assert "Traceback" not in capfd.readouterr().err


def test_a_fault_at_the_start(
    tiny_checkpoint: Checkpoints, forked_ranks: Zygote, faulty: None,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(CheckpointError, match=r"^no such weights here"):
        make(tiny_checkpoint("qwen3"), *fault_on(1, "bad start"))
    assert "Traceback" not in capfd.readouterr().err


def test_an_error_of_somebody_else_names_its_rank() -> None:
    error = Failed.of(KeyError("where?"), "at its start").as_error(1, starting=True)
    assert type(error) is EngineDeadError and str(error) == "rank 1 failed at its start: KeyError: 'where?'"


def test_an_error_of_ours_is_told_without_its_place() -> None:
    try:
        raise ConfigError("set it")
    except ConfigError as error:
        failed = Failed.of(error, "in step 3")
    assert str(failed.as_error(0, starting=False)) == "rank 0 failed in step 3: ConfigError: set it"


def test_what_one_rank_refuses_ends_the_engine() -> None:
    """Others may have done it: an engine goes on only after a RequestError of its own."""
    error = Failed.of(RequestError("there is no room"), "while waking up").as_error(1, starting=True)
    assert type(error) is EngineDeadError
    assert str(error) == "rank 1 failed while waking up: RequestError: there is no room"


@pytest.mark.parametrize("tp", [3, 1000])
def test_more_ranks_than_there_can_be_are_not_started_ahead(
    tiny_checkpoint: Checkpoints, tmp_path: Path, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many heads, or few."""
    folder, count = tmp_path / "model", 4 if tp == 3 else 1000
    shutil.copytree(tiny_checkpoint("qwen3"), folder)
    edit_json(folder / "config.json", num_attention_heads=count, num_key_value_heads=2, intermediate_size=1)
    monkeypatch.setattr(processes, "start_children", lambda *args: pytest.fail("started"))
    with pytest.raises(ConfigError, match=f"tp={tp} does not divide"):
        make(folder, tp=tp)


def test_what_cannot_be_split_is_refused_before_ranks_are_told_anything(tiny_checkpoint: Checkpoints) -> None:
    folder, began = tiny_checkpoint("qwen3"), time.monotonic()
    with pytest.raises(ConfigError, match=r"tp=3 does not divide the model's attention heads \(4\); use tp=1 or 2"):
        make(folder, tp=3)
    with pytest.raises(ConfigError, match="tp=2 with executor=single"):
        make(folder, "executor=single")
    config = compose_engine_config(tp=2)
    named = replace(config, executor=replace(config.executor, name="mine"))  # a plugin's that builds on it
    with pytest.raises(ConfigError, match="tp=2 with executor=mine"):
        SingleExecutor(named, None, 8, None)  # type: ignore[arg-type]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("options,message", [
    (["all_reduce=pear"], "all_reduce=pear is not auto, nccl or peer"),
    (["all_reduce=peer"], "all_reduce=peer is for GPUs; on a CPU leave it out"),
    (["all_reduce_bytes=8"], "all_reduce_bytes is for all_reduce=peer, not for auto"),
    (["all_reduce=peer", "all_reduce_bytes=much"], "all_reduce_bytes=much is not a whole number from 1"),
    (["start_timeout=abc"], "=abc is not a number of seconds above 0; type executor.options.start_timeout=600"),
    (["step_timeout=0"], "step_timeout=0 is not a number of seconds above 0"),
    (["devices=[0,1]"], "devices names GPUs, and this runs on the CPU; leave it out"),
])  # fmt: skip
def test_an_option_that_cannot_be_heeded_is_refused_before_anything_starts(
    tiny_checkpoint: Checkpoints, options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tiny_checkpoint("qwen3"), "executor=multiproc", *(f"+executor.options.{option}" for option in options))


def test_a_rank_that_stopped_is_named_within_ten_seconds(tiny_checkpoint: Checkpoints, forked_ranks: Zygote) -> None:
    with make(tiny_checkpoint("qwen3")) as llm:
        llm.engine.add_request("a", [1, 2, 3], LONG)
        llm.engine.step()
        os.kill(pids_of(llm)[1], signal.SIGSTOP)
        assert "rank 1" in (said := str(dies(llm, 10))) and "stopped" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stopped_while_it_starts_is_named_within_ten_seconds(
    tiny_checkpoint: Checkpoints, forked_ranks: Zygote, faulty: None, rank: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rank 0 in its first moment, rank 1 while it loads."""
    if not rank:
        tell = RankProcesses._tell

        def tell_and_stop(self: RankProcesses, hello: Hello, fds: Sequence[int], child: Child) -> None:
            tell(self, hello, fds, child)
            if hello.rank == rank:
                os.kill(child.process.pid, signal.SIGSTOP)

        monkeypatch.setattr(RankProcesses, "_tell", tell_and_stop)
    folder, began = tiny_checkpoint("qwen3"), time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"rank {rank} .* has not answered for 6 s \(it is stopped\)"):
        make(folder, *(fault_on(rank, "stopped start") if rank else []))
    assert time.monotonic() - began < 10


def test_a_rank_that_hangs_while_it_loads_is_named_with_its_place(
    tiny_checkpoint: Checkpoints, forked_ranks: Zygote, faulty: None
) -> None:
    with pytest.raises(EngineDeadError, match="startup made no progress for 3 s") as caught:
        make(tiny_checkpoint("qwen3"), *fault_on(1, "hanging start"), *TIMEOUT)
    assert re.search(
        r"rank 0 for \d+ s in .* called by all_gather \(core/parallel.py, line \d+\); rank 1", str(caught.value)
    )
    assert re.search(
        r"rank 1 for \d+ s in __init__ \(site/minivllm_faulty.py, .* called by _sampler", str(caught.value)
    )


def test_who_moves_is_waited_for() -> None:
    here, moving = Still("here", 9.0), Still("there", 0.1)
    assert nobody_moves({0: here, 1: moving}, 5) is None and nobody_moves({}, 5) is None
    assert "rank 1 for 9 s in here" in str(nobody_moves({0: here, 1: here}, 5))
    progress, samples = Progress(threading.main_thread().ident), queue.SimpleQueue[Still]()

    def look() -> None:
        for _ in range(4):
            time.sleep(0.1)
            samples.put(progress.sample())

    threading.Thread(target=look).start()
    for _ in range(4):
        last = samples.get()  # one place
    assert last.seconds > 0.25 and "(executors/test_faults.py, line" in last.where
    threading.Thread(target=look).start()
    *_, last = samples.get(), samples.get(), samples.get(), samples.get()  # four
    assert last.seconds < 0.25


def test_ranks_are_started_before_the_executor_is_known_and_end_with_whoever_refuses_it(
    tiny_checkpoint: Checkpoints, forked_ranks: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Child] = []

    def noted(size: int, gpus: bool) -> list[Child]:
        started.extend(start_children(size, gpus))
        return started[-size:]

    monkeypatch.setattr(processes, "start_children", noted)
    with pytest.raises(ConfigError, match="step_timeout=0"):
        make(tiny_checkpoint("qwen3"), "executor=multiproc", "executor.options.step_timeout=0")
    assert len(started) == 2 and all(child.process.returncode is not None for child in started)
    with make(tiny_checkpoint("qwen3")) as llm:
        assert pids_of(llm) == [child.process.pid for child in started[2:]]


def test_an_executor_that_is_handed_no_processes_starts_its_own(
    tiny_checkpoint: Checkpoints, forked_ranks: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "start_children", lambda size, gpus: [])
    assert multiproc.start_children is start_children, "whose own is another name"
    with make(tiny_checkpoint("qwen3")) as llm:
        assert len(pids_of(llm)) == 2 and llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)


def test_shutdown_is_quick_and_can_be_left_out(tiny_checkpoint: Checkpoints, forked_ranks: Zygote) -> None:
    llm = make(tiny_checkpoint("qwen3"))
    pids = set(pids_of(llm))
    llm.engine.add_request("a", [1, 2, 3], LONG)
    llm.engine.step()  # leaves a step under way
    began = time.monotonic()
    llm.shutdown()
    llm.shutdown()
    assert time.monotonic() - began < 5 and gone(pids, 0.1)
    with pytest.raises(EngineDeadError, match="was shut down"):
        llm.generate([[1]])

    forgotten = make(tiny_checkpoint("qwen3"))
    pids = set(pids_of(forgotten))
    del forgotten
    gc.collect()
    assert gone(pids, 0.1)


# --------------------------------------------------------------------------- the parent


SCRIPT = """
    import sys, time
    from minivllm import LLM, SamplingParams
    llm = LLM(sys.argv[1], device="cpu", tp=2)  # no __main__ guard
    llm.engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=900, ignore_eos=True))
    llm.engine.step()
    print("ready", flush=True)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
        time.sleep(0.02)
"""


def start_script(folder: Path, tmp_path: Path) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, str(script), str(folder)], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def interrupts(err: str) -> int:
    """Processes that say so. One that is met while an import handles an exception has a traceback for each."""
    return sum(line.startswith("KeyboardInterrupt") for line in err.splitlines())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ranks_end_with_their_parent(tiny_checkpoint: Checkpoints, tmp_path: Path, how: signal.Signals) -> None:
    process = start_script(tiny_checkpoint("qwen3"), tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    ranks = children(process.pid)
    assert len(ranks) == 2
    if how is signal.SIGKILL:
        process.send_signal(how)
    else:
        os.killpg(process.pid, how)  # as a terminal's Ctrl-C does, and who stops a service
    _, err = process.communicate(timeout=10)
    assert gone(ranks, 5)
    if how is signal.SIGINT:
        assert interrupts(err) == 1 and err.strip().endswith("KeyboardInterrupt")
    else:
        assert err == ""


def test_ctrl_c_while_ranks_start(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    process = start_script(tiny_checkpoint("qwen3"), tmp_path)
    end = time.monotonic() + 30
    while len(ranks := children(process.pid)) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    try:
        out, err = process.communicate(timeout=10)
    except subprocess.TimeoutExpired as late:
        # Python drops one that comes within a callback of its own imports: its user types it again
        assert b"Exception ignored in" in (late.stderr or b""), late.stderr
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=10)
    else:
        assert out == "" and interrupts(err) == 1
    assert gone(ranks, 5)
