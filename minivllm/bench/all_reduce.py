"""Times all-reduce, NCCL against our one-shot and two-shot: ``python -m minivllm.bench.all_reduce [--ranks N]``.

Each time is that of a CUDA graph of many calls, per call, on the slowest rank. It starts its own ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from minivllm.bench.replay import captured, need_gpu
from minivllm.bench.table import show
from minivllm.core.parallel import TensorParallel
from minivllm.executors.group import join, open_store
from minivllm.kernels.collectives.all_reduce import PeerAllReduce

SIZES = [1 << k for k in range(10, 27, 2)]  # bytes: 1 KiB to 64 MiB
_CALLS, _REPEATS = 20, 20


def time_of(call: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    """Seconds per call."""

    def many() -> None:
        for _ in range(_CALLS):
            call(x)

    graph = captured(many)
    for _ in range(3):
        graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    start.record()
    for _ in range(_REPEATS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / _CALLS / _REPEATS


def run_rank(rank: int, ranks: int, port: int) -> None:
    tp = join("cuda", rank, rank, ranks, "127.0.0.1", port)
    device = torch.device("cuda", rank)
    peer = PeerAllReduce.create(tp.group, max(SIZES), device)
    nccl = TensorParallel(rank, ranks, tp.group)
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "NCCL": nccl.all_reduce,
        "one shot": lambda x: peer(x, False),
    }
    if ranks > 2:
        calls["two shots"] = lambda x: peer(x, True)
    rows = []
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        fits = {name: name != "one shot" or False in peer.ways(x) for name in calls}
        times = torch.tensor([time_of(call, x) if fits[name] else 0.0 for name, call in calls.items()], device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        us = {name: t * 1e6 for name, t in zip(calls, times.tolist(), strict=True) if fits[name]}
        cells = [f"{us[name]:.1f}" if name in us else "–" for name in calls]
        rows.append([_bytes(size), *cells, f"{size / min(us.values()) / 1e3:.0f}"])
    if rank == 0:
        title = f"all-reduce of bfloat16 over {ranks} {torch.cuda.get_device_name()}, µs a call"
        show(title, ["size", *calls, "best, GB/s"], rows)
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return run_rank(args.rank, args.ranks, args.port)
    need_gpu(args.ranks, "lower --ranks, or run it on a machine that has as many")
    store = open_store("127.0.0.1")
    command = [sys.executable, "-m", "minivllm.bench.all_reduce", "--ranks", str(args.ranks), "--port", str(store.port)]
    ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(args.ranks)]
    try:
        codes = [rank.wait(300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
