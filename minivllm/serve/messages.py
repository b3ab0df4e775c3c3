"""Messages between a server's event loop and its engine, in one process or (``wire``) in two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from minivllm.core.lora_request import LoRARequest
from minivllm.errors import EngineDeadError, MinivllmError, place_of, printable

if TYPE_CHECKING:
    from minivllm.core.outputs import RequestOutput
    from minivllm.core.requests import Prompt
    from minivllm.core.sampling_params import SamplingParams

# --------------------------------------------------------------------------- to the engine


@dataclass(frozen=True, slots=True)
class Add:
    """Requests, accepted all or none; ``arrived``: ``time.perf_counter``, the same clock in all processes."""

    request_ids: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    cache_salt: str | None
    priority: int
    arrived: float
    lora_request: LoRARequest | None = None


class Abort(msgspec.Struct, array_like=True, tag=True, frozen=True):
    request_ids: tuple[str, ...]


class Delivered(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The readers of the oldest ``News`` have its outputs."""


class AskMetrics(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Requests the text of ``/metrics`` for a model of this name."""

    model_name: str


class Reload(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Replace the weights (``LLMEngine.reload_weights``) once no request runs; those not yet begun wait. Or, with
    ``only_checks``, find out at once whether a folder's can be. A ``weights_iterator`` crosses to no other process."""

    number: int
    weights_path: Any = None
    weights_iterator: Any = None
    only_checks: bool = False


class Sleep(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """``LLMEngine.sleep`` once no request runs; those not yet begun wait until it takes requests again."""

    number: int
    level: int


class WakeUp(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """``LLMEngine.wake_up``."""

    number: int
    tags: list[str]


class AddLora(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """``LLMEngine.add_lora``."""

    number: int
    lora_request: LoRARequest


class RemoveLora(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """``LLMEngine.remove_lora``."""

    number: int
    lora_id: int


class ListLoras(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """``LLMEngine.list_loras``."""

    number: int


Change = Reload | Sleep | WakeUp | AddLora | RemoveLora | ListLoras  # each is answered by a ``Changed``
ToEngine = Add | Abort | Delivered | AskMetrics | Change

# --------------------------------------------------------------------------- from the engine


@dataclass(frozen=True, slots=True)
class News:
    """``taken``: the first request of each ``Add`` handled, with the error if it was refused."""

    taken: list[tuple[str, Exception | None]]
    outputs: list[RequestOutput]


@dataclass(frozen=True, slots=True)
class Changed:
    """The answer to the ``Change`` of this number; ``error``: why nothing was done. Whether the engine sleeps now.
    ``value``: what the engine's method returned, a set as a list."""

    number: int
    error: Exception | None
    sleeps: bool
    value: Any = None


class Metrics(msgspec.Struct, array_like=True, tag=True, frozen=True):
    text: bytes


class Died(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The engine's last message: why it died."""

    why: str

    @classmethod
    def of(cls, error: BaseException) -> Died:
        said, kind = printable(str(error)), type(error).__name__
        if isinstance(error, MinivllmError):
            return cls(said or kind)
        return cls(f"{kind}: {said} ({place_of(error)})" if said else f"{kind} ({place_of(error)})")

    def as_error(self) -> EngineDeadError:
        return EngineDeadError(f"the engine has stopped: {self.why}")


FromEngine = News | Metrics | Changed | Died
