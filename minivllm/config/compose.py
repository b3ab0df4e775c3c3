"""The one place where ``key=value`` overrides and Hydra's groups become a frozen ``EngineConfig``.

Overrides are judged before Hydra sees them, so that a mistake is answered in the user's words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from minivllm.config.conf_dir import conf_dir
from minivllm.config.engine_config import EngineConfig
from minivllm.config.modes import MODES, ModeOptions
from minivllm.config.schema import EngineSchema, Key, keys_of
from minivllm.core.model_config import FrozenDict
from minivllm.errors import ConfigError, PluginError
from minivllm.plugins.naming import did_you_mean, either, listing, nearest
from minivllm.plugins.registry import KINDS, OptionEntry, Registry
from minivllm.plugins.types import CONFIG_GROUPS

_HAS_AUTO = ("attention", "executor")


@dataclass(frozen=True, slots=True)
class Composed:
    """What one command line, or one call, asks for."""

    engine: EngineConfig
    mode: str
    options: ModeOptions
    overrides: tuple[str, ...] = ()

    def to_yaml(self) -> str:
        """All of it, as the nested keys that a user may type."""
        import yaml

        tree = {"mode": self.mode, **_plain(self.engine), **_plain(self.options)}
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def compose(overrides: Sequence[str], registry: Registry, *, mode: str | None = None) -> Composed:
    """Compose ``key=value`` overrides with the groups' options.

    Args:
        overrides: as typed on the command line; later ones win.
        registry: the plugins whose components and options may be named.
        mode: refuse the keys of every mode (``""``), or take this one unless an override says ``mode=``.

    Raises:
        ConfigError: what was typed cannot be used; the message names the value and what is allowed.
        PluginError: an option that a plugin brought does not fit the schema.
    """
    asked = [_Override.parse(text) for text in overrides]
    engine_only = mode == ""
    chosen = next((o.value for o in reversed(asked) if o.key == "mode"), mode or "generate")
    if chosen not in MODES:
        raise ConfigError(f"mode={chosen}: there is no such mode.{did_you_mean(chosen, MODES)} Allowed: {_all(MODES)}")
    schema = MODES[chosen].schema
    groups = groups_of(schema)
    keys = keys_of(EngineSchema if engine_only else schema)
    del keys["mode"]
    final: dict[str, str] = {}  # what Hydra gets: of each key, what was typed last
    for override in asked:
        if engine_only and override.key == "mode":
            raise ConfigError(f"{override.text}: an engine has no mode; leave it out")
        final.pop(override.key, None)
        if override.key in groups:
            final[override.key] = _check_group(override, registry)
        else:
            final[override.key] = _check_key(override, keys, chosen, engine_only)
    if "model" not in final and {"model.path", "model.repo"} & final.keys():
        final["model"] = "model=checkpoint"
    final["mode"] = f"mode={chosen}"
    tree = _run_hydra(final, schema, registry)
    _check_ranges(tree, keys)
    _settle_model(tree.model, final)
    _settle_components(tree, registry)
    if tree.scheduler.max_long_partial_prefills > tree.scheduler.max_num_partial_prefills:
        raise ConfigError(
            f"scheduler.max_long_partial_prefills={tree.scheduler.max_long_partial_prefills} is more than "
            f"scheduler.max_num_partial_prefills={tree.scheduler.max_num_partial_prefills}; long ones count there, too"
        )
    engine = _freeze(tree, EngineConfig)
    options = _freeze(_settle_mode(tree), MODES[chosen].options)
    return Composed(engine, chosen, options, tuple(o.text for o in asked))


# --------------------------------------------------------------------------- what was typed


@dataclass(frozen=True, slots=True)
class _Override:
    text: str
    adds: bool  # with + or ++
    key: str
    raw: str  # as typed: the spaces around a prompt are part of it

    @property
    def value(self) -> str:
        return self.raw.strip()

    @classmethod
    def parse(cls, text: str) -> _Override:
        match = re.fullmatch(r"\s*(\+\+|\+|~)?\s*([^=\s]*)\s*(=(.*))?", text, re.DOTALL)
        if match is None or not match[2] or match[3] is None or match[1] == "~":
            if match is not None and match[1] == "~":
                raise ConfigError(f"{text}: a key cannot be removed; set it to its default, or to null")
            raise ConfigError(f"{text!r} is not key=value; `minivllm --help` lists the keys")
        if not match[4]:
            raise ConfigError(f"{text}: the value is missing; type {match[2]}=null for none")
        return cls(text, match[1] is not None, match[2], match[4])


def _check_group(override: _Override, registry: Registry) -> str:
    group, value = override.key, override.value.strip("'\"")
    allowed = group_options(group, registry)
    if value in allowed:
        return f"{group}={value}"
    if "," in value:
        raise ConfigError(f"{override.text}: one {group} at a time; several values make a sweep, which is bench -m's")
    hint = ""
    if group == "model":
        repos = {repo: name for name, repo in _repos(registry).items()}
        if value in repos:
            hint = f" {value} is model={repos[value]}."
        elif os.path.isdir(value):
            hint = f" It is a folder: type model.path={value}."
        else:
            hint = " For a checkpoint folder type model.path=DIR, for a repository model.repo=ORG/NAME."
    what = KINDS.get(group, group)
    raise ConfigError(
        f"{override.text}: there is no such {what}.{did_you_mean(value, allowed)} Allowed: {_all(allowed)}.{hint}"
    )


def _check_key(override: _Override, keys: Mapping[str, Key], mode: str, engine_only: bool) -> str:
    """Refuse an unknown key or a value of the wrong type; return the override as Hydra needs it."""
    name, prefix = override.key, ""
    key = keys.get(name)
    if key is None:
        above = next((k for k in keys.values() if k.mapping and name.startswith(k.name + ".")), None)
        if above is None:
            raise ConfigError(_unknown_key(override, keys, mode, engine_only))
        # The shape of a model has keys that must not be mistyped; a backend's options are checked by their own list.
        prefix = "++" if override.adds or above.name != "model.hf_config" else ""
    elif key.mapping:
        prefix = "++"
    if key is not None and key.text and override.value != "null" and not override.value.startswith(("[", '"', "'")):
        return f"{name}={quote(override.raw)}"
    value = _parse_value(override)
    if key is not None and not key.mapping:
        _check_type(override, key, value)
    elif key is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{override.text}: {name} is a mapping; type {name}={{key: value}} or {name}.KEY=VALUE")
    return f"{prefix}{name}={override.value}"


def _unknown_key(override: _Override, keys: Mapping[str, Key], mode: str, engine_only: bool) -> str:
    name = override.key
    if name in VLLM_NAMES:
        return f"{override.text}: there is no key {name}; here it is called {VLLM_NAMES[name]}"
    others = [m for m, spec in MODES.items() if name in keys_of(spec.schema) or name in groups_of(spec.schema)]
    if others:
        place = "an engine's overrides" if engine_only else f"mode {mode}"
        return f"{override.text}: {name} is a key of mode {' and '.join(others)}, not of {place}"
    inner = [k for k in keys if k.startswith(name + ".")]
    if inner:
        return f"{override.text}: {name} holds several keys; set one of {_all(inner)}"
    by_leaf = {k.rpartition(".")[2]: k for k in keys}
    near = nearest(name, [*keys, *CONFIG_GROUPS]) or [by_leaf[n] for n in nearest(name.rpartition(".")[2], by_leaf)]
    if near:
        return f"{override.text}: there is no key {name}. Did you mean {either(near)}?"
    group = name.partition(".")[0] + "."
    here = [k for k in keys if k.startswith(group)]
    if not here:
        here = list(dict.fromkeys(k.partition(".")[0] + ".*" * ("." in k) for k in keys))
    return f"{override.text}: there is no key {name}. Allowed: {_all(here)} (`minivllm --help` explains them)"


def _parse_value(override: _Override) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(f"{override.key}={override.value}")
    except HydraException as e:
        reason = str(e).splitlines()[0]
        raise ConfigError(
            f"{override.text}: cannot be read ({reason}); quote the value: {override.key}='\"...\"'"
        ) from e
    if parsed.is_sweep_override():
        raise ConfigError(f"{override.text}: several values make a sweep, which is bench -m's; for a list type [a,b]")
    return parsed.value()


def _check_type(override: _Override, key: Key, value: Any) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(value, str) and "${" in value:
        return  # an interpolation: its type is known when Hydra has composed
    group, _, leaf = key.name.rpartition(".")
    schema = next(m.schema for m in MODES.values() if key.name in keys_of(m.schema))
    node = OmegaConf.structured(schema)
    try:
        if isinstance(value, bool) and key.type.startswith(("a number", "a whole number")):
            raise OmegaConfBaseException  # OmegaConf reads true as 1
        OmegaConf.update(node, f"{group}.{leaf}" if group else leaf, value, merge=False)
    except OmegaConfBaseException as e:
        raise ConfigError(f"{override.text}: {key.name} is {key.type}, not {override.value}") from e


def quote(text: str) -> str:
    """A string as Hydra's grammar reads it back unchanged."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(re.sub(r"(\\*)\$\{", r"\1\1\\${", text), Quote.double).with_quotes()


