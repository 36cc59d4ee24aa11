"""Trials trained on another machine without Optuna, with `benchmarks/result_tune_gpu.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kendalltau, spearmanr

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ABSENT = ("optuna", "scipy", "sqlalchemy", "tyro", "matplotlib")


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """Runs an action of the script; `train` without the packages that it must not need."""
    for name in ABSENT:
        (tmp_path / "absent").mkdir(exist_ok=True)
        (tmp_path / "absent" / f"{name}.py").write_text(f"raise ImportError('no {name} here')")

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import result_tune_gpu

    def run(action, *arguments):
        arguments = [result_tune_gpu.__file__, action, *map(str, arguments)]
        if action != "train":
            monkeypatch.setattr(sys, "argv", arguments)
            result_tune_gpu.main()
            return capsys.readouterr().out
        path = os.pathsep.join([str(tmp_path / "absent"), *sys.path[1:]])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, check=True)

    return run


def numbers(path):
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


def test_two_rounds_of_a_study_whose_trials_are_trained_elsewhere(script, recipe, tmp_path):
    study, batch, out = tmp_path / "study", tmp_path / "batch.json", tmp_path / "out"
    results = out / "results.jsonl"
    asked = ["--study", study, "--batch", batch, "--recipe", recipe, "--intervals", "2"]
    script("draw", *asked, "--trials", "3", "--set", "schedule.steps_per_interval=3")
    train = ["--batch", batch, "--out", out, "--workers", "2", "--targets", "40"]
    script("train", *train, "--minutes", "1e-4")  # no trial starts
    assert not results.exists()
    script("train", *train)
    assert sorted(numbers(results)) == [0, 1, 2]
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:2]))
    script(
        "train", *train[:-4], "--workers", "1", "--targets", "40"
    )  # trains only the missing trial
    again = [json.loads(line) for line in (lines[2], results.read_text().splitlines()[2])]
    assert again[0]["xe"] == again[1]["xe"] and again[0]["family"] == again[1]["family"]
    results.write_text("".join(lines[:2]))  # without the last result
    script("tell", "--study", study, "--results", results)
    script("draw", *asked, "--trials", "5", "--set", "schedule.steps_per_interval=3")
    drawn = json.loads(batch.read_text())["trials"]
    missing = ({0, 1, 2} - set(numbers(results))).pop()
    assert [trial["number"] for trial in drawn] == [missing, *range(3, 8)]
    script("train", *train)
    told = script("tell", "--study", study, "--results", results)
    assert "round 2: 5 trials" in told and "all rounds: 8 trials" in told
    assert (study / "best.toml").exists() and (study / "study.html").exists()


def test_rank_correlations_are_those_of_scipy(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from tuned_on import rank_correlations

    generator = np.random.default_rng(0)
    for _ in range(20):
        x, y = generator.integers(6, size=15).astype(float), generator.normal(size=15)
        wanted = kendalltau(x, y)[0], spearmanr(x, y)[0]
        assert rank_correlations(x, y) == pytest.approx(wanted, abs=1e-12)
