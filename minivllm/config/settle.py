"""Checks that need the whole tree (limits, names, unused options), and the copy into frozen classes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_type_hints

from minivllm.config.engine_config import EngineConfig
from minivllm.config.keys import Key
from minivllm.core.model_config import frozen
from minivllm.errors import ConfigError, shown
from minivllm.naming import did_you_mean, is_repository, listing
from minivllm.plugins.registry import KINDS, Registry, is_reserved
from minivllm.plugins.types import Component

# Matches \n and \r typed for a line break, but not words such as \nabla.
_NO_LINE_END = re.compile(r"\\[nr](?![a-z])")
_KINDS = ("attention", "scheduler", "sampler", "executor")  # selected by name; a model is selected by its architecture


def check_ranges(tree: Any, keys: Mapping[str, Key]) -> None:
    """Raises ConfigError for a number outside its key's bounds."""
    for key in keys.values():
        value = tree
        for part in key.name.split("."):
            value = getattr(value, part)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if key.ge is not None and not value >= key.ge:  # also catches nan
            raise ConfigError(f"{key.name}={value} is too small: the least is {key.ge:g} ({key.help})")
        if key.gt is None and key.le is not None and not value <= key.le:
            raise ConfigError(f"{key.name}={value} is too large: the most is {key.le:g} ({key.help})")
        if key.gt is not None and not (value > key.gt and (key.le is None or value <= key.le)):
            most = "" if key.le is None else f", at most {key.le:g}"
            raise ConfigError(f"{key.name}={value} is out of range: more than {key.gt:g}{most} ({key.help})")


def check_scheduler(scheduler: Any) -> None:
    """Raises ConfigError for limits that contradict each other."""
    if scheduler.max_long_partial_prefills > scheduler.max_num_partial_prefills:
        raise ConfigError(
            f"scheduler.max_long_partial_prefills={scheduler.max_long_partial_prefills} is more than "
            f"scheduler.max_num_partial_prefills={scheduler.max_num_partial_prefills}; long ones count there, too"
        )
    for name in ("prompt_lookup_max", "prompt_lookup_min"):
        usual = getattr(EngineConfig().scheduler, name)
        if not scheduler.num_speculative_tokens and getattr(scheduler, name) != usual:
            raise ConfigError(
                f"scheduler.{name}={getattr(scheduler, name)}: nothing is looked up with "
                "scheduler.num_speculative_tokens=0; add scheduler.num_speculative_tokens=5, or leave this out"
            )
    if scheduler.prompt_lookup_min > scheduler.prompt_lookup_max:
        raise ConfigError(
            f"scheduler.prompt_lookup_min={scheduler.prompt_lookup_min} is more than "
            f"scheduler.prompt_lookup_max={scheduler.prompt_lookup_max}; lower the former or raise the latter"
        )
    for name, one in (("max_num_seqs", "sequence"), ("max_num_batched_tokens", "prompt token")):
        if scheduler.num_speculative_tokens >= getattr(scheduler, name):
            raise ConfigError(
                f"scheduler.num_speculative_tokens={scheduler.num_speculative_tokens} is not less than "
                f"scheduler.{name}={getattr(scheduler, name)}: in a step each draft token takes the place of a {one}; "
                "lower the former or raise the latter"
            )
    if scheduler.draft_model is not None and not scheduler.num_speculative_tokens:
        raise ConfigError(
            f"scheduler.draft_model={scheduler.draft_model} drafts nothing with scheduler.num_speculative_tokens=0; "
            "add scheduler.num_speculative_tokens=5, or leave it out"
        )


def check_lora(config: EngineConfig, max_cpu_loras: Any = None) -> None:
    """Raises ConfigError for limits of requests' LoRA adapters where there are none. ``max_cpu_loras``: vLLM's, which
    has no effect: adapters are read from their folders."""
    if not (max_cpu_loras is None or (isinstance(max_cpu_loras, int) and max_cpu_loras >= 1)):
        raise ConfigError(
            f"max_cpu_loras={shown(max_cpu_loras)} is not a whole number from 1 on; leave it out, as it has no effect: "
            "adapters are read from their folders"
        )
    usual = EngineConfig()
    for name, value, default in (
        ("max_loras", config.max_loras, usual.max_loras),
        ("max_lora_rank", config.max_lora_rank, usual.max_lora_rank),
        ("max_cpu_loras", max_cpu_loras, None),
    ):
        if value != default and not config.enable_lora:
            raise ConfigError(
                f"{name}={value}: the engine would have no adapters of single requests; add enable_lora=true (in "
                f"Python: True), or leave {name} out"
            )