# --------------------------------------------------------------------------- Hydra


def groups_of(schema: type[EngineSchema]) -> tuple[str, ...]:
    """The Hydra groups of a mode's schema, and the mode itself."""
    return (*(group for group in CONFIG_GROUPS if group in schema.__dataclass_fields__), "mode")


def group_options(group: str, registry: Registry) -> list[str]:
    """Every value that ``group=`` takes: files, plugins' options, and components that have neither."""
    if group == "mode":
        return list(MODES)
    components = [*registry.names(group), *registry.aliases(group)] if group in KINDS else []
    return list(dict.fromkeys([*registry.config_options(group), *components]))


def _run_hydra(final: Mapping[str, str], schema: type[EngineSchema], registry: Registry) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from minivllm.config.private_hydra import private_hydra

    with private_hydra() as store:
        store.store(name="schema", node=schema)
        for group in groups_of(schema)[:-1]:
            name = final.get(group, "").partition("=")[2]
            entry = registry.config_options(group).get(name)
            if entry is None and name in group_options(group, registry):
                store.store(group=group, name=name, node={"name": registry.get(group, name).name})
            elif entry is not None and not entry.provider.builtin:  # ours are files that Hydra finds by itself
                store.store(group=group, name=name, node=_node(entry, schema))
        try:
            with initialize_config_dir(str(conf_dir()), job_name="minivllm", version_base="1.3"):
                tree = OmegaConf.to_object(hydra_compose("config", overrides=list(final.values())))
        except (HydraException, OmegaConfBaseException) as e:
            if absent := re.search(r"Could not override '(model\.hf_config\.[^']+)'", str(e)):
                what = final.get("model", "model=demo")
                raise ConfigError(
                    f"{absent[1]}: the shape of {what} has no such key; to add one type +{absent[1]}=..."
                ) from e
            raise ConfigError(_first_sentence(e)) from e
    _refuse_extras(tree, "")
    return tree


