"""What a server's event loop and its engine say to each other, in one process or (``wire``) in two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm.errors import EngineDeadError

if TYPE_CHECKING:
    from minivllm.core.outputs import RequestOutput
    from minivllm.core.requests import Prompt
    from minivllm.core.sampling_params import SamplingParams

# --------------------------------------------------------------------------- to the engine


@dataclass(frozen=True, slots=True)
class Add:
    """Requests, all or none; ``arrived`` by ``time.perf_counter``, which all processes of a machine share."""

    request_ids: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    cache_salt: str | None
    priority: int
    arrived: float


@dataclass(frozen=True, slots=True)
class Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """Those whom one ``News`` was for have been told of it."""


@dataclass(frozen=True, slots=True)
class AskMetrics:
    """For what ``/metrics`` shows of a model of this name."""

    model_name: str


ToEngine = Add | Abort | Told | AskMetrics

# --------------------------------------------------------------------------- from the engine


@dataclass(frozen=True, slots=True)
class News:
    """``taken``: the first request of each ``Add``, and why it was refused, if it was."""

    taken: list[tuple[str, Exception | None]]
    outputs: list[RequestOutput]


@dataclass(frozen=True, slots=True)
class Metrics:
    text: bytes


@dataclass(frozen=True, slots=True)
class Died:
    """The engine's last words."""

    why: str

    @classmethod
    def of(cls, error: BaseException) -> Died:
        return cls(str(error) or type(error).__name__)

    def as_error(self) -> EngineDeadError:
        return EngineDeadError(f"the engine has stopped: {self.why}")


FromEngine = News | Metrics | Died
