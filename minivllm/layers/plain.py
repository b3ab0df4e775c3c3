"""Whether a module does exactly what its known class does: only then may a kernel replace calling it."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

from torch import nn

_Kind = TypeVar("_Kind", bound=nn.Module)


def is_plain(module: object, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """Whether it is a ``kind`` and calling it runs exactly that class's ``forward``: no override, wrapper or hook."""
    if not isinstance(module, kind) or getattr(module.forward, "__func__", None) is not kind.forward:
        return False
    return not module._forward_hooks and not module._forward_pre_hooks
