"""Where the YAML files are. A separate module, because listing them must not import Hydra."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """The folder of Hydra groups: ``minivllm/conf`` in a wheel, ``conf`` at the root of a source tree."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"minivllm's conf folder is neither in {package} nor in {package.parent}")
