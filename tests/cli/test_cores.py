"""Cores are those that a process may run on, or what its cgroups grant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minivllm import cores
from minivllm.cores import _quota, usable_cores


def granted(tmp_path: Path, within: str, **quotas: str) -> float | None:
    """``quotas``: of folders of a cgroup tree, ``root`` and those below it by name."""
    own, root = tmp_path / "own", tmp_path / "tree"
    (root / "outer" / "inner").mkdir(parents=True)
    own.write_text(within)
    for name, text in quotas.items():
        (root / {"root": "", "outer": "outer", "inner": "outer/inner"}[name] / "cpu.max").write_text(text)
    return _quota(own, root)


@pytest.mark.parametrize(
    ("within", "quotas", "expected"),
    [
        ("0::/\n", {"root": "400000 100000\n"}, 4.0),  # a container sees its own as the root
        ("0::/outer/inner\n", {"inner": "max 100000\n", "outer": "150000 100000\n"}, 1.5),
        ("0::/outer/inner\n", {"inner": "50000 100000\n", "outer": "150000 100000\n"}, 0.5),
        ("0::/outer/inner\n", {"inner": "max 100000\n"}, None),
        ("0::/outer/gone\n", {"outer": "300000 100000\n"}, 3.0),
        ("12:cpu:/outer\n", {"outer": "300000 100000\n"}, None),  # version 1: none that we read
        ("0::/outer\n", {"outer": "nonsense"}, None),
    ],
)
def test_the_tightest_quota_counts(tmp_path: Path, within: str, quotas: dict[str, str], expected: float | None) -> None:
    assert granted(tmp_path, within, **quotas) == expected


def test_there_may_be_no_cgroups(tmp_path: Path) -> None:
    assert _quota(tmp_path / "none", tmp_path / "nowhere") is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 6), (2.9, 2), (0.5, 1), (64.0, 6)])
def test_who_asks_gets_whole_cores(monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(cores, "_quota", lambda own, root: quota)
    usable_cores.cache_clear()
    try:
        assert usable_cores() == expected
    finally:
        usable_cores.cache_clear()
