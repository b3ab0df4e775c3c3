"""Whether a module does exactly what its known class does: only then may a kernel replace calling it."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

from torch import nn

_Kind = TypeVar("_Kind", bound=nn.Module)


def is_plain(module: object, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """Whether it is a ``kind`` and calling it runs exactly that class's ``forward``: no override, wrapper or hook, and
    no LoRA adapter in this step."""
    return is_plain_beside_adapters(module, kind) and not is_adapted(module)


def is_plain_beside_adapters(module: object, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """``is_plain``, but it may have LoRA adapters."""
    if not isinstance(module, kind) or getattr(module.forward, "__func__", None) is not kind.forward:
        return False
    return not module._forward_hooks and not module._forward_pre_hooks


def is_adapted(module: nn.Module) -> bool:
    """Whether it is a linear layer whose rows may have LoRA adapters in this step (``layers/adapters.py``)."""
    adapters = module.__dict__.get("adapters")
    return adapters is not None and adapters.active
