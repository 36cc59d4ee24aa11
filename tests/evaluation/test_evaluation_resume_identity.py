"""A resumed evaluation refuses another model and other data, whatever they consist of."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.errors import FileError
from afterdrop.evaluation import loop
from afterdrop.evaluation.rounding import epsilon_of
from oracles.zoo import ConvNet, DropPath, Recurrent, Residual, StochasticDepth

OPTIONS = {"grid": ad.Grid((0, 0.5, 1), (0, 0.5, 1)), "num_samples": 4}


def interrupted(batches):
    """Two batches, and then a Ctrl-C."""
    yield from batches[:2]
    raise KeyboardInterrupt


MODELS = {
    "batch normalisation": (ConvNet, lambda: torch.randn(12, 1, 8, 8)),
    "masks inside a recurrent layer": (
        lambda: Recurrent(batch_first=True),
        lambda: torch.randint(11, (12, 4)),
    ),
    "masks shared by the batch": (
        lambda: Residual(StochasticDepth(0.5, "batch")),
        lambda: torch.randn(12, 6),
    ),
    "masks of rows": (lambda: Residual(DropPath(0.5)), lambda: torch.randn(12, 6)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_model_is_recognised(tmp_path, name):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, some = make(), [inputs() for _ in range(3)]
    labels = [torch.randint(3, x.shape if "recurrent" in name else (12,)) for x in some]
    batches = list(zip(some, labels))
    with pytest.raises(KeyboardInterrupt):
        ad.evaluate(model, interrupted(batches), resume=tmp_path, **OPTIONS)
    resumed = ad.evaluate(model, batches, resume=tmp_path, **OPTIONS)
    whole = ad.evaluate(model, batches, **OPTIONS)
    assert all(torch.equal(resumed.tensors[name], whole.tensors[name]) for name in whole.tensors)


@pytest.mark.parametrize(
    ("device", "dtype", "factor", "same"),
    [
        ("cpu", torch.float32, 1 + 5e-3, False),
        ("some GPU", torch.float32, 1 + 5e-3, True),
        ("some GPU", torch.float32, 1 + 5e-2, False),
        ("some GPU", torch.float64, 1 + 1e-5, False),
    ],
)
def test_another_device_may_round_more(tmp_path, monkeypatch, device, dtype, factor, same):
    """GPUs multiply float32 in TF32, by default in convolutions: logits differ by up to 2 %."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).to(dtype)
    batches = [(torch.randn(12, 5, dtype=dtype), torch.randint(3, (12,))) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):
        ad.evaluate(net, interrupted(batches), resume=tmp_path, **OPTIONS)
    monkeypatch.setattr(loop, "device_kind", lambda _: device)
    net.register_forward_hook(lambda module, inputs, output: output * factor)
    with nullcontext() if same else pytest.raises(FileError, match="has other outputs"):
        scores = ad.evaluate(net, batches, resume=tmp_path, **OPTIONS)
        assert scores.num_targets == 36


class Changing(nn.Module):
    """A model whose code or state can change while its weights stay."""

    def __init__(self, *, early=True, strength=1.0, rare=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.last = nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.early, table = early, torch.zeros(9, 3)
        table[8] = rare
        self.register_buffer("strength", torch.tensor(strength), persistent=False)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x, kinds):
        hidden = self.first(x)
        dropped = self.drop(hidden) if self.early else self.drop(hidden.flip(-1)).flip(-1)
        return self.last(hidden + self.strength * (dropped - hidden)) + self.table[kinds]


@pytest.mark.parametrize(
    ("change", "what"),
    [({"early": False}, "outputs"), ({"strength": 0.5}, "outputs"), ({"rare": 2.0}, "buffers")],
)
def test_resuming_is_refused_if_dropout_or_a_buffer_that_is_not_saved_changed(
    tmp_path, change, what
):
    """Without dropout the first batch has the same outputs."""
    rows = [(torch.randn(12, 5), torch.full((12,), kind)) for kind in (0, 0, 8)]
    batches = [(inputs, torch.randint(3, (12,))) for inputs in rows]
    with pytest.raises(KeyboardInterrupt):
        ad.evaluate(Changing(), interrupted(batches), resume=tmp_path, **OPTIONS)
    with pytest.raises(FileError, match=f"has other {what} than the one of the parts"):
        ad.evaluate(Changing(**change), batches, resume=tmp_path, **OPTIONS)
    resumed = ad.evaluate(Changing(), batches, resume=tmp_path, **OPTIONS)
    whole = ad.evaluate(Changing(), batches, **OPTIONS)
    assert all(torch.equal(resumed.tensors[name], whole.tensors[name]) for name in whole.tensors)


class Reading(nn.Module):
    """A model that reads text, numbers and arrays itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x, extra):
        return self.net(x) + len(str(extra))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["a"] * 12, ["a"] * 11 + ["bb"]),
        (1.0, 12.5),
        ({"text": "a"}, {"text": "aa"}),
        (np.zeros(12, dtype=np.int64), np.full(12, 10)),
        (np.array(["a", None]), np.array(["a", "longer"], dtype=object)),
    ],
)
def test_resuming_with_other_text_numbers_or_arrays_is_refused(tmp_path, before, after):
    rows, labels = torch.randn(3, 12, 5), torch.randint(3, (3, 12))

    def batches(second):
        extras = [before, second, before]
        return [((x, extra), y) for x, extra, y in zip(rows, extras, labels)]

    with pytest.raises(KeyboardInterrupt):
        ad.evaluate(Reading(), interrupted(batches(before)), resume=tmp_path, **OPTIONS)
    with pytest.raises(FileError, match="batch 1 is not the one that was evaluated before"):
        ad.evaluate(Reading(), batches(after), resume=tmp_path, **OPTIONS)
    resumed = ad.evaluate(Reading(), batches(before), resume=tmp_path, **OPTIONS)
    assert resumed.num_targets == 36


@pytest.mark.parametrize(
    ("device", "same_shapes", "epsilon"),
    [("cpu", False, 2.0**-23), ("meta", True, 2.0**-23), ("meta", False, 2.0**-10)],
)
def test_other_devices_than_a_cpu_round_by_the_shapes(device, same_shapes, epsilon):
    """A GPU chooses its kernels by the shapes; the device without data stands for one."""
    net = nn.Linear(2, 2, device=device)
    assert epsilon_of(net, torch.float32, same_shapes=same_shapes) == epsilon
