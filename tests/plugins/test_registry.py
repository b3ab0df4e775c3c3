"""Names become components and classes; a name that cannot is answered with what could be meant, or installed."""

from __future__ import annotations

import pickle
import sys
from dataclasses import FrozenInstanceError

import pytest
from fake_plugins import FakePlugin

from minivllm.errors import CheckpointError, ConfigError, PluginError
from minivllm.plugins import Component, ModelComponent, Registry, load_plugins
from minivllm.plugins.registry import Entry, Provider


def registry_of(*components: Component, kind: str = "attention") -> Registry:
    return Registry(Entry(kind, c, Provider("p", "some-package", "1.0")) for c in components)


def test_an_unknown_name_is_refused_with_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError) as e:
        load_plugins([]).get("attention", "flsh")
    message = str(e.value)
    assert "attention=flsh" in message
    assert "Did you mean flash" in message
    assert "flash, flashinfer, hopper, torch, triton" in message


def test_an_unknown_kind_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="model, attention, scheduler, sampler, executor"):
        load_plugins([]).names("kernels")


def test_an_alias_finds_its_component() -> None:
    component = Component("real", "minivllm.core.scheduler:MixedScheduler", aliases=("r", "rl"))
    registry = registry_of(component, kind="scheduler")
    assert registry.get("scheduler", "r").name == "real"
    assert registry.names("scheduler") == ["real"]
    assert registry.aliases("scheduler") == {"r": "real", "rl": "real"}
    assert registry.resolve("scheduler", "rl").__name__ == "MixedScheduler"


def test_resolve_imports_only_then() -> None:
    sys.modules.pop("this_is_not_imported", None)
    registry = registry_of(Component("x", "colorsys:nothing"), Component("y", "wave:Wave_read"))
    sys.modules.pop("wave", None)
    assert registry.why_not(registry.get("attention", "y")) == []
    assert "wave" not in sys.modules
    with pytest.raises(PluginError, match="names wave:Wave_read, which does not subclass AttentionBackend"):
        registry.resolve("attention", "y")
    assert "wave" in sys.modules
    with pytest.raises(PluginError, match=r"names colorsys:nothing, but colorsys has no class nothing"):
        registry.resolve("attention", "x")


def test_a_missing_package_says_what_to_install(fake_plugin: FakePlugin) -> None:
    site = fake_plugin("minivllm-lib", "x = 1")
    (site / "needs_much.py").write_text("import no_such_package_anywhere\nclass A: pass")
    component = Component("x", "needs_much:A", requires=("no_such_package_anywhere",))
    with pytest.raises(PluginError) as e:
        registry_of(component).resolve("attention", "x")
    message = str(e.value)
    assert "some-package 1.0" in message
    assert "'no_such_package_anywhere' is not installed" in message
    assert message.endswith("Install it: pip install no_such_package_anywhere")
    known = Component("x", "needs_much:A", requires=("no_such_package_anywhere",), install="pip install 'lib[x]'")
    with pytest.raises(PluginError, match=r"Install it: pip install 'lib\[x\]'"):
        registry_of(known).resolve("attention", "x")


def test_a_package_that_is_missing_is_told_where_its_module_is_there() -> None:
    registry = registry_of(Component("x", "json:JSONEncoder", requires=("no_such_package_anywhere",)), kind="sampler")
    with pytest.raises(
        PluginError, match=r"'no_such_package_anywhere' is not installed\. Install it: pip install no_su"
    ):
        registry.resolve("sampler", "x")


def test_a_target_that_raises_is_told_with_its_package(fake_plugin: FakePlugin) -> None:
    site = fake_plugin("minivllm-lib", "x = 1")
    (site / "raises_at_import.py").write_text("1 / 0")
    with pytest.raises(PluginError, match="cannot be imported: raises_at_import raised ZeroDivision"):
        registry_of(Component("x", "raises_at_import:A")).resolve("attention", "x")


@pytest.mark.parametrize(
    ("component", "reasons"),
    [
        (Component("x", "json:A"), 0),
        (Component("x", "json.decoder:A", requires=("json.encoder", "nope|json")), 0),
        (Component("x", "json:A", requires=("nope", "nope.deep", "json.nope", "json.decoder.nope")), 4),
        (Component("x", "json:A", requires=("nope|neither",)), 1),
        (Component("x", "json.nope:A"), 1),
        (Component("x", "nope.deep:A"), 1),
    ],
)
def test_why_not_looks_without_importing(component: Component, reasons: int) -> None:
    assert len(registry_of().why_not(component)) == reasons


def test_why_not_imports_no_parent_package(fake_plugin: FakePlugin) -> None:
    site = fake_plugin("minivllm-lib", "x = 1")
    (site / "heavy_parent").mkdir()
    (site / "heavy_parent" / "__init__.py").write_text("raise RuntimeError")
    (site / "heavy_parent" / "child.py").write_text("")
    assert registry_of().why_not(Component("x", "heavy_parent.child:A")) == []
    assert "heavy_parent" not in sys.modules


def test_an_architecture_nobody_registered_names_the_hook_to_write() -> None:
    registry = load_plugins([])
    assert registry.model_for_architecture("LlamaForCausalLM").name == "llama"
    with pytest.raises(CheckpointError) as e:
        registry.model_for_architecture("MistralForCausalLM")
    message = str(e.value)
    assert "MistralForCausalLM" in message
    assert "LlamaForCausalLM, Qwen3ForCausalLM" in message
    assert "minivllm_models" in message


def test_components_are_frozen_hashable_and_cross_processes() -> None:
    component = ModelComponent("m", "a.b:C", architectures=("X",), requires=("torch",), aliases=("n",))
    assert pickle.loads(pickle.dumps(component)) == component
    assert hash(component) == hash(
        ModelComponent("m", "a.b:C", architectures=("X",), requires=("torch",), aliases=("n",))
    )
    with pytest.raises(FrozenInstanceError):
        component.name = "other"  # type: ignore[misc]


def test_a_model_without_an_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="architectures is empty"):
        ModelComponent("m", "a.b:C")


def test_two_registries_share_nothing(fake_plugin: FakePlugin) -> None:
    before = load_plugins()
    fake_plugin("minivllm-late", "x = 1")
    after = load_plugins()
    assert before.reports == ()
    assert len(after.reports) == 1
