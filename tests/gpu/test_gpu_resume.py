"""Work that is interrupted on a GPU is resumed there, and ends as if it had been left alone."""

import json

import pytest
import shared_gpu
import torch
from safetensors.torch import load_file
from torch import nn

import afterdrop as ad
from afterdrop import train
from afterdrop.data import load_text
from afterdrop.evaluation import resume_store
from afterdrop.evaluation.engines.generic import GenericEngine
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.request import Request, StreamSettings
from afterdrop.evaluation.resume_store import ResumeStore
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.masks.uniforms import Plan
from afterdrop.train.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def interrupt(monkeypatch, owner, name, after):
    """Makes a method raise KeyboardInterrupt instead of its call number `after`."""
    method, calls = getattr(owner, name), []

    def interrupted(self, *arguments):
        calls.append(name)
        if len(calls) == after:
            raise KeyboardInterrupt
        return method(self, *arguments)

    monkeypatch.setattr(owner, name, interrupted)


def evaluated_with_interruption(evaluate, folder, monkeypatch):
    """Scores of an evaluation in one go, and of one that is interrupted after two batches."""
    whole = evaluate(None)
    with monkeypatch.context() as patch:
        patch.setattr(resume_store, "_SECONDS", -1.0)  # keeps every batch at once
        interrupt(patch, ResumeStore, "add", after=3)
        with pytest.raises(KeyboardInterrupt):
            evaluate(folder)
    assert len(list(folder.glob("*.safetensors"))) == 2
    return whole, evaluate(folder)


def same_scores(found, expected):
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


class Convolutions(nn.Module):
    """Convolutions, which cuDNN computes in TF32, with a normalised and dropped hidden layer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Dropout2d(0.2)
        )
        self.more = nn.Sequential(nn.Conv2d(64, 128, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(128, 10))

    def forward(self, x):
        return self.head(self.more(self.body(x)))


def attention():
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.2, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(64 * 6, 10))


MODELS = {"convolutions": (Convolutions, (3, 32, 32)), "attention": (attention, (6, 64))}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("autocast", [False, True])
def test_an_interrupted_evaluation_ends_with_the_same_scores(kind, autocast, tmp_path, monkeypatch):
    torch.manual_seed(0)
    build, shape = MODELS[kind]
    model = build().cuda().eval()
    data = [(torch.randn(48, *shape), torch.randint(10, (48,))) for _ in range(5)]

    def evaluate(folder):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return ad.evaluate(
                model, data, grid=ad.Grid((0, 1), (0, 0.5, 1)), num_samples=16, resume=folder
            )

    whole, resumed = evaluated_with_interruption(evaluate, tmp_path / "parts", monkeypatch)
    same_scores(resumed, whole)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a text, a configuration of it, and a run that was left alone."""
    folder = tmp_path_factory.mktemp("trained")
    shared_gpu.write_text(folder / "text")
    config = shared_gpu.config(folder / "text")
    train.run(config, folder / "whole", device="cuda", progress=False)
    return folder, config


@pytest.mark.parametrize("carry", ["deterministic", "sampled"])
@pytest.mark.parametrize("kernels", [True, False])
def test_an_interrupted_text_ends_with_the_same_scores(
    trained, carry, kernels, tmp_path, monkeypatch
):
    folder, config = trained
    model, _, _ = train.load_model(folder / "whole", device="cuda")
    text = load_text(config.data.name, level="word")
    stream = StreamSettings(window=6, stripes=2, carry=carry)
    request = Request(ad.Grid((0, 1), (0, 0.5, 1)), Plan(4), stream=stream)
    if not kernels:
        monkeypatch.setattr("afterdrop.kernels.why_not", lambda device: "disabled by the test")
    elif carry == "deterministic":
        monkeypatch.setattr(GenericEngine, "run", None)  # must not be called

    def evaluate(resume):
        execution = Execution(windows=2, resume=resume)
        return run_text(model, text.valid, text.vocabulary.eos_id, request, execution)

    whole, resumed = evaluated_with_interruption(evaluate, tmp_path / "parts", monkeypatch)
    same_scores(resumed, whole)


def test_an_interrupted_training_ends_with_the_same_weights(trained, tmp_path, monkeypatch):
    """After the first of two validations, and in the middle of the second interval.

    Up to rounding, as kernels add the gradients of the embedding in no fixed order.
    """
    folder, config = trained
    with monkeypatch.context() as patch:
        interrupt(patch, Trainer, "train_step", after=8)
        with pytest.raises(KeyboardInterrupt):
            train.run(config, tmp_path / "run", device="cuda", progress=False)
    train.run(config, tmp_path / "run", device="cuda", progress=False)
    for which in ("best", "last"):
        ours, theirs = (
            load_file(place / f"checkpoint/{which}.safetensors")
            for place in (tmp_path / "run", folder / "whole")
        )
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            away = (ours[name].double() - tensor.double()).norm()
            assert away <= 1e-4 * tensor.double().norm() + 1e-6, f"{which} {name}"
    ours, theirs = (
        (place / "metrics.jsonl").read_text().splitlines()
        for place in (tmp_path / "run", folder / "whole")
    )
    for line, expected in zip(map(json.loads, ours), map(json.loads, theirs), strict=True):
        assert line["step"] == expected["step"]
        assert line["xe"] == pytest.approx(expected["xe"], rel=1e-5)
