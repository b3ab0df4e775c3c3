"""Times a sparse MLP of Qwen3-30B-A3B on a GPU: ``python -m minivllm_qwen3_moe.bench [--tokens 1,8] [--tp 2]``.

Each measurement is a CUDA graph over layers of different weights, more than fit into L2, replayed; the time is that of
a replay divided by the layers. The floor is what the weights of the experts that were chosen take to be read, or what
their products take to be computed, whichever is longer; GB/s are of those weights, for the whole layer and for its two
products alone. Weights in bfloat16 (``bf16``) and float8 (``fp8``) stand beside each other, for few tokens also both
ways, ``pairs`` and ``tiles``; a star marks what is used. ``--sweep`` tries tiles and prints the best of each product,
with ``--fp8`` of weights in float8.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence

import torch

from minivllm.bench.linear import compile_ahead
from minivllm.bench.replay import need_gpu, replay_seconds
from minivllm.kernels.linear.fp8_linear import Fp8Rows, quantize
from minivllm.kernels.linear.products import linear, norm_linear
from minivllm.layers.norm import RMSNorm
from minivllm_qwen3_moe.experts import Weights
from minivllm_qwen3_moe.experts.triton import TritonExperts
from minivllm_qwen3_moe.kernels import grouped_linear, pairs
from minivllm_qwen3_moe.kernels.routing import Routing, route
from minivllm_qwen3_moe.tiles import Tile, Tiles, tiles_for

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
TOKENS = (1, 2, 4, 8, 16, 64, 256, 2048)
BYTES, FLOPS, FP8_FLOPS = 4.3e12, 790e12, 1.4e15  # a second: measured on an H200, the last one assumed
LAYERS = 4  # one token reads 75 MB of a layer: four layers of it are several times L2; of float8 twice as many
BOTH_WAYS = 8  # tokens
Rows = torch.Tensor | Fp8Rows


class Bench:
    """# per layer: gate (experts, hidden)   gate_up (experts, 2 * inner, hidden)   down (experts, hidden, inner)"""

    def __init__(self, tokens: int, tp: int, float8: bool) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)

        def in_float8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values, scales, _ = quantize(weight.flatten(0, 1))
            return values.view(weight.shape), scales.view(weight.shape[:2])

        self.tokens, self.inner, self.float8 = tokens, INNER // tp, float8
        self.layers: list[Weights] = []
        for _ in range(LAYERS * (1 + float8)):
            gate_up, down = random(EXPERTS, 2 * self.inner, HIDDEN), random(EXPERTS, HIDDEN, self.inner)
            if float8:
                (gate_up, up_scale), (down, down_scale) = in_float8(gate_up), in_float8(down)
                self.layers.append(Weights(random(EXPERTS, HIDDEN), gate_up, down, up_scale, down_scale))
            else:
                self.layers.append(Weights(random(EXPERTS, HIDDEN), gate_up, down))
        with torch.device("cuda"):
            self.norm = RMSNorm(HIDDEN, 1e-6).to(torch.bfloat16)
        self.norm.weight.data.fill_(1)
        self.x = torch.randn((tokens, HIDDEN), device="cuda", dtype=torch.bfloat16)
        self.out = torch.zeros_like(self.x)
        self.experts = TritonExperts(TOP_K, True)
        torch.cuda.synchronize()

    def tiles(self) -> Tiles:
        return tiles_for(self.tokens, TOP_K, EXPERTS, torch.bfloat16, self.float8)

    def bytes(self) -> tuple[int, int]:
        """Bytes of the experts that the tokens chose, on average over the layers, and how many experts those are."""
        chosen = [len(linear(self.norm(self.x), layer.gate).topk(TOP_K).indices.unique()) for layer in self.layers]
        mean = sum(chosen) / len(chosen)
        return round(3 * self.inner * HIDDEN * mean * self.layers[0].down.element_size()), round(mean)

    def floor(self) -> float:
        """Seconds."""
        flops = 2 * 3 * self.inner * HIDDEN * self.tokens * TOP_K
        return max(self.bytes()[0] / BYTES, flops / (FP8_FLOPS if self.float8 else FLOPS))

    def seconds(self, run: Callable[[], object]) -> float:
        return replay_seconds(run) / len(self.layers)

    def whole(self, by_pair: bool) -> None:
        run = self.experts.by_pair if by_pair else self.experts.by_expert
        for layer in self.layers:
            run(self.x, self.norm, layer, None)

    def uses_pairs(self) -> bool:
        return self.tokens <= (pairs.MAX_FP8_TOKENS if self.float8 else pairs.MAX_TOKENS)

    def rows(self, x: torch.Tensor) -> Rows:
        return quantize(x) if self.float8 else x

    def parts(self, by_pair: bool) -> dict[str, Callable[[], object]]:
        """Each kernel alone, on what those before it made: router, choosing and sorting, the products, rows of float8,
        the sum."""
        return self.pairs() if by_pair else self.grouped()

    def pairs(self) -> dict[str, Callable[[], object]]:
        x, norm, eps = self.x, self.norm.weight, self.norm.eps
        logits = [norm_linear(x, norm, eps, layer.gate) for layer in self.layers]
        picked = [pairs.pick(each, x, norm, eps, TOP_K, True, self.float8) for each in logits]
        ups = [
            pairs.pair_gate_up(h, its.gate_up, ids, its.gate_up_scale)
            for its, (h, _, ids) in zip(self.layers, picked, strict=True)
        ]
        both = [(*parts, self.rows(up)) for *parts, up in zip(self.layers, picked, ups, strict=True)]
        parts: dict[str, Callable[[], object]] = {
            "router": lambda: [norm_linear(x, norm, eps, layer.gate) for layer in self.layers],
            "sort": lambda: [pairs.pick(each, x, norm, eps, TOP_K, True, self.float8) for each in logits],
            "gate_up": lambda: [
                pairs.pair_gate_up(h, its.gate_up, ids, its.gate_up_scale) for its, (h, _, ids), _ in both
            ],
            "down": lambda: [
                pairs.pair_down(up, its.down, ids, w, self.out, its.down_scale) for its, (_, w, ids), up in both
            ],
        }
        return parts | ({"float8": lambda: [quantize(up) for up in ups]} if self.float8 else {})

    def grouped(self) -> dict[str, Callable[[], object]]:
        x, norm, tiles = self.x, self.norm, self.tiles()
        h = quantize(x, norm.weight, norm.eps) if self.float8 else norm(x)
        logits = [linear(norm(x), layer.gate) for layer in self.layers]
        routings = [route(each, TOP_K, True, tiles.rows) for each in logits]
        ups = [
            grouped_linear.grouped_gate_up(h, layer.gate_up, routing, tiles.gate_up, layer.gate_up_scale)
            for layer, routing in zip(self.layers, routings, strict=True)
        ]
        its = [self.rows(up) for up in ups]
        first = self.layers[0]
        rows = grouped_linear.grouped_down(its[0], first.down, routings[0], tiles.down, first.down_scale)
        parts: dict[str, Callable[[], object]] = {
            "router": lambda: [norm_linear(x, norm.weight, norm.eps, layer.gate) for layer in self.layers],
            "sort": lambda: [route(each, TOP_K, True, tiles.rows) for each in logits],
            "gate_up": self.product(routings, [h] * len(ups), True, tiles.gate_up),
            "down": self.product(routings, its, False, tiles.down),
            "sum": lambda: [grouped_linear.combine(rows, self.tokens, self.out) for _ in self.layers],
        }
        two = lambda: [(quantize(x, norm.weight, norm.eps), quantize(up)) for up in ups]  # noqa: E731
        return parts | ({"float8": two} if self.float8 else {})

    def product(self, routings: list[Routing], xs: Sequence[Rows], gated: bool, tile: Tile) -> Callable[[], None]:
        run = grouped_linear.grouped_gate_up if gated else grouped_linear.grouped_down

        def each() -> None:
            for layer, routing, x in zip(self.layers, routings, xs, strict=True):
                run(x, *_operand(layer, gated, routing, tile))

        return each


