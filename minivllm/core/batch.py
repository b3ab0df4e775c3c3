"""One step as data: what the scheduler decides, and what the attention backends are told of it.

``Batch`` crosses rooms (and processes): numpy arrays only. ``AttentionBatch`` is made from it on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

NO_INTS = np.empty(0, dtype=np.int32)
NO_INTS.flags.writeable = False  # everybody's


@dataclass(frozen=True, slots=True)
class Scored:
    """The tokens of prompts whose log-probabilities a step is to find, one row after another. Each row's are those that
    stand behind its first ones: a token's come from the one before it."""

    rows: np.ndarray  # (s,) int32: rows of the batch
    lens: np.ndarray  # (s,) int32: how many tokens of each
    ids: np.ndarray  # (sum of lens,) int32
    best: int  # so many of the best tokens, too, at each place

    def places(self, batch: Batch) -> np.ndarray:
        """(len(ids),) int64: the tokens of the batch from which they come."""
        starts = np.cumsum(batch.num_new, dtype=np.int64) - batch.num_new
        before = np.cumsum(self.lens) - self.lens
        return np.repeat(starts[self.rows] - before, self.lens) + np.arange(len(self.ids))


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens a step may sample for sequences that have a guide: of those slots where that is not as before."""

    slots: np.ndarray  # (m,) int32
    bits: np.ndarray  # (m, mask_words) int32: bit t % 32 of word t // 32 is 1 where token t may come


def mask_words(vocab_size: int) -> int:
    """Of one row of ``TokenMasks.bits``."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step. Rows are sequences: decodes first, then prompt chunks, in the scheduler's order.

    n rows, t tokens. A decode row has one new token, which the device already holds (it sampled it); the tokens of
    prompt chunks travel in ``token_ids``.
    """

    step: int
    slots: np.ndarray  # (n,) int32: each row's slot
    generations: np.ndarray  # (n,) int64: the slot's generation; a row whose slot has moved on is dropped at commit
    num_computed: np.ndarray  # (n,) int32: tokens of the row whose keys and values are in the cache before this step
    num_new: np.ndarray  # (n,) int32: tokens of the row that this step computes
    samples: np.ndarray  # (n,) bool: whether the row's last token is its newest, so that a next one is sampled
    num_decodes: int  # rows [0, num_decodes) are decodes
    token_ids: np.ndarray  # int32: the new tokens of the prompt rows, one row after another
    block_slots: np.ndarray  # (b,) int32 ┐ block tables' new entries:
    block_indices: np.ndarray  # (b,) int32 │ table[block_slots, block_indices] = block_ids
    block_ids: np.ndarray  # (b,) int32 ┘
    admitted_slots: np.ndarray  # (a,) int32: slots that start a sequence in this step
    admitted_params: np.ndarray  # (a,) of Sampler.row: their sampling parameters
    # Tokens of those whose sampler asks, one sequence after another, int32; (a,) int32 how many of each: none if none.
    known_ids: np.ndarray = field(default_factory=lambda: NO_INTS)
    known_lens: np.ndarray = field(default_factory=lambda: NO_INTS)
    scored: Scored | None = None
    # Whether it samples for sequences that have a guide, and so not before ``Executor.guide``. The engine says so.
    guided: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + len(self.token_ids)

    def apart(self) -> tuple[Batch, Batch]:
        """The decodes, with all new blocks, and the prompts, with all admissions, as two batches to launch in turn.

        In this order: a prompt may share a block that a decode of the same step completes.
        """
        d = self.num_decodes

        def rows(some: slice) -> dict[str, Any]:
            return {n: getattr(self, n)[some] for n in ("slots", "generations", "num_computed", "num_new", "samples")}

        decodes = replace(
            self, **rows(slice(d)), token_ids=NO_INTS, admitted_slots=NO_INTS,
            admitted_params=self.admitted_params[:0], known_ids=NO_INTS, known_lens=NO_INTS,
        )  # fmt: skip
        prompts = replace(
            self, **rows(slice(d, None)), num_decodes=0, block_slots=NO_INTS, block_indices=NO_INTS, block_ids=NO_INTS
        )
        return decodes, prompts


@dataclass(frozen=True, slots=True)
class Cascade:
    """What decode rows share and read once, see ``core/cascade.py``: int32, device.

    An item is one piece of work: ``count`` rows, those from ``order[first]`` on, attend to the keys [begin, end) that
    they have in common (``block_tables[row]`` says where these are). It leaves one partial result a row; those of row r
    are the ``parts[r, 1]`` from ``parts[r, 0]`` on.
    """

    order: torch.Tensor  # (n,): the decode rows, those with common prefixes side by side
    skips: torch.Tensor  # (n,): first blocks of each row's context that items read
    parts: torch.Tensor  # (n, 2): where each row's parts begin, and how many there are
    items: torch.Tensor  # (m, 6): first, count (0: no item), row, begin, end, which of its rows' parts this makes
    # Whether items leave half of the device to what rows read alone, at the same time: that is far more. A constant of
    # a captured step.
    beside: bool

    @classmethod
    def of(cls, numbers: torch.Tensor, rows: int, beside: bool) -> Cascade:
        """Views of ``CascadePlan.padded``'s, on the device."""
        order, skips, parts, items = numbers.split([rows, rows, 2 * rows, len(numbers) - 4 * rows])
        return cls(order, skips, parts.view(rows, 2), items.view(-1, 6), beside)


@dataclass(slots=True)
class AttentionBatch:
    """What a backend plans from. n sequences, t tokens; the first ``num_decodes`` sequences have one query token.

    Query tokens lie one sequence after another: sequence i's are rows ``query_start[i]:query_start[i + 1]`` of q, and
    they are the *last* tokens of its context: query token j of sequence i sees the first
    ``seq_lens[i] - query_len[i] + j + 1`` tokens of the context.
    """

    num_decodes: int
    query_start: torch.Tensor  # (n + 1,) int32, device
    seq_lens: torch.Tensor  # (n,) int32, device: context lengths, this step's tokens included
    block_tables: torch.Tensor  # (n, max_blocks) int32, device; entries past a context are not read (any value)
    slot_mapping: torch.Tensor  # (t,) int64, device: block_id * block_size + offset, where each token's k and v go
    host_query_lens: np.ndarray  # (n,) int32
    host_seq_lens: np.ndarray  # (n,) int32
    host_block_tables: np.ndarray  # (n, max_blocks) int32
    # Captured: rows of a decode batch, or tokens of one with prompts, padded; several graphs of a size may differ in
    # their number of sequences. 0: eager.
    graph_size: int = 0
    graph_whole: bool = False  # captured: for steps of ``whole_prompts`` only
    # (r,) int64, device: the row of each sequence's last query token, where no other's hidden state is asked for;
    # None: every token's is. Behind the last sequence there may be padding; captured, r is a constant.
    last_tokens: torch.Tensor | None = None
    cascade: Cascade | None = None  # of the decode rows, for a backend that has ``cascade_limits``
    prompt_words: torch.Tensor | None = None  # int32, device: the backend's ``prompt_words``; None: it has to make them

    @property
    def num_seqs(self) -> int:
        return len(self.host_seq_lens)

    @property
    def whole_prompts(self) -> bool:
        """Whether every prompt row starts in this step: it sees the step's own tokens, and none before."""
        if self.graph_size:
            return self.graph_whole
        d = self.num_decodes
        return d < self.num_seqs and np.array_equal(self.host_query_lens[d:], self.host_seq_lens[d:])
