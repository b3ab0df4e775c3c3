"""What config.json says of a checkpoint's quantization: weights in FP8 are read, all else is refused by name.

Which weights are in FP8, the tensors say themselves: ``fp8_checkpoint.py`` reads those. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.errors import CheckpointError, shown


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """A weight's scale is one number, one a row or, if there is a ``block``, one for so many rows and columns."""

    block: tuple[int, int] | None = None


def fp8_config(said: object, where: str) -> Fp8Config | None:
    """Read a quantization_config; None: there is none. ``where`` is the file that it is in.

    Raises:
        CheckpointError: for any quantization but FP8.
    """
    if not said:
        return None
    config = _mapping(said)
    method = config.get("quant_method", shown(said))
    read = _READERS.get(str(method))
    found = None if read is None else read(config)
    if isinstance(found, Fp8Config):
        return found
    raise CheckpointError(
        f"{where} says that the weights are quantized by {method}{f' with {found}' if found else ''}, which minivllm "
        "does not read. Of quantized checkpoints it reads those with FP8 (e4m3) weights, of quant_method fp8, "
        "compressed-tensors (float-quantized), fbgemm_fp8 and modelopt (FP8): use such a checkpoint of the model, or "
        "its bfloat16 or float16 checkpoint"
    )


# --------------------------------------------------------------------------- by quant_method: a config, or why not


def _fp8(said: Mapping[str, Any]) -> Fp8Config | str:
    for key, known in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
        if (value := said.get(key)) not in (None, known):
            return f"{key}={shown(value)}"
    block = said.get("weight_block_size")
    return Fp8Config() if block is None else _blocks("weight_block_size", block)


def _compressed_tensors(said: Mapping[str, Any]) -> Fp8Config | str:
    if (sparsity := _mapping(said.get("sparsity_config")).get("format", "dense")) != "dense":
        return f"sparsity_config.format={shown(sparsity)}"
    if _mapping(said.get("transform_config")).get("config_groups"):
        return "a transform_config"  # the weights expect rotated activations
    configs: set[Fp8Config] = set()
    for name, group in _mapping(said.get("config_groups")).items():
        weights = _mapping(group).get("weights")
        if isinstance(group, Mapping) and weights is None:
            continue  # of activations or of the cache: the weights are as they are
        layout = _mapping(group).get("format") or said.get("format")
        found = f"format={shown(layout)}" if layout not in _LAYOUTS else _scheme(_mapping(weights))
        if isinstance(found, str):
            return f"{found} (config_groups.{name})"
        configs.add(found)
    blocks = {config.block for config in configs if config.block}
    if len(blocks) > 1:
        return f"blocks of several sizes: {', '.join(map(str, sorted(blocks)))}"
    return Fp8Config(*blocks)


_LAYOUTS = (None, "float-quantized", "naive-quantized")


def _scheme(weights: Mapping[str, Any]) -> Fp8Config | str:
    """One of compressed-tensors' groups."""
    kind, bits, strategy = (weights.get(key) for key in ("type", "num_bits", "strategy"))
    if (kind, bits) != ("float", 8):
        return f"weights of type={shown(kind)}, num_bits={shown(bits)}"
    if weights.get("symmetric") is False:
        return "symmetric=False"
    if strategy == "block":
        return _blocks("block_structure", weights.get("block_structure"))
    return Fp8Config() if strategy in (None, "tensor", "channel") else f"strategy={shown(strategy)}"


def _fbgemm_fp8(said: Mapping[str, Any]) -> Fp8Config | str:
    return Fp8Config()


def _modelopt(said: Mapping[str, Any]) -> Fp8Config | str:
    """In config.json the keys stand at the top, in hf_quant_config.json below "quantization"."""
    algorithm = _mapping(said.get("quantization", said)).get("quant_algo")
    if algorithm in (None, "FP8"):  # None: only the cache is quantized
        return Fp8Config()
    return f"quant_algo={shown(algorithm)}"


_READERS: dict[str, Callable[[Mapping[str, Any]], Fp8Config | str]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fbgemm_fp8,
    "modelopt": _modelopt,
}


def _blocks(key: str, value: object) -> Fp8Config | str:
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Fp8Config((rows, columns))
    return f"{key}={shown(value)}"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
