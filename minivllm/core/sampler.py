"""From logits to tokens. Each row depends on its own logits, seed and position, and on nothing else in the batch.

Slot arrays on the device, one row per running sequence and one for padding, owned by the sampler:
# temperature, top_p, min_p float32   top_k int32   seed int64   best int32 (how many top logprobs; -1: no logprobs)
# presence, frequency, repetition float32   min_position int64   suppress (slots, 16) int64
# bias (slots, vocab) float32: added to the logits of biased sequences, zeros for others; allocated when needed
# bits (slots * masks_per_slot, words) int32: allowed next tokens of guided sequences, all ones for others; allocated
#     when needed
# counts (slots, vocab) int16: token counts of penalized sequences (kernels/sampling/adjust_logits.py); made when needed
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import torch

from minivllm.core.batch import mask_words
from minivllm.core.interfaces import DeviceLogprobs, Sampler
from minivllm.core.model_config import FrozenDict
from minivllm.core.sequence import Sequence
from minivllm.errors import RequestError
from minivllm.kernels._triton import next_power_of_2
from minivllm.kernels.sampling.adjust_logits import Adjustments, adjust_logits, count, count_known
from minivllm.kernels.sampling.filters import Filters
from minivllm.kernels.sampling.logprobs import logprobs
from minivllm.kernels.sampling.sampling import Shard, sample_tokens
from minivllm.kernels.sampling.token_masks import mask_tokens
from minivllm.rounding import round_up

_NO_OPTIONS = FrozenDict()
_MAX_SUPPRESSED = 16
_ADJUSTS, _FILTERS, _LOGPROBS, _BIASED, _GUIDED = 1, 2, 4, 8, 16  # flags: what a slot needs


def _penalizes(rows: np.ndarray) -> np.ndarray:
    return (rows["presence"] != 0) | (rows["frequency"] != 0) | (rows["repetition"] != 1)


class Refinement(NamedTuple):
    """What ``DefaultSampler.refine_captured`` does for a batch."""

    draws: bool  # sample again from whole rows: sampling from shards does not apply filters
    adjusts: bool  # penalties, ``min_tokens``, biases
    best: int  # log-probabilities of this many top tokens, and of the sampled one; 0: none
    biased: bool  # ``logit_bias``, ``allowed_token_ids``
    guided: bool  # ``structured_outputs``, ``bad_words``


class DefaultSampler(Sampler):
    """Greedy, temperature, top-k, top-p, min-p, min_tokens, penalties, biases, masks and log-probabilities.

    ``sample`` does greedy, temperature and, unless the logits are sharded, top-k, top-p and min-p. Batches that need
    more are sampled again, in vLLM's order: allowed tokens, biases, masks, min_tokens, penalties, temperature, min-p,
    top-k, top-p. Tokens tied at a filter's threshold are all kept or all removed. Log-probabilities are of the model's
    own distribution, before any of this, as in vLLM.
    """

    takes_biases = takes_masks = masks_drafts = True
    row = np.dtype(
        [
            ("temperature", "<f4"),
            ("top_p", "<f4"),
            ("min_p", "<f4"),
            ("top_k", "<i4"),
            ("logprobs", "<i4"),
            ("min_position", "<i4"),
            ("seed", "<i8"),
            ("presence", "<f4"),
            ("frequency", "<f4"),
            ("repetition", "<f4"),
            ("prompt_len", "<i4"),
            ("suppress", "<i4", (_MAX_SUPPRESSED,)),
            ("allowed", "<i4"),  # number of allowed tokens; 0: all
            ("biased", "<i4"),  # number of biased tokens
            ("guided", "<i4"),  # whether it has a guide
        ]
    )

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, options: FrozenDict = _NO_OPTIONS
    ) -> None:
        self.vocab_size = vocab_size
        self.host = np.zeros(num_slots, dtype=self.row)
        self.host["logprobs"] = -1
        width = round_up(num_slots, 4)  # so that rows are aligned for kernels
        self._words = torch.zeros((5, width), dtype=torch.int32, device=device)[:, :num_slots]  # one write for all
        self.temperature, self.top_p, self.min_p = self._words[:3].view(torch.float32)
        self.top_k, self.best = self._words[3:]
        self.top_p.fill_(1)
        self.best.fill_(-1)
        self.seed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        presence, frequency, repetition = torch.zeros((3, num_slots), dtype=torch.float32, device=device)
        min_position = torch.zeros(num_slots, dtype=torch.int64, device=device)
        suppress = torch.full((num_slots, _MAX_SUPPRESSED), -1, dtype=torch.int64, device=device)
        self.adjustments = Adjustments(presence, frequency, repetition + 1, min_position, suppress)
        self.counts = torch.empty((0, vocab_size), dtype=torch.int16, device=device)
        self.bias = torch.empty((0, vocab_size), dtype=torch.float32, device=device)
        self.bits = torch.empty((0, mask_words(vocab_size)), dtype=torch.int32, device=device)
        self._asks, self._anyone, self._shards = np.zeros(num_slots, dtype=np.uint8), False, False

    @classmethod
    def encode(cls, seq: Sequence, seed: int) -> np.ndarray:
        params, row = seq.params, np.zeros((), dtype=cls.row)
        row["temperature"] = 0.0 if params.greedy else params.temperature
        row["top_p"], row["min_p"], row["top_k"] = params.top_p, params.min_p, min(max(params.top_k, 0), 2**31 - 1)
        row["seed"] = (seed + 2**63) % 2**64 - 2**63
        row["min_position"] = min(seq.prompt_len + params.min_tokens, 2**31 - 1) if params.min_tokens else 0
        row["logprobs"] = -1 if params.logprobs is None else params.logprobs
        row["presence"], row["frequency"] = params.presence_penalty, params.frequency_penalty
        row["repetition"] = min(max(params.repetition_penalty, 1e-30), 1e30)  # what float32 can multiply and divide by
        row["prompt_len"] = seq.prompt_len
        row["suppress"] = -1
        if params.min_tokens:
            if len(seq.held_ids) > _MAX_SUPPRESSED:
                raise RequestError(
                    f"min_tokens={params.min_tokens} with {len(seq.held_ids)} stop and end tokens: at most "
                    f"{_MAX_SUPPRESSED} can be held back; give fewer stop_token_ids or leave min_tokens=0"
                )
            row["suppress"][: len(seq.held_ids)] = seq.held_ids
            if params.allowed_token_ids and set(params.allowed_token_ids) <= set(seq.held_ids):
                raise RequestError(
                    f"allowed_token_ids={params.allowed_token_ids} are stop or end tokens, which "
                    f"min_tokens={params.min_tokens} holds back; allow another, or leave min_tokens=0"
                )
        row["allowed"], row["biased"] = len(params.allowed_token_ids or ()), len(params.logit_bias or ())
        row["guided"] = params.guided
        return row

    @classmethod
    def words(cls, seq: Sequence) -> np.ndarray:
        """The allowed token ids, then the biased token ids, then their biases as float32 bits."""
        allowed, biases = seq.params.allowed_token_ids or [], seq.params.logit_bias or {}
        if not allowed and not biases:
            return super().words(seq)
        ids = np.array([*allowed, *biases], dtype=np.int32)
        return np.concatenate((ids, np.array(list(biases.values()), dtype=np.float32).view(np.int32)))

    @classmethod
    def wants_tokens(cls, seq: Sequence) -> bool:
        assert seq.sampler_row is not None
        return bool(_penalizes(seq.sampler_row))

    def prepare(
        self, slots: np.ndarray, rows: np.ndarray, device_slots: torch.Tensor, device_rows: torch.Tensor
    ) -> None:
        self.host[slots] = rows
        filters = (rows["temperature"] > 0) & ((rows["top_p"] < 1) | (rows["min_p"] > 0) | (rows["top_k"] > 0))
        biased = (rows["allowed"] > 0) | (rows["biased"] > 0)
        guided = rows["guided"] > 0
        adjusts = _penalizes(rows) | (rows["min_position"] > 0) | biased | guided
        adjusted = (self._asks[slots] & _ADJUSTS).any() or adjusts.any()  # whether any of these slots is, or was
        for slot in slots[(self._asks[slots] & _BIASED) > 0].tolist():
            self.bias[slot].zero_()
        if len(self.bits):  # else no guided sequence has sampled yet
            for slot in slots[((self._asks[slots] & _GUIDED) > 0) & ~guided].tolist():
                self.bits[slot * self.masks_per_slot : (slot + 1) * self.masks_per_slot].fill_(-1)
        wants_logprobs = rows["logprobs"] >= 0
        asks = _ADJUSTS * adjusts + _FILTERS * filters + _LOGPROBS * wants_logprobs + _BIASED * biased
        self._asks[slots] = asks + _GUIDED * guided
        self._anyone = bool(self._asks.any())
        self._words.index_copy_(1, device_slots, device_rows[:, :5].T)  # temperature to logprobs
        self.seed.view(torch.int32).view(-1, 2).index_copy_(0, device_slots, self._field(device_rows, "seed"))
        if adjusted:
            for name in ("presence", "frequency", "repetition"):
                of_slots: torch.Tensor = getattr(self.adjustments, name)
                of_slots[device_slots] = self._field(device_rows, name)[:, 0].view(torch.float32)
            self.adjustments.min_position[device_slots] = self._field(device_rows, "min_position")[:, 0].long()
            self.adjustments.suppress[device_slots] = self._field(device_rows, "suppress").long()
            self.counts = self._of_vocabulary(self.counts)
        if biased.any():
            self.bias = self._of_vocabulary(self.bias)

    def _field(self, device_rows: torch.Tensor, name: str) -> torch.Tensor:
        """The int32 words (a, n) of a field of ``row`` in the rows' words (a, words)."""
        assert self.row.fields is not None
        dtype, offset = self.row.fields[name][:2]
        return device_rows[:, offset // 4 : (offset + dtype.itemsize) // 4]

    def _of_vocabulary(self, held: torch.Tensor) -> torch.Tensor:
        """``held``, or zeros (slots, vocab) if it is not allocated yet."""
        return held if len(held) else held.new_zeros((len(self.temperature), self.vocab_size))

    def take_tokens(self, slots: np.ndarray, lens: np.ndarray, ids: torch.Tensor) -> None:
        for slot, sent in zip(slots.tolist(), ids.split(lens.tolist()), strict=True):
            row = self.host[slot]
            allowed, biased, prompt = (int(row[name]) for name in ("allowed", "biased", "prompt_len"))
            words, known = sent[: allowed + 2 * biased], sent[allowed + 2 * biased :]
            if len(words):
                self._set_bias(slot, *words.split((allowed, biased, biased)))
            if len(known):
                count_known(self.counts, slot, known[:prompt], known[prompt:])

    def _set_bias(self, slot: int, allowed: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Fill a row that is all zeros. All int32, the values as float32 bits; ``ids`` are unique."""
        bias = self.bias[slot]
        if len(allowed):
            bias.fill_(-torch.inf)
            bias[allowed.long()] = 0.0
        bias[ids.long()] += values.view(torch.float32)

    def take_masks(self, slots: torch.Tensor, bits: torch.Tensor) -> None:
        if not len(self.bits):
            self.bits = self.bits.new_full((len(self.temperature) * self.masks_per_slot, self.bits.shape[1]), -1)
        self.bits.index_copy_(0, slots, bits)

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._draw(logits, slots, positions)

    def _draw(self, scores: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        filters = Filters(self.top_k, self.top_p, self.min_p)
        return sample_tokens(scores, self.temperature, self.seed, slots, positions, filters=filters)

    def sample_shard(
        self, logits: torch.Tensor, shard: Shard, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        self._shards = True
        return sample_tokens(logits, self.temperature, self.seed, slots, positions, shard)

    def resample(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        scores = adjust_logits(logits, self.counts, self.adjustments, slots, positions)
        tokens = self._draw(scores, slots, positions)
        count(self.counts, self.adjustments, slots, tokens)
        return tokens

    def needs_refine(self, host_slots: np.ndarray) -> bool:
        return bool(self._asked(host_slots) & (_ADJUSTS | _LOGPROBS))

    def refines_shards(self, host_slots: np.ndarray) -> bool:
        return self._asked(host_slots) != 0

    def refinement(self, host_slots: np.ndarray) -> Refinement:
        asked, best = self._asked(host_slots), 0
        if asked & _LOGPROBS:  # rounded up, so that there are few different keys
            best = min(next_power_of_2(max(int(self.host["logprobs"][host_slots].max()), 1)), self.vocab_size)
        adjusts = bool(asked & _ADJUSTS)
        draws = self._shards and not adjusts and bool(asked & _FILTERS)
        return Refinement(draws, adjusts, best, bool(asked & _BIASED), bool(asked & _GUIDED))

    def refine_captured(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, kind: Hashable
    ) -> tuple[torch.Tensor, DeviceLogprobs | None]:
        assert isinstance(kind, Refinement)
        if kind.adjusts:
            scores = logits.float() + self.bias.index_select(0, slots) if kind.biased else logits
            if kind.guided:
                scores = scores if kind.biased else logits.to(torch.float32, copy=True)
                n = self.masks_per_slot
                mask_tokens(scores, self.bits, slots if n == 1 else slots * n + positions % n)
            tokens = self.resample(scores, slots, positions)
        elif kind.draws:
            tokens = self._draw(logits, slots, positions)
        if not kind.best:
            return tokens, None
        sampled, rank, top, top_ids = logprobs(logits, tokens, kind.best, slots, self.best)
        return tokens, DeviceLogprobs(np.arange(len(logits)), sampled, rank, top_ids, top)

    def refine(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor,
        host_slots: np.ndarray,
    ) -> tuple[torch.Tensor, DeviceLogprobs | None]:  # fmt: skip
        return self.refine_captured(logits, slots, positions, tokens, self.refinement(host_slots))

    def launch_all_kinds(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        super().launch_all_kinds(logits, slots, positions)
        scores = logits.to(torch.float32, copy=True)
        if logits.dtype != torch.float32:  # biased logits are float32
            adjust_logits(scores, self.counts, self.adjustments, slots, positions)
        mask_tokens(scores, self.bits.new_zeros((1, self.bits.shape[1])), torch.zeros_like(slots))
        logprobs(logits, slots, 1, slots, slots.int())

    def _asked(self, host_slots: np.ndarray) -> int:
        return int(np.bitwise_or.reduce(self._asks[host_slots])) if self._anyone else 0
