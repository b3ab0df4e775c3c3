"""What core exports to plugins does not shrink: the stored list is the promise, ``docs/contract.md`` the reason."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from exported import FILE, describe, shrunk

from minivllm import plugins
from minivllm.plugins import api
from minivllm.version import API_VERSION

ROOT = Path(__file__).parents[2]
SEE = "raise API_VERSION (minivllm/version.py), say so in docs/contract.md, then run python tests/plugins/exported.py"


def test_nothing_that_is_exported_is_taken_away() -> None:
    losses = shrunk(FILE.read_text().splitlines(), describe())
    assert not losses, "plugins would break: " + "; ".join(losses) + f". If it must be: {SEE}"


def test_what_is_new_is_written_down() -> None:
    new = set(describe()) - set(FILE.read_text().splitlines())
    assert not new, f"run python tests/plugins/exported.py: {sorted(new)}"


@pytest.mark.parametrize(
    ("before", "now", "loss"),
    [
        (["A", "b(x)"], ["A"], "b is gone"),
        (["b(x, y)"], ["b(x)"], "the parameter y is gone"),
        (["b(x)"], ["b(x, y)"], "y is new and has no default"),
        (["b(x)"], ["b(x, kw:y)"], "kw:y is new and has no default"),
        (["b(x, y=)"], ["b(x, y)"], "y has no default any more"),
        (["b(x, kw:y=)"], ["b(x, kw:y)"], "kw:y has no default any more"),
        (["b(x, y)"], ["b(y, x)"], "x stands elsewhere"),
        (["b(x, y)"], ["b(x, kw:y)"], "y is given by name only"),
        (["b(x, *rest)"], ["b(x)"], "the parameter *rest is gone"),
        (["A", "A must run"], ["A", "A must run", "A must hop"], "A must hop: those that are there do not"),
        (["A(x)"], ["A"], "the parameter x is gone"),
    ],
)
def test_a_loss_is_told(before: list[str], now: list[str], loss: str) -> None:
    assert any(loss in told for told in shrunk(before, now))


def test_what_grows_is_no_loss() -> None:
    now = ["A", "b(x, y=, z=, kw:w=, *more)", "B must run", "B"]
    assert shrunk(["A", "b(x, y=)"], now) == []
    assert shrunk(["b(x, kw:y)"], ["b(x, y)"]) == []


def test_the_list_is_found_without_importing_anything_heavy() -> None:
    code = (
        "import sys, minivllm.plugins.api as api; api.EXPORTS, dir(api), api.Component\n"
        "heavy = {'torch', 'numpy', 'hydra', 'omegaconf', 'transformers', 'triton', 'pytest'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from minivllm.plugins.api import CausalLM, TensorParallel"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_a_name_is_exported_once_and_an_unknown_one_is_refused() -> None:
    assert len(api.__all__) == len(set(api.__all__)) == sum(map(len, api.EXPORTS.values()))
    with pytest.raises(AttributeError, match="exports no 'Modle'"):
        api.Modle  # noqa: B018


def test_the_version_is_the_first() -> None:
    """Whoever raises it writes down in docs/contract.md what changed."""
    text = (ROOT / "docs" / "contract.md").read_text()
    assert re.search(rf"^\| {API_VERSION} \|", text, re.MULTILINE)


def plugin_files() -> list[Path]:
    """Code that is shown to authors as what a plugin looks like; what only measures it may use what it likes."""
    folders = [*(ROOT / "examples" / "plugins").glob("*/minivllm_*"), *(ROOT / "minivllm/plugins/templates").glob("*")]
    return [
        file
        for folder in folders
        for file in sorted(folder.rglob("*.py"))
        if not {"tests", "bench.py"} & set(file.parts)
    ]


def test_plugins_that_we_show_use_nothing_else() -> None:
    allowed = {(module, name) for module, names in api.EXPORTS.items() for name in names}
    allowed |= {("minivllm.plugins.api", name) for name in api.__all__}
    allowed |= {("minivllm.plugins", name) for name in plugins.__all__}
    sources = {str(file): file.read_text() for file in plugin_files()}
    for page in sorted((ROOT / "docs").glob("*.md")):
        shown = re.findall(r"```python\n# (minivllm_\S+)(.*?)```", page.read_text(), re.DOTALL)
        sources |= {f"{page.name}: {name}": "#" + code for name, code in shown}
    assert any(where.startswith("add-a-model.md") for where in sources) and len(sources) > 3
    for where, code in sources.items():
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minivllm."):
                used = {(node.module, alias.name) for alias in node.names}
                assert used <= allowed, f"{where} uses {used - allowed}, which minivllm.plugins.api does not export"
