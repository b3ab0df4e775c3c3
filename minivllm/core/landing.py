"""Where replayed steps leave their tokens: in pinned host memory, which the device writes.

# ring (IN_FLIGHT, 1 + width) int64: a step's number, then its tokens   steps (1,) int64, on the device

The device counts the steps in ``steps``; step i goes to row i % IN_FLIGHT, behind i, by which the host, which counts
the replays, sees that it reads the step that it waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from minivllm.core.interfaces import StepResult
from minivllm.errors import MinivllmError
from minivllm.kernels.decode_inputs import finish_decode

IN_FLIGHT = 4  # host buffers; the engine keeps two steps in flight, so one is free again long before its turn


@dataclass(slots=True)
class ReplayedStep:
    """A step under way whose graph leaves its tokens on the host."""

    number: int
    written: np.ndarray  # (1,) int64, memory that the device writes: of which step the tokens are
    tokens: np.ndarray  # (n,) int64, the same
    samples: np.ndarray | None  # (n,) bool: which of them count; None: all
    done: torch.cuda.Event | None

    def result(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        if self.written[0] != self.number:
            raise MinivllmError(
                f"the tokens of replay {self.number} are not on the host, those of replay {self.written[0]} are; "
                "run with enforce_eager=true and report it"
            )
        tokens = self.tokens.astype(np.int32)
        return StepResult(tokens if self.samples is None else np.where(self.samples, tokens, np.int32(-1)))


class Landing:
    """Shared by all graphs of a runner that leave tokens; ``width``: the most that one leaves."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.steps = torch.zeros(1, dtype=torch.int64, device=device)
        self.ring = torch.zeros((IN_FLIGHT, 1 + width), dtype=torch.int64, pin_memory=device.type == "cuda")
        self.rows = self.ring.numpy()
        self.replays = 0  # what ``steps`` is when all that was launched is done

    def finish(
        self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, last_token: torch.Tensor,
        num_computed: torch.Tensor, padding: int,
    ) -> None:  # fmt: skip
        """A captured step's last kernel, see ``finish_decode``."""
        finish_decode(tokens, slots, positions, last_token, num_computed, self.steps, self.ring, padding)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay a graph that ends with ``finish``, and count it."""
        graph.replay()
        self.replays += 1

    def forget(self) -> None:
        """Begin to count anew."""
        self.steps.zero_()
        self.replays = 0

    def last(self) -> np.ndarray:
        """The last replay's row."""
        row: np.ndarray = self.rows[self.replays % IN_FLIGHT]
        return row

    def step(self, n: int, done: torch.cuda.Event | None, samples: np.ndarray | None = None) -> ReplayedStep:
        """The last replay's first n tokens, when it is ``done``."""
        row = self.last()
        return ReplayedStep(self.replays, row[:1], row[1 : n + 1], samples, done)
