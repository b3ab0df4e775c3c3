from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from fake_plugins import fake_plugin  # noqa: F401
from zygote import Zygote

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def forked_ranks(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> Zygote:
    """Ranks of executor=multiproc start at once: they are forked from a process that has imported torch."""
    import subprocess

    from minivllm import child_process

    names = {"Popen": zygote.popen, "DEVNULL": subprocess.DEVNULL}
    monkeypatch.setattr(child_process, "subprocess", SimpleNamespace(**names))
    return zygote
