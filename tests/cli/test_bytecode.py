"""Bytecode is kept where Python would keep none, and only there."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

import pytest

from minivllm import bytecode, cli
from minivllm.bytecode import kept_bytecode, without_bytecode

NAME = "compiled_each_time"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that can be imported, whose bytecode Python does not keep."""
    file = tmp_path / "site" / NAME / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text("answer = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(bytecode, "_LEAST_CORES", 1 << 30)
    yield file
    sys.modules.pop(NAME, None)


def imported() -> Any:
    sys.modules.pop(NAME, None)
    invalidate_caches()
    return import_module(NAME)


def test_a_package_whose_bytecode_python_does_not_keep_is_found(source: Path) -> None:
    assert without_bytecode(NAME) == source.parents[1], "before it is imported"
    imported()
    assert without_bytecode(NAME) == source.parents[1]
    py_compile.compile(str(source))
    imported()
    assert without_bytecode(NAME) is None
    assert without_bytecode("no_such_package") is None


def test_bytecode_is_kept_and_taken_the_next_time(source: Path, tmp_path: Path) -> None:
    folder, before = tmp_path / "kept", os.stat(source)
    with kept_bytecode(NAME, str(folder)):
        assert imported().answer == 1
        assert without_bytecode(NAME) is None
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (None, True)
    assert [file.name.partition(".")[0] for file in folder.rglob("*.pyc")] == ["__init__"]
    assert not list(source.parent.rglob("*.pyc"))

    del sys.modules[NAME]  # a process later
    source.write_text("answer = 2\n")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))  # looks the same: what was compiled is taken
    with kept_bytecode(NAME, str(folder)):
        assert imported().answer == 1
    del sys.modules[NAME]
    source.write_text("answer = 'changed'\n")
    with kept_bytecode(NAME, str(folder)):
        assert imported().answer == "changed"


def test_the_first_time_other_cores_compile_all_of_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bytecode, "_LEAST_CORES", 1)
    begun: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: begun.append(popen(*args, **kwargs)) or begun[-1])
    (source.parent / "inner").mkdir()
    (source.parent / "inner" / "seldom.py").write_text("'nobody imports it here'\n")
    (source.parent / "broken.py").write_text("no Python\n")
    folder = tmp_path / "kept"
    for _ in range(2):  # and again, before it is done
        with kept_bytecode(NAME, str(folder)):
            pass
    (ahead,) = begun
    assert ahead.wait(60) == 1, "it goes on behind what does not compile"
    kept = {file.relative_to(folder / str(source.parent)[1:]).as_posix() for file in folder.rglob("*.pyc")}
    assert {name.partition(".")[0] for name in kept} == {"__init__", "inner/seldom"}
    (file,) = folder.rglob("__init__*.pyc")
    file.write_bytes(file.read_bytes().replace(b"answer", b"solved"))
    with kept_bytecode(NAME, str(folder)):
        assert imported().solved == 1, "what they compiled is taken"
    assert len(begun) == 1


def python_keeps_it(source: Path, folder: Path) -> None:
    sys.dont_write_bytecode = False


def it_came_with_bytecode(source: Path, folder: Path) -> None:
    py_compile.compile(str(source))


def somebody_chose_a_folder(source: Path, folder: Path) -> None:
    sys.pycache_prefix = str(folder.parent / "theirs")


def there_is_no_such_package(source: Path, folder: Path) -> None:
    source.unlink()
    source.parent.rmdir()
    invalidate_caches()


def the_folder_cannot_be_written(source: Path, folder: Path) -> None:
    folder.write_text("a file in its place")


@pytest.mark.parametrize(
    "why",
    [
        python_keeps_it,
        it_came_with_bytecode,
        somebody_chose_a_folder,
        there_is_no_such_package,
        the_folder_cannot_be_written,
    ],
)
def test_otherwise_nothing_changes(why: Callable[[Path, Path], None], source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    why(source, folder)
    before = sys.pycache_prefix, sys.dont_write_bytecode
    with kept_bytecode(NAME, str(folder)):
        assert (sys.pycache_prefix, sys.dont_write_bytecode) == before
    assert not folder.is_dir()


def test_a_user_without_a_home_gets_no_folder(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with kept_bytecode(NAME, "~/.cache/minivllm"):
        assert sys.pycache_prefix is None
    assert not (tmp_path / "~").exists()


def test_what_a_command_line_imports_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of torch, to which the command line's imports lead."""
    prefixes: list[str | None] = []
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr("minivllm.bytecode.without_bytecode", lambda package: tmp_path)
    monkeypatch.setattr(kept_bytecode.__wrapped__, "__defaults__", ("torch", str(tmp_path)))  # type: ignore[attr-defined]
    monkeypatch.setattr(cli, "_run_mode", lambda args: prefixes.append(sys.pycache_prefix) or 0)
    assert cli.main(["generate"]) == 0
    assert prefixes == [str(tmp_path)] and sys.pycache_prefix is None
