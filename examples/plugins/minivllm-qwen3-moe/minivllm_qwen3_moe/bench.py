"""Times a sparse MLP of Qwen3-30B-A3B on a GPU: ``python -m minivllm_qwen3_moe.bench [--tokens 1,8] [--tp 2]``.

Each measurement is a CUDA graph over layers of different weights, more than fit into L2, replayed; the time is that of
a replay divided by the layers. The floor is what the weights of the experts that were chosen take to be read, or what
their products take to be computed, whichever is longer. ``--sweep`` tries tiles and prints the best of each product.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch

from minivllm.bench.linear import compile_ahead
from minivllm.bench.replay import need_gpu, replay_seconds
from minivllm.kernels.linear.products import linear, norm_linear
from minivllm.layers.norm import RMSNorm
from minivllm_qwen3_moe.experts import BACKENDS
from minivllm_qwen3_moe.kernels import grouped_linear, pairs
from minivllm_qwen3_moe.kernels.routing import Routing, route
from minivllm_qwen3_moe.tiles import Tile, tiles_for

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)
BYTES, FLOPS = 4.3e12, 790e12  # a second, measured on an H200
LAYERS = 4  # one token reads 75 MB of a layer: four layers of it are several times L2


class Bench:
    """# per layer: gate (experts, hidden)   gate_up (experts, 2 * inner, hidden)   down (experts, hidden, inner)"""

    def __init__(self, tokens: int, tp: int, layers: int = LAYERS) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)

        self.tokens, self.inner = tokens, INNER // tp
        self.layers = [
            (random(EXPERTS, HIDDEN), random(EXPERTS, 2 * self.inner, HIDDEN), random(EXPERTS, HIDDEN, self.inner))
            for _ in range(layers)
        ]
        with torch.device("cuda"):
            self.norm = RMSNorm(HIDDEN, 1e-6).to(torch.bfloat16)
        self.norm.weight.data.fill_(1)
        self.x = torch.randn((tokens, HIDDEN), device="cuda", dtype=torch.bfloat16)
        self.out = torch.zeros_like(self.x)
        self.experts = BACKENDS["triton"](TOP_K, True)
        torch.cuda.synchronize()

    def floor(self) -> tuple[float, int]:
        """Seconds, and how many experts the first layer's tokens chose."""
        chosen = len(linear(self.norm(self.x), self.layers[0][0]).topk(TOP_K).indices.unique())
        weights = 3 * self.inner * HIDDEN
        return max(2 * weights * chosen / BYTES, 2 * weights * self.tokens * TOP_K / FLOPS), chosen

    def whole(self) -> None:
        for layer in self.layers:
            self.experts(self.x, self.norm, *layer, add=False)

    def parts(self) -> dict[str, Callable[[], object]]:
        """Each kernel alone, on what those before it made: router, choosing and sorting, the products, the sum."""
        return self.pairs() if self.tokens <= pairs.MAX_TOKENS else self.grouped()

    def pairs(self) -> dict[str, Callable[[], object]]:
        x, norm, eps = self.x, self.norm.weight, self.norm.eps
        logits = [norm_linear(x, norm, eps, gate) for gate, _, _ in self.layers]
        picked = [pairs.pick(each, x, norm, eps, TOP_K, True) for each in logits]
        ups = [pairs.pair_gate_up(h, layer[1], ids) for layer, (h, _, ids) in zip(self.layers, picked, strict=True)]
        both = list(zip(self.layers, picked, ups, strict=True))
        return {
            "router": lambda: [norm_linear(x, norm, eps, gate) for gate, _, _ in self.layers],
            "sort": lambda: [pairs.pick(each, x, norm, eps, TOP_K, True) for each in logits],
            "gate_up": lambda: [pairs.pair_gate_up(h, layer[1], ids) for layer, (h, _, ids), _ in both],
            "down": lambda: [pairs.pair_down(up, layer[2], ids, w, self.out) for layer, (_, w, ids), up in both],
        }

    def grouped(self) -> dict[str, Callable[[], object]]:
        h = self.norm(self.x)
        tiles = tiles_for(self.tokens, TOP_K, EXPERTS, h.dtype)
        logits = [linear(h, gate) for gate, _, _ in self.layers]
        routings = [route(each, TOP_K, True, tiles.rows) for each in logits]
        ups = [
            grouped_linear.grouped_gate_up(h, layer[1], routing, tiles.gate_up)
            for layer, routing in zip(self.layers, routings, strict=True)
        ]
        rows = grouped_linear.grouped_down(ups[0], self.layers[0][2], routings[0], tiles.down)
        return {
            "router": lambda: [linear(self.norm(self.x), gate) for gate, _, _ in self.layers],
            "sort": lambda: [route(each, TOP_K, True, tiles.rows) for each in logits],
            "gate_up": self.product(routings, [h] * len(ups), True, tiles.gate_up),
            "down": self.product(routings, ups, False, tiles.down),
            "sum": lambda: [grouped_linear.combine(rows, self.tokens, self.out) for _ in self.layers],
        }

    def product(self, routings: list[Routing], xs: list[torch.Tensor], gated: bool, tile: Tile) -> Callable[[], None]:
        run = grouped_linear.grouped_gate_up if gated else grouped_linear.grouped_down

        def each() -> None:
            for (_, gate_up, down), routing, x in zip(self.layers, routings, xs, strict=True):
                run(x, gate_up if gated else down, routing, tile)

        return each


