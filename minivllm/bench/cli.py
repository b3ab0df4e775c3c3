"""``minivllm bench``: measure one workload; prints a table, writes one JSON object."""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.bench.figures import show_host, show_profile, show_runs, show_served
from minivllm.bench.record import append, environment, mark, peak_memory, process_seconds
from minivllm.bytecode import without_bytecode
from minivllm.config.modes import BenchOptions
from minivllm.config.overrides import Override
from minivllm.errors import ConfigError, MinivllmError
from minivllm.files import check_writable

if TYPE_CHECKING:
    from minivllm.bench.measure import Bench
    from minivllm.config.compose import Composed
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.engine import LLMEngine
    from minivllm.models.tokenizer import Tokenizer


# The keys that ``workload=host`` reads, and ``profile``, which sweeps add.
_HOST = ("scheduler", "sampler", "cache.block_size", "cache.enable_prefix_caching", "check", "profile")
TRACE, TIMELINE = "minivllm-trace.json", "minivllm-timeline.png"  # what trace=true and timeline=true write


@dataclass(frozen=True, slots=True)
class _Files:
    """The requested output files, checked to be writable before anything is loaded."""

    output: Path | None
    profile: Path | None
    trace: Path | None
    timeline: Path | None

    @classmethod
    def of(cls, options: BenchOptions) -> _Files:
        if options.timeline != "false":
            from minivllm.bench.timeline import check_matplotlib

            check_matplotlib()
        return cls(
            None if options.output is None else _writable("output", options.output),
            _file("profile", options.profile, {"true": None, "gpu": None}),
            _file("trace", options.trace, {"true": TRACE}),
            _file("timeline", options.timeline, {"true": TIMELINE, "png": TIMELINE}),
        )

    def within(self, folder: str) -> _Files:
        """Files of the same names in ``folder``: where ranks write whose output is discarded."""
        return _Files(*(None if path is None else Path(folder, path.name) for path in astuple(self)))


def _file(key: str, value: str, words: dict[str, str | None]) -> Path | None:
    name = words.get(value, value)
    return None if name is None or name == "false" else _writable(key, name)


def _writable(key: str, name: str) -> Path:
    if name == "-":
        raise ConfigError(f"{key}=-: standard output has the tables of bench; type {key}=FILE")
    return check_writable(name, key)


def run(composed: Composed) -> int:
    """Measure; returns the exit code."""
    started = process_seconds()
    options = composed.options
    assert isinstance(options, BenchOptions)
    for key in ("dir", "timeout"):
        if getattr(options.sweep, key) is not None:
            raise ConfigError(f"sweep.{key} belongs to a sweep: type `minivllm bench -m ...`, or leave it out")
    files = _Files.of(options)
    if composed.speaks:
        return _measured(composed, options, files, started)
    with tempfile.TemporaryDirectory(prefix="minivllm-") as folder:
        return _measured(composed, options, files.within(folder), started)


def _measured(composed: Composed, options: BenchOptions, files: _Files, started: float | None) -> int:
    record: dict[str, Any] = {**environment(), "overrides": list(composed.overrides)}
    if options.url is not None:
        held = _served(options, composed.engine.model.tokenizer, record, composed.overrides)
    elif options.workload.host:
        held = _host(composed.engine, options, record, composed.overrides)
    else:
        _engine(composed.engine, options, record, files, started)
        held = True
    if files.output is not None:
        append(files.output, record)
        print(f"written to {files.output}")
    return 0 if held or not (options.check or options.url) else 1


def _check_read(overrides: Sequence[str], read: tuple[str, ...], why: str) -> None:
    """Raise ConfigError for a typed key that would have no effect: neither it nor its group is in ``read``."""
    for typed in overrides:
        key = Override.parse(typed).key
        if not {key, key.partition(".")[0]} & {"mode", "workload", "output", "repeat", *read}:
            raise ConfigError(f"{typed}: {why}; leave {key} out")


# --------------------------------------------------------------------------- with a model


