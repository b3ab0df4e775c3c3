"""Which attention backend runs: the one that was named, or the best that can; and two of them side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from minivllm.core.batch import AttentionBatch
from minivllm.core.interfaces import AttentionBackend, AttentionLayer, AttentionSpec, Capabilities, CudaGraphs
from minivllm.core.model_config import FrozenDict
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.config.engine_config import AttentionOptions
    from minivllm.plugins.registry import Registry


@dataclass(frozen=True, slots=True)
class Choice:
    """The backends for prompts and for decodes, by name and class, and one line that says why."""

    prefill: str
    decode: str
    prefill_class: type[AttentionBackend]
    decode_class: type[AttentionBackend]
    why: str
    prefill_options: FrozenDict
    decode_options: FrozenDict

    @property
    def name(self) -> str:
        return self.decode if self.prefill == self.decode else f"{self.prefill}+{self.decode}"

    def cuda_graphs(self) -> bool:
        """Whether decode steps may be captured."""
        return self.decode_class.capabilities.cuda_graphs != CudaGraphs.NEVER

    def build(self, spec: AttentionSpec) -> AttentionBackend:
        decode = self.decode_class(replace(spec, options=self.decode_options))
        if self.prefill == self.decode:
            return decode
        return HybridBackend(self.prefill_class(replace(spec, options=self.prefill_options)), decode)


def choose(options: AttentionOptions, spec: AttentionSpec, registry: Registry) -> Choice:
    """Find the backends before anything is loaded.

    Raises:
        ConfigError: a named backend cannot run this, with every reason; or none can.
    """
    prefill, prefill_class, why = _one(options.prefill or options.name, spec, registry, prefill=True)
    decode, decode_class, decode_why = _one(options.decode or options.name, spec, registry, prefill=False)
    if decode != prefill:
        for name, backend in ((prefill, prefill_class), (decode, decode_class)):
            if not backend.keeps_cache_write():
                raise ConfigError(
                    f"attention.prefill={prefill} with attention.decode={decode}: {name} writes the cache in its own "
                    f"way, which the other cannot read; set attention={name} for both"
                )
        why = f"prefill: {why}; decode: {decode_why}"

    def own(name: str) -> FrozenDict:
        declared = registry.get("attention", name).options
        return FrozenDict({key: value for key, value in options.options.items() if key in declared})

    return Choice(prefill, decode, prefill_class, decode_class, why, own(prefill), own(decode))


def _one(
    name: str, spec: AttentionSpec, registry: Registry, *, prefill: bool
) -> tuple[str, type[AttentionBackend], str]:
    if name != "auto":
        component = registry.get("attention", name)
        if reasons := _reasons(name, spec, registry):
            others = [c.name for c in registry.by_priority("attention") if not _reasons(c.name, spec, registry)]
            raise ConfigError(
                f"attention={name} cannot run this: {'; '.join(reasons)}. "
                f"Here these can: {', '.join(others) or 'none'} (or attention=auto)"
            )
        return component.name, registry.resolve("attention", name), f"attention={component.name} as asked"
    passed: list[str] = []
    for component in registry.by_priority("attention", prefill=prefill):
        reasons = _reasons(component.name, spec, registry)
        if not reasons:
            chosen = registry.resolve("attention", component.name)
            if spec.device in chosen.capabilities.devices:
                because = f"attention={component.name}: the fastest that runs here"
                return component.name, chosen, because + (f" ({'; '.join(passed)})" if passed else "")
            reasons = [f"it is not meant for {spec.device}"]
        passed.append(f"not {component.name}: {reasons[0]}")
    raise ConfigError("no attention backend can run this: " + "; ".join(passed))


def _reasons(name: str, spec: AttentionSpec, registry: Registry) -> list[str]:
    missing = registry.why_not(registry.get("attention", name))
    return missing or registry.resolve("attention", name).unsupported(spec)


class HybridBackend(AttentionBackend):
    """Prompts in one backend, decodes in another, over one cache."""

    capabilities = Capabilities()

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        super().__init__(decode.spec)
        self._prefill, self._decode = prefill, decode
        self.plans_on_host = prefill.plans_on_host or decode.plans_on_host
        self.fused_decode_rows = decode.fused_decode_rows
        self.decode_qkv = decode.decode_qkv  # type: ignore[method-assign]

    def bind(self, kv_cache: torch.Tensor) -> None:
        for backend in (self._prefill, self._decode):
            backend.bind(kv_cache)
        super().bind(kv_cache)

    def plan(self, batch: AttentionBatch) -> None:
        self.batch = batch
        if batch.num_decodes < batch.num_seqs:
            self._prefill.plan(batch)
        if batch.num_decodes:
            self._decode.plan(batch)

    def decode(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self._decode.decode(q, layer, out)

    def prefill(self, q: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
        self._prefill.prefill(q, layer, out)
