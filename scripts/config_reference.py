"""Writes docs/config.md from what the program itself reads: the schema, the groups' files and the built-in components.

``python scripts/config_reference.py`` after a change to minivllm/config/schema.py, conf/ or plugins/builtin.py.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from minivllm.config.conf_dir import conf_dir
from minivllm.config.keys import Key, keys_of, spelled, type_in_words
from minivllm.config.modes import MODES
from minivllm.config.overrides import group_options
from minivllm.config.schema import EngineSchema
from minivllm.config.vllm_names import ATTENTION, EXECUTORS, VLLM_NAMES
from minivllm.plugins import load_plugins
from minivllm.plugins.registry import KINDS, Registry
from minivllm.plugins.types import CONFIG_GROUPS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
COMMAND = "python scripts/config_reference.py"
_INTRO = f"""\
<!-- Written by `{COMMAND}` from the schema: change that, not this page. -->

# Configuration

`group=option` picks one of a group, `key=value` sets one key:
`python -m minivllm model=qwen3 attention=triton cache.block_size=32`. In Python the same is
`LLM("qwen3", attention="triton", overrides=["cache.block_size=32"])`. `null` is none, `[a,b]` a list. Settings of
one component are under `options`: `executor=multiproc executor.options.devices=[2,3]`. If a key is given twice, the
last one counts; `overrides` are applied after `LLM`'s other arguments.

An unknown key, a wrong type or a value out of bounds is an error that says what is allowed.
`python -m minivllm --help` lists generate's keys, and names added by plugins; `chat --help`, `serve --help` and
`bench --help` list those of their modes. `--cfg job` prints the resulting config. `+` before a key adds one that the
group's option does not have: `+model.hf_config.attention_bias=true`.

`LLM(...)` also takes [vLLM's names](#vllms-names)."""


_OF_MODES = {
    "generate": """
Without `prompts=` and `prompts_file=`, prompts are read from standard input, one per line, if it is a pipe or a file.
If it is a terminal, or a pipe without input for 10 seconds, sample prompts are completed. A line of a `.json` or
`.jsonl` file is a string, or an object with `prompt` or `prompt_token_ids`, and optionally `priority` and `lora_path`.
Its other keys are ignored, except sampling parameters and what looks like one of the latter two, which are rejected.
With `enable_lora=true` so is another `model` than the one that runs, unless there is a `lora_path`.

`output=FILE` overwrites the file. A prompt's line is written as soon as it and those before it are complete; if the run
ends early, those of all that are complete. It has `request_id`, `prompt`, `prompt_token_ids`, `text`, `token_ids`,
`finish_reason`, `num_cached_tokens`, and `logprobs` if requested.""",
    "chat": """
`/clear` forgets the conversation, `/exit` or Ctrl-D quits, Ctrl-C stops a reply.""",
}


_SPECULATIVE = "| `speculative_config` | keys of `scheduler`: [speculative decoding](speculative-decoding.md) |"


def page() -> str:
    """The whole page."""
    registry = load_plugins([])  # the built-in ones: what else is installed here is not of this page
    engine = _settable(EngineSchema)
    parts = [_INTRO, "## Groups", _groups(registry), "## Keys of every mode"]
    for prefix in sorted(dict.fromkeys(name.rpartition(".")[0] for name in engine), key=bool):  # first those without
        chosen = [key for name, key in engine.items() if name.rpartition(".")[0] == prefix]
        parts += [f"### {prefix or 'The engine'}", _keys(chosen)]
    parts += ["## Options of components", _component_options(registry)]
    for name, mode in MODES.items():
        own = [key for name, key in _settable(mode.schema).items() if name not in engine]
        parts += [f"## Mode {name}", f"{mode.help[:1].upper()}{mode.help[1:]}.", _keys(own) if own else "No more keys."]
        parts += [_OF_MODES[name].strip()] if name in _OF_MODES else []
    parts += ["## Options of model", _models(), "## Options of workload", _workloads()]
    names = (f"| `{theirs}` | `{ours}` |" for theirs, ours in VLLM_NAMES.items())
    parts += ["## vLLM's names", "\n".join(["| of `vllm.LLM` | here |", "| --- | --- |", *names, _SPECULATIVE])]
    for name, values in (("attention_backend", ATTENTION), ("distributed_executor_backend", EXECUTORS)):
        pairs = (f"{_code(theirs)} is {_code(ours)}" for theirs, ours in values.items() if ours not in (theirs, "auto"))
        parts += [textwrap.fill(f"Of the values of {_code(name)}, {', '.join(pairs)}.", 120)]
    return "\n\n".join(parts) + "\n"


def _settable(schema: type) -> dict[str, Key]:
    """Without what ``group=option`` sets."""
    return {name: key for name, key in keys_of(schema).items() if name != "mode" and not name.endswith(".name")}


def _groups(registry: Registry) -> str:
    chosen = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    default = {group: name for entry in chosen if isinstance(entry, Mapping) for group, name in entry.items()}
    bench = yaml.safe_load((conf_dir() / "mode" / "bench.yaml").read_text(encoding="utf-8"))["defaults"]
    default["workload"] = next(entry["/workload"] for entry in bench if isinstance(entry, Mapping))
    rows = []
    for group in (*CONFIG_GROUPS, "mode"):
        options = ", ".join(_code(name) for name in group_options(group, registry))
        rows.append((_code(group), options, _code(default[group])))
    return _table(("group", "options", "default"), rows)


def _keys(keys: Iterable[Key]) -> str:
    rows = ((_code(key.name), _type(key), _code(spelled(key.default)), _bounds(key), key.help) for key in keys)
    return _table(("key", "type", "default", "bounds", "what it is"), rows)


def _component_options(registry: Registry) -> str:
    rows = []
    for kind in KINDS:
        for entry in registry.entries(kind):
            if options := entry.component.options:
                rows.append((_code(f"{kind}={entry.component.name}"), ", ".join(map(_code, options))))
    return _table(("component", "keys under `options`"), rows)


def _models() -> str:
    rows = []
    for name, node, comment in _files("model"):
        shape = node.get("hf_config", {})
        sizes = (shape.get(key, "") for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
        rows.append((_code(name), comment or node["repo"], *sizes))
    return _table(("option", "what it is", "layers", "hidden size", "vocabulary"), rows)


def _workloads() -> str:
    rows = []
    for name, node, comment in _files("workload"):
        values = ", ".join(_code(f"{key}={spelled(value)}") for key, value in node.items() if key != "name")
        rows.append((_code(name), comment, values))
    return _table(("option", "what it is", "what it sets"), rows)


def _files(group: str) -> Iterable[tuple[str, dict[str, Any], str]]:
    """Each option of a group: its name, its keys, and the comment that it begins with."""
    for file in sorted((conf_dir() / group).glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        first = text.partition("\n")[0]
        yield file.stem, yaml.safe_load(text), first.removeprefix("# ") if first.startswith("# ") else ""


def _type(key: Key) -> str:
    # The schema has no word for these: what OmegaConf takes as it is, and is not text, is one number or two.
    return "a number or a list" if key.type == type_in_words(Any) and not key.text else key.type


def _bounds(key: Key) -> str:
    signs = (("≥", key.ge), (">", key.gt), ("≤", key.le))
    return ", ".join(f"{sign} {bound:g}" for sign, bound in signs if bound is not None)


def _code(text: str) -> str:
    return f"`{text}`"


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *([str(cell).replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