def _node(entry: OptionEntry, schema: type[EngineSchema]) -> Any:
    """A plugin's option, checked against the schema of its group, so that a mistake is told with the plugin's name."""
    from omegaconf import OmegaConf

    option = entry.option
    try:
        node = OmegaConf.load(option.node) if isinstance(option.node, Path) else OmegaConf.create(option.node)
        plain = {"name": option.name, **OmegaConf.to_container(node, enum_to_str=True)}  # type: ignore[dict-item]
        OmegaConf.merge(getattr(OmegaConf.structured(schema), option.group), plain)
    except Exception as e:
        what = f"the option {option.group}={option.name} of {entry.provider}"
        raise PluginError(f"{what} does not fit the schema: {_first_sentence(e)}") from e
    return plain


def _first_sentence(e: Exception) -> str:
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return " ".join(
        line for line in lines[:2] if not line.startswith(("full_key", "object_type", "See https"))
    ) or repr(e)


def _refuse_extras(node: Any, prefix: str) -> None:
    """Hydra accepts what is added with +; nothing that no field names may pass."""
    known = {f.name for f in fields(node)}
    for name, value in vars(node).items():
        if name not in known:
            raise ConfigError(f"+{prefix}{name}: there is no such key.{did_you_mean(name, known)}")
        if is_dataclass(value):
            _refuse_extras(value, f"{prefix}{name}.")


# --------------------------------------------------------------------------- what only the whole tree shows


def _check_ranges(tree: Any, keys: Mapping[str, Key]) -> None:
    for key in keys.values():
        value = tree
        for part in key.name.split("."):
            value = getattr(value, part)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if key.ge is not None and value < key.ge:
            raise ConfigError(f"{key.name}={value} is too small: the least is {key.ge:g} ({key.help})")
        if (key.gt is not None and not value > key.gt) or (key.le is not None and not value <= key.le):
            raise ConfigError(
                f"{key.name}={value} is out of range: more than {key.gt:g}, at most {key.le:g} ({key.help})"
            )


def _settle_model(model: Any, final: Mapping[str, str]) -> None:
    if model.path is not None:
        model.path = os.path.abspath(os.path.expanduser(model.path))
    if model.path is not None or "model.repo" in final:
        source = f"model.path={model.path}" if model.path is not None else f"model.repo={model.repo}"
        if shape := next((k for k in final if k.startswith("model.hf_config")), None):
            raise ConfigError(f"{shape} and {source}: the shape is read from that checkpoint's config.json; drop one")
        model.hf_config = {}  # the option's shape is another checkpoint's
    elif model.name != "demo" and not model.repo and not model.hf_config:
        raise ConfigError(
            f"model={model.name} names no checkpoint: add model.path=DIR (a folder) or model.repo=ORG/NAME (on the Hub)"
        )


