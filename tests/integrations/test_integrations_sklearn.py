"""Estimators of scikit-learn: contract, agreement with the predictor, and scikit-learn's checks."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from mapie.classification import SplitConformalClassifier
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV, CalibrationDisplay
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import log_loss
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks
from skorch import NeuralNetBinaryClassifier, NeuralNetClassifier, NeuralNetRegressor
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError
from afterdrop.integrations.sklearn import AfterdropClassifier, AfterdropRegressor

GRID = ad.Grid((0, 1), (0, 0.5, 1))
LABELS = np.array(["low", "high", "mid"])  # in the order of the logits, which is not sorted


def classifier(features: int = 4, classes: int = 3, steps: int = 60) -> nn.Module:
    """A net that has learnt which of the first features is largest."""
    net = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, classes))
    x = torch.randn(200, features)
    train(net, x, x[:, :classes].argmax(-1), nn.functional.cross_entropy, steps)
    return net


def train(net, x, y, loss, steps):
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    net.train()
    for _ in range(steps):
        optimiser.zero_grad()
        loss(net(x), y).backward()
        optimiser.step()
    net.eval()


def held_out(seed: int, rows: int = 90):
    """Inputs, and labels of which some are wrong."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, 4))
    codes = x[:, :3].argmax(-1)
    codes[::7] = draw.integers(3, size=len(codes[::7]))
    return x, codes


def fitted(**settings) -> AfterdropClassifier:
    x, codes = held_out(0)
    settings = {"classes": LABELS, "grid": GRID, "num_samples": 8, **settings}
    return AfterdropClassifier(classifier(), **settings).fit(x, LABELS[codes])


def test_probabilities_are_those_of_the_choice_with_sorted_columns():
    estimator = fitted(batch_size=32)
    x, codes = held_out(1)
    expected = estimator.choice_.predictor(estimator.model)(torch.tensor(x).float()).exp()
    assert estimator.classes_.tolist() == ["high", "low", "mid"]
    order = [LABELS.tolist().index(name) for name in estimator.classes_]
    found = estimator.predict_proba(x)
    np.testing.assert_allclose(found, expected.double()[:, order], atol=1e-6)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-14)
    assert (estimator.predict(x) == estimator.classes_[found.argmax(1)]).all()
    assert estimator.score(x, LABELS[codes]) > 0.6


def test_the_log_loss_is_the_cross_entropy_of_the_scores():
    x, codes = held_out(0)
    only = ad.Grid((0,), (0,))
    estimator = fitted(grid=only, num_samples=2)
    batch = torch.tensor(x).float(), torch.tensor(codes)
    scores = ad.evaluate(estimator.model, [batch], grid=only, num_samples=2)
    member = estimator.choice_.member
    assert member.temperature != 1
    loss = log_loss(LABELS[codes], estimator.predict_proba(x))
    assert loss == pytest.approx(scores.xe(member).value, abs=1e-6)


def test_a_choice_from_before_predicts_the_same_with_the_same_weights():
    estimator, x = fitted(), held_out(1)[0]
    again = AfterdropClassifier.from_choice(estimator.model, estimator.choice_, LABELS)
    assert (again.predict_proba(x) == estimator.predict_proba(x)).all()
    with pytest.raises(DataError, match="weights of the model"):
        AfterdropClassifier.from_choice(classifier(steps=1), estimator.choice_, classes=LABELS)


def test_a_label_that_the_held_out_data_lack_does_not_shift_the_others():
    x, codes = held_out(0)
    some = codes != 1
    bare = AfterdropClassifier(classifier(), grid=GRID, num_samples=4)
    with pytest.raises(DataError, match=r"3 classes and y or classes= has 2; give classes="):
        bare.fit(x[some], codes[some])
    named = bare.set_params(classes=[0, 1, 2]).fit(x[some], codes[some])
    assert named.score(x, codes) > 0.6


def test_labels_beyond_the_classes_are_named():
    x, codes = held_out(0)
    with pytest.raises(DataError, match=r"label 3, which is not in classes=\[0, 1, 2\]"):
        AfterdropClassifier(classifier(), classes=[0, 1, 2]).fit(x, np.where(codes == 2, 3, codes))


