"""Which class defines a method: two methods that belong together must come from the same one."""

from __future__ import annotations


def definer(cls: type, name: str) -> type:
    """The class that ``cls`` gets ``name`` from."""
    return next(c for c in cls.__mro__ if name in vars(c))


def overrides_both(cls: type, usual: str, faster: str) -> bool:
    """Whether the class that ``cls`` gets ``usual`` from defines ``faster`` too, so that they are interchangeable."""
    return faster in vars(definer(cls, usual))