def _engine(
    config: EngineConfig, options: BenchOptions, record: dict[str, Any], files: _Files, started: float | None
) -> None:
    """Measure an engine of this configuration: how long it takes to be ready, then the workload."""
    clock = time.perf_counter()
    from minivllm.assemble import find_model, model_length
    from minivllm.bench.adapters import check_adapters, load_random_adapters
    from minivllm.bench.measure import Bench
    from minivllm.bench.workloads import check_fits, make_requests
    from minivllm.core.engine import LLMEngine

    imported = time.perf_counter()
    path, model_config = find_model(config)

    @lru_cache
    def tokenizer() -> Tokenizer:  # only a trace with texts needs it
        from minivllm.models.tokenizer import load_tokenizer

        return load_tokenizer(config.model, path, model_config, config.load_format)

    requests = make_requests(options.workload, model_config.vocab_size, lambda text: tokenizer().encode(text))
    check_fits(options.workload, requests, model_length(config, model_config))
    check_adapters(options.workload, config)
    made = time.perf_counter()
    with LLMEngine.from_config(config) as engine:
        ready = time.perf_counter()
        phases = {"process": started, "import": imported - clock, "engine": ready - made}
        record |= _described(engine, options)
        # making the requests is the bench's work, not the engine's
        record["time_to_ready_s"] = None if started is None else started + imported - clock + ready - made
        record["ready_phases_s"] = phases
        compiled_from = without_bytecode("torch")
        record["torch_bytecode"] = compiled_from is None
        adapters = load_random_adapters(engine, options.workload)
        bench = Bench(engine, requests, options.workload, detokenize=options.detokenize, adapters=adapters)
        _runs(bench, options.repeat, record)
        if compiled_from is not None:
            print(
                "Each start compiles torch anew, for seconds: Python has no bytecode of it. To keep it, once: "
                f"python -m compileall -q -j 0 {shlex.quote(str(compiled_from))}"
            )
        if _profiles(options, record):
            from minivllm.bench.profile import profile_steps

            _say("profiling")
            profiled = profile_steps(bench, options.profile_steps, files.profile)
            record["profile"] = profiled.to_dict()
            show_profile(profiled)
        if files.trace or files.timeline:
            _record_steps(bench, record, files)


def _runs(bench: Bench, repeat: int, record: dict[str, Any]) -> None:
    """Run the workload ``repeat`` times and show the figures."""
    from minivllm.bench.measure import step_quantiles, summarize

    _say("warming up")
    bench.warm_up()
    runs = []
    for number in range(repeat):
        _say(f"run {number + 1} of {repeat}")
        runs.append(bench.run())
    record |= summarize(runs)
    record["requests"] = len(bench.requests)
    record["step_ms_quantiles"] = step_quantiles(bench.step_ms)
    record |= peak_memory(record["device"])
    show_runs(record)


def _profiles(options: BenchOptions, record: dict[str, Any]) -> bool:
    """``gpu``: only where there is a GPU, and rank 0 is on this machine."""
    here = record["device"] != "cpu" and "nodes" not in record
    return here if options.profile == "gpu" else options.profile != "false"


def _record_steps(bench: Bench, record: dict[str, Any], files: _Files) -> None:
    """One more run, recorded in detail; the figures above are from runs without recording."""
    from minivllm.bench.recorder import StepRecorder

    _say("recording")
    recorder = StepRecorder(bench.engine)
    bench.watch(recorder)
    recorder.finish()
    about = {name: record.get(name) for name in ("model", "device", "attention", "scheduler", "tp", "dtype")}
    if files.trace is not None:
        from minivllm.bench.perfetto import write_trace

        write_trace(recorder, files.trace, {**about, "workload": record["workload"]["name"], "mark": mark(record)})
        print(f"trace of {len(recorder.steps):,} steps: {files.trace} (open it at https://ui.perfetto.dev)")
    if files.timeline is not None:
        from minivllm.bench.timeline import draw_timeline

        title = f"{about['model']}, workload={record['workload']['name']}, attention={about['attention']}, " + (
            f"scheduler={about['scheduler']}, tp={about['tp']}"
        )
        draw_timeline(recorder, files.timeline, title, mark(record))
        print(f"timeline: {files.timeline}")