def _operand(layer: Weights, gated: bool, *between: object) -> tuple:
    """A product's weight, what stands between, and the weight's scales."""
    return (layer.gate_up, *between, layer.gate_up_scale) if gated else (layer.down, *between, layer.down_scale)


def compare(counts: list[int], tp: int) -> None:
    names = ("router", "sort", "gate_up", "down", "float8", "sum")
    print(
        f"{'tokens':>7} {'weights':<12}{'experts':>8}{'floor, µs':>11}{'layer, µs':>11}{'of floor':>9}{'GB/s':>7}"
        f"{'products, GB/s':>16}" + "".join(f"{n:>9}" for n in names)
    )
    for tokens, float8 in itertools.product(counts, (False, True)):
        bench = Bench(tokens, tp, float8)
        floor, (nbytes, chosen) = bench.floor(), bench.bytes()
        for by_pair in (True, False) if tokens <= BOTH_WAYS else (False,):
            layer = bench.seconds(lambda bench=bench, by_pair=by_pair: bench.whole(by_pair))
            times = {name: bench.seconds(run) * 1e6 for name, run in bench.parts(by_pair).items()}
            star = "*" if by_pair == bench.uses_pairs() else ""
            way = f"{'fp8' if float8 else 'bf16'} {'pairs' if by_pair else 'tiles'}{star}"
            products = nbytes / (times["gate_up"] + times["down"]) / 1e3
            print(
                f"{tokens:>7} {way:<12}{chosen:>8}{floor * 1e6:>11.1f}{layer * 1e6:>11.1f}{floor / layer:>9.0%}"
                f"{nbytes / layer / 1e9:>7.0f}{products:>16.0f}"
                + "".join(f"{times[name]:>9.1f}" if name in times else f"{'-':>9}" for name in names),
                flush=True,
            )
        del bench
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------- sweep


