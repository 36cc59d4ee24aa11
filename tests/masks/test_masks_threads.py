"""Threads: predictions are those of one thread, and nothing of the model is left changed."""

import copy
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import afterdrop as ad


def normalised():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4)
    )
    model(torch.randn(64, 8))
    return model.eval()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def inputs(model):
    generator = torch.Generator().manual_seed(2)
    shape = (6, 3, 8) if isinstance(model, nn.Sequential) else (6, 3, 5, 16)
    return list(torch.randn(shape, generator=generator))


@pytest.mark.parametrize("make", [normalised, Encoder])
@pytest.mark.parametrize("copies", [False, True])
def test_two_threads_predict_what_one_does(make, copies):
    model = make().eval()
    predict = ad.Predictor(model, ad.Member(0.5, 0.8), num_samples=10)
    xs = inputs(model)
    wanted = [predict(x) for x in xs]
    plain, before = model(xs[0]), copy.deepcopy(model.state_dict())
    local = threading.local()

    def predicted(x):
        if not copies:
            return predict(x)
        if not hasattr(local, "predict"):
            local.predict = copy.deepcopy(predict)
        return local.predict(x)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(predicted, xs * 10))
    for number, result in enumerate(found):
        assert torch.equal(result, wanted[number % len(xs)])
    assert not any(module.training for module in model.modules())
    assert torch.equal(model(xs[0]), plain)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_first_calls_may_come_from_several_threads_at_once():
    model, wanted = normalised(), ad.Predictor(normalised(), ad.AMC, num_samples=10)
    xs = inputs(model)
    predict = ad.Predictor(model, ad.AMC, num_samples=10)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(predict, xs))
    for x, result in zip(xs, found):
        assert torch.equal(result, wanted(x))


@pytest.mark.parametrize("train", [False, True])
def test_another_model_in_another_thread_disturbs_nothing(train):
    model, other = Encoder().eval(), Encoder().train(train)
    predict = ad.Predictor(model, ad.AMC, num_samples=10)
    xs = inputs(model)
    wanted = [predict(x) for x in xs]
    data = [(xs[0], torch.tensor([0, 1, 2]))]
    expected = ad.evaluate(model, data, grid=ad.Grid((1,), (0, 1)), num_samples=4)
    stop = threading.Event()
    faults = []

    def busy():
        optimiser = torch.optim.SGD(other.parameters(), 0.01)
        try:
            while not stop.is_set():
                loss = other(xs[0]).square().mean()
                if train:
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
        except Exception as error:
            faults.append(error)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        found = [predict(x) for x in xs * 3]
        scores = ad.evaluate(model, data, grid=ad.Grid((1,), (0, 1)), num_samples=4)
    finally:
        stop.set()
        thread.join()
    assert not faults
    assert all(torch.equal(f, wanted[n % len(xs)]) for n, f in enumerate(found))
    assert torch.equal(scores.values(ad.AMC).whole, expected.values(ad.AMC).whole)
    assert all(module.training is train for module in other.modules())


def test_models_that_share_a_module_take_turns():
    """Two heads on one backbone, each with its own predictor in its own thread."""
    torch.manual_seed(3)
    backbone = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5))
    models = [nn.Sequential(backbone, nn.Linear(32, 4)).eval() for _ in range(2)]
    predictors = [ad.Predictor(model, ad.AMC, num_samples=20) for model in models]
    x = torch.randn(4, 8)
    wanted = [predict(x) for predict in predictors]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda number: predictors[number % 2](x), range(60)))
    assert all(torch.equal(f, wanted[n % 2]) for n, f in enumerate(found))


FORKING = """
import os, signal, sys, threading, warnings
import torch
from torch import nn
import afterdrop as ad

warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 5)).eval()
x, predict = torch.randn(200, 16), ad.Predictor(net, ad.AMC, 8)
expected, ended, started = predict(x), [], threading.Event()

def work():
    while not ended:
        predict(x)
        started.set()

thread = threading.Thread(target=work)
thread.start()
started.wait()
found = []
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        other = ad.Predictor(net, ad.AMC, 12)
        other(x)  # with tables of its own
        os._exit(0 if torch.equal(predict(x), expected) else 1)
    found.append(os.waitpid(pid, 0)[1])
ended.append(True)
thread.join()
sys.exit(str(found) if any(found) else 0)
"""


@pytest.mark.subprocess
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked")
def test_a_process_that_is_forked_while_a_thread_predicts_predicts_too():
    done = subprocess.run(
        [sys.executable, "-c", FORKING],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
