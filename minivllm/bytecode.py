"""Python's bytecode of what a start imports, kept where Python itself would keep none.

Torch comes without bytecode to many machines, in images and by installers that compile nothing, and Python keeps none
where PYTHONDONTWRITEBYTECODE is set or packages are read-only. Then each start compiles some two thousand files, half
of its time. ``KEPT_IN`` gets them instead: files are found by their source's path, and taken if it has the size and
the time that it had, as in any ``__pycache__``. The first time they are compiled by other cores, ahead of their import,
all that the package has, some 70 MB of torch.
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
    """What is imported here leaves its bytecode in ``folder``, or is taken from there, if Python has none of
    ``package`` and would keep none. Where PYTHONPYCACHEPREFIX is set, nothing changes."""
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
    """Begin to, in processes of their own, where there are cores for them and nobody began before."""
    kept = Path(cache_from_source(str(package / "__init__.py")))
    if kept.exists() or (cores := usable_cores()) < _LEAST_CORES:
        return
    with suppress(OSError):  # then each file is compiled as it is imported
        kept.parent.mkdir(parents=True, exist_ok=True)
        (kept.parent / "compiled_ahead").touch(exist_ok=False)  # of processes that start together one does
        command = [sys.executable, "-m", "compileall", "-qq", "-j", str(min(cores, _MOST_CORES)), str(package)]
        env = os.environ | {"PYTHONPYCACHEPREFIX": str(sys.pycache_prefix)}
        nothing = subprocess.DEVNULL  # not what it says when Ctrl-C ends it, either
        process = subprocess.Popen(command, env=env, stdin=nothing, stdout=nothing, stderr=nothing)
        Thread(target=process.wait, daemon=True).start()  # or it would stay, as a zombie


def without_bytecode(package: str) -> Path | None:
    """The folder that holds ``package``, imported or not, if it has no bytecode. None: it has, or is not there."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None or os.path.exists(spec.cached):
        return None
    return Path(spec.origin).parents[1]


def _is_kept(sources: Path) -> bool:
    """Whether Python itself will keep their bytecode when they are imported."""
    return not sys.dont_write_bytecode and os.access(sources, os.W_OK)


def _is_writable(folder: str) -> bool:
    """Not where the user has no home: ``~`` stands for itself then."""
    if not os.path.isabs(folder):
        return False
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
