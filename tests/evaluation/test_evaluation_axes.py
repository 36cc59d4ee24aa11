"""The dimension of the classes and the tensor of the logits are beyond doubt, or asked for."""

import math

import pytest
import torch
import torch.nn.functional as F
from contract_cases import GRID, OPTIONS, N, assert_same
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError
from oracles.zoo import mlp


def segmenter(classes):
    """Logits [B, V, height, width]."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Dropout(0.3), nn.Conv2d(4, classes, 1)
    ).eval()


class Tagger(nn.Module):
    """Logits [B, time, V] of inputs [B, time, 5]."""

    def __init__(self, classes):
        super().__init__()
        torch.manual_seed(0)
        self.inner = mlp(classes=classes)

    def forward(self, x):
        return self.inner(x)


class Several(nn.Module):
    """Features of 6 units and logits of 3 classes, in some form of output."""

    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.drop, self.head = nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)
        self.form = form

    def forward(self, x):
        features = self.drop(self.body(x).tanh())
        return self.form(features, self.head(features))


PAIR = Several(lambda features, logits: (features, logits))
ONLY = Several(lambda features, logits: logits)


def data():
    return [(torch.randn(N, 5), torch.randint(3, (N,)))]


def test_as_many_classes_as_rows_and_columns_are_refused_until_class_dim_says_which():
    model, x, y = segmenter(8), torch.randn(3, 1, 8, 8), torch.randint(8, (3, 8, 8))
    with pytest.raises(DataError, match=r"dimensions 1, 2, 3; say in which: class_dim=3"):
        ad.evaluate(model, [(x, y)], **OPTIONS)
    found = ad.evaluate(model, [(x, y)], class_dim=1, **OPTIONS)
    assert found.xe(ad.DET).value == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)


def test_classes_that_fit_the_second_dimension_only_are_refused_naming_it():
    x, y = torch.randn(3, 1, 8, 8), torch.randint(4, (3, 8, 8))
    with pytest.raises(DataError, match="would match with class_dim=1"):
        ad.evaluate(segmenter(4), [(x, y)], **OPTIONS)


def test_as_many_classes_as_steps_are_refused_in_the_first_batch_only():
    model, y = Tagger(4), torch.randint(4, (N, 4))
    equal = torch.randn(N, 4, 5), y
    with pytest.raises(DataError, match="class_dim=2 or another"):
        ad.evaluate(model, [equal], **OPTIONS)
    last = ad.evaluate(model, [equal], class_dim=-1, **OPTIONS)
    expected = F.cross_entropy(model.eval()(equal[0]).flatten(0, 1), y.flatten()).item()
    assert last.xe(ad.DET).value == pytest.approx(expected, rel=1e-5)
    # Once a batch has shown where the classes are, sequences may have any length.
    other = torch.randn(N, 3, 5), torch.randint(4, (N, 3))
    assert ad.evaluate(model, [other, equal], **OPTIONS).num_targets == N * 7


@pytest.mark.parametrize("size", [3, N])
def test_as_many_examples_as_classes_are_not_in_doubt(size):
    x, y = torch.randn(size, 5), torch.randint(size, (size,))
    assert ad.evaluate(mlp(classes=size), [(x, y)], **OPTIONS).num_targets == size


def test_logits_per_example_of_time_major_inputs():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = mlp()

        def forward(self, x):
            return self.inner(x[-1])

    x, y = torch.randn(4, N, 5), torch.randint(3, (N,))
    model = Last()
    scores = ad.evaluate(model, [(x, y)], batch_dim=1, **OPTIONS)
    expected = ad.Predictor(model.inner, ad.AMC, 4)(x[-1])
    assert scores.num_targets == N
    assert ad.Predictor(model, ad.AMC, 4, batch_dim=1)(x).shape == expected.shape


@pytest.mark.parametrize("member", [ad.DET, ad.AMC])
def test_predictors_do_not_guess_the_dimension_of_classes(member):
    model, x = segmenter(3), torch.randn(2, 1, 8, 8)
    with pytest.raises(DataError, match=r"\(2, 3, 8, 8\).*class_dim=1 for \[B, V"):
        ad.Predictor(model, member, 4)(x)
    found = ad.Predictor(model, member, 4, class_dim=1)(x)
    assert found.shape == (2, 3, 8, 8)
    torch.testing.assert_close(found.exp().sum(1), torch.ones(2, 8, 8))
    steps = torch.randn(2, 4, 5)
    with pytest.raises(DataError, match="class_dim=-1 for the last"):
        ad.Predictor(Tagger(3), member, 4)(steps)
    assert ad.Predictor(Tagger(3), member, 4, class_dim=-1)(steps).shape == (2, 4, 3)


@pytest.mark.parametrize("member", [ad.DET, ad.AMC])
@pytest.mark.parametrize("flat", [True, False])
def test_one_logit_per_example_is_refused(member, flat):
    model = nn.Sequential(mlp(classes=1), nn.Flatten(0) if flat else nn.Identity())
    with pytest.raises(DataError, match=r"at least 2 classes.*likelihood='binary'"):
        ad.Predictor(model, member, 4)(torch.randn(6, 5))
    with pytest.raises(DataError, match=r"at least 2 classes.*likelihood='binary'"):
        ad.evaluate(model, [(torch.randn(N, 5), torch.zeros(N).long())], **OPTIONS)


def test_choices_carry_the_dimension_of_classes():
    x, y = torch.randn(3, 1, 8, 8), torch.randint(4, (3, 8, 8))
    model, tagger = segmenter(4), Tagger(3)
    choice = ad.select(ad.evaluate(model, [(x, y)], class_dim=1, **OPTIONS), resamples=0, folds=0)
    assert choice.predictor(model)(x).shape == (3, 4, 8, 8)
    steps = torch.randn(N, 4, 5), torch.randint(3, (N, 4))
    choice = ad.select(ad.evaluate(tagger, [steps], **OPTIONS), resamples=0, folds=0)
    assert choice.request.class_dim is None
    log_probs = choice.predictor(tagger)(steps[0])
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(N, 4))


def test_one_of_several_tensors_is_asked_for():
    for run in (
        lambda: ad.evaluate(PAIR, data(), **OPTIONS),
        lambda: ad.Predictor(PAIR, ad.AMC, 4)(torch.randn(N, 5)),
        lambda: ad.Predictor(PAIR, ad.DET)(torch.randn(N, 5)),
        lambda: ad.find_sites(PAIR, torch.randn(N, 5)),
    ):
        with pytest.raises(DataError, match=r"2 tensors that may be its logits.*logits=0 or"):
            run()


@pytest.mark.parametrize(
    ("form", "place"),
    [
        (lambda features, logits: (features, logits), 1),
        (lambda features, logits: (features, logits), -1),
        (lambda features, logits: {"features": features, "out": logits}, "out"),
        (lambda features, logits: (features, logits), lambda output: output[1]),
        (lambda features, logits: {"x": (features, logits)}, lambda output: output["x"][1]),
    ],
)
def test_where_the_logits_are_can_be_given(form, place):
    model, batches = Several(form), data()
    expected = ad.evaluate(ONLY, batches, **OPTIONS)
    found = ad.evaluate(model, batches, logits=place, **OPTIONS)
    assert_same(found, expected)
    x = batches[0][0]
    for member in (ad.DET, ad.AMC):
        log_probs = ad.Predictor(model, member, 4, logits=place)(x)
        assert torch.equal(log_probs, ad.Predictor(ONLY, member, 4)(x))
    assert len(ad.find_sites(model, x, logits=place)) == 1


@pytest.mark.parametrize("place", [2, "out", lambda output: "logits", lambda output: None])
def test_logits_that_are_not_there_are_refused(place):
    with pytest.raises(DataError, match="logits="):
        ad.evaluate(PAIR, data(), logits=place, **OPTIONS)


@pytest.mark.parametrize(
    "form",
    [
        lambda features, logits: (logits, (features, features)),  # a state
        lambda features, logits: (logits, None),
        lambda features, logits: (logits.sum(), logits),  # a loss
        lambda features, logits: (features[:, 0], logits),  # a value per example
        lambda features, logits: {"loss": logits.sum(), "out": logits},
    ],
)
def test_the_only_tensor_that_may_be_logits_needs_no_word(form):
    batches = data()
    assert_same(
        ad.evaluate(Several(form), batches, **OPTIONS), ad.evaluate(ONLY, batches, **OPTIONS)
    )


@pytest.mark.parametrize("place", [1, "out"])
def test_choices_carry_the_place_of_the_logits(place, tmp_path):
    form = (lambda f, out: (f, out)) if place == 1 else lambda f, out: {"f": f, "out": out}
    model, batches = Several(form), data()
    scores = ad.evaluate(model, batches, logits=place, **OPTIONS)
    ad.select(scores, resamples=0, folds=0).save(tmp_path)
    choice = ad.Choice.load(tmp_path)
    assert choice.request.logits == place
    assert choice.predictor(model)(batches[0][0]).shape == (N, 3)


def test_a_function_that_finds_the_logits_is_given_again(tmp_path):
    batches = data()

    def second(output):
        return output[1]

    scores = ad.evaluate(PAIR, batches, logits=second, **OPTIONS)
    scores.save(tmp_path / "scores.safetensors")
    choice = ad.select(ad.Scores.load(tmp_path / "scores.safetensors"), resamples=0, folds=0)
    with pytest.raises(DataError, match="give it again: logits=function"):
        choice.predictor(PAIR)
    assert choice.predictor(PAIR, logits=second)(batches[0][0]).shape == (N, 3)


def test_texts_whose_window_is_as_long_as_their_vocabulary():
    from afterdrop.models import LanguageModel, LanguageModelConfig

    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(9, (4,), output_dropout=0.5))
    text = torch.randint(1, 9, (60,))
    scores = ad.evaluate_text(model, text, 0, grid=GRID, num_samples=4, window=9, lines=False)
    assert math.isfinite(scores.xe(ad.AMC).value)