def test_a_model_that_is_neither_a_module_nor_a_net_is_refused():
    with pytest.raises(DataError, match="model is str; give a trained"):
        AfterdropClassifier("net").fit(*held_out(0))
    with pytest.raises(NotFittedError):
        AfterdropClassifier(classifier()).predict(held_out(0)[0])


def test_copies_predict_the_same():
    estimator, x = fitted(), held_out(1)[0]
    again = pickle.loads(pickle.dumps(estimator))
    assert (again.predict_proba(x) == estimator.predict_proba(x)).all()
    fresh = clone(estimator)
    assert not hasattr(fresh, "predictor_")
    x0, codes = held_out(0)
    assert (fresh.fit(x0, LABELS[codes]).predict_proba(x) == estimator.predict_proba(x)).all()


def test_calibration_and_cross_validation_of_scikit_learn_take_it():
    estimator = fitted()
    x, codes = held_out(1, 150)
    losses = cross_val_score(estimator, x, LABELS[codes], scoring="neg_log_loss", cv=3)
    assert (losses > -np.log(3)).all()
    tempered = CalibratedClassifierCV(FrozenEstimator(estimator), method="temperature")
    x, codes = held_out(0)
    tempered.fit(x, LABELS[codes])
    fit = tempered.calibrated_classifiers_[0].calibrators[0]
    assert fit.beta_ == pytest.approx(1, abs=0.05)  # selection left nothing to temper


def test_one_logit_per_example_is_a_binary_classifier_with_a_calibration_curve():
    x, _ = held_out(0, 200)
    y = np.where(x[:, 0] + np.random.default_rng(3).normal(size=200) > 0, "yes", "no")
    net = nn.Sequential(
        nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1), nn.Flatten(0)
    )
    inputs, truth = torch.tensor(x[:100]).float(), torch.tensor(y[:100] == "yes").float()
    train(net, inputs, truth, nn.functional.binary_cross_entropy_with_logits, 40)
    estimator = AfterdropClassifier(
        net, ["no", "yes"], grid=GRID, num_samples=4, options={"likelihood": "binary"}
    ).fit(x[100:], y[100:])
    assert estimator.predict_proba(x).shape == (200, 2)
    assert estimator.score(x[100:], y[100:]) > 0.6
    display = CalibrationDisplay.from_estimator(estimator, x[100:], y[100:], n_bins=3)
    assert ((display.prob_true >= 0) & (display.prob_true <= 1)).all()


def test_images_and_token_numbers_are_inputs():
    draw = np.random.default_rng(0)
    images, y = draw.normal(size=(30, 1, 4, 4)), np.arange(30) % 2
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(8, 2))
    assert AfterdropClassifier(net, num_samples=4).fit(images, y).predict(images).shape == (30,)
    words = draw.integers(9, size=(30, 5))
    text = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(20, 2))
    reader = AfterdropClassifier(text, num_samples=4, dtype=None).fit(words, y)
    assert reader.predict_proba(words).shape == (30, 2)


class Heads(nn.Module):
    """A mean, and a variance where asked for."""

    def __init__(self, gaussian: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2))
        self.out, self.gaussian = nn.Linear(16, 2), gaussian

    def forward(self, x):
        mean, raw = self.out(self.body(x)).unbind(-1)
        return (mean, nn.functional.softplus(raw) + 0.01) if self.gaussian else mean


@pytest.mark.parametrize("likelihood", ["squared_error", "gaussian"])
def test_a_regressor_predicts_means_and_deviations_of_its_choice(likelihood):
    x, _ = held_out(0, 120)
    y = x.sum(1) + np.random.default_rng(4).normal(size=120)
    net = Heads(likelihood == "gaussian")

    def loss(out, y):
        if isinstance(out, tuple):
            return nn.functional.gaussian_nll_loss(out[0], y, out[1])
        return nn.functional.mse_loss(out, y)

    train(net, torch.tensor(x[:60]).float(), torch.tensor(y[:60]).float(), loss, 80)
    estimator = AfterdropRegressor(net, likelihood, grid=GRID, num_samples=8, batch_size=25)
    estimator.fit(x[60:], y[60:])
    mean, deviation = estimator.predict(x[60:], return_std=True)
    expected = estimator.choice_.predictor(net)(torch.tensor(x[60:]).float())
    np.testing.assert_allclose(mean, expected.mean, atol=1e-6)
    np.testing.assert_allclose(deviation**2, expected.variance, atol=1e-5)
    assert estimator.score(x[60:], y[60:]) > 0.4
    again = AfterdropRegressor.from_choice(net, estimator.choice_)
    np.testing.assert_allclose(again.predict(x[:5]), estimator.predict(x[:5]))


