"""Where kernels run: on a GPU, or on a CPU in Triton's interpreter, which is chosen before Triton is imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
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
    if device == "cpu":
        _round_to_float8(monkeypatch)
    yield device, dtype


def _round_to_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU does: Triton's interpreter makes 64 of 127, for want of the carry."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data: Any, its: Any, wanted: Any, mode: Any) -> Any:
        if (its, wanted) != (tl.float32, tl.float8e4nv):
            return convert(data, its, wanted, mode)
        floats = torch.from_numpy(data.astype("float32"))
        return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.fixture
def close() -> Callable[[torch.Tensor, torch.Tensor], None]:
    def check(out: torch.Tensor, expected: torch.Tensor) -> None:
        """Relative error in the 2-norm: 1e-2 in bfloat16, 1e-5 in float32 (on a GPU 2e-3, whose float8 products add up
        in 14 bits). ``expected`` is computed in float32."""
        assert out.isfinite().all(), "not every element was written"
        limit = 1e-2 if out.dtype == torch.bfloat16 else 2e-3 if out.is_cuda else 1e-5
        error = float((out.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-12))
        assert error < limit, f"relative error {error:.1e}"

    return check
