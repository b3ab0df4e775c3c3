"""What a bad plugin does to others: one line that names its package and the cause, and the tokens are the same.

In this process, in two spawned ranks and in two Ray actors. ``MINIVLLM_STRICT_PLUGINS=1`` makes each line an error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_plugins import FakePlugin, write_package

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError, MinivllmError, PluginError
from minivllm.plugins import load_plugins
from minivllm.plugins.manager import default_registry
from minivllm.plugins.ranks import registry_of_rank, view_of

HOOK = "from minivllm.plugins import Component, ModelComponent, hookimpl\n"
# package -> its code, and what the line about it says
BAD: dict[str, tuple[str, str]] = {
    "minivllm-no-import": ("import no_such_package_anywhere", "No module named 'no_such_package_anywhere'"),
    "minivllm-old": (
        "MINIVLLM_API_VERSION = 0",
        "was written for plugin API 0, this minivllm has 1; upgrade minivllm-old",
    ),
    "minivllm-new": (
        "MINIVLLM_API_VERSION = 2",
        "was written for plugin API 2, this minivllm has 1; upgrade minivllm (",
    ),
    "minivllm-taken": (
        HOOK + "@hookimpl\ndef minivllm_samplers(): yield Component('default', 'x:Y')",
        "sampler 'default' is already registered by minivllm 0",
    ),
    "minivllm-twin-b": (
        HOOK + "@hookimpl\ndef minivllm_schedulers(): yield Component('twin', 'x:Y')",
        "scheduler 'twin' is already registered by minivllm-twin-a 1.0, which is kept",
    ),
    "minivllm-raises": (
        HOOK + "@hookimpl\ndef minivllm_models(): raise RuntimeError('no\\nluck')",
        "minivllm_models raised RuntimeError: no luck",
    ),
    # What auto would take first, and cannot: it raises when it is made, when it is imported, when it is asked.
    "minivllm-unbuilt": (
        HOOK + "from minivllm.backends.torch import TorchBackend\n"
        "class Backend(TorchBackend):\n    def __init__(self, spec): raise RuntimeError('no room\\nat all')\n"
        "@hookimpl\ndef minivllm_attention_backends(): yield Component('unbuilt', __name__ + ':Backend', priority=99)",
        "attention backend 'unbuilt' of minivllm-unbuilt 1.0 cannot be built: RuntimeError: no room at all",
    ),
    "minivllm-late-import": (
        HOOK + "@hookimpl\ndef minivllm_attention_backends(): yield Component('late', 'late_module:Late', priority=98)",
        "attention backend 'late' of minivllm-late-import 1.0 cannot be imported: late_module raised ZeroDivisionError",
    ),
    "minivllm-asked": (
        HOOK + "from minivllm.backends.torch import TorchBackend\n"
        "class Backend(TorchBackend):\n    @classmethod\n    def unsupported(cls, spec): return spec.nothing\n"
        "@hookimpl\ndef minivllm_attention_backends(): yield Component('asked', __name__ + ':Backend', priority=97)",
        "attention backend 'asked' of minivllm-asked 1.0 cannot be built: AttributeError",
    ),
}
# Well behaved: each is listed as what it is, and says nothing unless it is named.
QUIET = {
    "minivllm-twin-a": HOOK + "@hookimpl\ndef minivllm_schedulers(): yield Component('twin', 'x:Y')",
    "minivllm-needs": HOOK
    + "@hookimpl\ndef minivllm_samplers(): yield Component('needs', 'x:Y', requires=('no_such_package_anywhere',))",
}
# Its hook knows the process that it was installed in, and no other.
ONLY_PARENT = (
    HOOK
    + """
import os
from minivllm.backends.torch import TorchBackend
class Here(TorchBackend): pass
@hookimpl
def minivllm_attention_backends():
    if os.environ.get("TEST_PARENT") == str(os.getpid()):
        yield Component("here", __name__ + ":Here", priority=-1)
"""
)
HERE = "attention backend 'here' of minivllm-here 1.0 is registered in the parent process only"
# Each of its classes raises, or is none that can be used; nobody is troubled who does not name them.
BROKEN = """
from minivllm.plugins.api import *
from minivllm.plugins.api import Component, ModelComponent, hookimpl
from minivllm.models.qwen3 import Qwen3ForCausalLM

class Model_(Qwen3ForCausalLM):
    architectures = ("BrokenForCausalLM",)
    def __init__(self, config, tp): raise RuntimeError("no\\nluck")
