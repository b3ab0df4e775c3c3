"""Whether a module does exactly what its known class does: only then may a kernel replace calling it."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

from torch import nn

_Kind = TypeVar("_Kind", bound=nn.Module)


def is_plain(module: object, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """Whether it is a ``kind`` and calling it runs exactly that class's ``forward``: no override, wrapper or hook, and
    no LoRA adapter in this step."""
    if not isinstance(module, kind) or getattr(module.forward, "__func__", None) is not kind.forward:
        return False
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    adapters = module.__dict__.get("adapters")  # of a linear layer: ``layers/adapters.py``
    return adapters is None or not adapters.active
