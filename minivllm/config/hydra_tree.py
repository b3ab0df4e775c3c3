"""The part that uses Hydra: combines group options and checked overrides into one tree of schema objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from minivllm.config.conf_dir import conf_dir
from minivllm.config.overrides import group_options, groups_of, option_node
from minivllm.config.schema import EngineSchema
from minivllm.errors import ConfigError, PluginError
from minivllm.naming import did_you_mean
from minivllm.plugins.registry import OptionEntry, Registry


def compose_tree(final: Mapping[str, str], schema: type[EngineSchema], registry: Registry) -> Any:
    """A ``schema`` filled from ``conf/``, plugins' options and the overrides ``final`` (key -> override, for Hydra).

    Raises:
        ConfigError: Hydra refuses an override, or one adds a key that is not a field.
        PluginError: a plugin's option does not fit the schema, or interpolates a key that does not exist.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from minivllm.config.private_hydra import private_hydra

    offered: dict[str, OptionEntry] = {}  # by group: the selected option, if a plugin's
    with private_hydra() as store:
        store.store(name="schema", node=schema)
        for group in groups_of(schema)[:-1]:
            name = final.get(group, "").partition("=")[2]
            entry = registry.config_options(group).get(name)
            if entry is None and name in group_options(group, registry):
                store.store(group=group, name=name, node={"name": registry.get(group, name).name})
            elif entry is not None and not entry.provider.builtin:  # built-in options are files that Hydra finds itself
                store.store(group=group, name=name, node=_node(entry, schema))
                offered[group] = entry
        try:
            with initialize_config_dir(str(conf_dir()), job_name="minivllm", version_base="1.3"):
                tree = OmegaConf.to_object(hydra_compose("config", overrides=list(final.values())))
        except (HydraException, OmegaConfBaseException) as e:
            if absent := re.search(r"Could not override '(model\.hf_config\.[^']+)'", str(e)):
                what = final.get("model", "model=demo")
                if what == "model=demo":  # it has no published shape
                    raise ConfigError(
                        f"{absent[1]}: the shape of {what} is its own; choose another model, such as model=qwen3"
                    ) from e
                raise ConfigError(
                    f"{absent[1]}: the shape of {what} has no such key; to add one type +{absent[1]}=..."
                ) from e
            key = getattr(e, "full_key", None) or ""
            said = f"{key}: {_first_sentence(e)}" if key else _first_sentence(e)
            if key not in final and (theirs := offered.get(key.partition(".")[0])):
                raise PluginError(f"{said}, in {_named(theirs)}") from e
            raise ConfigError(said) from e
    _refuse_extras(tree, "")
    return tree


def _node(entry: OptionEntry, schema: type[EngineSchema]) -> Any:
    """A plugin's option, checked against its group's schema, so that errors name the plugin."""
    from omegaconf import OmegaConf

    option = entry.option
    try:
        shown = {"name": option.name, **OmegaConf.to_container(option_node(option), enum_to_str=True)}  # type: ignore[dict-item]
        OmegaConf.merge(getattr(OmegaConf.structured(schema), option.group), shown)
    except Exception as e:
        raise PluginError(f"{_named(entry)} does not fit the schema: {_first_sentence(e)}") from e
    return shown


def _named(entry: OptionEntry) -> str:
    return f"the option {entry.option.group}={entry.option.name} of {entry.provider}"


def _first_sentence(e: Exception) -> str:
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return " ".join(
        line for line in lines[:2] if not line.startswith(("full_key", "object_type", "See https"))
    ) or repr(e)


def _refuse_extras(node: Any, prefix: str) -> None:
    """Refuse keys that are not fields: Hydra accepts any that are added with +."""
    known = {f.name for f in fields(node)}
    for name, value in vars(node).items():
        if name not in known:
            raise ConfigError(f"+{prefix}{name}: there is no such key.{did_you_mean(name, known)}")
        if is_dataclass(value):
            _refuse_extras(value, f"{prefix}{name}.")
