"""The interfaces of schedulers, block managers, attention backends, models, samplers and executors.

Every component that can be swapped by name implements one of these. ``core`` names no implementation; it is given
them. Plugins may rely only on what is declared here (and in ``fast_paths.py``).
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
from minivllm.core.fast_paths import FastPaths
from minivllm.core.model_config import FrozenDict
from minivllm.core.overrides import overrides_both
from minivllm.errors import RequestError
from minivllm.modules import exists

if TYPE_CHECKING:
    import torch

    from minivllm.config.engine_config import EngineConfig, SchedulerOptions
    from minivllm.core.batch import AttentionBatch, Batch, TokenMasks
    from minivllm.core.model_config import ModelConfig
    from minivllm.core.parallel import TensorParallel
    from minivllm.core.sequence import FinishReason, Sequence
    from minivllm.kernels.sampling.sampling import Shard
    from minivllm.plugins.registry import Registry

# --------------------------------------------------------------------------- scheduling


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of one step: ``slots[i]`` received ``token_ids[i]``; ``finished`` lists the sequences that ended, each
    with its ``slot`` unchanged. A slot whose sequence had a draft may have received several, one after another.

    ``rows`` are the batch rows that the tokens came from (without stale and rejected rows), for logprobs.
    """

    rows: np.ndarray  # (m,) int64
    slots: np.ndarray  # (m,) int32
    token_ids: np.ndarray  # (m,) int32
    finished: list[tuple[Sequence, FinishReason]]
    drafts: list[tuple[int, int]] = field(default_factory=list)  # of each draft: its tokens, and how many were accepted


class Scheduler(ABC):
    """Decides what each step computes. Owns the slot arrays and, through the block manager, the cache's blocks."""

    uses_priority: ClassVar[bool] = False  # whether it uses Sequence.priority; if not, nonzero priorities are refused
    scores_prompts: ClassVar[bool] = False  # whether it fills ``Batch.scored``; if not, prompt_logprobs are refused
    speculates: ClassVar[bool] = False  # whether it drafts tokens; if not, num_speculative_tokens is refused
    asks_draft_models: ClassVar[bool] = False  # whether it has ``ask_for_drafts``; if not, draft_model is refused
    blocks: BlockManager
    sequences: list[Sequence | None]  # the running sequences, by slot

    @abstractmethod
    def __init__(
        self, options: SchedulerOptions, blocks: BlockManager, max_model_len: int, sampler_row: np.dtype | None = None
    ) -> None:
        """``max_model_len``: the most tokens of a sequence, prompt and completion together. ``sampler_row``:
        ``Sampler.row``, the dtype of ``Batch.admitted_params``. Raises ConfigError for invalid options."""

    @abstractmethod
    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises RequestError, with the numbers, if it can never fit."""

    @abstractmethod
    def abort(self, request_id: str) -> Sequence | None:
        """End a sequence in any state (waiting, running, in flight) and free its blocks; returns None if unknown."""

    @abstractmethod
    def finish(self, seq: Sequence) -> None:
        """End a running or waiting sequence early (on a stop string); ``commit`` drops its row if one is in flight."""

    @abstractmethod
    def schedule(self) -> Batch | None:
        """The next step, or None if nothing can run until a step in flight is committed."""

    def ask_for_drafts(self) -> Batch | None:
        """The next step if it is one of the draft model: a batch with ``num_drafts``, of which ``commit`` gets the
        draft tokens of the rows that sample, (num_drafts * rows,) int32, the first of each row, then the second. None:
        ``schedule`` is called for a step of the model."""
        return None

    @abstractmethod
    def commit(self, batch: Batch, token_ids: np.ndarray) -> Committed:
        """Record the tokens that ``batch`` sampled: (n,) int32, one per row (any value where a row does not sample)."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""

    @abstractmethod
    def check(self) -> None:
        """Verify all invariants (tests call it after each step). Raises AssertionError."""


