"""Copies learn the chosen member, the same way every time, and the share they keep is paired."""

import copy
import dataclasses
import math
import threading

import numpy as np
import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.distillation.kept_gain import kept_gain
from afterdrop.distillation.teacher import Teacher, cross_entropy
from afterdrop.errors import DataError, MemberError, ScoresError
from afterdrop.evaluation.batches import Batch
from afterdrop.evaluation.likelihoods.categorical import Categorical

GRID = ad.Grid((0, 1), (0, 1))


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(state, other):
    return all(torch.equal(value, other[name]) for name, value in state.items())


def test_a_copy_learns_the_distributions_of_the_choice(case):
    choice, model, data = case
    before = weights(model)
    found = ad.distil(choice, model, data, valid=data, epochs=40, lr=3e-3)
    assert same(before, weights(model)) and not same(before, weights(found.model))
    x = torch.cat([x for x, _ in data])
    learned = choice.predictor(model)(x)
    with torch.no_grad():
        divergence = [
            (learned.exp() * (learned - m(x).log_softmax(-1))).sum(-1).mean().item()
            for m in (model, found.model)
        ]
    assert divergence[1] < divergence[0] / 5
    assert found.choice.member.deterministic and found.member == found.choice.member
    assert found.kept.share > 0.5 and found.kept.split == "valid"
    assert "one pass keeps" in str(found)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(case):
    choice, model, data = case
    found = [
        weights(ad.distil(choice, model, data, epochs=2, seed=seed).model) for seed in (1, 1, 2)
    ]
    assert same(found[0], found[1]) and not same(found[0], found[2])


def test_a_model_that_another_thread_runs_is_copied_between_its_passes(case):
    choice, model, data = case
    predictor, stop = choice.predictor(model), threading.Event()

    def busy():
        while not stop.is_set():
            predictor(data[0][0])

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        found = [ad.distil(choice, model, data, epochs=1).model for _ in range(10)]
    finally:
        stop.set()
        thread.join()
    hooks = [m._forward_pre_hooks or m._forward_hooks for copied in found for m in copied.modules()]
    assert not any(hooks)


