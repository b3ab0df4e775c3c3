"""All errors that minivllm raises deliberately. Each message says what was wrong, what is allowed and what to type."""

import builtins
import contextlib
import re
from collections.abc import Iterator, Sequence

_QUOTED = 200  # characters
_BREAK = re.compile(r"\s*\n\s*")  # in reprs of arrays and tensors
_LIBRARIES = frozenset(("numpy", "torch", "triton"))  # their errors are usually the caller's


class MinivllmError(Exception):
    """Base class. The command line prints these in one paragraph, without a traceback."""


class ConfigError(MinivllmError, ValueError):
    """A configuration that cannot run: an unknown key or name, or values that contradict each other."""


class PluginError(MinivllmError):
    """A plugin that cannot be loaded, or that provides something unusable."""


class CheckpointError(MinivllmError):
    """A checkpoint folder that cannot be read, or whose tensors do not fit the model."""


class RequestError(MinivllmError, ValueError):
    """One request that can never run; the engine continues with the others."""

    whole_request = False  # whether it would be the same with another prompt


class SchemaError(RequestError):
    """A schema of a structural tag that cannot be followed."""

    tag: int | None = None  # the tag that it is behind; None: it is that of answers without tags
    why = ""


class BusyError(RequestError):
    """A request that could run, but not now, as others have what it needs: it may be sent again later."""

    whole_request = True


class AdapterError(RequestError):
    """A request's LoRA adapter that cannot be used: there is none, it does not fit, or its folder has changed."""


class ContextLengthError(RequestError):
    """A prompt that exceeds ``max_model_len``, alone or together with ``max_tokens``."""


class EngineDeadError(MinivllmError, RuntimeError):
    """The engine stopped: a rank died or raised. Every waiting request ends with this error."""


def shown(value: object) -> str:
    """A user's value as quoted in an error: its repr, truncated if long, in one line."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number with too many digits
        return f"<{type(value).__name__}>"
    text = text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"
    return _BREAK.sub(" ", text)


def one_line(what: object) -> str:
    """Its text without line breaks, for a message."""
    return " ".join(str(what).split())


def which_of(prompts: Sequence[object], index: int) -> str:
    """The start of an error message about one of several prompts."""
    return f"prompt {index}: " if len(prompts) > 1 else ""


@contextlib.contextmanager
def of_whole_request() -> Iterator[None]:
    """A context whose RequestErrors are about all prompts of a request alike: ``whole_request``."""
    try:
        yield
    except RequestError as error:
        error.whole_request = True
        raise


def of_prompt(error: RequestError, prompts: Sequence[object], index: int) -> RequestError:
    """The error with the prompt's index added, if there are several prompts."""
    if len(prompts) == 1:
        return error
    kind = type(error) if isinstance(error, ContextLengthError | AdapterError) else RequestError
    return kind(f"{which_of(prompts, index)}{error}")


def no_room(prompt: str, max_model_len: int) -> ContextLengthError:
    """``prompt``: a clause that says which prompt it is and how many tokens it has."""
    return ContextLengthError(
        f"{prompt}, and max_model_len={max_model_len} leaves no room for an answer: this model's maximum context "
        f"length is {max_model_len} tokens; shorten the prompt, or start with a larger max_model_len if the model has "
        "more positions"
    )


def was_shut_down() -> EngineDeadError:
    """For a call that comes after ``shutdown``."""
    return EngineDeadError("the engine was shut down; make a new one")


def is_text(value: object) -> bool:
    """Whether it is a non-empty string without lone surrogates, which JSON may contain."""
    return isinstance(value, str) and bool(value) and lone_surrogate(value) is None


def lone_surrogate(text: str) -> str | None:
    """The first half of a character in a text and its place, as an error names them; None: there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"a lone surrogate, {text[error.start]!r}, at index {error.start}"
    return None


def printable(text: str) -> str:
    """Escape lone surrogates, which a client can send but a response cannot contain."""
    return text.encode(errors="backslashreplace").decode()


def by_name(name: str, message: str) -> Exception:
    """Recreate another process's error: of its class if that is ours or built in, else a RuntimeError naming it."""
    kind = globals().get(name) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # a class that needs more than a message
            return kind(message)
    return RuntimeError(f"{name}: {message}")


def place_of(error: BaseException) -> str:
    """Where an error comes from, ignoring frames of ``_LIBRARIES``: module, line and function; then the package of the
    innermost plugin in the traceback, if any: ``of`` it if that is its code, else ``for`` it."""
    place, whose = _origin(error)
    return f"{place}, {whose}" if whose else place


def described(error: BaseException) -> str:
    """An error that is not ours, in one line; with where it was raised if a plugin is in the traceback. The caller adds
    whose code it is."""
    text, (place, whose) = one_line(f"{type(error).__name__}: {error}"), _origin(error)
    return f"{text} ({place})" if whose else text


def package_of(component: object) -> str:
    """The plugin package of a class or an object, as ``minivllm-mine 0.1``; empty if it is not a plugin's."""
    cls = component if isinstance(component, type) else type(component)
    return _packages().get(_top(cls.__module__), "")


def named(kind: str, name: str, component: object) -> str:
    """A component (class or object) as named in errors: ``sampler 'mine' of minivllm-mine 0.1``."""
    package = package_of(component)
    return f"{kind} {name!r} of {package}" if package else f"{kind} {name!r}"


def blamed(error: Exception, kind: str, name: str, component: object, method: str) -> Exception:
    """What to raise when a component's ``method`` raised ``error``: for a plugin, a one-line PluginError that names its
    package. Our own errors, and those of built-in components, are unchanged."""
    if isinstance(error, MinivllmError):  # checked first: refused requests are common
        return error
    package = package_of(component)
    whose = f"of {package}" if package else _origin(error)[1]  # a built-in class may call a plugin's
    return PluginError(f"{kind} {name!r} {whose}: {method} raised {described(error)}") if whose else error


@contextlib.contextmanager
def calling(kind: str, name: str, component: object, method: str) -> Iterator[None]:
    """Context manager for calling a component's ``method`` outside steps: errors are converted by ``blamed``."""
    try:
        yield
    except Exception as error:
        if (new := blamed(error, kind, name, component, method)) is error:
            raise
        raise new from error


def _origin(error: BaseException) -> tuple[str, str]:
    """The two parts of ``place_of``; the second is empty if no plugin is in the traceback."""
    place, package, own, tb, packages = "nowhere", "", False, error.__traceback__, _packages()
    while tb is not None:
        frame = tb.tb_frame
        module, cls = str(frame.f_globals.get("__name__")), type(frame.f_locals.get("self"))  # it may inherit the code
        package = packages.get(_top(module)) or packages.get(_top(cls.__module__)) or package
        if _top(module) not in _LIBRARIES:
            place, own = f"{module}, line {tb.tb_lineno}, in {frame.f_code.co_name}", _top(module) in packages
        tb = tb.tb_next
    return place, f"{'of' if own else 'for'} {package}" if package else ""


def _packages() -> dict[str, str]:
    """Top-level module of each installed plugin -> its package and version. Slow: only for errors."""
    from importlib.metadata import entry_points

    found = {}
    for entry in entry_points(group="minivllm"):
        if (top := _top(entry.module)) != "minivllm":
            found[top] = top if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return found


def _top(module: str) -> str:
    return module.partition(".")[0]