class BlockManager(ABC):
    """Owns the pool of cache blocks and one block table per slot. Block 0 is never allocated: padding writes there."""

    tables: np.ndarray  # (num_slots, max_blocks) int32, the host's copy
    held: np.ndarray  # (num_slots,) int32: how many entries of each row are valid
    num_blocks: int  # blocks that can be allocated
    block_size: int

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Blocks that ``allocate`` and ``append`` can use now, evictable cached blocks included."""

    @abstractmethod
    def match(self, seq: Sequence) -> list[int]:
        """The cached blocks with the longest prefix of ``seq`` (whole blocks, never its last token); empty if
        ``seq.scores_prompt``."""

    @abstractmethod
    def allocate(self, slot: int, num_tokens: int, cached: SequenceOf[int]) -> None:
        """Give an empty slot blocks for ``num_tokens``: the shared ``cached`` blocks first, then new ones."""

    @abstractmethod
    def append(self, slots: np.ndarray) -> None:
        """Give each slot one more block. The caller must have checked ``num_free``."""

    @abstractmethod
    def missing(self, num_tokens: int, cached: SequenceOf[int]) -> int:
        """How many free blocks ``allocate`` lacks for these arguments; 0 or less if it can be called."""

    @abstractmethod
    def register(self, slot: int, seq: Sequence, tokens: np.ndarray, num_tokens: int) -> None:
        """Make the full blocks of the slot's first ``num_tokens`` tokens (computed or about to be) reusable."""

    @abstractmethod
    def take_updates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The table entries written since the last call: slots, indices and block ids, each (b,) int32."""

    @abstractmethod
    def free(self, slot: int) -> None:
        """Release the slot's blocks; those that no other slot holds become free (evictable if cached)."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget all cached content; blocks in use stay valid for the slots that hold them."""

    @abstractmethod
    def check(self) -> None:
        """Verify that each block is free, cached, or referenced as often as tables list it. Raises AssertionError."""


# --------------------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What an engine needs from an attention backend; ``unsupported`` checks it before anything is loaded."""

    device: str  # "cuda" or "cpu"
    dtype: str  # "float32", "bfloat16", "float16"
    num_heads: int  # on this rank
    num_kv_heads: int  # on this rank
    head_dim: int
    block_size: int
    num_layers: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    scale: float
    sliding_window: int | None = None  # tokens; None: attend to the whole context
    needs_graphs: bool = False  # decode steps must be capturable (enforce_eager=false)
    cascade: bool = False  # cascade attention is allowed: the backend may set ``cascade_limits``
    options: FrozenDict = field(default_factory=FrozenDict)  # attention.options that this backend declares
    # The window of each layer of a model whose layers differ; ``sliding_window`` is then the smallest. A backend never
    # gets these: it is built once for each window, for the layers that have it, of which ``first_layer`` is the first.
    layer_windows: tuple[int | None, ...] = ()
    first_layer: int = 0
    kv_cache_dtype: str = "auto"  # "fp8": keys and values are rounded to float8_e4m3fn; "auto": they are of ``dtype``

    @property
    def cache_dtype(self) -> torch.dtype:
        import torch

        return torch.float8_e4m3fn if self.kv_cache_dtype == "fp8" else getattr(torch, self.dtype)


