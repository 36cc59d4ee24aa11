"""Training steps of `FusedText` against the model in float64 with the same masks."""

import copy

import kernel_device
import pytest
import tiny_run
import torch
from kernel_device import relative, within

from afterdrop.train import fused_mixture
from afterdrop.train.averaging import WeightAverage
from afterdrop.train.fused_text import FusedText
from afterdrop.train.objective import effective_samples
from afterdrop.train.validation import validate
from oracles.train_step import PlainSteps, drawn_masks
from oracles.waits import CountWaits

pytestmark = kernel_device.quiet
device = kernel_device.device

MODELS = {
    "step masks, two layers": {"hidden_sizes": [5, 5], "state_dropout": 0.2, "output_dropout": 0},
    "window masks, untied, plain stack": {
        "hidden_sizes": [4, 4],
        "tied": False,
        "stacking": "plain",
        "input_sharing": "sequence",
        "output_sharing": "sequence",
        "state_dropout": 0.2,
        "state_sharing": "step",
    },
    "dropped embedding rows": {"embedding_dropout": 0.3, "embedding_size": 4},
    "projection, plain gate": {
        "embedding_size": 3,
        "input_gate": "plain",
        "projection_dropout": 0.2,
        "projection_sharing": "sequence",
    },
    "untied with projection, no dropout": {
        "embedding_size": 6,
        "tied": False,
        "input_dropout": 0.0,
        "output_dropout": 0.0,
    },
    "Mogrifier": {
        "hidden_sizes": [5, 5],
        "embedding_size": 4,
        "mogrifier_rounds": 3,
        "mogrifier_rank": 2,
        "state_dropout": 0.2,
    },
    "three samples": {
        "hidden_sizes": [5, 5],
        "state_dropout": 0.2,
        "output_sharing": "sequence",
        "embedding_dropout": 0.2,
    },
    "mixture": {"softmax_components": 3, "embedding_size": 4, "projection_dropout": 0.2},
    "mixture, two samples, untied": {
        "softmax_components": 2,
        "tied": False,
        "projection_sharing": "sequence",
        "state_dropout": 0.2,
    },
}
OBJECTIVES = {
    "Mogrifier": {"state_reset": 0.4},
    "step masks, two layers": {"state_reset": 0.4},
    "three samples": {"state_reset": 0.4, "samples": 3},
    "mixture, two samples, untied": {"state_reset": 0.4, "samples": 2},
}


@pytest.fixture
def folder(tmp_path):
    return tiny_run.write_text(tmp_path / "text")


def fused_run(config, device, **options):
    run = tiny_run.trainer(config, device)
    fused = FusedText(run.task, run.model, run.optimiser, run.step, torch.float32, **options)
    return run, fused


def advance(run, fused, steps):
    """Takes steps as `Trainer.train_step` does with kernels; returns the losses."""
    losses = []
    for _ in range(steps):
        losses.append(float(fused.step(run.step)))
        run.step += 1
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_match_the_model(name, folder, device, monkeypatch):
    """Losses within 1e-6; updates, squares and states within 1e-4."""
    if name == "mixture":  # logits of 3 rows, 3 components and 16 classes, for two time steps of 3
        monkeypatch.setattr(fused_mixture, "_AT_ONCE", 2 * 3 * 3 * 16)
    objective = {"state_reset": 0.0} | OBJECTIVES.get(name, {})
    config = tiny_run.config(folder, MODELS[name], objective=objective)
    run, fused = fused_run(config, device)
    first = [p.detach().clone() for p in run.model.parameters()]
    plain = PlainSteps(config, run.task, copy.deepcopy(run.model).double())
    resets = 0
    for number in range(3):
        loss = float(fused.step(number))
        kept = fused.steps.masks.kept > 0
        resets += int((~kept).sum())
        wanted = float(plain.step(number, drawn_masks(fused.steps), kept))
        assert abs(loss / wanted - 1) < within(device, 1e-6)
        if (samples := config.objective.samples) > 1:
            effective = effective_samples(plain.logits, plain.targets, samples=samples).mean()
            assert 1.1 < effective < samples - 0.1  # masks differ
            assert relative(fused.steps.numbers[1], effective) < within(device, 1e-6)
    assert (resets > 0) == (objective["state_reset"] > 0)
    near = within(device, 1e-4)
    for start, found, exact in zip(first, run.model.parameters(), plain.parameters):
        # Each step rounds the float32 weight, which matters where weights hardly move.
        rounded = 3 * 2**-24 * float(start.norm() / (exact.detach() - start).norm())
        assert relative(found - start, exact - start) < near + rounded
        square = run.optimiser.state[found]["square"]
        assert relative(square, plain.optimiser.state[exact]["square"]) < near
    for found, exact in zip(run.task.state, plain.state):
        assert all(relative(a, b) < near for a, b in zip(found, exact))
    assert run.optimiser.param_groups[0]["step"] == 3
    assert_packed(fused)
    assert_summed(fused)
    if name == "mixture":
        assert fused.steps.output._parts == [range(2), range(2, 3)]


