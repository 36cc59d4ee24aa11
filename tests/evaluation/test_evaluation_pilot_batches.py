"""Which batches a pilot gets, from every kind of data, and that the rest is read once."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from afterdrop.evaluation.batches import Source
from afterdrop.evaluation.pilot_batches import divide

SHARE = 0.125
DATASET = TensorDataset(torch.arange(40))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(40))


def numbers(batches):
    return [torch.as_tensor(batch[0] if isinstance(batch, list) else batch) for batch in batches]


def flat(batches):
    return torch.cat([batch.flatten() for batch in numbers(batches)]).tolist()


def loader(dataset=DATASET, **options):
    return DataLoader(dataset, batch_size=2, **options)


@pytest.mark.parametrize(
    ("data", "source"),
    [
        ([torch.tensor([2 * i, 2 * i + 1]) for i in range(20)], Source()),
        (loader(), Source()),
        (DATASET, Source(batch_size=2)),
        (list(range(40)), Source(batch_size=2)),
        (loader(), Source(collate=lambda batch: batch[0])),
    ],
)
def test_every_eighth_batch_is_picked_where_batches_can_be(data, source):
    found = divide(data, SHARE, source)
    assert flat(found.pilot) == [0, 1, 16, 17, 32, 33] == flat(found.pilot)  # as often as asked
    assert found.share == 3 / 20 and len(found.everything) == 20
    assert flat(found.everything) == list(range(40))


@pytest.mark.parametrize("shuffle", [False, True])
def test_picking_leaves_the_generator_as_iteration_does(shuffle):
    torch.manual_seed(0)
    expected = flat(loader(shuffle=shuffle)), torch.rand(1)
    torch.manual_seed(0)
    found = divide(loader(shuffle=shuffle), SHARE, Source())
    pilot = flat(found.pilot)
    assert (flat(found.everything), torch.rand(1)) == expected
    assert len(pilot) == 6 and (pilot == list(range(6))) is False


def test_streams_are_read_once_from_the_start():
    for data in (loader(Stream()), ([i, i + 1] for i in range(0, 40, 2))):
        source = Source(collate=torch.as_tensor)
        found = divide(data, SHARE, source)
        assert flat(found.pilot) == list(range(16)) and found.share == SHARE
        assert flat(found.everything) == list(range(40))


def test_a_short_generator_is_known_once_it_has_been_read():
    found = divide(iter(range(8)), 0.5, Source(collate=torch.tensor))
    assert flat(found.pilot) == [0, 2, 4, 6] and found.share == 0.5
    assert flat(found.everything) == list(range(8))


def test_only_the_batches_of_the_pilot_are_read_ahead():
    read = []

    def batches():
        for number in range(100):
            read.append(number)
            yield number

    found = divide(batches(), SHARE, Source())
    assert len(read) == 9
    assert list(itertools.islice(found.everything, 20)) == list(range(20))
