"""When Python's garbage collector had better not run: while an engine is made, and, in processes of our own, over what
stood at the start.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def collect_engines() -> None:
    """Collect garbage where there may have been engines: one that nobody has any more may hold a device's memory."""
    if "torch" in sys.modules:
        gc.collect()


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect nothing while modules are imported and an engine is made, nearly all of which stays: that took a seventh
    of a start. Behind it, what there is now is as old as if it had been looked at."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # or what a user has frozen would be no more
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()


@contextmanager
def frozen() -> Iterator[None]:
    """Leave out of collections all that there is now: a full one walks torch's 250,000 objects, 0.1 s between steps.

    For a process that is ours: in a user's, cycles that were garbage already would never be collected.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
