"""A Trainer of transformers: evaluation, the callback, checkpoints and adapters."""

import functools
import runpy
import sys
from pathlib import Path

import pytest
import torch
from hugging_tasks import causal, images, sequences, texts

import afterdrop as ad
import afterdrop.integrations.transformers as hugging
from afterdrop.errors import DataError
from oracles.hugging import gpt2

pytest.importorskip("transformers", reason="needs transformers, which is not installed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate, which is not installed")

OPTIONS = {"num_samples": 4, "grid": ad.Grid((0, 1), (0, 1))}


def make_trainer(folder, task=sequences, model=None, callbacks=None, evaluation=None, **arguments):
    from transformers import Trainer, TrainingArguments

    made, data, collator = task()
    settings = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 5,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
    }
    return Trainer(
        made if model is None else model,
        TrainingArguments(str(folder), **{**settings, **arguments}),
        data_collator=collator,
        train_dataset=data,
        eval_dataset=data if evaluation is None else evaluation,
        callbacks=callbacks,
    )


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_a_trainer_is_evaluated_on_its_own_data(tmp_path):
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=13)  # one batch: a plain mean
    scores = hugging.evaluate(trainer, **OPTIONS)
    assert scores.xe(ad.DET).value == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
    other = hugging.evaluate(trainer, trainer.eval_dataset[:4], batch_size=2, **OPTIONS)
    assert (scores.num_targets, other.num_targets) == (13, 4)


def test_the_loss_that_a_trainer_reports_is_the_evaluated_one_for_a_causal_model(tmp_path):
    from oracles.hugging import llama

    trainer = make_trainer(tmp_path, lambda: causal(llama), per_device_eval_batch_size=13)
    found = hugging.evaluate(trainer, **OPTIONS).xe(ad.DET).value
    assert found == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)


def test_data_sets_by_name(tmp_path):
    _, data, _ = sequences()
    trainer = make_trainer(tmp_path, evaluation={"a": data[:6], "b": data[6:]})
    assert hugging.evaluate(trainer, "b", **OPTIONS).num_targets == 7
    for name in (None, "c"):
        with pytest.raises(DataError, match="has 'a', 'b'; give the name"):
            hugging.evaluate(trainer, name, **OPTIONS)
    hugging.add_callback(trainer, "b", **OPTIONS)
    trainer.train()
    assert len(logged(trainer, "eval_b_tempered_loss")) == 2
    trainer.eval_dataset = None
    with pytest.raises(DataError, match="no eval_dataset"):
        hugging.evaluate(trainer)


def test_the_callback_logs_and_saves_the_choice_beside_the_best_checkpoint(tmp_path):
    from transformers import BertForSequenceClassification

    arguments = {"load_best_model_at_end": True, "metric_for_best_model": "tempered_loss"}
    arguments |= {"num_train_epochs": 3, "per_device_eval_batch_size": 13}
    trainer = make_trainer(tmp_path, **arguments)
    callback = hugging.add_callback(trainer, **OPTIONS)
    trainer.train()
    losses = logged(trainer, "eval_tempered_loss")
    assert trainer.state.best_metric == min(losses) and len(losses) == 3
    assert all(a <= b + 1e-6 for a, b in zip(losses, logged(trainer, "eval_loss")))
    assert logged(trainer, "chosen_gain") == [callback.choice.gain.value]
    best = trainer.state.best_model_checkpoint
    for folder in (best, tmp_path):
        assert ad.Choice.load(folder) == callback.choice
    inputs = {"input_ids": torch.tensor([texts()[0]])}
    model = BertForSequenceClassification.from_pretrained(best)
    found = ad.Choice.load(best).predictor(model)(**inputs)
    assert torch.equal(found, callback.choice.predictor(trainer.model)(**inputs))


def test_weights_that_a_trainer_does_not_load_from_its_best_checkpoint_are_loaded(tmp_path):
    """Those of a ViT have other names in its files: its Trainer leaves the last ones in place."""
    from transformers import ViTForImageClassification

    arguments = {"load_best_model_at_end": True, "metric_for_best_model": "tempered_loss"}
    trainer = make_trainer(tmp_path, images, greater_is_better=True, **arguments)  # not the last
    callback = hugging.add_callback(trainer, **OPTIONS)
    with pytest.warns(UserWarning, match="loaded only a part of the weights of .*checkpoint-2"):
        trainer.train()
    best = trainer.state.best_model_checkpoint
    inputs = {"pixel_values": torch.randn(2, 1, 8, 8)}
    model = ViTForImageClassification.from_pretrained(best)
    found = ad.Choice.load(best).predictor(model)(**inputs)
    assert torch.equal(found, callback.choice.predictor(trainer.model)(**inputs))


def test_training_goes_on_as_without_the_callback(tmp_path):
    plain = make_trainer(tmp_path / "plain")
    plain.train()
    watched = make_trainer(tmp_path / "watched")
    folder = tmp_path / "elsewhere"
    choose = functools.partial(ad.select, prefer="cheapest")
    more = {"blocks": 4, "resume": tmp_path / "parts"}
    callback = hugging.add_callback(watched, folder=folder, choose=choose, **more, **OPTIONS)
    watched.train()
    for a, b in zip(plain.model.state_dict().values(), watched.model.state_dict().values()):
        assert torch.equal(a, b)
    assert callback.choice.prefer == "cheapest" and ad.Choice.load(folder) == callback.choice
    assert not (tmp_path / "watched" / "choice.json").exists()


def test_early_stopping_sees_the_loss_at_the_best_temperature(tmp_path):
    from transformers import EarlyStoppingCallback

    stop = EarlyStoppingCallback(early_stopping_patience=1)
    arguments = {"load_best_model_at_end": True, "metric_for_best_model": "tempered_loss"}
    trainer = make_trainer(
        tmp_path, callbacks=[stop], num_train_epochs=9, learning_rate=0, **arguments
    )
    hugging.add_callback(trainer, **OPTIONS)
    trainer.train()
    assert len(logged(trainer, "eval_tempered_loss")) == 2  # nothing is learnt at rate 0


def test_a_training_in_bfloat16(tmp_path):
    trainer = make_trainer(tmp_path, lambda: causal(gpt2), bf16=True)
    callback = hugging.add_callback(trainer, **OPTIONS)
    trainer.train()
    assert ad.Choice.load(tmp_path) == callback.choice


def test_noise_on_embeddings_is_named_where_the_choice_is_made(tmp_path):
    trainer = make_trainer(tmp_path, lambda: causal(gpt2), neftune_noise_alpha=5.0)
    hugging.add_callback(trainer, **OPTIONS)
    with pytest.warns(UserWarning, match=r"stays off because it is not dropout: transformer\.wte"):
        trainer.train()


@pytest.mark.slow
def test_the_example_runs(tmp_path, monkeypatch, capsys):
    path = Path(__file__).parents[2] / "examples" / "hugging_face.py"
    options = ["--out", str(tmp_path), "--epochs", "2", "--num-samples", "2"]
    monkeypatch.setattr(sys, "argv", [str(path), *options])
    runpy.run_path(str(path), run_name="__main__")
    assert "Cross entropy on test data" in capsys.readouterr().out
    assert (tmp_path / "choice.json").exists()