class CudaGraphs:
    """Which steps of a backend can be captured: none, decode-only steps, or all."""

    NEVER = "never"
    DECODE = "decode"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend supports; an empty tuple means any."""

    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    head_dims: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    block_size_multiple_of: int = 1
    min_compute_capability: tuple[int, int] | None = None
    sliding_window: bool = False
    cuda_graphs: str = CudaGraphs.NEVER
    packages: tuple[str, ...] = ()  # modules that it imports
    fp8_cache: bool = False  # it reads a cache in float8

    def __post_init__(self) -> None:
        for name in ("devices", "dtypes", "head_dims", "block_sizes", "packages"):
            if not isinstance(value := getattr(self, name), tuple):
                raise TypeError(f"Capabilities: {name}={value!r} is not a tuple (for one, write ({value!r},))")
        levels = CudaGraphs.NEVER, CudaGraphs.DECODE, CudaGraphs.ALWAYS
        if self.cuda_graphs not in levels:
            raise ValueError(f"Capabilities: cuda_graphs={self.cuda_graphs!r} is not one of {', '.join(levels)}")


class AttentionLayer(Protocol):
    """What a backend may use of the layer that calls it."""

    index: int


class AttentionBackend(FastPaths, ABC):
    """Writes keys and values into the paged cache and attends to it.

    A subclass implements ``plan``, ``decode`` and ``prefill``; ``FastPaths`` are optional. Rows of q are ordered as in
    ``AttentionBatch``: decodes first. The cache is (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim):
    keys, then values.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.batch: AttentionBatch | None = None

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Why this backend cannot run ``spec``, one sentence per reason; empty if it can."""
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
        if spec.kv_cache_dtype == "fp8" and not c.fp8_cache:
            why.append("it reads no cache in float8 (cache.dtype=fp8)")
        if spec.sliding_window is not None and not c.sliding_window:
            why.append("it has no sliding window")
        if spec.needs_graphs and c.cuda_graphs == CudaGraphs.NEVER:
            why.append("its decode steps cannot be CUDA graphs, which enforce_eager=false asks for")
        why += [f"the package {p!r} is not installed" for p in c.packages if not exists(p)]
        if c.min_compute_capability and spec.device == "cuda" and not why:
            import torch

            if torch.cuda.is_available() and torch.cuda.get_device_capability() < c.min_compute_capability:
                need, has = c.min_compute_capability, torch.cuda.get_device_capability()
                why.append(f"it needs compute capability {need[0]}.{need[1]}, this GPU has {has[0]}.{has[1]}")
        return why

    def bind(self, kv_cache: torch.Tensor) -> None:
        """Keep the cache: (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)."""
        self.kv_cache = kv_cache

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Called on the host once per step, before the model runs; also before capture and before each replay of a step
        with prompts (of a decode-only step if ``plans_on_host``). Store ``batch`` as ``self.batch``."""

    @abstractmethod
    def decode(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        """Attention of the decode rows. q, out: (num_decodes, num_heads, head_dim); writes every row of ``out``."""

    @abstractmethod
    def prefill(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        """Attention of the prompt chunks. q, out: (tokens, num_heads, head_dim); writes every row of ``out``."""

    @classmethod
    def keeps_cache_write(cls) -> bool:
        """Whether the class overrides neither ``write`` nor ``forward``, so the cache has this interface's layout."""
        return cls.write is AttentionBackend.write and cls.forward is AttentionBackend.forward

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer) -> None:
        """Write k and v, (t, num_kv_heads, head_dim), to the places in the batch's ``slot_mapping``."""
        from minivllm.kernels.attention.cache_write import write_cache

        assert self.batch is not None
        write_cache(k, v, self.kv_cache[layer.index, 0], self.kv_cache[layer.index, 1], self.batch.slot_mapping)

    def attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention to the cache. q: (t, num_heads, head_dim); returns the same shape. k, v: this step's, (t,
        num_kv_heads, head_dim), if ``plan`` set ``fresh_prompts``."""
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
        """``attend`` into ``out``, which has q's shape; every row is written."""
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
        """Write k and v, then attend. All keys of the step are in the cache before any row attends."""
        self.write(k, v, layer)
        return self.attend(q, layer)


# --------------------------------------------------------------------------- models and sampling


