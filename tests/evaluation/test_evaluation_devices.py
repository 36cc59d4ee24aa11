"""Accelerators without CUDA and without float64: the plain engine serves them."""

import pytest
import torch
from simulated_device import DEVICE, Simulated
from torch import nn

import afterdrop as ad
from afterdrop import kernels
from afterdrop.evaluation.chunks import Memory
from afterdrop.evaluation.engines.dispatch import evaluation_engines
from afterdrop.evaluation.likelihoods.categorical import Categorical


def network():
    torch.manual_seed(0)
    layers = [nn.Dropout(0.2), nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4)]
    return nn.Sequential(*layers).eval()


def moved(model):
    for module in model.modules():
        for name, parameter in module._parameters.items():
            there = nn.Parameter(parameter.data.to(DEVICE), requires_grad=False)
            module._parameters[name] = there
    return model


def test_the_simulated_device_refuses_float64():
    with Simulated():
        x = torch.ones(2).to(DEVICE)
        assert x.device.type == DEVICE.type and (x + 1).device.type == DEVICE.type
        with pytest.raises(TypeError, match="no float64"):
            x.double()


@pytest.mark.parametrize("temper", ["mean", "sample"])
def test_an_evaluation_needs_no_float64_of_its_device(temper):
    grid = ad.Grid((0, 0.5, 1), (0, 0.5, 1), temper)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(10, 6, generator=generator), torch.randint(4, (10,), generator=generator)
    data, options = [(x[:6], y[:6]), (x[6:], y[6:])], {"grid": grid, "num_samples": 8, "blocks": 4}
    expected = ad.evaluate(network(), data, **options)
    with Simulated():
        found = ad.evaluate(moved(network()), data, **options)
    for member in expected.members:
        torch.testing.assert_close(found.values(member).whole, expected.values(member).whole)
        torch.testing.assert_close(found.bounds(member).bound, expected.bounds(member).bound)


@pytest.mark.parametrize("per_example", [True, False])
def test_a_predictor_needs_no_float64_of_its_device(per_example):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    options = {"num_samples": 8, "per_example": per_example}
    for member in (ad.DET, ad.GMC, ad.Member(0.5, 0.8, 1.3), ad.AMC):
        expected = ad.Predictor(network(), member, **options)(x)
        with Simulated():
            found = ad.Predictor(moved(network()), member, **options)(x.to(DEVICE)).cpu()
        torch.testing.assert_close(found, expected)


def test_another_accelerator_gets_the_plain_engine_with_a_sentence():
    with Simulated():
        model = moved(network())
        data = [(torch.randn(4, 6), torch.randint(4, (4,)))]
        scores = ad.evaluate(model, data, num_samples=4)
        sites = ad.find_sites(model, data[0][0].to(DEVICE))
        memory = Memory.of(DEVICE)
        engines, reason = evaluation_engines(model, scores.protocol, Categorical(), sites, memory)
    assert not engines.engine.kernels
    assert reason == f"{DEVICE.type} is not a CUDA device"


def test_kernels_refuse_cards_that_they_were_not_made_for(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(kernels, "_installed", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert kernels.why_not(device) == (
        "the kernels were made for NVIDIA GPUs, and this is an AMD GPU"
    )
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert kernels.why_not(device) == "Tesla T4 is older than the Ampere generation"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kernels.why_not(device) is None
