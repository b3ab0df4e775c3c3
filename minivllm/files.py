"""User-given files and standard input: unreadable or unwritable ones are reported before anything is loaded."""

from __future__ import annotations

import os
from os.path import expanduser
from pathlib import Path
from typing import TextIO

from minivllm.errors import ConfigError


def check_writable(name: str, key: str) -> Path:
    """The file's path, after checking that it can be appended to; a new file is not left behind. Raises ConfigError."""
    path = Path(expanduser(name))
    there = os.path.lexists(path)
    try:
        path.open("a").close()
        if not there:
            path.unlink(missing_ok=True)  # another of torchrun's processes may have removed it
    except OSError as e:
        raise ConfigError(f"{key}={name} cannot be written: {e.strerror}") from e
    return path


def read_text(name: str, key: str) -> str:
    """A file's text, without a byte order mark. Raises ConfigError."""
    try:
        return Path(expanduser(name)).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{key}={name} cannot be read: {why}") from e


def read_stream(stream: TextIO) -> str:
    """The contents of standard input, without a byte order mark. Raises ConfigError."""
    try:
        return stream.read().removeprefix("\ufeff")
    except UnicodeDecodeError as e:
        raise ConfigError("standard input is not UTF-8 text") from e
