"""One step as data: the scheduler's decisions, and what attention backends get of them.

``Batch`` is passed between modules and processes: numpy arrays only. ``AttentionBatch`` is made from it on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.rounding import cdiv, round_up

if TYPE_CHECKING:
    import torch

NO_INTS = np.empty(0, dtype=np.int32)
NO_INTS.flags.writeable = False  # shared
_ROUND = 16  # rows


@dataclass(frozen=True, slots=True)
class Scored:
    """The prompt tokens whose log-probabilities a step computes, one row after another. They start one position after
    the row's new tokens: a token's log-probability comes from the position before it."""

    rows: np.ndarray  # (s,) int32: rows of the batch
    lens: np.ndarray  # (s,) int32: number of tokens per row
    ids: np.ndarray  # (sum of lens,) int32
    best: int  # how many top tokens to return at each position as well

    def places(self, batch: Batch) -> np.ndarray:
        """(len(ids),) int64: the indices of the batch's tokens that they are computed from."""
        starts = np.cumsum(batch.num_new, dtype=np.int64) - batch.num_new
        before = np.cumsum(self.lens) - self.lens
        return np.repeat(starts[self.rows] - before, self.lens) + np.arange(len(self.ids))


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens a step may sample for guided sequences; only where masks have changed."""

    slots: np.ndarray  # (m,) int32: where they belong, see ``Sampler.take_masks``
    bits: np.ndarray  # (m, mask_words) int32: bit t % 32 of word t // 32 is 1 if token t is allowed


def mask_words(vocab_size: int) -> int:
    """Words per row of ``TokenMasks.bits``."""
    return cdiv(vocab_size, 32)


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step. Rows are sequences: decodes first, then prompt chunks, in the scheduler's order.

    n rows, t tokens. A decode row has one new token, which is already on the device where it was sampled; the tokens of
    prompt chunks are in ``token_ids``. A sequence with a draft has prompt rows of one token, one after another: for its
    newest token, and for each token of the draft.
    """

    step: int
    slots: np.ndarray  # (n,) int32: each row's slot
    generations: np.ndarray  # (n,) int64: the slot's generation; if it has changed by commit, the row is dropped
    # (n,) int32: tokens of the sequence before the row's new ones; their keys and values are in the cache before this
    # step, but for those that earlier rows of a draft compute
    num_computed: np.ndarray
    num_new: np.ndarray  # (n,) int32: tokens of the row that this step computes
    samples: np.ndarray  # (n,) bool: whether the step reaches the row's newest token, so that the next one is sampled
    num_decodes: int  # rows [0, num_decodes) are decodes
    token_ids: np.ndarray  # int32: the new tokens of the prompt rows, one row after another
    block_slots: np.ndarray  # (b,) int32 ┐ new entries of block tables:
    block_indices: np.ndarray  # (b,) int32 │ table[block_slots, block_indices] = block_ids
    block_ids: np.ndarray  # (b,) int32 ┘
    admitted_slots: np.ndarray  # (a,) int32: slots that start a sequence in this step
    admitted_params: np.ndarray  # (a,) of Sampler.row: their sampling parameters
    # ``Sequence.told`` of the admitted sequences, one after another, int32; (a,) int32, its lengths. Both may be empty.
    known_ids: np.ndarray = field(default_factory=lambda: NO_INTS)
    known_lens: np.ndarray = field(default_factory=lambda: NO_INTS)
    scored: Scored | None = None
    # Whether it samples for guided sequences, and so must wait for ``Executor.guide``. Set by the engine.
    guided: bool = False
    # (a,) int32: the place of each admitted sequence's LoRA adapter, 0: none; empty if none has any. Set by the engine.
    admitted_adapters: np.ndarray = field(default_factory=lambda: NO_INTS)
    # Not 0: a step of the draft model (``core/draft_model.py``), which gives each row that samples so many tokens.
    num_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + len(self.token_ids)

    @property
    def first_rows(self) -> np.ndarray:
        """(r,) int64: each sequence's first row, which is its only one unless it has a draft."""
        first = np.ones(len(self.slots), dtype=bool)
        first[self.num_decodes + 1 :] = self.slots[self.num_decodes + 1 :] != self.slots[self.num_decodes : -1]
        return first.nonzero()[0]

    def joined(self) -> Batch:
        """With one row for a sequence and its draft: what layers compute. Itself if there is no draft."""
        first = self.first_rows
        if len(first) == len(self.slots):
            return self
        of_rows = {n: getattr(self, n)[first] for n in ("slots", "generations", "num_computed", "samples")}
        return replace(self, **of_rows, num_new=np.add.reduceat(self.num_new, first, dtype=np.int32))

    def ends(self, padding: int) -> np.ndarray:
        """(4, n or more) int64, as ``prompt_inputs`` computes it: each row's slot, length, and its last token's
        position in the sequence and index in the step; then a few rows of the slot ``padding``."""
        n = len(self.slots)
        ends = np.zeros((4, round_up(n, _ROUND)), dtype=np.int64)
        ends[0, n:] = padding
        ends[0, :n], ends[1, :n] = self.slots, self.num_computed + self.num_new
        ends[2, :n], ends[3, :n] = ends[1, :n] - 1, np.cumsum(self.num_new) - 1
        return ends

    def apart(self) -> tuple[Batch, Batch]:
        """Split into two batches to launch in this order: the decodes with all new blocks, then the prompts with all
        admissions. Decodes go first because a prompt may share a block that a decode of the same step completes.
        """
        d = self.num_decodes

        def rows(some: slice) -> dict[str, Any]:
            return {n: getattr(self, n)[some] for n in ("slots", "generations", "num_computed", "num_new", "samples")}

        decodes = replace(
            self, **rows(slice(d)), token_ids=NO_INTS, admitted_slots=NO_INTS,
            admitted_params=self.admitted_params[:0], known_ids=NO_INTS, known_lens=NO_INTS,
            admitted_adapters=NO_INTS,
        )  # fmt: skip
        prompts = replace(
            self, **rows(slice(d, None)), num_decodes=0, block_slots=NO_INTS, block_indices=NO_INTS, block_ids=NO_INTS
        )
        return decodes, prompts


