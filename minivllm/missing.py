"""Names of vLLM that do not exist here, each with what to do instead. Imports nothing heavy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from minivllm.errors import RequestError, shown
from minivllm.naming import did_you_mean

_GENERATES = "models here generate text"
_SERVES = "`minivllm serve` starts a server, and in a program of your own LLMEngine takes requests while others run"

# Names in vllm, vllm.sampling_params, vllm.inputs and vllm.outputs.
_NAMES: dict[str, str] = {
    "AsyncEngineArgs": _SERVES,
    "AsyncLLMEngine": _SERVES,
    "BeamSearchParams": "SamplingParams(n=...) draws several answers",
    "EngineArgs": "give LLM(...) the same keywords; its llm_engine is the engine",
    "GuidedDecodingParams": "use SamplingParams(structured_outputs=StructuredOutputsParams(...))",
    "ModelRegistry": "a model is a plugin: `minivllm plugins new NAME --kind model` writes one",
    "initialize_ray_cluster": "LLM(..., distributed_executor_backend='ray') does it",
} | dict.fromkeys(
    (
        "ClassificationOutput", "ClassificationRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput",
        "PoolingOutput", "PoolingParams", "PoolingRequestOutput", "ScoringOutput", "ScoringRequestOutput",
    ),
    _GENERATES,
)  # fmt: skip

# Methods of vllm.LLM and of its LLMEngine.
_METHODS: dict[str, str] = {
    "apply_model": "a model of your own is a plugin: `minivllm plugins new NAME --kind model` writes one",
    "beam_search": "generate with SamplingParams(n=...) draws several answers",
    "collective_rpc": "reload_weights replaces weights; for more, an executor of your own is a plugin: `minivllm "
    "plugins new NAME --kind executor` writes one",
    "get_metrics": "llm.engine.stats counts tokens and steps",
    "reset_mm_cache": "there are no multimodal models",
    "set_tokenizer": "give LLM(..., tokenizer=...) a folder or a repository",
    "start_profile": "`minivllm bench profile=true` profiles",
    "stop_profile": "`minivllm bench profile=true` profiles",
} | dict.fromkeys(("classify", "embed", "encode", "reward", "score"), _GENERATES)
_METHODS |= dict.fromkeys(
    ("finish_weight_update", "init_weight_transfer_engine", "start_weight_update", "update_weights"),
    "reload_weights(weights_iterator=...), or (weights_path=...) of a saved checkpoint, replaces weights",
)


# Other members of vLLM's LLMEngine, and of its ModelConfig.
_OF_ENGINE: dict[str, str] = {
    "cache_config": "llm_engine.config.cache has the settings",
    "do_log_stats": "llm_engine.stats counts tokens and steps",
    "engine_core": "the engine runs in this process; llm_engine.step() is a step",
    "input_processor": "llm_engine.add_request takes text, too",
    "model_executor": "llm_engine.executor is the executor",
    "parallel_config": "llm_engine.config.tp is the number of ranks",
    "scheduler_config": "llm_engine.config.scheduler has the settings",
    "vllm_config": "llm_engine.config has the settings, and llm_engine.model_config the model's",
}
_OF_MODEL: dict[str, str] = {
    "get_head_size": "model_config.head_dim has it",
    "get_hidden_size": "model_config.hidden_size has it",
    "get_vocab_size": "model_config.vocab_size has it",
    "max_model_len": "llm_engine.max_model_len has it",
    "model": "llm_engine.config.model names it",
    "tokenizer": "llm_engine.get_tokenizer() returns it",
}
_MEMBERS = {"LLM": _METHODS, "LLMEngine": _METHODS | _OF_ENGINE, "ModelConfig": _OF_MODEL}


def missing_name(module: str, name: str) -> Exception:
    """What a module's ``__getattr__`` raises; for a name of vLLM's an ImportError, as ``from … import`` replaces an
    AttributeError's message by its own."""
    if name in _NAMES:
        return ImportError(f"{name} of vLLM is not supported: {_NAMES[name]}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def missing_method(owner: object, name: str) -> AttributeError:
    """What the ``__getattr__`` of an LLM, an LLMEngine or a ModelConfig raises."""
    kind = type(owner).__name__
    instead = next((_MEMBERS[c.__name__] for c in type(owner).__mro__ if c.__name__ in _MEMBERS), {}).get(name)
    if instead is not None:
        return AttributeError(f"{kind}.{name} of vLLM is not supported: {instead}")
    return AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)


def refuse(
    given: Mapping[str, Any],
    neutral: Mapping[str, Any],
    instead: Mapping[str, str] | None = None,
    of: Callable[..., Any] | None = None,
) -> None:
    """Raises RequestError for an argument that is not supported, TypeError for one that vLLM does not have either.

    ``neutral``: vLLM's arguments, each with the value that changes nothing here; nor do None and lists of None.
    ``instead``: for some arguments of either kind, what to do instead. ``of``: who takes the arguments.
    """
    instead = instead or {}
    for name, value in given.items():
        if name not in neutral:
            meant = did_you_mean(name, [*(inspect.signature(of).parameters if of else ()), *neutral])
            what = f"; {instead[name]}" if name in instead else f".{meant}" if meant else ""
            raise TypeError(f"there is no argument {name!r}{what}")
        if value is None or (isinstance(value, list | tuple) and all(one is None for one in value)):
            continue
        if neutral[name] is None or value != neutral[name]:
            raise RequestError(f"{name}={shown(value)} is not supported; {instead.get(name, 'leave it out')}")
