"""Loads a model onto its device from a checkpoint folder (or a seed): one tensor at a time, nothing held twice.

The parameters know which tensor goes where (``layers/parameter.py``); this file finds and moves the tensors.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import torch
from torch import nn

from minivllm.core.interfaces import Model
from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError, ConfigError
from minivllm.layers.decoder import CausalLM, DecoderLayer
from minivllm.layers.fp8 import keep_weights_in_fp8
from minivllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.packed import pack_products_again
from minivllm.layers.parameter import ShardId, allocate, load_piece, pieces_of, scales_of, whole_of
from minivllm.layers.plain import is_plain
from minivllm.layers.rotary import RotaryTable
from minivllm.models.checkpoint import read_json
from minivllm.models.upload import PinnedUpload
from minivllm.naming import listed

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Tensors that old checkpoints contain and no model reads: tables computed from the config.
HARMLESS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# --------------------------------------------------------------------------- reading the tensors


def iterate_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor, file by file. Tensors are views of a memory-mapped file: slice before copying."""
    for file in _safetensors_files(Path(path)):
        yield from tensors_in(file)


def tensors_in(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor of a safetensors file, likewise."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.offset_keys():  # in file order, so that reads are sequential
                yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} {_why_unreadable(file, error)}") from error


def tensors_read(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all tensors of a safetensors file, by name, in memory: if it is written anew meanwhile, as by a
    trainer, it is refused as damaged or read as it was, where reading a file that is mapped would end the process."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        yield from sorted(load(file.read_bytes()).items())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} {_why_unreadable(file, error)}") from error


def _why_unreadable(file: Path, error: Exception) -> str:
    try:
        with file.open("rb") as head:
            pointer, size = b"git-lfs" in head.read(64), file.stat().st_size
    except OSError as of_file:
        link = f", a link to {file.readlink()}" if file.is_symlink() else ""
        return f"cannot be read ({of_file.strerror}{link}); fetch the file again"
    if pointer:
        return f"({size} bytes) is a Git LFS pointer; run `git lfs pull` in its folder"
    return f"({size} bytes) is damaged or truncated ({error}); fetch the file again"


def shapes_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor, without its numbers: on the meta device."""
    return ((name, torch.empty_like(tensor, device="meta")) for name, tensor in iterate_safetensors(path))


def _safetensors_files(path: Path) -> list[Path]:
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    index = path / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map; fetch the file again")
        files = [path / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(
                f"{path} lacks {listed(missing)}, which {INDEX} names ({len(missing)} of {len(files)} files); "
                "fetch the missing files"
            )
        return files
    files = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if files:
        return files
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(pattern))
    if others:
        raise CheckpointError(
            f"{path} has no .safetensors file, only {listed(others)}; minivllm does not unpickle weights: "
            "convert them with transformers' save_pretrained"
        )
    raise CheckpointError(f"{path} has no .safetensors file; for random weights of its shape use load_format=dummy")


# --------------------------------------------------------------------------- filling a model


def load_weights(
    module: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    packed: Mapping[str, tuple[str, ShardId]] | None = None,
) -> None:
    """Copy every tensor into its parameter.

    ``packed`` maps a checkpoint's module name to (ours, shard id); a shard id of None means that the checkpoint has all
    parts in one tensor, stacked as they are here. A parameter shared by two modules takes the first one's tensor; the
    checkpoint may or may not have the other's.

    Raises:
        CheckpointError: naming every tensor that is missing, unexpected or of the wrong shape; or a weight that was
            packed before and can no longer be.
    """
    targets = targets_of(module, packed or {})
    seen: dict[tuple[int, ShardId], str] = {}  # by place, the name of the tensor that filled it
    unexpected: list[str] = []
    misfits: list[str] = []
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            if not name.endswith(HARMLESS):
                unexpected.append(name)
            continue
        canonical, param, shard_id = target
        place = (id(param), shard_id)
        if name != canonical and seen.get(place) == canonical:
            continue  # the shared weight's second copy
        seen[place] = name
        expected = whole_of(param, shard_id)
        if tuple(tensor.shape) != expected.shape:
            misfits.append(f"{name} {list(tensor.shape)} where the model has {list(expected.shape)}")
        elif tensor.dtype not in FLOATS:
            misfits.append(f"{name} of dtype {str(tensor.dtype).removeprefix('torch.')}")
        else:
            getattr(param, "weight_loader", load_piece)(param, tensor, shard_id)
    missing = [name for name, (canonical, p, s) in targets.items() if name == canonical and (id(p), s) not in seen]
    if missing or unexpected or misfits:
        problems = {"missing": missing, "unexpected": unexpected, "misshapen": misfits}
        found = "; ".join(f"{len(names)} {what}: {listed(names)}" for what, names in problems.items() if names)
        modules = {part for name in (*targets, *unexpected) for part in name.split(".")[-2:-1]}
        raise CheckpointError(
            f"the checkpoint does not fit {type(module).__name__}: {found}. Is config.json of this checkpoint, and "
            f"does its architecture name this model?{_hint(missing, modules, packed or {})}"
        )
    renew_copies(module)


def _hint(missing: Sequence[str], modules: Set[str], packed: Mapping[str, tuple[str, ShardId]]) -> str:
    """What else may be wrong, with a leading space, or empty. ``modules``: the last parts of all modules' names."""
    hint, idle = "", [name for name in packed if name not in modules and name not in CausalLM.packed]
    if idle:
        hint = f" (In packed {listed(idle)} names no module: it is the last part of a module's name.)"
    if "lm_head.weight" in missing:
        hint += " (If the embeddings are the head, too, config.json has to say tie_word_embeddings: true.)"
    return hint


