"""Triton's interpreter patches Triton's language at every call of a function within a kernel, ``tl.sum`` among them, in
0.7 ms: a third of its time. Where this is imported it does so at a kernel's launch only."""

from __future__ import annotations

from typing import Any


def _patch_once() -> None:
    try:
        from triton import language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    patch, nothing = (getattr(interpreter, name, None) for name in ("_patch_lang", "_LangPatchScope"))
    if patch is None or nothing is None:  # another Triton, as slow as it is
        return

    def unless_patched(fn: Any) -> Any:
        its = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        return patch(fn) if not its or any(tl.core.is_builtin(lang.load) for lang in its) else nothing()

    interpreter._patch_lang = unless_patched


_patch_once()
