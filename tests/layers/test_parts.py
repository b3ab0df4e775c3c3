"""A large step's sums over the ranks go part by part through the layers: what comes out, in which order, and that
nobody reads a row whose sum is under way. Ranks are threads here, and their memory is everybody's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PagedRun, attention_spec
from torch import nn
from torch.nn import functional as F

from minivllm.backends.torch import TorchBackend
from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend
from minivllm.core.parallel import TensorParallel
from minivllm.kernels.attention.rotary import Heads, qk_norm_rope_store
from minivllm.kernels.capture import rehearsal
from minivllm.kernels.collectives.exchange import Arrival, PeerExchange
from minivllm.kernels.linear.products import norm_gate_up
from minivllm.kernels.rms_norm import row_factors_reference
from minivllm.layers.attention import Attention
from minivllm.layers.linear import QKVParallelLinear, RowParallelLinear
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.norm import RMSNorm
from minivllm.models.checkpoint import read_model_config
from minivllm.models.loader import build_model, iterate_safetensors
from minivllm.models.qwen3 import Qwen3ForCausalLM, Qwen3Layer

Checkpoints = Callable[..., Path]
Log = list[tuple[Any, ...]]
PROMPT = list(range(7, 7 + 31 * 9, 31))  # 9 tokens: of two ranks 5 and 4
HIDDEN = 64


class Room:
    """Where ranks meet: sums in the order of the ranks, of what each brings."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.brought = threading.Barrier(ranks, timeout=30), [torch.empty(0)] * ranks

    def gather(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.brought[rank] = x.clone()
        self.barrier.wait()
        parts = list(self.brought)
        self.barrier.wait()
        return parts


@dataclass(frozen=True, slots=True)
class Thread(TensorParallel):
    """A rank in a thread."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self.group.gather(self.rank, x)).sum(0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.group.gather(self.rank, x), dim=-1)


class Watched(PeerExchange):
    """It logs, and what the others are to send is nobody's to read until it has arrived."""

    log: Log

    def begin(self) -> None:
        super().begin()
        for peer in self.others:  # none of them shares before we have sent
            self.stream[self.parts(self.rows)[peer]] = float("nan")
            self.factors[self.parts(self.rows)[peer]] = float("nan")

    def takes(self, x: torch.Tensor) -> bool:
        self.rows = len(x)
        return super().takes(x)

    def send(self, peer: int, rows: int) -> None:
        super().send(peer, rows)
        self.log.append(("send", peer, rows))

    def collect(self, own: slice, eps: float) -> None:
        super().collect(own, eps)
        self.log.append(("collect", own.stop - own.start))

    def share(self, own: slice) -> None:
        super().share(own)
        self.log.append(("share", own.stop - own.start))

    def arrive(self, peer: int) -> None:
        super().arrive(peer)
        self.log.append(("arrive", peer))


class World:
    """A model in ranks, and what they call."""

    def __init__(
        self,
        folder: Path,
        ranks: int = 2,
        backend: type[AttentionBackend] = TorchBackend,
        change: Callable[[Rank], Any] = lambda rank: None,
    ) -> None:
        room, config = Room(ranks), read_model_config(folder)
        size = PeerExchange.nbytes(ranks, 16, config.hidden_size, torch.float32)
        memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)]
        self.ranks = [Rank(folder, Thread(rank, ranks, room), memory, backend) for rank in range(ranks)]
        for rank in self.ranks:
            change(rank)

    def step(self, within: Callable[[], AbstractContextManager[None]] = nullcontext) -> torch.Tensor:
        """Logits behind the prompt (1, vocab), then behind a token more; the same on all ranks."""

        def one(rank: Rank) -> torch.Tensor:
            with within():
                return rank.step()

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            said = list(pool.map(one, self.ranks))
        assert all(torch.equal(logits, said[0]) for logits in said)
        return said[0]


