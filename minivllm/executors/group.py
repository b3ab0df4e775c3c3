"""How ranks find each other: a store that one of them (or their parent) keeps, and a process group through it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from minivllm.core.parallel import TensorParallel

_JOIN_TIMEOUT = timedelta(seconds=120)  # until all ranks are there
_GLOO_TIMEOUT = timedelta(days=1)  # ranks wait for work for as long as there is none; who hangs is found out elsewhere


def open_store(host: str) -> dist.TCPStore:
    """A store on a port that the system picks. It listens on ``host`` only (by itself it would listen everywhere)."""
    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        None,
        is_master=True,
        timeout=_JOIN_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # bound already: no other process can take the port in between
    )


def join(device_type: str, device_index: int, rank: int, size: int, host: str, port: int) -> TensorParallel:
    """Make this process rank ``rank`` of ``size``: NCCL on GPUs, gloo on a CPU."""
    if size == 1:
        return TensorParallel()
    store = dist.TCPStore(host, port, None, is_master=False, timeout=_JOIN_TIMEOUT, wait_for_workers=False)
    if device_type == "cuda":
        torch.cuda.set_device(device_index)
        device = torch.device("cuda", device_index)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # sums find room beside products
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device, pg_options=options)
    else:
        if host == "127.0.0.1" and os.path.exists("/sys/class/net/lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not whatever the machine's name resolves to
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_GLOO_TIMEOUT)
    return TensorParallel(rank, size, dist.group.WORLD)
