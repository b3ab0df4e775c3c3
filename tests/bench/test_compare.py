"""``bench compare``: which rows meet, what counts as a change, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_job import record

from minivllm.bench.settings import settings_of
from minivllm.cli import main

SETTINGS = {"attention": "torch", "workload": "bs1"}


def lines(file: Path, *records: dict) -> str:
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(file)


def sweep_file(file: Path, *rows: dict) -> str:
    file.write_text(json.dumps({"format": 1, "rows": [{"reason": None, "record": None} | row for row in rows]}))
    return str(file)


@pytest.mark.parametrize(
    ("speed", "spread", "options", "code", "said"),
    [
        (100.0, (0.98, 1, 1.02), [], 0, "nothing is slower"),
        (80.0, (0.98, 1, 1.02), [], 1, "slower"),
        (80.0, (0.98, 1, 1.02), ["threshold=30"], 0, "slower"),  # told, but not past the threshold
        (130.0, (0.98, 1, 1.02), [], 0, "faster"),
        (80.0, (0.7, 1, 1.4), [], 0, "same"),  # within the spread
        (94.0, (1,), [], 1, "*"),  # one run: the threshold is all there is
        (96.0, (1,), [], 0, "up to 5% counts as the same"),
    ],
)
def test_the_exit_code_is_the_threshold_beyond_the_spread(tmp_path, capsys, speed, spread, options, code, said):
    a = lines(tmp_path / "a.jsonl", record(SETTINGS))
    b = lines(tmp_path / "b.jsonl", record(SETTINGS, speed, spread))
    assert main(["bench", "compare", a, b, *options]) == code
    assert said in capsys.readouterr().out


def test_a_sweep_and_json_lines_meet_by_their_settings(tmp_path, capsys):
    typed = {"workload": "bs1", "attention": "torch", "tp": "1", "repeat": "3", "output": "x", "profile": "gpu"}
    other = SETTINGS | {"attention": "flash"}
    a = sweep_file(
        tmp_path / "results.json",
        {"settings": SETTINGS, "status": "ok", "record": record(SETTINGS)},
        {"settings": other, "status": "failed", "reason": "why not"},
        {"settings": other | {"tp": "2"}, "status": "waiting"},
    )
    b = lines(tmp_path / "b.jsonl", record(typed, 120.0), record(typed, 121.0), record({"seed": "3"}))
    assert main(["bench", "compare", a, b]) == 0
    out = capsys.readouterr().out
    assert "attention=torch workload=bs1" in out and "+20.5%" in out  # the two lines are one row
    assert f"only in {a}: attention=flash workload=bs1" in out and f"only in {b}: seed=3" in out


def test_what_fails_now_is_a_loss(tmp_path, capsys):
    a = sweep_file(tmp_path / "a.json", {"settings": SETTINGS, "status": "ok", "record": record(SETTINGS)})
    b = sweep_file(tmp_path / "b.json", {"settings": SETTINGS, "status": "failed", "reason": "killed"})
    assert main(["bench", "compare", a, b]) == 1
    assert "fails now: attention=torch workload=bs1: failed: killed" in capsys.readouterr().out
    assert main(["bench", "compare", b, a]) == 0
    assert "works now" in capsys.readouterr().out


def test_what_works_in_neither_is_named_and_alone_is_no_comparison(tmp_path, capsys):
    broken = {"settings": {"seed": "1"}, "status": "unsupported", "reason": "why not"}
    host = {"settings": {"seed": "2"}, "status": "ok", "record": {}}
    works = {"settings": SETTINGS, "status": "ok", "record": record(SETTINGS)}
    a, b = (sweep_file(tmp_path / name, broken, host, works) for name in "ab")
    said = "in neither: seed=1: unsupported: why not\nno figure in common: seed=2\n"
    assert main(["bench", "compare", a, b]) == 0
    assert said in capsys.readouterr().out
    a, b = (sweep_file(tmp_path / name, broken, host) for name in "ab")
    assert main(["bench", "compare", a, b]) == 2
    out, err = capsys.readouterr()
    assert said in out and "nothing is slower" not in out and "so that nothing was compared" in err


def test_servers_are_named_and_several_in_one_file_kept_apart(tmp_path, capsys):
    def served(port: int, speed: float) -> dict:
        return record({"url": f"x:{port}"}, speed) | {"url": f"http://x:{port}", "model": "m"}

    one, two = served(1, 100.0), served(2, 200.0)
    a, b, both = lines(tmp_path / "a", one), lines(tmp_path / "b", two), lines(tmp_path / "both", one, two)
    assert main(["bench", "compare", a, b]) == 0
    out = capsys.readouterr().out
    assert f"{a}: server http://x:1, model m · client: A <CPU> · minivllm 0, commit abc · Python 3\n" in out
    assert "(defaults)" in out and "+100.0%" in out
    assert main(["bench", "compare", a, both]) == 0
    out = capsys.readouterr().out
    assert "(defaults) url=http://x:1" in out and f"only in {both}: (defaults) url=http://x:2" in out
    assert "+0.0%" in out and "+100.0%" not in out


def test_of_the_host_less_is_better(tmp_path, capsys):
    def host(us: float) -> dict:
        return {"overrides": ["workload=host"], "host": [{"running": 1, "waiting": 0, "us_p50": us, "us_p99": us}]}

    a, b = lines(tmp_path / "a", host(100.0)), lines(tmp_path / "b", host(150.0))
    assert main(["bench", "compare", a, b]) == 1
    assert main(["bench", "compare", b, a]) == 0
    assert "host us 1+0" in capsys.readouterr().out


def test_it_has_help_of_its_own(capsys):
    assert main(["bench", "compare", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: minivllm bench compare A B [threshold=5]")


def test_settings_that_are_the_default_anyway_do_not_tell_rows_apart():
    assert (
        settings_of(["tp=1", "attention=auto", "workload=quick", "max_model_len=null", "device=auto"]) == "(defaults)"
    )
    assert settings_of(["tp=2", "repeat=3", "enforce_eager=true"]) == "enforce_eager=true tp=2"


def test_of_a_key_that_is_typed_twice_the_last_value_counts():
    assert settings_of(["tp=2", "tp=1"]) == "(defaults)" and settings_of(["tp=1", "tp=2"]) == "tp=2"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("workload.request_rate=50", "workload.request_rate=50.0"),
        ("workload.request_rate=50", "workload.request_rate=5e1"),
        ("workload.input_len=[4,8]", "workload.input_len=[4, 8]"),
        ("cache.enable_prefix_caching=False", "cache.enable_prefix_caching=no"),
        ("cache.enable_prefix_caching=True", "seed=0"),
        ("+max_model_len=100", "max_model_len=100"),
        ("model.hf_config.x=1", "++model.hf_config.x=1"),
        ("model.path='a'", "model.path=a"),
        ("attention='torch'", "attention=torch"),
        ("workload.num_requests=16", "workload.temperature=0.6"),  # both are those of workload=quick
    ],
)
def test_settings_that_are_the_same_are_called_the_same(one, other):
    assert settings_of([one]) == settings_of([other])


@pytest.mark.parametrize("one", ["tp=two", "model.path=/a(1)", "a.key=of,another,version", "workload=gone"])
def test_what_another_version_took_stays_as_it_was_typed(one):
    assert settings_of([one]) == one


def test_a_default_is_that_of_the_chosen_option():
    assert settings_of(["workload=mixed", "workload.num_requests=256"]) == "workload=mixed"
    assert settings_of(["workload.num_requests=16", "workload=mixed"]) == "workload=mixed workload.num_requests=16"
    assert settings_of(["workload=mixed", "workload.output_len=[100,1024]"]) == "workload=mixed"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "takes two files"),
        (["a", "b", "threshold=-1"], "threshold is a number of per cent from 0"),
        (["a", "b", "treshold=1"], "one setting, threshold=5. Did you mean threshold"),
        (["{folder}/none", "{folder}/none"], "cannot be read: No such file"),
        (["{folder}", "{folder}"], "is a folder; type {folder}/results.json"),
        (["{folder}/bad", "{folder}/bad"], "neither results.json of a sweep nor"),
        (["{folder}/empty", "{folder}/empty"], "has no result in it"),
        (["{folder}/a", "{folder}/b"], "no configuration in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, capsys, argv, message):
    (tmp_path / "bad").write_text("{}\n[")
    (tmp_path / "empty").write_text("")
    lines(tmp_path / "a", record({"tp": "2"}))
    lines(tmp_path / "b", record({"tp": "4"}))
    assert main(["bench", "compare", *(a.format(folder=tmp_path) for a in argv)]) == 2
    assert message.format(folder=tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        {"output_tokens_per_s": "fast", "spread": {}},
        {"spread": {"output_tokens_per_s": {"median": None, "min": 1, "max": 2}}},
        {"spread": {"output_tokens_per_s": {"median": 1}}},
        {"spread": 3},
        {"runs": None},
        {"host": [{"running": 1, "waiting": 0}]},
        {"device": ["cpu"]},
    ],
)
def test_a_record_that_no_bench_wrote_is_refused_with_its_files_name(tmp_path, capsys, wrong):
    a, b = lines(tmp_path / "a", record(SETTINGS)), lines(tmp_path / "b", record(SETTINGS) | wrong)
    assert main(["bench", "compare", a, b]) == 2
    assert f"{b} is neither results.json of a sweep nor JSON lines" in capsys.readouterr().err
