"""What the pages for authors show: their files (named in a block's first line) and commands, and a folder to use them.

The tests of all pages go through here. A page's package is installed as pip would, by its metadata.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FILE = re.compile(r"```(?:toml|python)\n# ([\w./]+)[^\n]*\n(.*?)```", re.DOTALL)
_COMMANDS = re.compile(r"```bash\n(.*?)```", re.DOTALL)


QUICK = ["-pheap", "-ptriton_patches"]  # pytest's options: what makes our own tests quick


def files(page: str) -> dict[str, str]:
    """Name → text."""
    return dict(_FILE.findall((ROOT / "docs" / page).read_text()))


def commands(page: str) -> list[str]:
    """The lines of the page's bash blocks."""
    return "".join(_COMMANDS.findall((ROOT / "docs" / page).read_text())).splitlines()


def install(page: str, site: Path) -> None:
    """Put the page's package, and its tests, into the folder ``site``."""
    shown = files(page)
    project = tomllib.loads(shown.pop("pyproject.toml"))["project"]
    for name, code in shown.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(code)
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (entry,) = project["entry-points"]["minivllm"].items()
    (info / "entry_points.txt").write_text(f"[minivllm]\n{entry[0]} = {entry[1]}\n")


def run(site: Path, *args: str) -> str:
    """``python ARGS`` beside ``site``, on the CPU, with what is installed there; returns what it printed."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT, ROOT / "tests"))), "MINIVLLM_STRICT_PLUGINS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *args], cwd=site.parent, env=env, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout
