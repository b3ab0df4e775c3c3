"""The shape of a model: the contents of a checkpoint's config.json under the names that the layers use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from minivllm.errors import CheckpointError, shown
from minivllm.missing import missing_method

_MOST_LAYERS = 10_000
_OTHER_NAMES = {  # usual key -> the keys that some architectures use instead
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions",),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "rope_theta": ("rotary_emb_base",),
    "partial_rotary_factor": ("rotary_pct",),
    "hidden_act": ("hidden_activation", "activation_function"),
}
_SLIDING, _FULL = "sliding_attention", "full_attention"  # of ``layer_types``
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")  # one layer in this many attends to the whole context
_NEEDED_SIZES = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
_SIZES = *_NEEDED_SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"
_NUMBERS = (
    "rms_norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor",
)  # fmt: skip

# What ``differences`` does not compare: fields that do not change what weights mean; and keys of config.json that are
# compared as fields or ``layer_windows``, or that a trainer may have changed and no model reads.
_NOT_OF_WEIGHTS = {"dtype", "eos_token_ids", "bos_token_id", "hf_config", "options", "draft"}
_NOT_COMPARED = {
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "partial_rotary_factor", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act",
    "sliding_window", "use_sliding_window", "layer_types", "max_window_layers", *_PATTERNS,
    "bos_token_id", "compression_config", "dtype", "eos_token_id", "initializer_range", "pad_token_id",
    "quantization_config", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
_ABOVE = {"rms_norm_eps": 0, "rope_theta": 1, "factor": 0, "beta_fast": 0, "beta_slow": 0, "partial_rotary_factor": 0}


class FrozenDict(dict[str, Any]):
    """A dict that cannot be changed after construction; it pickles and encodes like a dict."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("this mapping belongs to a frozen config")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items(), key=lambda item: item[0])))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)

    def __deepcopy__(self, memo: Any) -> FrozenDict:
        return self


def frozen(value: Any) -> Any:
    """Convert mappings to FrozenDict and lists to tuples, recursively: what a plugin gets, in every process."""
    if isinstance(value, Mapping):
        return FrozenDict({key: frozen(inner) for key, inner in value.items()})
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer.

    ``rope_parameters`` is as in transformers 5: ``rope_type`` (default, linear, llama3, yarn), ``rope_theta`` and that
    type's parameters. ``hf_config`` is the whole config.json, for keys that only one model reads. ``options`` is the
    user's ``model.options``; the model declares which ones exist.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    rope_parameters: FrozenDict
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"
    hf_config: FrozenDict = field(default_factory=FrozenDict)
    options: FrozenDict = field(default_factory=FrozenDict)
    draft: ModelConfig | None = None  # of the model that writes drafts for it

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_method(self, name)

    def layer_windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window in tokens; None: it attends to the whole context.

        With ``sliding_window``, all layers have it, unless ``use_sliding_window`` is false or config.json says which:
        by ``layer_types`` (``sliding_attention``, ``full_attention``), ``sliding_window_pattern`` (the last layer of
        each group of so many has none) or ``max_window_layers`` (the first layers, so many, have none).

        Raises:
            CheckpointError: one of these is invalid, or a layer's type is neither of the two.
        """
        hf, n = self.hf_config, self.num_layers
        window, kinds, uses = hf.get("sliding_window"), hf.get("layer_types"), hf.get("use_sliding_window", True)
        if not isinstance(uses, bool | None):
            raise CheckpointError(f"config.json: use_sliding_window={uses!r} is not true or false")
        if not window or not uses:
            return (None,) * n
        if type(window) is not int or window < 0:
            raise CheckpointError(f"config.json: sliding_window={window!r} is not a whole number from 1, nor null")
        if kinds:
            kinds = list(kinds) if isinstance(kinds, list | tuple) else kinds
            if not isinstance(kinds, list) or len(kinds) < n or not all(kind in (_SLIDING, _FULL) for kind in kinds):
                raise CheckpointError(
                    f"config.json: with sliding_window={window}, layer_types={shown(kinds)} is not a list of "
                    f"{_SLIDING} or {_FULL} for each of {n} layers; set sliding_window to null to attend to all"
                )
            return tuple(window if kind == _SLIDING else None for kind in kinds[:n])
        group, first = self._whole(*_PATTERNS, least=1), self._whole("max_window_layers", least=0)
        if group is not None:
            return tuple(window if (i + 1) % group else None for i in range(n))
        return tuple(window if i >= (first or 0) else None for i in range(n))

    def _whole(self, *keys: str, least: int) -> int | None:
        """The first of these keys that config.json has. Raises CheckpointError for what is no whole number."""
        for key in keys:
            if (value := self.hf_config.get(key)) is not None:
                if type(value) is not int or value < least:
                    raise CheckpointError(f"config.json: {key}={value!r} is not a whole number from {least}")
                return value
        return None

    def with_rope(self, rope: Mapping[str, Any]) -> ModelConfig:
        """The same with other ``rope_parameters``, as config.json has them. Raises CheckpointError: one is invalid."""
        return replace(self, rope_parameters=_rope_parameters({"rope_parameters": rope}, "config.json"))

    def sliding_window(self) -> int | None:
        """The window of all layers in tokens; None: full attention. Raises CheckpointError if layers differ."""
        windows = set(self.layer_windows())
        if len(windows) > 1:
            raise CheckpointError(f"config.json: layers have different sliding windows: {self.layer_windows()}")
        return windows.pop()

    def refuse_sliding_window(self) -> None:
        """For an architecture that has no windows. Raises CheckpointError if config.json has one."""
        uses, window = (self.hf_config.get(key) for key in ("use_sliding_window", "sliding_window"))
        if window if uses is None else uses:
            raise CheckpointError(
                f"use_sliding_window={json.dumps(uses)} (sliding_window={window}) is not supported for "
                f"{self.architecture}: set use_sliding_window to false in config.json to attend to all"
            )

    def differences(self, other: ModelConfig) -> list[str]:
        """What makes ``other`` another model than this, as ``num_layers=2 instead of 4``: fields, then keys of
        config.json that both have. The dtype of its weights, their quantization and end tokens may differ."""
        names = [field.name for field in fields(self) if field.name not in _NOT_OF_WEIGHTS]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        pairs.append(("layer_windows", self.layer_windows(), other.layer_windows()))
        ours, theirs = self.hf_config, other.hf_config
        pairs += [
            (key, ours[key], theirs[key])
            for key in ours
            if key in theirs and key not in _NOT_COMPARED and not key.startswith("_") and "dropout" not in key
        ]
        return [f"{name}={shown(new)} instead of {shown(old)}" for name, old, new in pairs if _differ(old, new)]

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
        """Read a config.json (as a mapping).

        Raises:
            CheckpointError: a key that every decoder needs is missing or invalid; the message has it and ``where``.
        """
        hf = _by_usual_names(hf)
        _check_keys(hf, where)
        heads = hf["num_attention_heads"]
        return cls(
            architecture=hf["architectures"][0],
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            rms_norm_eps=float(1e-6 if hf.get("rms_norm_eps") is None else hf["rms_norm_eps"]),
            max_position=hf.get("max_position_embeddings") or 2048,
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            attention_bias=bool(hf.get("attention_bias", False)),
            mlp_bias=bool(hf.get("mlp_bias", False)),
            hidden_act=str(hf.get("hidden_act", "silu")),
            rope_parameters=_rope_parameters(hf, where),
            eos_token_ids=end_tokens(hf, where),
            bos_token_id=hf.get("bos_token_id"),
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            hf_config=frozen(hf),
        )


def _check_keys(hf: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError for a key that is missing, or is not the list, number or switch that it should be."""
    if missing := [key for key in ("architectures", *_NEEDED_SIZES) if hf.get(key) is None]:
        raise CheckpointError(f"{where} lacks {', '.join(missing)}; is it the config of a decoder-only model?")
    named = hf["architectures"]
    if not isinstance(named, list | tuple) or not named or not isinstance(named[0], str):
        raise CheckpointError(f"{where}: architectures={named} is not a list of at least one name")
    for key in _SIZES:
        size = hf.get(key)
        if size is not None and (type(size) is not int or size < 1):
            raise CheckpointError(f"{where}: {key}={size} is not a whole number from 1")
    if hf["num_hidden_layers"] > _MOST_LAYERS:  # all are created before the first weight is read
        raise CheckpointError(f"{where}: num_hidden_layers={hf['num_hidden_layers']} is more than {_MOST_LAYERS:,}")
    _check_numbers({"rms_norm_eps": hf.get("rms_norm_eps")}, where)
    for key in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        if not isinstance(hf.get(key, False), bool | None):
            raise CheckpointError(f"{where}: {key}={hf[key]!r} is not true or false")


def end_tokens(hf: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """A config's ``eos_token_id``: one, a list, or none. Raises CheckpointError, with ``where``."""
    given = hf.get("eos_token_id")
    ids = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    if any(type(token) is not int for token in ids):
        raise CheckpointError(f"{where}: eos_token_id={given!r} is not a token id or a list of them")
    return ids


def _differ(one: Any, other: Any) -> bool:
    """Mappings differ if a key that both have does: others have their defaults."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return any(_differ(value, other[key]) for key, value in one.items() if key in other)
    return bool(one != other)


def _by_usual_names(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which keys that this file reads have their usual names, if only other names are present."""
    named = dict(hf)
    for key, others in _OTHER_NAMES.items():
        there = [hf[name] for name in (key, *others) if hf.get(name) is not None]
        if there:
            named[key] = there[0]
    if "n_inner" in hf and named.get("intermediate_size") is None and type(hidden := named.get("hidden_size")) is int:
        named["intermediate_size"] = 4 * hidden  # what null means for GPT-2
    return named


def _rope_parameters(hf: Mapping[str, Any], where: str) -> FrozenDict:
    """transformers 5 writes ``rope_parameters``; earlier versions ``rope_theta`` and ``rope_scaling``."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(given := hf.get(key) or {}, Mapping):
            raise CheckpointError(f"{where}: {key}={given!r} is not a mapping")
        rope |= given
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope.setdefault("rope_theta", hf.get("rope_theta") or 10000.0)
    for key in ("original_max_position_embeddings", "partial_rotary_factor"):
        rope.setdefault(key, hf.get(key))
    _check_numbers(rope, where)
    return FrozenDict({k: frozen(v) for k, v in rope.items() if v is not None})


def _check_numbers(values: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError for a key that is not the number it should be; null is absent."""
    for key, value in values.items():
        if key in _NUMBERS and value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise CheckpointError(f"{where}: {key}={value} is not a number")
        least = _ABOVE.get(key)
        if least is not None and value is not None and value <= least:
            raise CheckpointError(f"{where}: {key}={value} is not above {least}")
