"""Loaders that put every batch into the same buffer: what is kept of them is copied."""

import collections
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.evaluation.kept_items import copied


@pytest.fixture(scope="module")
def world():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 5))
    x, y = torch.randn(400, 16), torch.randint(5, (400,))
    return net, [(x[at : at + 20], y[at : at + 20]) for at in range(0, 400, 20)]


def reused(items):
    """The items in one buffer, one after another."""
    buffer = [part.clone() for part in items[0]]
    for item in items:
        for place, part in zip(buffer, item):
            place.copy_(part)
        yield tuple(buffer)


class Loader:
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return reused(self.items)


class LoaderWithLength(Loader):
    def __len__(self):
        return len(self.items)


FORMS = {"iterator": reused, "loader": Loader, "loader with a length": LoaderWithLength}


@pytest.mark.parametrize("form", FORMS)
def test_an_adaptive_evaluation_keeps_copies(world, form):
    net, items = world
    found, wanted = (ad.evaluate(net, data) for data in (FORMS[form](items), iter(items)))
    if form != "loader with a length":  # whose pilot has another share of the data
        assert all(
            torch.equal(found.tensors[name], wanted.tensors[name]) for name in wanted.tensors
        )
    assert torch.equal(found.targets, torch.cat([y for _, y in items]))
    torch.testing.assert_close(
        found.values(ad.DET).whole, ad.evaluate(net, items).values(ad.DET).whole
    )


def test_single_examples_are_copied_into_batches(world):
    net, items = world
    examples = [(x[i], y[i]) for x, y in items for i in range(len(y))]
    grid = ad.Grid((0, 1), (0, 1))
    found, wanted = (
        ad.evaluate(net, data, batch_size=20, grid=grid, num_samples=4)
        for data in (reused(examples), examples)
    )
    assert all(torch.equal(found.tensors[name], wanted.tensors[name]) for name in wanted.tensors)


def test_targets_of_stored_samples_are_copied(world):
    targets = [y for _, y in world[1]]
    samples = torch.randn(4, 400, 5, generator=torch.Generator().manual_seed(0))
    found = ad.evaluate_samples(samples, (y for (y,) in reused([(y,) for y in targets])))
    assert found.xe(ad.AMC) == ad.evaluate_samples(samples, torch.cat(targets)).xe(ad.AMC)


def test_a_distillation_copies_what_it_reads_several_times(world):
    net, items = world
    choice = ad.select(ad.evaluate(net, items, num_samples=4), resamples=0)
    options = {"epochs": 2}
    from_list, found = (
        ad.distil(choice, net, iter(data), valid=valid, **options)
        for data, valid in ((items, items), (list(items), Loader(items)))
    )
    again = ad.distil(choice, net, reused(items), valid=items, **options)
    assert from_list.divergences == found.divergences == again.divergences
    assert from_list.kept == found.kept == again.kept


class Graphs(SimpleNamespace):
    """Like a batch of PyG: an object with tensors, which moves and clones itself."""

    def to(self, device):
        return Graphs(x=self.x.to(device))

    def clone(self):
        return Graphs(x=self.x.clone())


def test_all_that_holds_tensors_is_copied():
    x, pair = torch.zeros(2), collections.namedtuple("pair", "a b")
    array, encoding = np.zeros(2), collections.UserDict(ids=x)
    own = copied([x, (x, pair(x, "text")), {"x": x, "y": array}, encoding, Graphs(x=x), None, 3])
    x.fill_(1.0)
    array.fill(1.0)
    tensor, (nested, named), mapping, encoded, graphs, *rest = own
    assert isinstance(encoded, collections.UserDict) and isinstance(named, pair)
    for each in (tensor, nested, named.a, mapping["x"], mapping["y"], encoded["ids"], graphs.x):
        assert each.tolist() == [0.0, 0.0]
    assert (named.b, rest) == ("text", [None, 3])
