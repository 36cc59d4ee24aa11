"""Batches as people have them: mappings, objects, examples to collate, datasets, sampled pixels."""

import collections
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contract_cases import GRID
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import afterdrop as ad
from afterdrop.errors import DataError
from oracles import family as oracle
from oracles.zoo import mlp

OPTIONS = {"grid": GRID, "num_samples": 4}


def assert_same(found, expected):
    assert torch.equal(found.targets, expected.targets)
    for member in expected.members:
        torch.testing.assert_close(found.values(member).whole, expected.values(member).whole)


def data(examples=10):
    torch.manual_seed(0)
    return torch.randn(examples, 5), torch.randint(3, (examples,))


class Keyword(nn.Module):
    """Takes features by keyword, and returns an object with logits and, for labels, a loss."""

    def __init__(self, rule=None, classes=3):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.rule = mlp(classes=classes), rule

    def forward(self, features, labels=None):
        logits = 4 * self.inner(features)
        loss = None if labels is None or self.rule is None else self.rule(logits, labels)
        return types.SimpleNamespace(loss=loss, logits=logits)


class Encoding(collections.UserDict):
    """Like transformers' BatchEncoding: a mapping that is not a dict, with a method `to`."""

    def to(self, device):
        return Encoding({name: value.to(device) for name, value in self.items()})


@pytest.mark.parametrize("kind", [dict, Encoding])
def test_mappings_with_labels(kind):
    x, y = data()
    model = Keyword()
    expected = ad.evaluate(model, [({"features": x}, y)], **OPTIONS)
    assert_same(ad.evaluate(model, [kind(features=x, labels=y)], **OPTIONS), expected)
    other = kind(features=x, answer=y)
    assert_same(ad.evaluate(model, [other], targets="answer", **OPTIONS), expected)
    found = ad.evaluate(model, [other], targets="answer", **OPTIONS)
    assert found.protocol.request.targets == "answer"
    with pytest.raises(DataError, match=r"batch 0 has no 'labels' \(its keys: features, answer\)"):
        ad.evaluate(model, [other], **OPTIONS)


def plain(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def shifted(logits, labels, **options):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


def sequences():
    torch.manual_seed(0)
    x, labels = torch.randn(6, 5, 5), torch.randint(7, (6, 5))
    labels[0, 3:] = -100
    return x, labels


@pytest.mark.parametrize("rule", [plain, shifted])
def test_labels_are_shifted_as_in_the_models_own_loss(rule):
    x, labels = sequences()
    model = Keyword(rule, classes=7).train()
    batches = [{"features": x[:4], "labels": labels[:4]}, {"features": x[4:], "labels": labels[4:]}]
    scores = ad.evaluate(model, batches, **OPTIONS)
    targets = labels if rule is plain else F.pad(labels[:, 1:], (0, 1), value=-100)
    assert torch.equal(scores.targets, targets[targets != -100])
    loss = model.eval()(x, labels).loss.item()
    assert scores.xe(ad.DET).value == pytest.approx(loss, rel=1e-5)


def test_labels_whose_loss_is_neither_are_in_doubt():
    x, labels = sequences()
    model = Keyword(lambda a, b: shifted(a, b, label_smoothing=0.3), classes=7)
    item = {"features": x, "labels": labels}
    with pytest.raises(DataError, match=r"in doubt .* say it: targets='labels'"):
        ad.evaluate(model, [item], **OPTIONS)
    assert ad.evaluate(model, [item], targets="labels", **OPTIONS).num_targets == 28
    scores = ad.evaluate(model, [item], targets=lambda b: b["labels"].roll(-1, 1), **OPTIONS)
    assert scores.num_targets == 28 and scores.protocol.request.targets == "<function>"


def test_labels_of_a_model_that_takes_none_are_as_they_are():
    x, labels = sequences()

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(classes=7)

        def forward(self, features):
            return self.inner(features)

    scores = ad.evaluate(Tagger(), [{"features": x, "labels": labels}], **OPTIONS)
    assert torch.equal(scores.targets, labels[labels != -100])


def test_decoders_get_the_inputs_that_they_make_of_labels():
    class Decoder(Keyword):
        def prepare_decoder_input_ids_from_labels(self, labels):
            return labels.roll(1, 1).clamp_min(0)

        def forward(self, features, decoder_input_ids=None, labels=None):
            given = F.one_hot(decoder_input_ids, 5).float()
            return super().forward(features + given, labels)

    x, labels = sequences()
    labels = labels.clamp_max(4)
    model = Decoder(plain, classes=5)
    scores = ad.evaluate(model, [{"features": x, "labels": labels}], class_dim=-1, **OPTIONS)
    ids = labels.roll(1, 1).clamp_min(0)
    expected = model.eval()(x, ids, labels).loss.item()
    assert scores.xe(ad.DET).value == pytest.approx(expected, rel=1e-5)


class Graph:
    """Like PyG's Data: tensors as attributes, a method `to`, no length."""

    def __init__(self, **tensors):
        self.__dict__.update(tensors)

    def to_dict(self):
        return dict(self.__dict__)

    def to(self, device):
        return Graph(**{name: value.to(device) for name, value in self.__dict__.items()})


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.second = nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, graph):
        source, target = graph.edges
        h = self.first(graph.x)
        graph.x = None  # must not reach the user's object
        h = h.index_add(0, target, h[source])
        return self.second(self.drop(h.relu()))


