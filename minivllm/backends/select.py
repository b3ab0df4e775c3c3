"""Selects the attention backend: the one named, or the best that can run; and combines two of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend, AttentionLayer, AttentionSpec, Capabilities, CudaGraphs
from minivllm.core.model_config import FrozenDict
from minivllm.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from minivllm.config.engine_config import AttentionOptions
    from minivllm.plugins.registry import Registry


@dataclass(frozen=True, slots=True)
class Choice:
    """The backends for prompts and for decodes, by name and class, and a one-line explanation."""

    prefill: str
    decode: str
    prefill_class: type[AttentionBackend]
    decode_class: type[AttentionBackend]
    why: str

    @property
    def name(self) -> str:
        return self.decode if self.prefill == self.decode else f"{self.prefill}+{self.decode}"

    def cuda_graphs(self) -> bool:
        """Whether decode steps may be captured."""
        return self.decode_class.capabilities.cuda_graphs != CudaGraphs.NEVER

    def prompt_graphs(self) -> bool:
        """Whether prompt steps may be captured, too."""
        return self.cuda_graphs() and self.prefill_class.capabilities.cuda_graphs == CudaGraphs.ALWAYS

    def mixed_graphs(self) -> bool:
        """Whether mixed steps may be captured, too."""
        return self.prompt_graphs() and self.decode_class.capabilities.cuda_graphs == CudaGraphs.ALWAYS


def choose(
    options: AttentionOptions, spec: AttentionSpec, registry: Registry, broken: Mapping[str, str] | None = None
) -> Choice:
    """Select the backends before anything is loaded. ``broken``: backends that cannot be built -> why.

    Raises:
        ConfigError: a named backend cannot run ``spec``, with every reason; or none can.
        PluginError: in strict mode, a plugin's backend that ``auto`` tried is broken.
    """
    broken = broken or {}
    anyhow = replace(spec, needs_graphs=False)  # not required of prompts
    prefill, prefill_class, why = _one(options, "prefill", anyhow, registry, broken)
    decode, decode_class, decode_why = _one(options, "decode", spec, registry, broken)
    if decode != prefill:
        for name, backend in ((prefill, prefill_class), (decode, decode_class)):
            if not backend.keeps_cache_write():
                raise ConfigError(
                    f"attention.prefill={prefill} with attention.decode={decode}: {name} writes the cache in its own "
                    f"way, which the other cannot read; set attention={name} for both"
                )
        why = f"prefill: {why}; decode: {decode_why}"
    return Choice(prefill, decode, prefill_class, decode_class, why)


def options_of(name: str, options: AttentionOptions, registry: Registry) -> FrozenDict:
    """The entries of ``attention.options`` that this backend declares."""
    declared = registry.get("attention", name).options
    return FrozenDict({key: value for key, value in options.options.items() if key in declared})


def _one(
    options: AttentionOptions, part: str, spec: AttentionSpec, registry: Registry, broken: Mapping[str, str]
) -> tuple[str, type[AttentionBackend], str]:
    """``part``: prefill or decode."""
    own = getattr(options, part)
    name, key = own or options.name, f"attention.{part}" if own else "attention"
    if name != "auto":
        component = registry.get("attention", name)
        if reasons := _why_not(component.name, spec, registry, broken):
            others = [c.name for c in registry.by_priority("attention") if not _why_not(c.name, spec, registry, broken)]
            install = registry.how_to_install(component)
            raise ConfigError(
                f"{key}={name} cannot run this: {'; '.join(reasons)}.{install}{'.' if install else ''} "
                f"Here these can: {', '.join(others) or 'none'} (or {key}=auto)"
            )
        return component.name, registry.resolve("attention", name), f"{key}={component.name} as asked"
    passed: list[str] = []
    for component in registry.by_priority("attention", prefill=part == "prefill"):
        try:
            reasons = reasons_against(component.name, spec, registry, broken)
        except PluginError as error:
            registry.pass_over(error)
            reasons = [str(error)]
        if not reasons:
            chosen = registry.resolve("attention", component.name)
            if spec.device in chosen.capabilities.devices:
                because = f"attention={component.name}: the fastest that runs here"
                return component.name, chosen, because + (f" ({'; '.join(passed)})" if passed else "")
            reasons = [f"it is not meant for {spec.device}"]
        passed.append(f"not {component.name}: {reasons[0]}")
    raise ConfigError("no attention backend can run this: " + "; ".join(passed))


def reasons_against(name: str, spec: AttentionSpec, registry: Registry, broken: Mapping[str, str]) -> list[str]:
    """Why a backend cannot run ``spec`` here, without building it. Raises PluginError if it is a broken plugin's."""
    if name in broken:
        return [broken[name]]
    if missing := registry.why_not(registry.get("attention", name)):
        return missing
    with registry.building("attention", name):
        reasons = registry.resolve("attention", name).unsupported(spec)
        if not isinstance(reasons, list):
            raise TypeError(f"unsupported() returned {reasons!r}, not a list of reasons")
        return reasons


def _why_not(name: str, spec: AttentionSpec, registry: Registry, broken: Mapping[str, str]) -> list[str]:
    try:
        return reasons_against(name, spec, registry, broken)
    except PluginError as error:
        return [str(error)]


class HybridBackend(AttentionBackend):
    """One backend for prompts, another for decodes, sharing one cache."""

    capabilities = Capabilities()

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        super().__init__(decode.spec)
        self._prefill, self._decode = prefill, decode
        self.plans_on_host = prefill.plans_on_host or decode.plans_on_host
        self.captures_prompts = prefill.captures_prompts
        self.most_captured_context = prefill.most_captured_context
        self.fused_decode_rows = decode.fused_decode_rows
        self.plain_decode = decode.plain_decode
        self.attends_beside = decode.attends_beside
        self.cascade_limits = decode.cascade_limits
        self.takes_qkv = decode.takes_qkv  # type: ignore[method-assign]
        self.decode_qkv = decode.decode_qkv  # type: ignore[method-assign]
        self.prompt_words = prefill.prompt_words  # type: ignore[method-assign]

    def bind(self, kv_cache: torch.Tensor) -> None:
        for backend in (self._prefill, self._decode):
            backend.bind(kv_cache)
        super().bind(kv_cache)

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = self._prefill.batch = self._decode.batch = batch
        self.fresh_prompts = False
        if batch.num_decodes < batch.num_seqs:
            self._prefill.plan(batch)
            self.fresh_prompts = self._prefill.fresh_prompts
        if batch.num_decodes:
            self._decode.plan(batch)

    def decode(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self._decode.decode(q, layer, out)

    def prefill(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self._prefill.prefill(q, layer, out)

    def prefill_fresh(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        self._prefill.prefill_fresh(q, k, v, layer, out)
