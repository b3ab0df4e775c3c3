"""A run from inside: arrivals are honoured, the trace has its tracks and flows, the timeline is drawn."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import step_batch
from test_workloads import options

from minivllm.bench.measure import Bench
from minivllm.bench.perfetto import TRACKS, write_trace
from minivllm.bench.recorder import FirstTokens, StepRecorder
from minivllm.bench.workloads import BenchRequest
from minivllm.cli import main
from minivllm.config.compose import compose
from minivllm.core.engine import LLMEngine
from minivllm.core.interfaces import Committed
from minivllm.plugins import default_registry

ENGINE = ("device=cpu", "cache.num_blocks=40", "cache.block_size=4", "scheduler.max_num_seqs=3")


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    overrides = [f"model.path={tiny_checkpoint()}", *ENGINE, "scheduler.max_num_batched_tokens=16"]
    with LLMEngine.from_config(compose(overrides, default_registry(), mode="bench").engine) as engine:
        yield engine


def bench(engine: LLMEngine, *requests: BenchRequest) -> Bench:
    return Bench(engine, list(requests), options().workload)


def test_requests_arrive_when_the_trace_says(engine):
    run = bench(engine, BenchRequest([5] * 3, 2), BenchRequest([6] * 3, 2, 1.0)).run()
    assert run.seconds > 1.0
    # the second is served at once, from its own arrival on; and sleeping until it arrives is no step
    assert max(run.ttft_ms_p99, run.latency_ms_p99, run.ms_per_step_p99) < 700
    assert run.tokens_out == 4


def test_a_request_that_waits_for_a_slot_waits_from_its_arrival(engine):
    run = bench(engine, *[BenchRequest([5] * 3, 40)] * 3, BenchRequest([6] * 3, 1, 0.001)).run()
    assert (
        run.ttft_ms_p99 > 0.8 * run.latency_ms_p50 > run.ttft_ms_p50
    )  # its first token comes when they have their last


def recorded(engine: LLMEngine, *requests: BenchRequest) -> StepRecorder:
    recorder = StepRecorder(engine)
    bench(engine, *requests).watch(recorder)
    recorder.finish()
    assert engine.observer is None
    return recorder


def test_a_first_token_is_of_the_sequence_that_was_scheduled_whoever_has_its_slot_by_then():
    scheduler = SimpleNamespace(sequences=[SimpleNamespace(request_id="a")])
    batch, first = step_batch([], [3]), FirstTokens(scheduler)
    first.scheduled(batch, began=0.0)
    scheduler.sequences[0] = SimpleNamespace(request_id="b")
    one = np.zeros(1, dtype=np.int32)
    first.committed(batch, Committed(rows=one, slots=one, token_ids=one, finished=[]), done=1.0)
    assert first.at == {"a": 1.0}


def test_the_recorder_sees_every_step_and_token(engine):
    requests = [BenchRequest([n + 3] * (5 + 6 * n), 10 - n) for n in range(5)]
    recorder = recorded(engine, *requests)
    steps = recorder.steps
    assert [s.number - steps[0].number for s in steps] == list(range(len(steps)))
    assert sum(s.prefill_tokens for s in steps) == sum(len(r.prompt) for r in requests)
    assert sum(s.decode_tokens for s in steps) >= sum(r.max_tokens - 1 for r in requests)
    names = [f"bench-{n}" for n in range(1, 6)]
    for what in ("admitted", "first", "finished"):
        assert sorted(name for s in steps for name in getattr(s, what)) == names, what
    assert max(s.running for s in steps) == 3
    assert [s.waiting for s in steps[:2]] == [0, 2]  # the first is launched as soon as the requests there fill it
    assert 0 < max(s.blocks for s in steps) <= 40
    for s in steps:
        assert s.began <= s.planned <= s.launched and s.done <= s.ended
        assert s.device[0] <= s.device[1]


def test_a_trace_has_four_tracks_and_a_flow_for_each_request(engine, tmp_path):
    requests = [BenchRequest([n + 3] * 20, 5) for n in range(4)]  # longer than a step's budget: several chunks
    recorder, file = recorded(engine, *requests), tmp_path / "trace.json"
    write_trace(recorder, file, {"model": "tiny", "device": "a GPU"})
    events = json.loads(file.read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tuple(threads.values()) == TRACKS
    slices = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            slices[threads[e["tid"]]].append((e["ts"], e["ts"] + e["dur"]))
    assert {track: len(of_track) for track, of_track in slices.items()} == dict.fromkeys(TRACKS, len(recorder.steps))
    for of_track in slices.values():  # no two at once on a track
        assert all(end <= start + 0.002 for (_, end), (start, _) in pairwise(of_track))
    flows = defaultdict(list)
    for e in events:
        if e["ph"] in "stf":
            flows[e["name"], e["id"]].append(e)
            # an arrow's end belongs to the slice around it
            assert any(start <= e["ts"] <= end for start, end in slices[threads[e["tid"]]])
    assert len(flows) == len({number for _, number in flows}) == len(requests)
    for arrows in flows.values():
        assert [e["ph"] for e in arrows] == ["s", *["t"] * (len(arrows) - 2), "f"]
        assert [e["ts"] for e in arrows] == sorted(e["ts"] for e in arrows)
        tracks = [threads[e["tid"]] for e in arrows]
        assert tracks[0] == "scheduling" and tracks[-1] == "commit" and tracks.count("GPU step") >= 2


@pytest.mark.gpu
def test_on_a_gpu_steps_are_timed_by_events_and_a_sweeps_profile_finds_kernels(tiny_checkpoint, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    small = ["workload.num_requests=4", "workload.input_len=20", "workload.output_len=40"]
    file, trace = tmp_path / "out.jsonl", tmp_path / "trace.json"
    command = ["bench", f"model.path={tiny_checkpoint()}", "device=cuda", "profile=gpu", *small]
    assert main([*command, f"output={file}", f"trace={trace}"]) == 0
    assert 0 < json.loads(file.read_text())["profile"]["gpu_busy"] <= 1
    tree = json.loads(trace.read_text())
    assert tree["otherData"]["gpu_clock"] == "CUDA events"
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in tree["traceEvents"] if e["ph"] == "X" and e["tid"] == 3]
    launches = [e["ts"] for e in tree["traceEvents"] if e["ph"] == "X" and e["tid"] == 2]
    assert all(end <= start + 1 for (_, end), (start, _) in pairwise(steps))
    # no step begins on the device before it is launched, on one clock to within 200 µs
    assert all(start > launch - 200 for (start, _), launch in zip(steps, launches, strict=True))


def test_trace_and_timeline_from_the_command_line(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    small = ["workload.num_requests=4", "workload.input_len=5", "workload.output_len=4"]
    command = ["bench", f"model.path={tiny_checkpoint()}", *ENGINE, *small]
    assert main([*command, "trace=True", "timeline=png"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"minivllm-trace.json", "minivllm-timeline.png"}
    assert json.loads(Path("minivllm-trace.json").read_text())["otherData"]["gpu_clock"] == "the launch itself"
    assert Path("minivllm-timeline.png").read_bytes()[:4] == b"\x89PNG"
    assert "minivllm-trace.json" in capsys.readouterr().out


def test_timeline_names_what_is_missing(tiny_checkpoint, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", f"model.path={tiny_checkpoint()}", "timeline=png"]) == 2
    assert "pip install 'minivllm[bench]'" in capsys.readouterr().err
