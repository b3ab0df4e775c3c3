"""Weights to a GPU through pinned buffers: the same numbers, whatever is copied."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from minivllm.models import upload
from minivllm.models.upload import PinnedUpload
from minivllm.testing.conformance import on_gpu

ROW = 1 << 10  # bytes


class _Read:
    """Stands for an event: counts what is recorded and waited for."""

    def __init__(self) -> None:
        self.recorded = self.waited = 0

    def record(self) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        assert self.recorded, "waited for before anything was copied from it"
        self.waited += 1


def cases(generator: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A target's and a source's kind: rows, halves of them, columns, stacked, converted, of one dimension, empty."""
    make = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    for rows in (1, 3, 64, 200):
        whole = make(rows, ROW // 4)
        yield torch.empty_like(whole), whole
        yield torch.empty(rows, 10), make(rows, 40).narrow(1, 7, 10)
        yield torch.empty(rows, 40).narrow(1, 7, 10), make(rows, 10)
        yield torch.empty(rows, 33, dtype=torch.bfloat16), make(rows, 33)
        yield torch.empty(33, rows), make(rows, 33).t()
    yield torch.empty(5000, dtype=torch.float16), make(5000).double()
    yield torch.empty(3, 300, 40), make(3, 300, 40)  # a row of it is more than a buffer
    yield torch.empty(0, 7), make(0, 7)
    yield torch.empty(7, 0), make(7, 0)


def test_pieces_and_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the GPU's part, with buffers of a few rows."""
    monkeypatch.setattr(upload, "_BUFFER_BYTES", 16 * ROW)
    monkeypatch.setattr(torch.cuda, "Event", _Read)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    staging = PinnedUpload()
    for target, source in cases(torch.Generator().manual_seed(0)):
        target.fill_(float("nan"))
        staging._copy(target, source)
        assert torch.equal(target, source.to(target.dtype))
    assert len(staging._buffers) == 4
    uses = [read.recorded for read in staging._read]
    assert max(uses) - min(uses) <= 1 and all(read.waited == read.recorded - 1 for read in staging._read)


def test_copies_on_the_host_are_as_ever() -> None:
    with PinnedUpload() as staging:
        target = torch.empty(2, 3)
        assert target.copy_(torch.arange(3)) is target and target.tolist() == [[0, 1, 2]] * 2
    assert not staging._buffers


@on_gpu
def test_a_gpu_gets_what_was_copied() -> None:
    generator = torch.Generator().manual_seed(0)
    big = torch.randn((9000, 5000), generator=generator)  # 180 MB: each buffer several times
    pairs = [
        *cases(generator),
        (torch.empty(9000, 5000), big),
        (torch.empty(5000, 9000, dtype=torch.bfloat16), big.t()),
    ]
    pairs.append((torch.empty(2, 5000, 4000, dtype=torch.bfloat16), torch.randn((2, 5000, 4000), generator=generator)))
    targets = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").fill_(torch.nan) for t, _ in pairs
    ]
    sources = [source.clone(memory_format=torch.preserve_format) for _, source in pairs]
    with PinnedUpload() as staging:
        for target, source in zip(targets, sources, strict=True):
            assert target.copy_(source) is target
            source.zero_()  # it was read when copy_ came back
        scalar, row = torch.zeros((), device="cuda"), torch.zeros((2, 3), device="cuda")
        scalar.copy_(torch.tensor(5.0))
        row.copy_(torch.arange(3))  # spread out
    assert len(staging._buffers) == 4
    for target, (_, source) in zip(targets, pairs, strict=True):
        assert torch.equal(target.cpu(), source.to(target.dtype))
    assert scalar.item() == 5 and row.tolist() == [[0, 1, 2]] * 2
