"""What makes tests quick that make a thousand engines: conftest.py imports it."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """Each engine's start and end collect garbage; what is there before a file's tests, half a million objects of the
    libraries, need not be looked at each time. What files import comes bit by bit: each freezes anew."""
    gc.collect()
    gc.freeze()
