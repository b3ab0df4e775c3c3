"""Python's bytecode of what a start imports, kept where Python itself would keep none.

Torch comes without bytecode to many machines, in images and by installers that compile nothing, and Python keeps none
where PYTHONDONTWRITEBYTECODE is set or packages are read-only. Then each start compiles some two thousand files, half
of its time. ``KEPT_IN`` gets them instead, some 40 MB: files are found by their source's path, and taken if it has
the size and the time that it had, as in any ``__pycache__``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

KEPT_IN = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "minivllm", "bytecode")


@contextmanager
def kept_bytecode(package: str = "torch", folder: str = KEPT_IN) -> Iterator[None]:
    """What is imported here leaves its bytecode in ``folder``, or is taken from there, if Python has none of
    ``package`` and would keep none. Where PYTHONPYCACHEPREFIX is set, nothing changes."""
    before = sys.pycache_prefix, sys.dont_write_bytecode
    home = without_bytecode(package) if before[0] is None else None
    if home is not None and not _is_kept(home / package) and _is_writable(folder):
        sys.pycache_prefix, sys.dont_write_bytecode = folder, False
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before


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
