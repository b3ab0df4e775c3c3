"""Sweeps: which configurations, what becomes of one that fails, and that a broken sweep goes on where it was."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from minivllm.bench import sweep
from minivllm.bench.results import Row, Sweep
from minivllm.bench.sweep_progress import Progress, in_words, time_left
from minivllm.bench.sweep_values import expand
from minivllm.cli import main
from minivllm.errors import ConfigError
from minivllm.plugins import default_registry

FAKE = Path(__file__).with_name("fake_job.py")
REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def fake_jobs(monkeypatch):
    real = sweep.command
    monkeypatch.setattr(sweep, "command", lambda *args: [sys.executable, "-S", str(FAKE), *real(*args)[5:]])


def rows_of(folder: Path) -> list[Row]:
    return Sweep.load(folder).rows


def told(folder: Path) -> list[tuple[dict[str, str], str]]:
    """The table without its times."""
    return [(row.settings, row.status) for row in rows_of(folder)]


# --------------------------------------------------------------------------- which configurations


def test_the_product_is_hydras_with_the_last_key_fastest():
    swept, found = expand(
        ["attention=torch,triton", "tp=range(1,3)", "seed=7", "workload.input_len=[1,2],5"], default_registry()
    )
    assert swept == ["attention", "tp", "workload.input_len"]
    assert len(found) == 8 and all(c["seed"] == "7" for c in found)
    assert list(found[0].values()) == ["torch", "1", "7", "[1,2]"]
    assert list(found[1].values()) == ["torch", "1", "7", "5"]
    assert list(found[-1].values()) == ["triton", "2", "7", "5"]


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("tp=choice(1,4)", ["1", "4"]),
        ("tp=range(1,8,3)", ["1", "4", "7"]),
        ("cache.gpu_memory_utilization=range(0.5,1.0,0.25)", ["0.5", "0.75"]),
        ("enforce_eager=true,false", ["true", "false"]),
        ("scheduler=glob(*)", None),
        ("workload=glob(*, exclude=host)", None),
        ("model.path=/a b/x,/c", ["/a b/x", "/c"]),
        ("model.path='/a,b'", ["'/a,b'"]),
        ("model.path=/a(1)/b=c", ["/a(1)/b=c"]),
        ("workload.input_len=[1,2]", ["[1,2]"]),
    ],
)
def test_hydras_sweep_syntax_holds(override, values):
    key = override.partition("=")[0]
    found = [c[key] for c in expand([override], default_registry())[1]]
    if values is not None:
        assert found == values
    elif key == "scheduler":
        assert {"mixed", "prefill_first"} <= set(found)
    else:
        assert "mixed" in found and "host" not in found


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tp=interval(1,3)", "needs values, not an interval"),
        ("tp=glob(*)", "glob chooses among a group's options"),
        ("workload=glob(nothing*)", "names no value"),
        ("tp=range(3,3)", "names no value"),
        ("seed=range(1,3,0)", r"names no value \(range\(\) arg 3 must not be zero\)"),
        ("cache.gpu_memory_utilization=range(0.1,0.3,0.0)", "names no value"),
        ("seed=range(0,1000000000000)", "a sweep has at most 10000 configurations; type fewer values"),
        ("tp=(1", "cannot be read"),
        ("tp=1,", "cannot be read .mismatched input '<EOF>'.; several values are typed tp=a,b"),
    ],
)
def test_what_names_no_values_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        expand([override], default_registry())


def test_a_key_typed_twice_is_refused():
    with pytest.raises(ConfigError, match="tp is typed twice; several values are typed tp=a,b"):
        expand(["tp=1", "tp=2"], default_registry())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "-m needs the keys to vary"),
        (["output=x.json"], "writes its rows to its folder"),
        (["check=true"], "not one exit code"),
        (["trace=x.json"], "type trace=true"),
        (["timeline=x.png,png"], "type timeline=png"),
        (
            ["attention=tritn,triton"],
            "attention=tritn: there is no such attention backend. Did you mean triton? Allowed",
        ),
        (["model=demo,qwen33"], "model=qwen33: there is no such model. Did you mean qwen3"),
        (["scheduler=mixed", "workload=bs1,bs"], "workload=bs: there is no such workload. Did you mean bs1? Allowed"),
        (["scheduler=mixed,mixd"], "scheduler=mixd: there is no such scheduler. Did you mean mixed"),
        (["sampler=defalt", "tp=1,2"], "sampler=defalt: there is no such sampler. Did you mean default"),
        (["executor=choice(single,multipro)"], "executor=multipro: there is no such executor. Did you mean multiproc"),
        (["attention.prefill=null,tritn"], "attention.prefill=tritn: there is no such attention backend. Did you mean"),
        (["sampler.name=default,'defalt'"], "sampler=defalt: there is no such sampler"),
        (["cash.num_blocks=1,2"], "there is no key cash.num_blocks. Did you mean cache.num_blocks"),
        (["seed=range(0,101)", "tp=range(1,101)"], "101 of seed x 100 of tp are 10100: type fewer values"),
        (["tp=1,two"], "tp=two: tp is a whole number, not two"),
        (["tp=1,2", "sweep.timeout=5,6"], "sweep.timeout=5,6: sweep.timeout takes one value, for the whole sweep"),
        (["sweep.timeout=0"], "the least is 1"),
        (["sweep.resume=a", "sweep.dir=b"], "leave sweep.dir out"),
        (["sweep.resume=/no/such/folder"], "holds no results.json; type the folder"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_at_once(overrides, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "-m", *overrides]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_overwrites_nothing_in_a_folder_of_the_users(fake_jobs, tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("report.html", "a", "b", "c"):
        (folder / name).write_text("precious")
    assert main(["bench", "-m", "seed=1", f"sweep.dir={folder}"]) == 2
    told = capsys.readouterr().err
    assert "holds a, b, c and 1 more, which a sweep might overwrite: type a new folder" in " ".join(told.split())
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(
        ("report.html", "a", "b", "c"), "precious"
    )
    for path in folder.iterdir():
        path.unlink()
    assert main(["bench", "-m", "seed=1", f"sweep.dir={folder}"]) == 0  # empty, so nothing can be lost


# --------------------------------------------------------------------------- rows that fail


def test_whatever_a_job_dies_of_is_a_row_with_its_reason(fake_jobs, tmp_path, capsys):
    folder = tmp_path / "s"
    partial = "scheduler.max_long_partial_prefills"
    command = ["bench", "-m", "seed=0,11,12,13,14,15", f"{partial}=1,2"]
    assert main([*command, f"sweep.dir={folder}", "sweep.timeout=4"]) == 0
    rows = [row for row in rows_of(folder) if row.settings[partial] == "1"]
    assert [row.status for row in rows] == ["ok", "failed", "unsupported", "failed", "timeout", "failed"]
    assert rows[1].reason == "killed by SIGKILL; the system does that when memory runs out"
    assert rows[2].reason == "attention=none cannot run this: it <says> so"
    assert rows[3].reason == "MemoryError: CUDA out of memory"
    assert rows[4].reason == "ended after sweep.timeout=4 seconds" and rows[4].job_seconds < 30
    assert rows[5].reason == "ended without a result"
    for row in rows_of(folder):
        if row.settings[partial] == "2":
            assert row.status == "unsupported" and f"{partial}=2 is more than" in row.reason
    out, err = capsys.readouterr()
    assert "[12/12]" in err and "left" in err
    for row in rows[1:]:
        assert row.reason in out and row.reason in err
    assert "100.0 ±2%" in out and "unsupported [" in out

    table = list(csv.DictReader((folder / "results.csv").open(encoding="utf-8")))
    assert [(r["seed"], r[partial], r["status"]) for r in table] == [
        (r.settings["seed"], r.settings[partial], r.status) for r in rows_of(folder)
    ]
    first = table[0]
    assert (first["output_tokens_per_s"], first["output_tokens_per_s_min"]) == ("100.0", "98.0")
    assert first["ran_commit"] == "abc"
    assert float(first["job_seconds"]) > 0 and table[1]["job_seconds"] == "0.0"  # refused, and never begun


def test_a_sweep_in_which_nothing_succeeds_exits_1(fake_jobs, tmp_path):
    assert main(["bench", "-m", "seed=12", f"sweep.dir={tmp_path / 's'}"]) == 1


# --------------------------------------------------------------------------- broken and gone on with

COMMAND = ["attention=torch,flash", "seed=range(2,5)"]
UNBROKEN = [({"attention": a, "seed": str(s)}, "ok") for a in ("torch", "flash") for s in (2, 3, 4)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_sweep_killed_in_the_middle_goes_on(fake_jobs, number, tmp_path, monkeypatch, capsys):
    folder, gate = tmp_path / "s", tmp_path / "gate"
    code = (
        "import sys; from minivllm.bench import sweep; from minivllm.cli import main; real = sweep.command\n"
        f"sweep.command = lambda *args: [sys.executable, '-S', {str(FAKE)!r}, *real(*args)[5:]]\n"
        f"sys.exit(main(['bench', '-m', *{COMMAND}, 'sweep.dir={folder}']))"
    )
    env = os.environ | {"PYTHONPATH": str(REPO), "MINIVLLM_FAKE_GATE": str(gate)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, text=True, stderr=subprocess.PIPE, cwd=tmp_path)
    starts = folder / "starts"
    deadline = time.monotonic() + 60
    while not starts.exists() or len(starts.read_text().splitlines()) < 2:  # the second waits at the gate
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    with pytest.raises(ConfigError, match="still runs"):
        sweep.run([f"sweep.resume={folder}"], default_registry())
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else -9)
    if number == signal.SIGINT:
        assert f"interrupted with 5 of 6 left; resume with: minivllm bench -m sweep.resume={folder}" in err
        assert "1 ok, 5 waiting" in (folder / "report.html").read_text()
    pid = int(starts.read_text().splitlines()[-1].split()[0])
    for _ in range(100):  # the job went with its sweep
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    assert [status for _, status in told(folder)] == ["ok"] + ["waiting"] * 5

    with pytest.raises(ConfigError, match=r"is a sweep of attention=torch,flash seed=range\(2,5\); leave the other"):
        sweep.run([*COMMAND, "tp=2", f"sweep.resume={folder}"], default_registry())
    assert main(["bench", "-m", *COMMAND, f"sweep.resume={folder}"]) == 0
    assert "1 done before are kept, 0 that failed are tried again" in capsys.readouterr().err
    assert told(folder) == UNBROKEN
    begun = [line.split(" ", 1)[1] for line in starts.read_text().splitlines()]
    assert len(begun) == 7 and len(set(begun)) == 6  # only the one that was cut off ran twice
    assert "6 ok." in (folder / "report.html").read_text()


def test_resuming_tries_again_what_failed(fake_jobs, tmp_path, capsys):
    folder = tmp_path / "s"
    assert main(["bench", "-m", "seed=1,11", f"sweep.dir={folder}"]) == 0
    assert main(["bench", "-m", "seed=1", f"sweep.dir={folder}"]) == 2
    assert f"sweep.resume={folder} to resume it" in capsys.readouterr().err
    assert main(["bench", f"sweep.resume={folder}"]) == 0
    assert "1 done before are kept, 1 that failed are tried again" in capsys.readouterr().err
    assert len((folder / "starts").read_text().splitlines()) == 3


def test_a_label_has_as_much_of_a_key_as_tells_it_from_the_others():
    keys = ["seed", "workload.seed", "attention.options.x", "sampler.options.x", "cache.num_blocks"]
    label = Row(0, dict.fromkeys(keys, "1")).label(keys)
    assert label == "seed=1 workload.seed=1 attention.options.x=1 sampler.options.x=1 num_blocks=1"


@pytest.mark.parametrize(("reason", "said"), [("type +a=...", "type +a=..., 1.0 s"), ("It ended.", "It ended, 1.0 s")])
def test_the_line_of_a_job_keeps_what_its_reason_ends_with(reason, said, capsys):
    row = Row(0, {"seed": "1"}, "failed", reason, 1.0)
    Progress([row], ["seed"]).finish(row)
    assert capsys.readouterr().err == f"[1/1] seed=1: failed: {said}\n"


def test_time_left_goes_by_what_is_most_like_it():
    def row(job: int, seconds: float | None, **settings: str) -> Row:
        return Row(job, settings, "waiting" if seconds is None else "ok", job_seconds=seconds)

    keys = ["a", "w"]
    rows = [row(0, 10.0, a="1", w="long"), row(1, 2.0, a="1", w="bs1"), row(2, None, a="2", w="long")]
    assert time_left(rows, keys) == 10.0 and time_left(rows, keys, 4.0) == 6.0
    assert time_left([*rows, row(3, None, a="2", w="bs1")], keys, 25.0) == 2.0
    assert time_left(rows[2:], keys) is None and time_left(rows[:2], keys) is None
    refused = Row(4, {"a": "2", "w": "long"}, "unsupported", job_seconds=0.0)
    assert time_left([*rows, refused], keys) == 10.0 and time_left([refused, rows[2]], keys) is None
    assert [in_words(s) for s in (30, 600, 9000)] == ["30 s", "10 min", "2.5 h"]


# --------------------------------------------------------------------------- the report


class References(HTMLParser):
    """What a page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.found += [v for k, v in attrs if k in ("src", "href", "xlink:href", "srcset", "action", "data", "poster")]


