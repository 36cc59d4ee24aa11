"""afterdrop dynamic: the search on validation data, and the best settings on test data."""

import dataclasses
import shutil

import pytest

import afterdrop as ad
from afterdrop import recipes, train
from afterdrop.cli import main
from afterdrop.evaluation.dynamic_evaluation import DynamicEvaluation
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.runs import dynamic_search
from afterdrop.train import TrainConfig

TEMPERATURES = (0.5, 2.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dynamic")
    (folder / "text").mkdir()
    for split, line in (
        ("train", "a b c\nb a d\n"),
        ("valid", "d d d\na b c\n"),
        ("test", "d a\n"),
    ):
        (folder / "text" / f"{split}.txt").write_text(line * 20)
    config = TrainConfig.from_dict(
        {
            "data": {"name": str(folder / "text"), "level": "word"},
            "model": {"hidden_sizes": [6], "output_dropout": 0.3},
            "objective": {"batch_size": 4, "window": 6},
            "optimiser": {"learning_rate": 0.01},
            "schedule": {"steps_per_interval": 10, "intervals": 1},
            "validation": {"stripes": 2},
        }
    )
    train.run(config, folder / "run", device="cpu", progress=False)
    return ad.Run.open(folder / "run")


def test_the_best_on_validation_data_is_evaluated_on_test_data(run, capsys):
    options = ["--etas", "1e-5", "0.001", "1e9", "--kappas", "0.02", "--limit", "60", "--test"]
    assert main(["dynamic", str(run.path), *options, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "1e+09      0.02  diverged" in out
    assert "Best on validation data: eta=0.001, kappa=0.02." in out
    settings = DynamicEvaluation(eta=0.001, kappa=0.02)
    text, kept = run.data(), ad.Run.open(run.layout.dynamic)
    for split in ("valid", "test"):
        alone = ad.evaluate_text(
            run.model(),
            text.split(split)[:60],
            text.vocabulary.eos_id,
            grid=ad.Grid((0.0,), (0.0,)),
            split=split,
            window=5,
            temperatures=TEMPERATURES,
            dynamic=settings,
            training=text.train,
        )
        found = kept.scores(split)
        assert found.request.dynamic == settings
        assert found.xe(ad.DET).value == pytest.approx(alone.xe(ad.DET).value, abs=1e-6)
    assert found.xe(ad.DET).value < run_plain(run, "test") - 0.1  # it learns to repeat the text


def run_plain(run, split):
    text = run.data()
    grid = ad.Grid((0.0,), (0.0,))
    scores = ad.evaluate_text(
        run.model(), text.split(split)[:60], text.vocabulary.eos_id, grid=grid, window=5
    )
    return scores.xe(ad.DET).value


def test_it_is_refused_where_there_is_no_text_and_where_all_diverge(run, tmp_path, capsys):
    config = recipes.load("digits-mlp").config.override({"schedule.intervals": 1})
    train.run(config, tmp_path / "digits", device="cpu", progress=False)
    for where, options, message in (
        (tmp_path / "digits", [], "dynamic evaluation is for language models"),
        (run.path, ["--etas", "1e9"], "diverged with every pair of settings; give lower --etas"),
        (run.path, ["--etas", "-1"], "eta=-1.0 must be a number of at least 0"),
    ):
        assert main(["dynamic", str(where), *options, "--limit", "40", "--device", "cpu"]) == 2
        assert message in capsys.readouterr().err
    assert not list(run.layout.dynamic.rglob("settings-*"))


SEARCH = ["--etas", "1e-5", "0.001", "--kappas", "0.02", "--limit", "60", "--device", "cpu"]


@pytest.fixture
def copy(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "run")
    return ad.Run.open(tmp_path / "run")


@pytest.fixture
def evaluated(monkeypatch):
    """The settings that are evaluated, rather than read; the third evaluation is interrupted."""
    settings = []

    def noted(model, tokens, eos, request, execution, **options):
        if len(settings) == 2:
            settings.append("interrupted")
            raise KeyboardInterrupt
        settings.append(request.dynamic)
        return run_text(model, tokens, eos, request, execution, **options)

    monkeypatch.setattr(dynamic_search, "run_text", noted)
    return settings


def test_an_interrupted_search_goes_on_after_the_settings_that_were_finished(
    copy, evaluated, capsys
):
    assert main(["dynamic", str(copy.path), *SEARCH, "--test"]) == 130
    fixed, first = None, DynamicEvaluation(eta=1e-5, kappa=0.02)
    assert evaluated == [fixed, first, "interrupted"]
    assert "2 finished evaluations are kept: the same command resumes" in capsys.readouterr().err
    kept = sorted(copy.layout.dynamic.rglob("settings-*.safetensors"))
    assert len(kept) == 2
    kept[0].write_bytes(kept[0].read_bytes()[:-1])  # a damaged one is evaluated again
    with pytest.warns(UserWarning, match="settings-.*evaluated again"):
        assert main(["dynamic", str(copy.path), *SEARCH, "--test"]) == 0
    assert len(evaluated) == 3 + 4
    resumed = capsys.readouterr().out
    assert not list(copy.layout.dynamic.rglob("settings-*.safetensors"))
    assert main(["dynamic", str(copy.path), *SEARCH, "--test"]) == 0
    assert capsys.readouterr().out == resumed


def test_an_interruption_before_the_first_settings_says_so(copy, evaluated, capsys):
    evaluated += [None, None]
    assert main(["dynamic", str(copy.path), *SEARCH]) == 130
    assert "nothing is kept: the same command starts over" in capsys.readouterr().err


def test_one_search_at_a_time_writes_scores(copy, capsys):
    with ad.Run(copy.layout.dynamic).reserved_scores("valid", overwrite=True):
        assert main(["dynamic", str(copy.path), *SEARCH]) == 2
    assert "another process is evaluating into" in capsys.readouterr().err


def test_scores_of_another_text_are_not_taken_up(copy):
    with dynamic_search.DynamicSearch(copy, limit=40) as search:
        before = search.plain("valid")
        search.text = dataclasses.replace(search.text, valid=search.text.valid.flip(0))
        assert search.plain("valid").xe(ad.DET).value != before.xe(ad.DET).value
