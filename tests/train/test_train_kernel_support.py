"""Training kernels are opt-in: a setting that their tables do not list is refused."""

from dataclasses import dataclass, fields, replace

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton, which is not installed")

from afterdrop import kernels
from afterdrop.data import load_text
from afterdrop.train import TrainConfig, fused_text
from afterdrop.train.config import SECTIONS
from afterdrop.train.sections import OptimiserSection
from afterdrop.train.text_task import TextTask

CPU = torch.device("cpu")


def test_every_setting_is_listed():
    assert list(fused_text.SUPPORTED) == [field.name for field in fields(TrainConfig)]
    for name, rule in fused_text.SUPPORTED.items():
        if rule != "any":
            assert list(rule) == [field.name for field in fields(SECTIONS[name])], name


def test_a_new_setting_is_refused_until_it_is_listed(text_config, text_folder, monkeypatch):
    @dataclass(frozen=True)
    class Extended(OptimiserSection):
        nesterov: bool = False

    monkeypatch.setattr(kernels, "why_not", lambda device: None)  # as if a CPU could run kernels
    task = TextTask(text_config, load_text(text_folder), CPU)
    model = task.build_model()
    assert fused_text.why_not(text_config, task, model, CPU) is None
    extended = replace(text_config, optimiser=Extended(0.01))
    reason = "optimiser.nesterov is a setting that the kernels do not know"
    assert fused_text.why_not(extended, task, model, CPU) == reason
