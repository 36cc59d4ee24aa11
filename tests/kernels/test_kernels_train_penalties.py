"""Penalties in training steps of `FusedText` against the plain form in float64, same masks."""

import copy

import kernel_device
import pytest
import tiny_run
import torch
from kernel_device import relative, within

from afterdrop.train.fused_text import FusedText
from oracles.train_step import PlainSteps, drawn_masks

pytestmark = kernel_device.quiet
device = kernel_device.device

# Ten times the published coefficients, because the states of this small model are small.
ACTIVATIONS = {"activation_penalty": 20.0, "temporal_activation_penalty": 10.0}
CASES = {
    "activations of two layers, without output dropout": (
        {"hidden_sizes": [5, 5], "output_dropout": 0.0},
        {**ACTIVATIONS, "window": 2},
    ),
    "activations of a mixture": (
        {"softmax_components": 3, "embedding_size": 4, "projection_dropout": 0.2},
        ACTIVATIONS,
    ),
    "fraternal, with activations": (
        {"state_dropout": 0.2, "output_sharing": "sequence"},
        {**ACTIVATIONS, "fraternal_penalty": 1.0, "state_reset": 0.4},
    ),
    "fraternal, untied and projected": (
        {"embedding_size": 3, "tied": False, "projection_dropout": 0.2},
        {"fraternal_penalty": 1.0},
    ),
    "expectation-linear, with activations of two samples": (
        {"state_dropout": 0.2, "output_sharing": "sequence"},
        {**ACTIVATIONS, "expectation_linear_penalty": 2.0, "samples": 2, "state_reset": 0.4},
    ),
    "expectation-linear, projected, with activation alone": (
        {"embedding_size": 3, "projection_dropout": 0.2},
        {"expectation_linear_penalty": 2.0, "activation_penalty": 20.0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_two_steps_match_the_plain_form(name, tmp_path, device):
    """Losses within 1e-6, updates and states within 1e-4.

    Penalties within 3e-6: differences have larger rounding errors than a loss.
    """
    model, objective = CASES[name]
    config = tiny_run.config(tiny_run.write_text(tmp_path / "text"), model, objective=objective)
    run = tiny_run.trainer(config, device)
    fused = FusedText(run.task, run.model, run.optimiser, 0, torch.float32)
    first = [p.detach().clone() for p in run.model.parameters()]
    plain = PlainSteps(config, run.task, copy.deepcopy(run.model).double())
    run._fused, run._fusible, run._stepped = fused, True, True  # as on a GPU after its first step
    totals = 0.0
    for number in range(2):
        run.train_step()
        kept = fused.steps.masks.kept > 0
        wanted = float(plain.step(number, drawn_masks(fused.steps), kept))
        loss, effective, *penalties = fused.steps.numbers.tolist()
        assert abs(loss / wanted - 1) < within(device, 1e-6)
        assert (plain.penalties > 0.01 * wanted).all()  # large enough to matter
        assert penalties == pytest.approx(plain.penalties.tolist(), rel=within(device, 3e-6))
        assert (effective > 0) == (config.objective.samples > 1)
        totals += plain.penalties.detach().cpu()
    recorded = [value * 2 * run.task.window for value in run.mean_penalties().values()]
    assert recorded == pytest.approx(totals.tolist(), rel=within(device, 3e-6))
    near = within(device, 1e-4)
    for start, found, exact in zip(first, run.model.parameters(), plain.parameters):
        rounded = 2 * 2**-24 * float(start.norm() / (exact.detach() - start).norm())
        assert relative(found - start, exact - start) < near + rounded
    for found, exact in zip(run.task.state, plain.state):
        assert all(relative(a, b) < near for a, b in zip(found, exact))
