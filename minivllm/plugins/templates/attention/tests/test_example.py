"""minivllm's suite for attention backends: every kind of step against float32 attention, then a whole engine."""

from __future__ import annotations

from minivllm.testing import AttentionConformance


class TestExample(AttentionConformance):
    backend = "example"
    must_run_on = ("cpu", "cuda")
