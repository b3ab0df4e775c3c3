"""Turns ``key=value`` overrides and Hydra's groups into a frozen ``EngineConfig``; the only place that does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from minivllm.config.engine_config import EngineConfig
from minivllm.config.hydra_tree import compose_tree
from minivllm.config.keys import keys_of, spelled
from minivllm.config.modes import MODES, ModeOptions
from minivllm.config.overrides import (
    Override,
    check_group,
    check_key,
    group_options,
    groups_of,
    model_keys,
    quote,
    tokenizer_source,
)
from minivllm.config.schema import EngineSchema
from minivllm.config.settle import (
    check_lora,
    check_ranges,
    check_scheduler,
    freeze,
    plain,
    settle_components,
    settle_mode,
    settle_model,
)
from minivllm.config.vllm_names import (
    ATTENTION,
    CACHE_DTYPES,
    DTYPES,
    EXECUTORS,
    LOAD_FORMATS,
    NEGATED,
    SAME_NAMES,
    VLLM_NAMES,
    check_neutral,
    speculative_keys,
)
from minivllm.core.sampling_params import SamplingParams
from minivllm.errors import ConfigError, shown
from minivllm.naming import did_you_mean, listing
from minivllm.plugins.registry import Registry
from minivllm.plugins.types import CONFIG_GROUPS


@dataclass(frozen=True, slots=True)
class Composed:
    """The configuration of one command line or call."""

    engine: EngineConfig
    mode: str
    options: ModeOptions
    overrides: tuple[str, ...] = ()

    @property
    def speaks(self) -> bool:
        """Whether this process prints and writes output: under torchrun, where all do the same work, only the first."""
        return self.engine.executor.name != "torchrun" or os.environ.get("RANK", "0") == "0"

    def to_yaml(self) -> str:
        """The whole configuration as YAML, with the keys that a user may type."""
        import yaml

        tree = {"mode": self.mode, **plain(self.engine), **plain(self.options)}
        del tree["draft_model"]  # scheduler.draft_model says it
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def compose(overrides: Sequence[str], registry: Registry, *, mode: str | None = None) -> Composed:
    """Compose ``key=value`` overrides with the groups' options.

    Args:
        overrides: as typed on the command line; later ones win.
        registry: the plugins whose components and options may be named.
        mode: the mode unless an override says ``mode=``; ``""`` refuses the keys of every mode.

    Raises:
        ConfigError: an override is invalid; the message names the value and what is allowed.
        PluginError: a plugin's option does not fit the schema.
    """
    asked = [Override.parse(text) for text in overrides]
    engine_only = mode == ""
    chosen = next((o.value for o in reversed(asked) if o.key == "mode"), mode or "generate")
    if chosen not in MODES:
        raise ConfigError(
            f"mode={chosen}: there is no such mode.{did_you_mean(chosen, MODES)} Allowed: {listing(sorted(MODES))}"
        )
    schema = MODES[chosen].schema
    groups = groups_of(schema)
    keys = keys_of(EngineSchema if engine_only else schema)
    del keys["mode"]
    final: dict[str, str] = {}  # for Hydra: each key's last override
    for override in asked:
        if engine_only and override.key == "mode":
            raise ConfigError(f"{override.text}: an engine has no mode; leave it out")
        final.pop(override.key, None)
        if override.key in groups:
            final[override.key] = check_group(override, registry)
        else:
            final[override.key] = check_key(override, keys, chosen, engine_only)
    if "model" not in final and {"model.path", "model.repo"} & final.keys():
        final["model"] = "model=checkpoint"
    final["mode"] = f"mode={chosen}"
    tree = compose_tree(final, schema, registry)
    check_ranges(tree, keys)
    settle_model(tree, final)
    tree.model.tokenizer = tokenizer_source(tree.model.tokenizer, registry)
    settle_components(tree, registry)
    check_scheduler(tree.scheduler)
    engine = _with_draft_model(freeze(tree, EngineConfig), registry)
    options = freeze(settle_mode(tree), MODES[chosen].options)
    return Composed(engine, chosen, options, tuple(o.text for o in asked))


def _with_draft_model(engine: EngineConfig, registry: Registry) -> EngineConfig:
    """With what ``scheduler.draft_model`` names, if anything. Raises ConfigError."""
    if (name := engine.scheduler.draft_model) is None:
        return engine
    ((key, value),) = model_keys(name, registry, "scheduler.draft_model").items()
    allowed = [option for option in group_options("model", registry) if option != "checkpoint"]  # which names none
    if key == "model" and value not in allowed:
        raise ConfigError(
            f"scheduler.draft_model={name}: there is no such model.{did_you_mean(name, allowed)} Allowed: "
            f"{listing(sorted(allowed))}, a folder, or a repository's ORG/NAME"
        )
    typed = [f"{key}={_literal(value, key)}", f"load_format={engine.load_format}"]
    draft_model = compose(typed, registry, mode="").engine.model
    if key == "model.path" and draft_model.path is not None:  # absolute, as printed configs are used elsewhere
        engine = replace(engine, scheduler=replace(engine.scheduler, draft_model=draft_model.path))
    return replace(engine, draft_model=draft_model)


def compose_engine_config(
    model: str | os.PathLike[str] = "demo",
    *,
    attention: str = "auto",
    tp: int = 1,
    device: Any = "auto",
    dtype: Any = "auto",
    overrides: Sequence[str] | None = None,
    registry: Registry | None = None,
    **kwargs: Any,
) -> EngineConfig:
    """The config of ``LLM(model, ...)``: an option's name, a folder or a Hub repository, and vLLM's keywords.

    ``overrides`` are applied last and win over keywords. ``registry`` defaults to this process's.

    Raises:
        ConfigError: an unknown keyword, key or name, or an invalid value.
    """
    if registry is None:
        from minivllm.plugins.manager import default_registry

        registry = default_registry()
    last = _overrides(overrides)
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model={model!r} is not an option's name, a folder or a Hub repository")
    asked = model_keys(os.fspath(model), registry)
    device, dtype = (value if value is not None else "auto" for value in (device, dtype))
    dtype = str(dtype).removeprefix("torch.")
    for key, value, default in (
        ("attention", attention, "auto"),
        ("tp", tp, 1),
        ("device", str(device), "auto"),
        ("dtype", DTYPES.get(dtype, dtype), "auto"),
    ):
        if value != default:
            asked[key] = value
    max_cpu_loras = kwargs.pop("max_cpu_loras", None)
    _add_keywords(asked, kwargs)
    typed = [f"{key}={_literal(value, key)}" for key, value in asked.items()]
    engine = compose([*typed, *last], registry, mode="").engine
    check_lora(engine, max_cpu_loras)
    return engine


def _add_keywords(asked: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Add to ``asked``, values by key, what ``vllm.LLM``'s keywords ask for. Raises ConfigError for an unknown one, or
    one that contradicts what is asked already."""
    if (speculation := kwargs.pop("speculative_config", None)) is not None:
        asked |= speculative_keys(speculation)
    for name, value in kwargs.items():
        if check_neutral(name, value):
            continue
        target = (VLLM_NAMES | NEGATED).get(name, name if name in SAME_NAMES else None)
        if target is None:
            raise ConfigError(_unknown_keyword(name, value))
        if value is None or (value := _value_here(name, value)) is None:
            continue
        if target in asked and asked[target] != value:
            raise ConfigError(f"{name}={value!r} contradicts {target}={asked[target]!r}; leave one out")
        asked[target] = value


