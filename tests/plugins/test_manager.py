"""Plugins are loaded one by one: what is wrong with one is told by its name, and the rest work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_plugins import BACKEND, FakePlugin

from minivllm.errors import PluginError
from minivllm.plugins import HOOKS, load_plugins

GOOD = BACKEND.format(name="fast")


def only_report(registry: object) -> str:
    (report,) = registry.reports  # type: ignore[attr-defined]
    assert "\n" not in str(report)
    return str(report)


def test_builtins_come_first_and_without_a_report(fake_plugin: FakePlugin) -> None:
    registry = load_plugins()
    assert registry.reports == ()
    assert registry.names("model") == ["qwen3", "llama"]
    assert registry.names("attention") == ["torch", "triton", "hopper", "flash", "flashinfer"]
    assert registry.names("scheduler") == ["mixed", "prefill_first"]
    assert registry.names("sampler") == ["default"]
    assert "single" in registry.names("executor")
    assert {e.provider.package for e in registry.entries()} == {"minivllm"}
    assert [c.name for c in registry.by_priority("attention")] == ["hopper", "triton", "flashinfer", "flash", "torch"]
    assert registry.by_priority("attention", prefill=True)[0].name == "hopper"


def test_an_installed_plugin_is_found_with_its_package_and_version(fake_plugin: FakePlugin) -> None:
    code = """
        from minivllm.core.interfaces import AttentionBackend
        from minivllm.plugins import Component, hookimpl

        class Fast(AttentionBackend):
            plan = decode = prefill = None

        @hookimpl
        def minivllm_attention_backends():
            yield Component("fast", __name__ + ":Fast")
    """
    fake_plugin("minivllm-fast", code, version="2.3")
    registry = load_plugins()
    entry = registry.entry("attention", "fast")
    assert (entry.provider.package, entry.provider.version) == ("minivllm-fast", "2.3")
    assert registry.resolve("attention", "fast").__name__ == "Fast"
    assert registry.reports == ()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import no_such_package_anywhere", "No module named 'no_such_package_anywhere'"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("def f(:", "SyntaxError"),
        (
            "from minivllm.plugins import hookimpl\n@hookimpl\ndef minivllm_models(): raise RuntimeError('no\\nluck')",
            "minivllm_models raised RuntimeError: no luck",
        ),
        (
            "from minivllm.plugins import hookimpl\n@hookimpl\ndef minivllm_models(): return ['qwen']",
            "minivllm_models yields str, not ModelComponent: 'qwen'",
        ),
        (
            "from minivllm.plugins import Component, hookimpl\n@hookimpl\n"
            "def minivllm_models(): yield Component('x', 'a:B')",
            "yields Component, not ModelComponent",
        ),
        (
            "from minivllm.plugins import hookimpl\n@hookimpl\ndef minivllm_samplers(): return 5",
            "minivllm_samplers raised TypeError",
        ),
        (
            "from minivllm.plugins import hookimpl\n@hookimpl\ndef minivllm_samplers(): pass",
            "minivllm_samplers returned None: yield its components",
        ),
        (
            "from minivllm.plugins import Component, hookimpl\n@hookimpl\n"
            "def minivllm_samplers(): return Component('x', 'a:B')",
            "minivllm_samplers returned one Component: yield its components, or return a list of them",
        ),
        (
            "from minivllm.plugins import ConfigOption, hookimpl\n@hookimpl\n"
            "def minivllm_configs(): return ConfigOption('model', 'x', {})",
            "minivllm_configs returned one ConfigOption: yield",
        ),
        (
            "from minivllm.plugins import hookimpl\n@hookimpl\ndef minivllm_samplers(): return 'abc'",
            "minivllm_samplers returned one str: yield its components",
        ),
        *(
            (
                f"from minivllm.plugins import hookimpl\n@hookimpl\nasync def minivllm_samplers(): {body}",
                "minivllm_samplers is an async function, which nobody awaits: write def, not async def",
            )
            for body in ("return []", "yield")
        ),
        ("class Panic(BaseException): pass\nraise Panic('of a library')", "cannot be loaded"),
        *(
            (
                "from minivllm.plugins import Component, hookimpl\n@hookimpl\n"
                f"def minivllm_samplers(): yield Component({given})",
                told,
            )
            for given, told in (
                ("'x', 'a:B', prefill_priority='high'", "prefill_priority='high' is not an integer"),
                ("'x', 'a:B', description=None", "description=None is not a string of one line"),
                ("'x', 'a:B', description='a\\nb'", "is not a string of one line"),
                ("'x', 'a:B', gpu='yes'", "gpu='yes' is neither True nor False"),
                ("'true', 'a:B'", "'true' cannot be a name: typed on the command line"),
                ("'1e5', 'a:B'", "'1e5' cannot be a name"),
            )
        ),
        (
            "from minivllm.plugins import ConfigOption, hookimpl\n@hookimpl\ndef minivllm_configs():\n"
            "    yield ConfigOption('model', 'x', {})\n    yield ConfigOption('model', 'x', {})",
            "the option model=x is already registered by minivllm-broken 1.0, which is kept",
        ),
        (
            "from minivllm.plugins import Component, hookimpl\n@hookimpl(trylast=True)\n"
            "def minivllm_samplers(): yield Component('default', 'a:B')",
            "sampler 'default' is already registered by minivllm",
        ),
        (
            "from minivllm.plugins import hookimpl\n@hookimpl\ndef minivllm_model(): yield",
            "implements minivllm_model, which is no hook. Did you mean minivllm_models",
        ),
        ("def minivllm_models(): yield", "has minivllm_models without @hookimpl"),
        ("x = 1", "implements no hook"),
        (
            "from minivllm.plugins import hookimpl\n@hookimpl\ndef minivllm_models(config): yield",
            "cannot be registered",
        ),
        (
            "from minivllm.plugins import Component, hookimpl\n@hookimpl\n"
            "def minivllm_samplers(): yield Component('x', 'no target')",
            "target='no target' is not 'package.module:Class'",
        ),
        (
            "from minivllm.plugins import Component, hookimpl\n@hookimpl\n"
            "def minivllm_samplers(): yield Component('x', 'a:B', requires='torch')",
            "requires='torch' is not a tuple of strings",
        ),
        (
            "from minivllm.plugins import Component, hookimpl\n@hookimpl\n"
            "def minivllm_executors(): yield Component('auto', 'a:B')",
            "'auto': the name is reserved",
        ),
        (
            "from minivllm.plugins import ConfigOption, hookimpl\n@hookimpl\n"
            "def minivllm_configs(): yield ConfigOption('modle', 'x', {})",
            "group='modle' is not one of model, attention",
        ),
        (
            "from minivllm.plugins import hookimpl\n@hookimpl(wrapper=True)\ndef minivllm_models(): return (yield)",
            "minivllm_models is a wrapper",
        ),
    ],
)
def test_a_broken_plugin_is_one_line_and_the_rest_work(fake_plugin: FakePlugin, code: str, told: str) -> None:
    fake_plugin("minivllm-broken", code)
    fake_plugin("minivllm-fast", GOOD)
    registry = load_plugins()
    report = only_report(registry)
    assert told in report
    assert "minivllm-broken 1.0" in report
    assert registry.get("attention", "fast").name == "fast"
    assert registry.get("model", "qwen3")


def test_what_a_hook_yielded_before_it_raised_is_kept(fake_plugin: FakePlugin) -> None:
    fake_plugin("minivllm-half", GOOD + "        raise ValueError('then')")
    registry = load_plugins()
    assert "ValueError: then" in only_report(registry)
    assert registry.get("attention", "fast")


def test_hooks_may_return_a_list_and_a_plugin_may_be_an_object(fake_plugin: FakePlugin) -> None:
    code = """
        from minivllm.plugins import Component, hookimpl

        class Plugin:
            @hookimpl
            def minivllm_samplers(self):
                return [Component("mine", "x:Y", aliases=("m",))]

        plugin = Plugin()
    """
    fake_plugin("minivllm-object", code, entry="object = minivllm_object:plugin")
    registry = load_plugins()
    assert registry.reports == ()
    assert registry.get("sampler", "m").name == "mine"


def test_duplicate_names_name_both_packages_and_the_first_wins(fake_plugin: FakePlugin) -> None:
    fake_plugin("minivllm-a", GOOD, version="1.1")
    fake_plugin("minivllm-b", GOOD, version="2.2")
    registry = load_plugins()
    report = only_report(registry)
    assert "minivllm-b 2.2" in report
    assert "already registered by minivllm-a 1.1, which is kept" in report
    assert registry.entry("attention", "fast").provider.package == "minivllm-a"


def test_a_builtin_is_never_displaced(fake_plugin: FakePlugin) -> None:
    code = """
        from minivllm.plugins import Component, ConfigOption, ModelComponent, hookimpl

        @hookimpl
        def minivllm_attention_backends():
            yield Component("torch", "x:Y", priority=99)
            yield Component("mine", "x:Y", aliases=("triton", "auto", "good"))

        @hookimpl
        def minivllm_models():
            yield ModelComponent("better", "x:Y", architectures=("Qwen3ForCausalLM", "NewForCausalLM"))
            yield ModelComponent("again", "x:Y", architectures=("NewForCausalLM",))

        @hookimpl
        def minivllm_configs():
            yield ConfigOption("model", "qwen3", {"repo": "somebody/else"})
    """
    fake_plugin("aaa-first-in-the-alphabet", code)
    registry = load_plugins()
    told = " | ".join(map(str, registry.reports))
    for part in (
        "attention backend 'torch' is already registered by minivllm",
        "its alias 'triton' is already registered by minivllm",
        "its alias 'auto' is reserved",
        "the architecture Qwen3ForCausalLM is already registered by minivllm",
        "model 'again': the architecture NewForCausalLM is already registered by aaa-first-in-the-alphabet",
        "option model=qwen3 is already registered by minivllm",
    ):
        assert part in told
    assert len(registry.reports) == 6
    assert registry.entry("attention", "torch").provider.builtin
    assert registry.entry("attention", "triton").provider.builtin
    assert registry.get("attention", "good").name == "mine"
    assert registry.model_for_architecture("Qwen3ForCausalLM").name == "qwen3"
    assert registry.model_for_architecture("NewForCausalLM").name == "better"
    assert registry.config_options("model")["qwen3"].provider.builtin


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("99", "was written for plugin API 99, this minivllm has 1; upgrade minivllm"),
        ("0", "was written for plugin API 0, this minivllm has 1; upgrade minivllm-old"),
        ("'new'", "MINIVLLM_API_VERSION='new' is not an integer"),
    ],
)
def test_a_wrong_api_version_says_which_side_to_upgrade(fake_plugin: FakePlugin, version: str, told: str) -> None:
    fake_plugin("minivllm-old", f"MINIVLLM_API_VERSION = {version}\n")
    assert told in only_report(load_plugins())


def test_the_right_api_version_is_no_news(fake_plugin: FakePlugin) -> None:
    fake_plugin("minivllm-now", "    MINIVLLM_API_VERSION = 1\n" + GOOD)
    assert load_plugins().reports == ()


def test_strict_turns_reports_into_one_error(fake_plugin: FakePlugin) -> None:
    fake_plugin("minivllm-broken", "1 / 0")
    fake_plugin("minivllm-empty", "x = 1")
    with pytest.raises(PluginError, match=r"(?s)minivllm-broken.*minivllm-empty"):
        load_plugins(environ={"MINIVLLM_STRICT_PLUGINS": "1"})
    assert len(load_plugins(environ={"MINIVLLM_STRICT_PLUGINS": "0"}).reports) == 2


@pytest.mark.parametrize(
    ("value", "left"),
    [("minivllm_a", {"b"}), ("minivllm-a", {"b"}), ("minivllm_a, minivllm-b", set()), ("all", set()), ("", {"a", "b"})],
)
def test_plugins_are_disabled_by_their_name_or_package(fake_plugin: FakePlugin, value: str, left: set[str]) -> None:
    for name in "ab":
        fake_plugin(f"minivllm-{name}", BACKEND.format(name=name))
    registry = load_plugins(environ={"MINIVLLM_DISABLE_PLUGINS": value})
    assert set(registry.names("attention")) & {"a", "b"} == left
    assert registry.names("model") == ["qwen3", "llama"]
    assert registry.reports == ()
    assert len(registry.disabled) == 2 - len(left)


@pytest.mark.parametrize("name", ["minivllm_typo", "builtin"])
def test_disabling_what_cannot_be_is_reported(fake_plugin: FakePlugin, name: str) -> None:
    registry = load_plugins(environ={"MINIVLLM_DISABLE_PLUGINS": name})
    assert name in only_report(registry)
    assert registry.names("model")


def test_a_disabled_plugin_is_not_even_imported(fake_plugin: FakePlugin) -> None:
    fake_plugin("minivllm-exit", "raise SystemExit")
    assert load_plugins(environ={"MINIVLLM_DISABLE_PLUGINS": "minivllm-exit"}).reports == ()


def test_every_hook_has_a_spec() -> None:
    from minivllm.plugins import hookspecs

    specs: list[Callable[..., object]] = [getattr(hookspecs, name) for name in HOOKS]
    assert all(spec.__doc__ for spec in specs)
