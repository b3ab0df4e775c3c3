"""Where a kernel's launcher runs: on the GPU, and on the CPU under Triton's interpreter, in float32 (its bf16 dot is
wrong). Triton reads TRITON_INTERPRET when it is first imported, so it is set here, before any kernel is."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

CASES = [
    pytest.param(("cpu", torch.float32), id="interpreter"),
    pytest.param(("cuda", torch.bfloat16), id="cuda-bf16", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.float32), id="cuda-f32", marks=pytest.mark.gpu),
]


@pytest.fixture(params=CASES)
def where(request, monkeypatch):
    """(device, dtype); skips what this machine lacks. Tensors from ``torch.empty`` come filled with NaN."""
    device, dtype = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    if device == "cpu":
        from minivllm.kernels.embedding import _embedding_kernel

        if type(_embedding_kernel).__name__ != "InterpretedFunction":
            pytest.skip("Triton was imported without TRITON_INTERPRET=1, or is not installed")
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    return device, dtype


@pytest.fixture
def close():
    def check(out, expected):
        """Relative error in the 2-norm: 1e-2 in bf16, 1e-5 in float32. ``expected`` is computed in float32."""
        assert out.isfinite().all(), "not every element was written"
        limit = 1e-2 if out.dtype == torch.bfloat16 else 1e-5
        out, expected = out.double().cpu(), expected.double().cpu()
        error = ((out - expected).norm() / expected.norm().clamp_min(1e-12)).item()
        assert error < limit, f"relative error {error:.2e}"

    return check