def _overrides(given: Any) -> list[str]:
    if given is None:
        return []
    if isinstance(given, str):
        raise ConfigError(f"overrides={given!r} is one string; it takes a list: overrides=[{given!r}]")
    if isinstance(given, Mapping):
        typed = [f"{key}={_literal(value, str(key))}" for key, value in given.items()]
        raise ConfigError(f"overrides={shown(given)} is a mapping; it takes a list: overrides={shown(typed)}")
    if not isinstance(given, Iterable):
        raise ConfigError(f"overrides={shown(given)} is not a list; type overrides=['KEY=VALUE']")
    listed = list(given)
    for one in listed:
        if not isinstance(one, str):
            raise ConfigError(f"overrides has {shown(one)} in it, which is not a string; type overrides=['KEY=VALUE']")
    return listed


def _value_here(name: str, value: Any) -> Any:
    """The equivalent here of a ``vllm.LLM`` keyword's value."""
    if name == "kv_cache_dtype":
        return _renamed(CACHE_DTYPES, value)
    if name == "load_format":
        return _renamed(LOAD_FORMATS, value)
    if name == "max_model_len" and value in (-1, "auto"):  # the model's limit
        return None
    if name in NEGATED:
        return not value
    if name == "attention_backend":
        value = value.name if isinstance(value, Enum) else value
        return ATTENTION.get(value.upper(), value) if isinstance(value, str) else value
    if name == "distributed_executor_backend":
        if not isinstance(value, str) or value not in EXECUTORS:
            raise ConfigError(f"{name}={value!r}: there is no such executor. Allowed: {listing(sorted(EXECUTORS))}")
        return EXECUTORS[value]
    return value


def _renamed(names: Mapping[str, str], value: Any) -> Any:
    """Our name for vLLM's; other values unchanged."""
    return names.get(value, value) if isinstance(value, str) else value


def _unknown_keyword(name: str, value: Any) -> str:
    if name in {field.name for field in fields(SamplingParams)}:
        said = f"it belongs to a request: generate(prompts, SamplingParams({name}={shown(value)}))"
        return f"LLM({name}={shown(value)}): there is no such keyword; {said}"
    known = ["model", "attention", "tp", "device", "dtype", "overrides", *SAME_NAMES, *VLLM_NAMES, *NEGATED]
    keys = keys_of(EngineSchema)
    leaves = {k.rpartition(".")[2]: k for k in keys}
    typed = name if name in CONFIG_GROUPS else leaves.get(name)
    if typed is not None:
        return f"LLM({name}={value!r}): there is no such keyword; type overrides=[{f'{typed}={spelled(value)}'!r}]"
    return (
        f"LLM({name}={shown(value)}): there is no such keyword.{did_you_mean(name, known)} overrides=['KEY=VALUE'] "
        "sets any key; `minivllm --help` lists them"
    )


def _literal(value: Any, key: str) -> str:
    if value is None or isinstance(value, int | float):
        return spelled(value)
    return str(value) if key in CONFIG_GROUPS or not str(value) else quote(str(value))
