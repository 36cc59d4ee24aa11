"""What an evaluation was given reaches the predictor of its choice without being given again."""

import dataclasses

import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.errors import SiteError

GRID = ad.Grid((0, 1), (0, 0.5, 1))
MEMBERS = [ad.DET.at_temperature(1.2), ad.Member(0.0, 0.5, 0.8), ad.Member(1.0, 1.0, 1.3)]


class OwnMask(nn.Module):
    """Draws its own mask at the rate in an attribute."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training:
            return x
        return x * (torch.rand_like(x) >= self.rate) / (1 - self.rate)


class TimeMajor(nn.Module):
    """A recurrent network on [time, B, 4] that gives logits [time, B, 3]."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.out = nn.GRU(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.drop(self.layer(x)[0]))


def masked(drop):
    return nn.Sequential(nn.Linear(4, 16), drop, nn.Dropout(0.3), nn.Linear(16, 3))


def segmenter():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Dropout2d(0.5), nn.Conv2d(8, 3, 1))


def labels(*shape):
    return torch.randint(3, shape)


# Options of the evaluation, the model, inputs, targets, and the class dimension of the logits.
CASES = {
    "rates": ({"rates": ("1.rate",)}, lambda: masked(OwnMask(0.4)), (9, 4), (9,), -1),
    "noise": ({"noise": ("1",)}, lambda: masked(OwnMask(0.4)), (9, 4), (9,), -1),
    "batch_dim": ({"batch_dim": 1}, TimeMajor, (5, 9, 4), (5, 9), -1),
    "class_dim": ({"class_dim": 1}, segmenter, (9, 1, 4, 5), (9, 4, 5), 1),
}


def chosen(case, member, path):
    """Evaluates, selects, replaces the member, saves and loads; (choice, scores, model, x, y)."""
    options, make, inputs, targets, _ = CASES[case]
    model, x, y = make(), torch.randn(inputs), labels(*targets)
    scores = ad.evaluate(model, [(x, y)], grid=GRID, num_samples=4, seed=7, masks="iid", **options)
    choice = dataclasses.replace(ad.select(scores), member=member)
    ad.Run(path).save_choice(choice)
    return ad.Run.open(path).choice, scores, model, x, y


@pytest.mark.parametrize("member", MEMBERS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_settings_survive_evaluation_selection_and_files(case, member, tmp_path):
    options, *_, class_dim = CASES[case]
    choice, scores, model, x, y = chosen(case, member, tmp_path)
    for name, value in options.items():
        assert getattr(choice.request, name) == getattr(scores.request, name) == value
    found = choice.predictor(model)(x)
    direct = ad.Predictor(model, member, 4, 7, masks="iid", **{"class_dim": class_dim, **options})
    assert torch.equal(found, direct(x))
    torch.testing.assert_close(found.exp().sum(class_dim), torch.ones(y.shape))
    if member.deterministic:
        targets = found.movedim(class_dim, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
        if case == "batch_dim":
            targets = targets.t()  # scores are ordered by example
        expected = -scores.values(member).whole
        torch.testing.assert_close(targets.flatten().double(), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("case", ["rates", "noise"])
def test_without_the_settings_the_model_is_refused(case, tmp_path):
    """So what the test above finds did come from the file."""
    choice, _, model, x, _ = chosen(case, ad.AMC, tmp_path)
    bare = dataclasses.replace(choice.request, rates=(), noise=())
    with pytest.raises(SiteError, match="rates="):
        dataclasses.replace(choice, request=bare).predictor(model)(x)


def test_rates_scale_with_the_multiplier_and_noise_does_not(tmp_path):
    """The same mask, once declared as dropout and once as noise, which stays off."""
    torch.manual_seed(1)
    spread = {}
    for case in ("rates", "noise"):
        choice, _, model, x, _ = chosen(case, ad.Member(0.0, 1.0), tmp_path / case)
        model[2].p = 1e-9  # leaves the own mask alone
        predict = choice.predictor(model)
        spread[case] = (predict(x) - model.eval()(x).log_softmax(-1)).abs().max().item()
    assert spread["noise"] < 1e-5 < 1e-2 < spread["rates"]


def test_an_example_has_its_masks_along_the_batch_dimension(tmp_path):
    choice, _, model, x, _ = chosen("batch_dim", ad.AMC, tmp_path)
    predict = choice.predictor(model)
    torch.testing.assert_close(predict(x[:, 2:4]), predict(x)[:, 2:4], rtol=0, atol=1e-5)
    wrong = dataclasses.replace(choice, request=dataclasses.replace(choice.request, batch_dim=0))
    assert not torch.allclose(wrong.predictor(model)(x), predict(x), atol=1e-2)
