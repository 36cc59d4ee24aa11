"""Models of transformers, with their own collators: the labels are those of the model's loss."""

import random

import numpy as np
import pytest
import torch
from hugging_tasks import TASKS, bert_for, masked, sequences, sharpened, texts

import afterdrop as ad
import afterdrop.integrations.transformers as hugging
from afterdrop.errors import DataError

pytest.importorskip("transformers", reason="needs transformers, which is not installed")

OPTIONS = {"num_samples": 4, "grid": ad.Grid((0, 1), (0, 1))}


@pytest.mark.parametrize("task", TASKS)
def test_deterministic_cross_entropy_is_the_loss_of_the_model(task):
    model, data, collator = TASKS[task]()
    scores = hugging.evaluate(sharpened(model), data, collator, batch_size=5, **OPTIONS)
    batches = hugging._Batches(
        data, collator or hugging._default_collator(), 5, 0, {*data[0]} - {"note"}
    )
    losses = []
    for batch in batches:
        labels = batch["labels"]
        shifted = labels[:, 1:] if task.startswith("causal") else labels
        count = (shifted != -100).sum().item()
        losses.append((model(**batch).loss.item() * count, count))
    total = sum(count for _, count in losses)
    assert scores.num_targets == total
    expected = sum(loss for loss, _ in losses) / total
    assert scores.xe(ad.DET).value == pytest.approx(expected, rel=1e-4)
    assert len(scores.members) == 3


def test_a_collator_that_draws_gives_the_same_batches_and_leaves_the_random_state():
    model, data, collator = masked()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    scores = [hugging.evaluate(model, data, collator, **OPTIONS, seed=s) for s in (0, 0, 1)]
    assert scores[0].xe(ad.AMC) == scores[1].xe(ad.AMC)
    assert scores[0].xe(ad.DET) != scores[2].xe(ad.DET)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])


def test_choice_saved_beside_the_model_gives_its_predictor(tmp_path):
    from transformers import BertForSequenceClassification

    model, data, collator = sequences()
    choice = ad.select(hugging.evaluate(model, data, collator, **OPTIONS))
    model.save_pretrained(tmp_path)
    choice.save(tmp_path)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path)
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.ones(1, 3)}
    found = ad.Choice.load(tmp_path).predictor(loaded)(**inputs)
    assert torch.equal(found, choice.predictor(model)(**inputs))


def test_several_labels_have_the_loss_of_the_model():
    _, data, collator = sequences()
    kind = {"num_labels": 3, "problem_type": "multi_label_classification"}
    model = bert_for("SequenceClassification", **kind).eval()
    data = [
        {"input_ids": example["input_ids"], "labels": [1.0, 0.0, float(n % 2)]}
        for n, example in enumerate(data)
    ]
    with pytest.raises(DataError, match="likelihood='binary' or 'multilabel'"):
        hugging.evaluate(model, data, collator, **OPTIONS)
    scores = hugging.evaluate(model, data, collator, likelihood="multilabel", **OPTIONS)
    loss = model(**collator(data)).loss.item()
    assert scores.xe(ad.DET).value == pytest.approx(loss, rel=1e-5)


def test_a_stream_of_examples_is_a_dataset():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(data)

    model, data, collator = sequences()
    one = hugging.evaluate(model, Stream(), collator, batch_size=5, **OPTIONS)
    other = hugging.evaluate(model, data, collator, batch_size=5, **OPTIONS)
    assert one.xe(ad.AMC) == other.xe(ad.AMC)


def test_models_without_one_kind_of_labels_are_refused():
    model = bert_for("QuestionAnswering")
    data = [{"input_ids": ids, "start_positions": 0, "end_positions": 1} for ids in texts()]
    with pytest.raises(DataError, match=r"start_positions, end_positions.*targets="):
        hugging.evaluate(model, data)
    with pytest.raises(DataError, match="dataset is missing"):
        hugging.evaluate(model)
