"""The products that layers call: which kernel is chosen, and the reference on the CPU."""

import torch
from test_skinny_linear import EPS, tensors

from minivllm.kernels.linear import products
from minivllm.kernels.linear import skinny_linear as skinny


def test_clusters_go_first_where_they_can_be_had(monkeypatch):
    weight, bias = torch.empty(64, 64), torch.empty(64)
    monkeypatch.setattr(products, "use_skinny", lambda *shape: True)
    for clusters in (True, False):
        monkeypatch.setattr(products, "use_cluster", lambda *shape, gated, clusters=clusters: clusters)
        few = [products._few_rows(torch.empty(rows, 64), weight, b) for rows in (2, 3) for b in (None, bias)]
        assert few == [True, True, not clusters, True]


def test_the_layers_entries_take_the_reference_on_the_cpu():
    x, g, w, b = tensors(("cpu", torch.float32), 2, 8, 16, bias=True)
    assert torch.equal(products.linear(x, w, b), torch.nn.functional.linear(x, w, b))
    assert torch.equal(products.norm_linear(x, g, EPS, w, b), skinny.norm_linear_reference(x, g, EPS, w, b))
    assert torch.equal(products.norm_gate_up(x, g, EPS, w), skinny.norm_gate_up_reference(x, g, EPS, w))
    residual = torch.ones(2, 8)
    assert products.linear_add(x, w, b, residual) is residual
    torch.testing.assert_close(residual, 1 + torch.nn.functional.linear(x, w, b))
    torch.testing.assert_close(products.linear_add(x, w, None, torch.zeros(2, 8)), x @ w.T)
