"""How ranks find each other: a store that one of them (or their parent) keeps, and a process group through it."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minivllm.core.parallel import TensorParallel
from minivllm.errors import ConfigError
from minivllm.kernels.all_reduce import PeerAllReduce

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger("minivllm")

_PEER_BYTES = 1 << 20  # an all-reduce up to here goes through peer memory, if that is chosen; more through NCCL

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
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    else:
        if host == "127.0.0.1" and os.path.exists("/sys/class/net/lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not whatever the machine's name resolves to
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_GLOO_TIMEOUT)
    return TensorParallel(rank, size, dist.group.WORLD)


def with_peer_memory(tp: TensorParallel, device_index: int, options: Mapping[str, Any]) -> TensorParallel:
    """``executor.options.all_reduce=peer``: small sums through peer memory, after proving on this machine that they are
    right; ``all_reduce_bytes`` is how small. Every rank calls this."""
    how = options.get("all_reduce", "nccl")
    if how not in ("nccl", "peer"):
        raise ConfigError(f"executor.options.all_reduce={how} is neither nccl nor peer")
    if how == "nccl" or tp.size == 1:
        return tp
    device, why = torch.device("cuda", device_index), ""
    try:
        peer = PeerAllReduce.create(tp.group, int(options.get("all_reduce_bytes", _PEER_BYTES)), device)
        right = _agrees(peer, tp, device)
    except RuntimeError as error:
        right, why = False, str(error).splitlines()[0]
    if not tp.minimum(int(right), device):
        logger.warning("all_reduce=peer does not work here, NCCL is used %s", why)
        return tp
    return replace(tp, peer=peer)


def _agrees(peer: PeerAllReduce, tp: TensorParallel, device: torch.device) -> bool:
    """Whether it sums as NCCL does: small whole numbers, so that any order gives the same."""
    right = True
    for n in (8, 4096, peer.capacity // 2):
        for two_shots in (False, True):
            x = torch.randint(-8, 8, (n,), device=device).to(torch.bfloat16)
            ours = peer(x.clone(), two_shots)
            right &= torch.equal(ours, tp.all_reduce(x))
    return right
