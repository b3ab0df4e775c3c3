"""What a server's two processes say to each other arrives, and neither waits for the other."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from minivllm.config.engine_config import ModelOptions
from minivllm.core.model_config import ModelConfig
from minivllm.errors import CheckpointError, EngineDeadError
from minivllm.models.tokenizer import ByteTokenizer
from minivllm.serve.encoding import decode_from_engine, encode_to_engine
from minivllm.serve.engine_client import Limits
from minivllm.serve.engine_process import HttpProcess
from minivllm.serve.handshake import Begin, Go, ServerOptions
from minivllm.serve.http_process import RemoteEngine, serve
from minivllm.serve.messages import AskMetrics, Delivered, Died, Metrics
from minivllm.serve.wire import EngineEnd, Wire


@pytest.fixture
def ends() -> Iterator[tuple[EngineEnd, Wire]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield EngineEnd(Wire(ours)), Wire(theirs)


def test_frames_come_in_pieces(ends: tuple[EngineEnd, Wire]) -> None:
    engine, front = ends
    engine.tell(Metrics(b"x" * 20))
    engine.tell(Died("why"))
    data = front.socket.recv(1000)
    for i in range(len(data)):
        engine.wire.socket.send(data[i : i + 1])
        found = front.receive()
        if found is not None:
            assert decode_from_engine(found) == (Metrics(b"x" * 20) if i < len(data) - 1 else Died("why"))
    assert found is not None


def test_a_reader_that_sleeps_holds_nobody_up_and_misses_nothing(ends: tuple[EngineEnd, Wire]) -> None:
    engine, front = ends
    said = [Metrics(bytes([i]) * 100_000) for i in range(50)]  # more than sockets hold
    began = time.monotonic()
    for message in said:
        engine.tell(message)
    assert engine.wire.unsent and time.monotonic() - began < 2
    heard = []

    def read() -> None:
        while len(heard) < len(said):
            if (data := front.receive()) is None:
                time.sleep(0.001)
            else:
                heard.append(decode_from_engine(data))

    reader = threading.Thread(target=read)
    reader.start()
    engine.finish(20)
    reader.join(20)
    assert heard == said and not engine.wire.unsent


def test_what_fails_at_the_start_of_one_is_raised_by_the_other(ends: tuple[EngineEnd, Wire], tmp_path: Path) -> None:
    engine, front = ends
    shape = {"architectures": ["A"], "vocab_size": 5, "hidden_size": 4, "intermediate_size": 3}
    config = ModelConfig.from_hf(shape | {"num_hidden_layers": 2, "num_attention_heads": 1})
    engine.wire.say(Begin(ModelOptions("checkpoint"), tmp_path, config, "auto"))
    assert serve(front, front.socket) == 1
    parent = object.__new__(HttpProcess)
    parent.engine_end = engine
    with pytest.raises(CheckpointError, match="tokenizer"):
        parent.go(Go(ServerOptions("m", "/"), Limits(1, 1, 1), "", 1.0, False))


def test_who_asks_for_metrics_and_goes_leaves_no_answer_to_the_next(ends: tuple[EngineEnd, Wire]) -> None:
    engine, front = ends

    async def ask() -> bytes:
        client = RemoteEngine(front, ByteTokenizer(256), Limits(1, 1, 1))
        client.start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.metrics("first"), 0.01)
        second = asyncio.ensure_future(client.metrics("second"))
        await asyncio.sleep(0)
        for _ in range(2):
            asked = engine.get(True, 5)
            assert isinstance(asked, AskMetrics)
            engine.tell(Metrics(asked.model_name.encode()))
        answer = await asyncio.wait_for(second, 5)
        last = asyncio.ensure_future(client.metrics("never"))
        await asyncio.sleep(0)
        engine.wire.socket.close()
        with pytest.raises(EngineDeadError, match="its process has ended"):
            await last
        client.stop()
        return answer

    assert asyncio.run(ask()) == b"second"


def test_who_waits_for_metrics_is_told_of_the_end(ends: tuple[EngineEnd, Wire]) -> None:
    engine, front = ends

    async def ask() -> None:
        client = RemoteEngine(front, ByteTokenizer(256), Limits(1, 1, 1))
        client.start()
        asked = asyncio.ensure_future(client.metrics("busy"))
        await asyncio.sleep(0)
        client.end()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await asyncio.wait_for(asked, 5)
        engine.tell(Metrics(b"late"))
        await asyncio.sleep(0.01)
        assert not client._asked, "the late answer is read, and dropped"
        client.stop()

    asyncio.run(ask())


def test_the_end_of_one_is_the_others(ends: tuple[EngineEnd, Wire]) -> None:
    engine, front = ends
    front.send(encode_to_engine(Delivered()))
    front.socket.close()
    assert engine.get(True, 5) == Delivered()
    assert engine.get(True, 5) is None and engine.get(False, 0) is None
    for _ in range(3):
        engine.tell(Metrics(b"x"))
    began = time.monotonic()
    engine.finish(5)
    assert time.monotonic() - began < 1


def test_waiting_ends_with_the_time_or_with_a_message(ends: tuple[EngineEnd, Wire]) -> None:
    engine, front = ends
    began = time.monotonic()
    with pytest.raises(queue.Empty):
        engine.get(True, 0.1)
    assert 0.05 < time.monotonic() - began < 2
    later = threading.Timer(0.1, front.send, [encode_to_engine(Delivered())])
    later.start()
    assert engine.get(True, 20) == Delivered()
    later.join()
