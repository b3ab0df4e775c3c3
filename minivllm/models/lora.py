"""Merges a LoRA adapter into a checkpoint's tensors while they are read, so that whoever loads them sees plain weights.

Nothing of the adapter is left afterwards, and steps cost what they do without one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minivllm.core.model_config import ModelConfig
from minivllm.errors import CheckpointError
from minivllm.models.loader import FLOATS, tensors_read
from minivllm.models.lora_config import LORA, MERGE_ELSEWHERE, TENSORS, read_lora_config
from minivllm.naming import listed

_LOW_RANK = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_PREFIX = "base_model.model."
Problems = defaultdict[str, list[str]]


@dataclass(slots=True)
class Change:
    """What an adapter has for one of the checkpoint's tensors, W, (out, in): A and B, or another W, or all three."""

    a: torch.Tensor | None = None  # (rank, in)
    b: torch.Tensor | None = None  # (out, rank)
    factor: float = 0.0
    whole: torch.Tensor | None = None
    names: list[str] = field(default_factory=list)  # the adapter's

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """Those of what it has, which are W's if it fits."""
        found = set() if self.whole is None else {tuple(self.whole.shape)}
        if self.a is not None and self.b is not None:
            found.add((self.b.shape[0], self.a.shape[1]))
        return found

    def applied(self, weight: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """The merged tensor, computed in float32 on ``device``, and rounded to the weight's dtype."""
        base = weight if self.whole is None else self.whole
        if self.a is None or self.b is None:
            return base.to(weight.dtype)
        floats = torch.promote_types(weight.dtype, torch.float32)
        base, b, a = (_placed(its, device).to(floats) for its in (base, self.b, self.a))
        return torch.addmm(base, b, a, alpha=self.factor).to(weight.dtype)


def _placed(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    if tensor.device == torch.device(device):
        return tensor
    return torch.empty_like(tensor, device=device).copy_(tensor)  # a copy of the kind that PinnedUpload does


class Adapter:
    """The adapter in a folder, which ``key`` names, for a checkpoint of ``model_config``. ``changes``: what it has for
    each of the checkpoint's tensors.

    Raises:
        CheckpointError: it is no adapter that can be merged, or is incomplete; the message names the tensors.
    """

    def __init__(self, folder: Path, model_config: ModelConfig, key: str = LORA) -> None:
        self._folder, self._key, self._config = folder, key, read_lora_config(folder)
        self.changes: defaultdict[str, Change] = defaultdict(Change)
        problems: Problems = defaultdict(list)
        for name, tensor in tensors_read(folder / TENSORS):
            self._take(name, tensor, problems)
        for target, change in self.changes.items():
            self._check(target, change, problems)
        whole = [f".{target}." for target, change in self.changes.items() if change.whole is not None]
        for saved in self._config.modules_to_save:
            if not any(f".{saved}." in target for target in whole):
                problems["missing"].append(f"{saved}, which modules_to_save names")
        if not self.changes and not problems:
            problems["missing"].append("all")
        if not problems and model_config.tie_word_embeddings:
            embeddings = (model_config.vocab_size, model_config.hidden_size)
            of_one = [name for its in self.changes.values() if embeddings in its.shapes for name in its.names]
            problems["for the embeddings or the head alone, which are one here (tie_word_embeddings)"] = of_one
        self.refuse("cannot be used", problems)

    def _take(self, name: str, tensor: torch.Tensor, problems: Problems) -> None:
        if low_rank := _LOW_RANK.fullmatch(name):
            target = f"{low_rank[1]}.weight"
            change = self.changes[target]
            change.factor = self._config.factor_of(low_rank[1])
            setattr(change, low_rank[2].lower(), tensor)
        elif name.startswith(_PREFIX) and "lora_" not in name:
            target = name.removeprefix(_PREFIX).replace(".base_layer.", ".")  # PEFT saves the latter of an LM head
            change = self.changes[target]
            if change.whole is not None:
                problems["beside another of the same place"].append(name)
            change.whole = tensor
        else:
            problems["neither lora_A and lora_B of linear layers nor whole tensors"].append(name)
            return
        change.names.append(name)
        if tensor.dtype not in FLOATS:
            problems["misshapen"].append(f"{name} of dtype {str(tensor.dtype).removeprefix('torch.')}")
        elif not tensor.isfinite().all():  # refused here, an engine that reloads runs on
            problems["with infinity or NaN"].append(name)

    def _check(self, target: str, change: Change, problems: Problems) -> None:
        module = target.removesuffix(".weight")
        rank = self._config.rank_of(module)
        for letter, part, dim in (("A", change.a, 0), ("B", change.b, 1)):
            name = f"{_PREFIX}{module}.lora_{letter}.weight"
            if part is None:
                if change.a is not change.b:  # it has the other
                    problems["missing"].append(name)
            elif part.dim() != 2 or part.shape[dim] != rank:
                problems["misshapen"].append(f"{name} {list(part.shape)} where adapter_config.json says rank {rank}")

    def merge(
        self, weights: Iterable[tuple[str, torch.Tensor]], device: torch.device | str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every tensor of a checkpoint, none in FP8, merged where the adapter changes it.

        Raises:
            CheckpointError: after the last one, naming each of the adapter's that was not used exactly once.
        """
        problems: Problems = defaultdict(list)
        used: set[str] = set()
        for name, tensor in weights:
            change = self.changes.get(name)
            if change is None:
                yield name, tensor
            elif name in used:
                problems["for a tensor that the checkpoint has twice"] += change.names
            elif wrong := change.shapes - {tuple(tensor.shape)}:
                its = " and ".join(str(list(shape)) for shape in sorted(wrong))
                problems["misshapen"].append(f"for {name} {its} where the checkpoint has {list(tensor.shape)}")
            else:
                yield name, change.applied(tensor, device)
            used.add(name)
        for target, change in self.changes.items():
            if target not in used:
                problems["for no tensor of the checkpoint"] += change.names
        self.refuse("does not fit the checkpoint", problems)

    def __str__(self) -> str:
        return f"{self._key}={self._folder}"

    def refuse(self, what: str, problems: Problems) -> None:
        """Raises CheckpointError if there is any problem: what is wrong -> of which tensors."""
        found = [f"{len(names)} {kind}: {listed(names)}" for kind, names in problems.items() if names]
        if found:
            raise CheckpointError(
                f"{self} {what}; of its tensors {'; '.join(found)}. Is it an adapter of this "
                f"model, and complete? If so, {MERGE_ELSEWHERE}"
            )