def single(x):
    return x.astype(np.float32)


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_a_skorch_net_is_taken_with_its_module_loss_and_loader(criterion):
    x, codes = held_out(0, 200)
    layers = [nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)]
    if criterion is nn.NLLLoss:  # skorch's default: softmax inside, logarithm in the loss
        layers.append(nn.Softmax(-1))
    net = NeuralNetClassifier(
        nn.Sequential(*layers), criterion=criterion, max_epochs=5, lr=0.1, verbose=0
    ).fit(single(x[:100]), codes[:100])
    settings = {"grid": ad.Grid((0,), (0,)), "num_samples": 2}
    estimator = AfterdropClassifier(net, **settings).fit(single(x[100:]), codes[100:])
    assert estimator.classes_.tolist() == [0, 1, 2]
    plain = AfterdropClassifier.from_choice(
        net, replace(estimator.choice_, member=ad.DET), classes=[0, 1, 2]
    ).predict_proba(single(x))
    np.testing.assert_allclose(plain, net.predict_proba(single(x)), atol=1e-6)
    again = clone(AfterdropClassifier(FrozenEstimator(net), **settings))
    again.fit(single(x[100:]), codes[100:])
    np.testing.assert_array_equal(
        again.predict_proba(single(x)), estimator.predict_proba(single(x))
    )


def test_a_binary_and_a_regressing_skorch_net():
    x, _ = held_out(0, 160)
    y = single(x.sum(1) > 0)
    net = NeuralNetBinaryClassifier(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
        max_epochs=10,
        lr=0.1,
        verbose=0,
    ).fit(single(x[:80]), y[:80])
    binary = AfterdropClassifier(net, grid=GRID, num_samples=4).fit(single(x[80:]), y[80:])
    assert binary.choice_.request.likelihood == "binary"
    assert binary.score(single(x[80:]), y[80:]) > 0.7
    numbers = single(x.sum(1, keepdims=True))
    net = NeuralNetRegressor(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)),
        max_epochs=20,
        lr=0.05,
        verbose=0,
    ).fit(single(x[:80]), numbers[:80])
    regressor = AfterdropRegressor(net, grid=GRID, num_samples=4)
    assert regressor.fit(single(x[80:]), numbers[80:]).score(single(x[80:]), numbers[80:]) > 0.5


def test_mapie_makes_conformal_sets_of_the_choice():
    estimator = fitted()  # on examples that neither the quantile nor the test sees
    x, codes = held_out(5, 800)
    conformal = SplitConformalClassifier(estimator, confidence_level=0.8, prefit=True)
    conformal.conformalize(x[:400], LABELS[codes[:400]])
    _, sets = conformal.predict_set(x[400:])
    columns = np.searchsorted(estimator.classes_, LABELS[codes[400:]])
    covered = sets[np.arange(400), columns, 0].mean()
    # Standard error of the coverage over conformal and test examples: sqrt(2 · 0.8 · 0.2 / 400).
    assert covered == pytest.approx(0.8, abs=3 * 0.028)


class Trained(AfterdropClassifier):
    """Trains a small net on the data that it chooses on, which scikit-learn's checks need."""

    def __init__(self, num_samples=2):
        super().__init__(None, grid=ad.Grid((0,), (0, 1)), num_samples=num_samples)

    def fit(self, X, y):
        from sklearn.utils.multiclass import check_classification_targets
        from sklearn.utils.validation import validate_data

        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        torch.manual_seed(0)
        classes, codes = np.unique(y, return_inverse=True)
        self.model = nn.Sequential(
            nn.Linear(X.shape[1], 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, len(classes))
        )
        inputs = torch.tensor(X, dtype=torch.float32)
        train(self.model, inputs, torch.tensor(codes), nn.functional.cross_entropy, 100)
        return super().fit(X, y)


@pytest.mark.slow
@parametrize_with_checks(
    [Trained()],
    expected_failed_checks=lambda _: {"check_dont_overwrite_parameters": "fit trains the model"},
)
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)
