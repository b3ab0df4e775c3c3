"""Health checks of actors: each is polled every second, and counts as lost if it does not answer.

As with processes, silence at startup may be legitimate; then the actor's node is asked whether the process is stopped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from minivllm.executors.messages import Failed, Pulse, Still, decode
from minivllm.executors.processes import STOPPED, process_state
from minivllm.executors.progress import SILENT, START_TIMEOUT, TICK, nobody_moves

_EVERY = 1.0  # seconds between an answer and the next question

Failures = list[tuple[int, Failed | RayError | str]]  # rank, and its own error, Ray's, or ours


@dataclass(slots=True, eq=False)
class Heart:
    """The health of one actor, as the driver knows it."""

    rank: int
    actor: Any
    asked: Any = None  # the pending poll
    ask_at: float = 0.0
    silent: float = 0.0  # seconds, while we were watching
    last: Pulse | None = None
    probe: Any = None  # asks its node's operating system

    def still(self) -> Still:
        if self.last is None:
            return Still("the start of its actor", 0.0)
        return Still(self.last.place.where, self.last.place.seconds + self.silent)

    def where(self) -> str:
        return f"rank {self.rank} in {self.still().where}"


@dataclass(slots=True)
class Hearts:
    """All actors of one engine. ``starting`` until every rank is ready for steps, and while they load weights."""

    actors: list[Any]
    start_timeout: float  # seconds
    starting: bool = True
    hearts: list[Heart] = field(init=False)
    _doing: str = field(init=False, default="startup")
    _began: float = field(init=False, default=0.0)
    _looked: float = field(init=False, default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.hearts = [Heart(rank, actor) for rank, actor in enumerate(self.actors)]

    def begin(self, doing: str) -> None:
        """From now on they do what is watched like a start."""
        self._doing, self._began, self.starting = doing, time.monotonic(), True

    def look(self) -> Failures:
        """The actors that are gone or silent. Does nothing until a tick has passed since the last call."""
        now = time.monotonic()
        if now - self._looked < TICK:
            return []
        # Counted in our own ticks, so that time in which nothing ran (Ctrl-Z, a suspended machine) does not count.
        elapsed, self._looked = min(now - self._looked, 2 * TICK), now
        asked = [heart.asked for heart in self.hearts if heart.asked is not None]
        answered = set(ray.wait(asked, num_returns=len(asked), timeout=0)[0]) if asked else set()
        failures: Failures = []
        for heart in self.hearts:
            if heart.asked in answered:
                try:
                    heart.last = decode(ray.get(heart.asked))  # type: ignore[assignment]
                except RayError as error:
                    failures.append((heart.rank, error))
                heart.asked, heart.ask_at, heart.silent = None, now + _EVERY, 0.0
            elif heart.asked is not None:
                heart.silent += elapsed
                if heart.silent > SILENT and self._is_lost(heart):
                    state = f" (it is {STOPPED})" if self.starting else ""
                    why = f"rank {heart.rank} (a Ray actor) has not answered for {heart.silent:.0f} s{state}"
                    failures.append((heart.rank, why))
            if heart.asked is None and now >= heart.ask_at:
                heart.asked = heart.actor.pulse.remote()
        if self.starting and not failures and (stuck := self._stuck()):
            failures.append((0, stuck))
        return failures

    def _stuck(self) -> str | None:
        """Why to give up startup, if no actor makes progress; before its first answer, Ray is still starting it."""
        for heart in self.hearts:
            if heart.last is None:
                limit = max(self.start_timeout, START_TIMEOUT)
                late = heart.silent > limit
                return f"the actor of rank {heart.rank} did not start in {limit:g} s" if late else None
        took = time.monotonic() - self._began  # an actor that was idle has been at one place for longer
        places = {heart.rank: heart.still() for heart in self.hearts}
        places = {rank: Still(its.where, min(its.seconds, took)) for rank, its in places.items()}
        return nobody_moves(places, self.start_timeout, self._doing)

    def count_nodes(self) -> int:
        return len({heart.last.node for heart in self.hearts if heart.last is not None})

    def _is_lost(self, heart: Heart) -> bool:
        """Whether its silence means that it is lost; at startup, finding out takes several calls."""
        if not self.starting:
            return True
        if heart.last is None:
            return False
        if heart.probe is None:
            on_its_node = NodeAffinitySchedulingStrategy(heart.last.node, soft=False)
            heart.probe = _state.options(scheduling_strategy=on_its_node).remote(heart.last.pid)
        if not ray.wait([heart.probe], timeout=0)[0]:
            return False
        probe, heart.probe = heart.probe, None
        try:
            return ray.get(probe) == STOPPED
        except RayError:
            return False


_state: Any = ray.remote(num_cpus=0, max_retries=0)(process_state)
