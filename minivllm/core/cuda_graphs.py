"""Decode steps as CUDA graphs, one per batch size: from gathering the input tokens to writing back the sampled ones.

Static buffers, shared by all sizes (which use their first rows), owned by DecodeGraphs:
# slots, input_ids, positions, after (positions + 1), slot_mapping (max,) int64
# seq_lens (max,) int32
# block_tables (max, max_blocks) int32
Rows past the batch hold the padding slot: its table row is all zeros, so they use block 0, which is never allocated.
How a step's tokens get to the host: ``core/landing.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from minivllm.core.adapter_rows import in_order
from minivllm.core.batch import AttentionBatch, Batch, Cascade, captured_batch
from minivllm.core.cascade import ITEM
from minivllm.core.landing import Landing, Packed
from minivllm.errors import MinivllmError
from minivllm.kernels.capture import loading
from minivllm.kernels.decode_inputs import decode_inputs
from minivllm.kernels.megakernel.megakernel import MAX_MEGAKERNEL_ROWS
from minivllm.rounding import round_up

if TYPE_CHECKING:
    from minivllm.core.cascade import CascadePlan
    from minivllm.core.interfaces import AttentionBackend, StepHandle
    from minivllm.core.model_runner import ModelRunner

Result = TypeVar("Result")
_NOTHING = (0, b"", b"")  # size, slots, their adapters
_KEEPS_LOGITS = 32  # rows, at most: for 152,000 tokens in bfloat16 10 MB, 26 MB with all smaller sizes
_TOLERANCE = 2e-2  # relative difference of hidden states between a replay and the eager step; bf16 noise is near 1e-3
_ALIKE = 0.25  # same, between two sizes whose kernels sum in different orders; wrong states differ by 1 or more
_ALIKE_IN_FLOAT8 = 0.6  # where weights are in float8, which rounds what is summed: up to 0.4 behind 40 layers
_KINDS = (1, 2, 4, 8, 16, 24, 40, 72, 136, 272)  # rows: sizes known to use different kernels


def graph_sizes(most: int) -> list[int]:
    """1, 2, 4, multiples of 8, from 256 on of 16, up to the first that is at least ``most``."""
    top = round_up(most, 8 if most <= 256 else 16)
    few = [n for n in (1, 2, 4) if n < most or n == 1]
    return [*few, *range(8, min(top, 256) + 1, 8), *range(272, top + 1, 16)]


def cascade_sizes(sizes: list[int]) -> list[int]:
    """The sizes to capture with cascade attention: only a few of ``sizes``, because they are captured while requests
    wait and padding rows cost little. Sizes that run all layers in one kernel are left out: that kernel has no cascade
    attention."""
    return [n for n in sizes if n > MAX_MEGAKERNEL_ROWS and (n in (16, 32, sizes[-1]) or n % 64 == 0)]


def adapter_sizes(sizes: list[int]) -> list[int]:
    """The sizes to capture with LoRA adapters as well: a few of ``sizes``, as each takes time and memory."""
    return [n for n in sizes if n in (1, 2, 4, 8, 16, 32) or n % 64 == 0 or n == sizes[-1]]


_capturing = Lock()  # engines in different threads capture one at a time


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all graphs: for each further one cuBLAS would keep 32 MiB forever."""
    return torch.cuda.Stream(device)


