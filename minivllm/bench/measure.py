"""Runs a workload on an engine and times it: one warm-up, then as many measured runs as requested."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.bench.recorder import FirstTokens
from minivllm.bench.workloads import BenchRequest
from minivllm.core.longest_first import longest_first
from minivllm.core.sampling_params import RequestOutputKind, SamplingParams
from minivllm.errors import ConfigError, MinivllmError, RequestError

if TYPE_CHECKING:
    from minivllm.config.modes import WorkloadOptions
    from minivllm.core.engine import LLMEngine
    from minivllm.core.interfaces import StepObserver
    from minivllm.core.lora_request import LoRARequest
    from minivllm.core.outputs import RequestOutput

_WARM_UP_TOKENS = 8  # generated for each request
_WARM_UP_STEPS = 4  # full steps of prompt tokens, at most


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one measured run.

    Host time per step excludes waiting for the device; on a CPU also the launch, which is the model itself. Step times
    exclude waiting for requests to arrive. ``ttft`` (time to first token) and ``latency`` (to the last) count from a
    request's arrival.
    """

    seconds: float
    tokens_in: int
    tokens_out: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    steps: int
    preemptions: int
    draft_tokens: int
    accepted_tokens: int  # of these
    ms_per_step_mean: float
    ms_per_step_p50: float
    ms_per_step_p99: float
    host_us_per_step: float  # median
    host_us_per_step_p99: float
    launch_us_per_step: float  # median
    ttft_ms_p50: float
    ttft_ms_p99: float
    latency_ms_p50: float
    latency_ms_p99: float


