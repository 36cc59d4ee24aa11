"""A Trainer of transformers in two ranks: every example counts once, and one choice is written."""

import sys
from pathlib import Path

import pytest
import torch
from launch import torchrun
from trainer_driver import OPTIONS

import afterdrop as ad

pytest.importorskip("transformers", reason="needs transformers, which is not installed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate, which is not installed")


def test_two_ranks_choose_as_one_process_does(tmp_path):
    sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
    from hugging_tasks import sequences
    from transformers import BertForSequenceClassification

    import afterdrop.integrations.transformers as hugging

    done = torchrun(str(Path(__file__).with_name("trainer_driver.py")), str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    _, data, collator = sequences()
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    model = BertForSequenceClassification.from_pretrained(checkpoint)
    alone = hugging.evaluate(model, data, collator, batch_size=3, **OPTIONS)
    for rank in (0, 1):
        found = ad.Scores.load(tmp_path / f"{rank}.safetensors")
        assert found.num_targets == len(data) and found.protocol == alone.protocol
        for name, tensor in alone.tensors.items():
            torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-5, atol=1e-6)
    choice = ad.Choice.load(checkpoint)
    assert choice.predictor(model)(input_ids=torch.tensor([[3, 4]])).shape == (1, 3)
