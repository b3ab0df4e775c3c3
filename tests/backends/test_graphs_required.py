"""``enforce_eager=false`` asks for CUDA graphs: a backend that allows none is refused for decodes, not for prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_plugins import FakePlugin, fake_plugin  # noqa: F401

from minivllm.backends.select import choose
from minivllm.config.compose import compose, compose_engine_config
from minivllm.config.engine_config import AttentionOptions
from minivllm.core.interfaces import AttentionSpec
from minivllm.errors import ConfigError
from minivllm.plugins import Registry, load_plugins

SPEC = AttentionSpec(
    device="cuda", dtype="float64", num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, num_layers=2,
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, scale=0.125, needs_graphs=True,
)  # fmt: skip
BACKEND = """
    from minivllm.plugins import Component, hookimpl

    @hookimpl
    def minivllm_attention_backends():
        yield Component("captured", "captured_backend:Captured", priority=-5)
"""
CAPTURED = """
from minivllm.backends.torch import TorchBackend
from minivllm.core.interfaces import Capabilities, CudaGraphs

class Captured(TorchBackend):
    capabilities = Capabilities(dtypes=("float64",), cuda_graphs=CudaGraphs.DECODE)
"""


@pytest.fixture
def registry(fake_plugin: FakePlugin) -> Registry:  # noqa: F811
    """The built-ins, of which only torch takes float64, and a backend that can be captured."""
    (fake_plugin("minivllm-captured", BACKEND) / "captured_backend.py").write_text(CAPTURED)
    return load_plugins()


def test_a_named_backend_that_allows_no_graphs_is_refused(registry: Registry) -> None:
    with pytest.raises(
        ConfigError, match="attention=torch cannot run this: its decode steps cannot be CUDA graphs"
    ) as e:
        choose(AttentionOptions("torch"), SPEC, registry)
    assert "Here these can: captured" in str(e.value)
    assert not choose(AttentionOptions("torch"), replace(SPEC, needs_graphs=False), registry).cuda_graphs()


def test_auto_passes_it_over_for_decodes_only(registry: Registry) -> None:
    assert choose(AttentionOptions("auto"), SPEC, registry).name == "torch+captured"
    assert choose(AttentionOptions("auto"), replace(SPEC, needs_graphs=False), registry).name == "torch"


def test_prompts_are_not_captured(registry: Registry) -> None:
    choice = choose(AttentionOptions("auto", prefill="torch", decode="captured"), SPEC, registry)
    assert choice.name == "torch+captured" and choice.cuda_graphs()
    prompts_too = replace(choice, prefill_class=registry.resolve("attention", "triton"))
    assert prompts_too.prompt_graphs() and not prompts_too.mixed_graphs(), "whose decodes are captured alone"


def test_the_key_has_three_values() -> None:
    registry = load_plugins([])
    for typed, value in (([], None), (["enforce_eager=null"], None), (["enforce_eager=false"], False),
                         (["enforce_eager=true"], True)):  # fmt: skip
        assert compose(typed, registry).engine.enforce_eager is value
    for value in (None, False, True):
        assert compose_engine_config(enforce_eager=value, registry=registry).enforce_eager is value
