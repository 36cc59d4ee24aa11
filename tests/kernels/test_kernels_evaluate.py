"""`FusedLanguageWorker` against `LanguageWorker`: every tensor of the scores.

Operands are float32 here, so both differ by rounding alone: within 1e-5 (from states that tf32
products carried: 5e-3), but partitions and differences of halves, where 1/T is up to 16, within 50
times that.
"""

import dataclasses
import importlib

import kernel_device
import pytest
import torch

import afterdrop as ad
from afterdrop.data.stream import EvalStripes
from afterdrop.errors import DataError
from afterdrop.evaluate.evaluate import Settings, run_evaluation
from afterdrop.evaluate.fused_language import FusedLanguageWorker
from afterdrop.evaluate.language import LanguageWorker, StreamSettings
from afterdrop.evaluate.passes import Reader
from afterdrop.evaluate.windows import Windows
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel, LanguageModelConfig
from afterdrop.models.fused import Copies, DeterministicPass

pytestmark = kernel_device.quiet
device = kernel_device.device
V = 13


class Float32Worker(FusedLanguageWorker):
    dtype = torch.float32
    chunks = plain = 0  # of the kernels, and batches of the plain form

    def _windows(self, *args):
        self.chunks += 1
        return super()._windows(*args)

    def _shrinking(self, *args):
        self.plain += 1
        return super()._shrinking(*args)


def build(device, **options):
    torch.manual_seed(1)
    model = LanguageModel(LanguageModelConfig(vocabulary=V, **options)).eval().to(device)
    with torch.no_grad():
        for parameter in model.parameters():  # initial weights hardly tell one mask from another
            parameter.mul_(3)
    return model


def evaluated(model, kind, stream, *, fused_states=False, alphas=(0, 1)):
    """The scores of a text of 9 tokens, and the worker that made them."""
    text = torch.randint(1, V, (9,), generator=torch.Generator().manual_seed(0))
    stripes = EvalStripes(text, 0, stream.stripes, stream.time, lines=False)
    passes = None
    if fused_states:
        copies = Copies(model, torch.float32)
        copies.pack()
        passes = DeterministicPass(copies, stream.stripes, stream.time)
    settings = Settings(ad.Grid(alphas, (0, 0.5, 1)), Plan(4), temperatures=(0.125, 8))
    settings = dataclasses.replace(settings, stream=stream.named(), reader=Reader(0, -100))
    made = []

    def worker(*args):
        made.append(kind(*args, stream=stream))
        return made[0]

    windows = Windows(model, stripes, stream.windows, passes)
    return run_evaluation(model, windows, settings, worker), made[0]


def assert_same(found, wanted, tolerance=1e-5):
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        near = tolerance * (50 if name.endswith(("partition", "half")) else 1)
        mine = found.tensors[name]
        assert mine.dtype == tensor.dtype and mine.shape == tensor.shape, name
        torch.testing.assert_close(mine, tensor, rtol=near, atol=near, msg=lambda m, n=name: n + m)


MODELS = {
    "two layers": {
        "hidden_sizes": (6, 6),
        "input_dropout": 0.4,
        "inter_layer_dropout": 0.2,
        "state_dropout": 0.3,
        "output_dropout": 0.5,
    },
    "projection": {
        "hidden_sizes": (6,),
        "embedding_size": 4,
        "input_dropout": 0.4,
        "input_sharing": "sequence",
        "state_dropout": 0.3,
        "state_sharing": "step",
        "output_dropout": 0.5,
        "projection_dropout": 0.2,
    },
    "untied plain stack": {
        "hidden_sizes": (5, 5),
        "tied": False,
        "stacking": "plain",
        "input_gate": "plain",
        "state_dropout": 0.3,
        "output_dropout": 0.4,
        "output_sharing": "sequence",
    },
}


