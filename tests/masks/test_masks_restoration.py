"""Modes, buffers, rates, hooks and generators are left as they were."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import afterdrop as ad
from oracles.zoo import AWD, ConvNet, DropPath, Residual, mlp

GRID = ad.Grid((0, 1), (0, 0.5, 1))


def snapshot(model):
    """Everything that an evaluation must leave as it was."""
    global_hooks = torch.nn.modules.module
    return {
        "modes": [m.training for m in model.modules()],
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "buffers": [id(b) for b in model.buffers()],
        "own": [sorted(m.__dict__) for m in model.modules()],
        "rates": [
            (n, getattr(m, "rate", None), getattr(m, "p", None)) for n, m in model.named_modules()
        ],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "global": len(global_hooks._global_forward_hooks)
        + len(global_hooks._global_forward_pre_hooks),
        "grad": [p.requires_grad for p in model.parameters()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "grad mode": torch.is_grad_enabled(),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
    }


def same(before, after):
    for name, value in before.items():
        if name == "state":
            assert value.keys() == after[name].keys()
            for key in value:
                assert torch.equal(value[key], after[name][key]), key
        elif name == "torch":
            assert torch.equal(value, after[name])
        else:
            assert value == after[name], name


CASES = {
    "mlp": (lambda: mlp(), lambda: torch.randn(4, 5), (), 0, (4,)),
    "conv": (ConvNet, lambda: torch.randn(4, 1, 8, 8), (), 0, (4,)),
    "awd": (AWD, lambda: torch.randint(13, (5, 4)), AWD.RATES, 1, (5, 4)),
    "path": (lambda: Residual(DropPath(0.3)), lambda: torch.randn(4, 6), (), 0, (4,)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: torch.randn(4, 3, 8),
        (),
        0,
        (4, 3),
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_find_sites_evaluate_and_predict_leave_everything_as_it_was(case, training):
    make, inputs, rates, batch_dim, shape = CASES[case]
    model, x = make(), inputs()
    model.train(training)
    next(iter(model.children())).train(not training)  # modules in different modes
    before = snapshot(model)
    options = {"rates": rates, "batch_dim": batch_dim}
    ad.find_sites(model, x, **options)
    same(before, snapshot(model))
    ad.evaluate(
        model,
        [(x, torch.randint(3, shape, generator=torch.Generator()))],
        grid=GRID,
        num_samples=4,
        **options,
    )
    same(before, snapshot(model))
    ad.Predictor(model, ad.AMC, num_samples=4, class_dim=-1, **options)(x)
    same(before, snapshot(model))


class Failing(nn.Module):
    """Raises on its n-th call."""

    def __init__(self, inner, at):
        super().__init__()
        self.inner, self.at = inner, at
        self.count = SimpleNamespace(calls=0)  # a list would be restored after each pass

    def forward(self, x):
        self.count.calls += 1
        out = self.inner(x)
        if self.count.calls == self.at:
            raise KeyError("boom")
        return out


def failing(case, at):
    """A model that fails on its n-th call, an input, options of find_sites, and targets."""
    make, inputs, rates, batch_dim, shape = CASES[case]
    options = {"rates": tuple(f"inner.{rate}" for rate in rates), "batch_dim": batch_dim}
    targets = torch.randint(3, shape, generator=torch.Generator())
    return Failing(make(), at), inputs(), options, targets


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at", [1, 4])  # in train mode; with every rate at 0 or in eval mode
def test_everything_is_restored_after_an_exception_in_a_dry_run(case, at):
    model, x, options, _ = failing(case, at)
    before = snapshot(model)
    with pytest.raises(KeyError, match="boom"):
        ad.find_sites(model, x, **options)
    same(before, snapshot(model))


@pytest.mark.parametrize(
    ("case", "at", "rows"),
    [
        *((case, 2, "twice the rows") for case in CASES),
        # The rows of "awd" share a mask, so that no single row is tried.
        *((case, 3, "a single row") for case in CASES if case != "awd"),
    ],
)
def test_a_model_that_fails_on_another_batch_size_is_not_batched_and_is_restored(case, at, rows):
    model, x, options, _ = failing(case, at)
    before = snapshot(model)
    found = ad.find_sites(model, x, **options)
    assert not found.batched and found.reason == f"the model fails on {rows}: KeyError"
    same(before, snapshot(model))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at", [9, 12])
def test_everything_is_restored_after_an_exception_in_an_evaluation(case, at):
    model, x, options, targets = failing(case, at)
    options["compute_once"] = False  # a failure there falls back to all modules
    before = snapshot(model)
    with pytest.raises(KeyError, match="boom"):
        ad.evaluate(model, [(x, targets)] * 3, grid=GRID, num_samples=4, **options)
    same(before, snapshot(model))


def test_batch_norm_statistics_are_bit_identical():
    model = ConvNet()
    model.train()
    model(torch.randn(8, 1, 8, 8))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert int(before["norm1.num_batches_tracked"]) == 1
    x, y = torch.randn(6, 1, 8, 8), torch.randint(3, (6,))
    ad.find_sites(model, x)
    ad.evaluate(model, [(x, y)], grid=GRID, num_samples=4)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_forward_replaced_on_an_instance_survives():
    model = Residual(DropPath(0.3))
    original = model.path.forward

    def traced(x):
        return original(x)

    model.path.forward = traced
    ad.find_sites(model, torch.randn(4, 6))
    assert model.path.__dict__["forward"] is traced


def test_the_users_grad_mode_is_left_alone():
    model, x = mlp(), torch.randn(4, 5)
    with torch.enable_grad():
        ad.find_sites(model, x)
        assert torch.is_grad_enabled()
        assert not ad.Predictor(model, ad.AMC, num_samples=4)(x).requires_grad


def test_inputs_survive_inplace_dropout_on_them():
    model = nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(6, 3))
    x, y = torch.randn(4, 6), torch.randint(3, (4,))
    before = x.clone()
    ad.find_sites(model, x)
    assert torch.equal(x, before)
    ad.evaluate(model, [(x, y)], grid=ad.Grid((0,), (1,)), num_samples=1)
    assert torch.equal(x, before)
    ad.Predictor(model, ad.AMC, num_samples=1)(x)
    assert torch.equal(x, before)


def test_inplace_dropout_on_the_input_gives_the_same_as_dropout_on_a_copy():
    out = nn.Linear(6, 3)
    x, y = torch.randn(1, 6), torch.randint(3, (1,))
    grid = ad.Grid((0,), (1,))
    for memory in (None, 2**20):
        a, b = (
            ad.evaluate(
                nn.Sequential(nn.Dropout(0.5, inplace=flag), StochasticBatch(), out),
                [(x.clone(), y)],
                grid=grid,
                num_samples=8,
                memory=memory,
            )
            for flag in (True, False)
        )
        torch.testing.assert_close(a.values(ad.GMC).whole, b.values(ad.GMC).whole)


class StochasticBatch(nn.Module):
    """A mask that all rows share, so that each sample needs its own pass."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x * self.drop(torch.ones(1, 6))


