"""A checkpoint's folder: finding or downloading it, and reading its config. Needs neither torch nor the weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os.path import expanduser
from pathlib import Path
from typing import Any

from minivllm.config.engine_config import ModelOptions
from minivllm.core.model_config import ModelConfig, end_tokens
from minivllm.errors import CheckpointError, one_line
from minivllm.models.fp8_config import Fp8Config, fp8_config

DEMO = Path(__file__).parent / "demo"
_WEIGHTS = "*.safetensors"
_DOWNLOADED = ["*.json", _WEIGHTS, "*.model", "*.jinja", "tokenizer*", "merges.txt", "vocab.*"]
_NOT_DOWNLOADED = ["*/*", "consolidated*"]  # subfolders, and a second copy of the weights


# --------------------------------------------------------------------------- finding the folder


def fetch(options: ModelOptions, key: str = "model.path") -> Path:
    """The checkpoint's folder: ``path``, a download of ``repo``, or the demo model that ships with the package.
    ``key``: where the user could give a folder."""
    if options.path is not None:
        return _folder(Path(expanduser(options.path)), key)
    if options.repo is not None:
        return download(options.repo, options.revision, key=key)
    if options.name == "demo":
        return DEMO
    raise CheckpointError(f"model={options.name} names neither a folder nor a repository; set model.path=DIR")


def download(repo: str, revision: str | None = None, *, offline: bool = False, key: str = "model.path") -> Path:
    """Download a repository's config, tokenizer and safetensors, or find them in the local cache. ``key``: where the
    user could give a folder instead; without weights for model.tokenizer."""
    if offline and not _is_cached(repo):
        raise _cannot_fetch(repo, _NOT_CACHED, key)
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=_DOWNLOADED,
                ignore_patterns=[*_NOT_DOWNLOADED, _WEIGHTS] if key == "model.tokenizer" else _NOT_DOWNLOADED,
                local_files_only=offline,
            )
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is gated: accept its licence on its page, run `hf auth login`, then `hf download {repo}`"
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{repo} is not a repository's name, ORG/NAME; for a folder pass {key}=DIR") from error
    except Exception as error:  # its own errors, its HTTP library's, OSError and ValueError
        not_cached = f"{_NOT_CACHED} ({type(error).__name__}: {one_line(error)})"
        reasons: dict[type[Exception], str] = {
            errors.RepositoryNotFoundError: "there is no such repository, or it is private",
            errors.RevisionNotFoundError: f"it has no revision {revision!r}",
        }
        raise _cannot_fetch(repo, reasons.get(type(error), not_cached), key) from error


_NOT_CACHED = "it is not in the local cache and cannot be downloaded from here"


def _is_cached(repo: str) -> bool:
    """Whether any of it is cached. Does not use the hub's client, which imports an HTTP library (0.3 s)."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}").is_dir()


def _cannot_fetch(repo: str, reason: str, key: str) -> CheckpointError:
    otherwise = ", or try the shape alone with load_format=dummy" if key == "model.path" else ""
    return CheckpointError(
        f"cannot fetch {repo}: {reason}; on a connected machine run `hf download {repo} --local-dir DIR` "
        f"and pass {key}=DIR{otherwise}"
    )


def _folder(path: Path, key: str = "model.path") -> Path:
    with readable(path, key):
        if not path.exists():
            raise CheckpointError(f"{key}={path} does not exist; pass the folder that holds config.json")
        if not path.is_dir():
            raise CheckpointError(f"{key}={path} is a file; pass the folder that holds it ({key}={path.parent})")
    return path


@contextmanager
def readable(path: Path, key: str) -> Iterator[None]:
    """For what is asked of a folder: an OSError is told as a CheckpointError."""
    try:
        yield
    except OSError as error:
        said = f"{key}={path} cannot be read: {error.strerror}; pass a folder that this process may read"
        raise CheckpointError(said) from error


# --------------------------------------------------------------------------- reading it


def read_model_config(
    path: Path, read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda hf: hf, key: str = "model.path"
) -> ModelConfig:
    """Read config.json, and the end-of-sequence ids of generation_config.json. ``read``: ``Registry.read_config``;
    ``key``: where the user gave the path."""
    path = _folder(Path(path), key)
    file = path / "config.json"
    with readable(path, key):
        found = file.is_file()
        inner = [] if found else sorted(p.parent for p in path.glob("*/config.json"))
        adapter = not found and (path / "adapter_config.json").is_file()
    if adapter:
        hint = f"pass its model as {key}, and model.lora={path}"
        if key == "weights_path":
            hint = "it takes whole checkpoints; an engine with model.lora reads its adapter again without weights_path"
        raise CheckpointError(f"{path} holds an adapter (adapter_config.json), no model; {hint}")
    if not found:
        hint = f"did you mean {key}={inner[0]}?" if inner else f"pass {key}=DIR, a folder in that layout"
        raise CheckpointError(f"{path} has no config.json, so it is no checkpoint in Hugging Face's layout; {hint}")
    hf = read_json(file)
    config = ModelConfig.from_hf(read(hf), where=str(file))
    read_quantization(path)
    generation = path / "generation_config.json"
    ids = end_tokens(read_json(generation), str(generation)) if generation.is_file() else ()
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*ids, *config.eos_token_ids))))


def read_quantization(path: Path) -> Fp8Config | None:
    """How config.json, or ModelOpt's own file, says that weights are quantized; None: they are not.

    Raises:
        CheckpointError: in a way that is not read.
    """
    file, modelopt = path / "config.json", path / "hf_quant_config.json"
    hf = read_json(file)
    said = hf.get("quantization_config") or hf.get("compression_config")  # the latter: compressed-tensors' former name
    if not said and modelopt.is_file():
        said, file = {"quant_method": "modelopt", **read_json(modelopt)}, modelopt
    return fp8_config(said, str(file))


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # invalid JSON or invalid UTF-8, or nested too deeply
        raise CheckpointError(f"{file} is not readable as JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a JSON {type(value).__name__} where an object is expected")
    return value