class Attention_(TorchBackend):
    def __init__(self, spec): raise RuntimeError("no\\nluck")
class Scheduler_(MixedScheduler):
    def __init__(self, *args): raise RuntimeError("no\\nluck")
class Sampler_(DefaultSampler):
    def __init__(self, *args): raise RuntimeError("no\\nluck")
class Rowless(Sampler):
    encode = prepare = sample = __init__ = None
class Executor_(Executor):
    def __init__(self, *args): raise RuntimeError("no\\nluck")
    start = launch = describe = shutdown = check_health = None
class Half(Scheduler):
    pass
class Foreign:
    pass

@hookimpl
def minivllm_models(): yield ModelComponent("broken", __name__ + ":Model_", architectures=("BrokenForCausalLM",))
@hookimpl
def minivllm_attention_backends(): yield Component("broken", __name__ + ":Attention_", priority=-1)
@hookimpl
def minivllm_schedulers():
    yield Component("broken", __name__ + ":Scheduler_")
    yield Component("half", __name__ + ":Half")
@hookimpl
def minivllm_samplers():
    yield Component("broken", __name__ + ":Sampler_")
    yield Component("rowless", __name__ + ":Rowless")
    yield Component("foreign", __name__ + ":Foreign")
    yield Component("needy", __name__ + ":Foreign", requires=("no_such_package_anywhere",))
    yield Component("nowhere", "no_such_package_anywhere.x:Y", requires=("no_such_package_anywhere",))
@hookimpl
def minivllm_executors(): yield Component("broken", __name__ + ":Executor_")
"""
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(30))]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TEST_PARENT", str(os.getpid()))
    default_registry.cache_clear()
    yield
    default_registry.cache_clear()


def install(package: Callable[..., Any], names: list[str] | None = None) -> None:
    for name, (code, _) in BAD.items():
        if names is None or name in names:
            package(name, code)
    for name, code in QUIET.items():
        package(name, code)
    package("minivllm-here", ONLY_PARENT)
    package("minivllm-broken", BROKEN)


@pytest.fixture
def all_bad(fake_plugin: FakePlugin) -> None:
    install(fake_plugin)
    (fake_plugin("minivllm-last", "x = 1", entry="last = json") / "late_module.py").write_text("1 / 0")


def say(checkpoint: Path, **options: Any) -> list[list[int]]:
    with LLM(str(checkpoint), device="cpu", **options) as llm:
        assert llm.engine.describe()["attention"] == "torch" or options.get("attention")
        return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def lines_about(records: list[logging.LogRecord]) -> dict[str, list[str]]:
    """What was told, by package."""
    told = [record.getMessage() for record in records if record.name == "minivllm.plugins"]
    assert not [line for line in told if "\n" in line]
    return {name: [line for line in told if f"{name} 1.0" in line.partition(": ")[0]] for name in [*BAD, *QUIET]}


def check_told(records: list[logging.LogRecord]) -> None:
    for name, lines in lines_about(records).items():
        if name in QUIET:
            assert not lines
        else:
            (line,) = lines
            assert BAD[name][1] in line


@pytest.fixture
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("qwen3")


@pytest.fixture
def reference(tiny_checkpoint: Callable[..., Path]) -> list[list[int]]:
    return say(tiny_checkpoint("qwen3"), attention="torch")


# --------------------------------------------------------------------------- in this process


def test_each_is_one_line_and_everything_else_works(
    reference: list[list[int]], all_bad: None, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    default_registry.cache_clear()
    assert say(checkpoint) == reference
    check_told(caplog.records)


@pytest.mark.parametrize("name", BAD)
def test_in_strict_mode_each_is_an_error(
    name: str, fake_plugin: FakePlugin, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(fake_plugin, [name])
    (fake_plugin("minivllm-good", HOOK + "@hookimpl\ndef minivllm_models(): return []") / "late_module.py").write_text(
        "1 / 0"
    )
    monkeypatch.setenv("MINIVLLM_STRICT_PLUGINS", "1")
    with pytest.raises(PluginError) as e:
        LLM(str(checkpoint), device="cpu")
    assert BAD[name][1] in str(e.value) and "\n" not in str(e.value)


@pytest.fixture
def broken_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """Of the architecture whose model raises."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((checkpoint / "config.json").read_text()) | {"architectures": ["BrokenForCausalLM"]}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["scheduler=broken"], "scheduler 'broken' of minivllm-broken 1.0 cannot be built: RuntimeError: no luck"),
        (["sampler=broken"], "sampler 'broken' of minivllm-broken 1.0 cannot be built: RuntimeError: no luck"),
        (["executor=broken"], "executor 'broken' of minivllm-broken 1.0 cannot be built: RuntimeError: no luck"),
        (["attention=broken"], "attention backend 'broken' of minivllm-broken 1.0 cannot be built: RuntimeError: no l"),
        (["model"], "model 'broken' of minivllm-broken 1.0 cannot be built: RuntimeError: no luck"),
        (["sampler=rowless"], "sampler 'rowless' of minivllm-broken 1.0 cannot be built: AttributeError"),
        (["scheduler=half"], ":Half, which lacks Scheduler's __init__, abort, add, check, commit"),
        (["sampler=foreign"], "of minivllm-broken 1.0 names minivllm_broken:Foreign, which does not subclass Sampler"),
        (["sampler=nowhere"], "'no_such_package_anywhere' is not installed"),
        (["sampler=nowhere"], "Install it: pip install no_such_package_anywhere"),
    ],
)
def test_one_that_is_named_and_raises_is_told_in_one_line(
    fake_plugin: FakePlugin, checkpoint: Path, broken_checkpoint: Path, options: list[str], told: str
) -> None:
    fake_plugin("minivllm-broken", BROKEN)
    folder, overrides = (broken_checkpoint, []) if options == ["model"] else (checkpoint, options)
    with pytest.raises((PluginError, ConfigError)) as e:
        LLM(str(folder), device="cpu", overrides=overrides)
    assert told in str(e.value) and "minivllm-broken 1.0" in str(e.value) and "\n" not in str(e.value)
    if "attention=broken" in options:
        assert "Here these can:" in str(e.value)