def seconds(run: Callable[[], object], layers: int = LAYERS) -> float:
    return replay_seconds(run) / layers


def compare(counts: list[int], tp: int) -> None:
    names = ("router", "sort", "gate_up", "down", "sum")
    print(
        f"{'tokens':>7}{'experts':>9}{'floor, µs':>11}{'layer, µs':>11}{'of floor':>9}"
        + "".join(f"{n:>9}" for n in names)
    )
    for tokens in counts:
        bench = Bench(tokens, tp)
        floor, chosen = bench.floor()
        layer = seconds(bench.whole)
        times = {name: f"{seconds(run) * 1e6:.1f}" for name, run in bench.parts().items()}
        print(
            f"{tokens:>7}{chosen:>9}{floor * 1e6:>11.1f}{layer * 1e6:>11.1f}{floor / layer:>9.0%}"
            + "".join(f"{times.get(name, '-'):>9}" for name in names),
            flush=True,
        )
        del bench
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------- sweep


def variants(gated: bool, rows: int) -> list[Tile]:
    """Shapes worth a try that fit into shared memory."""
    found = []
    sizes = (16, 32, 64, 128, 256) if rows <= 32 else (64, 128, 256)
    for n, k, warps, stages in itertools.product(sizes, (64, 128, 256), (4, 8), (2, 3, 4, 5)):
        held = (rows + n * (2 if gated else 1)) * k * 2 * stages
        sums = rows * n * (2 if gated else 1) // (32 * warps)  # accumulators a thread
        if held <= 220 << 10 and sums <= 128 and (rows > 32 or k >= 64) and (rows <= 32 or k < 256):
            found.append(Tile(n, k, warps, stages))
    return found


def sweep(counts: list[int], tp: int) -> None:
    for tokens in counts:
        bench = Bench(tokens, tp)
        h = bench.norm(bench.x)
        logits = [linear(h, gate) for gate, _, _ in bench.layers]
        share = tokens * TOP_K / EXPERTS
        for rows in (16, 32, 64, 128):
            if not share / 4 <= rows <= max(8 * share, 16):
                continue
            routings = [route(each, TOP_K, True, rows) for each in logits]
            ups = [torch.randn((tokens * TOP_K, bench.inner), device="cuda", dtype=h.dtype) for _ in logits]
            for gated in (True, False):
                tiles, xs = variants(gated, rows), [h] * len(ups) if gated else ups
                compile_ahead(_launch(bench, routings[0], xs[0], gated, tile) for tile in tiles)
                timed = []
                for tile in tiles:
                    try:
                        timed.append((seconds(bench.product(routings, xs, gated, tile)) * 1e6, tile))
                    except Exception:  # too much shared memory, or registers
                        continue
                timed.sort(key=lambda pair: pair[0])
                print(f"{tokens} tokens, tiles of {rows} rows, {'gate_up' if gated else 'down'}: {len(timed)} of "
                      f"{len(tiles)} ran; median {timed[len(timed) // 2][0]:.1f} µs")  # fmt: skip
                for took, tile in timed[:4]:
                    print(f"  {took:8.1f} µs  {tile}", flush=True)
        del bench
        torch.cuda.empty_cache()


def _launch(bench: Bench, routing: Routing, x: torch.Tensor, gated: bool, tile: Tile) -> tuple:
    weight = bench.layers[0][1 if gated else 2]
    n = weight.shape[1] // 2 if gated else weight.shape[1]
    out = torch.empty((len(routing.pairs), n), dtype=x.dtype, device=x.device)
    return grouped_linear.prepare(x, weight, out, routing, tile, gated)


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    args.add_argument("--tp", type=int, default=1, help="one rank's part of so many")
    args.add_argument("--sweep", action="store_true")
    opt = args.parse_args()
    need_gpu()
    counts = [int(t) for t in opt.tokens.split(",")]
    print(f"{torch.cuda.get_device_name()}, {HIDDEN} x {INNER // opt.tp}, {EXPERTS} experts, {TOP_K} a token, bfloat16")
    with torch.inference_mode():
        (sweep if opt.sweep else compare)(counts, opt.tp)


if __name__ == "__main__":
    main()
