"""Checks ``key=value`` overrides before Hydra sees them, so that errors are in the user's terms."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.config.keys import Key, keys_of
from minivllm.config.modes import MODES
from minivllm.config.schema import EngineSchema
from minivllm.config.vllm_names import NEGATED, VLLM_NAMES, lora_hint
from minivllm.errors import ConfigError
from minivllm.naming import did_you_mean, either, listing, nearest
from minivllm.plugins.registry import KINDS, Registry
from minivllm.plugins.types import CONFIG_GROUPS, ConfigOption

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Keys of ``structured_outputs`` that are text taken as typed, and those that may be JSON.
_TEXTS = tuple(f"structured_outputs.{name}" for name in ("regex", "grammar", "whitespace_pattern"))
_JSON = ("structured_outputs.json", "structured_outputs.structural_tag")
_PATHS = "lora_modules"  # whose values are text, too


@dataclass(frozen=True, slots=True)
class Override:
    """``key=value`` as typed."""

    text: str
    adds: bool  # with + or ++
    key: str
    raw: str  # as typed: spaces around a prompt are part of it

    @property
    def value(self) -> str:
        return self.raw.strip()

    def is_text_of(self, key: Key) -> bool:
        """Whether the value is taken as typed; null, a list and a quoted value are not."""
        return key.text and self.value != "null" and not self.value.startswith(("[", '"', "'"))

    @classmethod
    def parse(cls, text: str) -> Override:
        """Raises ConfigError if it is not ``key=value``, has no value, or removes a key."""
        match = re.fullmatch(r"\s*(\+\+|\+|~)?\s*([^=\s]*)\s*(=(.*))?", text, re.DOTALL)
        if match is None or not match[2] or match[3] is None or match[1] == "~":
            if match is not None and match[1] == "~":
                raise ConfigError(f"{text}: a key cannot be removed; set it to its default, or to null")
            raise ConfigError(f"{text!r} is not key=value; `minivllm --help` lists the keys")
        if not match[4]:
            raise ConfigError(f"{text}: the value is missing; `minivllm --help` says what {match[2]} takes")
        return cls(text, match[1] is not None, match[2], match[4])

    def read(self, hint: str) -> Any:
        """As Hydra's grammar has it. Raises ConfigError, which ends with ``hint``."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        try:
            return OverridesParser.create().parse_override(f"{self.key}={self.value}")
        except HydraException as e:
            reason = str(e).splitlines()[0].partition(" expecting {")[0]  # the parser's token names tell users nothing
            raise ConfigError(f"{self.text}: cannot be read ({reason}); {hint}") from e


def check_group(override: Override, registry: Registry) -> str:
    """Raise ConfigError for an option that its group does not have; return the override in Hydra's form."""
    group, value = override.key, override.value.strip("'\"")
    allowed = group_options(group, registry)
    if value in allowed:
        return f"{group}={value}"
    if "," in value:
        raise ConfigError(f"{override.text}: one {group} at a time; several values make a sweep: `minivllm bench -m`")
    hint = ""
    if group == "model":
        try:
            [(key, name)] = model_keys(value, registry).items()
        except ConfigError:  # it looks like a folder but does not exist
            key, name = "model", value
        if key == "model" and name not in allowed:
            hint = " For a checkpoint folder type model.path=DIR, for a repository model.repo=ORG/NAME."
        else:
            hint = f" Type {key}={name}."
    what, near = KINDS.get(group, group), did_you_mean(value, allowed)
    raise ConfigError(f"{override.text}: there is no such {what}.{near} Allowed: {listing(sorted(allowed))}.{hint}")


