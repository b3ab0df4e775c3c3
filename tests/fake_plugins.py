"""Installed packages that are not: a module and its dist-info in a temporary folder on sys.path. No torch in here."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FakePlugin = Callable[..., Path]


def write_package(site: Path, package: str, code: str, *, version: str = "1.0", entry: str | None = None) -> None:
    """A distribution ``package`` with one module and one entry point (``entry``: ``name = module`` unless given)."""
    module = package.replace("-", "_")
    (site / f"{module}.py").write_text(textwrap.dedent(code))
    info = site / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[minivllm]\n{entry or f'{module} = {module}'}\n")


@pytest.fixture
def fake_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePlugin]:
    """``fake_plugin("minivllm-foo", code, version=, entry=)`` installs one; returns the folder, for PYTHONPATH."""
    site = tmp_path / "site"
    site.mkdir()
    before = set(sys.modules)
    for name in ("MINIVLLM_DISABLE_PLUGINS", "MINIVLLM_STRICT_PLUGINS"):
        monkeypatch.delenv(name, raising=False)

    def install(package: str, code: str, **options: str) -> Path:
        write_package(site, package, code, **options)
        monkeypatch.delitem(sys.modules, package.replace("-", "_"), raising=False)  # another test's of that name
        monkeypatch.syspath_prepend(str(site))
        return site

    yield install
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(site)):
            del sys.modules[name]


BACKEND = """
    from minivllm.plugins import Component, hookimpl

    class Fast:
        pass

    @hookimpl
    def minivllm_attention_backends():
        yield Component("{name}", __name__ + ":Fast", options=("window", "splits"))
"""
