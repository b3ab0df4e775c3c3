"""Cores are those that a process may run on, or what its cgroups grant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minivllm import cores
from minivllm.cores import _quota, usable_cores


def granted(tmp_path: Path, within: str, **quotas: str) -> float | None:
    """``quotas``: of folders of a cgroup tree, ``root`` and those below it by name; "old_": of version 1."""
    own, root = tmp_path / "own", tmp_path / "tree"
    for tree in (root, root / "cpu"):
        (tree / "outer" / "inner").mkdir(parents=True)
    own.write_text(within)
    for name, text in quotas.items():
        place = {"root": "", "outer": "outer", "inner": "outer/inner"}[name.removeprefix("old_")]
        if name.startswith("old_"):
            for what, value in zip(("quota", "period"), text.split(), strict=True):
                (root / "cpu" / place / f"cpu.cfs_{what}_us").write_text(value + "\n")
        else:
            (root / place / "cpu.max").write_text(text)
    return _quota(own, root)


@pytest.mark.parametrize(
    ("within", "quotas", "expected"),
    [
        ("0::/\n", {"root": "400000 100000\n"}, 4.0),  # a container sees its own as the root
        ("0::/outer/inner\n", {"inner": "max 100000\n", "outer": "150000 100000\n"}, 1.5),
        ("0::/outer/inner\n", {"inner": "50000 100000\n", "outer": "150000 100000\n"}, 0.5),
        ("0::/outer/inner\n", {"inner": "max 100000\n"}, None),
        ("0::/outer/gone\n", {"outer": "300000 100000\n"}, 3.0),
        ("0::/outer\n", {"outer": "nonsense"}, None),
        ("2:cpuset:/\n1:cpu:/outer\n0::/\n", {"outer": "300000 100000\n"}, None),  # not the one that it is in
        ("1:cpu:/outer/inner\n0::/\n", {"old_inner": "-1 100000", "old_outer": "250000 100000"}, 2.5),
        ("4:cpu,cpuacct:/docker/5f\n", {"old_root": "50000 100000"}, 0.5),  # a container, by its host's name
        ("4:cpu,cpuacct:/outer\n", {"old_inner": "50000 100000"}, None),
        ("what is this\n", {}, None),
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
