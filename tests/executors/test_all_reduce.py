"""The peer all-reduce's protocol under Triton's interpreter: ranks are processes, their memory is a shared file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from minivllm.kernels._triton import HAVE_TRITON
from minivllm.kernels.collectives import all_reduce, two_shots
from minivllm.kernels.collectives.all_reduce import PeerAllReduce, all_reduce_reference
from minivllm.kernels.collectives.lamport import EMPTY

CAPACITY = 1 << 13  # bytes
ONE_SHOT = 1 << 12  # of more than two ranks
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# bytes: up and down, each several times, so that what any third held is cleared before all other sizes
SIZES = [32, 224, 4096, 32, 4096, 32, 256, 2048, 8192, 32, 8192, 800, 64, 8192, 32, 4096, 32, 288, 32]
LATE = 0.2  # seconds, in small sums behind large ones: the others have cleared by then


@dataclass
class Call:
    two_shots: bool
    add: bool
    parts: list[torch.Tensor]  # every rank's
    late: int | None  # this rank comes after the others


def calls(ranks: int) -> list[Call]:
    """The same in every process."""
    chance, generator = random.Random(ranks), torch.Generator().manual_seed(ranks)
    made = []
    for i, size in enumerate(SIZES):
        dtype = DTYPES[chance.randrange(3)]
        n = size // dtype.itemsize
        parts = [torch.randn(n, generator=generator) for _ in range(ranks)]
        if dtype == torch.bfloat16:  # the interpreter cuts off what does not fit, it does not round
            parts = [(part * 8).round() / 8 for part in parts]
        parts = [part.to(dtype) for part in parts]
        if dtype == torch.float32:
            parts[0].view(torch.int32)[n // 2] = EMPTY
        for part in parts:
            for value in (-0.0, torch.nan, torch.inf, -torch.inf):
                part[chance.randrange(n)] = value
            part[: n // 4] = -0.0  # pairs of it are never sent
            part[n // 4 : n // 2][::3] = -0.0
        two = ranks > 2 and (size > ONE_SHOT or chance.random() < 0.3)
        late = i // 2 % ranks if size == 32 and SIZES[i - 1] >= ONE_SHOT else None
        made.append(Call(two, i % 3 == 0, parts, late))
    return made


def run_rank(rank: int, ranks: int, file: str) -> None:
    """One rank: several blocks a program, several programs; now and then late. Its results' bytes go to a file.

    Blocks of small sums are tiny: where a large sum was before, a late rank clears for long, and the others have sent
    the words of the next call before it is done.
    """
    two_shots.BLOCK, two_shots.PROGRAMS = 32, 4
    all_reduce._BLOCKS, all_reduce._PROGRAMS, all_reduce._ONE_SHOT = (8, 256), 4, ONE_SHOT
    part = PeerAllReduce.nbytes(ranks, CAPACITY)
    memory = torch.from_file(file, shared=True, size=ranks * part, dtype=torch.uint8)
    reduce = PeerAllReduce(
        rank, [memory.data_ptr() + r * part for r in range(ranks)], CAPACITY, torch.device("cpu"), keep=memory
    )
    made = calls(ranks)
    xs = [call.parts[rank].clone() for call in made]
    residuals = [call.parts[0].flip(0) for call in made]
    for call, x, residual in zip(made, xs, residuals, strict=True):  # nothing else: who is done begins the next at once
        if call.late == rank:
            time.sleep(LATE)
        if call.add:
            reduce.add_to(residual, x, call.two_shots)
        else:
            reduce(x, call.two_shots)
    for i, (call, x, residual) in enumerate(zip(made, xs, residuals, strict=True)):
        assert reduce.takes(x) and call.two_shots in reduce.ways(x)
        before = call.parts[0].flip(0)
        expected = all_reduce_reference([*call.parts, before] if call.add else call.parts)
        result, other, unchanged = (residual, x, call.parts[rank]) if call.add else (x, residual, before)
        what = str((rank, i, call.two_shots))
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True, msg=what)
        assert torch.equal(other.view(torch.uint8), unchanged.view(torch.uint8)), what
    pushes = sum(not call.two_shots for call in made)
    assert set(reduce.calls[:, 0].tolist()) == {pushes}
    assert ranks == 2 or set(reduce.twice_calls[:, 0].tolist()) == {len(made) - pushes}
    results = [residual if call.add else x for call, x, residual in zip(made, xs, residuals, strict=True)]
    Path(f"{file}.{rank}").write_bytes(torch.cat([r.view(torch.uint8) for r in results]).numpy().tobytes())


def run_ranks(rank: int, folder: str) -> None:
    for ranks in (2, 3):
        if rank < ranks:
            run_rank(rank, ranks, os.path.join(folder, str(ranks)))


def fork_ranks(folder: str) -> bool:
    """Whether one of three ranks failed. They are forked: to import torch takes longer than their calls."""
    pids = []
    for rank in range(3):
        if pid := os.fork():
            pids.append(pid)
            continue
        try:
            run_ranks(rank, folder)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            for left in pids:  # they would wait for it
                os.kill(left, signal.SIGKILL)
            return True
    return False


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_ranks_sum_to_the_same_bytes_call_after_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, then three, in the same processes."""
    monkeypatch.setattr(all_reduce, "_ONE_SHOT", ONE_SHOT)
    monkeypatch.setattr(two_shots, "BLOCK", 32)
    for ranks in (2, 3):
        memory = torch.empty(PeerAllReduce.nbytes(ranks, CAPACITY), dtype=torch.uint8)
        PeerAllReduce.clear(memory)
        (tmp_path / str(ranks)).write_bytes(memory.numpy().tobytes() * ranks)
    path = os.pathsep.join([str(Path(__file__).parent), *(p for p in sys.path if p), os.getcwd()])
    env = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    code = "import sys, triton_patches, test_all_reduce as t; sys.exit(t.fork_ranks(sys.argv[1]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks that wait for one that failed, too
        process.wait()
    for ranks in (2, 3):
        first, *others = [(tmp_path / f"{ranks}.{rank}").read_bytes() for rank in range(ranks)]
        assert first and all(other == first for other in others)
        check_cleared(tmp_path / str(ranks), ranks)


