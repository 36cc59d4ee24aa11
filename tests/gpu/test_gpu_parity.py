"""The same masks and the same scores on a GPU as on a CPU."""

from functools import partial

import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.data import EvalStripes
from afterdrop.evaluation.engines.dispatch import Dispatcher, EngineMaker
from afterdrop.evaluation.loop import Execution, run_evaluation
from afterdrop.evaluation.request import Request, StreamSettings
from afterdrop.evaluation.text_windows import open_windows
from afterdrop.masks.uniforms import Plan, site_key, uniforms
from afterdrop.models import LanguageModel, LanguageModelConfig
from afterdrop.transfer import upload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("scheme", ["lhs", "iid", "antithetic"])
def test_uniforms_are_equal_to_the_bit_on_both_devices(scheme):
    plan, key = Plan(24, 3, scheme), site_key(3, "site", 0)
    examples = torch.tensor([0, 5, 10**9])
    here = uniforms(plan, key, range(3, 20), examples, (7, 33))
    there = uniforms(plan, key, range(3, 20), examples, (7, 33), device="cuda")
    assert torch.equal(here, there.cpu())


def mlp():
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 5))


def cnn():
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten()]
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 5)), *layers, nn.Linear(48, 5), nn.AlphaDropout(0.2)
    )


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 16, 2, dropout=0.4, batch_first=True)
        self.out = nn.Linear(16, 5)

    def forward(self, x):
        return self.out(self.rnn(x.unflatten(1, (4, 5)))[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(20, 4, 32, dropout=0.2, batch_first=True)
        self.out = nn.Linear(20, 5)

    def forward(self, x):
        return self.out(self.layer(x.unsqueeze(1).expand(-1, 3, -1)).mean(1))


@pytest.mark.parametrize("make", [mlp, cnn, Recurrent, Attention])
def test_scores_agree_within_float_tolerance(make):
    torch.manual_seed(0)
    model = make().eval()
    data = [(torch.randn(30, 20), torch.randint(5, (30,))) for _ in range(2)]
    grid = ad.Grid((0, 0.5, 1), (0, 0.5, 1))
    here = ad.evaluate(model, data, grid=grid, num_samples=16)
    there = ad.evaluate(model.cuda(), data, grid=grid, num_samples=16)
    for member in here.members:
        a, b = here.values(member).whole, there.values(member).whole
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
        assert (
            abs(here.fit(member).member.temperature / there.fit(member).member.temperature - 1)
            < 0.01
        )


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_inputs_reach_the_device(layout):
    """Unlike dense tensors, they cannot be pinned."""
    mixing = getattr(torch.eye(16).roll(1, 0), layout)()
    found = upload(mixing, torch.device("cuda"))
    assert found.layout is mixing.layout and torch.equal(found.to_dense().cpu(), mixing.to_dense())


def test_language_model_scores_agree():
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocabulary=50,
        hidden_sizes=(32, 32),
        input_dropout=0.3,
        state_dropout=0.3,
        output_dropout=0.5,
    )
    model = LanguageModel(config).eval()
    text = torch.randint(50, (300,))
    options = {"grid": ad.Grid((0, 1), (0, 1)), "num_samples": 8, "window": 20, "lines": False}
    for carry in ("deterministic", "sampled"):
        here = ad.evaluate_text(model.cpu(), text, 0, carry=carry, **options)
        there = ad.evaluate_text(model.cuda(), text, 0, carry=carry, **options)
        for member in here.members:
            torch.testing.assert_close(
                here.values(member).whole, there.values(member).whole, rtol=2e-3, atol=2e-3
            )


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_no_batch_after_the_first_waits_for_the_device():
    """The first batch compiles, captures a graph and copies constants. Some targets are padding."""
    from afterdrop.evaluation.engines.text_fused import TextFusedEngine

    begun = []

    class StrictEngine(TextFusedEngine):
        def begin(self, batch, number):
            begun.append(number)
            if len(begun) > 1:
                torch.cuda.set_sync_debug_mode("error")
            return super().begin(batch, number)

    def strict(model, protocol, likelihood, sites, memory):
        make = partial(StrictEngine, model, protocol, likelihood, memory)
        return Dispatcher([EngineMaker(make, kernels=True)], memory, "the evaluation"), None

    torch.manual_seed(0)
    rates = {"input_dropout": 0.3, "state_dropout": 0.3, "output_dropout": 0.5}
    model = LanguageModel(LanguageModelConfig(50, (32, 32), **rates)).eval().cuda()
    text = torch.randint(50, (401,))
    request = Request(ad.Grid((0, 1), (0, 1)), Plan(8), stream=StreamSettings(20, 3))
    execution = Execution(windows=2)
    windows = open_windows(model, EvalStripes(text, 0, 3, 20, lines=False), request, execution)
    wanted = run_evaluation(model, windows, request, execution, len(text))
    try:
        found = run_evaluation(model, windows, request, execution, len(text), strict)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert begun == [0, 1, 2, 3]
    for name, tensor in wanted.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-5, atol=1e-5)


def test_a_predictor_on_a_gpu_is_deterministic():
    torch.manual_seed(0)
    predict = ad.Predictor(mlp().cuda(), ad.AMC, num_samples=16)
    x = torch.randn(9, 20, device="cuda")
    assert torch.equal(predict(x), predict(x))
    torch.testing.assert_close(predict(x)[:3], predict(x[:3]), rtol=1e-4, atol=1e-4)
