"""When a step is launched, on a clock of the test's: with what has come meanwhile, and before the device is idle."""

from __future__ import annotations

import queue
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from minivllm.core.engine import EngineStats
from minivllm.core.sampling_params import SamplingParams
from minivllm.serve import engine_loop
from minivllm.serve.engine_loop import EngineLoop
from minivllm.serve.messages import Add
from minivllm.serve.pace import Pace


class Device:
    """An engine whose steps take ``lengths()`` seconds each, one behind the other, two of them under way, and which
    needs ``host`` seconds to launch one. ``come``: at which times requests do."""

    def __init__(self, steps: int, lengths: Callable[[], float], host: float = 1e-4, kind: str = "a GPU") -> None:
        self.stats, self.now, self.steps, self.lengths, self.host = EngineStats(), 100.0, steps, lengths, host
        self.kind, self.hold_outputs, self.observer = kind, False, None
        self.config = SimpleNamespace(scheduler=SimpleNamespace(max_num_seqs=4))
        self.ends: list[float] = []  # of steps under way
        self.last_end = 0.0
        self.launched: list[tuple[float, int]] = []  # when, with how many requests
        self.requests = 1
        self.idle = self.slept = 0.0  # seconds: of the device between two steps; of the loop before launches
        self.come: list[float] = []
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    takes_requests = True

    @property
    def num_steps_under_way(self) -> int:
        return len(self.ends)

    @property
    def decodes_next(self) -> bool:
        return self.launched[-1][1] == self.requests  # a request's prompt takes one step

    def describe(self) -> dict[str, str]:
        return {"device": self.kind}

    def has_unfinished_requests(self) -> bool:
        return True

    def add_request(self, *args: Any, **options: Any) -> None:
        self.requests += 1

    def step(self) -> list[Any]:
        while len(self.ends) < 2:
            self.spend(self.host)
            self.stats.launch_time += self.host
            self.launched.append((self.now, self.requests))
            begins = max(self.last_end, self.now)
            self.idle += begins - self.last_end if self.last_end else 0.0
            self.last_end = begins + self.lengths()
            self.ends.append(self.last_end)
        end = self.ends.pop(0)
        self.stats.wait_time += max(end - self.now, 0.0)
        self.spend(max(end - self.now, 0.0))
        self.loop.timings.now = self.now
        self.stats.steps += 1
        if self.stats.steps == self.steps:
            self.inbox.put(None)
        return []

    def spend(self, seconds: float) -> None:
        self.now += seconds
        while self.come and self.come[0] <= self.now:
            self.inbox.put(Add(("a",), ([1],), SamplingParams(), None, 0, self.come.pop(0)))

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.spend(seconds)

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = EngineLoop(self, self.inbox, lambda message: None)  # type: ignore[arg-type]
        clock = SimpleNamespace(perf_counter=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(engine_loop, "time", clock)
        self.loop.run()
        assert self.loop.error is None


def test_a_request_that_comes_in_a_step_is_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(100, lambda: 0.010)
    arrivals = [100.0 + 0.010 * k + 0.004 for k in (60, 70, 80)]
    device.come = arrivals.copy()
    device.run(monkeypatch)
    assert device.idle == 0.0
    for number, at in enumerate(arrivals):
        launch = next(launch for launch, requests in device.launched if requests == 2 + number)
        assert 0 < launch - at < 0.001, "not one whole step later"


def test_steps_that_vary_leave_the_device_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each third has prompts; and from the 200th on they are a fifth shorter, as some requests have ended."""
    number = iter(range(1000))
    device = Device(400, lambda: (0.010 if (n := next(number)) % 3 else 0.015) * (1.0 if n < 200 else 0.8))
    device.run(monkeypatch)
    assert device.idle == 0.0


def test_who_is_late_begins_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps become half as long, which nobody knows in time: soon they are launched in time again."""
    number = iter(range(1000))
    device = Device(400, lambda: 0.010 if next(number) < 200 else 0.005)
    device.run(monkeypatch)
    assert 0 < device.idle < 0.010
    launches = [launch for launch, _ in device.launched]
    assert all(b - a == pytest.approx(0.005, abs=1e-3) for a, b in pairwise(launches[220:]))


@pytest.mark.parametrize(
    ("kind", "length", "put_off"), [("a GPU", 0.010, True), ("cpu", 0.010, False), ("a GPU", 0.0006, False)]
)
def test_nothing_is_put_off_where_that_would_take_time(
    kind: str, length: float, put_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's launch is its step; and of a short step there is nothing to wait for."""
    device = Device(100, lambda: length, kind=kind)
    device.run(monkeypatch)
    assert (device.slept > 0) == put_off


def test_only_decodes_are_put_off_and_late() -> None:
    """The device begins with the first kernels of a prompt, however long the host takes to launch all."""
    engine: Any = SimpleNamespace(
        stats=EngineStats(), num_steps_under_way=1, decodes_next=True, describe=lambda: {"device": "a GPU"}
    )
    pace = Pace(engine)
    for n in range(40):
        engine.stats.wait_time += 0.005
        pace.ended(0.010 * n, came=False)
    assert (left := pace.left(0.390)) == pytest.approx(0.0075)
    engine.decodes_next = False
    pace.ended(0.400, came=True)
    assert pace.left(0.400) == 0
    engine.decodes_next = True
    pace.ended(0.410, came=False)
    assert pace.left(0.410) == pytest.approx(left), "nobody was late yet"
    pace.ended(0.420, came=False)
    assert pace.left(0.420) == pytest.approx(0.00625), "half as long before again"