def check_key(override: Override, keys: Mapping[str, Key], mode: str, engine_only: bool) -> str:
    """Raise ConfigError for an unknown key or a value of the wrong type; return the override in Hydra's form."""
    name, prefix = override.key, ""
    key = keys.get(name)
    if key is None:
        above = next((k for k in keys.values() if k.mapping and name.startswith(k.name + ".")), None)
        if above is None:
            raise ConfigError(_unknown_key(override, keys, mode, engine_only))
        inner, value = (text.strip("'\"") for text in (name.removeprefix(f"{above.name}."), override.value))
        if above.name == _PATHS and "." in inner:
            typed = f"'{_PATHS}={{{inner}: {quote(value)}}}'"
            raise ConfigError(f"{override.text}: a name with a dot needs braces; type {typed}")
        # A model's shape has keys that must not be mistyped; a component's options are checked against their own list.
        prefix = "++" if override.adds or above.name != "model.hf_config" else ""
        is_text = name in _TEXTS or above.name == _PATHS
        as_typed = is_text and override.value not in ("", "null") and override.value[0] not in "\"'"
        if as_typed or (name in _JSON and _is_json(override.value)):
            return f"{prefix}{name}={quote(override.value)}"
    elif key.mapping:
        prefix = "++"
    if key is not None and override.is_text_of(key):
        _check_type(override, key, override.raw)
        return f"{name}={quote(override.raw)}"
    if key is not None and key.mapping and (pair := re.fullmatch(r"[^\s={}\[\]\"']+=.+", override.value)):
        raise ConfigError(f"{override.text}: {name} is a mapping; type {name}.{pair[0]}")  # vLLM's --lora-modules
    value = _parse_value(override, mapping=key is not None and key.mapping)
    if key is not None and key.text and "${" in override.value:  # text is literal, even in quotes
        return f"{name}={_quoted(value)}"
    if key is not None and not key.mapping:
        _check_type(override, key, value)
    elif key is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{override.text}: {name} is a mapping; type {name}={{key: value}} or {name}.KEY=VALUE")
    elif key is not None and (odd := next((its for its in value if not isinstance(its, str)), None)) is not None:
        instead = "choose another" if "." in str(odd) else f"type {name}.{odd}=VALUE"
        raise ConfigError(f"{override.text}: {odd} is not read as a key's name there; {instead}")
    return f"{prefix}{name}={override.value}"


def _unknown_key(override: Override, keys: Mapping[str, Key], mode: str, engine_only: bool) -> str:
    name = override.key
    if name in VLLM_NAMES:
        return f"{override.text}: there is no key {name}; here it is called {VLLM_NAMES[name]}"
    if name in NEGATED:
        return f"{override.text}: there is no key {name}; here it is the opposite of {NEGATED[name]}"
    top = name.partition(".")[0]
    others = [m for m, spec in MODES.items() if {name, top} & {*keys_of(spec.schema), *groups_of(spec.schema)}]
    if others and (engine_only or mode not in others):
        place = "an engine's overrides" if engine_only else f"mode {mode}"
        name = top if top in keys_of(MODES[others[0]].schema) else name
        return f"{override.text}: {name} is a key of mode {' and '.join(others)}, not of {place}"
    if hint := lora_hint(name):
        near = [key for key in keys if key.rstrip("s") == top.rstrip("s")]
        hint = f" Did you mean {either(near)}?" if near else hint
        return f"{override.text}: there is no key {name}.{hint}"
    inner = [k for k in keys if k.startswith(name + ".")]
    if inner:
        return f"{override.text}: {name} holds several keys; set one of {listing(sorted(inner))}"
    by_leaf = {k.rpartition(".")[2]: k for k in keys}
    near = nearest(name, [*keys, *CONFIG_GROUPS]) or [by_leaf[n] for n in nearest(name.rpartition(".")[2], by_leaf)]
    if near:
        return f"{override.text}: there is no key {name}. Did you mean {either(near)}?"
    group = name.partition(".")[0] + "."
    here = sorted(k for k in keys if k.startswith(group))
    if not here:
        here = sorted({k.partition(".")[0] + ".*" * ("." in k) for k in keys})
    return f"{override.text}: there is no key {name}. Allowed: {listing(here)} (`minivllm --help` explains them)"


