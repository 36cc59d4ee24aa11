"""The statistics and readings of `benchmarks/result_bound_study.py`, which decide its verdicts."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import afterdrop as ad

PATH = Path(__file__).parents[2] / "benchmarks" / "result_bound_study.py"


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("result_bound_study", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_differences_are_paired_and_seed_errors_pooled(study):
    clusters = torch.arange(4)

    def measured(values):
        values = torch.tensor(values, dtype=torch.float64)
        return study.Measured({"DET": values}, clusters, ad.DET)

    base = [0.0, 5.0, 1.0, 2.0]  # large differences between tokens cancel in pairs
    found = {
        "none": [measured(base), measured(base)],
        "one": [measured([x + 0.5 for x in base]), measured([x + 0.7 for x in base])],
        "two": [measured([x - 1.0 for x in base]), measured([x - 1.0 for x in base])],
    }
    got = study.differences(found, ["one", "two"], "DET")
    assert got["one"].value == pytest.approx(0.6) and got["two"].value == pytest.approx(-1.0)
    assert got["one"].data_error == pytest.approx(0.0, abs=1e-12)
    # variances of the seeds 0.02 and 0, pooled, of a mean over two seeds
    assert got["one"].seed_error == pytest.approx((0.02 / 2 / 2) ** 0.5)
    assert got["two"].seed_error == got["one"].seed_error
    alone = study.differences({n: runs[:1] for n, runs in found.items()}, ["one"], "DET")
    assert alone["one"].sign == 0  # one seed tells nothing about the error


@pytest.mark.parametrize(
    ("signs", "reading"),
    [
        ({"Jensen": -1, "D_1": 1}, "(a) variance"),
        ({"Jensen": -1, "D_1": 1, "DET at T*": -1}, None),  # DET is not equal
        ({"DET − GMC": -1}, "(b) bias"),
        ({"DET − GMC": -1, "selected": -1}, None),
        ({"DET at T*": -1, "selected": -1}, "(c) regularisation"),
        ({"DET at T*": -1, "Jensen": -1}, None),
        ({}, None),
    ],
)
def test_readings_follow_from_the_signs(study, signs, reading):
    found = {
        name: study.Difference(signs.get(name, 0) * 1.0, 0.1, 0.1) for name in study.QUANTITIES
    }
    assert [name for name, holds in study.readings(found).items() if holds] == (
        [reading] if reading else []
    )
    assert study.verdict(found)[-2] == (reading or "none")


def test_arms_change_what_they_name_and_two_passes_halve_the_steps(study):
    options = study.argparse.Namespace(recipe="pydoc-small", set=[], steps=200, intervals=None)
    options.match = "passes"
    base = study.arm_config(options, "none", 3)
    assert base.seed == 3
    for arm in study.ARMS:
        config = study.arm_config(options, arm, 3)
        steps = config.schedule.steps_per_interval * config.schedule.intervals
        assert steps == (100 if arm in study.TWO_PASSES else 200)
        assert (config.objective != base.objective) == (arm not in ("none", "rates × 0.9"))
    rates = study.arm_config(options, "rates × 0.9", 3).model.settings
    assert rates["output_dropout"] == pytest.approx(0.9 * base.model.settings["output_dropout"])
    options.match = "steps"
    assert study.arm_config(options, "D = 2", 3).schedule == base.schedule
    options.intervals = 5
    fewer = study.arm_config(options, "none", 3).schedule
    assert (fewer.intervals, fewer.steps_per_interval) == (5, 40)
    options.steps = options.intervals = None
    assert (
        study.arm_config(options, "none", 3).schedule
        == study.recipes.load("pydoc-small").config.schedule
    )
