"""Communication for ranks whose GPUs can access each other's memory, in addition to NCCL: our own all-reduce kernels
and copy-engine exchange, each used only after it has been verified on this machine."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from minivllm.core.cuda_graphs import capture_graph
from minivllm.errors import ConfigError, MinivllmError
from minivllm.kernels import nvrtc
from minivllm.kernels.collectives.all_reduce import PeerAllReduce
from minivllm.kernels.collectives.exchange import PeerExchange, least_rows
from minivllm.kernels.collectives.peer_words import PeerWords
from minivllm.kernels.rms_norm import row_factors_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from minivllm.core.parallel import TensorParallel

logger = logging.getLogger("minivllm")

_PEER_BYTES = 1 << 20  # all_reduce=peer: the default limit
_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20)  # all_reduce=auto: sizes to try


def check_all_reduce(options: Mapping[str, Any], device_type: str) -> None:
    """Raises ConfigError for an ``executor.options.all_reduce`` (or ``all_reduce_bytes``) that cannot be used."""
    how, size = options.get("all_reduce", "auto"), options.get("all_reduce_bytes", _PEER_BYTES)
    if how not in ("auto", "nccl", "peer"):
        raise ConfigError(f"executor.options.all_reduce={how} is not auto, nccl or peer")
    if "all_reduce_bytes" in options and how != "peer":
        raise ConfigError(f"executor.options.all_reduce_bytes is for all_reduce=peer, not for {how}; leave it out")
    if type(size) is not int or size < 1:
        raise ConfigError(f"executor.options.all_reduce_bytes={size} is not a whole number from 1")
    if device_type == "cpu" and how != "auto":
        raise ConfigError(f"executor.options.all_reduce={how} is for GPUs; on a CPU leave it out")


def with_peers(
    tp: TensorParallel, device_index: int, options: Mapping[str, Any], rows: int, width: int, dtype: torch.dtype
) -> TensorParallel:
    """Add whatever sums faster than NCCL here, for steps of up to ``rows`` tokens, ``width`` wide. Collective."""
    tp = _with_peer_memory(tp, device_index, options)
    tp = _with_peer_words(tp, device_index, width)
    return _with_exchange(tp, device_index, rows, width, dtype)


def _with_peer_memory(tp: TensorParallel, device_index: int, options: Mapping[str, Any]) -> TensorParallel:
    """Use peer memory for small all-reduces, if they are verified to be correct on this machine. Collective.

    ``executor.options.all_reduce``: auto (the default) uses it up to the size where NCCL is faster, measured here;
    peer, up to ``all_reduce_bytes`` (default 1 MiB); nccl, never.
    """
    how = options.get("all_reduce", "auto")
    if how == "nccl" or tp.size == 1:
        return tp
    device, why, peer = torch.device("cuda", device_index), "", None
    capacity = options.get("all_reduce_bytes", _PEER_BYTES) if how == "peer" else _SIZES[-1]
    try:
        peer = PeerAllReduce.create(tp.group, capacity, device)
    except Exception as error:  # something missing in this torch or machine: NCCL works without it
        why = f"({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    # a rank without peer memory would hang the others in the first all-reduce
    everywhere = bool(tp.minimum(int(peer is not None), device))
    if peer is None or not everywhere or not tp.minimum(int(_agrees(peer, tp, device)), device):
        level = logging.WARNING if how == "peer" else logging.INFO
        logger.log(level, "sums through peer memory do not work here, NCCL is used %s", why)
        return tp
    if how == "auto":
        peer.limit = tp.minimum(_faster_up_to(peer, tp, device), device)
    return replace(tp, peer=peer)


def _with_exchange(tp: TensorParallel, device_index: int, rows: int, width: int, dtype: torch.dtype) -> TensorParallel:
    """Overlap sums with matmuls in steps of up to ``rows`` tokens, if peer memory works, steps may be large enough and
    the sums are verified to be correct on this machine. Collective."""
    if tp.peer is None or rows < least_rows(tp.size, captured=True):
        return tp
    device, why, exchange = torch.device("cuda", device_index), "", None
    try:
        exchange = PeerExchange.create(tp.group, rows, width, dtype, device)
    except Exception as error:  # most likely too little memory: NCCL works without it
        why = f"({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    everywhere = bool(tp.minimum(int(exchange is not None), device))
    if exchange is None or not everywhere or not tp.minimum(int(_exchanges(exchange, tp)), device):
        logger.info("large sums by copy engines do not work here, NCCL is used %s", why)
        return tp
    return replace(tp, exchange=exchange)


def _with_peer_words(tp: TensorParallel, device_index: int, width: int) -> TensorParallel:
    """Let all layers run in one kernel for few sequences, if peer memory works and all ranks have that kernel.
    Collective."""
    device = torch.device("cuda", device_index)
    if tp.peer is None or not tp.minimum(int(nvrtc.available(device)), device):
        return tp
    return replace(tp, words=PeerWords.create(tp.group, width, device))


def _faster_up_to(peer: PeerAllReduce, tp: TensorParallel, device: torch.device) -> int:
    """The number of bytes up to which peer memory is faster than NCCL; 0: never. Takes a few milliseconds.

    Both are timed in a CUDA graph, as in a decode step, so that launch overhead does not count.
    """

    def milliseconds(reduce: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
        def ten() -> torch.Tensor:
            for _ in range(10):
                reduce(x)
            return x

        ten()
        torch.cuda.synchronize()
        graph, _ = capture_graph(ten, torch.cuda.graph_pool_handle())
        times = []
        for _ in range(4):  # the first waits for the other ranks' captures
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            graph.replay()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after))
        return min(times)

    limit, faster = 0, True
    for size in _SIZES:  # every rank times every size, as all must make the same calls
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        faster &= milliseconds(peer, x) < milliseconds(tp.all_reduce, x)
        limit = size if faster else limit
    logger.info("sums of up to %d KiB go through peer memory", limit >> 10)
    return limit


def _agrees(peer: PeerAllReduce, tp: TensorParallel, device: torch.device) -> bool:
    """Whether it sums as NCCL does, on small integers, so that the order of summation does not matter.

    Large sums directly follow small ones and vice versa, and each size repeats until its memory has been reused more
    than once.
    """
    large, middle = peer.capacity // 2, peer.one_shot // 2
    sizes = (8, 4096, large, 8, middle, 4096, middle, 8, large, large // 16 * 8, 8, middle, 8, 8)
    xs = [torch.randint(-8, 8, (n,), device=device).to(torch.bfloat16) for n in sizes if n <= large]
    ours = [(x, peer(x.clone(), two_shots)) for x in xs for two_shots in peer.ways(x)]
    right = True
    for x, sums in ours:  # no early exit: every rank must make the same calls
        right &= torch.equal(sums, tp.all_reduce(x.clone()))
    return right


def _exchanges(exchange: PeerExchange, tp: TensorParallel) -> bool:
    """Whether it sums as NCCL does, on small integers, in back-to-back calls of several sizes, with and without a
    graph."""
    most, width = exchange.stream.shape

    def drawn(rows: int) -> torch.Tensor:
        return torch.randint(-8, 8, (rows, width), device=exchange.device).to(exchange.stream.dtype)

    def is_right(x: torch.Tensor) -> bool:
        total, factors = exchange.stream[: len(x)], exchange.factors[: len(x)]
        same = torch.equal(total, tp.all_reduce(x.clone()))
        return same and torch.allclose(factors, row_factors_reference(total, eps=1.0), rtol=1e-4)

    right, x = True, drawn(1000)
    for rows in (most, 1000, most, 1001):
        other = drawn(rows)
        exchange.all_reduce(other, eps=1.0)
        right &= is_right(other)
    try:
        graph, _ = capture_graph(lambda: exchange.all_reduce(x, eps=1.0), torch.cuda.graph_pool_handle())
    except (RuntimeError, MinivllmError):  # on all ranks alike, as they have the same driver
        return False
    for _ in range(2):
        x.copy_(drawn(1000))
        graph.replay()
        right &= is_right(x)
    return right
