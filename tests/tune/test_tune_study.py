import json
import re
import subprocess
import sys
import tomllib
import traceback

import pytest
import torch

from afterdrop import recipes
from afterdrop.cli import main
from afterdrop.recipes import to_toml
from afterdrop.report.run_page import render
from afterdrop.report.study_figures import study_slices
from afterdrop.report.study_page import build_study_page
from afterdrop.train import load_model
from afterdrop.tune import trial_training
from afterdrop.tune.checks import TuneError
from afterdrop.tune.optuna_backend import Backend
from afterdrop.tune.search_space import Axis, Space
from afterdrop.tune.study_result import rank
from afterdrop.tune.study_runner import run_study
from afterdrop.tune.study_settings import TuneSettings, plan_study
from afterdrop.tune.trials import Trial, ends
from afterdrop.tune.worker import Workplace


def log_axis(name, low, high):
    return Axis(name, low, high, log=True)


def run(settings, folder, trials=3, **others):
    others = {"reruns": 0, "devices": ["cpu"], "quiet": True, **others}
    return run_study(settings, folder, trials=trials, **others)


@pytest.mark.slow
def test_from_the_command_line_to_a_recipe_that_trains(recipe, tmp_path, capsys):
    study = tmp_path / "study"
    arguments = ["tune", str(recipe), "--study", str(study), "--intervals", "2", "--device", "cpu"]
    arguments += ["--set", "schedule.steps_per_interval=3", "--range", "model.input_dropout=0:0.5"]
    assert main([*arguments, "--trials", "8", "--top", "2", "--reruns", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("trial 000") == 8 and out.count("rerun ") == 4 and " ± " in out
    tuned = recipes.load(study / "best.toml")
    assert tuned.config.schedule.steps_per_interval == 3 and tuned.config.schedule.intervals == 2
    assert "± " in tuned.description and "tuned" in tuned.source["optimiser.learning_rate"]
    first = json.loads((study / "study.json").read_text())["ranking"][0]
    assert len(first["reruns"]) == 2
    assert tuned.config.to_dict()["model"]["input_dropout"] == first["point"]["model.input_dropout"]
    assert main(["train", str(study / "best.toml"), "--out", str(tmp_path / "r"), "--quiet"]) == 0
    # The same command finds everything done; with more trials it continues.
    assert main([*arguments, "--trials", "8", "--top", "2", "--reruns", "2"]) == 0
    assert "rerun " not in capsys.readouterr().out
    assert main([*arguments, "--trials", "9", "--top", "2", "--reruns", "0", "--quiet"]) == 0
    assert (study / "trials" / "0008").exists()
    page = (study / "study.html").read_text()
    assert (
        "Values along each setting" in page and page.count("<svg") == 3
    )  # too few trials for importance


def test_the_value_of_a_trial_is_the_objective_of_its_run(settings, tmp_path):
    result = run(settings, tmp_path / "s")
    for row in result.trials:
        folder = tmp_path / "s" / "trials" / f"{row.number:04d}"
        worth = settings.objective.of_run(folder, "cpu", None)
        assert (row.value, row.notes["temperature"]) == (worth.xe, worth.temperature)
        config = load_model(folder).config
        assert config.optimiser.learning_rate == row.point["optimiser.learning_rate"]
        assert config.validation.criterion == "optimal"
        assert not (folder / "checkpoint" / "last.safetensors").exists()
    assert result.ranking[0].tuned == min(row.value for row in result.trials)


def test_the_same_seed_gives_the_same_study(settings, tmp_path):
    one, other = run(settings, tmp_path / "a"), run(settings, tmp_path / "b")
    assert [(r.point, r.value) for r in one.trials] == [(r.point, r.value) for r in other.trials]


def test_a_study_of_other_settings_is_refused(settings, recipe, tmp_path):
    run(settings, tmp_path / "s", trials=1)
    with pytest.raises(TuneError, match="sampler: 'gp' → 'random'"):
        run(plan_study(str(recipe), prune=False, sampler="random"), tmp_path / "s")
    for url in ("mysql://me:secret@host/db", "sqlite://", "study.db"):
        with pytest.raises(TuneError, match="must be sqlite"):
            run(settings, tmp_path / "t", storage=url)
    with pytest.raises(TuneError, match="name='a/b'"):
        run(settings, tmp_path / "t", name="a/b")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@localhost:1/db",
        "postgresql://localhost:1/db?user=me&password=secret",
        "postgresql://localhost:1/db?passwd=secret",
        "postgresql://localhost:1/db?password=a&secret",
        "postgresql://me:se@cret-secret@localhost:1/db",
        "postgresql://me:secret/x@localhost:1/db",
        "postgresql://me:secret?x@localhost:1/db",
        "postgresql://me:12secret@localhost/db",
        "postgresql://localhost:secret/db",
        "postgresql://me:secret@[::1/db",
        "postgresql:/me:secret@localhost/db",
        "postgres//me:secret@localhost/db",
        "mysql://me:secret@localhost/db",
    ],
)
def test_no_message_shows_the_password_of_a_storage(url, tmp_path):
    with pytest.raises(TuneError, match="storage=") as caught:
        Backend(tmp_path, url, "s")
    said = "".join(traceback.format_exception(caught.value))
    assert "secret" not in said and "\n" not in str(caught.value)