@dataclass(slots=True)
class _Played:
    """Events of one run, in ``time.perf_counter`` seconds; requests by id."""

    marks: list[tuple[float, float, float]]  # after each step: seconds of steps so far, host_time, launch_time
    done: list[RequestOutput] = field(default_factory=list)
    arrivals: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class Bench:
    """Runs a workload on an otherwise idle engine."""

    def __init__(
        self, engine: LLMEngine, requests: Sequence[BenchRequest], options: WorkloadOptions, *,
        detokenize: bool = False, adapters: Sequence[LoRARequest] = (),
    ) -> None:  # fmt: skip
        """``adapters``: requests have them in turn."""
        self.engine, self.requests, self._adapters = engine, requests, cycle(adapters or (None,))
        self.params = options.sampling_params(detokenize=detokenize, output_kind=RequestOutputKind.FINAL_ONLY)
        if not any(request.arrival for request in requests):  # then order them as ``LLM.generate`` does
            sizes, params = [len(r.prompt) for r in requests], [self._params_of(r) for r in requests]
            self.requests = [requests[i] for i in longest_first(engine, sizes, params)]
        self.name, self.whole = options.name, options.ignore_eos
        self.on_cpu = engine.describe()["device"] == "cpu"
        self._number = 0
        self.step_ms: list[np.ndarray] = []  # (steps,) for each measured run

    def warm_up(self) -> None:
        """Run as many requests as fit at once, shortened, so that kernels are compiled and memory is allocated."""
        scheduler = self.engine.config.scheduler
        some = self.requests[: scheduler.max_num_seqs]
        most = max(_WARM_UP_STEPS * scheduler.max_num_batched_tokens // len(some), 1)
        self.add([BenchRequest(r.prompt[:most], min(r.max_tokens, _WARM_UP_TOKENS)) for r in some])
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.clear()

    def run(self) -> Run:
        """Run all requests to the last token, each added when it arrives."""
        stats = self.engine.stats
        before, first = asdict(stats), FirstTokens(self.engine.scheduler)
        played = self._play(first)
        seconds, done = played.seconds, played.done
        grown = {name: value - before[name] for name, value in asdict(stats).items()}
        self.clear()
        tokens_in = sum(len(r.prompt) for r in self.requests)
        tokens_out = sum(len(output.outputs[0].token_ids) for output in done)
        wanted = sum(r.max_tokens for r in self.requests)
        if len(done) != len(self.requests) or (self.whole and tokens_out != wanted):
            raise MinivllmError(
                f"the engine returned {tokens_out} tokens of {len(done)} requests, and {wanted} of "
                f"{len(self.requests)} were asked for: these figures would mean nothing"
            )
        wall, host, launch = np.diff(np.array(played.marks), axis=0).T  # each (steps,)
        host = host - launch if self.on_cpu else host
        ttft, latency = (
            1e3 * np.array([at[name] - arrival for name, arrival in played.arrivals.items()])
            for at in (first.at, played.ended)
        )
        self.step_ms.append(1e3 * wall)
        return Run(
            seconds=seconds,
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            output_tokens_per_s=tokens_out / seconds,
            total_tokens_per_s=(tokens_in + tokens_out) / seconds,
            steps=grown["steps"],
            preemptions=grown["preemptions"],
            draft_tokens=grown["draft_tokens"],
            accepted_tokens=grown["accepted_tokens"],
            ms_per_step_mean=1e3 * float(wall.mean()),
            ms_per_step_p50=1e3 * float(np.median(wall)),
            ms_per_step_p99=1e3 * float(np.percentile(wall, 99)),
            host_us_per_step=1e6 * float(np.median(host)),
            host_us_per_step_p99=1e6 * float(np.percentile(host, 99)),
            launch_us_per_step=1e6 * float(np.median(launch)),
            ttft_ms_p50=float(np.median(ttft)),
            ttft_ms_p99=float(np.percentile(ttft, 99)),
            latency_ms_p50=float(np.median(latency)),
            latency_ms_p99=float(np.percentile(latency, 99)),
        )

    def watch(self, observer: StepObserver) -> None:
        """Run the workload once more for ``observer``; without figures, because the observer takes time."""
        self._play(observer)
        self.clear()

    def _play(self, observer: StepObserver) -> _Played:
        engine, stats = self.engine, self.engine.stats
        due, played = deque(self.requests), _Played([(0.0, stats.host_time, stats.launch_time)])
        idle = 0.0  # waiting for arrivals, which step times exclude
        engine.observer = observer
        began = time.perf_counter()

        def admit(now: float) -> None:
            arrived = []
            while due and due[0].arrival <= now:
                arrived.append(due.popleft())
            for name, request in zip(self.add(arrived), arrived, strict=True):
                played.arrivals[name] = began + request.arrival

        admit(0.0)
        ready = time.perf_counter()
        while due or engine.has_unfinished_requests():
            if due:
                admit(time.perf_counter() - began)
                if not engine.has_unfinished_requests():
                    slept = time.perf_counter()
                    time.sleep(max(due[0].arrival - (slept - began), 0.0))
                    idle += time.perf_counter() - slept
                    continue
            outputs = engine.step()
            now = time.perf_counter()
            played.marks.append((now - ready - idle, stats.host_time, stats.launch_time))
            played.done += outputs
            for output in outputs:
                played.ended[output.request_id] = now
        played.seconds = time.perf_counter() - began
        engine.observer = None
        return played

    def add(self, requests: Sequence[BenchRequest]) -> list[str]:
        """Queue requests; returns their ids. Raises ConfigError for one that can never run with these settings."""
        names = []
        for request in requests:
            self._number += 1
            names.append(f"bench-{self._number}")
            try:
                params, adapter = self._params_of(request), next(self._adapters)
                self.engine.add_request(names[-1], request.prompt, params, lora_request=adapter)
            except RequestError as e:
                raise ConfigError(f"workload={self.name}: {e}") from e
        return names

    def _params_of(self, request: BenchRequest) -> SamplingParams:
        return self.params.clone(max_tokens=request.max_tokens)

    def clear(self) -> None:
        """Leave nothing in flight and nothing cached for the next run."""
        self.engine.abort([f"bench-{n}" for n in range(1, self._number + 1)])
        steps = -1
        while steps != self.engine.stats.steps:  # a step whose rows have all ended may still be in flight
            steps = self.engine.stats.steps
            self.engine.step()
        self.engine.reset_prefix_cache()


def summarize(runs: Sequence[Any]) -> dict[str, Any]:
    """The median of each figure of ``Run``s (or of another dataclass); under ``spread`` its minimum, median and
    maximum."""
    values = {name: [getattr(run, name) for run in runs] for name in runs[0].__dataclass_fields__}
    medians = {
        name: statistics.median_low(v) if isinstance(v[0], int) else statistics.median(v) for name, v in values.items()
    }
    spread = {name: {"min": min(v), "median": medians[name], "max": max(v)} for name, v in values.items()}
    return {**medians, "spread": spread, "runs": [asdict(run) for run in runs]}


QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


def step_quantiles(step_ms: Sequence[np.ndarray]) -> dict[str, float]:
    """Step times over all runs, in ms, at each of ``QUANTILES``."""
    return dict(zip(map(str, QUANTILES), np.quantile(np.concatenate(step_ms), QUANTILES).tolist(), strict=True))
