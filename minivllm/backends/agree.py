"""Makes all ranks build the same attention backend: with different ones they would deadlock or compute different
tokens. Rank 0 proposes, every rank tries, and each learns of the others' failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from minivllm.backends.select import Choice, HybridBackend, choose, options_of, reasons_against
from minivllm.backends.windows import for_layers
from minivllm.core.interfaces import AttentionBackend, AttentionSpec
from minivllm.core.parallel import TensorParallel
from minivllm.errors import PluginError

if TYPE_CHECKING:
    from minivllm.config.engine_config import AttentionOptions
    from minivllm.plugins.registry import Registry

_BYTES = 1024  # of a rank's text; the rest is cut off


def build(
    choice: Choice, options: AttentionOptions, spec: AttentionSpec, registry: Registry, tp: TensorParallel,
    device: torch.device,
) -> tuple[Choice, AttentionBackend]:  # fmt: skip
    """Build rank 0's choice on every rank; if ``auto`` chose a backend that some rank cannot build, the next best.

    Every rank calls this, with its own choice.

    Raises:
        ConfigError: a rank cannot build it, and it was named or there is no alternative. Raised on every rank, naming
            the rank that cannot.
        PluginError: in strict mode, a plugin's backend that ``auto`` tried is broken.
    """
    broken: dict[str, str] = {}
    while True:
        prefill, decode = exchange(f"{choice.prefill} {choice.decode}", tp, device)[0].split()
        built: dict[str, AttentionBackend] = {}
        for name in dict.fromkeys((decode, prefill)):
            outcome = _try(name, spec, options, registry, needs_graphs=spec.needs_graphs and name == decode)
            said = exchange("" if isinstance(outcome, AttentionBackend) else str(outcome), tp, device)
            if any(said):
                broken[name] = _first(said)
                choice = choose(options, spec, registry, broken)
                if isinstance(outcome, PluginError):
                    registry.pass_over(outcome)
                break
            assert isinstance(outcome, AttentionBackend)
            built[name] = outcome
        else:
            if (choice.prefill, choice.decode) != (prefill, decode):
                choice = choose(replace(options, prefill=prefill, decode=decode), spec, registry, broken)
            return choice, built[decode] if prefill == decode else HybridBackend(built[prefill], built[decode])


def _try(
    name: str, spec: AttentionSpec, options: AttentionOptions, registry: Registry, *, needs_graphs: bool
) -> AttentionBackend | PluginError | str:
    """The backend, or why this rank cannot build it: a broken plugin's error, or a reason."""
    if name not in registry.names("attention"):
        return f"attention backend {name!r} is not registered"
    try:
        if why := reasons_against(name, replace(spec, needs_graphs=needs_graphs), registry, {}):
            return "; ".join(why)
        with registry.building("attention", name):
            its_class = registry.resolve("attention", name)
            return for_layers(its_class, replace(spec, options=options_of(name, options, registry)))
    except PluginError as error:
        return error


def _first(said: Sequence[str]) -> str:
    """The first complaint, with its rank unless all ranks have the same one."""
    rank = next(rank for rank, why in enumerate(said) if why)
    return said[rank] if set(said) == {said[rank]} else f"on rank {rank}: {said[rank]}"


def exchange(text: str, tp: TensorParallel, device: torch.device) -> list[str]:
    """All ranks' texts in rank order, each cut to ``_BYTES`` of UTF-8. Collective and blocking."""
    data = text.encode()[:_BYTES].ljust(_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(1, _BYTES).to(device)
    every = bytes(tp.all_gather(mine).cpu().view(-1).tolist())
    return [every[i : i + _BYTES].rstrip(b"\0").decode(errors="ignore") for i in range(0, len(every), _BYTES)]
