"""A rank reads its own slices of the weights, not the whole file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from minivllm.core.parallel import TensorParallel
from minivllm.models.checkpoint import read_model_config
from minivllm.models.loader import build_model, iterate_safetensors
from minivllm.models.qwen3 import Qwen3ForCausalLM

Checkpoints = Callable[..., Path]


def touched(file: Path) -> int:
    """Bytes of the file's mappings that this process has in memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:  # a mapping's first line: addresses … path
            ours = line.endswith(str(file))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_reads_little_more_than_its_own_slices(tiny_checkpoint: Checkpoints) -> None:
    folder = tiny_checkpoint(
        "qwen3", vocab_size=16384, hidden_size=256, intermediate_size=1024, num_key_value_heads=4, head_dim=64
    )
    file, config = folder / "model.safetensors", read_model_config(folder)
    read: dict[int, list[int]] = {}

    def watched(size: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in iterate_safetensors(folder):
            yield name, tensor
            read.setdefault(size, []).append(touched(file))  # asked for the next one: this one is loaded

    for size in (1, 4):
        build_model(
            Qwen3ForCausalLM, config, TensorParallel(size - 1, size), "cpu", torch.float32, watched(size), 128
        )  # fmt: skip
    whole = file.stat().st_size
    assert max(read[1]) > 0.9 * whole
    assert max(read[4]) < 0.4 * whole, f"{max(read[4])} of {whole} bytes"
