"""Fixtures that every room shares."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models of a few thousand weights: more threads only wait for each other

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by Triton when kernels are defined: before any import of ours

from helpers import save_checkpoint


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
