"""Penalties of the objective against their equations, with all logits formed, in float64."""

import json
import math
import signal

import pytest
import torch
from torch.nn import functional as F

from afterdrop import kernels, recipes, train
from afterdrop.data import load_text
from afterdrop.data.catalogue import load
from afterdrop.ranks import Ranks
from afterdrop.train import ConfigError, fused_text
from afterdrop.train.image_task import ImageTask
from afterdrop.train.penalties import active_penalties, logit_distance
from afterdrop.train.text_task import TextTask
from afterdrop.tune.search_space import Axis, Space, apply_point

CPU = torch.device("cpu")
FRATERNAL = {"objective.fraternal_penalty": 0.1}
LINEAR = {"objective.expectation_linear_penalty": 0.25}
ACTIVATIONS = {"objective.activation_penalty": 2.0, "objective.temporal_activation_penalty": 1.0}
TIED_ROWS = {"model.embedding_dropout": 0.3, "model.embedding_rows": "input_and_softmax"}
CASES = {
    "fraternal": FRATERNAL,
    "linear": LINEAR,
    "activations": ACTIVATIONS,
    "all with a second mask": FRATERNAL | ACTIVATIONS,
    "all with several samples": LINEAR | ACTIVATIONS | {"objective.samples": 3},
    "projection, untied": FRATERNAL | {"model.embedding_size": 5, "model.tied": False},
    "random softmax, fraternal": FRATERNAL | TIED_ROWS,
    "random softmax, linear": LINEAR | TIED_ROWS,
}


def oracle(model, inputs, targets, before, section):
    """The loss by the equations: sums over time, means over rows, every logit formed."""
    tops = []
    hook = model.stack.register_forward_hook(lambda module, args, y: tops.append(y[0]))
    dropped = []
    other = model.output_dropout.register_forward_hook(lambda module, args, y: dropped.append(y))
    rows, time = targets.shape[0], targets.shape[1]
    samples = section.samples
    repeated = inputs.repeat(samples, 1)
    one, _ = model(repeated, before)
    probs = one.softmax(-1).unflatten(0, (samples, rows)).mean(0)
    total = -probs.gather(-1, targets.unsqueeze(-1)).log().sum() / rows
    if section.fraternal_penalty:
        two, _ = model(inputs, before)
        total = (total + F.cross_entropy(two.flatten(0, 1), targets.flatten()) * time) / 2
        total = total + section.fraternal_penalty * time * (one - two).pow(2).mean()
    if section.expectation_linear_penalty:
        model.eval()
        still, _ = model(repeated, before)
        model.train()
        total = total + section.expectation_linear_penalty * time * (one - still).pow(2).mean()
    top, masked = tops[0], dropped[0]
    total = total + section.activation_penalty * time * masked.pow(2).mean()
    steps = [(top[t + 1] - top[t]).pow(2).mean() for t in range(time - 1)]
    total = total + section.temporal_activation_penalty * time * sum(steps) / len(steps)
    hook.remove()
    other.remove()
    return total


@pytest.mark.parametrize("case", CASES)
def test_the_loss_and_its_gradient_are_those_of_the_equations(case, text_config, text_folder):
    config = text_config.override({"model.output_dropout": 0.4, **CASES[case]})
    task = TextTask(config, load_text(text_folder), CPU)
    model = task.build_model().double()
    with torch.no_grad():
        model.softmax_bias.normal_()
    task.loss(model, 0)  # so that the next window has a state to start from
    state = tuple((h.clone(), c.clone()) for h, c in task.state)

    torch.manual_seed(7)
    before = task._before_window()
    inputs, targets = task.stripes[1]
    wanted = oracle(model, inputs, targets, before, config.objective)
    expected = torch.autograd.grad(wanted, list(model.parameters()))

    task.state = state
    torch.manual_seed(7)
    found = task.loss(model, 1)
    gradients = torch.autograd.grad(found.total, list(model.parameters()))
    torch.testing.assert_close(found.total, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients, expected):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert (found.penalties > 0).all() and found.data < found.total
    assert model.training
    rows = config.objective.batch_size * config.objective.samples
    assert task.state[0][0].shape == (rows, 8)  # the state of the first mask is carried


@pytest.mark.parametrize("changes", [FRATERNAL, LINEAR])
def test_the_loss_of_images_is_that_of_the_equations(changes):
    config = recipes.load("digits-mlp").config.override(changes | {"objective.batch_size": 50})
    task = ImageTask(config, load("builtin:digits"), CPU)
    model = task.build_model().double()
    task.train = task.train._replace(images=task.train.images.double())
    chosen = task._order(0)[:50]
    images, labels = task.train.images[chosen], task.train.labels[chosen]
    torch.manual_seed(3)
    one = model(images)
    wanted = F.cross_entropy(one, labels)
    if changes is FRATERNAL:
        two = model(images)
        wanted = (wanted + F.cross_entropy(two, labels)) / 2 + 0.1 * (one - two).pow(2).mean()
    else:
        still = model.eval()(images)
        model.train()
        wanted = wanted + 0.25 * (one - still).pow(2).mean()
    torch.manual_seed(3)
    torch.testing.assert_close(task.loss(model, 0).total, wanted, rtol=1e-12, atol=1e-12)


