"""Serializes steps and their results: a header of counts, then the arrays' raw bytes. No pickle.

# step:   counts (14,) int64 | generations int64 | fourteen int32 arrays | admitted_params | samples bool
# masks:  -2 int64 | counts (2,) int64 | slots int32 | bits int32
# profile: -1 int64, where a step's first count stands | the file's name; without one it is over
# call:   -3 int64 | a method of ``StepTaker``'s | = | its argument
# result: counts (7,) int64 | token_ids int32 | logprobs | prompt_logprobs; each, if there are any: rows int64, sampled
#         f32, rank i32, top_ids i32, top f32
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np

from minivllm.core.batch import NO_INTS, Batch, Scored, TokenMasks
from minivllm.core.interfaces import Logprobs, StepResult

_INT32 = np.dtype(np.int32)
_UNSCORED = Scored(NO_INTS, NO_INTS, NO_INTS, 0)
_PROFILE, _MASKS, _CALL = (np.int64(n).tobytes() for n in (-1, -2, -3))  # which no step starts with


def pack_batch(batch: Batch) -> bytes:
    scored = batch.scored or _UNSCORED
    known_lens = batch.known_lens if len(batch.known_ids) else NO_INTS
    counts = np.array(
        [
            batch.step, len(batch.slots), len(batch.token_ids), len(batch.block_slots), len(batch.admitted_slots),
            batch.num_decodes, batch.admitted_params.dtype.itemsize, len(batch.known_ids),
            len(scored.rows), len(scored.ids), scored.best, batch.guided, len(batch.admitted_adapters),
            batch.num_drafts,
        ],
        dtype=np.int64,
    )  # fmt: skip
    return _joined(
        (
            counts, batch.generations, batch.slots, batch.num_computed, batch.num_new, batch.token_ids,
            batch.block_slots, batch.block_indices, batch.block_ids, batch.admitted_slots, known_lens,
            batch.known_ids, batch.admitted_adapters, scored.rows, scored.lens, scored.ids, batch.admitted_params,
            batch.samples,
        )
    )  # fmt: skip


def pack_profile(file: str) -> bytes:
    """Tell rank 0 to trace the following steps into ``file``; "" stops tracing."""
    return _PROFILE + os.fsencode(file)


def unpack_profile(data: bytearray) -> str | None:
    """``pack_profile``'s file; None: the message is a step."""
    return os.fsdecode(bytes(data.removeprefix(_PROFILE))) if data.startswith(_PROFILE) else None


def pack_call(method: str, argument: str) -> bytes:
    """Have the ranks ``StepTaker.call`` this, between steps."""
    return _CALL + os.fsencode(f"{method}={argument}")


def unpack_call(data: bytearray) -> tuple[str, str] | None:
    """``pack_call``'s arguments; None: the message is another."""
    if not data.startswith(_CALL):
        return None
    method, _, argument = os.fsdecode(bytes(data.removeprefix(_CALL))).partition("=")
    return method, argument


def pack_masks(masks: TokenMasks) -> bytes:
    return _joined((np.frombuffer(_MASKS, dtype=np.int64), np.array(masks.bits.shape), masks.slots, masks.bits))


def unpack_masks(data: bytearray) -> TokenMasks | None:
    """``pack_masks``'s masks, as views of ``data``; None: the message is a step."""
    if not data.startswith(_MASKS):
        return None
    take = _Taker(data)
    _, m, words = take(3, np.int64).tolist()
    return TokenMasks(take(m), take(m * words).reshape(m, words))


def unpack_batch(data: bytearray, row: np.dtype) -> Batch:
    """The batch, as views of ``data``. ``row``: the sampler's row dtype."""
    take = _Taker(data)
    step, n, t, b, a, num_decodes, itemsize, known, s, ids, best, guided, adapters, drafts = take(14, np.int64).tolist()
    if itemsize != row.itemsize:
        raise ValueError(f"a step with sampling parameters of {itemsize} bytes, where this rank has {row.itemsize}")
    return Batch(  # taken in the order in which they were packed
        step=step, num_decodes=num_decodes, guided=bool(guided), num_drafts=drafts,
        generations=take(n, np.int64), slots=take(n), num_computed=take(n), num_new=take(n), token_ids=take(t),
        block_slots=take(b), block_indices=take(b), block_ids=take(b), admitted_slots=take(a),
        known_lens=take(a if known else 0), known_ids=take(known), admitted_adapters=take(adapters),
        scored=Scored(take(s), take(s), take(ids), best) if s else None,
        admitted_params=take(a, row), samples=take(n, np.bool_),
    )  # fmt: skip


def pack_result(result: StepResult) -> bytes:
    counts, arrays = [len(result.token_ids)], [result.token_ids]
    for lp in (result.logprobs, result.prompt_logprobs):
        counts += [lp is not None, *(lp.top.shape if lp is not None else (0, 0))]
        if lp is not None:
            arrays += [
                lp.rows.astype(np.int64), lp.sampled.astype(np.float32), lp.rank.astype(np.int32),
                lp.top_ids.astype(np.int32), lp.top.astype(np.float32),
            ]  # fmt: skip
    return _joined([np.array(counts, dtype=np.int64), *arrays])


def unpack_result(data: bytearray) -> StepResult:
    take = _Taker(data)
    n, *counts = take(7, np.int64).tolist()
    return StepResult(take(n), _take_logprobs(take, *counts[:3]), _take_logprobs(take, *counts[3:]))


def _take_logprobs(take: _Taker, there: int, m: int, k: int) -> Logprobs | None:
    if not there:
        return None
    rows, sampled, rank = take(m, np.int64), take(m, np.float32), take(m)
    return Logprobs(rows, sampled, rank, take(m * k).reshape(m, k), take(m * k, np.float32).reshape(m, k))


class _Taker:
    """Reads arrays from the front of a buffer, one after another."""

    def __init__(self, data: bytearray) -> None:
        self.data, self.at = data, 0

    def __call__(self, count: int, dtype: np.dtype | type = _INT32) -> np.ndarray:
        dtype = np.dtype(dtype)
        if not count:
            return np.empty(0, dtype)
        array = np.frombuffer(self.data, dtype, count, self.at)
        self.at += array.nbytes
        return array


def _joined(arrays: Iterable[np.ndarray]) -> bytes:
    return b"".join([np.ascontiguousarray(array).data for array in arrays])
