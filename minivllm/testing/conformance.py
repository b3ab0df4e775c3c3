"""What the three suites share: required attributes, and skipping tests that do not apply, each with a reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import pytest
import torch

Test = TypeVar("Test", bound=Callable[..., Any])

with warnings.catch_warnings():  # the user's pytest config may not register these marks
    warnings.simplefilter("ignore", pytest.PytestUnknownMarkWarning)
    SLOW = pytest.mark.slow
    _GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"))

DEVICES = ["cpu", pytest.param("cuda", marks=_GPU)]


def on_gpu(test: Test) -> Test:
    """Marks a test as GPU-only."""
    for mark in _GPU:
        test = mark(test)
    return test


class Conformance:
    """A suite. ``skips``: test name -> why it does not apply, such as ``{"test_tensor_parallel": "3 heads"}``."""

    required: ClassVar[tuple[str, ...]] = ()  # attributes that a subclass must set
    skips: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, reason in cls.skips.items():
            if not (name.startswith("test_") and callable(getattr(cls, name, None))):
                tests = ", ".join(sorted(n for n in dir(cls) if n.startswith("test_")))
                raise TypeError(f"{cls.__name__}.skips names {name!r}, which is no test of it; its tests: {tests}")
            if not (isinstance(reason, str) and reason.strip()):
                raise TypeError(f"{cls.__name__}.skips[{name!r}] must say why, in a string")

    @pytest.fixture(autouse=True)
    def _applies(self, request: pytest.FixtureRequest) -> None:
        for attribute in self.required:
            if not hasattr(self, attribute):
                pytest.fail(f"{type(self).__name__} must set the class attribute {attribute!r}", pytrace=False)
        if reason := self.skips.get(request.node.originalname):
            pytest.skip(reason)

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        """Threads slow small matrices down, the more so when tests run in parallel."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)