class Rank:
    def __init__(
        self, folder: Path, tp: TensorParallel, memory: list[torch.Tensor], backend: type[AttentionBackend]
    ) -> None:
        config, self.log = read_model_config(folder), []  # type: Any, Log
        exchange = Watched(tp.rank, memory, 16, config.hidden_size, torch.float32)
        exchange.log = self.log
        tp = Thread(tp.rank, tp.size, tp.group, exchange=exchange if tp.size > 1 else None)
        self.model: Any = build_model(
            Qwen3ForCausalLM, config, tp, "cpu", torch.float32, iterate_safetensors(folder), 256
        )
        self.layers = list(self.model.model.layers)
        self.backend = backend(attention_spec(config, tp=tp))
        for layer in self.layers:
            if type(layer.mlp) is GatedMLP:
                layer.mlp.activation = self.logged("up", layer.mlp.activation)

    def logged(self, name: str, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def logging(x: torch.Tensor, *args: Any) -> torch.Tensor:
            self.log.append((name, len(x)))
            return call(x, *args)

        return logging

    def step(self) -> torch.Tensor:
        self.log.clear()
        run = PagedRun(self.model, self.backend, 16, 1)
        logits = run.step([0], [PROMPT], 0)
        return torch.cat([logits, run.step([0], [[5]], 1)])

    def quiet(self) -> None:
        """Log no activation: a product that waits stands only for the usual one."""
        for layer in self.layers:
            layer.mlp.activation = norm_gate_up

    def exchanged(self) -> bool:
        return any(call[0] != "up" for call in self.log)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minivllm.kernels.collectives.exchange.MIN_PART", 1)
    monkeypatch.setattr("minivllm.kernels.collectives.exchange.MIN_PART_CAPTURED", 1)
    monkeypatch.setattr("minivllm.kernels.collectives.exchange._TILE", 1)


@pytest.fixture
def folder(tiny_checkpoint: Checkpoints) -> Path:
    return tiny_checkpoint("qwen3", num_hidden_layers=3, head_dim=64)


@pytest.fixture
def expected(folder: Path) -> torch.Tensor:
    world = World(folder)
    logits = world.step()
    assert not any(rank.exchanged() for rank in world.ranks)
    return logits


def test_a_product_begins_with_its_ranks_own_rows_and_ends_with_them(
    folder: Path, expected: torch.Tensor, small_parts: None
) -> None:
    world = World(folder)
    torch.testing.assert_close(world.step(), expected)
    first, second = (rank.log for rank in world.ranks)
    for log, mine, theirs, peer in ((first, 5, 4, 1), (second, 4, 5, 0)):
        add = [("send", peer, theirs), ("collect", mine), ("share", mine)]
        up = [("up", mine), ("arrive", peer), ("up", theirs)]
        layer = [*add, *up, *add]
        last = [("arrive", peer), ("up", 1)]  # whole, and of the last token alone behind its attention
        decode = [("up", 1)] * 3
        assert log == [*layer, ("arrive", peer), *layer, *last, *decode]


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_any_step_begins_with_the_same_number(
    tiny_checkpoint: Checkpoints, small_parts: None, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """As a graph does, whatever ran before it."""
    told: list[tuple[int, int]] = []
    begin = PeerExchange.begin

    def noted(exchange: PeerExchange) -> None:
        begin(exchange)
        told.append((exchange.rank, exchange.arrival(1).number))

    monkeypatch.setattr(PeerExchange, "begin", noted)
    world = World(tiny_checkpoint("qwen3", num_hidden_layers=layers))
    for within in (nullcontext, rehearsal, nullcontext):
        told.clear()
        world.step(within)
        for rank in (0, 1):
            assert [number for its, number in told if its == rank] == [1, 2] * (layers - 1)


def test_captured_steps_exchange_smaller_parts(
    folder: Path, expected: torch.Tensor, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minivllm.kernels.collectives.exchange.MIN_PART", 1000)
    world = World(folder)
    torch.testing.assert_close(world.step(), expected)
    assert not any(rank.exchanged() for rank in world.ranks)
    torch.testing.assert_close(world.step(within=rehearsal), expected)
    assert all(rank.exchanged() for rank in world.ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_says_the_same(tiny_checkpoint: Checkpoints, small_parts: None, ranks: int) -> None:
    folder = tiny_checkpoint("qwen3", num_hidden_layers=2)
    world = World(folder, ranks)
    one = World(folder, 1).step()
    for _ in range(3):  # more calls than one: what stands in the memory is the last one's
        torch.testing.assert_close(world.step(), one)
    assert all(rank.exchanged() for rank in world.ranks)


class Fresh(TorchBackend):
    """Prefills from keys and values at hand: they must be those in the cache."""

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self.fresh_prompts = batch.whole_prompts

    def prefill_fresh(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, out: torch.Tensor) -> None:
        assert self.batch is not None
        for given, cache in zip((k, v), self.kv_cache[layer.index], strict=True):
            assert torch.equal(given, cache.flatten(0, 1)[self.batch.slot_mapping])
        self.prefill(q, layer, out)


def different(rank: Rank) -> None:
    """Norms of another eps each, folded into their products, and rows so small that it tells."""
    rank.model.model.embed_tokens.weight.data *= 1e-2
    for i, layer in enumerate(rank.layers):
        for norm, product, eps in (
            (layer.input_layernorm, layer.self_attn.qkv_proj, 1e-3 * 4**i),
            (layer.post_attention_layernorm, layer.mlp.gate_up_proj, 2e-3 * 4**i),
        ):
            norm.eps = eps
            product.fold(norm)


class Waiting:
    """In the place of products that wait by themselves: they read a part when it has arrived, and no earlier."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gate_up: bool = True, qkv: bool = True) -> None:
        self.calls: list[tuple[str, int, int]] = []  # rank, rows
        for module, kinds in (("attention", {"head_dim"} if qkv else set()), ("mlp", {"gated"} if gate_up else set())):
            wanted = {*kinds, "parts"} if kinds else None
            monkeypatch.setattr(
                f"minivllm.layers.{module}.use_persistent",
                lambda *shape, wanted=wanted, **kind: wanted == {name for name in kind if kind[name]},
            )
        monkeypatch.setattr("minivllm.layers.attention.persistent_qkv", self.qkv)
        monkeypatch.setattr("minivllm.layers.mlp.persistent_gate_up", self.gate_up)

    def product(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor | None, arrival: Arrival
    ) -> torch.Tensor:
        assert factors is not None and len(factors) == len(x)
        out, ranks = x.new_full((len(x), len(weight)), float("nan")), len(arrival.arrived)
        self.calls.append((name, arrival.rank, len(x)))
        for rank in (*range(arrival.rank, ranks), *range(arrival.rank)):
            rows = slice(rank * arrival.part_rows, (rank + 1) * arrival.part_rows)
            if not len(x[rows]):
                continue
            while rank != arrival.rank and int(arrival.arrived[rank]) != arrival.number:
                time.sleep(0)
            out[rows] = F.linear(x[rows], weight) * factors[rows, None]
        assert not out.isnan().any()
        return out

    def gate_up(
        self, x: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor | None, *, arrival: Arrival
    ) -> torch.Tensor:
        gate, up = self.product("gate_up", x, weight, factors, arrival).chunk(2, -1)
        return F.silu(gate) * up

    def qkv(
        self, x: torch.Tensor, weight: torch.Tensor, heads: Heads, factors: torch.Tensor | None, *, keep: bool,
        arrival: Arrival,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        qkv = self.product("qkv", x, weight, factors, arrival)
        q = qk_norm_rope_store(qkv, *heads, None, True)
        sizes = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        _, k, v = qkv.view(len(x), -1, heads.head_dim).split(sizes, 1)
        return (q, k, v) if keep else (q, None, None)


@pytest.mark.parametrize("which", [{}, {"gate_up": False}, {"qkv": False}], ids=["both", "qkv", "gate_up"])
@pytest.mark.parametrize("backend", [TorchBackend, Fresh])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_product_that_waits_by_itself_is_handed_all_rows_at_once(
    tiny_checkpoint: Checkpoints, small_parts: None, backend: type[AttentionBackend], ranks: int,
    which: dict[str, bool], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of four ranks the last has no rows: nobody waits for it but the stream."""
    folder = tiny_checkpoint("qwen3", num_hidden_layers=3, head_dim=64)
    one = World(folder, 1, backend, different).step()
    unlike = World(folder, 1, backend).step()
    assert not torch.allclose(one, unlike, rtol=1e-2)
    world = World(folder, ranks, backend, lambda rank: (different(rank), rank.quiet()))
    waiting = Waiting(monkeypatch, **which)
    for _ in range(3):
        torch.testing.assert_close(world.step(), one, rtol=1e-4, atol=1e-5)
        calls = [("gate_up", rank, 9) for rank in range(ranks)] * 2 if which.get("gate_up", True) else []
        calls += [("qkv", rank, 9) for rank in range(ranks)] if which.get("qkv", True) else []
        assert sorted(waiting.calls) == sorted(calls)
        waiting.calls.clear()
        if ranks == 2:  # of four sums, the last of which is read whole
            arrivals = [[call for call in rank.log if call[0] == "arrive"] for rank in world.ranks]
            assert arrivals == [[("arrive", peer)] * (4 - len(calls) // 2) for peer in (1, 0)]


def test_a_product_that_is_not_folded_or_of_another_activation_goes_part_by_part(
    folder: Path, expected: torch.Tensor, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(monkeypatch)
    torch.testing.assert_close(World(folder, change=Rank.quiet).step(), expected)
    world = World(folder, change=different)  # its activations are logged
    torch.testing.assert_close(world.step(), World(folder, 1, change=different).step(), rtol=1e-4, atol=1e-5)
    assert sorted(waiting.calls) == [("qkv", 0, 9), ("qkv", 1, 9)]


class OwnLayer(Qwen3Layer):
    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        assert not x.isnan().any()
        x = self.self_attn(x, self.input_layernorm, positions, attention)
        assert not x.isnan().any()
        x = self.mlp(x, self.post_attention_layernorm)
        assert not x.isnan().any()
        return x


class OwnMLP(GatedMLP):
    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        assert not x.isnan().any()
        return super().forward(x, norm)


class OwnSum(RowParallelLinear):
    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert not residual.isnan().any()
        return super().add_to(residual, x)


class Other(nn.Module):
    """A sum that has nothing of ours but ``add_to``."""

    def __init__(self, product: RowParallelLinear) -> None:
        super().__init__()
        self.product = product

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert not residual.isnan().any()
        return self.product.add_to(residual, x)


class OwnProjection(QKVParallelLinear):
    pass


class OwnAttention(Attention):
    def of_stream(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        assert not x.isnan().any()
        return super().of_stream(x, *args)


def looks_on(module: Any, args: tuple[Any, ...], out: Any = None) -> None:
    assert not args[0].isnan().any()
    assert out is None or not out.isnan().any()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a layer": lambda layer: setattr(layer, "__class__", OwnLayer),
    "an MLP": lambda layer: setattr(layer.mlp, "__class__", OwnMLP),
    "a sum": lambda layer: setattr(layer.mlp.down_proj, "__class__", OwnSum),
    "a module for a sum": lambda layer: setattr(layer.self_attn, "o_proj", Other(layer.self_attn.o_proj)),
    "a projection": lambda layer: setattr(layer.self_attn.qkv_proj, "__class__", OwnProjection),
    "an attention": lambda layer: setattr(layer.self_attn.attention, "__class__", OwnAttention),
    "a forward put in place": lambda layer: setattr(layer.mlp, "forward", partial(GatedMLP.forward, layer.mlp)),
    "a hook": lambda layer: layer.self_attn.register_forward_hook(looks_on),
    "a hook in front": lambda layer: layer.mlp.register_forward_pre_hook(looks_on),
}  # fmt: skip


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_ones_own_finds_every_row_summed(
    folder: Path, expected: torch.Tensor, small_parts: None, change: str, place: int
) -> None:
    world = World(folder, change=lambda rank: CHANGES[change](rank.layers[place]))
    torch.testing.assert_close(world.step(), expected)
    assert not any(rank.exchanged() for rank in world.ranks)


def test_one_layer_and_a_last_one_that_picks_nothing(
    tiny_checkpoint: Checkpoints, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint("qwen3", num_hidden_layers=1)
    world = World(folder)
    torch.testing.assert_close(world.step(), World(folder, 1).step())
    assert not any(rank.exchanged() for rank in world.ranks)
    monkeypatch.setattr(Qwen3Layer, "pick_last_tokens", lambda layer: None)
    folder = tiny_checkpoint("qwen3", num_hidden_layers=2)
    world = World(folder)
    torch.testing.assert_close(world.step(), World(folder, 1).step())
    assert all(rank.exchanged() for rank in world.ranks)


# --------------------------------------------------------------------------- the exchange by itself


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_an_exchange_sums_in_the_order_of_the_ranks(ranks: int) -> None:
    rows, width = 700, 24
    size = PeerExchange.nbytes(ranks, rows, width, torch.bfloat16)
    memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)]
    ends = [PeerExchange(rank, memory, rows, width, torch.bfloat16) for rank in range(ranks)]
    torch.manual_seed(0)
    for t in (700, 1, 129, 513, 700):
        xs = [torch.randn(t, width).bfloat16() for _ in range(ranks)]
        with ThreadPoolExecutor(ranks) as pool:
            sums = list(pool.map(lambda end, x: end.all_reduce(x, 0.25).clone(), ends, xs))
        for end, total in zip(ends, sums, strict=True):
            assert torch.equal(total, sums[0])
            assert torch.equal(end.factors[:t], row_factors_reference(total, 0.25))
        added = xs[0].clone()
        owners = torch.cat([torch.full((part.stop - part.start,), i) for i, part in enumerate(ends[0].parts(t))])
        added[:] = torch.stack([in_order(rank, xs) for rank in range(ranks)])[owners, torch.arange(t)]
        assert torch.equal(sums[0], added)
        torch.testing.assert_close(sums[0].float(), sum(x.float() for x in xs), rtol=2e-2, atol=2e-2)
    sizes = {2: [512, 188], 3: [256, 256, 188], 4: [256, 256, 188, 0]}
    assert [part.stop - part.start for part in ends[0].parts(700)] == sizes[ranks]


def in_order(rank: int, xs: list[torch.Tensor]) -> torch.Tensor:
    """Own rows first, then the others' in their order, rounded each time."""
    total = xs[rank].clone()
    for other, x in enumerate(xs):
        total += x if other != rank else 0
    return total


@pytest.mark.parametrize(("ranks", "rows", "width"), [(2, 700, 24), (3, 1001, 7), (4, 257, 1)])
def test_arrays_that_others_write_to_start_at_lines_and_do_not_overlap(ranks: int, rows: int, width: int) -> None:
    memory = [torch.zeros(PeerExchange.nbytes(ranks, rows, width, torch.bfloat16), dtype=torch.uint8)] * ranks
    end = PeerExchange(1, memory, rows, width, torch.bfloat16)
    arrived = end.arrival(rows).arrived
    arrays = (end.stream, end.factors, end.inbox, arrived)
    assert [tuple(array.shape) for array in arrays] == [
        (rows, width), (rows,), (ranks - 1, end.arrival(rows).part_rows, width), (ranks,)
    ]  # fmt: skip
    starts = [array.data_ptr() - memory[0].data_ptr() for array in arrays]
    starts[3] -= ranks * 4  # its second row
    ends = [start + array.numel() * array.itemsize for start, array in zip(starts, arrays, strict=True)]
    assert not any(start % 128 for start in starts)
    assert all(stop <= start for stop, start in zip(ends, starts[1:], strict=False))
    assert ends[3] + ranks * 4 <= len(memory[0])


def test_which_steps_an_exchange_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    size = PeerExchange.nbytes(2, 8192, 8, torch.bfloat16)
    end = PeerExchange(0, [torch.zeros(size, dtype=torch.uint8)] * 2, 8192, 8, torch.bfloat16)
    assert end.takes(torch.zeros(2048, 8, dtype=torch.bfloat16)) and end.takes(torch.zeros(8192, 8).bfloat16())
    assert not end.takes(torch.zeros(2047, 8).bfloat16()) and not end.takes(torch.zeros(8193, 8).bfloat16())
    assert not end.takes(torch.zeros(4096, 8))
    size = PeerExchange.nbytes(4, 16384, 8, torch.bfloat16)
    of_four = PeerExchange(0, [torch.zeros(size, dtype=torch.uint8)] * 4, 16384, 8, torch.bfloat16)
    assert of_four.takes(torch.zeros(4096, 8).bfloat16()) and not of_four.takes(torch.zeros(4095, 8).bfloat16())
    with rehearsal():
        assert end.takes(torch.zeros(1024, 8).bfloat16()) and not end.takes(torch.zeros(1023, 8).bfloat16())
        assert of_four.takes(torch.zeros(2048, 8).bfloat16()) and not of_four.takes(torch.zeros(2047, 8).bfloat16())
    monkeypatch.setattr("minivllm.kernels.collectives.exchange.compiling", lambda: True)
    assert not end.takes(torch.zeros(4096, 8).bfloat16())
