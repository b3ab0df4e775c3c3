"""Triton's interpreter, several times as quick where this is imported, computes what it did: it patches Triton's
language once a launch, makes each type once, and leaves out overflows of integers, which it computes and does not tell.

What another Triton lacks of what is replaced here stays as slow as it is.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def _patch() -> None:
    try:
        from triton import language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    for replace in (_patch_once, _leave_out_overflows, _make_types_once):
        with suppress(AttributeError):
            replace(tl, interpreter)


def _patch_once(tl: Any, interpreter: Any) -> None:
    """Not at each call of a function within a kernel, ``tl.sum`` among them, which takes 0.7 ms."""
    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope

    def unless_patched(fn: Any) -> Any:
        its = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        return patch(fn) if not its or any(tl.core.is_builtin(lang.load) for lang in its) else nothing()

    interpreter._patch_lang = unless_patched


def _leave_out_overflows(tl: Any, interpreter: Any) -> None:
    """Seven operations beside each of integers, for an assertion that is made with ``debug`` only."""
    options = interpreter.interpreter_builder.options
    if options.sanitize_overflow and not options.debug:
        object.__setattr__(options, "sanitize_overflow", False)  # it is frozen


def _make_types_once(tl: Any, interpreter: Any) -> None:
    """Types do not change: of a scalar and a shape there is one, with the shape and the size of its tensors."""
    block_type, tensor, constexpr, dtype = tl.core.block_type, tl.core.tensor, tl.core.constexpr, tl.core.dtype
    semantic = tl.semantic.TritonSemantic
    np_dtype_of, to_one_shape = interpreter._get_np_dtype, semantic.broadcast_impl_value
    make_type, make_tensor, equal = block_type.__init__, tensor.__init__, dtype.__eq__
    types: dict[Any, Any] = {}
    np_dtypes: dict[str, Any] = {}

    def new_type(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = (size.value if type(size) is constexpr else size for size in getattr(shape, "values", shape))
        key = (element_ty.name, getattr(element_ty, "address_space", None), *sizes)
        made = types.get(key)
        if made is None:
            made = types[key] = object.__new__(cls)
        return made

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        if "numel" not in self.__dict__:
            make_type(self, element_ty, shape)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_of_tensors")
        if known is None:
            make_tensor(self, handle, type)
            type._of_tensors = {name: value for name, value in self.__dict__.items() if name != "handle"}
        else:
            self.__dict__.update(known)
            self.handle = handle

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.type is rhs.type else to_one_shape(self, lhs, rhs)

    def get_np_dtype(type: Any) -> Any:
        if type.name not in np_dtypes:
            np_dtypes[type.name] = np_dtype_of(type)
        return np_dtypes[type.name]

    block_type.__new__, block_type.__init__, tensor.__init__ = new_type, init_type, init_tensor
    dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    semantic.broadcast_impl_value = broadcast
    interpreter._get_np_dtype = get_np_dtype


_patch()