def test_distributions_that_do_not_fit_are_predicted_again(case, monkeypatch):
    choice, model, data = case
    one = ad.distil(choice, model, iter(data), epochs=3)  # an iterator is read once
    monkeypatch.setattr("afterdrop.distillation.teacher.KEPT_BYTES", 500)
    again = ad.distil(choice, model, data, epochs=3)
    for a, b in zip(one.model.parameters(), again.model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_kept_distributions_belong_to_inputs_not_to_batches(case):
    choice, model, data = case
    predictor = choice.predictor(model)
    teacher = Teacher(predictor, Categorical(class_dim=-1))
    x, y = (torch.cat(parts) for parts in zip(*data))

    def batch(rows):
        return Batch(x[rows], y[rows], 0, len(rows), x[rows], y[rows])

    teacher.log_probs(batch(torch.arange(60)))
    rows = torch.tensor([50, 3, 17])
    calls = copy.copy(teacher)
    calls.predictor = None  # nothing may be predicted again
    torch.testing.assert_close(calls.log_probs(batch(rows)), predictor(x[rows]))


class Centred(nn.Module):
    """Predictions depend on the other rows, or on an input that all rows share."""

    def __init__(self):
        super().__init__()
        self.dropout, self.output = nn.Dropout(0.5), nn.Linear(5, 4)

    def forward(self, x, shift=None):
        return self.output(self.dropout(x - (x.mean(0) if shift is None else shift)))


def test_what_more_than_an_example_decides_is_not_kept_by_example():
    torch.manual_seed(0)
    x, y = torch.randn(6, 5), torch.arange(6) % 4
    for others in ((x[:2], x[4:]), ((x[:2], torch.ones(5)), (x[:2], torch.zeros(5)))):
        predictor = ad.Predictor(Centred(), ad.AMC, num_samples=4)
        teacher = Teacher(predictor, Categorical(class_dim=-1))
        whole = x if isinstance(others[0], torch.Tensor) else (x, torch.full((5,), 2.0))
        for inputs in (whole, *others):
            size = len(inputs[0]) if isinstance(inputs, tuple) else len(inputs)
            batch = Batch(inputs, y[:size], 0, size, inputs, y[:size])
            expected = predictor(*inputs) if isinstance(inputs, tuple) else predictor(inputs)
            torch.testing.assert_close(teacher.log_probs(batch), expected)


def test_positions_without_a_target_do_not_count():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Dropout(0.5), nn.Linear(8, 9))
    tokens, targets = torch.randint(9, (6, 5)), torch.randint(9, (6, 5))
    scores = ad.evaluate(model, [(tokens, targets)], grid=GRID, num_samples=4)
    choice = dataclasses.replace(ad.select(scores, resamples=0, folds=0), member=ad.AMC)
    padded = targets.clone()
    padded[:, 3:] = -100
    short = ad.distil(choice, model, [(tokens[:, :3], targets[:, :3])], epochs=2)
    long = ad.distil(choice, model, [(tokens, padded)], epochs=2)
    for a, b in zip(short.model.parameters(), long.model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    empty = torch.full_like(targets, -100)
    with pytest.raises(DataError, match="no targets that count"):
        ad.distil(choice, model, [(tokens, empty)], epochs=1)


def test_the_loss_is_the_cross_entropy_of_the_definition():
    rng = np.random.default_rng(0)
    logits, p = rng.normal(size=(7, 4)), rng.dirichlet(np.ones(4), size=7)
    log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -(p * log_q).sum(-1).mean()
    found = cross_entropy(torch.tensor(logits), torch.tensor(p).log())
    assert found.item() == pytest.approx(expected, abs=1e-6)
    impossible = torch.tensor([[0.0, -math.inf]])
    assert cross_entropy(impossible, impossible).item() == 0


def test_the_share_and_its_error_are_those_of_a_jackknife(case):
    choice, model, data = case
    scores = ad.evaluate(model, data, grid=GRID, num_samples=8)
    found = ad.distil(choice, model, data, valid=data, epochs=5)
    copied = ad.evaluate(found.model, data, grid=ad.Grid((0,), (0,)), num_samples=8)
    kept = kept_gain(scores, choice.member, choice.deterministic, copied, found.member)
    plain = scores.values(ad.DET).whole.numpy()
    gain = plain - scores.values(choice.member).whole.numpy()
    own = plain - copied.values(found.member).whole.numpy()
    assert kept.share == pytest.approx(own.mean() / gain.mean(), rel=1e-9)
    n = len(gain)
    without = [np.delete(own, i).mean() / np.delete(gain, i).mean() for i in range(n)]
    jackknife = math.sqrt((n - 1) / n * np.square(without - np.mean(without)).sum())
    assert kept.error == pytest.approx(jackknife, rel=0.15)


def test_other_data_and_no_gain_are_told_apart(case):
    _, model, data = case
    scores = ad.evaluate(model, data, grid=GRID, num_samples=4)
    less = ad.evaluate(model, data[:2], grid=GRID, num_samples=4)
    with pytest.raises(ScoresError, match="other targets"):
        kept_gain(scores, ad.AMC, ad.DET, less, ad.DET)
    nothing = kept_gain(scores, ad.DET, ad.DET, scores, ad.DET)
    assert math.isnan(nothing.share) and "nothing to keep" in str(nothing)


def test_what_cannot_be_distilled_is_refused(case):
    choice, model, data = case
    with pytest.raises(MemberError, match="one pass already"):
        ad.distil(dataclasses.replace(choice, member=ad.DET), model, data)
    labels = [(x, torch.ones(len(x), 4)) for x, _ in data]
    scores = ad.evaluate(model, labels, likelihood="multilabel", grid=GRID, num_samples=4)
    several = dataclasses.replace(ad.select(scores, resamples=0, folds=0), member=ad.AMC)
    with pytest.raises(DataError, match="multilabel targets"):
        ad.distil(several, model, labels)
    for options, message in (({"epochs": 0}, "epochs=0"), ({"lr": 0.0}, r"lr=0\.0")):
        with pytest.raises(DataError, match=message):
            ad.distil(choice, model, data, **options)
    with pytest.raises(DataError, match="smaller lr"):
        ad.distil(choice, model, data, lr=math.inf)
    frozen = copy.deepcopy(model).requires_grad_(False)
    with pytest.raises(DataError, match="requires a gradient"):
        ad.distil(choice, frozen, data)