def _settle_components(tree: Any, registry: Registry) -> None:
    """Aliases become names; a name that nobody registered, and an option that nobody reads, are refused."""
    for kind in ("attention", "scheduler", "sampler", "executor"):
        node, used = getattr(tree, kind), []
        for field in ("name", "prefill", "decode") if kind == "attention" else ("name",):
            value = getattr(node, field)
            if value is None or (field == "name" and value == "auto" and kind in _HAS_AUTO):
                continue
            component = registry.get(kind, value)
            setattr(node, field, component.name)
            used.append(component)
        known = [option for component in used for option in component.options]
        for option in node.options:
            if option not in known:
                if not used:
                    raise ConfigError(f"{kind}.options.{option}: {kind}=auto takes no options; type {kind}=NAME, too")
                who = " and ".join(c.name for c in used)
                raise ConfigError(
                    f"{kind}.options.{option}: {who} has no such option.{did_you_mean(option, known)} "
                    f"Allowed: {listing(known)}"
                )


def _settle_mode(tree: Any) -> Any:
    """Bring what may be typed in two ways (one string or a list) into one."""
    if hasattr(tree, "stop"):
        tree.stop = _strings("stop", tree.stop)
        tree.stop_token_ids = tree.stop_token_ids or []
    if hasattr(tree, "prompts"):
        given = tree.prompts if isinstance(tree.prompts, list) and not _token_ids(tree.prompts) else [tree.prompts]
        tree.prompts = () if tree.prompts is None else tuple(_prompt(p, i) for i, p in enumerate(given))
        if tree.prompts and tree.prompts_file is not None:
            raise ConfigError(f"prompts= and prompts_file={tree.prompts_file} are both given; leave one out")
        if tree.logprobs is not None and tree.output is None:
            raise ConfigError(f"logprobs={tree.logprobs} is written with output=FILE.jsonl only; add it")
    return tree


def _strings(key: str, value: Any) -> list[str]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    for v in values:
        if not isinstance(v, str):
            raise ConfigError(f"{key}: {v!r} is not a string; quote it: {key}='[\"{v}\"]'")
    return values


def _token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(t) is int for t in value)


def _prompt(prompt: Any, index: int) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if _token_ids(prompt):
        return tuple(prompt)
    raise ConfigError(
        f"prompts[{index}]={prompt!r} is neither a string nor a list of token ids; quote text: prompts='[\"{prompt}\"]'"
    )


# --------------------------------------------------------------------------- frozen


def _freeze(node: Any, target: type) -> Any:
    """Copy the fields that ``target`` has, all the way down."""
    hints = get_type_hints(target)
    return target(**{f.name: _freeze_value(getattr(node, f.name), hints[f.name]) for f in fields(target)})


def _freeze_value(value: Any, target: Any = None) -> Any:
    if is_dataclass(value):
        return _freeze(value, target)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return FrozenDict({k: _freeze_value(v) for k, v in value.items()})
    if isinstance(value, list):
        return tuple(_freeze_value(v) for v in value)
    return value


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _all(names: Any) -> str:
    return listing(sorted(names))


# --------------------------------------------------------------------------- from Python

# vllm.LLM's keyword -> the key here.
VLLM_NAMES: dict[str, str] = {
    "tensor_parallel_size": "tp",
    "gpu_memory_utilization": "cache.gpu_memory_utilization",
    "block_size": "cache.block_size",
    "num_gpu_blocks_override": "cache.num_blocks",
    "enable_prefix_caching": "cache.enable_prefix_caching",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "max_num_partial_prefills": "scheduler.max_num_partial_prefills",
    "max_long_partial_prefills": "scheduler.max_long_partial_prefills",
    "long_prefill_token_threshold": "scheduler.long_prefill_token_threshold",
    "async_scheduling": "scheduler.async_scheduling",
    "attention_backend": "attention",
    "tokenizer": "model.tokenizer",
    "revision": "model.revision",
}
_SAME_NAME = ("max_model_len", "enforce_eager", "seed", "load_format")
# vllm.LLM's keywords that ask for nothing at this value, and for something that is not here at any other.
_NEUTRAL: dict[str, tuple[Any, str]] = {
    "trust_remote_code": (False, "code from a checkpoint is never run; write a plugin with minivllm_models"),
    "enable_chunked_prefill": (True, "prompts are always chunked; scheduler.max_num_batched_tokens sets how"),
    "quantization": (None, "not supported yet"),
    "kv_cache_dtype": ("auto", "not supported yet"),
    "pipeline_parallel_size": (1, "not supported; use tp"),
    "enable_lora": (False, "not supported yet"),
    "speculative_config": (None, "not supported yet"),
    "tokenizer_mode": ("auto", "there is one tokenizer"),
    "skip_tokenizer_init": (False, "not supported yet"),
    "disable_log_stats": (True, "no statistics are logged"),
    "cpu_offload_gb": (0, "not supported"),
}
_DTYPES = {"half": "float16", "float": "float32"}
_LOAD_FORMATS = {"safetensors": "auto"}


