"""Keeps Python's garbage collector from running while an engine is created and, in our own processes, from scanning
objects that exist from the start.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def collect_engines() -> None:
    """Collect garbage if there may have been engines: an unreferenced one may still hold device memory."""
    if "torch" in sys.modules:
        gc.collect()


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable collection while modules are imported and an engine is created: nearly all of these objects stay alive,
    and collecting took a seventh of startup. Afterwards all objects are in the oldest generation."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else this would unfreeze what a user has frozen
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()


@contextmanager
def frozen() -> Iterator[None]:
    """Exclude all current objects from collection: a full one walks torch's 250,000 objects, 0.1 s between steps.

    Only for our own processes: in a user's, existing garbage cycles would not be collected.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
