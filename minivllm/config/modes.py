"""What each mode is: its keys, frozen, and the function that runs it, named and imported only then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm.config import schema
from minivllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from minivllm.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def sampling_params(self, **more: Any) -> SamplingParams:
        """The request's parameters. Raises ConfigError for a value out of range."""
        from minivllm.core.sampling_params import SamplingParams

        try:
            return SamplingParams(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                stop=list(self.stop),
                stop_token_ids=list(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                min_tokens=self.min_tokens,
                **more,
            )
        except RequestError as e:  # typed once for all requests: the command line is wrong, not one request
            raise ConfigError(str(e)) from e


@dataclass(frozen=True, slots=True)
class GenerateOptions(SamplingOptions):
    """``prompts`` holds strings and tuples of token ids."""

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
    pass


@dataclass(frozen=True, slots=True)
class BenchOptions:
    pass


ModeOptions = GenerateOptions | ChatOptions | ServeOptions | BenchOptions


@dataclass(frozen=True, slots=True)
class Mode:
    schema: type[schema.EngineSchema]
    options: type[ModeOptions]
    target: str  # "module:function", called with the Composed config
    help: str


MODES: dict[str, Mode] = {
    "generate": Mode(
        schema.GenerateSchema, GenerateOptions, "minivllm.generate:run", "complete prompts (what runs without a mode)"
    ),
    "chat": Mode(schema.ChatSchema, ChatOptions, "minivllm.chat:run", "talk with the model, in the terminal"),
    "serve": Mode(schema.ServeSchema, ServeOptions, "minivllm.serve.cli:run", "an OpenAI-compatible server"),
    "bench": Mode(schema.BenchSchema, BenchOptions, "minivllm.bench.cli:run", "measure"),
}