def assert_packed(fused):
    """The copies that the update wrote equal those that `pack` makes."""
    copies = fused.steps.copies
    held = [copies.embedding, copies.softmax, copies.stack.w_x, copies.stack.w_h, copies.stack.bias]
    held += [] if copies.projection is None else [copies.projection]
    held += [] if copies.mixture is None else [copies.mixture.weight, copies.mixture.bias]
    if (rounds := copies.stack.rounds) is not None:
        held += [rounds.down, rounds.up, rounds.bias]
    before = [tensor.clone() for tensor in held]
    copies.pack()
    assert all(torch.equal(a, b) for a, b in zip(before, held))


def assert_summed(fused):
    """Ranks sum the gradient of every parameter."""
    summed = {tensor.untyped_storage().data_ptr() for tensor in fused.steps.summed}
    slots = fused.steps.adam.slots
    assert len(slots) == len(list(fused.model.parameters()))
    assert all(slot.grad.untyped_storage().data_ptr() in summed for slot in slots)


def test_every_step_draws_every_mask(folder, device):
    """Also those drawn on the second stream; the test above uses masks as they are."""
    model = {"embedding_size": 3, "hidden_sizes": [5, 5], "state_dropout": 0.5}
    model |= {f"{name}_dropout": 0.5 for name in ("input", "inter_layer", "output", "projection")}
    run, fused = fused_run(tiny_run.config(folder, model), device)
    found = []
    for _ in range(2):
        advance(run, fused, 1)
        masks = [*fused.steps.masks.units.values(), *fused.steps.stack.masks]
        found.append([mask.clone() for mask in masks])
        assert len(masks) == 5
        assert all((mask == 0).any() and (mask == 2).any() for mask in masks)
    assert not any(torch.equal(a, b) for a, b in zip(*found))


def test_float16_operands_of_a_mixture_keep_its_gradients(folder, monkeypatch, device):
    """Loss within 1e-3 (GPU: 2e-3), gradients within 1e-2 (5e-2); the stack stays float32.

    With an epsilon far above √v the step is a multiple of the gradient.
    """
    monkeypatch.setattr("afterdrop.models.fused.fine", lambda dtype: torch.float16)
    model = {"softmax_components": 15, "embedding_size": 9, "projection_dropout": 0.3}
    config = tiny_run.config(
        folder,
        model,
        objective={"l2_penalty": 0.0},
        optimiser={"learning_rate": 3e4, "epsilon": 1e3, "max_norm": None},
    )
    run, fused = fused_run(config, device)
    assert fused.steps.copies.mixture.weight.dtype == torch.float16
    first = [p.detach().clone() for p in run.model.parameters()]
    plain = PlainSteps(config, run.task, copy.deepcopy(run.model).double())
    loss, kept = float(fused.step(0)), fused.steps.masks.kept > 0
    wanted = float(plain.step(0, drawn_masks(fused.steps), kept))
    assert abs(loss / wanted - 1) < within(device, 1e-3, 2e-3)
    for start, found, exact in zip(first, run.model.parameters(), plain.parameters):
        assert relative(found - start, exact - start) < within(device, 1e-2, 5e-2)


def test_a_resumed_run_draws_the_same_masks_and_makes_the_same_steps(folder, device):
    """Masks and, in the interpreter, weights are equal to the bit; on a GPU within 1e-6."""
    model = {"state_dropout": 0.2}
    config = tiny_run.config(folder, model, objective={"state_reset": 0.3, "samples": 2})
    run, fused = fused_run(config, device)
    advance(run, fused, 2)
    saved = copy.deepcopy(run.capture())
    advance(run, fused, 1)
    later = tiny_run.trainer(config, device)
    torch.rand(3)  # earlier draws must not matter
    later.restore(saved)
    resumed = FusedText(later.task, later.model, later.optimiser, later.step, dtype=torch.float32)
    advance(later, resumed, 1)
    masks = [[*drawn_masks(one.steps), one.steps.masks.kept] for one in (fused, resumed)]
    assert len(masks[0]) == 4 and all(torch.equal(a, b) for a, b in zip(*masks))
    there, here = run.capture(), later.capture()
    assert there.facts == here.facts and there.tensors.keys() == here.tensors.keys()
    for name, tensor in there.tensors.items():
        if not name.startswith("random"):
            assert relative(here.tensors[name], tensor) <= within(device, 0.0), name


