"""Times the linear layers of a decode step: ``python -m minivllm.bench.linear [--model qwen3] [--sweep | --chain]``.

Each product runs in a CUDA graph over as many distinct weights as it takes to read them from memory and not from L2;
the time is that of a replay divided by the weights. ``ours`` is the fused kernel (past 16 rows the cluster kernel:
gate-up with the norm taken in, qkv behind a norm kernel; or for gate-up the persistent kernel, where that is chosen),
``library`` what does the same without it (norm kernel, cuBLAS, activation kernel). GB/s counts the weight once.
``--sweep`` tries kernel shapes of up to 16 rows and prints the best; ``--chain`` times a model's layers without their
attention, with and without programmatic launch.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from minivllm.bench.replay import need_gpu, replay_seconds
from minivllm.kernels import rms_norm as norm_module
from minivllm.kernels._triton import num_sms
from minivllm.kernels.linear import cluster_linear as cluster_module
from minivllm.kernels.linear import skinny_linear as skinny
from minivllm.kernels.linear.cluster_config import cluster_config
from minivllm.kernels.linear.cluster_linear import cluster_gate_up, cluster_linear, cluster_linear_add, use_cluster
from minivllm.kernels.linear.persistent_linear import persistent_gate_up, use_persistent
from minivllm.kernels.linear.products import linear_add, norm_gate_up, norm_linear
from minivllm.kernels.linear.skinny_linear import SkinnyConfig
from minivllm.rounding import cdiv

EPS = 1e-6
PEAK = 4.3e12  # bytes/s, a device copy on an H200
DISTINCT = 600 << 20  # minimum bytes of weights in a graph: a dozen times L2
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    layers: int
    vocab: int


MODELS = {
    "qwen3": Shape(1024, 16, 8, 128, 3072, 28, 151936),
    "llama": Shape(2048, 32, 8, 64, 8192, 16, 128256),
    "qwen3-14b": Shape(5120, 40, 8, 128, 17408, 40, 151936),
}


@dataclass(frozen=True, slots=True)
class Product:
    """One linear layer with n output features; ``kind`` is linear, norm, gate_up or add."""

    name: str
    kind: str
    n: int
    k: int

    @property
    def weight_rows(self) -> int:
        return 2 * self.n if self.kind == "gate_up" else self.n

    @property
    def num_bytes(self) -> int:
        return 2 * self.weight_rows * self.k


def products(model: Shape) -> list[Product]:
    width = model.heads * model.head_dim
    return [
        Product("qkv", "norm", width + 2 * model.kv_heads * model.head_dim, model.hidden),
        Product("o", "add", model.hidden, width),
        Product("gate_up", "gate_up", model.inner, model.hidden),
        Product("down", "add", model.hidden, model.inner),
        Product("lm_head", "linear", model.vocab, model.hidden),
    ]


def random_weight(n: int, k: int) -> torch.Tensor:
    return torch.randn((n, k), device="cuda", dtype=torch.bfloat16).mul_(k**-0.5)


class Bench:
    """One product's tensors: x (rows, k), out (rows, n), weights, the norm's weight."""

    def __init__(self, product: Product) -> None:
        self.product = product
        copies = max(cdiv(DISTINCT, product.num_bytes), 2)
        self.weights = [random_weight(product.weight_rows, product.k) for _ in range(copies)]
        self.norm = torch.ones(product.k, device="cuda", dtype=torch.bfloat16)
        self.x = torch.randn((max(ROWS), product.k), device="cuda", dtype=torch.bfloat16)
        self.out = torch.zeros((max(ROWS), product.n), device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()

    def options(self, rows: int) -> dict[str, object]:
        kind = self.product.kind
        options: dict[str, object] = {"gated": kind == "gate_up"}
        if kind in ("norm", "gate_up"):
            options |= {"norm_weight": self.norm, "eps": EPS}
        if kind == "add":
            options |= {"residual": self.out[:rows]}
        return options

    def skinny(self, rows: int, config: SkinnyConfig | None = None) -> Callable[[], None]:
        x, out, options = self.x[:rows], self.out[:rows], self.options(rows)
        made = [skinny.prepare(x, w, out, config=config, **options) for w in self.weights]  # type: ignore[arg-type]

        def run() -> None:
            for kernel, grid, args, keywords in made:
                kernel[grid](*args, **keywords)

        return run

    def _each(self, per_weight: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            for w in self.weights:
                per_weight(w)

        return run

    def cluster(self, rows: int) -> Callable[[], None]:
        x, out, kind = self.x[:rows], self.out[:rows], self.product.kind
        per_weight: Callable[[torch.Tensor], torch.Tensor] = {
            "linear": lambda w: cluster_linear(x, w),
            "norm": lambda w: cluster_linear(norm_module.rms_norm(x, self.norm, EPS), w),
            "gate_up": lambda w: cluster_gate_up(x, w, EPS),
            "add": lambda w: cluster_linear_add(x, w, out),
        }[kind]

        return self._each(per_weight)

    def takes_persistent(self, rows: int) -> bool:
        product = self.product
        shape = rows, product.weight_rows, product.k, torch.bfloat16, self.x.device
        return product.kind == "gate_up" and use_persistent(*shape, gated=True)

    def takes(self, rows: int) -> bool:
        """Whether there is a kernel of ours for so many rows, faster or not."""
        lines, k, gated = self.product.weight_rows, self.product.k, self.product.kind == "gate_up"
        if rows <= skinny.MAX_ROWS or self.takes_persistent(rows):
            return True
        return cluster_config(rows, lines, k, num_sms(self.x.device), gated) is not None

    def persistent(self, rows: int) -> Callable[[], None]:
        x = self.x[:rows]
        return self._each(lambda w: persistent_gate_up(x, w, norm_module.row_factors(x, EPS)))

    def ours(self, rows: int) -> Callable[[], None]:
        if rows <= skinny.MAX_ROWS:
            return self.skinny(rows)
        return self.persistent(rows) if self.takes_persistent(rows) else self.cluster(rows)

    def library(self, rows: int) -> Callable[[], None]:
        x, out, kind = self.x[:rows], self.out[:rows], self.product.kind
        per_weight: Callable[[torch.Tensor], torch.Tensor] = {
            "linear": lambda w: F.linear(x, w),
            "norm": lambda w: skinny.norm_linear_reference(x, self.norm, EPS, w),
            "gate_up": lambda w: skinny.norm_gate_up_reference(x, self.norm, EPS, w),
            "add": lambda w: skinny.linear_add_reference(x, w, None, out),
        }[kind]

        return self._each(per_weight)

    def seconds(self, run: Callable[[], None]) -> float:
        self.out.zero_()
        return replay_seconds(run) / len(self.weights)

    def compile(self, wanted: Iterable[tuple[int, SkinnyConfig | None]]) -> None:
        """Compile all at once, on all cores."""
        compile_ahead(
            skinny.prepare(self.x[:r], self.weights[0], self.out[:r], config=c, **self.options(r))  # type: ignore[arg-type]
            for r, c in wanted
        )


def compile_ahead(launches: Iterable[tuple]) -> None:
    import triton

    with ThreadPoolExecutor(16) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for kernel, grid, args, keywords in launches:
            kernel.warmup(*args, grid=grid, **keywords)


@contextmanager
def without_pdl() -> Iterator[None]:
    """A context in which kernels are launched the ordinary way, not as programmatic dependent launches."""
    modules, usual = (skinny, cluster_module, norm_module), skinny.use_pdl
    for module in modules:
        module.use_pdl = lambda device: False  # type: ignore[attr-defined]
    cluster_module._plan.cache_clear()  # it caches the answer
    try:
        yield
    finally:
        for module in modules:
            module.use_pdl = usual  # type: ignore[attr-defined]
        cluster_module._plan.cache_clear()


# --------------------------------------------------------------------------- ours against the library


def compare(model: Shape) -> None:
    print(f"{'':<9}{'':>14}{'floor':>7}" + "".join(f"{f'{r} rows':>21}" for r in ROWS))
    print(f"{'':<9}{'weight':>14}{'µs':>7}" + f"{'ours  library  GB/s':>21}" * len(ROWS))
    for product in products(model):
        bench = Bench(product)
        bench.compile((r, None) for r in ROWS if r <= skinny.MAX_ROWS)
        cells = []
        for rows in ROWS:
            library = bench.seconds(bench.library(rows))
            if not bench.takes(rows):
                cells.append(f"{'–':>6}{library * 1e6:10.1f}{'':>5}")
                continue
            try:
                mine = bench.seconds(bench.ours(rows))
            except Exception as error:  # e.g. too much shared memory: shown in the table
                cells.append(f"{type(error).__name__[:7]:>7}{library * 1e6:9.1f}{'':>5}")
                continue
            what = (rows, product.weight_rows, product.k, torch.bfloat16, bench.x.device)
            few = rows <= skinny.MAX_ROWS
            chosen = skinny.use_skinny(*what) if few else use_cluster(*what, gated=product.kind == "gate_up")
            mark = "*" if chosen or bench.takes_persistent(rows) else " "
            cells.append(f"{mine * 1e6:6.1f}{mark}{library * 1e6:9.1f}{product.num_bytes / mine / 1e9:5.0f}")
        weight, floor = f"{product.weight_rows} x {product.k}", product.num_bytes / PEAK
        print(f"{product.name:<9}{weight:>14}{floor * 1e6:7.1f}" + "".join(f"{c:>21}" for c in cells), flush=True)
        del bench
        torch.cuda.empty_cache()
    print("* what use_skinny, use_cluster or use_persistent chooses; GB/s of our kernel")


# --------------------------------------------------------------------------- sweep


def variants(product: Product, rows: int) -> list[SkinnyConfig]:
    """Shapes worth trying; few enough to compile in a minute."""
    width, out = 2 if product.kind == "gate_up" else 1, []
    if rows <= 8:
        steps = cdiv(product.k, 256)
        for per_warp, warps in itertools.product((1, 2, 4), (4, 8)):
            if rows * per_warp * width > 16:
                continue
            for most in (8, 16, 24):  # loads of 16 bytes in flight per lane
                depth = min(steps, max(most // (per_warp * width), 1))
                out.append(SkinnyConfig(per_warp, warps, max(d for d in range(1, depth + 1) if steps % d == 0)))
    if rows >= 4:
        for warps, piece in itertools.product((4, 8), (64, 128)):
            steps = cdiv(product.k, warps * piece)
            for held, stages in ((1, 3), (2, 3), (2, 4), (4, 3)):
                depth = min(steps, held * 128 // piece)
                out.append(SkinnyConfig(0, warps, depth, piece, 3 if depth == steps else stages))
    usual = skinny.skinny_config(rows, product.n, product.k, torch.bfloat16, width == 2, 132)
    return list(dict.fromkeys([usual, *out]))


def sweep(model: Shape, all_rows: Iterable[int]) -> None:
    for product, rows in itertools.product(products(model), all_rows):
        bench = Bench(product)
        began = time.perf_counter()
        configs = variants(product, rows)
        bench.compile((rows, c) for c in configs)
        built = time.perf_counter() - began
        timed, failed = [], 0
        for config in configs:
            try:
                timed.append((bench.seconds(bench.skinny(rows, config)), config))
            except Exception:  # too much shared memory, or registers
                failed += 1
        usual = next((t for t, c in timed if c == configs[0]), float("nan"))
        library = bench.seconds(bench.library(rows))
        print(f"{product.name} {product.weight_rows} x {product.k}, {rows} rows: floor "
              f"{product.num_bytes / PEAK * 1e6:.1f}, chosen {usual * 1e6:.1f}, library {library * 1e6:.1f} µs; "
              f"{len(configs)} variants, {failed} failed, built in {built:.0f} s")  # fmt: skip
        for seconds, c in sorted(timed, key=lambda pair: pair[0])[:4]:
            shape = f"per_warp {c.per_warp}" if c.per_warp else f"matrix slice {c.slice} stages {c.stages}"
            print(f"  {seconds * 1e6:7.1f} µs {product.num_bytes / seconds / 1e9:5.0f} GB/s   {shape} warps {c.warps} "
                  f"depth {c.depth}", flush=True)  # fmt: skip
        del bench
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------- a model's layers in a row


def chain(model: Shape) -> None:
    width = model.heads * model.head_dim
    shapes = [(p.weight_rows, p.k) for p in products(model)[:4]]
    weights = [[random_weight(*s) for s in shapes] for _ in range(model.layers)]
    norm = torch.ones(model.hidden, device="cuda", dtype=torch.bfloat16)
    total = sum(2 * n * k for n, k in shapes) * model.layers
    print(f"{model.layers} layers without attention, {total / 1e9:.2f} GB: floor {total / PEAK * 1e6:.0f} µs")
    print(f"{'rows':>6}{'ours, µs':>12}{'without PDL':>13}{'library':>10}{'ours GB/s':>13}")
    for rows in ROWS:
        start = torch.randn((rows, model.hidden), device="cuda", dtype=torch.bfloat16)
        h = start.clone()
        torch.cuda.synchronize()

        def fused(h: torch.Tensor = h, start: torch.Tensor = start) -> None:
            h.copy_(start)
            for qkv, o, gate_up, down in weights:
                linear_add(norm_linear(h, norm, EPS, qkv)[:, :width], o, None, h)
                linear_add(norm_gate_up(h, norm, EPS, gate_up, folded=True), down, None, h)

        def separate(h: torch.Tensor = h, start: torch.Tensor = start) -> None:
            h.copy_(start)
            for qkv, o, gate_up, down in weights:
                heads = skinny.norm_linear_reference(h, norm, EPS, qkv)[:, :width]
                skinny.linear_add_reference(heads, o, None, h)
                skinny.linear_add_reference(skinny.norm_gate_up_reference(h, norm, EPS, gate_up), down, None, h)

        library = replay_seconds(separate)
        expected = h.float()
        with without_pdl():
            ordinary = replay_seconds(fused)
        mine = replay_seconds(fused)
        error = float((h.float() - expected).norm() / expected.norm())
        print(f"{rows:>6}{mine * 1e6:12.0f}{ordinary * 1e6:13.0f}{library * 1e6:10.0f}{total / mine / 1e9:13.0f}"
              f"   differs by {error:.1e}", flush=True)  # fmt: skip


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--model", choices=MODELS, default="qwen3")
    args.add_argument("--sweep", action="store_true")
    args.add_argument("--chain", action="store_true")
    args.add_argument("--rows", default="1", help="of the sweep: 1,4,16")
    opt = args.parse_args()
    need_gpu()
    model = MODELS[opt.model]
    print(f"{torch.cuda.get_device_name()}, {opt.model}, bfloat16")
    with torch.inference_mode():
        if opt.sweep:
            sweep(model, [int(r) for r in opt.rows.split(",")])
        elif opt.chain:
            chain(model)
        else:
            compare(model)


if __name__ == "__main__":
    main()
