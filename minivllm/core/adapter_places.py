"""Which LoRA adapters of single requests are loaded, and where: the host's side of ``layers/adapters.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from minivllm.core.lora_request import LoRARequest
from minivllm.errors import AdapterError, BusyError, CheckpointError, RequestError, shown

if TYPE_CHECKING:
    from pathlib import Path

    from minivllm.config.engine_config import EngineConfig


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """``place``: from 1 on. ``number`` tells this load from all others: cached prefixes are of one load."""

    request: LoRARequest
    place: int
    number: int


class AdapterPlaces:
    """A table of at most ``max_loras`` loaded adapters, the least recently used first. Those that no unfinished request
    has (``used``: the lora_int_ids of the others) may have to give their place to another. ``folder_of``: where the
    adapter of a request is; it raises CheckpointError if it cannot be used."""

    def __init__(
        self, config: EngineConfig, used: Callable[[], Set[int]], folder_of: Callable[[LoRARequest], Path]
    ) -> None:
        self._config, self._used, self._folder_of = config, used, folder_of
        self._loaded: dict[int, LoadedAdapter] = {}  # by lora_int_id
        self._numbers = count(1)

    @property
    def ids(self) -> set[int]:
        return set(self._loaded)

    def find(self, request: LoRARequest) -> LoadedAdapter | None:
        """The adapter, if it is loaded; it is then the most recently used.

        Raises:
            RequestError: there are no adapters of single requests here, or its id is another's.
        """
        if not self._config.enable_lora:
            raise RequestError(
                "lora_request: the engine was made without adapters of single requests; type enable_lora=true (in "
                "Python: True)"
            )
        if not isinstance(request, LoRARequest):
            raise RequestError(f"lora_request={shown(request)} is not LoRARequest(NAME, ID, DIR)")
        its = self._loaded.pop(request.lora_int_id, None)
        if its is None:
            return None
        self._loaded[request.lora_int_id] = its
        mine, theirs = ((one.lora_name, one.path) for one in (request, its.request))
        if mine != theirs:
            raise RequestError(
                f"lora_int_id={request.lora_int_id} is {theirs[0]} of {theirs[1]}, not {mine[0]} of {mine[1]}; choose "
                "another, or call remove_lora first"
            )
        return its

    def fitting(self, requests: Iterable[LoRARequest]) -> set[int]:
        """The lora_int_ids of those that are loaded, and of the first others, as many as there are places beside."""
        wanted = dict.fromkeys(request.lora_int_id for request in requests)
        fit = wanted.keys() & self._loaded.keys()
        if len(fit) < len(wanted):
            left = self._config.max_loras - len(self._loaded.keys() & (self._used() | fit))
            fit |= set([its for its in wanted if its not in fit][:left])
        return fit

    def make_room(self, request: LoRARequest) -> tuple[int, Path]:
        """A place in which an adapter is to be loaded, also again, and the folder. Who has the place loses it when the
        adapter is entered there.

        Raises:
            AdapterError: it cannot be used. RequestError: unfinished requests have it. BusyError: they have all places.
        """
        if request.lora_int_id in self._loaded:
            self._refuse_used(request.lora_int_id, "is not loaded again")
        try:
            folder = self._folder_of(request)
        except CheckpointError as error:
            raise AdapterError(str(error)) from error
        if (its := self._loaded.get(request.lora_int_id)) is not None:
            return its.place, folder
        most, taken = self._config.max_loras, {its.place for its in self._loaded.values()}
        if len(taken) < most:
            return next(place for place in range(1, most + 1) if place not in taken), folder
        used = self._used()
        for adapter_id, its in self._loaded.items():
            if adapter_id not in used:
                return its.place, folder
        raise BusyError(
            f"all of max_loras={most} adapters are in use by unfinished requests; raise max_loras, or ask again when "
            "some have finished"
        )

    def enter(self, request: LoRARequest, place: int) -> LoadedAdapter:
        """It is loaded there."""
        self._loaded = {adapter_id: its for adapter_id, its in self._loaded.items() if its.place != place}
        its = self._loaded[request.lora_int_id] = LoadedAdapter(request, place, next(self._numbers))
        return its

    def remove(self, adapter_id: int) -> bool:
        """Whether it was loaded. Raises RequestError if an unfinished request has it, or it is no number."""
        if not isinstance(adapter_id, int):
            raise RequestError(f"lora_int_id={shown(adapter_id)} is not a whole number")
        self._refuse_used(adapter_id, "is not removed")
        return self._loaded.pop(adapter_id, None) is not None

    def clear(self) -> None:
        self._loaded.clear()

    def _refuse_used(self, adapter_id: int, what: str) -> None:
        if adapter_id in self._used():
            raise RequestError(f"lora_int_id={adapter_id} {what} under unfinished requests that have it")
