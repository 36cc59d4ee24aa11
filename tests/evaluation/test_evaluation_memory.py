"""Memory beside the scores: counted in the plan of chunks, and bounded by the budget."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.evaluation.chunks import Memory, plan_chunks
from afterdrop.evaluation.likelihoods import categorical_sums
from afterdrop.masks.uniforms import Plan, table_bytes

# A pass is measured in a process of its own, whose heap is that of this evaluation alone.
PEAK = """
import resource, sys, torch
from torch import nn
import afterdrop as ad
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
data = [(torch.randn(250, 8), torch.randint(4, (250,)))]
def peak(samples):
    ad.evaluate(model, data, grid=ad.Grid((1,), (0, 1)), num_samples=samples, memory=32 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak(4)
print((peak(8192) - before) / 1024, "torch._dynamo" in sys.modules)
"""


@pytest.mark.subprocess
def test_memory_does_not_grow_with_samples():
    """A budget of 32 MiB, tables of 32 MiB, and room for what is beside them: 63 to 78 were seen.

    Nor does an evaluation import torch's compiler, which takes seconds.
    """
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    peak, compiler = done.stdout.split()
    assert float(peak) < 32 + 32 + 32 and compiler == "False"


def test_tables_count_where_the_budget_can_hold_them():
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    sites, plan = ad.find_sites(model, torch.randn(2, 4)), Plan(256)
    tables = table_bytes(plan)

    def rows(budget, plan):
        chunks = plan_chunks(sites, plan, 10**6, 1, 1, Memory(budget, budget, on_cpu=False))
        return chunks.examples * chunks.samples

    with_tables, without = (rows(2 * tables, Plan(256, 0, s)) for s in ("lhs", "iid"))
    assert with_tables == pytest.approx(without / 2, rel=0.01)
    assert rows(2**20, plan) == rows(2**20, Plan(256, 0, "iid"))


def test_moments_in_slices_are_those_of_all_targets(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    data = [(torch.randn(30, 4), torch.randint(3, (30,)))]
    found = []
    for at_once in (categorical_sums._MOMENTS_AT_ONCE, 100):
        monkeypatch.setattr(categorical_sums, "_MOMENTS_AT_ONCE", at_once)
        found.append(ad.evaluate(model, data, grid=ad.Grid((0, 0.5, 1), (0, 1)), num_samples=16))
    for name, tensor in found[0].tensors.items():
        torch.testing.assert_close(found[1].tensors[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layers", [2, 20])
def test_the_memory_of_a_row_does_not_grow_with_depth(layers):
    """A pass holds the input and output of a layer, and a mask or a temporary copy of them."""
    block = nn.Linear(256, 256), nn.Dropout(0.5)
    model = nn.Sequential(*block * layers, nn.Linear(256, 3))
    sites = ad.find_sites(model, torch.randn(4, 256))
    assert 2 * 4 * 256 <= sites.row_bytes <= 4 * 4 * 256
    assert sites.largest_bytes == 4 * 256


class Detached(nn.Module):
    """Ten tensors are alive at once, each only through a view of it."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        views = [(x + number).view(-1, 2, 128).detach() for number in range(10)]
        return self.dropout(sum(views).flatten(1))


def test_memory_behind_detached_views_counts():
    assert ad.find_sites(Detached(), torch.randn(4, 256)).row_bytes >= 10 * 4 * 256
