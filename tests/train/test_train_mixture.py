"""Training a mixture of softmaxes: the loss from targets alone, ranks, resuming."""

import pytest
import torch

from afterdrop import train
from afterdrop.data import load_text
from afterdrop.train.objective import effective_samples, step_loss, target_loss
from afterdrop.train.text_task import TextTask
from afterdrop.train.whole_masks import RankRows

MIXTURE = {
    "model.softmax_components": 3,
    "model.embedding_size": 5,
    "model.output_dropout": 0.3,
    "model.projection_dropout": 0.2,
}


def task_of(config, folder):
    torch.manual_seed(0)
    task = TextTask(config, load_text(folder), torch.device("cpu"))
    return task, task.build_model().double()


def losses(config, folder, rows=None, steps=2):
    """Losses of some steps, which carry states, and the gradients of their sum."""
    task, model = task_of(config, folder)
    if rows is not None:
        task.rows = rows
    torch.manual_seed(1)
    found = [task.loss(model, step) for step in range(steps)]
    sum(loss.data for loss in found).backward()
    return found, [p.grad.clone() for p in model.parameters()]


def by_all_classes(config, folder, monkeypatch):
    """The same from the log-probabilities of all classes, by autograd."""

    def data_loss(task, model, found, targets):
        section = config.objective
        return step_loss(
            model.logits(found),
            targets,
            samples=section.samples,
            alpha=section.alpha,
            whole_batch=task.rows.batch,
        )

    with monkeypatch.context() as patch:
        patch.setattr(TextTask, "_data_loss", data_loss)
        return losses(config, folder)


@pytest.mark.parametrize("samples", [1, 3])
def test_the_targets_alone_give_the_loss_and_gradient(
    text_config, text_folder, monkeypatch, samples
):
    config = text_config.override({**MIXTURE, "objective.samples": samples})
    found, gradients = losses(config, text_folder)
    wanted, wanted_gradients = by_all_classes(config, text_folder, monkeypatch)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one.data, other.data)
        assert (one.effective is None) == (samples == 1)
        if one.effective is not None:
            torch.testing.assert_close(one.effective, other.effective)
    for got, want in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-7)


def test_other_means_of_samples_use_all_classes(text_config, text_folder, monkeypatch):
    config = text_config.override({**MIXTURE, "objective.samples": 2, "objective.alpha": 0.5})
    found, wanted = losses(config, text_folder), by_all_classes(config, text_folder, monkeypatch)
    assert all(torch.equal(a.data, b.data) for a, b in zip(found[0], wanted[0]))


def test_shares_of_the_batch_add_up_to_the_whole(text_config, text_folder):
    config = text_config.override({**MIXTURE, "objective.samples": 2})
    whole, gradients = losses(config, text_folder)
    shares = [
        losses(config, text_folder, RankRows(slice(at, at + 2), batch=4, samples=2))
        for at in (0, 2)
    ]
    for step, loss in enumerate(whole):
        torch.testing.assert_close(sum(share[0][step].data for share in shares), loss.data)
    for parts in zip(gradients, *(share[1] for share in shares), strict=True):
        torch.testing.assert_close(parts[0], parts[1] + parts[2])


def test_target_loss_is_the_step_loss_at_alpha_one():
    logits, targets = torch.randn(3 * 2, 4, 5, dtype=torch.float64), torch.randint(5, (2, 4))
    lp = logits.log_softmax(-1).gather(-1, targets.repeat(3, 1).unsqueeze(-1)).squeeze(-1)
    found = target_loss(lp, samples=3, whole_batch=8)
    torch.testing.assert_close(
        found, step_loss(logits, targets, samples=3, alpha=1.0, whole_batch=8)
    )
    wanted = effective_samples(logits, targets, samples=3).mean() * 2 / 8
    torch.testing.assert_close(found[1], wanted)


def test_a_run_learns_resumes_and_loads(text_config, tmp_path):
    config = text_config.override({**MIXTURE, "schedule.intervals": 3})
    options = {"device": "cpu", "progress": False}
    whole = train.run(config, tmp_path / "whole", **options)
    stop = train.run(config, tmp_path / "parts", watch=lambda line: "stop", **options)
    assert not stop.finished and train.run(config, tmp_path / "parts", **options).finished
    one, other = (train.load_model(tmp_path / name).model for name in ("whole", "parts"))
    assert one.mixture.components == 3
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert whole.best["xe"] < 3.0
