"""Conformance suites for plugins: subclass one in your test file, and pytest collects its tests.

    class TestMistral(ModelConformance):
        architecture = "MistralForCausalLM"
        config = {"hidden_size": 64, "num_hidden_layers": 2, ...}

``docs/contract.md`` says what each suite checks and which attributes it reads. Needs ``minivllm[test]``.
"""

from __future__ import annotations

try:
    import hypothesis  # noqa: F401
    import pytest
except ImportError as error:
    raise ImportError(
        f"minivllm.testing needs {error.name}, which is not installed; pip install 'minivllm[test]' brings it",
        name=error.name,
    ) from error

for _module in ("conformance", "model", "attention", "scheduler", "simulation", "steps", "outputs"):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")  # so that failed asserts show their values

from minivllm.testing.attention import AttentionConformance
from minivllm.testing.model import ModelConformance
from minivllm.testing.scheduler import SchedulerConformance

__all__ = ["AttentionConformance", "ModelConformance", "SchedulerConformance"]
