"""The host bench runs the real scheduler, in the state that it says it measures."""

from __future__ import annotations

import pytest
from test_workloads import workload

from minivllm.bench.host import HostRow, build, limits, measure_host
from minivllm.config.engine_config import CacheOptions, EngineConfig, SchedulerOptions
from minivllm.plugins import default_registry


@pytest.mark.parametrize("scheduler", ["mixed", "prefill_first"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_it_measures_every_size_with_and_without_a_queue(scheduler, prefix_caching):
    config = EngineConfig(
        scheduler=SchedulerOptions(name=scheduler, max_num_batched_tokens=64),
        cache=CacheOptions(enable_prefix_caching=prefix_caching, block_size=4),
    )
    options = workload("workload=host", "workload.running=[1,48]", "workload.waiting=100", "workload.steps=50")
    rows = measure_host(config, options, default_registry())
    assert [(r.running, r.waiting) for r in rows] == [(1, 0), (1, 100), (48, 0), (48, 100)]
    assert all(0 < r.us_p50 <= r.us_p99 for r in rows)


def test_every_running_sequence_decodes_and_the_queue_waits():
    options = workload("workload=host", "workload.running=[8]", "workload.waiting=50", "workload.steps=20")
    engine = build(EngineConfig(), options, default_registry(), 8, 50)
    assert engine.scheduler.num_running == 8 and engine.scheduler.num_waiting == 50
    before = engine.stats.output_tokens
    engine.step()
    assert engine.stats.output_tokens - before == 8
    engine.scheduler.check()


def test_limits_are_those_of_the_promise():
    rows = [HostRow(256, 0, 150.0, 200.0), HostRow(256, 9, 170.0, 200.0), HostRow(1024, 0, 700.0, 900.0)]
    found = {limit.name: (limit.value, limit.held) for limit in limits(rows)}
    assert found["µs a step, 256 running"] == (150.0, True)
    assert found["1024 running against 256"] == (pytest.approx(4.667, abs=1e-3), False)
    assert found["9 waiting against none, 256 running"] == (pytest.approx(1.133, abs=1e-3), True)