def test_a_validation_before_the_first_step_does_not_change_the_kernels_weights(
    folder, device, monkeypatch
):
    """As after a resume: averaged weights are in place during the validation, but not after it."""
    run, fused = fused_run(tiny_run.config(folder, averaging={"latest": 1}), device)
    advance(run, fused, 3)
    run.average = WeightAverage(run.model)
    run.average.update()
    with torch.no_grad():
        for parameter in run.parameters:
            parameter.add_(0.1)
    monkeypatch.setattr(run, "_fused", None)
    monkeypatch.setattr(run, "_fusible", True)
    run.validate(lambda: False)
    table = run._kernels().steps.copies.embedding
    size = run.model.embedding.shape
    near = {"rtol": 1e-2, "atol": 1e-3}  # bfloat16
    torch.testing.assert_close(table[: size[0], : size[1]].float(), run.model.embedding, **near)


def test_steps_continue_with_the_same_tensors_after_averaged_weights_were_in_place(folder, device):
    """The update uses addresses of parameters; on a GPU sums have no fixed order (1e-6)."""
    config = tiny_run.config(folder)
    (plain, alone), (run, fused) = (fused_run(config, device) for _ in range(2))
    for of, steps in ((plain, alone), (run, fused)):
        advance(of, steps, 2)
    average = WeightAverage(run.model)
    average.update()
    advance(plain, alone, 2)
    advance(run, fused, 1)
    with average.in_place():
        validate(fused.validation_batches())
    advance(run, fused, 1)
    for found, wanted in zip(run.parameters, plain.parameters):
        assert relative(found, wanted) <= within(device, 0.0)


def test_a_new_learning_rate_and_a_second_load_of_windows_reach_the_device(folder, device):
    run, fused = fused_run(tiny_run.config(folder), device, ahead=2)
    advance(run, fused, 3)  # the third window is the first of the second load
    inputs, targets = run.task.stripes[2]
    assert torch.equal(fused.windows[0], torch.stack([inputs.t(), targets.t()]).flatten(1))
    held = [p.detach().clone() for p in run.model.parameters()]
    run.optimiser.param_groups[0]["lr"] = 0.0
    advance(run, fused, 1)
    assert all(torch.equal(a, b) for a, b in zip(held, run.model.parameters()))


@pytest.mark.parametrize("model", [{"hidden_sizes": [5, 5]}, {"embedding_size": 3}], ids=str)
@pytest.mark.parametrize("max_targets", [None, 5])
def test_validation_matches_the_model(model, max_targets, folder, device):
    """The same targets; XE within 1e-5. A second pass gives the same."""
    config = tiny_run.config(folder, model, validation={"max_targets": max_targets})
    run, fused = fused_run(config, device)
    run.model.eval()
    with torch.no_grad():
        plain = validate(run.task.validation_batches(run.model))
    for _ in range(2):  # each starts from a zero state
        found = validate(fused.validation_batches())
        assert found.targets == plain.targets
        near = within(device, 1e-5)
        assert abs(found.xe - plain.xe) < near
        assert abs(found.xe_optimal - plain.xe_optimal) < near
        assert abs(found.temperature / plain.temperature - 1) < 100 * near  # XE is flat there


def test_no_window_of_a_validation_waits_for_the_device(folder, device):
    """Some have padding. The first validation copies the text to the device as one tensor."""
    run, fused = fused_run(tiny_run.config(folder, {"embedding_size": 3}), device)
    validate(fused.validation_batches())
    held = run.task.validation_windows
    assert 0 < sum(window.places is not None for window in held) < len(held)
    assert len({window.inputs.untyped_storage().data_ptr() for window in held}) == 1
    with CountWaits() as waits:
        batches = list(fused.validation_batches())
    assert waits.ops == []
    assert run.task.validation_windows is held
    assert all(window.targets is targets for window, (_, targets) in zip(held, batches))
