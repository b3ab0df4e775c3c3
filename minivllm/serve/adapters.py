"""The LoRA adapters that a server has names for: requests choose one by their ``model``. They may change while it runs.

Each is tried when it is named. Afterwards the engine has at most ``max_loras`` of them at a time, and reads one again
when a request needs it.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

from minivllm.core.lora_request import LoRARequest
from minivllm.errors import AdapterError, CheckpointError, ConfigError, RequestError, shown
from minivllm.models.lora_config import PATH, adapter_folder
from minivllm.naming import listing
from minivllm.serve.engine_client import EngineClient
from minivllm.serve.errors import ClientError, asked_wrongly

_NAME = "lora_name"  # a field of a request, beside PATH


class NamedAdapters:
    """Iterating gives them in the order of their names' first loads. ``model_name``: no adapter's. Raises ConfigError
    for what are no adapters, have a name or number twice, or the engine has no use for, and CheckpointError for one
    that is not there."""

    def __init__(self, engine: EngineClient, model_name: str, adapters: Sequence[LoRARequest]) -> None:
        if not isinstance(adapters, Sequence) or not all(isinstance(one, LoRARequest) for one in adapters):
            raise ConfigError(f"adapters={shown(adapters)} is not a tuple of LoRARequest(NAME, ID, DIR)")
        for key, values in (
            ("lora_name", [model_name, *(one.lora_name for one in adapters)]),
            ("lora_int_id", [one.lora_int_id for one in adapters]),
        ):
            if twice := [value for value, times in Counter(values).items() if times > 1]:
                also = ", or the model's own name" if twice[0] == model_name else ""
                raise ConfigError(f"adapters: {key}={twice[0]!r} is another's{also}; give each its own")
        if adapters and not engine.limits.enable_lora:
            raise ConfigError("adapters: the engine was made without adapters of single requests; add enable_lora=True")
        for one in adapters:
            adapter_folder(one.path, PATH)
        self._engine, self._model_name = engine, model_name
        self._named = {one.lora_name: one for one in adapters}
        self._ids = count(1 + max((one.lora_int_id for one in adapters), default=0))  # none is used twice
        self.start()

    def start(self) -> None:
        """Call in each event loop that serves."""
        self._changing = asyncio.Lock()  # one load or unload at a time

    def __iter__(self) -> Iterator[LoRARequest]:
        return iter(tuple(self._named.values()))

    def named(self, name: str) -> LoRARequest | None:
        return self._named.get(name)

    async def load(self, name: str, path: str, *, again: bool) -> None:
        """Give an adapter a name. With ``again`` it may have been one's before: requests that have begun end with that.

        Raises:
            ClientError: it cannot be used, or has no place now; what the name stood for stays.
        """
        async with self._changing:
            before = self._named.get(name)
            if name == self._model_name:
                raise ClientError(f"{_NAME}: {shown(name)} is the name of the model itself", param=_NAME)
            if before is not None and not again:
                said = f'{_NAME}: {shown(name)} is loaded already; add "load_inplace": true to replace it'
                raise ClientError(said, param=_NAME)
            try:
                adapter = LoRARequest(name, next(self._ids), path)
                folder = await asyncio.to_thread(adapter_folder, path, PATH)  # it may have to be downloaded
                adapter = replace(adapter, lora_path=os.path.abspath(folder))
                await self._engine.add_lora(adapter)
            except (CheckpointError, AdapterError) as error:
                missing = not os.path.exists(os.path.expanduser(path))
                raise ClientError(str(error), status=404 if missing else 400, param=PATH) from None
            except RequestError as error:
                raise asked_wrongly(error, (_NAME, PATH)) from None
            self._named[name] = adapter
            if before is not None:
                with suppress(RequestError):  # requests have it: it leaves when its place is needed
                    await self._engine.remove_lora(before.lora_int_id)

    async def unload(self, name: str, lora_int_id: int | None) -> None:
        """Forget an adapter. Raises ClientError if there is none, or if unfinished requests have it."""
        async with self._changing:
            if (adapter := self._named.get(name)) is None:
                there = listing(map(repr, self._named))
                said = f"{_NAME}: there is no adapter {shown(name)} here; this server has {there}"
                raise ClientError(said, status=404, param=_NAME, code="model_not_found")
            if lora_int_id not in (None, adapter.lora_int_id):
                said = f"lora_int_id={lora_int_id} is not {shown(name)}, which is {adapter.lora_int_id}; leave it out"
                raise ClientError(said, param="lora_int_id")
            try:
                await self._engine.remove_lora(adapter.lora_int_id)
            except RequestError as error:
                raise ClientError(f"{_NAME}={shown(name)}: {error}", param=_NAME) from None
            del self._named[name]
