"""Every error that minivllm raises on purpose: each message says what was wrong, what was allowed, what to type."""

import builtins
import contextlib
from collections.abc import Iterator, Sequence

_QUOTED = 200  # characters
_LIBRARIES = frozenset(("numpy", "torch", "triton"))  # what they raise is about what they were given


class MinivllmError(Exception):
    """Base of all. The command line prints these in one paragraph, without a traceback."""


class ConfigError(MinivllmError, ValueError):
    """A configuration that cannot run: an unknown key or name, or values that contradict each other."""


class PluginError(MinivllmError):
    """A plugin that cannot be loaded, or that offers something that cannot be used."""


class CheckpointError(MinivllmError):
    """A checkpoint folder that cannot be read, or whose tensors do not fit the model."""


class RequestError(MinivllmError, ValueError):
    """One request that can never run; the engine goes on with the others."""


class ContextLengthError(RequestError):
    """A prompt that is longer than ``max_model_len`` allows, alone or with what is to follow."""


class EngineDeadError(MinivllmError, RuntimeError):
    """The engine stopped: a rank died or raised. Every waiting request ends with this error."""


def shown(value: object) -> str:
    """What somebody gave, as an error quotes it: its repr, which is cut if it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number with too many digits
        return f"<{type(value).__name__}>"
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"


def which_of(prompts: Sequence[object], index: int) -> str:
    """What an error about one of several prompts begins with."""
    return f"prompt {index}: " if len(prompts) > 1 else ""


def of_prompt(error: RequestError, prompts: Sequence[object], index: int) -> RequestError:
    """The error of one of several prompts, which says of which."""
    if len(prompts) == 1:
        return error
    kind = ContextLengthError if isinstance(error, ContextLengthError) else RequestError
    return kind(f"{which_of(prompts, index)}{error}")


def no_room(prompt: str, max_model_len: int) -> ContextLengthError:
    """``prompt``: which one it is, and how many tokens it has."""
    return ContextLengthError(
        f"{prompt}, and max_model_len={max_model_len} leaves no room for an answer: this model's maximum context "
        f"length is {max_model_len} tokens; shorten the prompt or raise max_model_len"
    )


def is_text(value: object) -> bool:
    """Whether it is text that can be written down: JSON may have halves of characters."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def printable(text: str) -> str:
    """Halves of characters, which a client can send and no answer can hold, spelled out."""
    return text.encode(errors="backslashreplace").decode()


def by_name(name: str, message: str) -> Exception:
    """Another process's error: of its class, if that is ours or Python's, or a RuntimeError that names it."""
    kind = globals().get(name) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # a class that is made of more than a message
            return kind(message)
    return RuntimeError(f"{name}: {message}")


def place_of(error: BaseException) -> str:
    """Where an error comes from, below the libraries' own frames: module, line and function; and the package of the
    innermost plugin on the way there, if there is one: ``of`` it if that is its code, else ``for`` it."""
    place, whose = _origin(error)
    return f"{place}, {whose}" if whose else place


def told(error: BaseException) -> str:
    """An error that is none of ours, in one line: with where it was raised, if a plugin is on the way there. Whose code
    it is, is said beside it."""
    text, (place, whose) = " ".join(f"{type(error).__name__}: {error}".split()), _origin(error)
    return f"{text} ({place})" if whose else text


def package_of(component: object) -> str:
    """``minivllm-mine 0.1``: the package of plugins that a class is in, or an object's. Empty: it is in none."""
    cls = component if isinstance(component, type) else type(component)
    return _packages().get(_top(cls.__module__), "")


def named(kind: str, name: str, component: object) -> str:
    """How errors call a component, which is a class or an object of it: ``sampler 'mine' of minivllm-mine 0.1``."""
    package = package_of(component)
    return f"{kind} {name!r} of {package}" if package else f"{kind} {name!r}"


def blamed(error: Exception, kind: str, name: str, component: object, method: str) -> Exception:
    """What to raise when a component's ``method`` raised ``error``: of a plugin's, a PluginError of one line that names
    its package. Errors of ours, and of what is built in, stay as they are."""
    if isinstance(error, MinivllmError):  # first: requests are refused all the time
        return error
    package = package_of(component)
    whose = f"of {package}" if package else _origin(error)[1]  # a built-in class may call a plugin's
    return PluginError(f"{kind} {name!r} {whose}: {method} raised {told(error)}") if whose else error


@contextlib.contextmanager
def calling(kind: str, name: str, component: object, method: str) -> Iterator[None]:
    """While a component's ``method`` is called, outside of steps: what it raises becomes what ``blamed`` says."""
    try:
        yield
    except Exception as error:
        if (new := blamed(error, kind, name, component, method)) is error:
            raise
        raise new from error


def _origin(error: BaseException) -> tuple[str, str]:
    """``place_of``, in its two parts; the second is empty where no plugin is on the way."""
    place, package, own, behind, packages = "nowhere", "", False, error.__traceback__, _packages()
    while behind is not None:
        frame = behind.tb_frame
        module, cls = str(frame.f_globals.get("__name__")), type(frame.f_locals.get("self"))  # it may inherit the code
        package = packages.get(_top(module)) or packages.get(_top(cls.__module__)) or package
        if _top(module) not in _LIBRARIES:
            place, own = f"{module}, line {behind.tb_lineno}, in {frame.f_code.co_name}", _top(module) in packages
        behind = behind.tb_next
    return place, f"{'of' if own else 'for'} {package}" if package else ""


def _packages() -> dict[str, str]:
    """The outermost module of each installed plugin -> its package, with its version. Not quick: for errors alone."""
    from importlib.metadata import entry_points

    found = {}
    for entry in entry_points(group="minivllm"):
        if (top := _top(entry.module)) != "minivllm":
            found[top] = top if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return found


def _top(module: str) -> str:
    return module.partition(".")[0]
