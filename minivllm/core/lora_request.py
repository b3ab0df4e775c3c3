"""Which LoRA adapter a request has, with vLLM's names."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from minivllm.errors import RequestError, shown

_BREAKS_LINES = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # control characters and Unicode's line ends


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """``lora_name`` is for people, ``lora_int_id``, from 1 on, tells adapters apart, ``lora_path`` is a folder in
    PEFT's format or a repository. ``load_inplace``: ``add_lora`` reads the folder again even if the adapter is loaded,
    as one that is being trained. Others of vLLM's fields are accepted only as None: an adapter is always for the
    engine's model. Raises RequestError for values of other kinds."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False
    base_model_name: None = field(default=None, kw_only=True, repr=False)
    tensorizer_config_dict: None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if not is_name(self.lora_name):
            said = "is not a name, which is text without control characters"
            raise RequestError(f"lora_name={shown(self.lora_name)} {said}")
        number: object = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise RequestError(f"lora_int_id={shown(number)} is not a whole number from 1 on")
        path: object = self.lora_path
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise RequestError(f"lora_path={shown(path)} is not the path of a folder, nor ORG/NAME")
        if not isinstance(self.load_inplace, bool):
            raise RequestError(f"load_inplace={shown(self.load_inplace)} is not True or False")
        for name in ("base_model_name", "tensorizer_config_dict"):
            if getattr(self, name) is not None:
                raise RequestError(f"{name}={shown(getattr(self, name))} is not supported; leave it out")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return os.fspath(self.lora_path)


def is_name(value: object) -> bool:
    """Whether an adapter may be called so."""
    return isinstance(value, str) and bool(value) and _BREAKS_LINES.search(value) is None
