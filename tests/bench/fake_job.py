"""A job of a sweep that measures nothing: what it does depends on ``seed=``. Run as a script, with overrides.

With ``MINIVLLM_FAKE_GATE`` set, seeds from 3 wait until that file is there. Each start is a line in ``starts``.
"""

import json
import os
import sys
import time
from pathlib import Path


def record(settings, speed=100.0, runs=(0.98, 1.0, 1.02)):
    """As ``bench`` writes it, as far as sweeps, reports and comparisons read it."""
    figures = {
        "output_tokens_per_s": speed, "total_tokens_per_s": 2 * speed, "ms_per_step_p50": 1000 / speed,
        "ms_per_step_p99": 2000 / speed, "ttft_ms_p50": 5.0, "latency_ms_p50": 50.0,
    }  # fmt: skip
    each = [{key: value * factor for key, value in figures.items()} for factor in runs]
    spread = {
        key: {"min": value * min(runs), "median": value, "max": value * max(runs)} for key, value in figures.items()
    }
    quantiles = dict(zip(("0.01", "0.25", "0.5", "0.75", "0.99"), (8.0, 9.0, 10.0, 11.0, 20.0), strict=True))
    return {
        **figures, "spread": spread, "runs": each, "tokens_in": 10, "tokens_out": 10, "step_ms_quantiles": quantiles,
        "ready_phases_s": {"process": 0.1, "import": 0.2, "engine": 1.0}, "time_to_ready_s": 1.3,
        "device": "cpu", "cpu": "A <CPU>", "minivllm": "0", "commit": "abc", "torch": "2", "python": "3",
        "overrides": [f"{key}={value}" for key, value in settings.items()],
    }  # fmt: skip


def main():
    settings = dict(argument.split("=", 1) for argument in sys.argv[1:])
    output = Path(settings.pop("output"))
    seed = int(settings.get("seed", 0))
    with (output.parents[2] / "starts").open("a") as starts:
        starts.write(f"{os.getpid()} {sorted(settings.items())}\n")
    gate = os.environ.get("MINIVLLM_FAKE_GATE")
    while gate and seed >= 3 and not Path(gate).exists():
        time.sleep(0.02)
    if seed == 11:
        os.kill(os.getpid(), 9)
    if seed == 12:
        print("minivllm: attention=none cannot run this: it <says> so", file=sys.stderr)
        sys.exit(2)
    if seed == 13:
        raise MemoryError("CUDA out of memory")
    if seed == 14:
        time.sleep(60)
    if seed != 15:
        output.write_text(json.dumps(record(settings, 100.0 + seed)) + "\n")


if __name__ == "__main__":
    main()
