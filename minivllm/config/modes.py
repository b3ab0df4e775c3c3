"""Each mode: its frozen options, and the name of the function that runs it, imported lazily."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from minivllm.config import schema
from minivllm.core.lora_request import is_name
from minivllm.core.model_config import FrozenDict
from minivllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from minivllm.core.sampling_params import SamplingParams


def _sampling_params(where: str, **values: Any) -> SamplingParams:
    """``where`` is the prefix of error messages. Raises ConfigError, not RequestError: the values come from the command
    line, for all requests."""
    from minivllm.core.sampling_params import SamplingParams

    try:
        return SamplingParams(**values)
    except RequestError as e:
        raise ConfigError(f"{where}{e}") from e


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    structured_outputs: FrozenDict = field(default_factory=FrozenDict)

    def sampling_params(self, **more: Any) -> SamplingParams:
        """The request's parameters. Raises ConfigError for a value out of range."""
        values = {f.name: getattr(self, f.name) for f in fields(SamplingOptions)}
        return _sampling_params("", **values | {"structured_outputs": self.structured_outputs or None}, **more)


@dataclass(frozen=True, slots=True)
class GenerateOptions(SamplingOptions):
    """``prompts``: strings and tuples of token ids."""

    prompts: tuple[str | tuple[int, ...], ...] = ()
    prompts_file: str | None = None
    output: str | None = None
    max_tokens: int | None = 100
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ChatOptions(SamplingOptions):
    system: str | None = None
    temperature: float = 0.7
    top_p: float = 0.95


@dataclass(frozen=True, slots=True)
class ServeOptions:
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    max_waiting: int | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    allowed_origins: tuple[str, ...] = ()
    shutdown_timeout: float = 30.0
    allow_reload: bool = False
    lora_modules: FrozenDict = field(default_factory=FrozenDict)
    allow_runtime_lora_updating: bool = False
    log_requests: bool = False

    def __post_init__(self) -> None:
        for name, path in self.lora_modules.items():
            if not (is_name(name) and isinstance(path, str) and path):
                raise ConfigError(
                    f"lora_modules: {name!r}: {path!r} is no name with a folder or a repository; type "
                    "'lora_modules={NAME: DIR, NAME: ORG/NAME}'"
                )
        for origin in self.allowed_origins:
            if origin != "*" and not (_address(origin) and urlsplit(origin).path == ""):
                raise ConfigError(
                    f"allowed_origins: {origin!r} is not a web site; type https://example.com, or '*' for any"
                )


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """The requests of a benchmark, or (``host``) the sizes at which the host's part of a step is timed.

    ``input_len`` and ``output_len`` are a number, or the (least, most) of a value drawn for each request.
    """

    name: str
    path: str | None = None
    num_requests: int | None = None
    request_rate: float | None = None
    time_scale: float | None = None
    input_len: int | tuple[int, int] | None = None
    prefix_len: int | None = None
    num_prefixes: int | None = None
    num_adapters: int | None = None
    output_len: int | tuple[int, int] | None = None
    max_token_id: int = 10000
    seed: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: int | None = None
    ignore_eos: bool = True
    running: tuple[int, ...] | None = None
    waiting: int | None = None
    steps: int | None = None

    @property
    def host(self) -> bool:
        """Whether it measures only the host."""
        return self.name == "host"

    def request_fields(self) -> dict[str, Any]:
        """Each request's sampling parameters, as sent to a server."""
        return {name: value for name in _REQUEST if (value := getattr(self, name)) is not None}

    def sampling_params(self, **more: Any) -> SamplingParams:
        """Each request's parameters, except ``max_tokens``. Raises ConfigError for a value out of range."""
        return _sampling_params(f"workload={self.name}: ", **self.request_fields(), **more)

    def __post_init__(self) -> None:
        needed, allowed = _KEYS_OF.get(self.name, _DRAWN)
        for name in dict.fromkeys(key for keys in (*_KEYS_OF.values(), _DRAWN) for part in keys for key in part):
            given = getattr(self, name) is not None
            if given and name not in needed + allowed:
                raise ConfigError(f"workload.{name} is not a key of workload={self.name}; leave it out")
            if not given and name in needed:
                raise ConfigError(f"workload={self.name} lacks workload.{name}; set it")
        for name in ("input_len", "output_len"):
            value = getattr(self, name)
            if value is not None and not _length(value):
                shown = list(value) if isinstance(value, tuple) else value
                raise ConfigError(
                    f"workload.{name}={shown} is neither a whole number from 1 nor [least,most] of them; "
                    f"type workload.{name}=128 or 'workload.{name}=[100,1024]'"
                )
        if self.num_prefixes is not None and self.prefix_len is None:
            raise ConfigError(
                f"workload.num_prefixes={self.num_prefixes} needs workload.prefix_len, the tokens of each; type "
                "workload.prefix_len=2048, or leave workload.num_prefixes out"
            )
        if not self.host:
            self.sampling_params()
        elif not self.ignore_eos:
            raise ConfigError("workload.ignore_eos is not a key of workload=host; leave it out")
        elif not self.running or min(self.running) < 1:
            raise ConfigError(f"workload.running={list(self.running or ())} needs whole numbers from 1: [1,256,1024]")


