"""The seams: what a scheduler, block manager, attention backend, model, sampler and executor promise.

Everything that is swapped by name implements one of these. ``core`` knows no implementation by name but is handed
them. Only names that are typed here may be relied on from outside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from minivllm.core.batch import NO_INTS
from minivllm.core.model_config import FrozenDict

if TYPE_CHECKING:
    import torch

    from minivllm.config.engine_config import EngineConfig, SchedulerOptions
    from minivllm.core.batch import AttentionBatch, Batch, TokenMasks
    from minivllm.core.cascade import CascadeLimits
    from minivllm.core.model_config import ModelConfig
    from minivllm.core.parallel import TensorParallel
    from minivllm.core.sequence import FinishReason, Sequence
    from minivllm.kernels.rms_norm import RowScale
    from minivllm.kernels.sampling import Shard
    from minivllm.plugins.registry import Registry

# --------------------------------------------------------------------------- scheduling


@dataclass(frozen=True, slots=True)
class Committed:
    """What one step brought: ``slots[i]`` received ``token_ids[i]``; ``finished`` names the sequences that ended, each
    with its ``slot`` as it was.

    ``rows`` are the rows of the batch that the tokens came from (stale rows are left out), for logprobs.
    """

    rows: np.ndarray  # (m,) int64
    slots: np.ndarray  # (m,) int32
    token_ids: np.ndarray  # (m,) int32
    finished: list[tuple[Sequence, FinishReason]]


class Scheduler(ABC):
    """Decides what each step computes. Owns the slot arrays and, through the block manager, the cache's blocks."""

    uses_priority: ClassVar[bool] = False  # whether it heeds Sequence.priority; else a request may not name one
    scores_prompts: ClassVar[bool] = False  # whether it fills ``Batch.scored``; else prompt_logprobs are refused
    blocks: BlockManager
    sequences: list[Sequence | None]  # the running ones, by slot

    @abstractmethod
    def __init__(
        self, options: SchedulerOptions, blocks: BlockManager, max_model_len: int, sampler_row: np.dtype | None = None
    ) -> None:
        """``max_model_len``: tokens of prompt and completion that a sequence may have. ``sampler_row``: what
        ``Sampler.row`` is, of which ``Batch.admitted_params`` are. Raises ConfigError for options that cannot be."""

    @abstractmethod
    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises RequestError, naming the numbers, if it can never fit."""

    @abstractmethod
    def abort(self, request_id: str) -> Sequence | None:
        """End a sequence wherever it is (waiting, running or in flight) and free its blocks; None if unknown."""

    @abstractmethod
    def finish(self, seq: Sequence) -> None:
        """End a running or waiting sequence early (a stop string); a row of it in flight is dropped at commit."""

    @abstractmethod
    def schedule(self) -> Batch | None:
        """The next step, or None if nothing can run before a step in flight is committed."""

    @abstractmethod
    def commit(self, batch: Batch, token_ids: np.ndarray) -> Committed:
        """Take in the tokens that ``batch`` sampled: (n,) int32, one a row (rows that do not sample: any value)."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant (tests call it after each step). Raises AssertionError."""


class BlockManager(ABC):
    """Owns the pool of cache blocks and one block table a slot. Block 0 is never handed out: padding writes there."""

    tables: np.ndarray  # (num_slots, max_blocks) int32, the host's copy
    held: np.ndarray  # (num_slots,) int32: how many entries of each row are valid
    num_blocks: int  # blocks that can be handed out
    block_size: int

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Blocks that ``allocate`` and ``append`` could hand out now (evictable cached ones included)."""

    @abstractmethod
    def match(self, seq: Sequence) -> list[int]:
        """The cached blocks that hold the longest prefix of ``seq`` (whole blocks, never its last token); none if it
        ``scores_prompt``."""

    @abstractmethod
    def allocate(self, slot: int, num_tokens: int, cached: SequenceOf[int]) -> None:
        """Give an empty slot blocks for ``num_tokens``: first the shared ``cached`` ones, then fresh ones."""

    @abstractmethod
    def append(self, slots: np.ndarray) -> None:
        """Give each slot one more block. The caller has checked ``num_free``."""

    @abstractmethod
    def missing(self, num_tokens: int, cached: SequenceOf[int]) -> int:
        """How many more free blocks ``allocate`` would need for this; 0 or less: it can be done."""

    @abstractmethod
    def register(self, slot: int, seq: Sequence, tokens: np.ndarray, num_tokens: int) -> None:
        """Offer the slot's whole blocks among its first ``num_tokens`` tokens (computed, or about to be) for reuse."""

    @abstractmethod
    def take_updates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The table entries written since the last call: slots, indices, block ids, each (b,) int32."""

    @abstractmethod
    def free(self, slot: int) -> None:
        """Drop the slot's references; blocks that nobody else holds become free (cached ones: evictable)."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget all content; blocks in use stay valid for those who hold them."""

    @abstractmethod
    def check(self) -> None:
        """Each block is free, cached or referenced exactly as often as tables name it. Raises AssertionError."""


