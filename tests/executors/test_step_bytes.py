"""Steps and results survive the way over shared memory, however large they are and however slow a reader is."""

from __future__ import annotations

import dataclasses
import os
import threading
import time

import msgspec
import numpy as np
import pytest

from minivllm.core.batch import NO_INTS, Batch, Scored, TokenMasks
from minivllm.core.interfaces import Logprobs, StepResult
from minivllm.core.model_config import FrozenDict, frozen
from minivllm.core.sampler import DefaultSampler
from minivllm.executors import messages
from minivllm.executors.ring import SLOTS, Bell, Reader, Ring, Writer, create_memory
from minivllm.executors.step_bytes import (
    pack_batch,
    pack_call,
    pack_masks,
    pack_result,
    unpack_batch,
    unpack_call,
    unpack_masks,
    unpack_profile,
    unpack_result,
)


def random_batch(rng: np.random.Generator, n: int, decodes: int, tokens: int, blocks: int, admitted: int) -> Batch:
    def ints(count: int) -> np.ndarray:
        return rng.integers(0, 2**31 - 1, count).astype(np.int32)

    row = DefaultSampler.row
    lens = rng.integers(0, 30, admitted if n % 2 else 0).astype(np.int32)  # some samplers ask for no tokens
    if not lens.sum():
        lens = lens[:0]
    return Batch(
        step=int(rng.integers(2**40)),
        slots=ints(n),
        generations=rng.integers(0, 2**60, n),
        num_computed=ints(n),
        num_new=ints(n),
        samples=rng.random(n) < 0.5,
        num_decodes=decodes,
        token_ids=ints(tokens),
        block_slots=ints(blocks),
        block_indices=ints(2 * blocks)[::2],  # not contiguous
        block_ids=ints(blocks),
        admitted_slots=ints(admitted),
        admitted_params=np.frombuffer(rng.bytes(row.itemsize * admitted), row),
        known_lens=lens,
        known_ids=ints(int(lens.sum())),
        scored=Scored(ints(admitted), ints(2 * admitted)[::2], ints(tokens), 7) if admitted else None,
        guided=bool(n % 2),
    )


def test_options_are_the_same_in_a_rank_as_in_its_parent() -> None:
    typed = {"a": [1, {"x": [2]}], "b": {"c": ["d"]}}
    here, there = frozen(typed), messages._decode(FrozenDict, msgspec.msgpack.decode(msgspec.msgpack.encode(typed)))
    assert here == there == {"a": (1, {"x": (2,)}), "b": {"c": ("d",)}}
    assert type(there["b"]) is type(here["a"][1]) is FrozenDict


def same(a: object, b: object) -> bool:
    return all(
        np.asarray(getattr(a, f.name)).tobytes() == np.asarray(getattr(b, f.name)).tobytes()
        and np.asarray(getattr(a, f.name)).dtype == np.asarray(getattr(b, f.name)).dtype
        for f in dataclasses.fields(a)  # type: ignore[arg-type]
    )


