"""Times the attention backends alone: ``python -m minivllm.bench.attention [--sweep | --sweep-decode]``.

Decode steps are captured in a CUDA graph that runs several layers, each with a cache of its own, so that no layer finds
its keys in L2; the time is that of a replay divided by the layers (the plan on the host is timed apart). Prompt steps
run eagerly over the layers between two events. TB/s counts the keys and values of the contexts once, TFLOP/s four
operations a (query, visible key) pair, head and dimension. ``triton qkv`` is a decode step straight from the
projection: its time includes q/k-norm, rotary and the cache write, that of ``triton`` does not.

``--sweep-decode`` tries the triton backend's configurations on decode steps of three models' heads, in 90 seconds: the
best for each case with the default's time beside it, then how far each configuration is from the best over all cases.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch

from minivllm.bench.replay import captured, median_seconds, need_gpu
from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend, AttentionSpec
from minivllm.rounding import cdiv

if TYPE_CHECKING:
    from minivllm.backends.triton import TritonBackend
    from minivllm.kernels.attention.paged_decode import DecodeConfig

BACKENDS = {
    "hopper": "HopperBackend",
    "triton": "TritonBackend",
    "flash": "FlashBackend",
    "flashinfer": "FlashInferBackend",
}
CACHE_BYTES = 6 << 30  # for all layers together, at most


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    query_lens: list[int]
    seq_lens: list[int]

    @property
    def decode(self) -> bool:
        return max(self.query_lens) == 1

    def read_bytes(self, spec: AttentionSpec) -> float:
        return 2.0 * sum(self.seq_lens) * spec.num_kv_heads * spec.head_dim * getattr(torch, spec.dtype).itemsize

    def operations(self, spec: AttentionSpec) -> float:
        pairs = sum(q * s - q * (q - 1) / 2 for q, s in zip(self.query_lens, self.seq_lens, strict=True))
        return 4.0 * pairs * spec.num_heads * spec.head_dim


def workloads() -> list[Workload]:
    lens = np.random.default_rng(0).integers(128, 1025, 256).tolist()
    decodes = {
        "decode 1 x 128": [128],
        "decode 1 x 1024": [1024],
        "decode 1 x 8192": [8192],
        "decode 8 x 8192": [8192] * 8,
        "decode 64 x 128-1024": lens[:64],
        "decode 256 x 128-1024": lens,
        "decode 256 x 1024": [1024] * 256,
    }
    prompts = {
        "prefill 8 x 1024": ([1024] * 8, [1024] * 8),
        "prefill 1 x 8192": ([8192], [8192]),
        "chunk 512 on 4096, 2048 on 2048": ([512, 2048], [4608, 4096]),
        "prompts 16 x 100-1024": (lens[:16], lens[:16]),
    }
    return [
        *(Workload(name, [1] * len(s), s) for name, s in decodes.items()),
        *(Workload(name, q, s) for name, (q, s) in prompts.items()),
    ]


class Bench:
    """One workload's tensors. cache: (layers, 2, blocks, block_size, kv heads, head_dim)."""

    def __init__(self, spec: AttentionSpec, work: Workload, fused: bool = False) -> None:
        device, dtype = torch.device("cuda"), getattr(torch, spec.dtype)
        self.spec, self.work, self.fused = spec, work, fused
        query, seq = np.array(work.query_lens, np.int32), np.array(work.seq_lens, np.int32)
        counts = cdiv(seq, spec.block_size)
        blocks = int(counts.sum()) + 1
        per_layer = 2 * blocks * spec.block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize
        self.layers = int(min(max(CACHE_BYTES // per_layer, 2), 28))
        shape = (self.layers, 2, blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.cache = torch.randn(shape, device=device, dtype=dtype)
        ids = np.random.default_rng(0).permutation(np.arange(1, blocks)).astype(np.int32)
        width = cdiv(spec.max_model_len, spec.block_size) if work.decode else int(counts.max())
        tables = np.zeros((len(seq), width), np.int32)
        tables[np.arange(width) < counts[:, None]] = ids
        start = np.concatenate(([0], np.cumsum(query))).astype(np.int32)
        self.q = torch.randn((int(query.sum()), spec.num_heads, spec.head_dim), device=device, dtype=dtype)
        self.out = torch.empty_like(self.q)
        last = seq.astype(np.int64) - 1
        place = tables[np.arange(len(seq)), last // spec.block_size] * spec.block_size + last % spec.block_size
        packed = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = torch.randn((len(seq), packed), device=device, dtype=dtype)
        self.norm = torch.ones(spec.head_dim, device=device, dtype=dtype)
        self.cos_sin = torch.randn((spec.max_model_len, spec.head_dim), device=device)
        self.positions = torch.from_numpy(last).to(device)
        self.batch = AttentionBatch(
            num_decodes=len(seq) if work.decode else 0,
            query_start=torch.from_numpy(start).to(device),
            seq_lens=torch.from_numpy(seq).to(device),
            block_tables=torch.from_numpy(tables).to(device),
            slot_mapping=torch.from_numpy(place).to(device) if work.decode else self.q.new_zeros(len(self.q)).long(),
            host_query_lens=query,
            host_seq_lens=seq,
            host_block_tables=tables[:, : int(counts.max())],
            graph_size=len(seq) if work.decode else 0,
        )
        self.ids = [SimpleNamespace(index=i) for i in range(self.layers)]

    def run_layers(self, backend: AttentionBackend) -> None:
        if self.fused:
            from minivllm.backends.triton import TritonBackend

            assert isinstance(backend, TritonBackend)
            for layer in self.ids:
                backend.decode_qkv(self.qkv, self.norm, self.norm, 1e-6, self.cos_sin, self.positions, layer)
            return
        attend = backend.decode if self.work.decode else backend.prefill
        for layer in self.ids:
            attend(self.q, layer, self.out)

    def measure(self, backend: AttentionBackend, repeats: int = 10) -> tuple[float, float, float]:
        """(device seconds per layer, host seconds per layer, host seconds per plan); the first is a median."""
        backend.bind(self.cache)
        plans = []
        for _ in range(5):
            torch.cuda.synchronize()
            t = time.perf_counter()
            backend.plan(self.batch)
            plans.append(time.perf_counter() - t)
        self.run_layers(backend)
        torch.cuda.synchronize()
        t = time.perf_counter()
        self.run_layers(backend)
        host = (time.perf_counter() - t) / self.layers
        step = partial(self.run_layers, backend)
        seconds = median_seconds(captured(step).replay if self.work.decode else step, repeats)
        return seconds / self.layers, host, min(plans)

    def rate(self, seconds: float) -> str:
        if self.work.decode:
            return f"{self.work.read_bytes(self.spec) / seconds / 1e12:6.2f} TB/s"
        return f"{self.work.operations(self.spec) / seconds / 1e12:6.0f} TFLOP/s"


# --------------------------------------------------------------------------- sweeps of the triton backend

PREFILL_BLOCKS = [  # block_m, block_n, warps, stages
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2),
    (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 8, 4), (256, 64, 8, 2),
]  # fmt: skip
# block_n, warps, stages; then programs per SM, min_tiles
DECODE_BLOCKS = [(32, 4, 2), (32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2)]
DECODE_CUTS = [(1, 2), (2, 1), (2, 2), (2, 4), (3, 2), (4, 1), (4, 2), (4, 4), (8, 2)]


def prefill_variants(backend: TritonBackend) -> Iterator[tuple[str, TritonBackend]]:
    from minivllm.kernels.attention.paged_prefill import PrefillConfig

    for block_m, block_n, warps, stages in PREFILL_BLOCKS:
        backend.prefill_config = PrefillConfig(block_m, block_n, warps, stages)
        yield f"m{block_m} n{block_n} w{warps} s{stages}", backend


def with_decode(backend: TritonBackend, config: DecodeConfig | None) -> TritonBackend:
    """The backend, changed to another decode configuration, or back to the default."""
    from minivllm.kernels.attention.paged_decode import DecodeWorkspace

    s = backend.spec
    backend._stream = None  # configurations are for the other kernel
    backend._workspace = DecodeWorkspace(
        backend.max_rows, s.num_heads, s.num_kv_heads, s.head_dim, getattr(torch, s.dtype), "cuda", s.sliding_window,
        config, s.max_model_len,
    )  # fmt: skip
    return backend


def sweep_decode(spec: AttentionSpec) -> None:
    """Try blocks with the default split, then splits with the case's best blocks."""
    from minivllm.backends.triton import TritonBackend
    from minivllm.kernels.attention.paged_decode import decode_config

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim}")
    behind: dict[str, list[float]] = {}  # each configuration's times relative to the case's best
    for work in decode_cases():
        rows, backend = len(work.seq_lens), TritonBackend(spec)
        usual = decode_config(spec.head_dim, getattr(torch, spec.dtype), sms, rows)
        bench = Bench(spec, work, fused=rows <= backend.fused_decode_rows)
        times: dict[DecodeConfig, float] = {}

        def measure(config: DecodeConfig, bench: Bench = bench, backend: TritonBackend = backend,
                    times: dict[DecodeConfig, float] = times) -> float:  # fmt: skip
            if config not in times:
                try:
                    times[config] = bench.measure(with_decode(backend, config), 7)[0]
                except Exception as error:  # e.g. too much shared memory
                    times[config] = float("inf")
                    print(f"  {describe(config, sms)}: {type(error).__name__}: {str(error)[:100]}", flush=True)
            return times[config]

        default = measure(usual)
        for n, w, s in DECODE_BLOCKS:
            measure(replace(usual, block_n=n, num_warps=w, num_stages=s))
        blocks = min(times, key=measure)
        for programs, tiles in DECODE_CUTS:
            measure(replace(blocks, programs=programs * sms, min_tiles=tiles))
            measure(replace(usual, programs=programs * sms, min_tiles=tiles))
        best = min(times, key=measure)
        for config, seconds in times.items():
            behind.setdefault(describe(config, sms), []).append(seconds / times[best])
        print(f"  {work.name:<15}{default * 1e6:8.1f} µs {bench.rate(default)}   best{times[best] * 1e6:8.1f} µs "
              f"{bench.rate(times[best])}   {describe(best, sms)}", flush=True)  # fmt: skip
        del bench, backend
    cases = max(map(len, behind.values()))
    print("  over all cases, times the best (mean, worst):")
    complete = {label: ratios for label, ratios in behind.items() if len(ratios) == cases}
    for label, ratios in sorted(complete.items(), key=lambda item: sum(item[1]))[:6]:
        print(f"    {sum(ratios) / cases:6.3f} {max(ratios):6.3f}   {label}", flush=True)


def describe(config: DecodeConfig, sms: int) -> str:
    return (
        f"n{config.block_n} w{config.num_warps} s{config.num_stages} programs {config.programs / sms:g}/SM "
        f"min {config.min_tiles}"
    )


def decode_cases() -> list[Workload]:
    rng = np.random.default_rng(0)
    short, long = rng.integers(64, 301, 256).tolist(), rng.integers(128, 1025, 256).tolist()
    cases = {
        "1 x 128": [128],
        "1 x 1024": [1024],
        "1 x 8192": [8192],
        "8 x 8192": [8192] * 8,
        "32 x 512": [512] * 32,
        "64 x 128-1024": long[:64],
        "256 x 64-300": short,
        "256 x 128-1024": long,
    }
    return [Workload(name, [1] * len(lens), lens) for name, lens in cases.items()]


# --------------------------------------------------------------------------- the table


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--backends", default=",".join(BACKENDS))
    args.add_argument("--heads", type=int, default=16)
    args.add_argument("--kv-heads", type=int, default=8)
    args.add_argument("--head-dim", type=int, default=128)
    args.add_argument("--block-size", type=int, default=16)
    args.add_argument("--only", default="", help="workloads whose name has this in it")
    args.add_argument("--sweep", action="store_true", help="the triton backend's prefill configurations, best first")
    args.add_argument("--sweep-decode", action="store_true", help="its decode configurations, for three models' heads")
    opt = args.parse_args()
    need_gpu()
    spec = AttentionSpec(
        device="cuda",
        dtype="bfloat16",
        num_heads=opt.heads,
        num_kv_heads=opt.kv_heads,
        head_dim=opt.head_dim,
        block_size=opt.block_size,
        num_layers=28,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=16384,
        scale=opt.head_dim**-0.5,
    )
    print(f"{torch.cuda.get_device_name()}, {spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim}, "
          f"blocks of {spec.block_size}, {spec.dtype}")  # fmt: skip
    with torch.inference_mode():
        if opt.sweep_decode:
            for heads, kv_heads, head_dim in [(16, 8, 128), (32, 8, 64), (40, 8, 128)]:
                scale = head_dim**-0.5
                sweep_decode(replace(spec, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=scale))
            return
        for work in workloads():
            if opt.only in work.name and not opt.sweep:
                compare(spec, work, opt.backends.split(","))
            elif opt.only in work.name and not work.decode:
                sweep_prefill(spec, work)


def compare(spec: AttentionSpec, work: Workload, names: list[str]) -> None:
    bench = Bench(spec, work)
    print(f"{work.name} ({bench.layers} layers)")
    if work.decode and "triton" in names:
        names = [*names, "triton qkv"]
    for name in names:
        try:
            module, bench.fused = name.split()[0], name.endswith(" qkv")
            backend_class = getattr(import_module(f"minivllm.backends.{module}"), BACKENDS[module])
            if reasons := backend_class.unsupported(spec):
                print(f"  {name:<11}{'; '.join(reasons)}")
                continue
            seconds, host, plan = bench.measure(backend_class(spec))
            print(f"  {name:<11}{seconds * 1e6:9.1f} µs  {bench.rate(seconds)}   host {host * 1e6:5.0f} µs a call, "
                  f"{plan * 1e6:6.0f} µs a plan", flush=True)  # fmt: skip
        except Exception as error:  # one backend's failure is shown in the table
            print(f"  {name:<11}{type(error).__name__}: {error}", flush=True)


def sweep_prefill(spec: AttentionSpec, work: Workload) -> None:
    from minivllm.backends.triton import TritonBackend

    bench, rows = Bench(spec, work), []
    print(f"{work.name} ({bench.layers} layers)")
    for label, variant in prefill_variants(TritonBackend(spec)):
        try:
            rows.append((bench.measure(variant, 5)[0], label))
        except Exception as error:  # e.g. too much shared memory
            print(f"  {label}: {type(error).__name__}: {str(error)[:120]}")
    for seconds, label in sorted(rows):
        print(f"  {seconds * 1e6:9.1f} µs  {bench.rate(seconds)}   {label}", flush=True)


if __name__ == "__main__":
    main()