def test_output_dropout_alone_makes_the_fraternal_distance_twice_the_variance():
    """E (l₁ − l₂)² = 2 Var(l), and Var(l_c) = p/(1 − p) Σ_u E_cu² f_u² for dropped features."""
    torch.manual_seed(0)
    features, table = torch.randn(6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    p, draws = 0.3, 200_000
    masks = (torch.rand(2, draws, 6, dtype=torch.float64) >= p) / (1 - p)
    found = logit_distance(features * (masks[0] - masks[1]), table)
    variance = p / (1 - p) * (table.square() @ features.square()).mean()
    error = found.std() / math.sqrt(draws)
    assert abs(found.mean() - 2 * variance) < 4 * error < 0.02 * variance


@pytest.mark.parametrize("changes", [FRATERNAL | ACTIVATIONS, LINEAR | {"objective.samples": 2}])
def test_the_losses_of_ranks_sum_to_that_of_the_batch(changes, text_config, text_folder):
    config, text = text_config.override(changes), load_text(text_folder)
    tasks = [TextTask(config, text, CPU, Ranks(rank, 2)) for rank in (0, 1)]
    whole = TextTask(config, text, CPU)
    model = whole.build_model().double()

    def numbers(task):
        torch.manual_seed(5)
        return task.loss(model, 0).numbers()

    torch.testing.assert_close(numbers(tasks[0]) + numbers(tasks[1]), numbers(whole))


@pytest.mark.parametrize(
    "changes", [FRATERNAL | ACTIVATIONS, LINEAR | {"objective.samples": 2}], ids=["two", "still"]
)
def test_penalised_runs_resume_and_record_their_penalties(
    changes, text_config, tmp_path, monkeypatch
):
    config = text_config.override(changes | {"schedule.intervals": 2})

    def run(out):
        result = train.run(config, out, device="cpu", progress=False)
        lines = (out / "metrics.jsonl").read_text().splitlines()
        return result.finished, [json.loads(line) for line in lines]

    def interrupted(self, model, step, real=TextTask.loss):
        if step == 7:  # in the middle of an interval
            signal.raise_signal(signal.SIGINT)
        return real(self, model, step)

    _, whole = run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(TextTask, "loss", interrupted)
        finished, lines = run(tmp_path / "parts")
        assert not finished and len(lines) == 2
    finished, parts = run(tmp_path / "parts")
    assert finished
    first, *later = whole
    for name in active_penalties(config.objective):
        key = f"{name}_penalty"
        assert first[key] is None and all(line[key] > 0 for line in later)
        assert [line[key] for line in parts] == [line[key] for line in whole]
    assert [line["xe"] for line in parts] == [line["xe"] for line in whole]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (FRATERNAL | {"model.softmax_components": 2}, r"softmax_components=2; it compares logits"),
        ({"objective.fraternal_penalty": -1}, r"fraternal_penalty is -1; .*at least 0"),
        ({"objective.activation_penalty": math.nan}, "activation_penalty is nan"),
        (FRATERNAL | {"objective.samples": 2}, r"objective.samples=2; .*Set objective.samples"),
        (FRATERNAL | LINEAR, r"expectation_linear_penalty is 0.25; .*Set one of the two to 0"),
        (ACTIVATIONS | {"objective.window": 1}, r"objective.window=1; .*to 2 or more"),
    ],
)
def test_contradictions_are_refused(changes, message, text_config):
    with pytest.raises(ConfigError, match=message):
        text_config.override(changes)


@pytest.mark.parametrize("name", ["activation_penalty", "temporal_activation_penalty"])
def test_classifiers_have_no_recurrent_activations(name):
    with pytest.raises(ConfigError, match=rf"objective.{name} is 2.0; .*recurrent stack"):
        recipes.load("digits-mlp").config.override({f"objective.{name}": 2.0})


@pytest.mark.parametrize("changes", [FRATERNAL, LINEAR, ACTIVATIONS])
def test_kernels_refuse_penalties_only_where_passes_drop_different_rows(
    changes, text_config, text_folder, monkeypatch
):
    pytest.importorskip("triton", reason="kernels need Triton, which is not installed")
    monkeypatch.setattr(kernels, "why_not", lambda device: None)  # as if a CPU could run kernels

    def reason(config):
        task = TextTask(config, load_text(text_folder), CPU)
        return fused_text.why_not(config, task, task.build_model(), CPU)

    config = text_config.override(changes)
    assert reason(config) is None
    (name, value), *_ = changes.items()
    expected = None if changes is ACTIVATIONS else f"{name} is {value} with embedding_dropout 0.3"
    assert reason(config.override({"model.embedding_dropout": 0.3})) == expected


def test_penalties_can_be_searched(text_config):
    axis = Axis.parse("objective.fraternal_penalty=0.01:1:log")
    config = apply_point(text_config, Space((axis,)).point([0.5]))
    assert config.objective.fraternal_penalty == pytest.approx(0.1)


MIXTURE = {"model.softmax_components": 3, "model.embedding_size": 5}


@pytest.mark.parametrize("changes", [FRATERNAL, LINEAR])
def test_a_mixture_of_softmaxes_has_no_logits_to_compare(changes, text_config):
    with pytest.raises(ConfigError, match=r"softmax_components=3; it compares logits"):
        text_config.override(MIXTURE | changes)


def test_activations_of_a_mixture_are_penalised(text_config, text_folder):
    task = TextTask(text_config.override(MIXTURE | ACTIVATIONS), load_text(text_folder), CPU)
    model = task.build_model()
    torch.manual_seed(7)
    found = task.loss(model, 0)
    torch.manual_seed(7)
    passed = model.activations(task.stripes[0][0])
    dropped, change = passed.dropped_tBH, passed.top_tBH[1:] - passed.top_tBH[:-1]
    wanted = torch.stack([6 * 2 * dropped.pow(2).mean(), 6 * change.pow(2).mean()])
    torch.testing.assert_close(found.penalties, wanted)
