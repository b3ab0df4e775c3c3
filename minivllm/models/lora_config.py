"""What adapter_config.json says of a LoRA adapter in PEFT's format: which factor its tensors get when they are merged.

An adapter that is more than ``W + factor * B @ A`` is refused by name. ``lora.py`` reads the tensors. Needs no torch.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from os.path import expanduser
from pathlib import Path
from typing import Any

from minivllm.errors import CheckpointError, shown
from minivllm.models.checkpoint import download, read_json, readable
from minivllm.naming import is_repository

LORA, PATH = "model.lora", "lora_path"  # the keys that name one to merge, and a request's
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MERGE_ELSEWHERE = "merge it with PEFT's merge_and_unload and save_pretrained, and pass that folder as model.path"


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """``ranks`` and ``alphas``: exceptions, by a regular expression for the end of a module's name."""

    rank: int
    alpha: float
    rslora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        return _matching(self.ranks, module, self.rank)

    def factor_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return _matching(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def _matching(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """The value of the first pattern that is the module's name, or its end after a dot."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


# --------------------------------------------------------------------------- finding the folder


def lora_folder(name: str | None) -> Path | None:
    """``adapter_folder`` of ``model.lora``, which may be None."""
    return None if name is None else adapter_folder(name)


def adapter_folder(name: str, key: str = LORA) -> Path:
    """The folder of an adapter that ``key`` names: a folder, or a repository to download. Raises CheckpointError if it
    has no adapter that could be read."""
    folder = Path(expanduser(name))
    with readable(folder, key):
        if folder.is_file():
            raise CheckpointError(f"{key}={name} is a file; pass the folder that holds it ({key}={folder.parent})")
        if not folder.is_dir():
            if folder.exists() or not is_repository(name):
                what = "is no folder" if folder.exists() else "does not exist"
                raise CheckpointError(f"{key}={name} {what}; pass a folder that holds {CONFIG}, or ORG/NAME")
            folder = download(name, key=key)
        _check_files(folder, key)
    return folder


def _check_files(folder: Path, key: str) -> None:
    if not (folder / CONFIG).is_file():
        if (folder / "config.json").is_file():
            raise CheckpointError(
                f"{key}={folder} holds a checkpoint (config.json), no adapter ({CONFIG}); pass model.path={folder}"
            )
        inner = sorted(file.parent for file in folder.glob(f"*/{CONFIG}"))
        hint = f"did you mean {key}={inner[0]}?" if inner else "pass a folder that PEFT's save_pretrained wrote"
        raise CheckpointError(f"{key}={folder} has no {CONFIG}, so it is no adapter in PEFT's layout; {hint}")
    if not (folder / TENSORS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        why = ", only adapter_model.bin, and minivllm does not unpickle weights" if pickled else ""
        raise CheckpointError(
            f"{key}={folder} has no {TENSORS}{why}; save the adapter again with PEFT's "
            "save_pretrained(DIR, safe_serialization=True)"
        )


# --------------------------------------------------------------------------- reading the config


def read_lora_config(folder: Path) -> LoraConfig:
    """Raises CheckpointError for what is no LoRA adapter, or one that cannot be merged as it is."""
    file = folder / CONFIG
    said = read_json(file)
    for key, value in said.items():
        if key in _READ or key in _OF_TRAINING or value in _PLAIN.get(key, ()) or not value:
            continue
        allowed = ", ".join(map(repr, _PLAIN.get(key, ()))) or "False or null"
        raise CheckpointError(
            f"{file} says {key}={shown(value)}, {_WHY.get(key, 'which minivllm does not merge')}. Allowed: {allowed}; "
            f"{MERGE_ELSEWHERE}"
        )
    if said.get("peft_type") != "LORA":
        raise CheckpointError(f"{file} says no peft_type, and LORA is needed; is it an adapter that PEFT saved?")
    if not isinstance(rslora := said.get("use_rslora") or False, bool):
        raise CheckpointError(f"{file}: use_rslora={shown(rslora)} is not true or false")
    saved = said.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise CheckpointError(f"{file}: modules_to_save={shown(saved)} is not a list of names")
    return LoraConfig(
        rank=_rank(said.get("r"), "r", file),
        alpha=_alpha(said.get("lora_alpha"), "lora_alpha", file),
        rslora=rslora,
        ranks={key: _rank(v, f"rank_pattern.{key}", file) for key, v in _patterns(said, "rank_pattern", file).items()},
        alphas={
            key: _alpha(v, f"alpha_pattern.{key}", file) for key, v in _patterns(said, "alpha_pattern", file).items()
        },
        modules_to_save=tuple(saved),
    )


_READ = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
# Keys of which the saved tensors do not depend, or only where they are: those say it themselves.
_OF_TRAINING = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type",
)  # fmt: skip
# Others, known or not, have to be null, false, 0 or empty; these may have other values, too.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),  # they leave the weights as they are
}
_WHY = {
    "peft_type": "which is no LoRA adapter",
    "use_dora": "and DoRA also scales the merged weights",
    "bias": "so that it has biases of its own",
    "lora_bias": "so that it has biases of its own",
    "init_lora_weights": "so that it belongs to other weights than the checkpoint's, unless PEFT converted it",
    "fan_in_fan_out": "so that its weights are transposed",
    "trainable_token_indices": "so that it has embeddings of its own",
    "target_parameters": "so that it changes parameters that are no linear layer's",
    "layer_replication": "so that the model has more layers than its checkpoint",
    "alora_invocation_tokens": "so that it is not for all tokens",
}


def _patterns(said: Mapping[str, Any], key: str, file: Path) -> Mapping[str, Any]:
    value = said.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: {key}={shown(value)} is not a mapping")
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(f"{file}: {key} has {shown(pattern)}, no regular expression ({error})") from error
    return value


def _rank(value: object, key: str, file: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{file}: {key}={shown(value)} is not a whole number from 1")
    return value


def _alpha(value: object, key: str, file: Path) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:  # nor NaN
        raise CheckpointError(f"{file}: {key}={shown(value)} is not a number")
    return value
