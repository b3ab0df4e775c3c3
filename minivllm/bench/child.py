"""A sweep's job: a command in its own process group, so that a crash becomes a reason and does not end the sweep."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.child_process import ends_with, importing_env

_TICK = 0.25  # seconds between checks of a job
_GRACE = 10.0  # seconds between SIGTERM and SIGKILL
_ERROR = re.compile(r"([\w.]+\.)?\w*(Error|Exception|Interrupt|Exit)\b(: .*)?")


@dataclass(frozen=True, slots=True)
class Outcome:
    """``status``: ok; unsupported (the configuration was refused), failed, timeout. ``reason``: of all but ok."""

    status: str
    reason: str | None
    seconds: float
    record: dict[str, Any] | None


def run_child(
    command: Sequence[str], log: Path, result: Path, *, cwd: Path, timeout: float | None, tick: Callable[[float], None]
) -> Outcome:
    """Run ``command`` until it ends in any way.

    Args:
        log: where its output goes.
        result: where it appends its JSON object.
        timeout: seconds after which it is ended.
        tick: called a few times a second, with the seconds since its start.

    Raises:
        KeyboardInterrupt: on Ctrl-C; the job is gone then.
    """
    result.unlink(missing_ok=True)
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, cwd=cwd, env=importing_env(), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
            # else a sweep that is resumed after it was killed shares its GPU with the last one's job
            preexec_fn=ends_with(os.getpid()),
        )  # fmt: skip
    late = False
    try:
        while process.poll() is None:
            tick(time.monotonic() - began)
            late = timeout is not None and time.monotonic() - began > timeout
            if late:
                break
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TICK)
    finally:
        _end(process)
    seconds = time.monotonic() - began
    if late:
        return Outcome("timeout", f"ended after sweep.timeout={timeout:g} seconds", seconds, None)
    record = _read(result)
    if process.returncode == 0 and record is not None:
        return Outcome("ok", None, seconds, record)
    status = "unsupported" if process.returncode == 2 else "failed"
    return Outcome(status, why(process.returncode, log.read_text(encoding="utf-8", errors="replace")), seconds, None)


def why(code: int, output: str) -> str:
    """Why a job died, in one line: its signal, our own error, a traceback's last line, or its last output."""
    if code < 0:
        hint = "; the system does that when memory runs out" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("minivllm: "):
            return line.removeprefix("minivllm: ")
    if any(line.startswith("Traceback ") for line in lines):
        for line in reversed(lines):
            if _ERROR.match(line):
                return line
    said = f": {lines[-1]}" if lines else " without a word"
    return f"ended with exit code {code}{said}" if code else "ended without a result"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the job's process group, with SIGTERM first: it may have processes on GPUs that the next job needs."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(_GRACE)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # the group is empty
        os.killpg(process.pid, number)


def _read(result: Path) -> dict[str, Any] | None:
    try:
        return json.loads(result.read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return None