SHAPES = [(1, 1, 0, 0, 0), (1, 0, 5, 2, 1), (256, 200, 8000, 900, 56), (3, 3, 0, 1, 0), (57, 1, 800, 90, 56)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batch_comes_back_as_it_was(shape: tuple[int, ...]) -> None:
    batch = random_batch(np.random.default_rng(0), *shape)
    back = unpack_batch(bytearray(pack_batch(batch)), DefaultSampler.row)
    plain, plain_back = (dataclasses.replace(one, scored=None) for one in (batch, back))
    assert same(plain, plain_back)
    assert (batch.scored is None) == (back.scored is None) and (back.scored is None or same(batch.scored, back.scored))
    assert unpack_masks(bytearray(pack_batch(batch))) is None
    assert back.slots.flags.writeable


def test_sequences_of_whose_tokens_nobody_asks() -> None:
    batch = dataclasses.replace(
        random_batch(np.random.default_rng(0), 3, 1, 9, 2, 2), known_lens=np.zeros(2, np.int32), known_ids=NO_INTS
    )
    back = unpack_batch(bytearray(pack_batch(batch)), DefaultSampler.row)
    assert not len(back.known_lens) and back.samples.tolist() == batch.samples.tolist()
    assert back.admitted_params.tobytes() == batch.admitted_params.tobytes()


@pytest.mark.parametrize("shape", [(1, 1), (3, 6), (256, 4748)], ids=str)
def test_masks_come_back_as_they_were(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(-(2**31), 2**31, (shape[0], 2 * shape[1])).astype(np.int32)
    masks = TokenMasks(np.arange(shape[0], dtype=np.int32), bits[:, ::2])  # not contiguous
    data = bytearray(pack_masks(masks))
    back = unpack_masks(data)
    assert back is not None and same(masks, back) and back.bits.shape == shape and unpack_profile(data) is None


@pytest.mark.parametrize("argument", ["", "/a folder=/ö\udc80", "weights,kv_cache"])
def test_a_call_comes_back_as_it_was(argument: str) -> None:
    data = bytearray(pack_call("reload_weights", argument))
    assert unpack_call(data) == ("reload_weights", argument)
    assert unpack_masks(data) is None and unpack_profile(data) is None and unpack_call(bytearray(b"\xff" * 8)) is None


def test_parameters_of_another_sampler_are_refused() -> None:
    batch = random_batch(np.random.default_rng(0), 2, 0, 4, 1, 1)
    with pytest.raises(ValueError, match="has 4"):
        unpack_batch(bytearray(pack_batch(batch)), np.dtype([("none", "i4")]))


@pytest.mark.parametrize("rows,k", [(0, 0), (1, 1), (5, 20)])
def test_a_result_comes_back_as_it_was(rows: int, k: int) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(-1, 1000, 7).astype(np.int32)
    logprobs = Logprobs(
        np.arange(rows), rng.random(rows).astype(np.float32), rng.integers(1, 9, rows).astype(np.int32),
        rng.integers(0, 99, (rows, k)).astype(np.int32), rng.random((rows, k)).astype(np.float32),
    )  # fmt: skip
    assert unpack_result(bytearray(pack_result(StepResult(tokens)))).logprobs is None
    back = unpack_result(bytearray(pack_result(StepResult(tokens, logprobs))))
    assert back.token_ids.tolist() == tokens.tolist() and back.logprobs is not None
    assert same(logprobs, back.logprobs) and back.prompt_logprobs is None
    back = unpack_result(bytearray(pack_result(StepResult(tokens, None, logprobs))))
    assert back.prompt_logprobs is not None and same(logprobs, back.prompt_logprobs) and back.logprobs is None


def test_messages_of_any_size_reach_every_reader_in_order() -> None:
    """Longer than a slot, longer than the whole ring, empty; with a reader that dawdles."""
    size, readers, rng = 256, 3, np.random.default_rng(0)
    ring_fd, bells = create_memory(Ring.size(readers, size)), [Bell.create() for _ in range(readers)]
    sent = [rng.bytes(int(n)) for n in (1, 256, 257, 0, 10 * SLOTS * size, *rng.integers(0, 3000, 200))]
    got: list[list[bytes]] = [[] for _ in range(readers)]
    rings = [Ring(os.dup(ring_fd), readers, size) for _ in range(readers)]

    def listen(index: int) -> None:
        reader = Reader(rings[index], index, bells[index])
        while len(got[index]) < len(sent):
            got[index].append(bytes(reader.receive()))
            if index == 1 and len(got[1]) % 20 == 0:
                time.sleep(0.005)

    threads = [threading.Thread(target=listen, args=(i,), daemon=True) for i in range(readers)]
    for thread in threads:
        thread.start()
    ring = Ring(ring_fd, readers, size)
    writer = Writer(ring, bells)
    for i, message in enumerate(sent):
        writer.send(message)
        if i % 50 == 0:
            time.sleep(0.01)  # readers fall asleep
    for thread in threads:
        thread.join(30)
    assert all(messages == sent for messages in got)
    for resource in (ring, *rings, *bells):
        resource.close()


def test_a_full_ring_lets_the_writer_find_out_why() -> None:
    class Gone(Exception):
        pass

    def check() -> None:
        raise Gone

    ring, bell = Ring(create_memory(Ring.size(1, 64)), 1, 64), Bell.create()
    writer = Writer(ring, [bell])
    for _ in range(SLOTS):
        writer.send(b"x", check)
    with pytest.raises(Gone):
        writer.send(b"x", check)
    ring.close()
    bell.close()
