"""Fixtures that every room shares."""

from __future__ import annotations

import os
import random
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")  # 15, beside tests of other workers, makes 70 s of a start of 6
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models of a few thousand weights: more threads only wait for each other

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by Triton when kernels are defined: before any import of ours

import triton_patches  # noqa: F401
from heap import configs_composed_once, frozen_heap, imports_frozen  # noqa: F401
from helpers import save_checkpoint
from zygote import Zygote


def pytest_configure(config: pytest.Config) -> None:
    """With ``-n 2 --dist loadfile`` files go in their order. xdist would have those of few tests last, which are the
    longest ones here, so that one worker waits for the other."""
    config.option.loadscopereorder = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also tests marked slow, and all of each in the emulator")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Unless it is to be thorough, leave out what takes long and is seldom broken: tests marked slow, and of those in
    the emulator of CUDA kernels all but the first of each."""
    emulated: set[str] = set()
    for item in [] if config.getoption("thorough") else items:
        name = item.nodeid.partition("[")[0]
        emulates = "emulated" in getattr(item, "fixturenames", ())
        if item.get_closest_marker("slow") is not None or (emulates and name in emulated):
            item.add_marker(pytest.mark.skip(reason="only with --thorough"))
        if emulates:
            emulated.add(name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test has random numbers of its own, the same in every run and in any order: a failure can be repeated."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_checkpoint("qwen3" | "llama", *, seed=0, shards=1, chat=True, **config) -> folder``; made once a session.

    Tests share the folder: copy it before changing a file.
    """
    made: dict[str, Path] = {}

    def make(architecture: str = "qwen3", **options: Any) -> Path:
        key = repr((architecture, sorted(options.items())))
        if key not in made:
            made[key] = save_checkpoint(tmp_path_factory.mktemp(architecture), architecture, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def forked_ranks(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> Zygote:
    """Ranks of executor=multiproc start at once: they are forked from a process that has imported torch."""
    from minivllm import child_process

    names = {"Popen": zygote.popen, "DEVNULL": subprocess.DEVNULL}
    monkeypatch.setattr(child_process, "subprocess", SimpleNamespace(**names))
    return zygote