@dataclass(frozen=True, slots=True)
class Cascade:
    """The shared prefixes that decode rows read once, see ``core/cascade.py``: int32, device.

    An item is one unit of work: ``count`` rows, starting at ``order[first]``, attend to the keys [begin, end) that they
    share (``block_tables[row]`` locates them). It writes one partial result per row; row r's partial results are the
    ``parts[r, 1]`` starting at ``parts[r, 0]``.
    """

    order: torch.Tensor  # (n,): the decode rows, those with common prefixes next to each other
    skips: torch.Tensor  # (n,): how many leading blocks of each row's context the items read
    parts: torch.Tensor  # (n, 2): index of each row's first partial result, and how many it has
    items: torch.Tensor  # (m, 6): first, count (0: no item), row, begin, end, which of its rows' parts this makes
    # Whether items use only half of the device while each row reads its own keys, of which there are far more, at the
    # same time. Constant within a captured step.
    beside: bool

    @classmethod
    def of(cls, numbers: torch.Tensor, rows: int, beside: bool) -> Cascade:
        """Views of ``numbers``, a device copy of ``CascadePlan.padded``."""
        order, skips, parts, items = numbers.split([rows, rows, 2 * rows, len(numbers) - 4 * rows])
        return cls(order, skips, parts.view(rows, 2), items.view(-1, 6), beside)


@dataclass(slots=True)
class AttentionBatch:
    """The input of ``AttentionBackend.plan``: n sequences, t tokens; the first ``num_decodes`` have one query token.

    Query tokens are stored one sequence after another: those of sequence i are rows
    ``query_start[i]:query_start[i + 1]`` of q. They are the *last* tokens of its context: query token j attends to the
    first ``seq_lens[i] - query_len[i] + j + 1`` tokens of the context.
    """

    num_decodes: int
    query_start: torch.Tensor  # (n + 1,) int32, device
    seq_lens: torch.Tensor  # (n,) int32, device: context lengths, this step's tokens included
    block_tables: torch.Tensor  # (n, max_blocks) int32, device; entries past a context are not read (any value)
    slot_mapping: torch.Tensor  # (t,) int64, device: block_id * block_size + offset, where each token's k and v go
    host_query_lens: np.ndarray  # (n,) int32
    host_seq_lens: np.ndarray  # (n,) int32
    host_block_tables: np.ndarray  # (n, max_blocks) int32
    # In a captured step: the padded number of rows (decode-only) or of tokens (with prompts); graphs of the same size
    # may differ in their number of sequences. 0: eager.
    graph_size: int = 0
    graph_whole: bool = False  # in a captured step: only for steps with ``whole_prompts``
    # (r,) int64, device: the row of each sequence's last query token, if only these hidden states are needed; None: all
    # tokens' are. Padding may follow the last sequence; in a captured step r is constant.
    last_tokens: torch.Tensor | None = None
    cascade: Cascade | None = None  # of the decode rows, for a backend that has ``cascade_limits``
    prompt_words: torch.Tensor | None = None  # int32, device: the backend's ``prompt_words``; None: not computed yet

    @property
    def num_seqs(self) -> int:
        return len(self.host_seq_lens)

    @property
    def whole_prompts(self) -> bool:
        """Whether every prompt row starts in this step, so that it attends only to tokens of this step."""
        if self.graph_size:
            return self.graph_whole
        d = self.num_decodes
        return d < self.num_seqs and np.array_equal(self.host_query_lens[d:], self.host_seq_lens[d:])


def captured_batch(
    num_decodes: int, query_start: torch.Tensor, seq_lens: torch.Tensor, block_tables: torch.Tensor,
    slot_mapping: torch.Tensor, **more: Any,
) -> AttentionBatch:  # fmt: skip
    """That of a graph, which reads these tensors. Each step sets the host arrays that its plan needs."""
    query_lens, lens = np.ones((2, len(seq_lens)), dtype=np.int32)
    tables = np.zeros((len(seq_lens), 1), dtype=np.int32)
    return AttentionBatch(
        num_decodes, query_start, seq_lens, block_tables, slot_mapping, query_lens, lens, tables,
        graph_size=len(slot_mapping), **more,
    )  # fmt: skip
