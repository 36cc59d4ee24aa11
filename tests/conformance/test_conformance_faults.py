"""Models that are wrong on purpose fail the test that concerns the fault, and not the others."""

import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError
from oracles.zoo import mlp


class Around(nn.Module):
    """A small model with dropout, and something wrong before it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = mlp()

    def forward(self, x):
        return self.inner(self.wrong(x))


class Counting(Around):
    """Its output depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def wrong(self, x):
        self.calls += 1
        return x + 0.1 * self.calls


class WritingBuffer(Around):
    """Changes a buffer in every mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def wrong(self, x):
        self.calls += 1
        return x


class OwnGenerator(Around):
    """Dropout by a NumPy generator of its own."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def wrong(self, x):
        if not self.training:
            return x
        return x * torch.from_numpy(self.rng.random(x.shape) < 0.5) * 2


class HiddenMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * torch.bernoulli(torch.full_like(x, 0.5)) * 2


class HiddenDropout(Around):
    """Draws a mask in an autograd function."""

    def wrong(self, x):
        return HiddenMask.apply(x) if self.training else x


class SeededInTraining(Around):
    """Seeds torch's generator, so that its own dropout always drops the same units."""

    def wrong(self, x):
        if self.training:
            torch.manual_seed(3)
        return x


class RecordingArray(Around):
    """Counts in a NumPy array, whose values are not restored."""

    def __init__(self):
        super().__init__()
        self.rows = np.zeros(1)

    def wrong(self, x):
        self.rows += len(x)
        return x


class LargeBatches(Around):
    """Draws from a generator of its own, but only in batches larger than those of dry runs."""

    def __init__(self):
        super().__init__()
        self.rng = random.Random(0)

    def wrong(self, x):
        if self.training and len(x) > 20:
            return x + self.rng.random()
        return x


class ThreadLocal(Around):
    """Reads a number that only the main thread has set."""

    def __init__(self):
        super().__init__()
        self.local = threading.local()
        self.local.shift = 0.5

    def wrong(self, x):
        return x + getattr(self.local, "shift", 0.0)


class FailingInTraining(Around):
    def wrong(self, x):
        if self.training:
            raise ValueError("no targets")
        return x


FAULTS = {
    Counting: {"dropout sites": "keeps state", "eval mode twice": "(root).calls"},
    WritingBuffer: {"dropout sites": "change their buffers even in eval mode"},
    OwnGenerator: {"dropout sites": "", "model unchanged": "rng"},
    HiddenDropout: {"dropout sites": "draws its own masks"},
    SeededInTraining: {
        "mean and variance": "standard errors",
        "model unchanged": "a prediction changes torch's generator",
    },
    RecordingArray: {"model unchanged": "a prediction changes rows"},
    ThreadLocal: {"two threads": "of 6 predictions"},
    FailingInTraining: {"dropout sites": "ValueError: no targets"},
}


def data():
    return [(torch.randn(8, 5), torch.zeros(8, dtype=torch.int64))]


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_a_fault_is_found(kind):
    found = ad.check(kind(), data())
    failed = {v.name: v.detail for v in found.verdicts if v.status == "FAILED"}
    assert failed.keys() == FAULTS[kind].keys(), f"\n{found}"
    assert all(reason in failed[name] for name, reason in FAULTS[kind].items()), f"\n{found}"
    assert not found.passed
    skipped = {v.name for v in found.verdicts if v.status == "skipped"}
    needs_sites = {"random operations", "mean and variance", "two threads"}
    assert skipped == (needs_sites if "dropout sites" in failed else set())


def test_a_draw_that_no_dry_run_sees_is_found():
    found = ad.check(LargeBatches(), data())
    assert found["dropout sites"].status == "ok"
    assert found["random operations"].status == "FAILED"
    assert "the same masks" in found["random operations"].detail


def test_a_rate_that_is_not_applied_is_found():
    """Under control, the dropout has another rate than in training."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = nn.Linear(5, 32), nn.Linear(32, 3)

        def forward(self, x):
            watched = len(self._forward_hooks) > 0  # only while afterdrop controls the model
            rate = 0.6 if watched else 0.4
            return self.out(F.dropout(self.inner(x), rate, self.training))

    torch.manual_seed(0)
    found = ad.check(Dropping(), data())
    assert [v.name for v in found.verdicts if v.status == "FAILED"] == ["mean and variance"]


def test_each_verdict_is_one_line():
    printed = str(ad.check(Counting(), data())).splitlines()
    assert len(printed) == 6
    assert [line.split()[0] for line in printed].count("FAILED") == 2


@pytest.mark.parametrize("batches", [[], [torch.zeros(2, 5)], [(torch.zeros(2, 5), "ab")]])
def test_batches_that_cannot_be_read_are_refused(batches):
    with pytest.raises(DataError):
        ad.check(mlp(), batches)