def graph(nodes=12):
    x, y = data(nodes)
    mask = torch.rand(nodes) < 0.5
    return Graph(x=x, edges=torch.randint(nodes, (2, 3 * nodes)), y=y, mask=mask)


def test_objects_that_move_themselves():
    item, model = graph(), GraphNet()
    scores = ad.evaluate(model, [item, graph(9)], **OPTIONS)
    assert scores.num_targets == 21 and not scores.protocol.batched
    assert item.x is not None
    assert_same(ad.evaluate(model, [(item, item.y), graph(9)], **OPTIONS), scores)
    assert_same(ad.evaluate(model, [item, graph(9)], targets="y", **OPTIONS), scores)
    some = ad.evaluate(model, [item], targets=lambda g: g.y.where(g.mask, -100), **OPTIONS)
    assert torch.equal(some.targets, item.y[item.mask])
    assert torch.equal(some.examples, item.mask.nonzero().squeeze(-1))
    with pytest.raises(DataError, match="targets='label': batch 0 is Graph, which has no such"):
        ad.evaluate(model, [item], targets="label", **OPTIONS)


def test_predictors_take_objects_that_move_themselves():
    item, model = graph(), GraphNet()
    predict = ad.Predictor(model, ad.AMC, 8)
    found = predict.uncertainty(item)
    torch.testing.assert_close(found.log_probs, predict(item), rtol=0, atol=1e-6)
    assert predict.samples(item).shape == (8, 12, 3)
    # Another graph is another batch: no engine was made for the number of its nodes.
    assert predict(graph(9)).shape == (9, 3)


def test_objects_and_their_rows_do_not_depend_on_memory():
    scores = [ad.evaluate(GraphNet(), [graph()], memory=m, **OPTIONS) for m in (None, 2**20)]
    assert_same(*scores)


class Examples(Dataset):
    """Single examples; never raises the IndexError that would end an iteration."""

    def __init__(self):
        self.x, self.y = data()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i % 10], self.y[i % 10]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*data()))


@pytest.mark.parametrize(
    "given",
    [Examples(), TensorDataset(*data()), Stream(), list(zip(*data()))],
    ids=["dataset", "tensors", "stream", "list"],
)
def test_examples_become_batches(given):
    model = mlp()
    expected = ad.evaluate(model, [data()], **OPTIONS)
    assert_same(ad.evaluate(model, given, batch_size=4, **OPTIONS), expected)
    loader = DataLoader(Examples(), batch_size=4)
    assert_same(ad.evaluate(model, loader, **OPTIONS), expected)