# Fields that mode=generate has under the same names.
_REQUEST = [f.name for f in fields(WorkloadOptions) if f.name in GenerateOptions.__dataclass_fields__]
_SAMPLING = [name for name in _REQUEST if name not in ("temperature", "ignore_eos")]

# workload -> (required keys, optional keys); its other keys are refused.
_KEYS_OF: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "host": (("input_len", "running", "waiting", "steps"), ()),
    "trace": (("path", "temperature"), ("num_requests", "time_scale", "num_adapters", *_SAMPLING)),
}
_DRAWN: tuple[tuple[str, ...], tuple[str, ...]] = (
    ("num_requests", "input_len", "output_len", "temperature"),
    ("prefix_len", "num_prefixes", "num_adapters", "request_rate", *_SAMPLING),
)


def _length(value: Any) -> bool:
    bounds = value if isinstance(value, tuple) else (value, value)
    return len(bounds) == 2 and all(type(n) is int for n in bounds) and 1 <= bounds[0] <= bounds[1]


@dataclass(frozen=True, slots=True)
class SweepOptions:
    dir: str | None = None
    resume: str | None = None
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """``profile``, ``trace`` and ``timeline`` are ``"false"``, ``"true"`` (``"gpu"``, ``"png"``) or a file name."""

    workload: WorkloadOptions
    repeat: int = 1
    output: str | None = None
    url: str | None = None
    endpoint: str = "completions"
    max_concurrency: int | None = None
    detokenize: bool = False
    profile: str = "false"
    profile_steps: int = 20
    trace: str = "false"
    timeline: str = "false"
    check: bool = False
    sweep: SweepOptions = SweepOptions()

    def __post_init__(self) -> None:
        name = self.workload.name
        if self.check and not self.workload.host:
            raise ConfigError(f"check=true with workload={name}: only workload=host has limits to check")
        if self.url is not None and not _address(self.url):
            raise ConfigError(f"url={self.url} is not a server's address; type url=http://127.0.0.1:8000")
        if self.url is not None and self.workload.host:
            raise ConfigError("url= with workload=host, which asks no server; leave one out")
        if self.url is not None and self.workload.num_adapters is not None:
            raise ConfigError(
                "workload.num_adapters makes adapters for an engine of its own, and url= asks a server; leave one out"
            )
        if self.url is None and self.max_concurrency is not None:
            raise ConfigError(
                f"max_concurrency={self.max_concurrency} is of requests to a server: add url=, or type "
                "scheduler.max_num_seqs"
            )
        if self.url is None and self.endpoint != "completions":
            raise ConfigError(f"endpoint={self.endpoint} is of requests to a server: add url=, or leave it out")
        if self.workload.host or self.url is not None:
            why = "it runs no model" if self.workload.host else "the model runs elsewhere"
            with_ = f"workload={name}" if self.workload.host else "url="
            for key in ("profile", "trace", "timeline", "detokenize"):
                value = getattr(self, key)
                if value not in (False, "false", "gpu"):
                    shown = value if isinstance(value, str) else "true"
                    raise ConfigError(f"{key}={shown} with {with_}: {why}; leave {key} out")
        for key, words, ending in (
            ("profile", ("false", "true", "gpu"), ".json"),
            ("trace", ("false", "true"), ".json"),
            ("timeline", ("false", "true", "png"), ".png"),
        ):
            value = getattr(self, key)
            if value not in words and not value.endswith(ending):
                one_of = " nor ".join(words)
                raise ConfigError(f"{key}={value} is neither {one_of} nor a file whose name ends in {ending}")


def _address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port
        return False
    return bool(whole and not parts.query and not parts.fragment)


ModeOptions = GenerateOptions | ChatOptions | ServeOptions | BenchOptions


@dataclass(frozen=True, slots=True)
class Mode:
    schema: type[schema.EngineSchema]
    options: type[ModeOptions]
    target: str  # "module:function", called with the Composed config
    help: str


MODES: dict[str, Mode] = {
    "generate": Mode(
        schema.GenerateSchema, GenerateOptions, "minivllm.generate:run", "complete prompts (the default mode)"
    ),
    "chat": Mode(schema.ChatSchema, ChatOptions, "minivllm.chat:run", "chat with the model in the terminal"),
    "serve": Mode(schema.ServeSchema, ServeOptions, "minivllm.serve.engine_process:run", "an OpenAI-compatible server"),
    "bench": Mode(
        schema.BenchSchema,
        BenchOptions,
        "minivllm.bench.cli:run",
        "measure speed: one configuration, a sweep, or a running server",
    ),
}
