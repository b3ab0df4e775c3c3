"""Messages between the engine's process and the HTTP process before requests, and the meaning of signals."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import msgspec

from minivllm.config.engine_config import ModelOptions
from minivllm.core.lora_request import LoRARequest
from minivllm.core.model_config import ModelConfig
from minivllm.serve.engine_client import Limits

CTRL_C = signal.SIGUSR1  # a terminal sends SIGINT to both; the engine's process handles it and sends this
INTERRUPTED = 130  # the exit code after Ctrl-C


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """``root``: where the model came from. ``max_waiting``: None for no limit. ``adapters``: each with its own name and
    ``lora_int_id``."""

    model_name: str
    root: str
    api_key: str | None = None
    max_waiting: int | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    allowed_origins: tuple[str, ...] = ()
    allow_reload: bool = False
    enable_sleep_mode: bool = False
    adapters: tuple[LoRARequest, ...] = ()
    allow_runtime_lora_updating: bool = False


class Begin(msgspec.Struct, tag=True, frozen=True):
    """From the engine's process, as soon as the model is found: the tokenizer to load meanwhile."""

    model: ModelOptions
    path: Path | None
    model_config: ModelConfig
    load_format: str


class Go(msgspec.Struct, tag=True, frozen=True):
    """From the engine's process: the engine is ready. ``hello`` is printed once requests are accepted."""

    server: ServerOptions
    limits: Limits
    hello: str
    shutdown_timeout: float  # seconds
    log_requests: bool


class Serving(msgspec.Struct, tag=True, frozen=True):
    """To the engine's process: requests and signals are now handled."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """To the engine's process, instead: a minivllm error at startup, as class name and message."""

    error: str
    message: str


Handshake = Begin | Go | Serving | Refused
