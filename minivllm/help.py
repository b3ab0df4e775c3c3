"""The text of ``--help``: modes, groups, and every key with its type and default, read from the schema."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from minivllm.config.keys import Key, keys_of, spelled
from minivllm.config.modes import MODES
from minivllm.config.schema import EngineSchema
from minivllm.plugins.registry import KINDS, Registry

_EXAMPLES = """\
Examples
  minivllm                                             the demo model completes three sample prompts
  minivllm 'prompts=["Once upon a time","The engine"]' max_tokens=40 temperature=0.7 seed=1
  minivllm prompts='What is a cache?' model=qwen3
  minivllm prompts_file=in.jsonl output=out.jsonl      also: cat in.txt | minivllm
  minivllm model.path=DIR attention=torch              a checkpoint folder in Hugging Face's layout
  minivllm model=qwen3-8b load_format=dummy            random weights from the published shape; no download
  minivllm chat                                        chat with the demo model
  minivllm serve model=qwen3 port=8000                 OpenAI's API on http://127.0.0.1:8000/v1
  minivllm bench workload=mixed model=qwen3 load_format=dummy
  minivllm bench -m attention=torch,triton tp=1,2      every combination: a table, files and report.html
  minivllm bench -m sweep.resume=DIR                   finish an interrupted sweep
  minivllm bench compare A.json B.json threshold=5     what got faster or slower
  minivllm plugins list                                what is installed, and whether it can run here
  minivllm plugins new mine --kind scheduler           write a plugin package to ./minivllm-mine
"""
_PLUGINS = f"""\
usage: minivllm plugins [list] [--json]
       minivllm plugins new NAME --kind {"|".join(KINDS)}

list: every model, attention backend, scheduler, sampler and executor, the package it comes from, and
whether it can run here, or why not. Then every problem with a plugin.

new: writes a package to ./minivllm-NAME that installs (pip install -e), passes its tests and runs: a
skeleton to start from.
"""
_ENVIRONMENT = """\
Environment
  MINIVLLM_API_KEY=KEY         serve: what clients must send, unless api_key= is given; bench url=...: what is sent
  MINIVLLM_COMMIT=NAME         bench: commit to record for a source tree without .git
  MINIVLLM_DEBUG=1             a traceback with each error
  MINIVLLM_DISABLE_PLUGINS=a,b skip these plugins (or packages); all: all but the built-in ones
  MINIVLLM_STRICT_PLUGINS=1    treat a problem with a plugin as an error
"""
_FLAGS = (
    ("-m", "bench: run each combination of key=a,b (Hydra's syntax: also choice(), range(), glob())"),
    ("--cfg job", "print the config instead of running it"),
    ("--version", "print the version"),
)


def help_text(word: str | None, registry: Registry) -> str:
    """For one mode its own keys; without one, those of generate."""
    if word == "plugins":
        return (_PLUGINS + "\n" + _ENVIRONMENT).rstrip()
    from minivllm.config.overrides import group_options

    mode = word or "generate"
    engine, own = keys_of(EngineSchema), keys_of(MODES[mode].schema)
    extra = [k for name, k in own.items() if name not in engine and not name.endswith(".name")]
    shared = [k for name, k in engine.items() if name != "mode" and not name.endswith(".name")]
    groups = [g for g in MODES[mode].schema.__dataclass_fields__ if registry.config_options(g)]
    others = " (other modes have others: minivllm serve --help)" if mode == "generate" else ""
    modes = [*((m, MODES[m].help) for m in MODES), ("plugins", "list plugins; `plugins new` writes a skeleton")]
    parts = [
        "usage: minivllm [generate|chat|serve|bench|plugins] [key=value ...] [--cfg] [--help] [--version]",
        "A small, pluggable inference engine for large language models.",
        _block("Modes", modes),
        _block("Groups (group=option)", ((g, ", ".join(group_options(g, registry))) for g in groups)),
        _block(f"Keys of {mode}{others}", map(_line, extra)) if extra else "",
        _block("Keys of every mode", map(_line, shared)),
        _block("Flags", _FLAGS),
        _EXAMPLES + "\n" + _ENVIRONMENT,
    ]
    return "\n\n".join(part for part in parts if part).rstrip()


def _line(key: Key) -> tuple[str, str]:
    shown = f"{key.name}.KEY=VALUE" if key.mapping else f"{key.name}={spelled(key.default)}"
    one_of = f" ({key.type.removeprefix('one of ')})" if key.type.startswith("one of") else ""
    return shown, key.help + one_of


def _block(title: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [title]
    for name, text in rows:
        wrapped = textwrap.wrap(text, 72) or [""]
        head = f"  {name:<41} "
        lines.append((head if len(head) <= 44 else f"  {name}\n{' ' * 44}") + wrapped[0])
        lines += [" " * 44 + line for line in wrapped[1:]]
    return "\n".join(lines)
