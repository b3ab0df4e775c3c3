"""Runs a workload on an engine and times it: one warm-up, then as many measured runs as asked for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.bench.workloads import BenchRequest
from minivllm.core.sampling_params import RequestOutputKind, SamplingParams
from minivllm.errors import MinivllmError

if TYPE_CHECKING:
    from minivllm.config.modes import WorkloadOptions
    from minivllm.core.engine import LLMEngine

_WARM_UP_TOKENS = 8  # generated for each request
_WARM_UP_STEPS = 4  # full steps of prompt tokens, at most


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one measured run. The host's time in a step leaves out waiting for the device; on a CPU also the
    launch, which is the model itself."""

    seconds: float
    tokens_in: int
    tokens_out: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    steps: int
    preemptions: int
    ms_per_step_mean: float
    ms_per_step_p50: float
    ms_per_step_p99: float
    host_us_per_step: float  # median
    host_us_per_step_p99: float
    launch_us_per_step: float  # median


class Bench:
    """A workload on an engine that has nothing else to do."""

    def __init__(
        self, engine: LLMEngine, requests: Sequence[BenchRequest], options: WorkloadOptions, *, detokenize: bool = False
    ) -> None:
        assert options.temperature is not None
        self.engine, self.requests = engine, requests
        self.params = SamplingParams(
            temperature=options.temperature,
            ignore_eos=options.ignore_eos,
            detokenize=detokenize,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.whole = options.ignore_eos
        self.on_cpu = engine.describe()["device"] == "cpu"
        self._number = 0

    def warm_up(self) -> None:
        """As many requests as run at once, shortened, so that kernels are compiled and memory is in place."""
        scheduler = self.engine.config.scheduler
        some = self.requests[: scheduler.max_num_seqs]
        most = max(_WARM_UP_STEPS * scheduler.max_num_batched_tokens // len(some), 1)
        self.add([BenchRequest(r.prompt[:most], min(r.max_tokens, _WARM_UP_TOKENS)) for r in some])
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.clear()

    def run(self) -> Run:
        """All requests at once, to the last token."""
        engine, stats = self.engine, self.engine.stats
        before, marks = asdict(stats), [(0.0, stats.host_time, stats.launch_time)]
        done = []
        began = time.perf_counter()
        self.add(self.requests)
        ready = time.perf_counter()
        while engine.has_unfinished_requests():
            done += engine.step()
            marks.append((time.perf_counter() - ready, stats.host_time, stats.launch_time))
        seconds = time.perf_counter() - began
        steps, preemptions = stats.steps - before["steps"], stats.preemptions - before["preemptions"]
        self.clear()
        tokens_in = sum(len(r.prompt) for r in self.requests)
        tokens_out = sum(len(output.outputs[0].token_ids) for output in done)
        wanted = sum(r.max_tokens for r in self.requests)
        if len(done) != len(self.requests) or (self.whole and tokens_out != wanted):
            raise MinivllmError(
                f"the engine returned {tokens_out} tokens of {len(done)} requests, and {wanted} of "
                f"{len(self.requests)} were asked for: these figures would mean nothing"
            )
        wall, host, launch = np.diff(np.array(marks), axis=0).T  # each (steps,)
        host = host - launch if self.on_cpu else host
        return Run(
            seconds=seconds,
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            output_tokens_per_s=tokens_out / seconds,
            total_tokens_per_s=(tokens_in + tokens_out) / seconds,
            steps=steps,
            preemptions=preemptions,
            ms_per_step_mean=1e3 * float(wall.mean()),
            ms_per_step_p50=1e3 * float(np.median(wall)),
            ms_per_step_p99=1e3 * float(np.percentile(wall, 99)),
            host_us_per_step=1e6 * float(np.median(host)),
            host_us_per_step_p99=1e6 * float(np.percentile(host, 99)),
            launch_us_per_step=1e6 * float(np.median(launch)),
        )

    def add(self, requests: Sequence[BenchRequest]) -> None:
        """Queue them. Raises RequestError for one that can never run here."""
        for request in requests:
            self._number += 1
            params = self.params.clone(max_tokens=request.max_tokens)
            self.engine.add_request(f"bench-{self._number}", request.prompt, params)

    def clear(self) -> None:
        """Leave nothing under way and nothing cached for the next run."""
        self.engine.abort([f"bench-{n}" for n in range(1, self._number + 1)])
        steps = -1
        while steps != self.engine.stats.steps:  # a step of rows that have all ended may still be in flight
            steps = self.engine.stats.steps
            self.engine.step()
        self.engine.reset_prefix_cache()


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """The median of each figure, and under ``spread`` its least, median and most."""
    values = {name: [getattr(run, name) for run in runs] for name in Run.__dataclass_fields__}
    medians = {
        name: statistics.median_low(v) if isinstance(v[0], int) else statistics.median(v) for name, v in values.items()
    }
    spread = {name: {"min": min(v), "median": medians[name], "max": max(v)} for name, v in values.items()}
    return {**medians, "spread": spread, "runs": [asdict(run) for run in runs]}
