"""Incomplete input: tables name what is missing and the command for it, and show the rest."""

import random
import shutil

import pytest
import torch

from afterdrop import Scores
from afterdrop.cli import main
from afterdrop.errors import FileError
from afterdrop.evaluation.scores.schema import expected
from afterdrop.reproduce.tables.build_tables import paper_tables
from afterdrop.reproduce.tables.table_input import read_table_input
from afterdrop.reproduce.tables.table_writers import to_text

SMALL = ["model.hidden_sizes=[8]", "schedule.intervals=1", "schedule.steps_per_interval=3"]
SMALL += ["schedule.drop_latest=1", "objective.batch_size=4", "objective.window=10"]
OPTIONS = ["--num-samples", "4", "--alphas", "0", "0.5", "1", "--multipliers", "0", "0.8", "1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text"
    text.mkdir()
    words = random.Random(0)
    for split, lines in (("train", 200), ("valid", 12), ("test", 12)):
        rows = [" ".join(words.choices("abcdefgh", k=6)) for _ in range(lines)]
        (text / f"{split}.txt").write_text("\n".join(rows) + "\n")
    for name, seed in (("one", 1), ("two", 2)):
        changes = [a for change in [*SMALL, f"seed={seed}"] for a in ("--set", change)]
        out = ["--out", str(folder / name), "--quiet"]
        assert main(["train", "lm", "--data", str(text), *out, *changes]) == 0
    return folder


@pytest.fixture
def runs(trained, tmp_path):
    """A copy of the folder with a run `one` that has Scores of all splits, and a bare run `two`."""
    if not (trained / "one" / "scores").exists():
        for split in ("train", "valid", "test"):
            arguments = ["evaluate", str(trained / "one"), "--split", split, "--limit", "40"]
            assert main([*arguments, *OPTIONS, "--quiet"]) == 0
    for name in ("one", "two"):
        shutil.copytree(trained / name, tmp_path / name)
    return tmp_path


def words(tables, number):
    return to_text(tables[number - 1])


def test_a_limit_is_kept_with_the_scores(runs):
    scores = Scores.load(runs / "one" / "scores" / "train.safetensors")
    assert scores.num_targets == 40 and scores.request.limit == 40
    assert "first 40 targets" in words(paper_tables([runs / "one"]), 1)


def test_a_run_without_scores_is_named_and_the_others_are_shown(runs):
    tables = paper_tables([runs / "one", runs / "two"])
    for number, split in ((1, "train"), (2, "valid"), (3, "train"), (4, "valid")):
        text = words(tables, number)
        assert f"afterdrop evaluate {runs / 'two'} --split {split}" in text
        assert "  ours " in text and "one: " in text
    assert "model.state_sharing=step" in words(tables, 5)


def test_missing_splits_are_listed_with_their_command(runs):
    (runs / "one" / "scores" / "test.safetensors").unlink()
    tables = paper_tables([runs / "one"])
    assert "--split test" in words(tables, 4) and "T = 1" in words(tables, 4)


def test_scores_of_another_model_are_not_shown(runs):
    shutil.copytree(runs / "one" / "scores", runs / "two" / "scores")
    source = read_table_input(runs / "two")
    assert not source.scores and set(source.faults) == {"train", "valid", "test"}
    text = words(paper_tables([runs / "two"]), 2)
    assert "Scores of another model" in text and "--overwrite" in text and "ours" not in text


def test_scores_without_the_weights_must_agree_with_each_other(runs, capsys):
    changes = ["--num-samples", "2", "--alphas", "0", "--multipliers", "0", "--quiet"]
    assert main(["evaluate", str(runs / "two"), "--split", "test", *changes]) == 0
    name = "scores/test.safetensors"
    shutil.copy(runs / "two" / name, runs / "one" / name)
    shutil.rmtree(runs / "one" / "checkpoint")
    source = read_table_input(runs / "one")
    assert set(source.scores) == {"train", "valid"} and "another model" in source.faults["test"]


def test_a_damaged_file_is_named(runs):
    path = runs / "one" / "scores" / "valid.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    text = words(paper_tables([runs / "one"]), 2)
    assert "is damaged" in text and "--split valid --num-samples 100 --overwrite" in text


def test_members_that_were_not_evaluated_leave_gaps(runs):
    text = words(paper_tables([runs / "one"]), 2)
    assert "multipliers 0, 0.8, 1 only" in text and "–" in text


def test_a_temperature_outside_the_range_of_the_test_scores_is_reported(runs):
    """The members were evaluated, so the remedy is another range and not another grid."""
    arguments = ["evaluate", str(runs / "one"), "--split", "test", "--limit", "40", "--overwrite"]
    assert main([*arguments, *OPTIONS, "--quiet", "--temperatures", "20", "40"]) == 0
    text = " ".join(words(paper_tables([runs / "one"]), 4).split())
    assert "lies outside the bracket 20 to 40" in text
    assert "--split test --overwrite --temperatures LOW HIGH" in text


def set_to_nan(run, *groups):
    """Makes every number of some groups of the validation scores NaN."""
    path = run / "scores" / "valid.safetensors"
    scores = Scores.load(path)
    for spec in expected(scores.protocol):
        if spec.group in groups and spec.dtype.is_floating_point:
            tensor = scores.field(spec.group, spec.field)
            scores.tensors[spec.name] = torch.full_like(tensor, torch.nan)
    scores.save(path)


def test_tables_of_a_model_that_gives_only_nan(runs):
    set_to_nan(runs / "one", "deterministic", "sampled")
    for table in paper_tables([runs / "one"])[1:4]:
        assert "not finite" in to_text(table)


def test_nan_is_shown_and_explained(runs):
    set_to_nan(runs / "one", "sampled")
    tables = paper_tables([runs / "one"])
    for number in (2, 3, 4):
        text = words(tables, number)
        assert "NaN" in text or number == 4
        assert "not finite" in text and "one: " in text
    finite = next(line for line in tables[3].rows[1].lines if line.name == "ours").values
    assert finite[0] is not None and finite[1] is None  # DET is finite, the others are not


def test_scores_of_a_users_own_model_fill_the_tables_that_need_no_data(runs):
    (runs / "one" / "config.json").unlink()
    tables = paper_tables([runs / "one"])
    assert "own data" in words(tables, 2)
    assert "Scores.by_frequency" in words(tables, 3) and "optimal T" in words(tables, 4)


def test_without_the_data_only_table_3_is_missing(runs, trained):
    (trained / "text").rename(trained / "moved")
    try:
        tables = paper_tables([runs / "one"])
    finally:
        (trained / "moved").rename(trained / "text")
    assert "--data DIR" in words(tables, 3) and not tables[2].rows
    assert tables[1].rows


def test_folders_that_are_not_runs(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="holds neither a training run nor scores"):
        paper_tables([tmp_path / "empty"])
    tables = paper_tables([runs / "one", tmp_path / "nowhere"])
    assert all("nowhere is not a folder" in to_text(table) for table in tables)


@pytest.mark.slow
def test_the_command_writes_all_tables_and_rejects_bad_options(runs, capsys, tmp_path):
    out = tmp_path / "tables"
    assert main(["reproduce", str(runs / "one"), "--out", str(out), "--bands", "> 3", "< 4"]) == 0
    printed = capsys.readouterr().out
    assert all(f"Table {number}. " in printed for number in range(1, 6))
    assert ": > 3," in (out / "table3.txt").read_text()
    assert len(list(out.glob("table*"))) == 21
    drawn = {path.name: path.read_bytes() for path in (out / "figures").iterdir()}
    assert {f"one-{name}.pdf" for name in ("map", "map-tuned", "tightness", "samples")} <= set(
        drawn
    )
    assert all(content.startswith(b"%PDF") for content in drawn.values())
    assert main(["reproduce", str(runs / "one"), "--out", str(out), "--quiet"]) == 0
    assert drawn == {path.name: path.read_bytes() for path in (out / "figures").iterdir()}
    capsys.readouterr()
    for arguments, message in (
        (["reproduce"], "no run is given"),
        (["reproduce", str(tmp_path / "no")], "is not a folder"),
        (["reproduce", str(runs / "one"), "--bands", "x"], "the band 'x'"),
        (["reproduce", "--all"], "--out FOLDER"),
        (["reproduce", "--all", "--out", str(tmp_path / "c"), "--minutes", "0"], "minutes=0"),
        (["evaluate", str(runs / "two"), "--limit", "0"], "limit=0"),
        (["evaluate", "a:b", "c:d", "--out", "x", "--limit", "3"], "--limit is for"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
