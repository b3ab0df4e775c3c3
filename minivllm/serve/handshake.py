"""What the engine's process and the one that speaks HTTP say to each other before requests, and with signals."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from minivllm.config.engine_config import ModelOptions
    from minivllm.core.model_config import ModelConfig
    from minivllm.serve.engine_client import Limits

CTRL_C = signal.SIGUSR1  # a terminal sends SIGINT to both; the engine's process takes it, and sends this on
INTERRUPTED = 130  # the exit code after Ctrl-C


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """``root`` is where the model came from; ``max_waiting`` None is without limit."""

    model_name: str
    root: str
    api_key: str | None = None
    max_waiting: int | None = None
    tool_call_parser: str = "auto"
    allowed_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Begin:
    """From the engine's process, as soon as the model is found: whose tokenizer to load meanwhile."""

    model: ModelOptions
    path: Path | None
    model_config: ModelConfig
    load_format: str


@dataclass(frozen=True, slots=True)
class Go:
    """From the engine's process: the engine is ready. ``hello`` is said once requests are taken."""

    server: ServerOptions
    limits: Limits
    hello: str
    shutdown_timeout: float  # seconds
    log_requests: bool


@dataclass(frozen=True, slots=True)
class Serving:
    """To the engine's process: requests and signals are taken."""
