"""The /metrics endpoint: an engine's state and totals, under vLLM's names with the prefix ``minivllm:``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from minivllm.core.engine import LLMEngine
    from minivllm.serve.timings import Histogram, Timings

_PREFIX = "minivllm:"


class EngineCollector(Collector):
    """Reads everything at scrape time, so that metrics cost the engine nothing. ``running``, ``waiting``: numbers of
    requests; ``not_accepted``: prompt tokens of running requests that may still be refused."""

    def __init__(
        self, engine: LLMEngine, timings: Timings, running: int, waiting: int, model: str, not_accepted: int
    ) -> None:
        self._engine, self._timings, self._model = engine, timings, model
        self._running, self._waiting, self._not_accepted = running, waiting, not_accepted

    def collect(self) -> Iterator[Metric]:
        stats, timings, blocks = self._engine.stats, self._timings, self._engine.scheduler.blocks
        accepted = stats.prompt_tokens - self._not_accepted
        yield self._gauge("num_requests_running", "Requests that run.", self._running)
        yield self._gauge("num_requests_waiting", "Requests that wait to run.", self._waiting)
        used = 1 - blocks.num_free / blocks.num_blocks
        yield self._gauge("kv_cache_usage_perc", "Cache blocks that sequences hold; 1 is all.", used)
        yield self._counter("prompt_tokens", "Prompt tokens of accepted requests.", accepted)
        yield self._counter("generation_tokens", "Tokens generated.", stats.output_tokens)
        yield self._counter("num_preemptions", "Sequences that had to give back their cache.", stats.preemptions)
        yield self._counter("prefix_cache_queries", "Prompt tokens of finished requests.", timings.prefix_queries)
        yield self._counter("prefix_cache_hits", "Those of them that were found cached.", timings.prefix_hits)
        if self._engine.config.scheduler.num_speculative_tokens:
            yield self._counter("spec_decode_num_drafts", "Drafts that were verified.", stats.drafts)
            yield self._counter("spec_decode_num_draft_tokens", "Their tokens.", stats.draft_tokens)
            yield self._counter("spec_decode_num_accepted_tokens", "Those accepted.", stats.accepted_tokens)
        ended = CounterMetricFamily(
            _PREFIX + "request_success", "Completions that ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in sorted(timings.ends.items()):
            ended.add_metric([self._model, reason], count)
        yield ended
        yield self._histogram("request_queue_time_seconds", "Arrival to admission, by completion.", timings.queue)
        yield self._histogram(
            "time_to_first_token_seconds", "Arrival to first token, by completion.", timings.first_token
        )
        yield self._histogram("inter_token_latency_seconds", "From token to token.", timings.between_tokens)
        yield self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token, by request.", timings.whole_request
        )

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, help, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, help, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, help: str, values: Histogram) -> Metric:
        family = HistogramMetricFamily(_PREFIX + name, help, labels=["model_name"])
        upto = np.cumsum(values.counts).tolist()
        bounds = [*(f"{bound:g}" for bound in values.bounds), "+Inf"]
        family.add_metric([self._model], list(zip(bounds, upto, strict=True)), values.sum)
        return family
