"""The reading path in docs/index.md names files that exist, and about as many lines as they have."""

from __future__ import annotations

import re

import pytest
from pages import ROOT

SECTION = (ROOT / "docs/index.md").read_text().partition("## Read it in an afternoon\n")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \| ([\d,]+) \|", SECTION, re.MULTILINE)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def lines_of(cell: str) -> int:
    """Lines of a cell's files, patterns, and folders (their Python)."""
    total = 0
    for name in re.findall(r"`([^`]+)`", cell):
        files = sorted((ROOT / "minivllm").glob(f"{name}**/*.py" if name.endswith("/") else name))
        assert files, f"there is no minivllm/{name}"
        total += sum(len(file.read_text().splitlines()) for file in files)
    return total


@pytest.mark.parametrize(("cell", "said"), ROWS)
def test_files_have_about_as_many_lines_as_the_page_says(cell: str, said: str) -> None:
    assert lines_of(cell) == pytest.approx(number(said), rel=0.1)


def test_the_sum_of_the_path_is_what_both_pages_say() -> None:
    path = [cell for cell, _ in ROWS if cell.endswith(".py`") and "*" not in cell]
    assert len(path) == 10 and len(ROWS) > len(path)
    for page in (SECTION, (ROOT / "README.md").read_text()):
        (said,) = re.findall(r"[Tt]en files, ([\d,]+) lines", page)
        assert sum(map(lines_of, path)) == pytest.approx(number(said), rel=0.1)
