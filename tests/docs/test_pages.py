"""The pages for authors work as pasted: their files become packages, which are used from another folder."""

from __future__ import annotations

import ast
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import QUICK, ROOT, commands, files, install, run

import minivllm

ADD = {
    "add-a-model.md": "test_qwen2",
    "add-an-attention-backend.md": "test_gather",
    "add-a-scheduler.md": "test_shortest",
}
# All in one process, because importing torch is most of what a short one costs: command lines, then a run of pytest.
SESSION = """
import shlex, sys, pytest, minivllm.cli
split = sys.argv.index("--")
for line in sys.argv[1:split]:
    if code := minivllm.cli.main(shlex.split(line)):
        sys.exit(f"{line}: exit code {code}")
sys.exit(pytest.main(sys.argv[split + 1 :]))
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The packages of the three pages, their commands and then their tests run: the output, and pytest's report."""
    site = tmp_path_factory.mktemp("added") / "site"
    ours: list[str] = []
    for page in ADD:
        install(page, site)
        first, *lines, last = commands(page)
        assert (first, last) == ("pip install -e . 'minivllm[test]'", "python -m pytest tests")
        assert all(line.startswith("python -m minivllm ") for line in lines)
        ours += [line.removeprefix("python -m minivllm ") + " ignore_eos=true" for line in lines]
    report = site.parent / "report.xml"
    output = run(
        site,
        "-c",
        SESSION,
        *ours,
        "--",
        *QUICK,
        "-q",
        "-mnot slow",
        "-pno:cacheprovider",
        f"--junitxml={report}",
        f"{site}/tests",
    )
    return output, report


def test_the_commands_of_the_pages_run(session: tuple[str, Path]) -> None:
    assert session[0].count("12 tokens") == len(ADD), session[0]


def test_the_packages_of_the_pages_pass_their_tests(session: tuple[str, Path]) -> None:
    """Each ends with its conformance suite; that none of these is empty is told by the counts."""
    output, report = session
    passed: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        passed[case.attrib["classname"].split(".")[-2]] += not len(case)  # a child is a skip or a failure
    assert set(passed) == set(ADD.values()) and min(passed.values()) > 10, output


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with the package of plugins.md."""
    assert set(files("plugins.md")) == {
        "pyproject.toml", "minivllm_mine/plugin.py", "minivllm_mine/model.py", "minivllm_mine/scheduler.py",
    }  # fmt: skip
    install("plugins.md", tmp_path / "site")
    return tmp_path / "site"


def test_plugins_md_works_as_pasted(mine: Path) -> None:
    listed = run(mine, "-m", "minivllm", "plugins", "list")
    assert re.search(r"model +mine +minivllm-mine 0.1 +yes", listed)
    assert re.search(r"scheduler +gentle +minivllm-mine 0.1 +yes", listed)
    said = run(
        mine, "-m", "minivllm", "model=mine", "scheduler=gentle", "load_format=dummy", "max_tokens=4", "ignore_eos=true"
    )
    assert "12 tokens" in said


@pytest.mark.slow
def test_the_suites_of_contract_md_work_as_pasted(mine: Path) -> None:
    ((name, code),) = files("contract.md").items()
    file = mine.parent / name
    file.parent.mkdir()
    file.write_text(code)
    tests = ("TestMine::test_greedy_tokens", "TestGentle::test_every_row", "TestAttention::test_every_kind_of_step")
    chosen = " or ".join(["test_dtypes", *(test.partition("::")[2] for test in tests)])
    said = run(mine, "-m", "pytest", *QUICK, "-p", "no:cacheprovider", "-rA", "-k", chosen, str(file))
    for test in tests:
        assert f"PASSED {name}::{test}" in said
    assert "the page that shows this has no time for it" in said


def test_structured_outputs_md_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/structured-outputs.md").read_text()
    ((code, said),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "structured-outputs.md", "exec"), {})
    assert capsys.readouterr().out == said


def test_the_trainer_of_reload_weights_md_runs(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """What the page leaves to its reader is given. The engine is the trainer's equal afterwards."""
    code, last = re.findall(r"```python\n(.*?)```", (ROOT / "docs/reload-weights.md").read_text(), re.DOTALL)
    folder, said = tmp_path / "policy", []
    shutil.copytree(tiny_checkpoint("qwen3"), folder)

    def loss(policy: Any, outputs: Any) -> Any:
        said.extend(outputs)
        ids = torch.tensor([output.prompt_token_ids for output in outputs])
        return policy(ids, labels=ids).loss

    given = {"folder": str(folder), "batches": [[[1, 2, 3]], [[4, 5, 6]]], "loss": loss}
    indented = "".join(f"    {line}" for line in last.splitlines(keepends=True))
    exec(compile(code + indented.replace('"next"', f'"{tmp_path}/next"'), "reload-weights.md", "exec"), given)
    assert [len(output.outputs) for output in said] == [4, 4]


def test_code_imports_what_it_uses_of_minivllm() -> None:
    """In its block, or in one before it on the page."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        imported: set[str] = set()
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            nodes = list(ast.walk(ast.parse(code)))
            imported |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
            used = {node.id for node in nodes if isinstance(node, ast.Name)}
            assert used & set(minivllm.__all__) <= imported, f"{page.name}: {code}"


def test_every_page_is_linked_from_the_start() -> None:
    pages = {file.name for file in (ROOT / "docs").glob("*.md")} - {"index.md"}
    for start, prefix in (("docs/index.md", ""), ("README.md", "docs/")):
        linked = set(re.findall(rf"\]\({prefix}([\w-]+\.md)\)", (ROOT / start).read_text()))
        assert pages <= linked, f"{start} links to no {sorted(pages - linked)}"
