"""lm-evaluation-harness: a local task, scored with the chosen member of a tiny random model."""

import json
import sys
import types

import pytest
import torch
from hugging_tasks import causal, sequence_to_sequence, sharpened, tokenizer

import afterdrop as ad
import afterdrop.integrations.lm_eval as harness
import afterdrop.integrations.transformers as hugging
from afterdrop.errors import DataError, ExtraError
from oracles.hugging import gpt2, t5

pytest.importorskip("transformers", reason="needs transformers, which is not installed")

TASK = """
task: tiny
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{answers}}}}"
doc_to_target: label
metric_list:
  - metric: acc
"""
DOCUMENTS = [
    {"question": f"w{n} w{n + 1}", "answers": ["w5", f"w{n + 3} w4"], "label": n % 2}
    for n in range(3, 8)
]


def saved(folder, task):
    """A model with its tokenizer and a choice, in a folder."""
    model, data, collator = task()
    scores = hugging.evaluate(
        sharpened(model), data, collator, num_samples=4, grid=ad.Grid((1,), (0.5, 1))
    )
    choice = ad.select(scores)
    assert choice.member.multiplier > 0
    model.save_pretrained(folder)
    choice.save(folder)
    tokenizer().save_pretrained(folder)
    return model, choice


class StandIn:
    """What is used of lm_eval's model for transformers."""

    def __init__(self, pretrained, model):
        self.model = model


@pytest.mark.parametrize(
    "task", [lambda: causal(gpt2), lambda: sequence_to_sequence(t5, with_model=False)]
)
def test_logits_are_the_log_probabilities_of_the_choice(task, tmp_path):
    model, choice = saved(tmp_path, task)
    member = type("Model", (harness.ChosenMember, StandIn), {})(str(tmp_path), model=model)
    inputs = torch.randint(3, 20, (2, 4))
    predict = choice.predictor(model)
    if model.config.is_encoder_decoder:
        extra = {"attention_mask": torch.ones_like(inputs), "labels": inputs.flip(1)}
        found = member._model_call(inputs, *extra.values())
        assert torch.equal(found, predict(input_ids=inputs, **extra))
    else:
        assert torch.equal(member._model_call(inputs), predict(input_ids=inputs))
    with pytest.raises(NotImplementedError, match="scores given answers"):
        member._model_generate(inputs)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(DataError, match="not those that this choice was made for"):
        type("Model", (harness.ChosenMember, StandIn), {})(str(tmp_path), model=model)


def test_the_model_is_registered_once(monkeypatch):
    known = {}

    def register_model(name):
        return lambda kind: known.setdefault(name, kind)

    parts = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.registry": {"model_registry": known, "register_model": register_model},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": StandIn},
    }
    for name, content in parts.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    harness.register(), harness.register()
    assert list(known) == ["afterdrop"] and issubclass(known["afterdrop"], harness.ChosenMember)


def test_a_missing_harness_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    with pytest.raises(ExtraError, match=r"needs lm_eval .*pip install 'afterdrop\[lm-eval\]'"):
        harness.main()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of lm_eval and datasets
def test_a_local_task_is_scored_with_the_chosen_member(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs lm_eval, which is not installed")
    model, choice = saved(tmp_path / "model", lambda: causal(gpt2))
    data = tmp_path / "documents.json"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=data))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    command = ["lm_eval", "--model", "afterdrop", "--model_args", f"pretrained={tmp_path}/model"]
    command += ["--tasks", "tiny", "--include_path", str(tmp_path), "--device", "cpu"]
    command += ["--output_path", str(tmp_path / "results"), "--log_samples"]
    monkeypatch.setattr(sys, "argv", command)
    harness.main()

    (samples,) = (tmp_path / "results").rglob("samples_tiny*.jsonl")
    predict = choice.predictor(model)
    encode = tokenizer()
    lines = samples.read_text().splitlines()
    assert len(lines) == len(DOCUMENTS)
    for sample in map(json.loads, lines):
        document = sample["doc"]
        question = encode(document["question"])["input_ids"]
        for answer, found in zip(document["answers"], sample["filtered_resps"]):
            tokens = question + encode(answer)["input_ids"]
            log_p = predict(input_ids=torch.tensor([tokens[:-1]]))[0]
            targets = torch.tensor(tokens[1:])
            expected = log_p.gather(1, targets[:, None])[len(question) - 1 :].sum().item()
            assert float(found[0]) == pytest.approx(expected, abs=1e-4)