def _is_json(text: str) -> bool:
    """Whether it is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _parse_value(override: Override, *, mapping: bool) -> Any:
    quoted = '{KEY: "..."}' if mapping else '"..."'
    parsed = override.read(f"quote the value: {override.key}='{quoted}'")
    if parsed.is_sweep_override():
        if override.key.startswith("sweep."):  # applies to the whole sweep
            raise ConfigError(f"{override.text}: {override.key} takes one value, for the whole sweep")
        raise ConfigError(f"{override.text}: several values make a sweep (`minivllm bench -m`); for a list type [a,b]")
    return parsed.value()


def _check_type(override: Override, key: Key, value: Any) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(value, str) and "${" in value:
        return  # an interpolation: its type is known when Hydra has composed
    node = typed_keys(next(mode for mode, its in MODES.items() if key.name in keys_of(its.schema)))
    try:
        if isinstance(value, bool) and key.type.startswith(("a number", "a whole number")):
            raise OmegaConfBaseException  # OmegaConf reads true as 1
        if type(value) in (int, float) and value not in (0, 1) and key.type.startswith("true or false"):
            raise OmegaConfBaseException  # … and 2 as true
        OmegaConf.update(node, key.name, value, merge=False)
    except OmegaConfBaseException as e:
        instead = (
            f"; type {key.name}=[{override.value}]" if key.type.startswith("a list") and type(value) is int else ""
        )
        raise ConfigError(f"{override.text}: {key.name} is {key.type}, not {override.value}{instead}") from e


@cache
def typed_keys(mode: str) -> DictConfig:
    """A mode's keys, which refuse values of other types. Cached, as building it takes 8 ms; values set in it remain."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(MODES[mode].schema)


def _quoted(value: Any) -> str:
    """Quote strings, and those in lists with numbers; ``value`` has no interpolations."""
    if isinstance(value, list):
        return f"[{','.join(map(_quoted, value))}]"
    return quote(str(value).replace("\\${", "${")) if isinstance(value, str) else json.dumps(value)


def quote(text: str) -> str:
    """A string quoted so that Hydra's grammar reads it back unchanged."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(re.sub(r"(\\*)\$\{", r"\1\1\\${", text), Quote.double).with_quotes()


def groups_of(schema: type[EngineSchema]) -> tuple[str, ...]:
    """The Hydra groups of a mode's schema, and ``mode`` itself."""
    return (*(group for group in CONFIG_GROUPS if group in schema.__dataclass_fields__), "mode")


def group_options(group: str, registry: Registry) -> list[str]:
    """Every value that ``group=`` accepts: files, plugins' options, and components that have neither."""
    if group == "mode":
        return list(MODES)
    components = [*registry.names(group), *registry.aliases(group)] if group in KINDS else []
    return list(dict.fromkeys([*registry.config_options(group), *components]))


def model_keys(model: str, registry: Registry, key: str = "model") -> dict[str, Any]:
    """The key and value that select this model: an option's name, a folder or a Hub repository. ``key``: where the user
    named it. Raises ConfigError."""
    if model in group_options("model", registry):
        return {"model": model}
    if os.path.isdir(os.path.expanduser(model)):
        return {"model.path": model}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith("."):
        for name, repo in option_repos(registry).items():
            if repo.lower() == model.lower():
                return {"model": name}
        return {"model.repo": model}
    if "/" in model or os.sep in model:
        raise ConfigError(f"{key}={model}: there is no such folder, and it is not a repository's ORG/NAME")
    return {"model": model}  # compose refuses it, suggesting similar names


def tokenizer_source(name: str | None, registry: Registry) -> str | None:
    """``model.tokenizer`` with an option's name replaced by its folder or repository; a folder of that name wins."""
    entry = None if name is None else registry.config_options("model").get(name)
    if name is None or entry is None or os.path.isdir(os.path.expanduser(name)):
        return name
    node = option_node(entry.option)
    return next((node[key] for key in ("path", "repo") if isinstance(node.get(key), str)), name)


def option_repos(registry: Registry) -> dict[str, str]:
    """Model option -> repository, for the options that name one."""
    found = {}
    for name, entry in registry.config_options("model").items():
        with suppress(Exception):  # what is wrong with a plugin's option is told when it is chosen
            if isinstance(repo := option_node(entry.option).get("repo"), str):
                found[name] = repo
    return found


def option_node(option: ConfigOption) -> Any:
    """What the option sets, as a config of OmegaConf's."""
    from omegaconf import OmegaConf

    return OmegaConf.load(option.node) if isinstance(option.node, Path) else OmegaConf.create(option.node)
