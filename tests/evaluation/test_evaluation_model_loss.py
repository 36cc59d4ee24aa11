"""A loss in the model's output shows whether the targets must be shifted."""

import types

import pytest
import torch
import torch.nn.functional as F
from contract_cases import GRID
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError
from oracles.zoo import mlp

OPTIONS = {"grid": GRID, "num_samples": 4}


class WithLoss(nn.Module):
    """Logits [B, time, V], and the loss of labels under some rule."""

    def __init__(self, rule, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.rule, self.dtype = mlp(classes=7), rule, dtype

    def forward(self, x, labels):
        logits = 4 * self.inner(x)
        return types.SimpleNamespace(loss=self.rule(logits, labels).to(self.dtype), logits=logits)


def shifted(logits, labels, **options):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


def plain(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def data():
    x, labels = torch.randn(6, 5, 5), torch.randint(7, (6, 5))
    labels[0, 2:] = -100
    labels[1, 0] = -100
    return {"x": x, "labels": labels}, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unshifted_labels_of_a_model_that_shifts_them_are_refused(dtype):
    inputs, labels = data()
    model = WithLoss(shifted, dtype)
    with pytest.raises(DataError, match=r"shifted by one.*pad\(labels\[:, 1:\], \(0, 1\)"):
        ad.evaluate(model, [(inputs, labels)], **OPTIONS)
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    scores = ad.evaluate(model, [(inputs, targets)], **OPTIONS)
    expected = model.eval()(**inputs).loss.item()
    assert scores.xe(ad.DET).value == pytest.approx(
        expected, rel=1e-2 if dtype.itemsize < 4 else 1e-5
    )


@pytest.mark.parametrize(
    "rule",
    [
        plain,
        lambda logits, labels: shifted(logits, labels, label_smoothing=0.2),
        lambda logits, labels: shifted(logits, labels) + 0.1,  # an auxiliary loss
        lambda logits, labels: shifted(logits, labels) * float("nan"),
    ],
)
def test_a_loss_that_is_not_that_of_shifted_labels_says_nothing(rule):
    inputs, labels = data()
    scores = ad.evaluate(WithLoss(rule), [(inputs, labels)], **OPTIONS)
    assert scores.num_targets == (labels != -100).sum()


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_language_models_of_transformers_with_their_own_labels(name):
    pytest.importorskip("transformers", reason="needs transformers, which is not installed")
    from oracles.hugging import HUGGING, hugging_inputs, quiet

    make, kinds = HUGGING[name]
    model = quiet(make)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # not nearly uniform
    inputs = hugging_inputs(kinds)
    labels = inputs["input_ids"]
    if name == "t5":  # takes labels as they are, for the decoder
        del inputs["decoder_input_ids"]
        scores = ad.evaluate(model, [({**inputs, "labels": labels}, labels)], **OPTIONS)
    else:
        with pytest.raises(DataError, match="Shift the targets"):
            ad.evaluate(model, [({**inputs, "labels": labels}, labels)], **OPTIONS)
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)
        scores = ad.evaluate(model, [({**inputs, "labels": labels}, targets)], **OPTIONS)
    loss = model(**inputs, labels=labels).loss.item()
    assert scores.xe(ad.DET).value == pytest.approx(loss, rel=1e-4)
