"""``timeline=``: a run over time as a picture: what each step computed, who ran and waited, how full the cache was."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from minivllm.bench.recorder import StepRecorder
from minivllm.errors import ConfigError, MinivllmError

_DECODE, _PREFILL, _WAITING, _CACHE = "#2b6cb0", "#ed8936", "#742a2a", "#2f855a"


def check_matplotlib() -> None:
    """Raise ConfigError where it is not installed; called before anything is loaded."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("timeline= needs matplotlib, which is not installed; type: pip install 'minivllm[bench]'")


def draw_timeline(recorder: StepRecorder, file: Path, title: str, mark: str) -> None:
    """Three plots over one time axis. ``mark``, printed below, names machine, versions and commit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    edges, columns = _spans(recorder)
    decode, prefill, running, waiting, blocks = columns
    figure = Figure(figsize=(11, 7.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    batch, queue, cache = figure.subplots(3, 1, sharex=True)
    batch.stairs(decode, edges, fill=True, color=_DECODE, label="decode")
    batch.stairs(decode + prefill, edges, baseline=decode, fill=True, color=_PREFILL, label="prompt")
    batch.set_ylabel("tokens a step")
    queue.stairs(running, edges, fill=True, color=_DECODE, alpha=0.6, label="running")
    queue.stairs(waiting, edges, baseline=None, color=_WAITING, linewidth=1.6, label="waiting")
    queue.set_ylabel("requests")
    cache.stairs(blocks, edges, fill=True, color=_CACHE, alpha=0.7, label=f"used, of {recorder.num_blocks:,}")
    cache.set_ylabel("cache blocks")
    cache.set_xlabel("seconds")
    for axes in (batch, queue, cache):
        axes.set_ylim(0, max(1.25 * axes.dataLim.y1, 1))  # room for the legend
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.margins(x=0.01)
        axes.grid(alpha=0.25)
        axes.legend(loc="upper right", framealpha=0.9, ncols=2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12)
    figure.text(0.01, -0.01, mark, fontsize=7, color="#555", va="top")
    figure.savefig(file, bbox_inches="tight")


def _spans(recorder: StepRecorder) -> tuple[np.ndarray, np.ndarray]:
    """Times (n + 1,) and what holds between them (5, n): a step's values from its launch to the next one's; nothing
    where no step was under way."""
    steps = recorder.steps
    if not steps:
        raise MinivllmError("timeline=: no step was taken, so that there is nothing to draw")
    edges, columns = [steps[0].planned], []
    for step, later in zip(steps, [*steps[1:], None], strict=True):
        end = step.ended if later is None else min(step.ended, later.planned)
        columns.append((step.decode_tokens, step.prefill_tokens, step.running, step.waiting, step.blocks))
        edges.append(end)
        if later is not None and later.planned > end:
            columns.append((0, 0, 0, 0, 0))
            edges.append(later.planned)
    return np.array(edges) - recorder.began, np.array(columns).T
