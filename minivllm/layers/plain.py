"""Whether a module does what its class is known to do: only then may a kernel stand for a call of it."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

from torch import nn

_Kind = TypeVar("_Kind", bound=nn.Module)


def is_plain(module: object, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """Whether it is of that kind, and to call it is to call that kind's forward: no subclass's, no wrapper's, and no
    hook's."""
    if not isinstance(module, kind) or getattr(module.forward, "__func__", None) is not kind.forward:
        return False
    return not module._forward_hooks and not module._forward_pre_hooks