def renew_copies(module: nn.Module) -> None:
    """Called after loading weights into a model that had others: fold norms and pack weights again, where they were.
    What is up to date does not change."""
    for norm, product in norm_pairs(module):
        if product.folded:
            product.fold(norm)
    pack_products_again(module)


def dummy_weights(module: nn.Module, seed: int, packed: Mapping[str, tuple[str, ShardId]] | None = None) -> None:
    """Random weights from shapes alone: each checkpoint tensor depends on (seed, its name), so that the ranks of any tp
    size hold slices of the same model. Norm weights are 1."""
    for name, (canonical, param, shard_id) in targets_of(module, packed or {}).items():
        if name != canonical:
            continue
        value = getattr(param, "dummy_value", None)
        if value is not None:
            param.data.fill_(value)
            continue
        dtype = getattr(param, "loaded_dtype", param.dtype)
        whole = torch.empty(whole_of(param, shard_id).shape, dtype=dtype, device=param.device)
        # one 32-bit number: the CPU generator uses only that much of a seed
        generator = torch.Generator(param.device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        whole.normal_(std=0.02, generator=generator)
        getattr(param, "weight_loader", load_piece)(param, whole, shard_id)


def norm_pairs(module: nn.Module) -> Iterator[tuple[RMSNorm, QKVParallelLinear | MergedColumnParallelLinear]]:
    """The layers' norms and the matmuls they can be folded into; not if their weights are shared or the norm is not a
    plain RMSNorm."""
    holders = Counter(id(param) for _, param in module.named_parameters(remove_duplicate=False))
    for layer in module.modules():
        if isinstance(layer, DecoderLayer):
            for norm, product in layer.norm_pairs():
                if is_plain(norm, RMSNorm) and holders[id(norm.weight)] == holders[id(product.weight)] == 1:
                    yield norm, product


Targets = dict[str, tuple[str, nn.Parameter, ShardId]]


def targets_of(module: nn.Module, packed: Mapping[str, tuple[str, ShardId]]) -> Targets:
    """A checkpoint's tensor name -> (the canonical name if two share a parameter, the parameter, shard id)."""
    parts: dict[tuple[str, ShardId], str] = {(ours, shard): theirs for theirs, (ours, shard) in packed.items()}
    targets: Targets = {}
    first: dict[tuple[int, ShardId], str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        *path, leaf = name.split(".")
        stacked = bool(path) and (path[-1], None) in parts
        for shard_id in (None,) if stacked else pieces_of(param):
            owner = [*path[:-1], _part(parts, path, shard_id, param)] if stacked or shard_id is not None else path
            theirs = ".".join([*owner, leaf])
            targets[theirs] = first.setdefault((id(param), shard_id), theirs), param, shard_id
    return targets


def _part(parts: Mapping[tuple[str, ShardId], str], path: list[str], shard_id: ShardId, param: nn.Parameter) -> str:
    """A checkpoint's name for one of the tensors that a module stacks. Raises TypeError if ``packed`` has none."""
    if (theirs := parts.get((path[-1], shard_id))) is not None:
        return theirs
    pieces = ", ".join(f"'NAME': ({path[-1]!r}, {shard!r})" for shard in pieces_of(param))
    raise TypeError(
        f"{'.'.join(path)} stacks tensors of a checkpoint, and packed does not name them: add {path[-1]} to it, as "
        f"packed = {{**CausalLM.packed, {pieces}}}, each NAME the checkpoint's"
    )


# --------------------------------------------------------------------------- building it


def build_model(
    model_class: type[Model],
    model_config: ModelConfig,
    tp: TensorParallel,
    device: torch.device | str,
    dtype: torch.dtype,
    weights: Iterable[tuple[str, torch.Tensor]] | int,
    max_model_len: int,
    quantization: str = "none",
) -> Model:
    """A model on its device, ready to run. ``weights``: a checkpoint's tensors, or the seed of dummy weights.
    ``quantization``: none or fp8 (``layers/fp8.py``).

    Raises:
        CheckpointError: the class does not support the config's architecture, or the tensors do not fit.
        ConfigError: the model cannot be split over ``tp`` ranks, or does not fit in memory.
    """
    reads = getattr(model_class, "architectures", ())
    if reads and model_config.architecture not in reads:
        raise CheckpointError(
            f"config.json names {model_config.architecture}, but {model_class.__name__} reads {', '.join(reads)}; "
            "a checkpoint run as another model would answer nonsense"
        )
    with torch.device("meta"):
        model = model_class(model_config, tp)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{model_class.__name__} is not a torch.nn.Module")
    if quantization == "fp8":
        keep_weights_in_fp8(model, torch.device(device), dtype)
    _refuse_too_large(model, torch.device(device), dtype, tp)
    materialize(model, device, dtype)
    if isinstance(weights, int):
        dummy_weights(model, weights, getattr(model, "packed", None))
    else:
        with PinnedUpload():
            model.load_weights(weights)
    refuse_unscaled(model)
    refuse_nonfinite(model)
    for norm, product in norm_pairs(model):
        if product.foldable:
            product.fold(norm)
    for module in model.modules():
        if isinstance(module, RotaryTable):
            module.build(max_model_len, device)
    _refuse_meta(model)
    model.eval()
    return model


def _refuse_too_large(model: nn.Module, device: torch.device, dtype: torch.dtype, tp: TensorParallel) -> None:
    def size(floats: torch.dtype) -> int:
        return sum(param.numel() * getattr(param, "kept_in", floats).itemsize for param in model.parameters())

    needed = size(dtype)
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by an earlier engine
        room, has = torch.cuda.mem_get_info(device)[0] + kept, "are free on this GPU"
        advice = f", or more GPUs: tp={2 * tp.size}"
    elif hasattr(os, "sysconf"):
        room, has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine has"
        advice = ", or dtype=bfloat16" if needed > room >= size(torch.bfloat16) else ""
    else:
        return
    if needed > room:
        each = f" of each of {tp.size} ranks" if tp.size > 1 else ""
        kinds = {str(getattr(param, "kept_in", dtype)).removeprefix("torch.") for param in model.parameters()}
        raise ConfigError(
            f"the weights{each} take {needed / 2**30:.1f} GiB in {' and '.join(sorted(kinds))}, more than the "
            f"{room / 2**30:.1f} GiB that {has}; take a smaller model, as model=qwen3{advice}"
        )


def refuse_unscaled(model: nn.Module) -> None:
    """Raises CheckpointError if a weight in float8 has no scales: it was not loaded by its ``weight_loader``, or holds
    what is no number."""
    for name, scale in scales_of(model):
        if not bool(scale.isfinite().all()):
            raise CheckpointError(
                f"quantization=fp8: {name} holds what is no finite number, or its model's load_weights wrote to "
                "it itself; load through load_weights of minivllm.models.loader, or the weight's weight_loader"
            )


def refuse_nonfinite(model: nn.Module) -> None:
    """Raises CheckpointError if a weight is infinite or NaN, with which answers would be nonsense. Reads each weight
    once, and waits for the device once."""
    floats = [(name, param.data) for name, param in model.named_parameters() if param.dtype in FLOATS]
    if not floats:
        return
    sums = torch.stack([param.sum().float() for _, param in floats]).isfinite().tolist()  # infinite if too large, too
    found = [name for (name, param), fine in zip(floats, sums, strict=True) if not fine and not param.isfinite().all()]
    if found:
        dtypes = ", ".join(sorted({str(param.dtype).removeprefix("torch.") for _, param in floats}))
        raise CheckpointError(
            f"{len(found)} weights of the model hold infinity or NaN, in {dtypes}: {listed(found)}; the checkpoint is "
            "damaged, or its numbers need another dtype, as bfloat16 where float16 overflows"
        )


def _refuse_meta(model: nn.Module) -> None:
    """Raises TypeError if a tensor other than a parameter was created on the meta device and never got values."""
    for path, module in model.named_modules():
        for name, value in (*module.named_buffers(recurse=False), *vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise TypeError(
                    f"{'.'.join(filter(None, (path, name)))} is a tensor made in __init__, on the meta device, and "
                    "never filled: make it in load_weights, or keep a number and make it in forward"
                )


def materialize(module: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Allocate every meta parameter, keeping its attributes (``to_empty`` drops them) and sharing."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, meta in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(meta) not in made:
                made[id(meta)] = allocate(meta, device, dtype)
            setattr(owner, name, made[id(meta)])
            if (scale := getattr(made[id(meta)], "scale", None)) is not None:
                setattr(owner, f"{name}_scale", scale)
