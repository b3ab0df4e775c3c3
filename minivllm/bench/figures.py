"""The tables that ``minivllm bench`` prints of its measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minivllm.bench.table import show

if TYPE_CHECKING:
    from minivllm.bench.host import HostRow, Limit
    from minivllm.bench.profile import Profile

_ROWS = (
    ("seconds", "seconds", 3),
    ("output tokens/s", "output_tokens_per_s", 1),
    ("total tokens/s", "total_tokens_per_s", 1),
    ("ms per step, mean", "ms_per_step_mean", 3),
    ("ms per step, p50", "ms_per_step_p50", 3),
    ("ms per step, p99", "ms_per_step_p99", 3),
    ("host µs per step, p50", "host_us_per_step", 1),
    ("host µs per step, p99", "host_us_per_step_p99", 1),
    ("launch µs per step, p50", "launch_us_per_step", 1),
    ("ms to first token, p50", "ttft_ms_p50", 1),
    ("ms to first token, p99", "ttft_ms_p99", 1),
    ("ms to last token, p50", "latency_ms_p50", 1),
    ("ms to last token, p99", "latency_ms_p99", 1),
)
_SERVED_ROWS = (
    ("seconds", "seconds", 3),
    ("requests/s", "requests_per_s", 2),
    ("output tokens/s", "output_tokens_per_s", 1),
    ("total tokens/s", "total_tokens_per_s", 1),
    *(
        (f"ms {label}, {at}", f"{name}_ms_{at}", 2)
        for label, name in (
            ("to first token", "ttft"),
            ("per output token", "tpot"),
            ("between messages", "itl"),
            ("to last token", "latency"),
        )
        for at in ("mean", "p50", "p90", "p99")
    ),
    ("failed requests", "failed", 0),
)


def show_runs(record: dict[str, Any]) -> None:
    """Print the figures, with what was measured above and below."""
    graphs = "CUDA graphs" if record.get("cuda_graphs") else "eager"
    print(
        f"{record['model']} ({record['load_format']} {record['weights']}), {record['dtype']}, tp={record['tp']}, "
        f"{record['device']}, {graphs}, scheduler={record['scheduler']}\n{record.get('attention_why', '')}"
    )
    drafted, accepted = record["draft_tokens"], record["accepted_tokens"]
    drafts = f", {accepted:,} of {drafted:,} draft tokens accepted" if drafted else ""
    _show_figures(
        f"workload={record['workload']['name']}: {record['requests']:,} requests, {record['tokens_in']:,} tokens in, "
        f"{record['tokens_out']:,} out, {record['steps']:,} steps, {record['preemptions']} preemptions{drafts}",
        record,
        _ROWS,
    )
    memory = [
        f"{record[name] / 2**30:.2f} GiB {where}"
        for name, where in (("peak_gpu_bytes", "on the GPU"), ("peak_host_bytes", "on the host"))
        if record[name] is not None
    ]
    if record["time_to_ready_s"] is not None:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in record["ready_phases_s"].items())
        print(f"ready {record['time_to_ready_s']:.2f} s after the process began ({phases})")
    print(f"peak memory of this process alone: {', '.join(memory)}")


def show_served(record: dict[str, Any]) -> None:
    """Print what was measured of a server."""
    _show_figures(
        f"{record['url']}, endpoint={record['endpoint']}, model={record['model']}, "
        f"workload={record['workload']['name']}: {record['requests']:,} requests, {record['tokens_in']:,} tokens in, "
        f"{record['tokens_out']:,} out",
        record,
        _SERVED_ROWS,
    )


def show_host(rows: Sequence[HostRow], limits: Sequence[Limit], about: str) -> None:
    """Print the measurements of ``workload=host``, and which limits hold."""
    show(
        f"workload=host: µs a step, {about}",
        ["running", "waiting", "median", "p99"],
        [[f"{r.running:,}", f"{r.waiting:,}", f"{r.us_p50:.1f}", f"{r.us_p99:.1f}"] for r in rows],
    )
    if limits:
        lines = [[x.name, f"{x.value:.2f}", f"{x.limit:g}", "yes" if x.held else "NO"] for x in limits]
        show("limits", ["", "value", "at most", "held"], lines)


def show_profile(profiled: Profile) -> None:
    busy = profiled.gpu_busy
    what = "kernel" if busy is not None else "CPU operation"
    title = f"profile of {profiled.steps} steps: " + (
        f"the GPU was busy {100 * busy:.1f}% of the time" if busy is not None else "no GPU kernel"
    )
    rows = [
        [w.name if len(w.name) <= 60 else w.name[:57] + "...", f"{w.count:,}", f"{w.total_us:,.0f}",
         f"{w.total_us / w.count:.1f}"] for w in profiled.largest
    ]  # fmt: skip
    show(title, [what, "count", "total µs", "µs each"], rows)
    if profiled.trace is not None:
        print(f"torch's trace: {profiled.trace} (chrome://tracing, Perfetto)")


def _show_figures(title: str, record: dict[str, Any], figures: Sequence[tuple[str, str, int]]) -> None:
    """The median, minimum and maximum of several runs, or the value of one. ``figures``: label, key, digits."""
    count = len(record["runs"])
    columns = {"median": "median", "min": "min", "max": "max"} if count > 1 else {"median": "value"}
    rows = [[label, *(f"{record['spread'][key][at]:,.{digits}f}" for at in columns)] for label, key, digits in figures]
    show(title + (f", {count} runs" if count > 1 else ""), ["", *columns.values()], rows)
