"""What a server's two processes say to each other arrives, and neither waits for the other."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from minivllm import SamplingParams
from minivllm.core.outputs import CompletionOutput, Logprob, RequestOutput
from minivllm.errors import EngineDeadError, RequestError
from minivllm.models.tokenizer import ByteTokenizer
from minivllm.serve.engine_client import Limits
from minivllm.serve.front import RemoteEngine
from minivllm.serve.messages import Abort, Add, AskMetrics, Died, FromEngine, Metrics, News, Told
from minivllm.serve.wire import EngineEnd, Wire, decode_from_engine, encode_from_engine


@pytest.fixture
def ends() -> Iterator[tuple[EngineEnd, Wire]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield EngineEnd(Wire(ours)), Wire(theirs)


def crossed(message: FromEngine) -> FromEngine:
    return decode_from_engine(encode_from_engine(message))


def test_an_output_crosses_without_its_prompt() -> None:
    logprobs = [{3: Logprob(-0.5, 1, "a"), 70000: Logprob(-2.5, 2, None)}, {4: Logprob(float("-inf"), None, "é")}]
    outputs = [
        CompletionOutput(0, "é\n", [3, 4], -3.0, logprobs, "stop", "é"),
        CompletionOutput(1, "", [], None, None, "length", None),
        CompletionOutput(2, "x", [5], None, None, None, 7),
    ]
    plain = RequestOutput("c", "prompt", [5], [CompletionOutput(0, "x", [5])])
    for of_prompt in (None, [None, *logprobs]):
        said = [RequestOutput("b", "prompt", [1, 2], outputs, True, 16, of_prompt), plain]
        bare = [replace(output, prompt=None, prompt_token_ids=[]) for output in said]
        assert crossed(News([("a", None)], said)) == News([("a", None)], bare)
    assert crossed(Metrics(b"\xff# text")) == Metrics(b"\xff# text")
    assert crossed(Died("half \ud800")) == Died("half \\ud800")


def test_an_error_crosses_as_what_it_is() -> None:
    def refused(error: Exception) -> Exception:
        try:
            raise error
        except Exception as raised:
            message = crossed(News([("a", raised)], []))
        assert isinstance(message, News)
        (_, arrived) = message.taken[0]
        assert arrived is not None
        return arrived

    theirs = refused(RequestError("the prompt is empty \udfff"))
    assert type(theirs) is RequestError and str(theirs) == "the prompt is empty \\udfff"
    assert not hasattr(theirs, "__notes__")
    bug = refused(KeyError("a bug"))
    assert type(bug) is KeyError and "in refused" in bug.__notes__[0]
    assert str(refused(UnicodeDecodeError("utf-8", b"", 0, 1, "bad"))).startswith("UnicodeDecodeError: 'utf-8'")

    class Odd(Exception): ...

    assert str(refused(Odd("what"))) == "Odd: what"


def test_what_a_client_can_think_of_arrives(ends: tuple[EngineEnd, Wire]) -> None:
    engine, front = ends
    params = SamplingParams(seed=10**40, top_k=2**80, stop=["\ud800"], logit_bias={5: -1e30}, extra_args={"a": [None]})
    add = Add(("a", "b"), ([1, 2], {"prompt_token_ids": [3]}), params, "salt", -(2**70), 1.5)
    sent = [add, Abort(("a",)), Told(), AskMetrics("é")]
    for message in sent:
        front.send_object(message)
    assert [engine.get(False, 0) for _ in sent] == sent
    with pytest.raises(queue.Empty):
        engine.get(False, 0)


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


def test_the_end_of_one_is_the_others(ends: tuple[EngineEnd, Wire]) -> None:
    engine, front = ends
    front.send_object(Told())
    front.socket.close()
    assert engine.get(True, 5) == Told()
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
    later = threading.Timer(0.1, front.send_object, [Told()])
    later.start()
    assert engine.get(True, 20) == Told()
    later.join()