def check_stands_alone(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    page = References()
    page.feed(text)
    assert all(reference.startswith("data:") for reference in page.found), page.found
    assert not page.tags & {"script", "iframe", "object", "embed", "base"}
    assert "url(" not in text and "@import" not in text and not re.search(r"https?:|//[a-z]+\.", text)
    return text


def test_the_report_stands_alone_and_has_every_picture(fake_jobs, tmp_path, monkeypatch):
    folder = tmp_path / "s"
    assert main(["bench", "-m", "seed=0,1,12", "workload=mixed,bs1", f"sweep.dir={folder}"]) == 0
    text = check_stands_alone(folder / "report.html")
    for title in ("Throughput", "Latency of a step", "Latency to the first token", "Step times", "Start"):
        assert f"<h2>{title}</h2>" in text
    assert text.count("<svg") == 10  # five pictures, two workloads each
    assert text.count("A &lt;CPU&gt; · minivllm 0, commit abc · torch 2 · Python 3") >= 11  # the page, and each picture
    assert "unsupported: attention=none cannot run this: it &lt;says&gt; so" in text and "<says>" not in text
    assert text.count("1 of 3 have no figures; the table below says why") == 10
    assert "98.0–102.0" in text and text.count("<circle") == 3 * 4 * 3  # three pictures of repeated runs, four rows
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        return
    shot = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run(
        [*shot, f"--user-data-dir={tmp_path / 'profile'}", (folder / "report.html").as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "Latency of a step" in done.stdout
    assert "CONSOLE" not in done.stderr


# --------------------------------------------------------------------------- for real


def test_a_real_sweep(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    small = ["workload.num_requests=2", "workload.input_len=4", "workload.output_len=3"]
    command = ["bench", "-m", "attention=torch,triton", f"model.path={tiny_checkpoint()}", "device=cpu", *small]
    assert main([*command, "repeat=2", "trace=true"]) == 0
    (folder,) = (tmp_path / "minivllm-sweeps").iterdir()
    assert [p.name for p in tmp_path.iterdir()] == ["minivllm-sweeps"]
    ran, refused = rows_of(folder)
    assert ran.status == "ok" and ran.record["attention"] == "torch" and len(ran.record["runs"]) == 2
    assert "profile" not in ran.record  # no GPU here
    assert refused.status == "unsupported" and "attention=triton cannot run this" in refused.reason
    assert json.loads((folder / "jobs" / "0" / "trace.json").read_text())["traceEvents"]
    assert {p.name for p in folder.iterdir()} == {"jobs", "results.csv", "results.json", "report.html"}
    check_stands_alone(folder / "report.html")
    assert str(folder / "report.html") in capsys.readouterr().out