def check_cleared(file: Path, ranks: int) -> None:
    """After n calls the next one's third is empty, and so is the one behind; only the last call's is not."""
    once = sum(not call.two_shots for call in calls(ranks))
    one_shot = CAPACITY if ranks == 2 else ONE_SHOT
    for memory in torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.int32).view(ranks, -1):
        inbox, halves = memory.split([3 * ranks * one_shot // 4, memory.numel() - 3 * ranks * one_shot // 4])
        assert used_thirds(inbox) == {(once - 1) % 3}
        if ranks > 2:  # of a small sum, one rank's share, only that rank gets parts, and no sum
            parts, sums = map(used_thirds, halves.chunk(2))
            assert parts | sums == {(len(SIZES) - once - 1) % 3}


def used_thirds(inbox: torch.Tensor) -> set[int]:
    return {i for i, third in enumerate(inbox.view(3, -1)) if not bool((third == EMPTY).all())}


def test_what_does_not_fit_is_left_to_others() -> None:
    reduce = PeerAllReduce(0, [0, 0], 1024, torch.device("cpu"))
    assert reduce.takes(torch.zeros(256)) and not reduce.takes(torch.zeros(257))
    assert not reduce.takes(torch.zeros(12)) and not reduce.takes(torch.zeros(16, dtype=torch.int64))
    assert not reduce.takes(torch.zeros(2, 32).t())
    assert not reduce.takes(torch.zeros(17)[1:]) and not reduce.takes(torch.zeros(16, 16)[:, :8])


def test_two_shots_are_for_more_than_two_ranks_and_one_shot_with_them_for_small_sums() -> None:
    two, three = (PeerAllReduce(0, [0] * ranks, 1 << 20, torch.device("cpu")) for ranks in (2, 3))
    small, large = torch.zeros(1 << 10), torch.zeros(1 << 18)
    assert two.ways(small) == two.ways(large) == [False]
    assert three.ways(small) == [False, True] and three.ways(large) == [True]
    with pytest.raises(ValueError, match=r"4096 bytes over 2 ranks cannot take two shots"):
        two(small, True)
    with pytest.raises(ValueError, match=r"1048576 bytes over 3 ranks cannot take one"):
        three(large, False)
