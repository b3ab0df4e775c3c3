"""``minivllm plugins new NAME --kind KIND``: writes a package that installs, passes its tests and runs as is.

``templates/KIND`` and ``templates/common`` hold it under the name "example", as code that is linted with the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from minivllm.errors import ConfigError
from minivllm.modules import exists
from minivllm.naming import did_you_mean, listing
from minivllm.plugins.registry import KINDS, Registry

TEMPLATES = Path(__file__).parent / "templates"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_WORDS = ("auto", "false", "inf", "nan", "no", "none", "null", "off", "on", "true", "yes")  # special in YAML, CLI
_USAGE = "type plugins new NAME --kind " + "|".join(KINDS)
_TRY = {"model": "model={name} load_format=dummy max_tokens=8"}  # the other kinds run the demo model: KIND=NAME


def new_plugin(words: Sequence[str], settings: Sequence[str], registry: Registry, parent: Path) -> str:
    """Write ``parent/minivllm-NAME``; returns the message for the user.

    Args:
        words: what follows ``plugins new``: the name.
        settings: ``["kind=KIND"]``.
        registry: its names are taken.

    Raises:
        ConfigError: a bad or taken name, an unknown kind, a folder that exists or cannot be written.
    """
    if len(words) != 1:
        raise ConfigError(f"plugins new {' '.join(words)}".rstrip() + f": one name is needed; {_USAGE}")
    name, kind = words[0], _kind(settings)
    _check_name(name, kind, registry)
    folder = parent / f"minivllm-{name}"
    try:
        folder.mkdir()
    except FileExistsError as e:
        raise ConfigError(f"{folder} exists already; choose another name, or remove it") from e
    except OSError as e:
        raise ConfigError(f"{folder} cannot be made: {e.strerror}") from e
    for file, text in sorted(render(name, kind)):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    run = _TRY.get(kind, "{kind}={name}").format(kind=kind, name=name)
    return (
        f"{folder.name}: a package with the {KINDS[kind]} {name}\n\n"
        f"  cd {folder.name}\n  pip install -e '.[test]' && pytest\n  minivllm {run}\n\nREADME.md says what to change."
    )


def render(name: str, kind: str) -> Iterator[tuple[Path, str]]:
    """Every file of the package: its path within the package's folder, and its text."""
    words = {"minivllm_example": _module(name), "test_example": "test_" + name.replace("-", "_"), "example": name}
    words["Example"] = _camel(name)

    def rename(text: str) -> str:
        return re.sub("|".join(words), lambda match: words[match[0]], text)

    for root in (TEMPLATES / "common", TEMPLATES / kind):
        for file in root.rglob("*"):
            if file.is_file() and file.suffix in (".py", ".toml", ".md"):
                yield Path(rename(str(file.relative_to(root)))), rename(file.read_text(encoding="utf-8"))


def _kind(settings: Sequence[str]) -> str:
    kind = ""
    for setting in settings:
        key, _, kind = setting.partition("=")
        if key != "kind":
            raise ConfigError(f"{setting}: plugins new takes only kind=; {_USAGE}")
    if len(settings) > 1:
        raise ConfigError(f"--kind is typed {len(settings)} times, and a package begins with one; {_USAGE}")
    if kind not in KINDS:
        what = f"--kind {kind}: there is no such kind.{did_you_mean(kind, KINDS)}" if kind else "--kind is missing."
        raise ConfigError(f"{what} Allowed: {listing(KINDS)}")
    return kind


def _check_name(name: str, kind: str, registry: Registry) -> None:
    if not _NAME.fullmatch(name) or name in _WORDS or re.match("minivllm(-|$)", name):
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).removeprefix("minivllm").strip("-0123456789")
        hint = f"; {plain} would do" if _NAME.fullmatch(plain) and plain not in _WORDS else ""
        raise ConfigError(
            f"plugins new {name}: a name is lower-case letters, digits and hyphens, begins with a letter, is none of "
            f"{listing(_WORDS)}, and leaves out minivllm-{hint}"
        )
    taken = {*registry.names(kind), *registry.aliases(kind), *registry.config_options(kind)}
    if name in taken:
        raise ConfigError(f"plugins new {name}: {kind}={name} is taken already; choose another name")
    architecture = f"{_camel(name)}ForCausalLM"
    if kind == "model" and any(architecture in e.component.architectures for e in registry.entries("model")):  # type: ignore[attr-defined]
        raise ConfigError(f"plugins new {name}: the architecture {architecture} is taken already; choose another name")
    if exists(_module(name)) or _installed(f"minivllm-{name}"):
        raise ConfigError(f"plugins new {name}: a package minivllm-{name} is installed already; choose another name")


def _installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _module(name: str) -> str:
    return "minivllm_" + name.replace("-", "_")


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("-"))
