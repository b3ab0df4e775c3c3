"""Checks what a plugin's methods return on their first call: some wrong shapes would be truncated or broadcast
silently, and every answer would be garbage. Built-in components are not checked, and later calls cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minivllm.core.batch import Batch
from minivllm.core.interfaces import Committed, StepHandle, StepResult
from minivllm.core.scheduler import SlotScheduler
from minivllm.errors import PluginError, shown

if TYPE_CHECKING:
    from minivllm.core.interfaces import Executor, Model, Sampler, Scheduler
    from minivllm.plugins.registry import Entry


def look_at_first(entry: Entry, component: object, **looks: Callable[..., Any]) -> None:
    """``looks``: method name -> a check that takes its first call's result and arguments and returns what the caller
    gets. Its TypeError, which says what was expected and what came, becomes a PluginError."""
    if not entry.provider.builtin:
        for method, look in looks.items():
            _look_at_first(entry, component, method, look)


def _look_at_first(entry: Entry, component: object, method: str, look: Callable[..., Any]) -> None:
    call, own = getattr(component, method), vars(component).get(method)

    def first(*args: Any, **kwargs: Any) -> Any:
        if vars(component).get(method) is first:  # it has not been replaced since
            delattr(component, method)
            if own is not None:  # an instance attribute, such as a compiled method
                setattr(component, method, own)
        found = call(*args, **kwargs)
        try:
            return look(found, *args, **kwargs)
        except TypeError as error:
            raise PluginError(f"{entry}: {method} returned {error}") from None

    setattr(component, method, first)


# --------------------------------------------------------------------------- models and samplers


def look_at_model(entry: Entry, model: Model, hidden_size: int, vocab_size: int) -> None:
    def forward(found: Any, ids: torch.Tensor, positions: torch.Tensor, attention: Any) -> Any:
        last = attention.batch.last_tokens
        rows = {len(ids), len(ids) if last is None else len(last)}
        if not isinstance(found, torch.Tensor) or found.shape not in {(n, hidden_size) for n in rows}:
            raise TypeError(f"{_what(found)}, not ({len(ids)}, {hidden_size}), a hidden state for each token")
        return found

    def compute_logits(found: Any, hidden: torch.Tensor) -> Any:
        expected = (len(hidden), vocab_size)
        if not isinstance(found, torch.Tensor) or found.shape != expected or not found.is_floating_point():
            raise TypeError(f"{_what(found)}, not {expected}, for each row a logit for each token of the vocabulary")
        return found

    look_at_first(entry, model, forward=forward, compute_logits=compute_logits)


def look_at_sampler(entry: Entry, sampler: Sampler, vocab_size: int) -> None:
    def tokens(found: Any, logits: torch.Tensor, *_: Any) -> Any:
        expected = (len(logits),)
        if not isinstance(found, torch.Tensor) or found.shape != expected or found.dtype != torch.int64:
            raise TypeError(f"{_what(found)}, not int64 {expected}, a token for each row of logits")
        if found.device.type == "cpu" and len(found):  # on a GPU this would synchronize
            _check_ids(found.numpy(), vocab_size)
        return found

    def pair(found: Any, logits: torch.Tensor, *rest: Any) -> Any:
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(f"{_what(found)}, not two: tokens, and their log-probabilities or None")
        tokens(found[0], logits)
        return found

    look_at_first(entry, sampler, sample=tokens, refine=pair, refine_captured=pair)


# --------------------------------------------------------------------------- schedulers and executors


def look_at_scheduler(entry: Entry, scheduler: Scheduler, row: np.dtype) -> None:
    """``row``: the sampler's row dtype."""

    def schedule(found: Any) -> Any:
        if found is not None and not isinstance(found, Batch):
            raise TypeError(f"{_what(found)}, not a Batch or None")
        if found is not None:
            _check_batch(found, row)
        return found

    def commit(found: Any, *_: Any) -> Any:
        if not isinstance(found, Committed):
            raise TypeError(f"{_what(found)}, not a Committed")
        return found

    def place(found: Any, *_: Any) -> Any:
        if not isinstance(found, tuple):
            raise TypeError(f"{_what(found)}, not a tuple")
        return found

    look_at_first(entry, scheduler, schedule=schedule, commit=commit)
    if isinstance(scheduler, SlotScheduler):
        look_at_first(entry, scheduler, place=place)


def _check_batch(batch: Batch, row: np.dtype) -> None:
    """Check its arrays' dtypes: they are sent to other processes as raw bytes, and others would be misread."""

    def check(names: str, dtype: Any, length: int) -> None:
        for name in names.split():
            found, expected = getattr(batch, name), f"{np.dtype(dtype)} ({length},)"
            if not isinstance(found, np.ndarray) or found.dtype != dtype or found.shape != (length,):
                raise TypeError(f"a Batch with {name} {_what(found)}, not {expected}")

    def count(name: str) -> int:
        found = getattr(batch, name)
        if not isinstance(found, np.ndarray):
            raise TypeError(f"a Batch with {name} {_what(found)}, not an array")
        return found.size

    check("slots num_computed num_new", np.int32, n := count("slots"))
    check("generations", np.int64, n)
    check("samples", np.bool_, n)
    check("token_ids", np.int32, int(batch.num_new[batch.num_decodes :].sum()))
    check("block_slots block_indices block_ids", np.int32, count("block_slots"))
    check("admitted_slots", np.int32, a := count("admitted_slots"))
    check("admitted_params", row, a)
    check("known_lens", np.int32, a if count("known_lens") else 0)
    check("known_ids", np.int32, int(batch.known_lens.sum()))


def look_at_executor(entry: Entry, executor: Executor, vocab_size: int) -> None:
    def launch(found: Any, batch: Batch) -> Any:
        if not callable(getattr(found, "result", None)):
            raise TypeError(f"{_what(found)}, not a StepHandle, which has result()")
        return _FirstStep(entry, found, batch, vocab_size)

    look_at_first(entry, executor, launch=launch)


class _FirstStep:
    """A step in flight whose tokens are checked."""

    def __init__(self, entry: Entry, step: StepHandle, batch: Batch, vocab_size: int) -> None:
        self.entry, self.step, self.batch, self.vocab_size = entry, step, batch, vocab_size

    def result(self) -> StepResult:
        found, expected = self.step.result(), (len(self.batch.slots),)
        tokens = getattr(found, "token_ids", None)
        try:
            if not isinstance(tokens, np.ndarray) or tokens.shape != expected or tokens.dtype.kind != "i":
                raise TypeError(f"token_ids {_what(tokens)}, not int32 {expected}, one for each row of the batch")
            _check_ids(tokens[self.batch.samples], self.vocab_size)
        except TypeError as error:
            raise PluginError(f"{self.entry}: a step that it launched returned {error}") from None
        return found


def _check_ids(ids: np.ndarray, vocab_size: int) -> None:
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise TypeError(f"token {wrong[0]}, which is outside the vocabulary: 0 to {vocab_size - 1}")


def _what(found: Any) -> str:
    if isinstance(found, torch.Tensor | np.ndarray):
        return f"{str(found.dtype).removeprefix('torch.')} {tuple(found.shape)}"
    return shown(found)
