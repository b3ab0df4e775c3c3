"""``plugins new``: what it writes, and what it refuses. That the packages work is told in tests/examples."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from fake_plugins import BACKEND, FakePlugin

from minivllm import cli
from minivllm.errors import ConfigError
from minivllm.plugins import KINDS, load_plugins
from minivllm.plugins.new import new_plugin

REPO = Path(__file__).resolve().parents[2]


def files(folder: Path) -> dict[str, str]:
    return {str(f.relative_to(folder)): f.read_text() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_has_its_name_everywhere(kind: str, tmp_path: Path) -> None:
    told = new_plugin(["two-words2"], [f"kind={kind}"], load_plugins([]), tmp_path)
    assert "cd minivllm-two-words2" in told and f"{kind}=two-words2" in told
    written = files(tmp_path / "minivllm-two-words2")
    assert {"README.md", "pyproject.toml", "tests/test_two_words2.py", "minivllm_two_words2/plugin.py"} <= set(written)
    for name, text in written.items():
        assert "example" not in (name + text).lower(), name
        if name.endswith(".py"):
            ast.parse(text)
    project = tomllib.loads(written["pyproject.toml"])["project"]
    assert project["name"] == "minivllm-two-words2"
    assert project["entry-points"]["minivllm"] == {"two-words2": "minivllm_two_words2.plugin"}
    assert f"{kind}=two-words2" in written["README.md"]
    assert any("class TwoWords2" in text for text in written.values())


@pytest.mark.parametrize("argv", [["new", "mine", "--kind", "sampler"], ["--kind=sampler", "new", "mine"],
                                  ["new", "kind=sampler", "mine"]])  # fmt: skip
def test_the_kind_is_typed_as_a_flag_or_as_a_setting(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plugins", *argv]) == 0
    assert "pip install -e '.[test]' && pytest" in capsys.readouterr().out
    assert (tmp_path / "minivllm-mine" / "minivllm_mine" / "sampler.py").is_file()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["--kind", "model"],
            "one name is needed; type plugins new NAME --kind model|attention|scheduler|sampler|exec",
        ),
        (["a", "b", "--kind", "model"], "one name is needed"),
        (["mine"], "--kind is missing. Allowed: model, attention, scheduler, sampler, executor"),
        (["mine", "--kind"], "--kind is missing"),
        (["mine", "--kind", "modl"], "--kind modl: there is no such kind. Did you mean model? Allowed: model, att"),
        (["mine", "--kind", "model", "--kind", "sampler"], "--kind is typed 2 times"),
        (["mine", "kind=model", "tp=2"], "tp=2: plugins new takes only kind="),
        (["mine", "--kind", "model", "--json"], "--json: plugins new takes no flag but --kind"),
        (["My_Model", "--kind", "model"], "letters, digits and hyphens"),
        (["My_Model", "--kind", "model"], "; my-model would do"),
        (["4bit", "--kind", "model"], "; bit would do"),
        (["minivllm-mine", "--kind", "model"], "leaves out minivllm-; mine would do"),
        (["../mine", "--kind", "model"], "; mine would do"),
        (["true", "--kind", "model"], "is none of auto, false"),
        (["qwen3", "--kind", "model"], "model=qwen3 is taken already"),
        (["demo", "--kind", "model"], "model=demo is taken already"),
        (["qwen-3", "--kind", "model"], "the architecture Qwen3ForCausalLM is taken already"),
        (["mixed", "--kind", "scheduler"], "scheduler=mixed is taken already"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    argv: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plugins", "new", *argv]) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_name_of_another_kind_may_be_used_again(tmp_path: Path) -> None:
    new_plugin(["mixed"], ["kind=sampler"], load_plugins([]), tmp_path)


def test_an_installed_package_is_not_shadowed(fake_plugin: FakePlugin, tmp_path: Path) -> None:
    fake_plugin("minivllm-mine", BACKEND.format(name="fast"))
    for name, told in (("fast", "attention=fast is taken already"), ("mine", "minivllm-mine is installed already")):
        with pytest.raises(ConfigError, match=told):
            new_plugin([name], ["kind=attention"], load_plugins(), tmp_path)


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "minivllm-mine").mkdir()
    with pytest.raises(ConfigError, match="minivllm-mine exists already; choose another name, or remove it"):
        new_plugin(["mine"], ["kind=model"], load_plugins([]), tmp_path)
    assert files(tmp_path) == {}
    with pytest.raises(ConfigError, match="cannot be made: No such file or directory"):
        new_plugin(["mine"], ["kind=model"], load_plugins([]), tmp_path / "nowhere")


def test_help_tells_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plugins", "--help"]) == 0
    assert "plugins new NAME --kind model|attention|scheduler|sampler|executor" in capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    assert "minivllm plugins new mine --kind scheduler" in capsys.readouterr().out
