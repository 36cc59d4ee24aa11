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
    "activations of two layers": ({"hidden_sizes": [5, 5]}, ACTIVATIONS),
    "activations of two samples, projected": (
        {"embedding_size": 3, "output_sharing": "sequence"},
        {**ACTIVATIONS, "samples": 2},
    ),
    "activation alone": ({}, {"activation_penalty": 20.0}),
    "temporal activation alone, without output dropout": (
        {"output_dropout": 0.0},
        {"temporal_activation_penalty": 10.0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_two_steps_match_the_plain_form(name, tmp_path, device):
    """Losses and penalties within 1e-6 (tf32: 1e-3); updates and states within 1e-4 (3e-2)."""
    model, objective = CASES[name]
    config = tiny_run.config(tiny_run.write_text(tmp_path / "text"), model, objective=objective)
    run = tiny_run.trainer(config, device)
    fused = FusedText(run.task, run.model, run.optimiser, 0, torch.float32)
    first = [p.detach().clone() for p in run.model.parameters()]
    plain = PlainSteps(config, run.task, copy.deepcopy(run.model).double())
    close = within(device, 1e-6, 1e-3)
    for number in range(2):
        loss = float(fused.step(number))
        kept = fused.steps.masks.kept > 0
        wanted = float(plain.step(number, drawn_masks(fused.steps), kept))
        assert abs(loss / wanted - 1) < close
        assert (plain.penalties > 0.01 * wanted).all()  # large enough to matter
        assert len(fused.steps.numbers) == 2 + len(plain.penalties)
        torch.testing.assert_close(
            fused.steps.numbers[2:].cpu(), plain.penalties.detach().cpu(), rtol=close, atol=0
        )
        assert (fused.steps.numbers[1] > 0) == (config.objective.samples > 1)
    near = within(device, 1e-4, 3e-2)
    for start, found, exact in zip(first, run.model.parameters(), plain.parameters):
        rounded = 2 * 2**-24 * float(start.norm() / (exact.detach() - start).norm())
        assert relative(found - start, exact - start) < near + rounded
    for found, exact in zip(run.task.state, plain.state):
        assert all(relative(a, b) < near for a, b in zip(found, exact))
