"""Every package of examples/plugins, and one a kind from ``plugins new``, pass their own tests, all installed together.

They are installed as pip would from their wheels, without a network: built by hatchling, unpacked into one folder. One
run of pytest goes through all their tests, because importing torch is most of what a short run costs; those
marked slow that it leaves out run in a package's own folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from minivllm.plugins import KINDS, load_plugins
from minivllm.plugins.new import new_plugin

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {file.parent.name: file.parent for file in sorted(ROOT.glob("examples/plugins/*/pyproject.toml"))}
# Of tests marked slow, tensor parallelism: of a model with more in it than dense ones have, and of a new one.
TESTS = "not slow or (test_tensor_parallel and (EveryLayer or NewModel))"
NEW = {f"minivllm-new-{kind}": kind for kind in KINDS}


@dataclass
class Site:
    """Where all of them are installed, and how their tests ended."""

    folder: Path
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)  # package → passed, failure, error, skipped
    output: str = ""

    def run(self, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, (self.folder, ROOT, ROOT / "tests")))
        env = os.environ | {"PYTHONPATH": path, "MINIVLLM_STRICT_PLUGINS": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", *command], cwd=cwd, env=env, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=580,
        )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder, made = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("new")
    for name, kind in NEW.items():
        new_plugin([name.removeprefix("minivllm-")], [f"kind={kind}"], load_plugins([]), made)
    packages = EXAMPLES | {name: made / name for name in NEW}
    for package in packages.values():
        (wheel,) = WheelBuilder(str(package)).build(directory=str(tmp_path_factory.mktemp("wheel")))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return Site(folder, *_tests(Site(folder), packages, made))


def _tests(site: Site, packages: dict[str, Path], cwd: Path) -> tuple[dict[str, Counter[str]], str]:
    files = {file.stem: name for name, package in packages.items() for file in package.glob("tests/test_*.py")}
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in packages}
    report = cwd / "report.xml"
    output = site.run(
        "pytest", "-q", f"-k{TESTS}", "-pheap", "-ptriton_patches", "-pno:cacheprovider",
        f"--rootdir={cwd}", f"-c{ROOT / 'pyproject.toml'}", f"--junitxml={report}",
        *(str(package / "tests") for package in packages.values()), cwd=cwd,
    ).stdout  # fmt: skip
    for case in ElementTree.parse(report).iter("testcase") if report.is_file() else ():
        package = next(files[part] for part in case.attrib["classname"].split(".") if part in files)
        ended = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[package][ended[0] if ended else "passed"] += 1
    return outcomes, output


@pytest.mark.parametrize("package", [*EXAMPLES, *NEW])
def test_a_package_passes_its_tests(site: Site, package: str) -> None:
    outcome = site.outcomes[package]
    assert outcome["passed"] and not outcome["failure"] + outcome["error"], site.output


def test_all_are_listed_and_run_together(site: Site, tmp_path: Path) -> None:
    listed = site.run("minivllm", "plugins", "list", cwd=tmp_path)
    assert listed.returncode == 0, listed.stdout
    for package in [*EXAMPLES, *NEW]:
        assert any(f" {package} " in line and " yes " in line for line in listed.stdout.splitlines()), listed.stdout
    chosen = [f"{kind}={name.removeprefix('minivllm-')}" for name, kind in NEW.items()]
    said = site.run(
        "minivllm", *chosen, "load_format=dummy", "device=cpu", "max_tokens=4", "ignore_eos=true", cwd=tmp_path
    )
    assert said.returncode == 0 and "12 tokens" in said.stdout, said.stdout