def test_divergence_is_recorded_and_the_study_continues(recipe, tmp_path):
    ranges = [Axis("optimiser.learning_rate", 1e29, 1e30)]
    ranges += [Axis("objective.l2_penalty", 1e-6, 1e18, log=True)]
    wild = plan_study(str(recipe), ranges=ranges, prune=False)
    result = run(wild, tmp_path / "s", trials=4)
    assert {row.state for row in result.trials} == {"complete", "failed"}
    failed = [row for row in result.trials if row.state == "failed"]
    assert all(row.notes["reason"].startswith("diverged: the training loss") for row in failed)
    assert "diverged" in render(build_study_page(result, tmp_path))


def test_a_study_in_which_all_trials_fail_stops_with_the_reason(recipe, tmp_path):
    huge = plan_study(str(recipe), budget=10**15, prune=False)  # more memory than any machine has
    with pytest.raises(TuneError, match=r"all 5 trials failed.*out of memory: \[enforce fail"):
        run(huge, tmp_path / "s", trials=9)
    with pytest.raises(TuneError, match=r"none of 1 trials is complete.*out of memory"):
        run(huge, tmp_path / "t", trials=1)


def test_running_out_of_memory_is_recorded_and_the_study_continues(settings, tmp_path, monkeypatch):
    calls = []

    def out_of_memory_once(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return real(*arguments, **options)

    real = trial_training.run_training
    monkeypatch.setattr(trial_training, "run_training", out_of_memory_once)
    result = run(settings, tmp_path / "s")
    assert [row.state for row in result.trials] == ["complete", "failed", "complete"]
    assert result.trials[1].notes["reason"].startswith("out of memory: CUDA")


@pytest.mark.slow
def test_an_unknown_error_ends_the_worker_and_the_point_is_tried_again(
    settings, tmp_path, monkeypatch
):
    real = trial_training.run_training

    def broken(*arguments, **options):
        monkeypatch.setattr(trial_training, "run_training", real)
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(trial_training, "run_training", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        run(settings, tmp_path / "s")
    result = run(settings, tmp_path / "s")
    assert [row.state for row in result.trials][:2] == ["failed", "complete"]
    assert result.trials[0].point == result.trials[1].point
    assert len(ends(result.trials)) == 3


def test_missing_data_end_the_study_with_their_message(settings, tmp_path):
    lost = settings.to_dict()
    lost["config"]["data"]["name"] = str(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="nowhere"):
        run(TuneSettings.from_dict(lost), tmp_path / "s")


@pytest.mark.slow
def test_unpromising_trials_are_stopped_early(recipe, tmp_path):
    ranges = [log_axis("optimiser.learning_rate", 1e-7, 1e-1)]
    searched = plan_study(str(recipe), intervals=6, ranges=ranges, sampler="random", seed=5)
    result = run(searched, tmp_path / "s", trials=13)
    pruned = [row for row in result.trials if row.state == "pruned"]
    assert pruned and len(pruned) < 10
    for row in pruned:
        assert 2 <= max(row.curve) < 6
        assert row.value == min(row.curve.values())
        whole = [r for r in result.trials if r.state == "complete" and r.number < row.number]
        better = [r for r in whole if min(r.curve.values()) < row.value]
        assert len(better) >= len(whole) / 2
    assert result.ranking[0].tuned == min(r.value for r in result.trials if r.state == "complete")


def test_a_trial_has_a_time_limit(recipe, tmp_path):
    slow = plan_study(str(recipe), intervals=100_000, minutes=0.02, prune=False)
    result = run(slow, tmp_path / "s", trials=1)
    assert result.trials[0].state == "complete"
    assert result.trials[0].notes["ended"] == "max_minutes"
    assert result.trials[0].notes["interval"] < 100_000


def test_the_ranking_uses_the_reruns_and_not_the_trials():
    rows = [Trial(n, "complete", {}, value) for n, value in enumerate((4.0, 4.1, 4.2, 4.3))]
    again = [
        Trial(n, "complete", {}, value, {"of": of, "seed": seed})
        for n, (of, seed, value) in enumerate([(0, 1, 4.4), (0, 2, 4.6), (1, 1, 4.2), (1, 2, 4.3)])
    ]
    ranked = rank(rows, again, top=3)
    assert [row.number for row in ranked] == [1, 0, 2]
    assert ranked[0].mean == pytest.approx(4.25) and ranked[0].error == pytest.approx(0.05)
    assert ranked[2].error is None


def test_the_page_is_self_contained_and_escapes_names(settings, tmp_path):
    named = TuneSettings.from_dict({**settings.to_dict(), "recipe": "<script>alert(1)</script>"})
    page = render(build_study_page(run(named, tmp_path / "s"), tmp_path))
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    links = re.findall(r'(?:src|href)="([^"#][^"]*)"', page)
    assert [link for link in links if not link.startswith("data:")] == []
    assert "url(http" not in page and "@import" not in page
    again = run(named, tmp_path / "s")
    assert page == render(build_study_page(again, tmp_path))  # the same study, the same bytes


@pytest.mark.parametrize("count", [2, 3, 4])
def test_there_is_one_panel_per_axis(count):
    space = Space(tuple(Axis(f"model.axis{i}", 0.1, 0.9) for i in range(count)))
    panels = study_slices(space, [], 0).get_figure().axes
    assert sum(panel.axison for panel in panels) == count


@pytest.mark.parametrize("name", recipes.names())
def test_writing_and_reading_a_recipe_gives_the_same_recipe(name, tmp_path):
    recipe = recipes.load(name)
    path = tmp_path / f"{name}.toml"
    path.write_text(to_toml(recipe))
    assert recipes.load(path) == recipe
    assert tomllib.loads(path.read_text())["description"] == recipe.description


@pytest.mark.subprocess
def test_without_optuna_only_running_a_study_needs_it(tmp_path):
    code = (
        "import sys; sys.modules['optuna'] = None\n"
        "from afterdrop.tune import plan_study; plan_study('ptb-10m')\n"
        "from afterdrop.cli import main; sys.exit(main(['tune', 'digits-mlp', '--study', 's']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and "pip install 'afterdrop[tune]'" in done.stderr


def test_a_password_is_not_on_the_command_line_of_a_worker():
    place = Workplace("f", "postgresql://me:secret@host/db", "n", 3)
    assert Workplace(**json.loads(place.to_json())) == place
