"""docs/plugins.md works as pasted: its code blocks become a package, which is then used from another folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```(?:toml|python)\n# ([\w./]+)[^\n]*\n(.*?)```", re.DOTALL)


def test_the_page_works_as_pasted(tmp_path: Path) -> None:
    site = tmp_path / "site"
    blocks = dict(BLOCK.findall((ROOT / "docs" / "plugins.md").read_text()))
    assert set(blocks) == {
        "pyproject.toml", "minivllm_mine/plugin.py", "minivllm_mine/model.py", "minivllm_mine/scheduler.py",
    }  # fmt: skip
    project = tomllib.loads(blocks.pop("pyproject.toml"))["project"]
    for name, code in blocks.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(code)
    info = site / f"minivllm_mine-{project['version']}.dist-info"  # what pip would write
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (entry,) = project["entry-points"]["minivllm"].items()
    (info / "entry_points.txt").write_text(f"[minivllm]\n{entry[0]} = {entry[1]}\n")

    def minivllm(*args: str) -> str:
        env = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "MINIVLLM_STRICT_PLUGINS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "minivllm", *args], cwd=tmp_path, env=env, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = minivllm("plugins", "list")
    assert re.search(r"model +mine +minivllm-mine 0.1 +yes", listed)
    assert re.search(r"scheduler +gentle +minivllm-mine 0.1 +yes", listed)
    said = minivllm(
        "model=mine", "scheduler=gentle", "load_format=dummy", "device=cpu", "max_tokens=4", "ignore_eos=true"
    )
    assert "12 tokens" in said