def test_errors_of_what_is_built_in_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr("minivllm.core.scheduler.MixedScheduler.__init__", fail)
    with pytest.raises(RuntimeError, match=r"^ours$"):
        LLM(str(checkpoint), device="cpu")


# --------------------------------------------------------------------------- what ranks are told


def rank_registry(
    parent: Any, monkeypatch: pytest.MonkeyPatch, *, architecture: str = "Qwen3ForCausalLM", **names: str
) -> Any:
    """As in a rank: another process, so that what knows the parent's pid yields nothing."""
    monkeypatch.setenv("TEST_PARENT", "0")
    usual = {"name": "auto", "prefill": None, "decode": None}
    config = SimpleNamespace(
        sampler=SimpleNamespace(name=names.pop("sampler", "default")), attention=SimpleNamespace(**(usual | names))
    )
    return registry_of_rank(parent, 1, config, SimpleNamespace(architecture=architecture))  # type: ignore[arg-type]


KINDS = (
    HOOK
    + """
import os
HERE = os.environ.get("TEST_PARENT") == str(os.getpid())
@hookimpl
def minivllm_attention_backends():
    if HERE: yield Component("mine", "a.b:C", aliases=("ours",))
@hookimpl
def minivllm_samplers():
    if HERE: yield Component("mine", "a.b:C", aliases=("ours",))
@hookimpl
def minivllm_models():
    if HERE: yield ModelComponent("mine", "a.b:C", architectures=("MineForCausalLM",))
@hookimpl
def minivllm_schedulers():
    if HERE: yield Component("mine", "a.b:C")
"""
)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ({"sampler": "mine"}, "sampler 'mine'"),
        ({"sampler": "ours"}, "sampler 'mine'"),
        ({"name": "mine"}, "attention backend 'mine'"),
        ({"name": "ours"}, "attention backend 'mine'"),
        ({"prefill": "mine"}, "attention backend 'mine'"),
        ({"decode": "mine"}, "attention backend 'mine'"),
        ({"architecture": "MineForCausalLM"}, "model 'mine'"),
        ({}, None),
    ],
)
def test_what_only_the_parent_has_is_an_error_if_it_is_used_and_else_a_line(
    fake_plugin: FakePlugin, monkeypatch: pytest.MonkeyPatch, names: dict[str, str], what: str | None
) -> None:
    fake_plugin("minivllm-mine", KINDS, version="2.5")
    parent = view_of(load_plugins())
    sys.modules.pop("minivllm_mine", None)
    if what is None:
        _, notes = rank_registry(parent, monkeypatch)
        assert [note.partition(" of ")[0] for note in notes] == [
            "model 'mine'", "attention backend 'mine'", "sampler 'mine'",
        ]  # fmt: skip  # the scheduler is the parent's to run
        monkeypatch.setenv("MINIVLLM_STRICT_PLUGINS", "1")
        strict = view_of(load_plugins())
        assert ("MINIVLLM_STRICT_PLUGINS", "1") in strict.environ
        with pytest.raises(PluginError, match="in the parent process only"):
            rank_registry(type(parent)(parent.components, (), strict.environ), monkeypatch)
        return
    with pytest.raises(PluginError) as e:
        rank_registry(parent, monkeypatch, **names)
    assert str(e.value) == (
        f"{what} of minivllm-mine 2.5 is registered in the parent process only: rank 1 does not find it. Ranks find "
        "plugins by their entry points: install the package where the rank runs (pip install minivllm-mine), and let "
        "its hooks yield the same in every process"
    )


