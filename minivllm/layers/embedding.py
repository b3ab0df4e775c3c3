"""The embedding and the LM head, with the vocabulary split over the ranks."""

from __future__ import annotations

import torch
from torch import nn

from minivllm.core.parallel import TensorParallel
from minivllm.kernels.embedding import embedding
from minivllm.kernels.linear.packed_linear import packed_linear, use_packed_linear
from minivllm.kernels.linear.packed_weights import PackedWeight
from minivllm.kernels.linear.products import linear
from minivllm.kernels.sampling.draws import GROUP
from minivllm.kernels.sampling.sampling import Shard
from minivllm.layers.parameter import Piece, sharded_parameter
from minivllm.rounding import cdiv


def rank_rows(vocab_size: int, ranks: int) -> tuple[int, bool]:
    """(Vocabulary rows per rank, with padding; whether they are whole groups of tokens.) Whole groups let a rank sample
    from its shard alone; a small vocabulary is split as evenly as possible instead."""
    rows = cdiv(vocab_size, ranks)
    groups = cdiv(rows, GROUP)
    if ranks > 1 and groups * GROUP * (ranks - 1) < vocab_size:  # the last rank gets some
        return groups * GROUP, True
    return rows, False


class _VocabParallel(nn.Module):
    """``weight`` holds rows [first, first + rows) of the vocabulary, padded with zero rows, see ``rank_rows``."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.rows, self.whole_groups = rank_rows(vocab_size, tp.size)
        self.first = min(tp.rank * self.rows, vocab_size)
        held = min(self.rows, vocab_size - self.first)
        piece = Piece((vocab_size, hidden_size), 0, self.first, held)
        self.weight = sharded_parameter((self.rows, hidden_size), {None: piece})


class VocabParallelEmbedding(_VocabParallel):
    """ids (t,) -> (t, hidden)."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__(vocab_size, hidden_size, tp)
        self._embed = self._embed_whole if tp.size == 1 else self._embed_part

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._embed(ids)

    def _embed_whole(self, ids: torch.Tensor) -> torch.Tensor:
        return embedding(ids, self.weight)

    def _embed_part(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self.first
        absent = (local < 0) | (local >= self.rows)
        rows = embedding(local.masked_fill(absent, 0), self.weight)
        return self.tp.all_reduce(rows.masked_fill_(absent.unsqueeze(-1), 0))


class ParallelLMHead(_VocabParallel):
    """hidden (n, hidden) -> logits (n, vocab_size), on every rank. ``packed_weight``: as in ``LinearBase``."""

    packed_weight: PackedWeight | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._product(hidden)  # (n, rows)
        return self.tp.all_gather(logits)[:, : self.vocab_size] if self.tp.size > 1 else logits

    def shard(self, hidden: torch.Tensor) -> tuple[torch.Tensor, Shard] | None:
        """This rank's columns of the logits, (n, rows); None unless they are whole groups."""
        if not self.whole_groups:
            return None
        return self._product(hidden), Shard(self.first, self.vocab_size, self.tp)

    def _product(self, hidden: torch.Tensor) -> torch.Tensor:
        packed, (lines, k) = self.packed_weight, self.weight.shape
        if packed is not None and use_packed_linear(len(hidden), lines, k, hidden.dtype, hidden.device):
            return packed_linear(hidden, packed)
        return linear(hidden, self.weight)

    def tie(self, tokens: VocabParallelEmbedding) -> None:
        """Share the embedding's weight."""
        self.weight = tokens.weight
