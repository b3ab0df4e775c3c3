"""Which GPUs ranks take, and what is said of those that cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minivllm.config.engine_config import EngineConfig, ExecutorOptions
from minivllm.core.model_config import FrozenDict
from minivllm.errors import ConfigError
from minivllm.executors import multiproc


def chosen(monkeypatch: pytest.MonkeyPatch, tp: int, devices: Any) -> list[int]:
    monkeypatch.setattr(multiproc, "resolve_device", lambda device: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    options = FrozenDict({} if devices is None else {"devices": devices})
    return multiproc.choose_devices(replace(EngineConfig(), tp=tp, executor=ExecutorOptions("multiproc", options)))


@pytest.mark.parametrize(("devices", "taken"), [(None, [0, 1]), ((2, 3), [2, 3]), ((3, 0), [3, 0])])
def test_devices_are_taken_in_their_order(monkeypatch: pytest.MonkeyPatch, devices: Any, taken: list[int]) -> None:
    assert chosen(monkeypatch, 2, devices) == taken


@pytest.mark.parametrize(
    ("tp", "devices", "told"),
    [
        (2, 3, r"devices=3 is not a list of 2 different GPUs.*type executor.options.devices=\[0, 1\]"),
        (2, ("a", "b"), "is not a list of 2 different GPUs"),
        (2, (0,), r"devices=\[0\] is not a list of 2"),
        (2, (1, 1), r"devices=\[1, 1\] is not a list of 2"),
        (2, (), r"devices=\[\] is not a list of 2"),
        (2, (0, 4), r"tp=2 needs 2 GPUs \(executor.options.devices=\[0, 4\]\), and torch sees 4"),
        (8, None, "tp=8 needs 8 GPUs, and torch sees 4; lower tp"),
    ],
)
def test_devices_that_cannot_be_are_told(monkeypatch: pytest.MonkeyPatch, tp: int, devices: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        chosen(monkeypatch, tp, devices)
