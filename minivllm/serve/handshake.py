"""What the engine's process and the one that speaks HTTP say to each other before requests, and with signals."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import msgspec

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


class Begin(msgspec.Struct, tag=True, frozen=True):
    """From the engine's process, as soon as the model is found: whose tokenizer to load meanwhile."""

    model: ModelOptions
    path: Path | None
    model_config: ModelConfig
    load_format: str


class Go(msgspec.Struct, tag=True, frozen=True):
    """From the engine's process: the engine is ready. ``hello`` is said once requests are taken."""

    server: ServerOptions
    limits: Limits
    hello: str
    shutdown_timeout: float  # seconds
    log_requests: bool


class Serving(msgspec.Struct, tag=True, frozen=True):
    """To the engine's process: requests and signals are taken."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """To the engine's process, instead: an error of ours at the start, its class's name and what it says."""

    error: str
    message: str


Handshake = Begin | Go | Serving | Refused
