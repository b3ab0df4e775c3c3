"""Keeps the bytecode of imported packages between starts, where Python itself would not.

Many images and installers ship torch without bytecode, and Python writes none if PYTHONDONTWRITEBYTECODE is set or if
site-packages is read-only. Each start then compiles some two thousand files, half of its time. So while torch is
imported, ``sys.pycache_prefix`` is ``KEPT_IN``: there Python finds bytecode by its source's path, and uses it if the
source's size and modification time are unchanged, as in any ``__pycache__``. The first time, other cores compile the
whole package ahead of the import: some 70 MB for torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from threading import Thread

from minivllm.cores import usable_cores

KEPT_IN = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "minivllm", "bytecode")


@contextmanager
def kept_bytecode(package: str = "torch", folder: str = KEPT_IN) -> Iterator[None]:
    """A context in which imports write bytecode to ``folder``, and read it there, if ``package`` has none of its own
    and Python would not write any. If PYTHONPYCACHEPREFIX is set, nothing changes."""
    before = sys.pycache_prefix, sys.dont_write_bytecode
    home = without_bytecode(package) if before[0] is None else None
    if home is not None and not _is_kept(home / package) and _is_writable(folder):
        sys.pycache_prefix, sys.dont_write_bytecode = folder, False
        _compile_ahead(home / package)
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before


_LEAST_CORES, _MOST_CORES = 8, 16


def _compile_ahead(package: Path) -> None:
    """Start to compile the package in other processes, if there are cores for them and no process has done so."""
    kept = Path(cache_from_source(str(package / "__init__.py")))
    if kept.exists() or (cores := usable_cores()) < _LEAST_CORES:
        return
    with suppress(OSError):  # then each file is compiled as it is imported
        kept.parent.mkdir(parents=True, exist_ok=True)
        (kept.parent / "compiled_ahead").touch(exist_ok=False)  # one of several that start together succeeds
        command = [sys.executable, "-m", "compileall", "-qq", "-j", str(min(cores, _MOST_CORES)), str(package)]
        env = os.environ | {"PYTHONPYCACHEPREFIX": str(sys.pycache_prefix)}
        nothing = subprocess.DEVNULL  # also for its traceback on Ctrl-C
        process = subprocess.Popen(command, env=env, stdin=nothing, stdout=nothing, stderr=nothing)
        Thread(target=process.wait, daemon=True).start()  # else it would become a zombie


def without_bytecode(package: str) -> Path | None:
    """The folder that holds ``package``, imported or not, if that has no bytecode; else, or if there is none, None."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None or os.path.exists(spec.cached):
        return None
    return Path(spec.origin).parents[1]


def _is_kept(sources: Path) -> bool:
    """Whether Python itself will write their bytecode when they are imported."""
    return not sys.dont_write_bytecode and os.access(sources, os.W_OK)


def _is_writable(folder: str) -> bool:
    if not os.path.isabs(folder):  # without a home directory ``~`` is not expanded
        return False
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