def compose_engine_config(
    model: str | os.PathLike[str] = "demo",
    *,
    attention: str = "auto",
    tp: int = 1,
    device: Any = "auto",
    dtype: Any = "auto",
    overrides: Sequence[str] = (),
    registry: Registry | None = None,
    **kwargs: Any,
) -> EngineConfig:
    """The config of ``LLM(model, ...)``: an option's name, a folder or a Hub repository, and vLLM's keywords.

    ``overrides`` are applied last. ``registry`` is this process's unless given.

    Raises:
        ConfigError: an unknown keyword, key or name, or a value that cannot be used.
    """
    if registry is None:
        from minivllm.plugins.manager import default_registry

        registry = default_registry()
    if isinstance(overrides, str):
        raise ConfigError(f"overrides={overrides!r} is one string; it takes a list: overrides=[{overrides!r}]")
    asked = {**_model_keys(os.fspath(model), registry)}
    dtype = str(dtype).removeprefix("torch.")
    for key, value, default in (
        ("attention", attention, "auto"),
        ("tp", tp, 1),
        ("device", str(device), "auto"),
        ("dtype", _DTYPES.get(dtype, dtype), "auto"),
    ):
        if value != default:
            asked[key] = value
    for name, value in kwargs.items():
        if name in _NEUTRAL:
            neutral, why = _NEUTRAL[name]
            if value is not None and value != neutral:
                raise ConfigError(f"{name}={value!r}: {why}; the only value is {neutral!r}")
            continue
        target = VLLM_NAMES.get(name, name if name in _SAME_NAME else None)
        if target is None:
            raise ConfigError(_unknown_keyword(name, value))
        if value is None:
            continue
        if name == "load_format":
            value = _LOAD_FORMATS.get(value, value)
        if asked.get(target, value) != value:
            raise ConfigError(f"{name}={value!r} contradicts {target}={asked[target]!r}; leave one out")
        asked[target] = value
    typed = [f"{key}={_literal(value, key)}" for key, value in asked.items()]
    return compose([*typed, *overrides], registry, mode="").engine


def _unknown_keyword(name: str, value: Any) -> str:
    known = ["model", "attention", "tp", "device", "dtype", "overrides", *_SAME_NAME, *VLLM_NAMES]
    keys = keys_of(EngineSchema)
    leaves = {k.rpartition(".")[2]: k for k in keys}
    if name in leaves:
        return f"LLM({name}={value!r}): there is no such keyword; type overrides=[{leaves[name] + '=' + str(value)!r}]"
    return f"LLM({name}={value!r}): there is no such keyword.{did_you_mean(name, known)} Allowed: {_all(known)}"


def _literal(value: Any, key: str) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int | float) or key in CONFIG_GROUPS:
        return str(value)
    return quote(str(value)) if str(value) else ""


def _model_keys(model: str, registry: Registry) -> dict[str, Any]:
    if model in group_options("model", registry):
        return {"model": model}
    if os.path.isdir(os.path.expanduser(model)):
        return {"model.path": model}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith("."):
        for name, repo in _repos(registry).items():
            if repo.lower() == model.lower():
                return {"model": name}
        return {"model.repo": model}
    if "/" in model or os.sep in model:
        raise ConfigError(f"model={model}: there is no such folder, and it is not a repository's ORG/NAME")
    return {"model": model}  # refused by compose, with the nearest names


def _repos(registry: Registry) -> dict[str, str]:
    """option -> repository, for the options that name one."""
    import yaml

    found = {}
    for name, entry in registry.config_options("model").items():
        node = entry.option.node
        if isinstance(node, Path):
            node = yaml.safe_load(node.read_text(encoding="utf-8")) or {}
        repo = node.get("repo") if isinstance(node, Mapping) else getattr(node, "repo", None)
        if isinstance(repo, str):
            found[name] = repo
    return found


__all__ = ["Composed", "compose", "compose_engine_config", "group_options", "groups_of", "quote"]
