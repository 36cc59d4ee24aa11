"""Examples that consist of several rows of the input, such as the nodes of a graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import afterdrop as ad
from afterdrop.errors import SiteError


class PooledGraphs(nn.Module):
    """Classifies graphs: dropout by node before the nodes of a graph are summed, by graph after."""

    def __init__(self):
        super().__init__()
        self.nodes, self.node_dropout = nn.Linear(4, 8), nn.Dropout(0.3)
        self.graph_dropout, self.out = nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x, graph):
        h = self.node_dropout(torch.relu(self.nodes(x)))
        pooled = h.new_zeros(int(graph.max()) + 1, h.shape[1]).index_add_(0, graph, h)
        return self.out(self.graph_dropout(pooled))


def graph_batch(*sizes):
    graph = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return (torch.randn(len(graph), 4), graph), torch.randint(3, (len(sizes),))


@pytest.mark.parametrize("sizes", [((4, 7, 5, 9), (6, 8, 5)), ((5,), (3,))], ids=["many", "one"])
def test_graphs_with_any_number_of_nodes_are_evaluated_as_in_training(sizes):
    torch.manual_seed(0)
    model, data = PooledGraphs(), [graph_batch(*of_batch) for of_batch in sizes]
    scores = ad.evaluate(model, data, num_samples=200, grid=ad.Grid((1,), (0, 1)))
    model.train()
    with torch.no_grad():
        means = [
            torch.stack([model(*inputs).softmax(-1) for _ in range(2000)]).mean(0).log()
            for inputs, _ in data
        ]
    expected = F.nll_loss(torch.cat(means), torch.cat([targets for _, targets in data])).item()
    found = scores.xe(ad.AMC)
    assert abs(found.value - expected) < 4 * found.mc_error + 0.01


def test_a_first_batch_that_hides_the_nodes_is_named_in_the_remedy():
    data = [graph_batch(1, 1, 1), graph_batch(4, 7, 5)]
    with pytest.raises(SiteError, match=r"several rows of the input.*first batch"):
        ad.evaluate(PooledGraphs(), data, num_samples=4)