def variants(gated: bool, rows: int, float8: bool) -> list[Tile]:
    """Shapes worth a try that fit into shared memory."""
    found = []
    sizes, width = (16, 32, 64, 128, 256) if rows <= 32 else (64, 128, 256), 1 if float8 else 2  # bytes
    for n, depth, warps, stages in itertools.product(sizes, (128, 256, 512), (4, 8), (2, 3, 4, 5)):
        held = (rows + n * (2 if gated else 1)) * depth * stages
        sums = rows * n * (2 if gated else 1) // (32 * warps)  # accumulators a thread
        if held <= 220 << 10 and sums <= 128 and (rows <= 32 or depth < 512):
            found.append(Tile(n, depth // width, warps, stages))
    return found


def sweep(counts: list[int], tp: int, float8: bool) -> None:
    for tokens in counts:
        bench = Bench(tokens, tp, float8)
        h = bench.rows(bench.norm(bench.x))
        logits = [linear(bench.norm(bench.x), layer.gate) for layer in bench.layers]
        share = tokens * TOP_K / EXPERTS
        for rows in (16, 32, 64, 128):
            if not share / 4 <= rows <= max(8 * share, 16):
                continue
            routings = [route(each, TOP_K, True, rows) for each in logits]
            ups = [
                bench.rows(torch.randn((tokens * TOP_K, bench.inner), device="cuda", dtype=torch.bfloat16))
                for _ in logits
            ]
            for gated in (True, False):
                tiles, xs = variants(gated, rows, float8), [h] * len(ups) if gated else ups
                compile_ahead(_launch(bench, routings[0], xs[0], gated, tile) for tile in tiles)
                timed = []
                for tile in tiles:
                    try:
                        timed.append((bench.seconds(bench.product(routings, xs, gated, tile)) * 1e6, tile))
                    except Exception:  # too much shared memory, or registers
                        continue
                timed.sort(key=lambda pair: pair[0])
                print(f"{tokens} tokens, tiles of {rows} rows, {'gate_up' if gated else 'down'}: {len(timed)} of "
                      f"{len(tiles)} ran; median {timed[len(timed) // 2][0]:.1f} µs")  # fmt: skip
                for took, tile in timed[:4]:
                    print(f"  {took:8.1f} µs  {tile}", flush=True)
        del bench
        torch.cuda.empty_cache()


def _launch(bench: Bench, routing: Routing, x: Rows, gated: bool, tile: Tile) -> tuple:
    weight, scale = _operand(bench.layers[0], gated)
    return grouped_linear.prepare(x, weight, routing, tile, gated, scale)


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    args.add_argument("--tp", type=int, default=1, help="one rank's part of so many")
    args.add_argument("--sweep", action="store_true")
    args.add_argument("--fp8", action="store_true", help="sweep tiles for weights in float8")
    opt = args.parse_args()
    need_gpu()
    counts = [int(t) for t in opt.tokens.split(",")]
    print(f"{torch.cuda.get_device_name()}, {HIDDEN} x {INNER // opt.tp}, {EXPERTS} experts, {TOP_K} a token")
    with torch.inference_mode():
        if opt.sweep:
            sweep(counts, opt.tp, opt.fp8)
        else:
            compare(counts, opt.tp)


if __name__ == "__main__":
    main()
