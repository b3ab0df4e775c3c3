"""The peer all-reduce's protocol under Triton's interpreter: ranks are processes, their memory is a shared file."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from minivllm.kernels import all_reduce
from minivllm.kernels._triton import HAVE_TRITON
from minivllm.kernels.all_reduce import PeerAllReduce, all_reduce_reference

CAPACITY = 1 << 13
SIZES = [8, 56, 64, 72, 200, 512]


def calls(ranks: int) -> list[tuple[bool, list[torch.Tensor]]]:
    """(two shots, every rank's x), the same in every process."""
    kinds = [(n, two) for n in SIZES for two in (False, True)]
    random.Random(0).shuffle(kinds)
    generator = torch.Generator().manual_seed(0)
    return [(two, [torch.randn(n, generator=generator) for _ in range(ranks)]) for n, two in kinds]


def run_rank(rank: int, ranks: int, file: str) -> None:
    """One rank: several blocks a program, several programs; now and then late."""
    all_reduce._BLOCK, all_reduce.PROGRAMS = 64, 2
    part = 2 * CAPACITY + 8 * all_reduce.PROGRAMS * ranks
    memory = torch.from_file(file, shared=True, size=ranks * part, dtype=torch.uint8)
    data = [memory.data_ptr() + r * part for r in range(ranks)]
    reduce = PeerAllReduce(rank, data, [d + 2 * CAPACITY for d in data], CAPACITY, torch.device("cpu"))
    for i, (two, parts) in enumerate(calls(ranks)):
        if (i + rank) % 5 == 0:
            time.sleep(0.01)
        if i % 3:
            assert torch.equal(reduce(parts[rank].clone(), two), all_reduce_reference(parts)), (rank, i, two)
        else:
            residual = parts[0] * 2
            reduce.add_to(residual, parts[rank].clone(), two)
            torch.testing.assert_close(residual, all_reduce_reference([*parts, parts[0] * 2]))
    assert reduce.state.tolist() == [2 * (i + 1), 0]


def run_ranks(rank: int, folder: str) -> None:
    for ranks in (2, 3):
        if rank < ranks:
            run_rank(rank, ranks, os.path.join(folder, str(ranks)))


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_ranks_sum_to_the_same_bytes_call_after_call(tmp_path: Path) -> None:
    """Two ranks, then three, in the same processes: to import torch takes longer than the calls."""
    for ranks in (2, 3):
        (tmp_path / str(ranks)).write_bytes(bytes(ranks * (2 * CAPACITY + 8 * 2 * ranks)))
    path = os.pathsep.join([str(Path(__file__).parent), *(p for p in sys.path if p), os.getcwd()])
    env = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    code = "import sys, test_all_reduce as t; t.run_ranks(int(sys.argv[1]), sys.argv[2])"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(tmp_path)], env=env, stderr=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    try:
        for process in processes:
            _, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_what_does_not_fit_is_left_to_others() -> None:
    reduce = PeerAllReduce(0, [0, 0], [0, 0], 1024, torch.device("cpu"))
    assert reduce.takes(torch.zeros(256)) and not reduce.takes(torch.zeros(257))
    assert not reduce.takes(torch.zeros(12)) and not reduce.takes(torch.zeros(16, dtype=torch.int64))
    assert not reduce.takes(torch.zeros(2, 32).t())
    assert not reduce.takes(torch.zeros(17)[1:]) and not reduce.takes(torch.zeros(16, 16)[:, :8])