class Model(ABC):
    """A decoder-only model. Subclass it together with ``torch.nn.Module``; it is built on the meta device."""

    @abstractmethod
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        """``tp``: which part of the model this rank holds. Raises CheckpointError for an unsupported config."""

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """input_ids, positions: (t,) int64; returns the final hidden states, after the last norm: (t, hidden_size).

        If ``attention.batch.last_tokens`` (r,) is set, it may return only the states of these rows: (r, hidden_size).
        """

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (n, hidden_size); returns (n, vocab_size)."""

    def compute_logits_shard(self, hidden: torch.Tensor) -> tuple[torch.Tensor, Shard] | None:
        """This rank's columns of ``compute_logits``, (n, columns), and which they are; None, on every rank, if the
        model cannot compute them. Not called if a class overrides ``compute_logits`` but not this method."""
        return None

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint's tensors, one at a time. Raises CheckpointError that names all that do not fit.

        It may be called again, with all tensors of another checkpoint: it writes to the tensors that there are."""


class Sampler(ABC):
    """Turns logits into tokens. Parameters live in slot arrays on the device, one row per running sequence.

    ``row`` is the numpy dtype of one request's parameters, as the ranks receive them in ``Batch.admitted_params``; its
    size is a multiple of 4 bytes. A sampled token may depend only on the request's logits, seed and position.
    ``extra_args``: the keys of ``SamplingParams.extra_args`` that ``encode`` reads; requests with other keys are
    refused. So are ``logit_bias`` and ``allowed_token_ids`` unless ``takes_biases``, and ``structured_outputs`` and
    ``bad_words`` unless ``takes_masks``. Such requests have drafts if ``masks_drafts``: the worker then sets
    ``masks_per_slot`` before anything is sampled.
    """

    row: ClassVar[np.dtype]
    extra_args: ClassVar[frozenset[str]] = frozenset()
    takes_biases: ClassVar[bool] = False
    takes_masks: ClassVar[bool] = False
    masks_drafts: ClassVar[bool] = False
    masks_per_slot = 1

    @abstractmethod
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, options: FrozenDict) -> None:
        """``num_slots`` includes the padding slot, the last one; ``options`` is the config's ``sampler.options``."""

    @classmethod
    @abstractmethod
    def encode(cls, seq: Sequence, seed: int) -> np.ndarray:
        """A request's parameters: shape (), dtype ``row``. Raises RequestError for what it does not support."""

    @classmethod
    def words(cls, seq: Sequence) -> np.ndarray:
        """Variable-length int32 data for this sequence, (n,); ``take_tokens`` gets it ahead of the sequence's tokens.
        Called after ``encode``, whose result is ``seq.sampler_row``."""
        return NO_INTS

    @classmethod
    def wants_tokens(cls, seq: Sequence) -> bool:
        """Whether ``take_tokens`` needs this sequence's tokens when it starts. Called after ``words``."""
        return False

    def take_tokens(self, slots: np.ndarray, lens: np.ndarray, ids: torch.Tensor) -> None:
        """Called after ``prepare`` with each starting sequence's ``words``, followed by its tokens if it
        ``wants_tokens``: the prompt and, after a preemption, the output so far.

        slots, lens (a,); ids (sum of lens,) int32, on the device, one sequence after another; length 0 if a sequence
        has neither. Copy what you keep: ``ids`` is valid for this step only.
        """
        raise NotImplementedError

    def take_masks(self, slots: torch.Tensor, bits: torch.Tensor) -> None:
        """The tokens that guided sequences may sample from now on; called after ``prepare`` and before sampling. On the
        device: slots (m,) int64; bits (m, words) int32, as in ``TokenMasks``; copy them. ``needs_refine`` must be true
        of these sequences.

        With n > 1 ``masks_per_slot`` the mask of a slot's token at position p is number ``slot * n + p % n``, and
        ``slots`` has these numbers.
        """
        raise NotImplementedError

    @abstractmethod
    def prepare(
        self, slots: np.ndarray, rows: np.ndarray, device_slots: torch.Tensor, device_rows: torch.Tensor
    ) -> None:
        """Sequences start in ``slots`` (a,) with the parameters ``rows`` (a,), dtype ``row``. The same on the device:
        (a,) int64 and (a, words) int32, the rows' bytes. Copy what you keep: the tensors are valid for this step only.
        """

    @abstractmethod
    def sample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The capturable part, which is enough for most requests.

        logits (n, vocab), any float dtype; slots (n,) int64; positions (n,) int64: each sampled token's position in its
        sequence. Returns (n,) int64.
        """

    def samples_shards(self) -> bool:
        """Whether the class that defines ``sample`` also defines ``sample_shard``."""
        return overrides_both(type(self), "sample", "sample_shard")

    def sample_shard(
        self, logits: torch.Tensor, shard: Shard, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """``sample`` on all ranks together, each with its columns of the logits: same tokens, no gathered logits."""
        raise NotImplementedError

    def needs_refine(self, host_slots: np.ndarray) -> bool:
        """Whether any of these slots needs more than ``sample``."""
        return False

    def refines_shards(self, host_slots: np.ndarray) -> bool:
        """Whether any of these slots needs more than ``sample_shard``."""
        return self.needs_refine(host_slots)

    def resample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The capturable part of ``refine`` that samples: tokens as from ``sample``, with every parameter applied."""
        raise NotImplementedError

    def resamples(self, host_slots: np.ndarray) -> bool:
        """Whether ``resample`` does all that ``refine`` would for these slots."""
        return False

    def refinement(self, host_slots: np.ndarray) -> Hashable | None:
        """A hashable key for the work ``refine_captured`` must do for these slots. A graph is captured per key, so keep
        them few. None: ``refine`` runs instead."""
        return "resample" if self.resamples(host_slots) else None

    def refine_captured(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, kind: Hashable
    ) -> tuple[torch.Tensor, DeviceLogprobs | None]:
        """A capturable ``refine``: it must launch the same work for the same ``kind``, a key from ``refinement``. Some
        rows may be padding, whose slot needs nothing. Not called if a class overrides ``refine`` but not this method.
        """
        return self.resample(logits, slots, positions), None

    def captures_refine(self) -> bool:
        """Whether ``refine_captured`` (or, if not overridden, ``resample``) may replace ``refine``: the class that
        defines one must define both."""
        own = type(self).refine_captured is not Sampler.refine_captured
        return overrides_both(type(self), "refine", "refine_captured" if own else "resample")

    def launch_all_kinds(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Launch every kernel that ``refine`` may need for such rows, so that it is compiled at startup."""
        if type(self).resample is not Sampler.resample:
            self.resample(logits, slots, positions)

    def refine(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor,
        host_slots: np.ndarray,
    ) -> tuple[torch.Tensor, DeviceLogprobs | None]:  # fmt: skip
        """The rest, outside a graph and without waiting for the device: penalties, log-probabilities.

        ``tokens`` is what ``sample`` chose for the same rows; ``host_slots`` are ``slots`` on the host. Do not write to
        ``tokens`` or ``logits``: return a new tensor if tokens are sampled again, else ``tokens``.
        """
        return tokens, None


# --------------------------------------------------------------------------- execution


class StepHandle(Protocol):
    """A step in flight."""

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled. Raises EngineDeadError."""
        ...


class StepObserver(Protocol):
    """Observes an engine's steps (``LLMEngine.observer``). Times are from ``time.perf_counter``.

    The calls for one step are made in this order; calls for another may come in between, as two are in flight.
    """

    def scheduled(self, batch: Batch, began: float) -> None:
        """``batch`` is about to be launched; its scheduling began at ``began``."""
        ...

    def launched(self, batch: Batch) -> None:
        """``batch`` was passed to the executor."""
        ...

    def committed(self, batch: Batch, committed: Committed, done: float) -> None:
        """The tokens of ``batch`` arrived at ``done`` and are committed; finished sequences have left the scheduler,
        and a step scheduled since may have started others in their slots."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's results on the host; n is the batch's number of rows."""

    token_ids: np.ndarray  # (n,) int32, one per row; -1 for rows that do not sample
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # for ``Batch.scored``; ``rows`` are indices into its ``ids``


@dataclass(frozen=True, slots=True)
class Logprobs:
    """For the rows that asked for them: log-probabilities of the sampled token and of the top k."""

    rows: np.ndarray  # (m,) int64: rows of the batch
    sampled: np.ndarray  # (m,) float32
    rank: np.ndarray  # (m,) int32: the sampled token's rank, 1 for the most likely
    top_ids: np.ndarray  # (m, k) int32
    top: np.ndarray  # (m, k) float32

    def lists(self) -> Iterator[tuple[float, int, list[int], list[float]]]:
        """Per row all fields but ``rows``, as Python numbers: numpy's are slow one at a time."""
        return zip(*(x.tolist() for x in (self.sampled, self.rank, self.top_ids, self.top)), strict=True)


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """``Logprobs`` while still on the device. May include rows that did not ask for them, with rank 0."""

    rows: np.ndarray
    sampled: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


class Executor(ABC):
    """Runs the model on one or more ranks. Guided sequences are refused unless ``takes_masks``."""

    takes_masks: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, config: EngineConfig, model_config: ModelConfig, max_model_len: int, registry: Registry) -> None:
        """Must not start anything yet. ``registry`` resolves the component names in ``config``, in each rank's process
        separately. Raises ConfigError for what cannot run here."""

    @abstractmethod
    def start(self) -> int:
        """Load the weights, profile memory, capture graphs; returns how many cache blocks can be allocated."""

    @abstractmethod
    def launch(self, batch: Batch) -> StepHandle:
        """Start a step and return at once."""

    def guide(self, masks: TokenMasks) -> None:
        """Let the last launched step (a ``guided`` batch) sample: for these masks' slots from these tokens only, for
        other guided slots under their previous mask.

        Called once, before the next step is launched. Copy ``masks.bits``: the engine reuses the array.
        """
        raise NotImplementedError

    def reload_weights(self, weights: Path | Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """Replace the weights on every rank, in place, and return when all have them. No step is in flight.

        ``weights``: a checkpoint's folder; a checkpoint's tensors by name, on any device; None: what ``start`` loaded.
        Raises RequestError if it has not begun to write; after any other error the engine is dead.
        """
        raise RequestError(
            f"{type(self).__name__} replaces no weights (it has no reload_weights); make a new engine of the checkpoint"
        )

    def load_adapter(self, place: int, folder: Path) -> None:
        """Load the LoRA adapter in a folder into this place of each rank, in which there may be another that no
        unfinished request has; return when all have it. Called only with ``config.enable_lora``. Steps may be in
        flight, of which none reads the place.

        Raises RequestError if it has not begun; after any other error the engine is dead.
        """
        raise RequestError(f"{type(self).__name__} takes no LoRA adapters of single requests; leave lora_request out")

    def sleep(self, level: int) -> None:
        """Give back, on every rank, the memory of the cache and of the weights, and return when all have. At level 1
        each rank keeps its weights in its host's memory, at level 2 it gives them up. Called only with
        ``config.enable_sleep_mode``. No step is in flight.

        Raises RequestError if it has not begun; after any other error the engine is dead.
        """
        raise RequestError(f"{type(self).__name__} does not sleep; shutdown() gives the memory back")

    def wake_up(self, tags: SequenceOf[str]) -> None:
        """Have memory for these of ``weights`` and ``kv_cache`` again, at the same addresses: weights as they were, or
        zeros if they were given up; a cache of zeros. Raises as ``sleep``."""
        raise RequestError(f"{type(self).__name__} does not sleep")

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What runs: ``device``, ``attention`` (the backend's name), ``dtype``, and anything else worth reporting."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release memory and processes; safe to call twice."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDeadError if a rank is gone. Must be fast: it is called at each step."""

    def profile(self, file: Path) -> AbstractContextManager[None]:
        """While the context is open, trace rank 0's steps; on exit ``file`` holds torch's Chrome trace. By default this
        process is traced: override it if rank 0 runs in another."""
        from minivllm.core.profiled import profiled

        return profiled(file)
