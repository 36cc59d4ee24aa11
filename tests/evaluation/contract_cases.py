"""A small model and batch that evaluate takes."""

import torch
from torch import nn

import afterdrop as ad
from oracles.zoo import mlp

N = 12
GRID = ad.Grid((0, 1), (0, 0.5, 1))
OPTIONS = {"grid": GRID, "num_samples": 4, "temperatures": (0.25, 4.0)}


def assert_same(a, b):
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert torch.equal(tensor, b.tensors[name]), name


class Two(nn.Module):
    """Takes two inputs and returns its logits in some form."""

    def __init__(self, form=lambda out: out):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.form = mlp(), form

    def forward(self, a, b, scale=1.0):
        return self.form(self.inner(a + b) * scale)


def good():
    return torch.randn(N, 5), torch.randint(3, (N,))