def capture_graph(run: Callable[[], Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture ``run``; returns the graph and the tensors that hold its result after a replay. It must have run in this
    shape before, so that everything it needs is loaded. Unlike ``torch.cuda.graph`` this keeps torch's memory cache and
    does not wait for the device, so dozens can be captured in a second."""
    graph = torch.cuda.CUDAGraph()
    with _capturing, torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = run()
        finally:
            graph.capture_end()
    return graph, result


def difference(expected: torch.Tensor, replayed: torch.Tensor) -> torch.Tensor:
    """The relative difference of a replay's hidden states to the eager step's: a scalar on the device."""
    expected = expected.float()
    return (expected - replayed.float()).norm() / expected.norm().clamp_min(1e-6)


def random_values(shape: Sequence[int], cache: torch.Tensor) -> torch.Tensor:
    """Random keys and values for a cache, which may be of float8."""
    dtype = cache.dtype if cache.dtype.itemsize > 1 else torch.bfloat16
    return torch.randn(shape, dtype=dtype, device=cache.device).to(cache.dtype)


def check_differences(differences: dict[str, torch.Tensor], attention: AttentionBackend) -> None:
    """Raise MinivllmError if a difference is too large; keys name what was captured. Waits for the device."""
    for what, error in zip(differences, torch.stack(list(differences.values())).tolist(), strict=True):
        if not error < _TOLERANCE:
            raise MinivllmError(
                f"the CUDA graph of {what} with attention={type(attention).__name__} differs from the eager step by "
                f"{error:.3g} (allowed: {_TOLERANCE}); run with enforce_eager=true and report it"
            )


class Key(NamedTuple):
    """What tells graphs apart."""

    rows: int
    beside: bool | None = None  # ``Cascade.beside`` of a step with cascade attention
    adapted: bool = False  # whether rows may have LoRA adapters


class Kept(NamedTuple):
    """What a step keeps for ``Sampler.refine``."""

    hidden: torch.Tensor  # (rows, hidden_size)
    tokens: torch.Tensor  # (rows,) int64
    logits: torch.Tensor | None  # (rows, vocab), only for few rows, to save memory


class DecodeGraphs:
    """Captures and replays decode steps for one runner."""

    def __init__(self, runner: ModelRunner, most: int) -> None:
        """``most``: sequences in the largest step; ``graph_sizes`` rounds it up."""
        self.runner = runner
        self.sizes = graph_sizes(most)
        top, device = self.sizes[-1], runner.device
        self.padding = runner.num_slots
        self.size_for = np.searchsorted(self.sizes, np.arange(top + 1))
        self.slots = torch.full((top,), self.padding, dtype=torch.int64, device=device)
        self.input_ids, self.positions, self.after, self.slot_mapping = torch.zeros(
            (4, top), dtype=torch.int64, device=device
        )
        self.seq_lens = torch.ones(top, dtype=torch.int32, device=device)
        self.query_start = torch.arange(top + 1, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((top, runner.block_table.shape[1]), dtype=torch.int32, device=device)
        self.landing = Landing(top, device)
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._kept: dict[Key, Kept] = {}
        self._refinements: dict[tuple[Key, Hashable], tuple[torch.cuda.CUDAGraph, Packed]] = {}
        self.pool: Any = None
        self._cascade: torch.Tensor | None = None  # int32: ``CascadePlan.padded`` on the device
        self._cascade_sizes: list[int] = []
        self._cascade_on_device: tuple[CascadePlan, int] | None = None
        self._adapter_order = torch.zeros(2 * top, dtype=torch.int32, device=device)
        keys = [Key(size) for size in self.sizes]
        if runner.cascade is not None:
            items = runner.cascade.limits.items
            self._cascade = torch.zeros(4 * top + ITEM * items, dtype=torch.int32, device=device)
            self._cascade_sizes = cascade_sizes(self.sizes)
            keys += [Key(n, beside) for beside in (True, False) for n in self._cascade_sizes]
        self._adapter_sizes = [] if runner.adapters is None else adapter_sizes(self.sizes)
        keys += [Key(n, adapted=True) for n in self._adapter_sizes]
        self._plans = {key: self._plan(key) for key in keys}
        self._on_device = _NOTHING  # what ``slots`` holds
        self._ones, self._nobody = np.ones(top, dtype=np.int32), np.full(top, self.padding, dtype=np.int32)

    # ------------------------------------------------------------------ capture

    @torch.inference_mode()
    def launch_all_kinds(self) -> None:
        """Launch steps of all sizes that use different kernels, for ``compile_only``; fewest rows first, as their
        kernels take longest to compile."""
        wanted = {*map(Key, self._kinds()), *(Key(n, adapted=True) for n in self._adapter_sizes)}
        wanted |= {Key(n, beside=True) for n in (16, 32, self.sizes[-1])}
        for key, plan in self._plans.items():
            if key in wanted:
                self._prepare(plan, self._ones[: key.rows], self._nobody[: key.rows])
                self._run(key)

    def capture(self, num_blocks: int, vocab_size: int) -> None:
        """Capture every size, largest first so that smaller ones reuse its memory, and verify it."""
        self.pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._adapter_sizes):
            self._load_and_capture(Key(size, adapted=True))
        self._compare(num_blocks, vocab_size, self._kinds(), lambda size: self._capture(Key(size)))

    @torch.inference_mode()
    def _load_and_capture(self, key: Key) -> None:
        """Capture what no step before has loaded the kernels of."""
        self._prepare(self._plans[key], self._ones[: key.rows], self._nobody[: key.rows])
        with loading():
            self._run(key)
        self._capture(key)

    def _kinds(self) -> list[int]:
        return [size for size in self.sizes if size in _KINDS or size == self.sizes[-1]]

    def _capture(self, key: Key) -> None:
        self._prepare(self._plans[key], self._ones[: key.rows], self._nobody[: key.rows])
        self._graphs[key], self._kept[key] = capture_graph(partial(self._run, key), self.pool)

    def _plan(self, key: Key) -> AttentionBatch:
        size, beside, _ = key
        return captured_batch(
            size, self.query_start[: size + 1], self.seq_lens[:size], self.block_tables[:size],
            self.slot_mapping[:size],
            cascade=None if beside is None else Cascade.of(self._numbers(size), size, beside),
        )  # fmt: skip

    def _numbers(self, size: int) -> torch.Tensor:
        """The part of ``_cascade`` that steps of ``size`` rows use."""
        assert self._cascade is not None
        return self._cascade[: len(self._cascade) - 4 * (self.sizes[-1] - size)]

    def _run(self, key: Key) -> Kept:
        """What is captured."""
        with self.runner.with_adapters(self._adapter_order[: 2 * key.rows] if key.adapted else None):
            return self._step(key.rows)

    def _step(self, size: int) -> Kept:
        run, slots = self.runner, self.slots[:size]
        decode_inputs(
            slots, run.last_token, run.num_computed, run.block_table, self.input_ids[:size], self.positions[:size],
            self.seq_lens[:size], self.slot_mapping[:size], self.block_tables[:size], run.block_size, self.after[:size],
        )  # fmt: skip
        hidden = run.model.forward(self.input_ids[:size], self.positions[:size], run.attention)
        tokens, logits = run.sample(hidden, slots, self.after[:size])
        self.landing.finish(tokens, slots, self.positions[:size], run.last_token, run.num_computed, self.padding)
        return Kept(hidden, tokens, logits if size <= _KEEPS_LOGITS else None)

    def _prepare(self, plan: AttentionBatch, host_seq_lens: np.ndarray, slots: np.ndarray) -> None:
        plan.host_seq_lens = host_seq_lens
        self.runner.hand_over(plan, slots)

    # ------------------------------------------------------------------ replay

    def takes(self, batch: Batch) -> bool:
        """Whether the decodes of ``batch`` are few enough."""
        return batch.num_decodes <= self.sizes[-1]

    def launch(self, batch: Batch) -> StepHandle:
        run, n = self.runner, len(batch.slots)
        adapted = run.has_adapters(batch)
        cascade = None if run.cascade is None or adapted else run.cascade.plan(batch)
        key = self._key_for(n, cascade, adapted)
        size = key.rows
        self._update(batch, key, None if key.beside is None else cascade)
        captured = key in self._graphs
        if run.attention.plans_on_host or not captured:
            seq_lens = np.ones(size, dtype=np.int32)
            seq_lens[:n] = batch.num_computed + 1
            self._prepare(self._plans[key], seq_lens, self._padded(batch.slots, size))
        kept = self._replay(key) if captured else self._run_and_capture(key)
        if run.needs_refine(batch.slots, size):
            return run.sample_when_guided(batch, partial(self._land_refined, key, kept, batch.slots))
        return self.landing.step(n, run.done())

    def hidden(self, size: int) -> torch.Tensor:
        """(size, hidden_size): the hidden states that the captured step of this size last sampled from."""
        return self._kept[Key(size)].hidden

    def _key_for(self, rows: int, cascade: CascadePlan | None, adapted: bool) -> Key:
        if adapted:
            return Key(next(size for size in self._adapter_sizes if size >= rows), adapted=True)
        if cascade is not None:
            for size in self._cascade_sizes:
                if size >= rows:
                    return Key(size, cascade.beside)
        return Key(self.sizes[self.size_for[rows]])

    def _land_refined(self, key: Key, kept: Kept, host_slots: np.ndarray) -> StepHandle:
        n = len(host_slots)
        return self.runner.land(n, np.arange(n), self._refined(key, kept, host_slots))

    def _refined(self, key: Key, kept: Kept, host_slots: np.ndarray) -> Packed:
        """Run the sampler's ``refine`` for the step just replayed; captured the first time a size needs it, if the
        sampler allows it."""
        run = self.runner
        kind = run.sampler.refinement(host_slots) if run.captures_refine else None
        if kind is None:
            return self._refine(kept, len(host_slots), None, host_slots)
        if (key, kind) in self._refinements:
            graph, packed = self._refinements[key, kind]
            graph.replay()
            return packed
        refine = partial(self._refine, kept, key.rows, kind, host_slots)
        packed = refine()
        self._refinements[key, kind] = capture_graph(refine, self.pool)
        return packed

    def _refine(self, kept: Kept, rows: int, kind: Hashable | None, host_slots: np.ndarray) -> Packed:
        """What is captured if there is a ``kind``."""
        run, slots, positions, given = self.runner, self.slots[:rows], self.after[:rows], kept.tokens[:rows]
        logits = run.model.compute_logits(kept.hidden[:rows]) if kept.logits is None else kept.logits[:rows]
        tokens, logprobs = run.refine(logits, slots, positions, given, host_slots, kind)
        if tokens is not given:
            run.last_token[slots] = tokens
        return Packed.of(tokens, logprobs)

    def _replay(self, key: Key) -> Kept:
        self.landing.replay(self._graphs[key])
        return self._kept[key]

    def _run_and_capture(self, key: Key) -> Kept:
        """Run the first step of a rarely needed kind eagerly, then capture it for later steps."""
        first = self._run(key)
        self.landing.replays += 1
        self._capture(key)
        for kept, its in zip(self._kept[key], first, strict=True):
            if kept is not None and its is not None:
                kept.copy_(its)
        return self._kept[key]

    def _padded(self, slots: np.ndarray, size: int) -> np.ndarray:
        padded = np.full(size, self.padding, dtype=np.int32)
        padded[: len(slots)] = slots
        return padded

    def _update(self, batch: Batch, key: Key, cascade: CascadePlan | None) -> None:
        """Copy what changed since the last replay to the device, in one copy; none if nothing changed."""
        run, size = self.runner, key.rows
        adapters = run.adapter_of[batch.slots].tobytes() if key.adapted else b""
        wanted = size, batch.slots.tobytes(), adapters
        slots = numbers = order = batch.slots[:0]
        if wanted != self._on_device:
            slots = self._padded(batch.slots, size)
            order = in_order(run.adapter_of[slots]) if key.adapted else order
        if cascade is not None and self._cascade_on_device != (cascade, size):
            assert run.cascade is not None
            numbers = cascade.padded(size, run.cascade.limits.items)
        if not len(slots) and not len(batch.block_slots) and not len(numbers):
            return
        places, blocks, slots_, numbers_, order_ = run.staging.send(*run.table_entries(batch), slots, numbers, order)
        run.write_table(places, blocks)
        if len(slots):
            self.slots[:size] = slots_
            self._adapter_order[: len(order)] = order_
            self._on_device = wanted
        if cascade is not None and len(numbers):
            self._numbers(size).copy_(numbers_)
            self._cascade_on_device = cascade, size

    # ------------------------------------------------------------------ proving

    def verify(self, num_blocks: int, vocab_size: int) -> None:
        """Replay each size once on random state and compare with the same step run eagerly. Leaves the cache empty.

        Raises:
            MinivllmError: they differ; the message names backend and size.
        """
        self._compare(num_blocks, vocab_size, self.sizes, lambda size: None)

    @torch.inference_mode()
    def _compare(
        self, num_blocks: int, vocab_size: int, eagerly: Collection[int], capture: Callable[[int], None]
    ) -> None:
        """``verify``, calling ``capture`` for each size after a step has loaded what the size needs. All are captured
        before the replays. Sizes in ``eagerly`` are compared with an eager step of their own, others with that of the
        next larger size in it, whose rows include the same sequences; if one differs too much, with a step of its own.
        """
        run, rng, top = self.runner, np.random.default_rng(0), self.sizes[-1]
        rows = min(top, run.num_slots, num_blocks)  # each with its own blocks; further rows are padding
        per_slot = min(num_blocks // rows, run.block_table.shape[1], 4)
        blocks = 1 + np.arange(rows * per_slot, dtype=np.int32).reshape(rows, per_slot)
        longest = (run.block_table.shape[1] - 1) * run.block_size + 1  # max_model_len may be as small as this
        room = min(per_slot * run.block_size, longest)
        lengths = rng.integers(0, room, rows).astype(np.int32)
        used = torch.from_numpy(np.unique(blocks)).to(run.device)
        cache = run.attention.kv_cache
        for layer in range(cache.shape[0]):
            cache[layer][:, used.long()] = random_values((2, len(used), *cache.shape[3:]), cache)
        run.host_tables[:rows, :per_slot] = blocks
        run.block_table[:rows, :per_slot] = torch.from_numpy(blocks).to(run.device)
        first = torch.from_numpy(rng.integers(0, vocab_size, rows)).to(run.device)
        computed = torch.from_numpy(lengths).long().to(run.device)
        slots, seq_lens = np.full(top, self.padding, dtype=np.int32), np.ones(top, dtype=np.int32)
        slots[:rows], seq_lens[:rows] = np.arange(rows), lengths + 1
        self.slots.copy_(torch.from_numpy(slots))

        def hidden(size: int, step: Callable[[int], Kept]) -> torch.Tensor:
            run.last_token[:rows], run.num_computed[:rows] = first, computed
            self._prepare(self._plans[Key(size)], seq_lens[:size], slots[:size])
            return step(size).hidden[:rows]

        eager: dict[int, torch.Tensor] = {}

        def differences() -> dict[int, torch.Tensor]:
            found = {}
            self.landing.forget()  # eager steps count too, unless only compiled; none follow from here on
            for size in self.sizes:
                replayed = hidden(size, lambda n: self._replay(Key(n)))
                expected = eager[next(n for n in self.sizes if n >= size and n in eager)]
                found[size] = difference(expected[: len(replayed)], replayed)
            return found

        for size in reversed(self.sizes):
            if size in eagerly:
                eager[size] = hidden(size, self._step).clone()
            else:
                with loading():
                    hidden(size, self._step)
            capture(size)
        found = differences()
        if self._doubtful([found[size] for size in self.sizes if size not in eager]):
            eager |= {size: hidden(size, self._step).clone() for size in self.sizes if size not in eager}
            found = differences()
        check_differences({f"{size} rows": found[size] for size in sorted(eager)}, run.attention)
        self._check_landing(run.last_token[:rows].tolist())
        cache[:, :, used.long()] = 0
        run.host_tables[:] = 0
        run.block_table.zero_()
        run.last_token.zero_()
        run.num_computed.zero_()
        self.slots.fill_(self.padding)
        self._on_device = _NOTHING

    def _doubtful(self, differences: list[torch.Tensor]) -> bool:
        """Whether any of these differences between two sizes is too large on any rank. Waits for the device."""
        if not differences:
            return False
        parameters = self.runner.model.parameters()  # type: ignore[attr-defined]
        most = _ALIKE_IN_FLOAT8 if any(p.dtype.itemsize == 1 for p in parameters) else _ALIKE
        alike = bool((torch.stack(differences) < most).all())
        return not self.runner.tp.minimum(alike, self.runner.device)

    def _check_landing(self, tokens: list[int]) -> None:
        """Raise MinivllmError unless the last replay, which has completed, wrote its tokens to the host."""
        replays = self.landing.replays
        number, *landed = self.landing.last()[: 1 + len(tokens)].tolist()
        if (number, landed) != (replays, tokens):
            raise MinivllmError(
                f"the CUDA graph of {self.sizes[-1]} rows left tokens of replay {number} on the host, not those of "
                f"replay {replays}; run with enforce_eager=true and report it"
            )
