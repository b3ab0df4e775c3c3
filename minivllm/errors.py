"""Every error that minivllm raises on purpose: each message says what was wrong, what was allowed, what to type."""

import builtins
import contextlib

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
    """Where an error comes from, below the libraries' own frames: module, line and function."""
    place, behind = "nowhere", error.__traceback__
    while behind is not None:
        frame = behind.tb_frame
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in _LIBRARIES:
            place = f"{module}, line {behind.tb_lineno}, in {frame.f_code.co_name}"
        behind = behind.tb_next
    return place
