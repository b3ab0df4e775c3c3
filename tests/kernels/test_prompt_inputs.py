"""Where a step's tokens stand: by the reference as one would write it down, by the kernel as by the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minivllm.kernels import prompt_inputs as module

SIZE = 4
STEPS = {  # (new tokens, length) of each row; what lies before them in the step; tokens of the padding behind them
    "one": ([(1, 1)], 0, 0),
    "a prompt, padded": ([(7, 7)], 0, 5),
    "decodes and chunks": ([(1, 9), (1, 300), (140, 150), (5, 5), (33, 1000)], 0, 0),
    "behind decodes": ([(3, 8), (2, 2)], 16, 9),
    "rows without tokens": ([(4, 4), (0, 1), (0, 1), (130, 131)], 0, 0),
    "more rows than are looked at together": ([(3, 3 + n) for n in range(90)], 0, 40),
}


def step_of(name: str, device: str, slot_dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What is told, and poisoned places of what is found."""
    rows, before, padding = STEPS[name]
    rng, padded = np.random.default_rng(0), [*rows, (padding, 1), (0, 1)]
    new, lens = np.array(padded, dtype=np.int32).T
    slots, width = 20 + rng.permutation(len(rows)), -(-int(lens.max()) // SIZE)
    table = np.zeros((20 + len(rows) + 1, width + 3), dtype=np.int32)  # the last row is padding's
    table[:-1] = rng.integers(1, 1 << 20, (len(table) - 1, width + 3))
    told = [
        torch.from_numpy(before + np.cumsum(np.append(0, new), dtype=np.int32)), torch.from_numpy(lens.copy()),
        torch.from_numpy(np.append(slots, [len(table) - 1] * 2)).to(slot_dtype), torch.from_numpy(table),
    ]  # fmt: skip
    tokens = int(new.sum())
    found = [torch.full((n,), -1) for n in (tokens, tokens)]
    found += [torch.full((len(padded), width), -1, dtype=torch.int32), torch.full((4, len(padded)), -1)]
    return [t.to(device) for t in told], [t.to(device) for t in found]


@pytest.mark.parametrize("name", STEPS)
def test_each_token_stands_behind_those_before_it(name: str) -> None:
    told, found = step_of(name, "cpu", torch.int32)
    module.prompt_inputs(*told, *found[:3], SIZE, found[3])
    rows, _, padding = STEPS[name]
    _, _, slots, table = told
    positions, places, tables, ends = found
    in_turn = zip(slots[: len(rows)].tolist(), rows, strict=True)
    expected = [(slot, n) for slot, (new, length) in in_turn for n in range(length - new, length)]
    assert positions.tolist() == [n for _, n in expected] + [0] * padding
    assert places.tolist() == [int(table[s, n // SIZE]) * SIZE + n % SIZE for s, n in expected] + [0] * padding
    assert torch.equal(tables, table[slots.long(), : tables.shape[1]])
    new, lens = np.array([*rows, (padding, 1), (0, 1)]).T
    assert ends.tolist() == [slots.tolist(), lens.tolist(), (lens - 1).tolist(), (np.cumsum(new) - 1).tolist()]


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", STEPS)
def test_the_kernel_finds_what_the_reference_finds(
    where: tuple[str, torch.dtype], name: str, slot_dtype: torch.dtype
) -> None:
    told, found = step_of(name, where[0], slot_dtype)
    expected = [t.clone() for t in found]
    given = name != "behind decodes"
    module.prompt_inputs_triton(*told, *found[:3], SIZE, found[3] if given else None)
    module.prompt_inputs_reference(*told, *expected[:3], SIZE, expected[3] if given else None)
    for at in (0, 1, 3):
        assert torch.equal(found[at], expected[at])
    for row, length in enumerate(told[1].tolist()):
        used = -(-length // SIZE)
        assert torch.equal(found[2][row, :used], expected[2][row, :used])
        assert (found[2][row, used:] == -1).all(), "nothing but a context's blocks is written"
