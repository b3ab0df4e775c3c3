"""What times kernels alone says without a GPU; with one it is run by hand."""

import importlib
import sys

import pytest
import torch


@pytest.mark.parametrize("name", ["linear", "attention", "all_reduce"])
def test_without_a_gpu_it_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match=r"this times kernels on . GPUs?, and torch sees none"):
        importlib.import_module(f"minivllm.bench.{name}").main()