@pytest.mark.parametrize(
    ("name", "lifetime"),
    [
        ("two layers", "window"),
        ("two layers", "stream"),
        ("projection", "stream"),
        ("untied plain stack", "window"),
    ],
)
def test_all_scores_are_those_of_the_plain_worker(name, lifetime, device):
    model = build(device, **MODELS[name])
    stream = StreamSettings(time=3, stripes=2, windows=2, lifetime=lifetime)
    alphas = (0, 0.25, 1) if lifetime == "window" else (0, 1)
    found, worker = evaluated(model, Float32Worker, stream, fused_states=True, alphas=alphas)
    wanted, _ = evaluated(model, LanguageWorker, stream, alphas=alphas)
    assert (worker.chunks, worker.plain) == (1, 0)  # all windows at once
    assert_same(found, wanted, kernel_device.within(device, 1e-5, 5e-3))


def test_chunks_of_windows_and_targets_change_nothing(device, monkeypatch):
    """One window and two targets at a time."""
    model = build(device, **MODELS["projection"])
    stream = StreamSettings(time=3, stripes=2, windows=2)
    whole, _ = evaluated(model, Float32Worker, stream, alphas=(1,))
    module = importlib.import_module(FusedLanguageWorker.__module__)
    monkeypatch.setattr(module, "_ROWS", 1)
    monkeypatch.setattr(module, "_LOGITS", 2 * 4 * 16)
    found, worker = evaluated(model, Float32Worker, stream, alphas=(1,))
    assert (worker.chunks, worker.plain, worker.targets_at_once) == (4, 0, 2)
    assert_same(found, whole)


@pytest.mark.parametrize("value", [-200.0, float("-inf")])
def test_too_low_log_probabilities_go_to_the_plain_worker(value, device):
    """Below exp(−150), or a class that is masked: sums underflow. Samples agree to the bit."""
    model = build(device, **MODELS["projection"])
    with torch.no_grad():
        model.softmax_bias[0] = value  # never a target
    stream = StreamSettings(time=3, stripes=2, windows=2)
    found, worker = evaluated(model, Float32Worker, stream, alphas=(1,))
    wanted, _ = evaluated(model, LanguageWorker, stream, alphas=(1,))
    assert worker.plain > 0
    for name, tensor in wanted.tensors.items():
        same = found.tensors[name].nan_to_num(7), tensor.nan_to_num(7)
        if name.startswith("det_"):  # the kernels' pass
            near = kernel_device.within(device, 1e-4, 1e-2)
            torch.testing.assert_close(*same, rtol=near, atol=near)
        else:
            assert torch.equal(*same), name


def test_logits_that_are_no_numbers_are_refused(device):
    model = build(device, **MODELS["projection"])
    stream = StreamSettings(time=3, stripes=2, windows=2)
    with torch.no_grad():
        model.softmax_bias[3] = float("nan")
    with pytest.raises(DataError, match="NaN or infinite logits"):
        evaluated(model, Float32Worker, stream)


def test_carried_states_are_those_of_the_model(device):
    """Three windows without dropout, states copied: within 1e-6 (tf32: 2e-3) of the norm."""
    model = build(device, **MODELS["two layers"])
    copies = Copies(model, torch.float32)
    copies.pack()
    passes = DeterministicPass(copies, 2, 3)
    tokens = torch.randint(V, (3, 2, 3), device=device)
    near = kernel_device.within(device, 1e-6, 2e-3)
    with torch.no_grad():
        for _ in range(2):  # the second time after a reset
            passes.reset()
            state, held = None, []
            for window in tokens:
                y, state = model.features(window, state)
                out = passes.run(window)[..., :6].transpose(0, 1)
                assert kernel_device.relative(out, y) < near
                held.append((state, passes.state))
            for wanted, found in held:  # later windows did not overwrite them
                for pair, ours in zip(wanted, found):
                    assert all(kernel_device.relative(b, a) < near for a, b in zip(pair, ours))
