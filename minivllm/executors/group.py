"""How ranks find each other: a store kept by one of them (or their parent), and a process group set up through it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from minivllm.core.parallel import TensorParallel

_JOIN_TIMEOUT = timedelta(seconds=120)  # until all ranks are there
_GLOO_TIMEOUT = timedelta(days=1)  # idle ranks wait for work indefinitely; hangs are detected elsewhere


def open_store(host: str) -> dist.TCPStore:
    """A store on a port picked by the system. It listens on ``host`` only (by default it would on all interfaces)."""
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
        master_listen_fd=listener.detach(),  # already bound, so no other process can take the port
    )


def join(device_type: str, device_index: int, rank: int, size: int, host: str, port: int) -> TensorParallel:
    """Make this process rank ``rank`` of ``size``: NCCL on GPUs, gloo on a CPU."""
    if size == 1:
        return TensorParallel()
    store = dist.TCPStore(host, port, None, is_master=False, timeout=_JOIN_TIMEOUT, wait_for_workers=False)
    if device_type == "cuda":
        torch.cuda.set_device(device_index)
        device = torch.device("cuda", device_index)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # all-reduces run beside matmuls
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device, pg_options=options)
    else:
        if host == "127.0.0.1" and os.path.exists("/sys/class/net/lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not what the hostname resolves to
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_GLOO_TIMEOUT)
    return TensorParallel(rank, size, dist.group.WORLD)