def test_collate_makes_batches():
    x, y = data()
    model = mlp()
    expected = ad.evaluate(model, [data()], **OPTIONS)
    examples = [{"image": image, "label": label} for image, label in zip(x, y)]

    def collate(group):
        return torch.stack([e["image"] for e in group]), torch.stack([e["label"] for e in group])

    found = ad.evaluate(model, examples, batch_size=3, collate=collate, **OPTIONS)
    assert_same(found, expected)
    lists = [examples[:4], examples[4:]]
    assert_same(ad.evaluate(model, lists, collate=collate, **OPTIONS), expected)
    loader = DataLoader(examples, batch_size=5)
    of_item = ad.evaluate(model, loader, collate=lambda b: (b["image"], b["label"]), **OPTIONS)
    assert_same(of_item, expected)
    with pytest.raises(DataError, match=r"list, without targets.*collate= makes a batch of it"):
        ad.evaluate(model, lists, **OPTIONS)
    with pytest.raises(DataError, match="collate= makes"):
        ad.evaluate(model, [{"image": x, "labels": y}], **OPTIONS)


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        (Examples(), {}, r"single examples \(Examples\); give batch_size="),
        (DataLoader(Examples()), {"batch_size": 2}, "DataLoader, which makes batches itself"),
        ([DataLoader(Examples())], {}, "list of loaders; evaluate each"),
        (types.SimpleNamespace(val_dataloader=1), {}, r"give its val_dataloader\(\)"),
        (Examples(), {"batch_size": 0}, "batch_size=0 must be a positive number"),
        ([torch.zeros(3)], {}, "batch 0 is Tensor, without targets; give pairs"),
        ([data()], {"targets_per_example": 0}, "targets_per_example=0 must be at least 1"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_remedy(batches, options, message):
    with pytest.raises(DataError, match=message):
        ad.evaluate(mlp(), batches, **options, **OPTIONS)


def images(count=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(6, 4, 1))
    x, y = torch.randn(count, 1, 8, 9), torch.randint(4, (count, 8, 9))
    y[0, :3] = -100
    return model, x, y


def test_images_and_volumes_with_their_classes_in_the_second_dimension():
    model, x, y = images()
    scores = ad.evaluate(model, [(x, y)], class_dim=1, **OPTIONS)
    with torch.no_grad():
        expected = F.cross_entropy(model.eval()(x), y).item()
    assert scores.xe(ad.DET).value == pytest.approx(expected, rel=1e-5)
    volume = nn.Sequential(nn.Conv3d(1, 6, 3, padding=1), nn.Dropout3d(0.5), nn.Conv3d(6, 4, 1))
    x, y = torch.randn(3, 1, 4, 5, 6), torch.randint(4, (3, 4, 5, 6))
    scores = ad.evaluate(volume, [(x, y)], class_dim=1, **OPTIONS)
    with torch.no_grad():
        expected = F.cross_entropy(volume.eval()(x), y).item()
    assert scores.xe(ad.DET).value == pytest.approx(expected, rel=1e-5)
    choice = ad.select(scores, folds=0, resamples=0)
    assert choice.predictor(volume)(x).shape == (3, 4, 4, 5, 6)


def test_shapes_in_which_the_classes_may_be_anywhere_are_refused():
    model = nn.Sequential(nn.Conv2d(1, 6, 1), nn.Dropout(0.5), nn.Conv2d(6, 4, 1))
    with pytest.raises(DataError, match=r"any of the dimensions 1, 2, 3.*class_dim="):
        ad.evaluate(model, [(torch.randn(3, 1, 4, 4), torch.randint(4, (3, 4, 4)))], **OPTIONS)


def test_sampled_targets_are_keyed_by_seed_and_example():
    model, x, y = images()
    options = {"class_dim": 1, "targets_per_example": 10, **OPTIONS}
    whole = ad.evaluate(model, [(x, y)], **options)
    assert whole.num_targets == 60 and whole.examples.bincount().tolist() == [10] * 6
    parts = ad.evaluate(model, [(x[:1], y[:1]), (x[1:], y[1:])], **options)
    assert torch.equal(parts.examples, whole.examples)
    assert_same(parts, whole)
    other = ad.evaluate(model, [(x, y)], seed=1, **options)
    assert not torch.equal(other.targets, whole.targets)
    assert whole.protocol.request.targets_per_example == 10


def test_more_targets_than_there_are_is_all_of_them():
    model, x, y = images()
    options = {"class_dim": 1, **OPTIONS}
    expected = ad.evaluate(model, [(x, y)], **options)
    assert_same(ad.evaluate(model, [(x, y)], targets_per_example=72, **options), expected)
    single = ad.evaluate(mlp(), [data()], targets_per_example=1, **OPTIONS)
    assert single.num_targets == 10


def test_errors_of_sampled_targets_cluster_by_image():
    model, x, y = images(20)
    scores = ad.evaluate(model, [(x, y)], class_dim=1, targets_per_example=12, **OPTIONS)
    values = scores.values(ad.DET).whole.numpy().astype(np.float64)
    expected = oracle.clustered_error(values, scores.examples.numpy())
    assert scores.xe(ad.DET).data_error == pytest.approx(expected, rel=1e-6)


def test_sampled_targets_need_less_memory_for_results():
    model, x, y = images(4)
    scores = ad.evaluate(model, [(x, y)], class_dim=1, targets_per_example=5, **OPTIONS)
    whole = ad.evaluate(model, [(x, y)], class_dim=1, **OPTIONS)
    assert len(scores.targets) == 20 < len(whole.targets) // 10


class Sliceless(torch.Tensor):
    """Like MONAI's MetaTensor: rows cannot be taken before it is converted."""

    def narrow(self, *_):
        raise ValueError("convert it first")

    def as_tensor(self):
        return self.as_subclass(torch.Tensor)


def test_tensors_with_metadata_are_converted():
    x, y = data()
    model = mlp()
    expected = ad.evaluate(model, [(x, y)], **OPTIONS)
    given = [(x.as_subclass(Sliceless), y.as_subclass(Sliceless))]
    assert_same(ad.evaluate(model, given, **OPTIONS), expected)
    predict = ad.Predictor(model, ad.AMC, 4)
    assert torch.equal(predict(x.as_subclass(Sliceless)), predict(x))


def test_check_reads_the_same_batches():
    x, y = data()
    found = ad.check(Keyword(), [{"features": x, "answer": y}], targets="answer", num_samples=80)
    assert found.passed
    assert ad.check(GraphNet(), [graph()], num_samples=80).passed
