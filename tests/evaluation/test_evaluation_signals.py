"""A signal at the worst moment: no batch is kept twice, and states belong to the batches kept."""

import signal

import pytest
import torch

import afterdrop as ad
from afterdrop.evaluation import resume_store
from afterdrop.evaluation.engines.generic import GenericEngine
from afterdrop.evaluation.result_buffer import ResultBuffer
from afterdrop.masks import model_guard
from afterdrop.models import LanguageModel, LanguageModelConfig
from oracles.zoo import mlp

MOMENTS = {
    "the results of a batch are there": (GenericEngine, "run"),
    "they were added": (ResultBuffer, "add"),
    "a part was written": (resume_store, "write_tensors"),
    "all results were joined": (ResultBuffer, "take"),
}


def classifier():
    torch.manual_seed(0)
    model, x, y = mlp(), torch.randn(24, 5), torch.randint(3, (24,))
    batches = list(zip(x.split(4), y.split(4)))
    grid = ad.Grid((0, 1), (0, 0.5, 1))
    return lambda resume: ad.evaluate(model, batches, grid=grid, num_samples=4, resume=resume)


def carried_text():
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(vocabulary=7, hidden_sizes=(6,), state_dropout=0.4))
    tokens, grid = torch.randint(1, 7, (60,)), ad.Grid((1,), (0, 1))
    options = {"grid": grid, "num_samples": 4, "window": 8, "carry": "sampled", "lines": False}
    return lambda resume: ad.evaluate_text(model, tokens, 0, resume=resume, **options)


def interrupt_after(monkeypatch, place, name, time):
    """Makes a function raise SIGINT, once, when it returns for the `time`-th time."""
    real, calls = getattr(place, name), []

    def interrupted(*arguments, **options):
        result = real(*arguments, **options)
        calls.append(name)
        if len(calls) == time:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(place, name, interrupted)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("work", [classifier, carried_text])
@pytest.mark.parametrize("every", [-1.0, 1e9])  # a part after every batch, or at the end only
def test_a_signal_at_any_moment_costs_no_bit(tmp_path, monkeypatch, moment, work, every):
    monkeypatch.setattr(resume_store, "_SECONDS", every)
    evaluate = work()
    whole = evaluate(None)
    interruption = every > 0 and moment == "a part was written"
    once = interruption or moment == "all results were joined"
    interrupt_after(monkeypatch, *MOMENTS[moment], 1 if once else 3)
    if interruption:  # the part that it writes; the signal after that is its echo
        interrupt_after(monkeypatch, GenericEngine, "run", 3)
    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path / "parts")
    assert list((tmp_path / "parts").glob("part-*"))
    resumed = evaluate(tmp_path / "parts")
    assert resumed.num_targets == whole.num_targets
    assert all(torch.equal(resumed.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_a_signal_while_a_model_is_restored_waits(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    interrupt_after(monkeypatch, model_guard.IdentitySnapshot, "changed", 1)
    with pytest.raises(KeyboardInterrupt), model_guard.guarded(model):
        pass
    assert all(module.training for module in model.modules())