# --------------------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What an engine asks of an attention backend; ``unsupported`` judges it before anything is loaded."""

    device: str  # "cuda" or "cpu"
    dtype: str  # "float32", "bfloat16", "float16"
    num_heads: int  # of this rank
    num_kv_heads: int  # of this rank
    head_dim: int
    block_size: int
    num_layers: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    scale: float
    sliding_window: int | None = None  # tokens; None attends to all before
    needs_graphs: bool = False  # decode steps must be captured (enforce_eager=false)
    cascade: bool = False  # what decode rows share may be read once: ``cascade_limits`` are asked for
    options: FrozenDict = field(default_factory=FrozenDict)  # attention.options, those that this backend declares


class CudaGraphs:
    """Which steps of a backend may be captured: none, pure decode steps, or all."""

    NEVER = "never"
    DECODE = "decode"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; an empty tuple means any."""

    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    head_dims: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    block_size_multiple_of: int = 1
    min_compute_capability: tuple[int, int] | None = None
    sliding_window: bool = False
    cuda_graphs: str = CudaGraphs.NEVER
    packages: tuple[str, ...] = ()  # importable modules that it needs

    def __post_init__(self) -> None:
        for name in ("devices", "dtypes", "head_dims", "block_sizes", "packages"):
            if not isinstance(value := getattr(self, name), tuple):
                raise TypeError(f"Capabilities: {name}={value!r} is not a tuple (for one, write ({value!r},))")
        levels = CudaGraphs.NEVER, CudaGraphs.DECODE, CudaGraphs.ALWAYS
        if self.cuda_graphs not in levels:
            raise ValueError(f"Capabilities: cuda_graphs={self.cuda_graphs!r} is not one of {', '.join(levels)}")


class AttentionLayer(Protocol):
    """What a backend may ask of the layer that calls it."""

    index: int


class AttentionBackend(ABC):
    """Writes keys and values into the paged cache and attends to it.

    A subclass implements ``plan``, ``decode`` and ``prefill``. Rows of q come as ``AttentionBatch`` describes:
    decodes first. The cache is (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim): keys, then values.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    plans_on_host: bool = False  # whether ``plan`` reads host arrays (else replays of decodes alone skip it)
    captures_prompts: bool = True  # False: ``CudaGraphs.ALWAYS`` does not hold for steps with prompts of this spec
    fused_decode_rows: int = 0  # steps of so many decodes, and of nothing else, go to ``decode_qkv``; 0: none do
    # Whether ``decode`` is causal attention to all of a context and no more: a kernel of all layers may do it instead.
    plain_decode: bool = False
    # Whether ``decode`` and ``prefill`` may run at the same time: they share no memory that they write to.
    attends_beside: bool = False
    cascade_limits: CascadeLimits | None = None  # set where ``spec.cascade`` and it heeds ``AttentionBatch.cascade``
    fresh_prompts: bool = False  # set by ``plan``: this step's prompts (``whole_prompts``) go to ``prefill_fresh``

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.batch: AttentionBatch | None = None

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Why this backend cannot run ``spec``: one sentence a reason, empty if it can."""
        c, why = cls.capabilities, []
        if spec.device not in c.devices:
            why.append(f"it runs on {' or '.join(c.devices)}, not on {spec.device}")
        if spec.dtype not in c.dtypes:
            why.append(f"it takes {', '.join(c.dtypes)}, not {spec.dtype}")
        if c.head_dims and spec.head_dim not in c.head_dims:
            why.append(f"it takes head sizes {', '.join(map(str, c.head_dims))}, not {spec.head_dim}")
        if c.block_sizes and spec.block_size not in c.block_sizes:
            why.append(f"it takes cache.block_size {', '.join(map(str, c.block_sizes))}, not {spec.block_size}")
        if spec.block_size % c.block_size_multiple_of:
            why.append(f"it takes cache.block_size in multiples of {c.block_size_multiple_of}, not {spec.block_size}")
        if spec.sliding_window is not None and not c.sliding_window:
            why.append("it has no sliding window")
        if spec.needs_graphs and c.cuda_graphs == CudaGraphs.NEVER:
            why.append("its decode steps cannot be CUDA graphs, which enforce_eager=false asks for")
        why += [f"the package {p!r} is not installed" for p in c.packages if not _importable(p)]
        if c.min_compute_capability and spec.device == "cuda" and not why:
            import torch

            if torch.cuda.is_available() and torch.cuda.get_device_capability() < c.min_compute_capability:
                need, has = c.min_compute_capability, torch.cuda.get_device_capability()
                why.append(f"it needs compute capability {need[0]}.{need[1]}, this GPU has {has[0]}.{has[1]}")
        return why

    def bind(self, kv_cache: torch.Tensor) -> None:
        """Take the cache: (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)."""
        self.kv_cache = kv_cache

    def prompt_words(self, query_lens: np.ndarray, seq_lens: np.ndarray, captured: int = 0) -> np.ndarray:
        """What ``prefill`` reads on the device that is found out on the host, int32, from the lengths of the prompt
        rows, (p,) int32 each. It crosses with all else that a step is told, to be ``AttentionBatch.prompt_words``.
        ``captured``: tokens of the graph's prompt rows, 0 if the step is eager; for p rows and so many tokens there are
        always as many words."""
        return NO_INTS

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Called once a step on the host, before the model runs; also before capture, and before each replay of a step
        with prompts, and of decodes alone if it ``plans_on_host``."""

    @abstractmethod
    def decode(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        """Attend for the decode rows. q, out: (num_decodes, num_heads, head_dim); writes every row of ``out``."""

    @abstractmethod
    def prefill(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        """Attend for the prompt chunks. q, out: (tokens, num_heads, head_dim); writes every row of ``out``."""

    def prefill_fresh(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        """``prefill`` of a step for which ``plan`` has set ``fresh_prompts``, called by who has k and v at hand.

        They are (tokens, num_kv_heads, head_dim), contiguous in the last dimension, and in the cache, too.
        """
        raise NotImplementedError

    def decode_qkv(
        self, qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float,
        cos_sin: torch.Tensor, positions: torch.Tensor, layer: AttentionLayer, scale: RowScale | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """For steps of decodes that it ``takes_qkv`` of: q/k-norm (weights (head_dim,) or None), rotary (``cos_sin``
        (max_position, rotary_dim) float32), the cache write and attention in one.

        qkv: (rows, (num_heads + 2 * num_kv_heads) * head_dim), its rows to be multiplied by ``scale`` first; that is
        passed only where there is one. Returns (rows, num_heads, head_dim).
        """
        raise NotImplementedError

    def takes_qkv(self, rows: int, scaled: bool, rotary_dim: int) -> bool:
        """Whether a step of ``rows`` decodes alone goes to ``decode_qkv``, ``scaled`` with a scale."""
        return rows <= self.fused_decode_rows and not scaled

    @classmethod
    def keeps_cache_write(cls) -> bool:
        """Whether the backend leaves the cache's layout, and so the write into it, as this interface has them."""
        return cls.write is AttentionBackend.write and cls.forward is AttentionBackend.forward

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer) -> None:
        """Put k and v, (t, num_kv_heads, head_dim), where the batch's ``slot_mapping`` says."""
        from minivllm.kernels.cache_write import write_cache

        assert self.batch is not None
        write_cache(k, v, self.kv_cache[layer.index, 0], self.kv_cache[layer.index, 1], self.batch.slot_mapping)

    def attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to what the cache holds. q: (t, num_heads, head_dim); returns the same shape. k, v: this step's, (t,
        num_kv_heads, head_dim), if ``plan`` has set ``fresh_prompts``."""
        out = q.new_empty(q.shape)
        self.attend_into(out, q, layer, k, v)
        return out

    def attend_into(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        layer: AttentionLayer,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
    ) -> None:
        """``attend``, with its result in ``out``, of q's shape: every row is written."""
        assert self.batch is not None
        d, rows = self.batch.num_decodes, q.shape[0]

        def decodes() -> None:
            self.decode(q[:d], layer, out[:d])

        def prompts() -> None:
            if k is None or v is None:
                self.prefill(q[d:], layer, out[d:])
            else:
                self.prefill_fresh(q[d:], k[d:], v[d:], layer, out[d:])

        if self.attends_beside and 0 < d < rows:
            from minivllm.kernels.capture import side_by_side

            side_by_side(q.device, decodes, prompts)
            return
        if d:
            decodes()
        if d < rows:
            prompts()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """Write k and v, then attend. All of the step's keys are in the cache before any row attends."""
        self.write(k, v, layer)
        return self.attend(q, layer)


def _importable(module: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


# --------------------------------------------------------------------------- models and sampling


def overrides_both(cls: type, usual: str, faster: str) -> bool:
    """Whether the class that defines ``usual`` for ``cls`` defines ``faster`` too: then one stands for the other."""
    return faster in vars(_definer(cls, usual))


def undoes_sample(cls: type[Sampler]) -> str | None:
    """That a sampler changes an inherited ``sample`` and leaves what chooses again as it was; None if it does not."""
    mro = cls.__mro__
    changes, inherited = [c for c in mro if "sample" in vars(c)][:2]
    others = ("refine", "refine_captured", "resample", "needs_refine")
    left = all(mro.index(_definer(cls, other)) >= mro.index(inherited) for other in others)
    if inherited is Sampler or _definer(cls, "refine") is Sampler or not left:
        return None
    return (
        f"{changes.__name__} overrides sample and leaves the refine of {_definer(cls, 'refine').__name__}, which "
        "chooses again, from the logits as they came, for penalties, min_tokens, logit_bias, bad_words and the like: "
        "override resample, too, to do the same there"
    )


def finds_logprobs(cls: type[Sampler]) -> bool:
    """Whether it has any of those methods that return log-probabilities."""
    return cls.refine is not Sampler.refine or cls.refine_captured is not Sampler.refine_captured


def _definer(cls: type, name: str) -> type:
    return next(c for c in cls.__mro__ if name in vars(c))


class Model(ABC):
    """A decoder. Subclass it together with ``torch.nn.Module``; it is built on the meta device."""

    @abstractmethod
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        """``tp``: which part of the model this rank holds. Raises CheckpointError for a config that it cannot run."""

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """input_ids, positions: (t,) int64; returns the final, normed hidden states (t, hidden_size).

        Where ``attention.batch.last_tokens`` is given, (r,), it may return these tokens' alone, (r, hidden_size).
        """

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (n, hidden_size); returns (n, vocab_size)."""

    def compute_logits_shard(self, hidden: torch.Tensor) -> tuple[torch.Tensor, Shard] | None:
        """This rank's columns of ``compute_logits``, (n, columns), and which they are; None, on every rank: there are
        none to be had. Not called of a class that overrides ``compute_logits`` alone."""
        return None

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take a checkpoint's tensors, one at a time. Raises CheckpointError naming all that do not fit."""


class Sampler(ABC):
    """Turns logits into tokens. Parameters live in slot arrays on the device, one row a running sequence.

    ``row`` is the numpy dtype of one request's parameters, as the ranks receive them in ``Batch.admitted_params``; its
    size is a multiple of 4 bytes. What a request draws depends on its logits, its seed and its position only.
    ``extra_args`` names the keys of ``SamplingParams.extra_args`` that ``encode`` reads; others are refused, and so are
    ``logit_bias`` and ``allowed_token_ids`` unless it ``takes_biases``, ``structured_outputs`` and ``bad_words`` unless
    it ``takes_masks``.
    """

    row: ClassVar[np.dtype]
    extra_args: ClassVar[frozenset[str]] = frozenset()
    takes_biases: ClassVar[bool] = False
    takes_masks: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, options: FrozenDict) -> None:
        """``num_slots`` counts the padding slot, the last; ``options`` is the config's ``sampler.options``."""

    @classmethod
    @abstractmethod
    def encode(cls, seq: Sequence, seed: int) -> np.ndarray:
        """A request's parameters: shape () of ``row``. Raises RequestError for what this sampler cannot do."""

    @classmethod
    def words(cls, seq: Sequence) -> np.ndarray:
        """What ``take_tokens`` brings in front of the tokens of this sequence, whose ``sampler_row`` is ``encode``'s:
        int32, (n,)."""
        return NO_INTS

    @classmethod
    def wants_tokens(cls, seq: Sequence) -> bool:
        """Whether ``take_tokens`` is to be called when this sequence starts, whose ``sampler_row`` is ``encode``'s."""
        return False

    def take_tokens(self, slots: np.ndarray, lens: np.ndarray, ids: torch.Tensor) -> None:
        """After ``prepare``: ``words`` of sequences that start, then their tokens, if these are wanted: the prompt's
        and, after a preemption, what they had said.

        slots, lens (a,); ids (sum of lens,) int32, on the device, one sequence after another. Those that have none and
        did not ask have length 0. What is kept of ids is copied: they are this step's.
        """
        raise NotImplementedError

    def take_masks(self, slots: torch.Tensor, bits: torch.Tensor) -> None:
        """Which tokens may come, from now on, for sequences that have a guide; behind ``prepare``, before they are
        sampled for. On the device: slots (m,) int64; bits (m, words) int32, of ``TokenMasks``, to be copied.
        ``needs_refine`` is true of these sequences.
        """
        raise NotImplementedError

    @abstractmethod
    def prepare(
        self, slots: np.ndarray, rows: np.ndarray, device_slots: torch.Tensor, device_rows: torch.Tensor
    ) -> None:
        """Sequences start in ``slots`` (a,) with the parameters ``rows`` (a,) of ``row``; the same on the device:
        (a,) int64 and (a, words) int32, the rows' bytes. What is kept of these is copied: they are this step's."""

    @abstractmethod
    def sample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The capturable part: what most requests need.

        logits (n, vocab) of any float dtype; slots (n,) int64; positions (n,) int64: where each sampled token will
        stand in its sequence. Returns (n,) int64.
        """

    def samples_shards(self) -> bool:
        """Whether there is a ``sample_shard``, and whoever overrides ``sample`` overrides both."""
        return overrides_both(type(self), "sample", "sample_shard")

    def sample_shard(
        self, logits: torch.Tensor, shard: Shard, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """``sample`` on all ranks at once, each with its columns of the logits: the same tokens, nothing gathered."""
        raise NotImplementedError

    def needs_refine(self, host_slots: np.ndarray) -> bool:
        """Whether any of these slots wants more than ``sample`` does."""
        return False

    def refines_shards(self, host_slots: np.ndarray) -> bool:
        """Whether any wants more than ``sample_shard`` does."""
        return self.needs_refine(host_slots)

    def resample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A capturable part of ``refine``: tokens, as from ``sample``, with all that may change them."""
        raise NotImplementedError

    def resamples(self, host_slots: np.ndarray) -> bool:
        """Whether ``resample`` does all that ``refine`` would for these slots."""
        return False

    def refinement(self, host_slots: np.ndarray) -> Hashable | None:
        """What ``refine_captured`` has to do for these slots: few different ones, a graph is captured for each. None:
        it does not do all that ``refine`` would."""
        return "resample" if self.resamples(host_slots) else None

    def refine_captured(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, kind: Hashable
    ) -> tuple[torch.Tensor, DeviceLogprobs | None]:
        """A capturable ``refine``: it launches the same for the same ``kind``, which is ``refinement``'s. Some rows may
        be padding, whose slot asks for nothing. Not called of a class that overrides ``refine`` alone."""
        return self.resample(logits, slots, positions), None

    def captures_refine(self) -> bool:
        """Whether ``refine_captured``, or ``resample`` in its place, may replace ``refine``: a class that overrides one
        of them must override both."""
        own = type(self).refine_captured is not Sampler.refine_captured
        return overrides_both(type(self), "refine", "refine_captured" if own else "resample")

    def launch_all_kinds(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Whatever ``refine`` may launch for such rows, so that its kernels are found at the start."""
        if type(self).resample is not Sampler.resample:
            self.resample(logits, slots, positions)

    def refine(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor,
        host_slots: np.ndarray,
    ) -> tuple[torch.Tensor, DeviceLogprobs | None]:  # fmt: skip
        """The rest, outside a graph and without waiting for the device: penalties, log-probabilities.

        ``tokens`` is what ``sample`` chose for the same rows; the host knows their slots too. Neither it nor ``logits``
        is written to: who chooses again returns a tensor of its own, who does not returns ``tokens``.
        """
        return tokens, None


# --------------------------------------------------------------------------- execution


class StepHandle(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled. Raises EngineDeadError."""
        ...


class StepObserver(Protocol):
    """Looks on as an engine steps (``LLMEngine.observer``). Clock values are ``time.perf_counter``'s.

    Calls of one step come in this order; another step's may come in between, as two are under way.
    """

    def scheduled(self, batch: Batch, began: float) -> None:
        """``batch`` is about to be launched; its scheduling began at ``began``."""
        ...

    def launched(self, batch: Batch) -> None:
        """It was handed to the executor."""
        ...

    def committed(self, batch: Batch, committed: Committed, done: float) -> None:
        """Its tokens were there at ``done`` and are taken in now; what ended has left the scheduler."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step found, on the host; n rows, as the batch has them."""

    token_ids: np.ndarray  # (n,) int32, one a row; rows that do not sample hold -1
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # of ``Batch.scored``; ``rows`` are places in its ``ids``


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the rows that asked for them: the sampled token's, and the best k's."""

    rows: np.ndarray  # (m,) int64: rows of the batch
    sampled: np.ndarray  # (m,) float32
    rank: np.ndarray  # (m,) int32: the sampled token's rank, 1 for the most likely
    top_ids: np.ndarray  # (m, k) int32
    top: np.ndarray  # (m, k) float32

    def lists(self) -> Iterator[tuple[float, int, list[int], list[float]]]:
        """Each row's, but for ``rows``, in Python's numbers: numpy's are slow one at a time."""
        return zip(*(x.tolist() for x in (self.sampled, self.rank, self.top_ids, self.top)), strict=True)


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """``Logprobs`` while still on the device. Rows that did not ask may be among them, with rank 0."""

    rows: np.ndarray
    sampled: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


class Executor(ABC):
    """Runs the model on one or more ranks. Sequences that have a guide are refused unless it ``takes_masks``."""

    takes_masks: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, config: EngineConfig, model_config: ModelConfig, max_model_len: int, registry: Registry) -> None:
        """Nothing is started yet. ``registry`` finds the components that ``config`` names, in each rank's process anew.
        Raises ConfigError for what cannot run here."""

    @abstractmethod
    def start(self) -> int:
        """Load the weights, measure memory, capture graphs; returns how many cache blocks can be handed out."""

    @abstractmethod
    def launch(self, batch: Batch) -> StepHandle:
        """Start a step and return at once."""

    def guide(self, masks: TokenMasks) -> None:
        """Let the step that was launched last, of a ``guided`` batch, sample: for these slots of these tokens alone,
        for other slots that have a guide as before.

        Called once, before the next step is launched. ``masks.bits`` are the engine's, to be copied.
        """
        raise NotImplementedError

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What runs: ``device``, ``attention`` (the backend's name), ``dtype`` and what else is worth a line."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give back memory and processes; safe to call twice."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDeadError if a rank is gone; called at each step, so it is quick."""

    def profile(self, file: Path) -> AbstractContextManager[None]:
        """Within, steps are traced where rank 0 takes them, which is here unless this is overridden; behind, torch's
        Chrome trace is in ``file``."""
        from minivllm.core.profiled import profiled

        return profiled(file)
