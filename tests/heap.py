"""Of tests, which make a thousand engines: conftest.py imports it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def frozen_heap() -> Iterator[None]:
    """Each engine's end collects garbage; what the libraries made at import need not be looked at each time."""
    import transformers  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
