"""Where kernels run: on a GPU, or on a CPU in Triton's interpreter, which is chosen before Triton is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"))
PLACES = [
    pytest.param(("cpu", torch.float32), id="interpreter"),
    pytest.param(("cuda", torch.bfloat16), id="cuda-bf16", marks=GPU),
    pytest.param(("cuda", torch.float32), id="cuda-f32", marks=GPU),
]


@pytest.fixture(params=PLACES)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, torch.dtype]]:
    """(device, dtype). ``torch.empty`` comes poisoned: NaN, or a number that no index has."""
    device, dtype = request.param
    if device == "cpu":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter must be chosen before Triton is imported")
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", poisoned)
    yield device, dtype
