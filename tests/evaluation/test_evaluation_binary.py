"""Binary and multilabel targets: two classes with logits (0, z), errors clustered by example."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError

GRID = ad.Grid((0, 0.5, 1), (0, 0.5, 1))
MEMBERS = [*GRID, ad.DET.at_temperature(1.7), ad.Member(0.5, 0.5, 1.3), ad.Member(1.0, 1.0, 0.8)]


class Head(nn.Module):
    """A model with one logit z per label, or with the two logits (0, z)."""

    def __init__(self, net, two):
        super().__init__()
        self.net, self.two = net, two

    def forward(self, x):
        z = self.net(x)
        return torch.stack([torch.zeros_like(z), z], -1) if self.two else z


def network(labels):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, labels))


def labelled(labels=3, count=12, batches=2):
    torch.manual_seed(1)
    return [
        (torch.randn(count, 5), (torch.rand(count, labels) < 0.3).float()) for _ in range(batches)
    ]


@pytest.fixture(scope="module")
def several():
    model = Head(network(3), two=False)
    return ad.evaluate(model, labelled(), grid=GRID, num_samples=8, likelihood="multilabel")


@pytest.fixture(scope="module")
def two_classes():
    data = [(x, y.long()) for x, y in labelled()]
    return ad.evaluate(Head(network(3), two=True), data, grid=GRID, num_samples=8, class_dim=-1)


@pytest.mark.parametrize("member", MEMBERS, ids=repr)
def test_labels_are_two_classes(several, two_classes, member):
    mine, theirs = several.values(member), two_classes.values(member)
    assert torch.allclose(mine.whole, theirs.whole, atol=1e-6)
    assert several.xe(member).error == pytest.approx(two_classes.xe(member).error, rel=1e-4)
    assert several.accuracy(member).value == two_classes.accuracy(member).value
    assert several.ece(member).value == pytest.approx(two_classes.ece(member).value, abs=1e-6)
    brier = two_classes.brier(member).value / 2
    assert several.brier(member).value == pytest.approx(brier, abs=1e-6)
    if member.temperature == 1:
        gaps = [vars(scores.bounds(member)) for scores in (several, two_classes)]
        assert gaps[0] == pytest.approx(gaps[1], abs=1e-6)


def test_deterministic_metrics_are_those_of_the_textbook(several):
    net = network(3).eval()
    x, y = (torch.cat(parts) for parts in zip(*labelled()))
    z = net(x).detach()
    p = z.sigmoid()
    assert several.xe(ad.DET).value == pytest.approx(
        F.binary_cross_entropy_with_logits(z, y).item(), abs=1e-6
    )
    per_example = F.binary_cross_entropy_with_logits(z, y, reduction="none").sum(1)
    found = several.xe_per_example(ad.DET)
    assert found.value == pytest.approx(per_example.mean().item(), abs=1e-5)
    assert found.error == pytest.approx((per_example.std() / math.sqrt(len(y))).item(), rel=1e-4)
    assert several.brier(ad.DET).value == pytest.approx((p - y).square().mean().item(), abs=1e-6)
    assert several.accuracy(ad.DET).value == pytest.approx(
        ((p > 0.5) == y.bool()).double().mean().item()
    )


def test_errors_are_clustered_by_example(several):
    assert several.num_examples == 24 and several.num_targets == 72
    assert several.examples.equal(torch.arange(24).repeat_interleave(3))


def test_bands_are_those_of_the_labels(several):
    prevalence = torch.tensor([5, 50, 500])
    rows = several.by_frequency(ad.AMC, prevalence, [(0, 10), (10, 1000)])
    whole = several.values(ad.AMC).whole.view(-1, 3)
    assert [count for _, count, _ in rows] == [24, 48]
    assert rows[0][2].value == pytest.approx(whole[:, 0].mean().item())
    assert rows[1][2].value == pytest.approx(whole[:, 1:].mean().item())
    with pytest.raises(ad.AfterdropError, match="each of the 3 labels"):
        several.by_frequency(ad.AMC, torch.ones(2), [(0, 1)])


def test_labels_that_do_not_count_are_left_out():
    (x, y), *_ = labelled()
    holes = y.clone()
    holes[0, 1] = holes[3, 2] = float("nan")
    numbers = holes.nan_to_num(-100).long()
    found = [
        ad.evaluate(network(3), [(x, t)], grid=GRID, num_samples=4, likelihood="multilabel")
        for t in (holes, numbers)
    ]
    assert found[0].num_targets == 34
    assert found[0].field("data", "labels").tolist()[:5] == [0, 2, 0, 1, 2]
    assert found[0].xe(ad.AMC) == found[1].xe(ad.AMC)


@pytest.mark.parametrize("shape", [(12,), (12, 1)])
def test_one_logit_per_example(shape):
    """[B, 1] logits are as good as [B], of targets as well."""
    net = network(1)
    torch.manual_seed(2)
    x, y = torch.randn(12, 5), torch.randint(2, shape).bool()
    scores = ad.evaluate(net, [(x, y)], grid=GRID, num_samples=8, likelihood="binary")
    choice = ad.select(scores)
    assert choice.request.likelihood == "binary"
    found = ad.Predictor(net, ad.AMC, 8, likelihood="binary")(x)
    assert found.shape == (12, 2) and torch.allclose(found.exp().sum(-1), torch.ones(12))
    predict = choice.predictor(net)
    xe = F.nll_loss(predict(x), y.flatten().long()).item()
    if choice.member.deterministic:
        assert xe == pytest.approx(scores.xe(choice.member).value, abs=1e-5)


def test_predictor_with_own_masks_gives_the_evaluated_numbers():
    net, (x, y) = network(3), labelled(batches=1)[0]
    scores = ad.evaluate(net, [(x, y)], grid=GRID, num_samples=400, likelihood="multilabel")
    predict = ad.Predictor(net, ad.AMC, 400, likelihood="multilabel")
    log_probs = predict(x)
    assert log_probs.shape == (12, 3, 2)
    xe = -log_probs.gather(-1, y.long().unsqueeze(-1)).mean().item()
    assert xe == pytest.approx(scores.xe(ad.AMC).value, abs=0.02)


def test_labels_of_pixels_can_lie_in_another_dimension():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Dropout(0.5), nn.Conv2d(4, 2, 1))
    x, y = torch.randn(3, 1, 4, 5), torch.randint(2, (3, 2, 4, 5))
    options = {"grid": GRID, "num_samples": 4, "likelihood": "multilabel", "class_dim": 1}
    scores = ad.evaluate(net, [(x, y)], **options)
    wanted = F.binary_cross_entropy_with_logits(net.eval()(x), y.float()).item()
    assert scores.xe(ad.DET).value == pytest.approx(wanted, abs=1e-6)
    labels = scores.field("data", "labels")
    assert labels.equal(torch.arange(2).repeat(60))
    part = scores.targets[labels == 1].view(3, 4, 5)
    assert part.equal(y[:, 1])


def test_scores_and_choices_survive_files(several, tmp_path):
    several.save(tmp_path / "valid.safetensors")
    loaded = ad.Scores.load(tmp_path / "valid.safetensors")
    assert loaded.protocol == several.protocol and loaded.has("data", "labels")
    choice = ad.select(loaded)
    choice.save(tmp_path / "choice.json")
    assert ad.Choice.load(tmp_path / "choice.json").request.likelihood == "multilabel"


def test_resumed_and_whole_evaluations_agree(several, tmp_path):
    data, model = labelled(), Head(network(3), two=False)

    def interrupted():
        yield data[0]
        raise KeyboardInterrupt

    options = {"grid": GRID, "num_samples": 8, "likelihood": "multilabel"}
    with pytest.raises(KeyboardInterrupt):
        ad.evaluate(model, interrupted(), resume=tmp_path / "parts", **options)
    scores = ad.evaluate(model, data, resume=tmp_path / "parts", **options)
    assert all(scores.tensors[name].equal(several.tensors[name]) for name in several.tensors)


@pytest.mark.parametrize(
    ("output", "targets", "likelihood", "message"),
    [
        ((12, 3), torch.full((12, 3), 2), "multilabel", "has the target 2; give 0 and 1"),
        ((12, 3), torch.ones(12), "binary", "one logit per label, in the shape of the targets"),
        ((12, 1), torch.ones(12), "categorical", "likelihood='binary' or 'multilabel' for"),
        ((12, 1), torch.ones(12).long(), "categorical", "likelihood='binary' for one logit"),
        ((12, 3), torch.ones(12, 3).long(), "categorical", "needs likelihood='binary' or 'multi"),
        ((12, 1), torch.ones(12), "probit", "give one of categorical, binary"),
    ],
)
def test_what_cannot_be_read_is_refused(output, targets, likelihood, message):
    data = [(torch.randn(output[0], 5), targets)]
    with pytest.raises(DataError, match=message):
        ad.evaluate(network(output[1]), data, grid=GRID, num_samples=4, likelihood=likelihood)


def test_probabilities_are_refused():
    net = nn.Sequential(network(1), nn.Sigmoid())
    with pytest.raises(DataError, match="give logits, as they are before the sigmoid"):
        ad.evaluate(net, [(torch.randn(40, 5), torch.ones(40))], likelihood="binary")
