"""What a step does otherwise while it is captured."""

import pytest
import torch

from minivllm.kernels.capture import side_by_side


def both(device):
    """(4,): what two kernels made of one before them, which one behind them has added up."""
    x, one, other = (torch.zeros(4, device=device) for _ in range(3))

    def step():
        before = x + 1
        side_by_side(x.device, lambda: torch.mul(before, 2, out=one), lambda: torch.mul(before, 3, out=other))
        return one + other

    return x, step


def test_both_are_done_and_what_follows_sees_them():
    x, step = both("cpu")
    x.fill_(1)
    assert step().tolist() == [10] * 4


@pytest.mark.gpu
def test_captured_both_are_in_the_graph(gpu):
    x, step = both(gpu)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for value in (1, 5):
        x.fill_(value)
        graph.replay()
        assert found.tolist() == [5 * (value + 1)] * 4
