"""``minivllm bench`` from the command line: the table, the JSON object, the profile; and the measuring beneath."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_workloads import options

from minivllm.bench.measure import Bench, Run, summarize
from minivllm.bench.profile import busy_share, kernels_of, largest, operations_of
from minivllm.bench.record import environment, process_seconds
from minivllm.bench.workloads import make_requests
from minivllm.cli import main
from minivllm.config.compose import compose
from minivllm.core.engine import LLMEngine
from minivllm.plugins import default_registry

SMALL = ("workload.num_requests=5", "workload.input_len=[3,20]", "workload.output_len=[2,9]")
FIELDS = {
    "minivllm", "commit", "date", "cpu", "cpu_count", "load_average", "python", "torch", "triton", "overrides",
    "model", "device", "dtype", "attention", "attention_why", "cuda_graphs", "packed_weights", "weights",
    "kv_cache_dtype",
    "num_blocks",
    "block_size", "max_model_len", "scheduler", "tp", "load_format", "enforce_eager", "max_num_seqs",
    "max_num_batched_tokens",
    "async_scheduling", "workload", "detokenize", "repeat", "time_to_ready_s", "ready_phases_s",
    "torch_bytecode", "peak_gpu_bytes", "peak_host_bytes",
    "seconds", "tokens_in", "tokens_out", "output_tokens_per_s", "total_tokens_per_s", "steps", "preemptions",
    "draft_tokens", "accepted_tokens",
    "ms_per_step_mean", "ms_per_step_p50", "ms_per_step_p99", "host_us_per_step", "host_us_per_step_p99",
    "launch_us_per_step", "spread", "runs", "requests", "step_ms_quantiles",
    "ttft_ms_p50", "ttft_ms_p99", "latency_ms_p50", "latency_ms_p99",
}  # fmt: skip


def test_requests_have_random_adapters_in_turn(tiny_checkpoint, tmp_path, capsys, monkeypatch):
    """Which are written, loaded and gone before the first run."""
    had, add = [], LLMEngine.add_request

    def noted(self, *args, lora_request=None, **more):
        had.append(lora_request)
        return add(self, *args, lora_request=lora_request, **more)

    monkeypatch.setattr(LLMEngine, "add_request", noted)
    command = ["bench", f"model.path={tiny_checkpoint()}", "device=cpu", "workload.num_adapters=2", *SMALL]
    assert main([*command, "enable_lora=true", "max_loras=2", "max_lora_rank=3", "repeat=2"]) == 0
    assert len(had) == 3 * 5  # with the warm-up
    assert [its.lora_int_id for its in had] == [1 + i % 2 for i in range(len(had))]
    assert not any(Path(its.lora_path).exists() for its in had)
    monkeypatch.undo()
    for given in ([], ["enable_lora=true"], ["max_loras=2"]):
        capsys.readouterr()
        assert main([*command, *given]) == 2
        assert "as many places; type enable_lora=true max_loras=2" in capsys.readouterr().err


def test_one_object_a_run_is_appended_with_all_that_explains_it(tiny_checkpoint, tmp_path, capsys):
    file, trace = tmp_path / "out.jsonl", tmp_path / "profile.json"
    command = ["bench", f"model.path={tiny_checkpoint()}", "device=cpu", f"output={file}", *SMALL]
    assert main([*command, "repeat=3"]) == 0
    assert main([*command, f"profile={trace}", "profile_steps=2", "detokenize=true"]) == 0
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert set(first) == FIELDS and set(second) == FIELDS | {"profile"}

    requests = make_requests(options(*SMALL).workload, 512)
    assert first["tokens_in"] == sum(len(r.prompt) for r in requests)
    assert first["tokens_out"] == sum(r.max_tokens for r in requests)
    assert first["output_tokens_per_s"] > 0 and first["ms_per_step_p50"] <= first["ms_per_step_p99"]
    assert len(first["runs"]) == first["repeat"] == 3
    assert first["spread"]["seconds"]["min"] <= first["seconds"] <= first["spread"]["seconds"]["max"]
    assert first["workload"]["name"] == "quick" and first["workload"]["input_len"] == [3, 20]
    quantiles = list(first["step_ms_quantiles"].values())
    assert quantiles == sorted(quantiles) and quantiles[0] > 0
    assert 0 < first["ttft_ms_p50"] <= first["ttft_ms_p99"] <= first["latency_ms_p99"] <= 1e3 * first["seconds"] + 1
    assert first["attention"] == "torch" and first["dtype"] == "float32" and first["peak_gpu_bytes"] is None

    profile = second["profile"]
    assert profile["steps"] == 2 and profile["gpu_busy"] is None and 0 < len(profile["largest"]) <= 10
    assert json.loads(trace.read_text())["traceEvents"]
    printed = capsys.readouterr().out
    assert "output tokens/s" in printed and "CPU operation" in printed and str(trace) in printed


def test_it_runs_as_a_command(tiny_checkpoint, tmp_path):
    command = [sys.executable, "-m", "minivllm", "bench", f"model.path={tiny_checkpoint()}", "load_format=dummy"]
    done = subprocess.run(
        [*command, *SMALL, "output=out.jsonl", "device=cpu"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "workload=quick: 5 requests" in done.stdout and "peak memory of this process alone: " in done.stdout
    record = json.loads((tmp_path / "out.jsonl").read_text())
    assert record["load_format"] == "dummy" and record["time_to_ready_s"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def test_the_host_bench_from_the_command_line(tmp_path, capsys):
    file = tmp_path / "out.jsonl"
    small = ["workload.running=[1,4]", "workload.waiting=20", "workload.steps=20"]
    assert main(["bench", "workload=host", *small, f"output={file}"]) == 0
    record = json.loads(file.read_text())
    assert [(r["running"], r["waiting"]) for r in record["host"]] == [(1, 0), (1, 20), (4, 0), (4, 20)]
    assert {limit["limit"] for limit in record["limits"]} == {1.2}
    assert "µs a step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("tp=2", "tp=2: with workload=host no model runs; leave tp out"),
        ("model=qwen3", "no model runs"),
        ("attention.decode=torch", "no model runs"),
        ("cache.num_blocks=64", "no model runs"),
        ("profile_steps=7", "no model runs"),
        ("workload.ignore_eos=false", "workload.ignore_eos is not a key of workload=host"),
        ("scheduler.max_num_seqs=4", "workload.running says how many run; leave scheduler.max_num_seqs out"),
    ],
)
def test_keys_that_the_host_bench_does_not_read_are_refused(typed, said, capsys):
    small = ["workload.running=[2]", "workload.waiting=5", "workload.steps=20"]
    assert main(["bench", "workload=host", *small, typed]) == 2
    assert said in capsys.readouterr().err
    read = ["scheduler=prefill_first", "scheduler.max_num_batched_tokens=64", "sampler=default", "cache.block_size=32"]
    assert main(["bench", "workload=host", *small, *read, "cache.enable_prefix_caching=false"]) == 0


def test_check_turns_a_passed_limit_into_the_exit_code(monkeypatch):
    monkeypatch.setattr("minivllm.bench.host.LIMIT_QUEUE", 0.0)
    small = ["bench", "workload=host", "workload.running=[2]", "workload.waiting=5", "workload.steps=20"]
    assert main(small) == 0
    assert main([*small, "check=true"]) == 1


def test_what_cannot_run_is_refused(tiny_checkpoint, tmp_path, capsys):
    model = f"model.path={tiny_checkpoint()}"
    assert main(["bench", model, "workload=mixed"]) == 2
    assert "exceed max_model_len=1024" in capsys.readouterr().err
    assert main(["bench", model, "device=cpu", "cache.num_blocks=1", "workload.num_requests=1"]) == 2
    assert "workload=quick: a 64-token prompt with max_tokens=8 needs 5 cache blocks" in capsys.readouterr().err
    assert main(["bench", model, f"output={tmp_path / 'no' / 'folder'}"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["bench", model, f"trace={tmp_path / 'no' / 'folder.json'}"]) == 2
    assert main(["bench", model, "workload=mixed", f"output={tmp_path / 'a'}", f"trace={tmp_path / 'b'}"]) == 2
    assert not list(tmp_path.iterdir())  # a refused run leaves no empty file
    capsys.readouterr()
    assert main(["bench", model, "output=-"]) == 2
    assert "output=-: standard output has the tables of bench; type output=FILE" in capsys.readouterr().err
    assert main(["bench", model, "sweep.dir=x"]) == 2
    assert "sweep.dir belongs to a sweep" in capsys.readouterr().err


def test_runs_start_from_the_same_state(tiny_checkpoint):
    """Nothing of a run is left in the prefix cache or under way, so all runs do the same steps."""
    composed = compose([f"model.path={tiny_checkpoint()}", "device=cpu", *SMALL], default_registry(), mode="bench")
    workload = options(*SMALL).workload
    with LLMEngine.from_config(composed.engine) as engine:
        bench = Bench(engine, make_requests(workload, 512), workload)
        bench.warm_up()
        runs = [bench.run(), bench.run()]
        assert runs[0].steps == runs[1].steps and engine.stats.cached_tokens == 0
        assert not engine.has_unfinished_requests() and not engine.scheduler.has_work
        engine.scheduler.check()


def test_summary_is_the_median_and_the_spread():
    runs = [Run(seconds, 10, 20, *[1.0] * 2, 7, 0, 0, 0, *[1.0] * 10) for seconds in (3.0, 1.0, 2.0)]
    found = summarize(runs)
    assert found["seconds"] == 2.0 and found["tokens_out"] == 20 and found["steps"] == 7
    assert found["spread"]["seconds"] == {"min": 1.0, "median": 2.0, "max": 3.0}


def test_busy_share_counts_overlaps_once():
    assert busy_share([(0.0, 2.0), (1.0, 3.0), (1.5, 1.6), (5.0, 10.0)]) == pytest.approx(0.8)
    work = largest([("a", 0.0, 2.0), ("b", 1.0, 5.0), ("a", 7.0, 4.0)])
    assert [(w.name, w.count, w.total_us) for w in work] == [("a", 2, 6.0), ("b", 1, 5.0)]


def test_only_kernels_of_a_trace_count():
    events = [
        {"cat": "kernel", "name": "k", "ts": 10.5, "dur": 2.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 90.0, "tid": 1},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 1.0, "dur": 1.0},
        {"ph": "M", "name": "process_name"},
    ]
    assert kernels_of(events) == [("k", 10.5, 2.0)]
    assert operations_of(events) == [("aten::mm", 0.0, 90.0)]


def test_an_operation_does_not_count_what_it_calls():
    spans = [("linear", 0, 100, 1), ("mm", 20, 60, 1), ("empty", 30, 10, 1), ("add", 100, 5, 1), ("mm", 10, 50, 2)]
    events = [{"cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": tid} for name, ts, dur, tid in spans]
    own = {(name, start): us for name, start, us in operations_of(reversed(events))}
    assert own == {("linear", 0): 40, ("mm", 20): 50, ("empty", 30): 10, ("add", 100): 5, ("mm", 10): 50}


def test_of_several_ranks_the_first_is_profiled(tiny_checkpoint, tmp_path, capsys):
    file, trace = tmp_path / "out.jsonl", tmp_path / "profile.json"
    command = ["bench", f"model.path={tiny_checkpoint()}", "device=cpu", "tp=2", f"output={file}", *SMALL]
    assert main([*command, f"profile={trace}", "profile_steps=2"]) == 0
    profile = json.loads(file.read_text())["profile"]
    assert profile["steps"] == 2 and "c10d::allreduce_" in {
        e["name"] for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "cpu_op"
    }
    assert any("mm" in work["name"] for work in profile["largest"])
    assert "CPU operation" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.part"))


def test_the_process_knows_its_age():
    first = process_seconds()
    time.sleep(0.05)
    second = process_seconds()
    assert first is not None and second is not None and 0.03 < second - first < 5


def test_a_copy_without_its_git_folder_can_say_its_commit(monkeypatch):
    monkeypatch.setenv("MINIVLLM_COMMIT", "0123abc")
    assert environment()["commit"] == "0123abc"
