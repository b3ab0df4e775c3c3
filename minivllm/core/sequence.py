"""One completion in progress, the unit of scheduling. Its per-step numbers are in the scheduler's slot arrays."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.batch import NO_INTS

if TYPE_CHECKING:
    from minivllm.core.adapter_places import LoadedAdapter
    from minivllm.core.guides import Guide
    from minivllm.core.sampling_params import SamplingParams


class Status(Enum):
    """The state of a sequence; preempted ones are waiting again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a sequence ended: STOP for a stop or end token or a stop string, LENGTH for its length."""

    STOP = "stop"
    LENGTH = "length"


class Sequence:
    """A prompt and its sampled tokens.

    ``known`` holds the tokens known on the host, (prompt + outputs,) int32; while the sequence runs, the scheduler's
    token matrix is ahead of it. ``max_len`` is the length at which it ends, prompt included.
    """

    __slots__ = (
        "adapter",
        "arrival",
        "block_hashes",
        "cache_salt",
        "guide",
        "held_ids",
        "known",
        "max_len",
        "num_cached_tokens",
        "num_preemptions",
        "overtaken",
        "params",
        "place",
        "priority",
        "prompt_len",
        "prompt_logprobs",
        "request_id",
        "sampler_row",
        "sampler_words",
        "slot",
        "status",
        "stop_ids",
        "tells_tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int] | np.ndarray,
        params: SamplingParams,
        *,
        max_len: int,
        stop_ids: tuple[int, ...] = (),
        held_ids: tuple[int, ...] | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        prompt_logprobs: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.known = np.array(prompt_token_ids, dtype=np.int32)  # a copy: the caller may reuse theirs
        self.prompt_len = len(self.known)
        self.params = params
        self.max_len = max_len
        self.stop_ids = stop_ids  # token ids that end it: the model's end tokens and the request's stop_token_ids
        self.held_ids = stop_ids if held_ids is None else held_ids  # not sampled before ``min_tokens``
        self.cache_salt = cache_salt
        self.priority = priority  # smaller is more urgent, for schedulers that use it
        self.prompt_logprobs = prompt_logprobs  # how many top tokens at each prompt position; None: not requested
        self.sampler_row: np.ndarray | None = None  # shape () of Sampler.row
        self.sampler_words = NO_INTS  # Sampler.words
        self.adapter: LoadedAdapter | None = None
        self.guide: Guide | None = None  # decides which tokens are allowed next; needs all earlier tokens
        self.tells_tokens = False  # whether the ranks' samplers get its tokens when it starts
        self.status = Status.WAITING
        self.slot = -1
        self.arrival = -1
        self.place: tuple[int, ...] = ()  # in the scheduler's order: smaller goes first
        self.overtaken = 0  # how many later ones were admitted while this one headed the queue
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when it was first admitted
        self.block_hashes: list[bytes] = []  # of its full blocks, computed on demand

    @property
    def output_token_ids(self) -> list[int]:
        return self.known[self.prompt_len :].tolist()

    @property
    def cache_root(self) -> bytes:
        """What tells apart sequences that share no cached prefix, even of the same tokens."""
        salt = (self.cache_salt or "").encode()
        return salt if self.adapter is None else b"\xff%d:%b" % (self.adapter.number, salt)  # UTF-8 has no such byte

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt log-probabilities are requested and incomplete; they are complete once there is any output."""
        return self.prompt_logprobs is not None and len(self.known) == self.prompt_len

    @property
    def told(self) -> np.ndarray:
        """What the ranks' samplers get when it starts, int32."""
        return np.concatenate((self.sampler_words, self.known)) if self.tells_tokens else self.sampler_words

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.value}, {self.prompt_len}+{len(self.known) - self.prompt_len})"
        )
