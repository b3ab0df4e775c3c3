"""What tests replace in modules by name is there, also in those that only a GPU runs."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest

TESTS = sorted(Path(__file__).parent.rglob("test_*.py"))


def replaced(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, owner and attribute of each ``monkeypatch.setattr``; the owner is a module of ours or something in one."""
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr" and not node.keywords:
            match node.args:
                case [ast.Constant(str(path)), _]:
                    owner, _, name = path.rpartition(".")
                case [ast.Name(known), ast.Constant(str(name)), _] if known in imported:
                    owner = imported[known]
                case _:
                    continue
            if owner.startswith("minivllm."):
                yield node.lineno, owner, name


def there(owner: str) -> object:
    try:
        return importlib.import_module(owner)
    except ModuleNotFoundError:
        return resolve_name(owner)


@pytest.mark.parametrize("file", TESTS, ids=lambda file: file.stem)
def test_what_is_replaced_is_there(file: Path) -> None:
    missing = [
        f"{file.name}:{line}: {owner} has no {name}"
        for line, owner, name in replaced(ast.parse(file.read_text()))
        if not hasattr(there(owner), name)
    ]
    assert not missing


def test_a_name_that_is_gone_is_found() -> None:
    source = "from minivllm.layers import decoder\nmonkeypatch.setattr(decoder, 'packed_chain', 1)\n"
    ((line, owner, name),) = replaced(ast.parse(source))
    assert (line, owner, name) == (2, "minivllm.layers.decoder", "packed_chain") and not hasattr(there(owner), name)
