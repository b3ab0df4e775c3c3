"""What a step costs on the host when the model costs nothing: scheduling, batch building and commit.

Real scheduler, block manager and engine with an executor that computes nothing. All sizes are measured in turns of a
few steps, so that a slowdown of the machine affects them all.
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from minivllm.bench.workloads import make_prompt
from minivllm.core.block_manager import PagedBlockManager
from minivllm.core.engine import LLMEngine
from minivllm.core.garbage import frozen
from minivllm.core.interfaces import Executor, StepResult
from minivllm.core.model_config import FrozenDict, ModelConfig
from minivllm.core.sampling_params import RequestOutputKind, SamplingParams
from minivllm.errors import ConfigError
from minivllm.rounding import cdiv

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.config.modes import WorkloadOptions
    from minivllm.core.batch import Batch
    from minivllm.models.tokenizer import Tokenizer
    from minivllm.plugins.registry import Registry

_TURN = 20  # steps of one engine before the next has its turn
_WARM_UP = 20
_VOCAB = 32768
_QUEUED_PROMPT = 16  # tokens of each waiting prompt

LIMIT_US = 200.0  # the median of a step with 256 running
LIMIT_GROWTH = 4.5  # of 1024 running against 256
LIMIT_QUEUE = 1.2  # of a long queue against an empty one


@dataclass(frozen=True, slots=True)
class _Done:
    token_ids: np.ndarray

    def result(self) -> StepResult:
        return StepResult(self.token_ids)


class NullExecutor(Executor):
    """Every token is 0, at once."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self._num_blocks, self._zeros = num_blocks, np.zeros(num_slots, dtype=np.int32)

    def start(self) -> int:
        return self._num_blocks

    def launch(self, batch: Batch) -> _Done:
        return _Done(self._zeros[: len(batch.slots)])

    def check_health(self) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {"device": "none", "attention": "none", "dtype": "none"}

    def shutdown(self) -> None:
        pass


class _NoTokenizer:
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostRow:
    """Microseconds per step with ``running`` decoding sequences and ``waiting`` more in the queue."""

    running: int
    waiting: int
    us_p50: float
    us_p99: float


def measure_host(config: EngineConfig, options: WorkloadOptions, registry: Registry) -> list[HostRow]:
    """For each size, with an empty and with a long queue."""
    assert options.running is not None and options.waiting is not None and options.steps is not None
    engines = {
        (running, waiting): build(config, options, registry, running, waiting)
        for running in options.running
        for waiting in (0, options.waiting)
    }
    times: dict[tuple[int, int], list[float]] = {case: [] for case in engines}
    gc.collect()
    with frozen():  # else a collection walks the queued requests
        for _ in range(cdiv(options.steps, _TURN)):
            for case, engine in engines.items():
                times[case] += _turn(engine, case[0])
    rows = []
    for (running, waiting), seconds in times.items():
        us = 1e6 * np.array(seconds[: options.steps])
        rows.append(HostRow(running, waiting, float(np.median(us)), float(np.percentile(us, 99))))
    return rows


def build(config: EngineConfig, options: WorkloadOptions, registry: Registry, running: int, waiting: int) -> LLMEngine:
    """An engine on which ``running`` sequences decode, in all slots there are, and ``waiting`` more wait."""
    assert options.steps is not None and options.input_len is not None
    longest = options.input_len[1] if isinstance(options.input_len, tuple) else options.input_len
    block_size = config.cache.block_size
    # Nobody ends while it is measured. The steps until the last prompt is computed count, too.
    budget = max(config.scheduler.max_num_batched_tokens, 2 * running)
    outputs = options.steps + _TURN + _WARM_UP + cdiv(running * longest, budget - running) + 8
    max_model_len = longest + outputs
    per_sequence = cdiv(max_model_len, block_size)
    num_blocks = (running + 1) * per_sequence + running  # with what an admission leaves free
    scheduler_options = replace(config.scheduler, max_num_seqs=running, max_num_batched_tokens=budget)
    config = replace(config, scheduler=scheduler_options)
    blocks = PagedBlockManager(
        num_blocks, block_size, running, per_sequence, prefix_caching=config.cache.enable_prefix_caching
    )
    sampler_class = registry.resolve("sampler", config.sampler.name)
    scheduler = registry.resolve("scheduler", config.scheduler.name)(
        scheduler_options, blocks, max_model_len, sampler_class.row
    )
    engine = LLMEngine(
        config,
        _model_config(max_model_len),
        max_model_len,
        tokenizer=cast("Tokenizer", _NoTokenizer()),
        scheduler=scheduler,
        sampler_class=sampler_class,
        executor=NullExecutor(num_blocks, running),
        num_blocks=num_blocks,
    )
    draw = random.Random(options.seed)
    params = SamplingParams(
        max_tokens=outputs, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    for number in range(running):
        engine.add_request(f"running-{number}", make_prompt(options, range(_VOCAB), draw), params)
    _fill(engine, running)
    prompt = list(range(_QUEUED_PROMPT))
    for number in range(waiting):
        engine.add_request(f"waiting-{number}", prompt, params)
    for _ in range(_WARM_UP):
        engine.step()
    return engine


def _fill(engine: LLMEngine, running: int) -> None:
    """Step until every sequence gets a token in each step."""
    gained = 0
    while gained < running:
        before, steps = engine.stats.output_tokens, engine.stats.steps
        engine.step()
        gained = engine.stats.output_tokens - before
        if engine.stats.steps == steps:
            raise ConfigError(f"scheduler={engine.config.scheduler.name} does not run {running} sequences at once")


def _turn(engine: LLMEngine, running: int) -> list[float]:
    """Seconds of some steps, one by one."""
    marks, before = [time.perf_counter()], engine.stats.output_tokens
    for _ in range(_TURN):
        engine.step()
        marks.append(time.perf_counter())
    assert engine.stats.output_tokens - before == _TURN * running, "a sequence did not decode"
    return np.diff(marks).tolist()


def _model_config(max_model_len: int) -> ModelConfig:
    """There is no model; the engine needs the vocabulary size and the end-of-sequence tokens."""
    return ModelConfig(
        architecture="none", vocab_size=_VOCAB, hidden_size=1, intermediate_size=1, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=1, rms_norm_eps=1e-6, max_position=max_model_len, tie_word_embeddings=True,
        attention_bias=False, mlp_bias=False, hidden_act="silu", rope_parameters=FrozenDict(),
    )  # fmt: skip


# --------------------------------------------------------------------------- limits


@dataclass(frozen=True, slots=True)
class Limit:
    name: str
    value: float
    limit: float

    @property
    def held(self) -> bool:
        return self.value <= self.limit


def limits(rows: list[HostRow]) -> list[Limit]:
    """The limits that these sizes can check."""
    us = {(row.running, row.waiting): row.us_p50 for row in rows}
    found = []
    if (256, 0) in us:
        found.append(Limit("µs a step, 256 running", us[256, 0], LIMIT_US))
    if (256, 0) in us and (1024, 0) in us:
        found.append(Limit("1024 running against 256", us[1024, 0] / us[256, 0], LIMIT_GROWTH))
    found += [
        Limit(
            f"{row.waiting:,} waiting against none, {row.running} running", row.us_p50 / us[row.running, 0], LIMIT_QUEUE
        )
        for row in rows
        if row.waiting
    ]
    return found