def test_a_rank_says_why_it_lacks_it(fake_plugin: FakePlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    site = fake_plugin("minivllm-mine", KINDS)
    parent = view_of(load_plugins())
    (site / "minivllm_mine.py").write_text("1 / 0")
    sys.modules.pop("minivllm_mine", None)
    with pytest.raises(PluginError, match=r"rank 1 does not have it \(cannot be loaded from minivllm_mine: ZeroDiv"):
        rank_registry(parent, monkeypatch, sampler="mine")
    (site / "minivllm_mine.py").write_text(KINDS.replace("a.b:C", "d.e:F").replace("HERE =", "HERE = True #"))
    sys.modules.pop("minivllm_mine", None)
    with pytest.raises(PluginError, match=r"rank 1 has d\.e:F of minivllm-mine 1\.0 by that name"):
        rank_registry(parent, monkeypatch, sampler="mine")


def test_a_rank_reports_only_what_its_parent_does_not_know(
    fake_plugin: FakePlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_plugin("minivllm-known", "x = 1")
    parent = view_of(load_plugins())
    fake_plugin("minivllm-other", "x = 1")
    _, notes = rank_registry(parent, monkeypatch)
    (note,) = notes
    assert note.startswith("on rank 1: minivllm plugin 'minivllm_other' (minivllm-other 1.0): implements no hook")


def test_what_the_parent_disables_its_ranks_do_not_load(
    fake_plugin: FakePlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_plugin("minivllm-bad", "1 / 0")
    monkeypatch.setenv("MINIVLLM_DISABLE_PLUGINS", "minivllm-bad")
    parent = view_of(load_plugins())
    monkeypatch.delenv("MINIVLLM_DISABLE_PLUGINS")  # as an actor that was started elsewhere
    registry, notes = rank_registry(parent, monkeypatch)
    assert not notes and not registry.reports and len(registry.disabled) == 1


# --------------------------------------------------------------------------- in ranks


def check_in_ranks(
    checkpoint: Path, reference: list[list[int]], caplog: pytest.LogCaptureFixture, executor: str
) -> None:
    """All of the bad ones at once, and one that raises in the ranks, and one that they do not have."""
    caplog.clear()
    assert say(checkpoint, tp=2, overrides=[f"executor={executor}"]) == reference
    check_told(caplog.records)
    here = [r.getMessage() for r in caplog.records if HERE in r.getMessage()]
    assert len(here) == 2 and {"rank 0", "rank 1"} == {line.split(": ")[1][:6] for line in here}
    broken = "sampler 'broken' of minivllm-broken 1.0 cannot be built: RuntimeError: no luck"
    for name, told in (("attention=here", HERE), ("sampler=broken", broken)):
        with pytest.raises(MinivllmError) as e:
            LLM(str(checkpoint), device="cpu", tp=2, overrides=[f"executor={executor}", name])
        assert told in str(e.value) and "\n" not in str(e.value)


@pytest.mark.slow
def test_in_spawned_ranks(
    reference: list[list[int]], all_bad: None, checkpoint: Path, caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    default_registry.cache_clear()
    check_in_ranks(checkpoint, reference, caplog, "multiproc")
    assert "minivllm" not in capfd.readouterr().err.replace("minivllm.plugins", ""), "ranks told it themselves"


@pytest.mark.slow
def test_under_ray(
    reference: list[list[int]], checkpoint: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ray = pytest.importorskip("ray")
    site = tmp_path / "site"
    site.mkdir()
    install(lambda name, code: write_package(site, name, code))
    (site / "late_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(site))
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TEST_PARENT": ""}
    ray.init(address="local", num_cpus=2, object_store_memory=80 << 20, log_to_driver=False, include_dashboard=False,
             runtime_env={"env_vars": env})  # fmt: skip
    try:
        default_registry.cache_clear()
        check_in_ranks(checkpoint, reference, caplog, "ray")
    finally:
        ray.shutdown()