def settle_model(tree: Any, final: Mapping[str, str]) -> None:
    """Let a checkpoint's shape replace the option's; make ``model.path`` and ``model.lora`` absolute.

    Raises ConfigError if a typed shape would be ignored, or if there is neither a shape nor a checkpoint.
    """
    model, shape = tree.model, next((k for k in final if k.startswith("model.hf_config")), None)
    if model.path is not None and model.repo and "model.repo" in final:
        raise ConfigError(f"model.path={model.path} and model.repo={model.repo} name two checkpoints; leave one out")
    if model.revision not in (None, "main") and (model.path is not None or not model.repo):
        raise ConfigError(
            f"model.revision={model.revision} needs a repository: add model.repo=ORG/NAME, or leave it out"
        )
    if model.path is not None:
        model.path = os.path.abspath(os.path.expanduser(model.path))
    if model.lora is not None:
        folder = os.path.expanduser(model.lora)
        if os.path.isdir(folder) or not is_repository(model.lora):  # ranks may run elsewhere
            model.lora = os.path.abspath(folder)
    if model.path is not None or "model.repo" in final:
        source = f"model.path={model.path}" if model.path is not None else f"model.repo={model.repo}"
        if shape:
            raise ConfigError(f"{shape} and {source}: the shape is read from that checkpoint's config.json; drop one")
        model.hf_config = {}  # the option's shape is for another checkpoint
    elif shape and tree.load_format.value != "dummy":
        raise ConfigError(
            f"{shape}: a checkpoint's shape is in its config.json; add load_format=dummy for random weights of the "
            "shape typed, or drop it"
        )
    elif model.name != "demo" and not model.repo and not model.hf_config:
        raise ConfigError(
            f"model={model.name} names no checkpoint: add model.path=DIR (a folder) or model.repo=ORG/NAME (on the Hub)"
        )


def component_fields(kind: str) -> tuple[str, ...]:
    """The keys of a group that name components."""
    if kind == "attention":
        return "name", "prefill", "decode"
    return ("name",) if kind in _KINDS else ()


def named_component(kind: str, field: str, value: str | None, registry: Registry) -> Component | None:
    """The component named by ``{kind}.{field}=value``; None for null and auto. Raises ConfigError if not registered."""
    if value is None or (field == "name" and is_reserved(kind, value)):
        return None
    allowed = sorted([*registry.names(kind), *registry.aliases(kind)])
    if field != "name" and value not in allowed:
        raise ConfigError(
            f"{kind}.{field}={value}: there is no such {KINDS[kind]}.{did_you_mean(value, allowed)} "
            f"Allowed: {listing(allowed)}; null: the same as {kind}="
        )
    return registry.get(kind, value)


def settle_components(tree: Any, registry: Registry) -> None:
    """Replace aliases by names; refuse unregistered names and options that no component reads."""
    for kind in _KINDS:
        node, used = getattr(tree, kind), []
        for field in component_fields(kind):
            component = named_component(kind, field, getattr(node, field), registry)
            if component is not None:
                setattr(node, field, component.name)
                used.append(component)
        check_options(kind, node.options, used)


def check_options(
    kind: str, options: Iterable[str], components: Sequence[Component], *, typed: str | None = None
) -> None:
    """Raises ConfigError for one that none of the components declares. ``typed``: the name of the group's option, if
    that is not what named them."""
    known = [option for component in components for option in component.options]
    for option in options:
        if option not in known:
            if not components:
                raise ConfigError(f"{kind}.options.{option}: {kind}=auto takes no options; type {kind}=NAME, too")
            who = " and ".join(c.name for c in components)
            if typed not in (None, *(c.name for c in components)):
                who = f"{kind}={typed} is a {who}, and {who}"
            raise ConfigError(
                f"{kind}.options.{option}: {who} has no such option.{did_you_mean(option, known)} "
                f"Allowed: {listing(known)}"
            )


def settle_mode(tree: Any) -> Any:
    """Normalize values that may be typed in two ways (a string or a list)."""
    if hasattr(tree, "stop"):
        tree.stop, tree.bad_words = _strings("stop", tree.stop), _strings("bad_words", tree.bad_words)
        tree.stop_token_ids = tree.stop_token_ids or []
        for text in tree.stop:
            if found := _NO_LINE_END.search(text):
                raise ConfigError(
                    f"stop={text}: {found[0]} is a backslash and a letter, no line end; type $'...' around all of it, "
                    "as stop=$'\\n' (bash, zsh), or use Python if none is meant"
                )
    if hasattr(tree, "allowed_origins"):
        tree.allowed_origins = _strings("allowed_origins", tree.allowed_origins)
    for switch in ("profile", "trace", "timeline"):  # a keyword or a file name
        if getattr(tree, switch, "").lower() in ("true", "false"):
            setattr(tree, switch, getattr(tree, switch).lower())
    if hasattr(tree, "prompts"):
        given = tree.prompts if isinstance(tree.prompts, list) and not _token_ids(tree.prompts) else [tree.prompts]
        if not given:
            raise ConfigError(
                f"prompts={tree.prompts} holds no prompt, so there is nothing to generate; type prompts='...' or "
                "prompts_file=FILE, or leave prompts out for the samples"
            )
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
    typed = json.dumps(prompt) if prompt is None or isinstance(prompt, bool) else f"{prompt}"
    raise ConfigError(
        f"prompts[{index}]={typed} is neither a string nor a list of token ids; quote text: prompts='[\"{typed}\"]'"
    )


def freeze(value: Any, target: Any) -> Any:
    """A copy: of a dataclass the fields that ``target``, another, has."""
    if is_dataclass(value):
        hints = get_type_hints(target)
        there = [f.name for f in fields(target) if f.name in vars(value)]
        return target(**{name: freeze(getattr(value, name), hints[name]) for name in there})
    return value.value if isinstance(value, Enum) else frozen(value)


def plain(value: Any) -> Any:
    """A frozen config as dicts and lists, for YAML."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value