def test_tf32_set_through_the_newer_interface_is_left_as_it_was():
    place = torch.backends.cuda.matmul
    before = place.fp32_precision
    try:
        place.fp32_precision = "tf32"
        assert len(ad.find_sites(mlp(), torch.randn(4, 5))) == 1
        assert place.fp32_precision == "tf32"
    finally:
        place.fp32_precision = before
    assert torch.get_float32_matmul_precision() == "highest"


def test_hooks_that_the_first_pass_registers_are_not_registered_twice():
    class Capturing(nn.Module):
        """Registers hooks on its first pass and notes that, as models of transformers do."""

        def __init__(self):
            super().__init__()
            self.inner, self.out, self.captured = nn.Linear(4, 8), nn.Linear(8, 3), []

        def forward(self, x):
            if not getattr(self, "installed", False):
                self.inner.register_forward_hook(lambda *call: self.captured.append(call[-1]))
                self.installed = True
            self.captured.clear()
            out = self.out(torch.dropout(self.inner(x), 0.5, self.training))
            assert len(self.captured) == 1
            return out

    model, x = Capturing(), torch.randn(6, 4)
    ad.evaluate(model, [(x, torch.zeros(6, dtype=torch.int64))], num_samples=4)
    assert not model.inner._forward_hooks and not hasattr(model, "installed")
    model(x)