def _described(engine: LLMEngine, options: BenchOptions) -> dict[str, Any]:
    config = engine.config
    return {
        **engine.describe(),
        "load_format": config.load_format,
        "enforce_eager": config.enforce_eager,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "async_scheduling": config.scheduler.async_scheduling,
        "workload": asdict(options.workload),
        "detokenize": options.detokenize,
        "repeat": options.repeat,
    }


# --------------------------------------------------------------------------- over HTTP


def _served(options: BenchOptions, tokenizer: str | None, record: dict[str, Any], overrides: Sequence[str]) -> bool:
    """Measure a server; returns whether no request failed."""
    from minivllm.bench.measure import summarize

    try:
        from uvloop import run  # which reads 12% more of 256 streams
    except ImportError:
        from asyncio import run  # type: ignore[assignment]
    chat = options.endpoint == "chat"
    if tokenizer is not None and not chat:
        raise ConfigError(
            f"model.tokenizer={tokenizer}: only requests of endpoint=chat are text; type endpoint=chat, or leave "
            "model.tokenizer out"
        )
    read = ("url", "endpoint", "max_concurrency", *(("model.tokenizer",) if chat else ()))
    _check_read(overrides, read, "with url= the server has settings of its own")
    try:
        from minivllm.bench.served import measure
    except ModuleNotFoundError as e:
        raise MinivllmError(
            f"url= needs the package {e.name!r}, which is not installed; install it with: pip install 'minivllm[bench]'"
        ) from e
    server, requests, runs, why = run(measure(options, tokenizer, _say))
    record |= summarize(runs)
    record |= {
        "url": server.url,
        "endpoint": options.endpoint,
        "model": server.model,
        "max_concurrency": options.max_concurrency,
        "workload": asdict(options.workload),
        "repeat": options.repeat,
        "requests": requests,
    }
    show_served(record)
    failed, uncounted = sum(run.failed for run in runs), sum(run.uncounted for run in runs)
    if uncounted:
        out, asked = sum(run.tokens_out for run in runs), sum(run.tokens_asked for run in runs)
        print(
            f"{uncounted:,} answers came without usage, so that tokens are counted here: out, messages that brought "
            f"one ({out:,} of {asked:,} tokens asked for); in, the prompts without a chat template"
        )
    if failed:
        print(f"{failed} requests failed; the first: {why}")
    return not failed


# --------------------------------------------------------------------------- without one


def _host(config: EngineConfig, options: BenchOptions, record: dict[str, Any], overrides: Sequence[str]) -> bool:
    """Measure only the host; returns whether every limit holds."""
    from minivllm.bench.host import limits, measure_host
    from minivllm.plugins import default_registry

    if options.repeat != 1:
        raise ConfigError(f"repeat={options.repeat} with workload=host: raise workload.steps instead")
    for typed in overrides:
        if Override.parse(typed).key == "scheduler.max_num_seqs":
            raise ConfigError(
                f"{typed}: with workload=host workload.running says how many run; leave scheduler.max_num_seqs out"
            )
    _check_read(overrides, _HOST, "with workload=host no model runs")
    rows = measure_host(config, options.workload, default_registry())
    found = limits(rows)
    record |= {
        "scheduler": config.scheduler.name,
        "block_size": config.cache.block_size,
        "prefix_caching": config.cache.enable_prefix_caching,
        "workload": asdict(options.workload),
        "host": [asdict(row) for row in rows],
        "limits": [{**asdict(limit), "held": limit.held} for limit in found],
    }
    show_host(rows, found, f"scheduler={config.scheduler.name}, {record['cpu']}")
    return all(limit.held for limit in found)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"bench: {text}", file=sys.stderr)
