"""The command line: modes, overrides and how errors are shown. Imports nothing heavy until a mode runs."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.bytecode import kept_bytecode
from minivllm.errors import ConfigError, MinivllmError, one_line

if TYPE_CHECKING:
    from minivllm.config.compose import Composed

_WORDS = ("generate", "chat", "serve", "bench", "plugins")
_FLAGS = ("-h", "--help", "-V", "--version", "--cfg", "--json", "-m", "--multirun", "--kind")


@dataclass(slots=True)
class Arguments:
    """The parts of a command line, which may be in any order."""

    word: str | None = None  # the mode, or plugins
    rest: list[str] = field(default_factory=list)  # further words: `plugins list`, `plugins new NAME`
    overrides: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # `plugins new --kind`, the only flag whose value is a separate word

    def has(self, *names: str) -> bool:
        return any(name in self.flags for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code: 0, 1 for an error, 2 for a wrong command line, 130 for Ctrl-C."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an unencodable text must not lose the others
    try:
        return _run(parse(sys.argv[1:] if argv is None else argv))
    except MinivllmError as e:
        if os.environ.get("MINIVLLM_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        else:
            _say(f"minivllm: {one_line(e)}")
        return 2 if isinstance(e, ConfigError) else 1
    except KeyboardInterrupt:
        _say("\nminivllm: interrupted")
        return 130
    except OSError as e:
        if e.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        if e.errno != errno.EPIPE:  # no message for `minivllm ... | head`
            _say(f"minivllm: results could not be written: {e.strerror}")
        # What is still buffered has nowhere to go; a later flush must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parse(argv: Sequence[str]) -> Arguments:
    """Sort the words into ``Arguments``. Raises ConfigError for an unknown flag or word."""
    from minivllm.naming import did_you_mean

    args, waiting = Arguments(), list(argv)
    while waiting:
        token = waiting.pop(0)
        if token.startswith("-"):
            flag, _, value = token.partition("=")
            if flag not in _FLAGS:
                raise ConfigError(
                    f"{token}: there is no such flag.{_meant(flag, value)} Settings are typed as key=value; "
                    "`minivllm --help` lists them"
                )
            if flag == "--kind":
                args.kinds.append(value or (waiting.pop(0) if waiting else ""))
                continue
            if flag == "--cfg":
                value = value or (waiting.pop(0) if waiting[:1] in (["job"], ["hydra"], ["all"]) else "job")
                if value != "job":
                    raise ConfigError(f"--cfg {value}: only --cfg job is shown, the config that a mode runs with")
            elif value:
                raise ConfigError(f"{token}: {flag} takes no value")
            args.flags.append(flag)
        elif "=" in token or token.startswith("~"):
            args.overrides.append(token)
        elif args.word is None:
            if token not in _WORDS:
                raise ConfigError(
                    f"{token!r} is neither a mode nor key=value.{did_you_mean(token, _WORDS) or _model(token)} "
                    f"Modes: {', '.join(_WORDS)}. A prompt is typed as prompts='...'"
                )
            args.word = token
        else:
            args.rest.append(token)
    if args.rest and args.word != "plugins" and not (args.word == "bench" and args.rest[0] == "compare"):
        word = args.rest[0]
        hint = did_you_mean(word, ["compare"]) if args.word == "bench" else ""
        if not hint and word not in _WORDS:
            hint = _model(word) or " A model is typed as model=NAME, model.path=FOLDER or model.repo=ORG/NAME."
            hint += " A prompt is typed as prompts='...'" if args.word == "generate" else ""
        raise ConfigError(f"{word!r} after {args.word}: one mode at a time; settings are typed as key=value.{hint}")
    return args


def _meant(flag: str, value: str) -> str:
    """A suggestion for an unknown flag: a key written with dashes, as in other programs, or a similar flag."""
    from minivllm.config.keys import keys_of
    from minivllm.config.modes import MODES
    from minivllm.config.vllm_names import lora_hint
    from minivllm.naming import did_you_mean

    name = flag.lstrip("-").replace("-", "_")
    if any(name in (key, key.partition(".")[0]) for mode in MODES.values() for key in keys_of(mode.schema)):
        return f" Did you mean {name}={value or '...'}?"
    return lora_hint(name) or did_you_mean(flag, _FLAGS)


def _model(word: str) -> str:
    """What to type for a model given as a bare name, as in other programs; empty if it is not a model."""
    from minivllm.config.overrides import group_options, model_keys
    from minivllm.plugins import load_plugins

    registry = load_plugins()
    try:
        [(key, value)] = model_keys(word, registry).items()
    except ConfigError:  # it looks like a folder that does not exist
        return ""
    if key == "model" and value not in group_options("model", registry):
        return ""
    return f" For the model type {key}={value}."


def _run(args: Arguments) -> int:
    if args.has("-V", "--version"):
        from minivllm.version import API_VERSION, __version__

        print(f"minivllm {__version__} (plugin API {API_VERSION})")
        return 0
    if args.has("-h", "--help"):
        if args.word == "bench" and args.rest:
            from minivllm.bench.compare import USAGE

            print(USAGE)
            return 0
        from minivllm.help import help_text
        from minivllm.plugins import load_plugins

        print(help_text(args.word, load_plugins()))
        return 0
    if args.kinds and args.rest[:1] != ["new"]:
        raise ConfigError("--kind belongs to `minivllm plugins new NAME --kind KIND`")
    if args.word == "plugins":
        return _plugins(args)
    if args.has("--json"):
        raise ConfigError("--json belongs to `minivllm plugins list --json`")
    if args.rest:
        from minivllm.bench.compare import run as compare

        if args.flags:
            raise ConfigError(f"{args.flags[0]}: bench compare takes no flag; type bench compare A.json B.json")
        return compare(args.rest[1:], args.overrides)
    with kept_bytecode():
        return _run_mode(args)


def _run_mode(args: Arguments) -> int:
    from minivllm.config.compose import compose
    from minivllm.config.modes import MODES
    from minivllm.plugins import default_registry

    typed = [o for o in args.overrides if o.startswith("mode=")]
    if args.word is not None and any(o != f"mode={args.word}" for o in typed):
        raise ConfigError(f"{args.word} and {typed[0]} name two modes; leave one out")
    mode = args.word or (typed[-1].partition("=")[2] if typed else "generate")
    several = args.has("-m", "--multirun")
    if several and mode != "bench":
        raise ConfigError(f"-m runs each combination of key=a,b in bench, not in {mode}: type `minivllm bench -m ...`")
    if several or (mode == "bench" and any(o.startswith("sweep.resume=") for o in args.overrides)):
        return _sweep(args)
    composed = compose(args.overrides, default_registry(), mode=args.word)
    if args.has("--cfg"):
        print(composed.to_yaml(), end="")
        return 0
    run = _load(composed.mode, MODES[composed.mode].target)
    if composed.speaks:
        return run(composed)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        return run(composed)


def _sweep(args: Arguments) -> int:
    from minivllm.bench.sweep import run
    from minivllm.plugins import default_registry

    if args.has("--cfg"):
        raise ConfigError("--cfg shows one config, and -m runs several; leave one out")
    return run([o for o in args.overrides if not o.startswith("mode=")], default_registry())


def _load(mode: str, target: str) -> Callable[[Composed], int]:
    module, _, function = target.partition(":")
    try:
        return getattr(import_module(module), function)
    except ModuleNotFoundError as e:
        extra = f"'minivllm[{mode}]'" if mode in ("serve", "bench") else str(e.name)
        raise MinivllmError(
            f"mode={mode} needs the package {e.name!r}, which is not installed; install it with: pip install {extra}"
        ) from e


# --------------------------------------------------------------------------- plugins


def _plugins(args: Arguments) -> int:
    from minivllm.plugins import load_plugins

    if args.rest[:1] == ["new"]:
        from minivllm.plugins.new import new_plugin

        if args.flags:
            raise ConfigError(f"{args.flags[0]}: plugins new takes no flag but --kind")
        settings = [*args.overrides, *(f"kind={kind}" for kind in args.kinds)]
        print(new_plugin(args.rest[1:], settings, load_plugins(), Path.cwd()))
        return 0
    if args.rest not in ([], ["list"]):
        raise ConfigError(
            f"plugins {' '.join(args.rest)}: there is only `plugins list` (with --json) and "
            "`plugins new NAME --kind KIND`"
        )
    if args.overrides:
        raise ConfigError(f"{args.overrides[0]}: plugins takes no settings")
    if other := [flag for flag in args.flags if flag != "--json"]:
        raise ConfigError(f"{other[0]}: plugins list takes no flag but --json")
    from minivllm.plugins.show import as_json, as_table

    registry = load_plugins()
    print(as_json(registry) if args.has("--json") else as_table(registry))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)
