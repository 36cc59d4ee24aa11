"""PEFT adapters: their dropout is found, and several of them are an ensemble."""

import pytest
import torch
from hugging_tasks import causal, sequence_to_sequence, sequences, sharpened, texts, tokens

import afterdrop as ad
import afterdrop.integrations.transformers as hugging
from afterdrop.errors import DataError
from oracles.hugging import bart, gpt2
from oracles.zoo import mlp

pytest.importorskip("transformers", reason="needs transformers, which is not installed")
peft = pytest.importorskip("peft", reason="needs PEFT, which is not installed")

OPTIONS = {"num_samples": 4, "grid": ad.Grid((0, 1), (0, 1))}
TASKS = {
    "SEQ_CLS": (sequences, ["query", "value"]),
    "TOKEN_CLS": (tokens, ["query", "value"]),
    "CAUSAL_LM": (lambda: causal(gpt2), ["c_attn"]),
    "SEQ_2_SEQ_LM": (lambda: sequence_to_sequence(bart, with_model=False), ["q_proj", "v_proj"]),
}


def with_adapters(kind, names=("default",)):
    """A model with random adapters, its data and its collator."""
    task, modules = TASKS[kind]
    model, data, collator = task()
    config = peft.LoraConfig(
        task_type=kind,
        r=2,
        lora_dropout=0.3,
        target_modules=modules,
        init_lora_weights=False,
        fan_in_fan_out=kind == "CAUSAL_LM",  # GPT-2 stores its weights transposed
    )
    model = peft.get_peft_model(sharpened(model), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    return model, data, collator


@pytest.mark.parametrize("kind", TASKS)
def test_labels_and_loss_are_those_of_the_base_model(kind):
    model, data, collator = with_adapters(kind)
    scores = hugging.evaluate(model, data, collator, batch_size=len(data), **OPTIONS)
    columns = {"input_ids", "attention_mask", "label", "labels"}
    (batch,) = hugging._Batches(data, collator, len(data), 0, columns)
    with torch.no_grad():
        loss = model.eval()(**batch).loss.item()
    assert scores.xe(ad.DET).value == pytest.approx(loss, rel=1e-4)
    assert any("lora_dropout" in name for name, *_ in scores.protocol.sites)


def test_a_list_of_adapters_is_an_ensemble_and_the_active_one_stays(tmp_path):
    model, data, collator = with_adapters("SEQ_CLS", ("first", "second", "third"))
    model.set_adapter("second")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    scores = hugging.evaluate(model, data, collator, adapters=("first", "second", "third"))
    assert scores.protocol.ensemble.models == ("first", "second", "third")
    assert model.active_adapter == "second"
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
    choice = ad.select(scores)
    choice.save(tmp_path)
    inputs = {"input_ids": torch.tensor([texts()[0]])}
    found = ad.Choice.load(tmp_path).predictor(model)(**inputs)
    assert found.shape == (1, 3) and found.exp().sum().item() == pytest.approx(1, rel=1e-5)


def test_evaluation_and_prediction_leave_a_peft_model_as_it_was():
    model, _, _ = with_adapters("SEQ_CLS", ("first", "second"))
    model.set_adapter("second", inference_mode=True)
    inputs = {"input_ids": torch.tensor([texts()[0]])}
    batches = [{**inputs, "labels": torch.tensor([1])}]

    def state():
        trained = [weight.requires_grad for weight in model.parameters()]
        return model.active_adapter, model.base_model.active_adapters, trained

    with torch.no_grad():
        before, output = state(), model.eval()(**inputs).logits
        scores = ad.evaluate(model, batches * 2, adapters=("first", "second"))
        assert state() == before and torch.equal(model(**inputs).logits, output)
        ad.select(scores).predictor(model)(**inputs)
        with pytest.raises(DataError, match=r"'third' .*names of its adapters: 'first', 'second'"):
            ad.evaluate(model, batches, adapters=("first", "third"))
        assert state() == before and torch.equal(model(**inputs).logits, output)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # which is meant here
def test_adapters_of_transformers_itself_are_an_ensemble_as_well():
    model, data, collator = sequences()
    config = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    for name in ("first", "second"):
        model.add_adapter(config, name)
    model.set_adapter("first")
    scores = hugging.evaluate(model, data, collator, adapters=("first", "second"))
    assert scores.protocol.ensemble.models == ("first", "second")
    assert model.active_adapters() == ["first"]


def test_a_model_without_adapters_is_refused():
    net, data = mlp(classes=3), [{"x": torch.randn(5), "labels": 1}]
    with pytest.raises(DataError, match="needs a model with set_adapter"):
        hugging.evaluate(net, data, targets="labels", adapters=("first", "second"))


def test_a_trainer_of_an_adapter_leaves_the_choice_beside_it(tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate, which is not installed")
    from transformers import Trainer, TrainingArguments

    model, data, collator = with_adapters("SEQ_CLS")
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        save_strategy="steps",
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model, arguments, data_collator=collator, train_dataset=data, eval_dataset=data
    )
    callback = hugging.add_callback(trainer, **OPTIONS)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    loaded = peft.PeftModel.from_pretrained(sequences()[0], checkpoint)
    inputs = {"input_ids": torch.tensor([texts()[0]])}
    found = ad.Choice.load(checkpoint).predictor(loaded)(**inputs)
    assert torch.equal(found, callback.choice.predictor(model)(**inputs))


def test_choice_beside_a_saved_adapter_gives_its_predictor(tmp_path):
    model, data, collator = with_adapters("SEQ_CLS")
    choice = ad.select(hugging.evaluate(model, data, collator, **OPTIONS))
    model.save_pretrained(tmp_path)
    choice.save(tmp_path)
    loaded = peft.PeftModel.from_pretrained(sequences()[0], tmp_path)
    inputs = {"input_ids": torch.tensor([texts()[0]])}
    found = ad.Choice.load(tmp_path).predictor(loaded)(**inputs)
    assert torch.equal(found, choice.predictor(model)(**inputs))
