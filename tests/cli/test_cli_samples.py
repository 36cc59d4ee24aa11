"""The command line with samples in files: scores, a choice by a criterion, and its page."""

import numpy as np
import pytest

import afterdrop as ad
from afterdrop.cli import main
from afterdrop.report.report_input import read_input
from afterdrop.report.run_page import build_run_page


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 4, 80)
    logits = np.eye(4)[targets] + rng.normal(size=(5, 80, 4))
    np.save(tmp_path / "all.npy", logits)
    np.save(tmp_path / "targets.npy", targets)
    for number, one in enumerate(logits):
        np.save(tmp_path / f"member{number}.npy", one)
    return tmp_path


def test_samples_are_evaluated_chosen_from_and_shown(files, capsys):
    run, targets = files / "run", ["--targets", str(files / "targets.npy")]
    out = ["--out", str(run), "--temperatures", "0.1", "10"]
    assert main(["evaluate", "--samples", str(files / "all.npy"), *targets, *out]) == 0
    printed = capsys.readouterr().out
    assert "best alone" in printed and "mean of all" in printed
    scores = ad.Run(run).scores()
    expected = ad.evaluate_samples(
        np.load(files / "all.npy"), np.load(files / "targets.npy"), temperatures=(0.1, 10.0)
    )
    assert scores.protocol == expected.protocol and scores.xe(ad.AMC) == expected.xe(ad.AMC)

    best = scores.protocol.ensemble.best
    members = [str(files / f"member{number}.npy") for number in range(5)]
    other = ["--split", "shifted", "--single", str(best), "--quiet"]
    assert main(["evaluate", "--samples", *members, *targets, *out, *other]) == 0
    assert ad.Run(run).scores("shifted").protocol.ensemble.models[2] == "member2"

    assert main(["select", str(run), "--by", "brier", "--also", "shifted"]) == 0
    printed = capsys.readouterr().out
    assert "of the Brier score over the best member alone" in printed
    assert "On shifted: gain of" in printed and ".choice.predictor(models)" in printed
    choice = ad.Run(run).choice
    assert (choice.by, choice.also[0].name) == ("brier", "shifted")

    page, outcome = build_run_page(read_input(run))
    assert outcome.member == choice.member and "the best member alone" in page.headline
    section = next(s for s in page.sections if s.name == "chosen")
    captions = {table.caption: table for table in section.tables}
    assert captions["The choice on other data"].rows[0][0] == "shifted"
    assert len(captions["Each member alone, T = 1"].rows) == 5
    ranking = next(t for c, t in captions.items() if c.startswith("Best of"))
    assert ranking.head[-1] == "shifted" and all(len(row) == 5 for row in ranking.rows)
    assert any("chosen by brier" in text for text in section.paragraphs)
    commands = next(s for s in page.sections if s.name == "repeat").commands
    assert "--samples SAMPLES --targets TARGETS" in commands[0]
    assert commands[-2].endswith("--by brier --also shifted")
    for text in (page.headline, *section.paragraphs):
        assert "dropout" not in text and "mask" not in text


def test_the_same_samples_succeed_again_and_others_are_refused(files, capsys):
    arguments = ["evaluate", "--samples", str(files / "all.npy"), "--quiet"]
    arguments += ["--targets", str(files / "targets.npy"), "--out", str(files / "run")]
    assert main(arguments) == 0
    before = (files / "run/scores/valid.safetensors").read_bytes()
    assert main(arguments) == 0
    assert "was already there" in capsys.readouterr().out
    changed = np.load(files / "all.npy")
    np.save(files / "all.npy", changed * (1 + 2e-6))  # as another --memory-mib may round
    assert main(arguments) == 0
    assert "was already there" in capsys.readouterr().out
    changed[4, 3, 2] += 0.5
    np.save(files / "all.npy", changed)
    assert main(arguments) == 2
    assert "is of other data" in capsys.readouterr().err
    assert (files / "run/scores/valid.safetensors").read_bytes() == before


def test_samples_of_numbers_are_evaluated_and_their_command_repeats_it(files, capsys):
    rng = np.random.default_rng(1)
    pairs = np.stack([rng.normal(size=(3, 20)), rng.uniform(0.5, 2, size=(3, 20))], -1)
    np.save(files / "pairs.npy", pairs)
    np.save(files / "numbers.npy", rng.normal(size=20))
    command = ["evaluate", "--samples", str(files / "pairs.npy"), "--likelihood", "gaussian"]
    command += ["--targets", str(files / "numbers.npy"), "--out", str(files / "run")]
    assert main([*command, "--alphas", "0", "1", "--quiet"]) == 0
    assert main(["select", str(files / "run")]) == 0
    assert "over the best member alone" in capsys.readouterr().out
    page, _ = build_run_page(read_input(files / "run"))
    commands = next(s for s in page.sections if s.name == "repeat").commands
    assert commands[0].endswith("--alphas 0 1 --likelihood gaussian")


def test_arguments_that_samples_do_not_take_are_refused(files, capsys):
    samples = ["--samples", str(files / "all.npy")]
    given = [*samples, "--targets", str(files / "targets.npy"), "--out", str(files / "run")]
    for arguments, message in [
        (samples, "--samples needs --targets FILE and --out RUN"),
        ([], "give RUN, or MODEL DATA --out RUN, or --samples FILE --targets FILE"),
        (["model:load", *given], "leave out RUN|MODEL"),
        ([*given, "--num-samples", "8"], "leave out --num-samples, which has no effect"),
        ([*given, "--class-dim", "1"], "leave out --class-dim,"),
        (
            [*given, "--batch-dim", "3", "--targets-per-example", "2"],
            "leave out --batch-dim, --targets-per-example, which have no effect",
        ),
        ([*given, "--seed", "1", "--device", "cpu"], "leave out --seed, --device,"),
        ([*given, "--likelihood", "gaussian"], "4 entries in their last dimension"),
        (["mine:load", "mine:batches", "--single", "1"], "--single is the number of a sample"),
        ([*given, "--single", "9"], "single=9 must be the number of a sample, 0 to 4"),
    ]:
        assert main(["evaluate", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["evaluate", *given, "--quiet"]) == 0
    assert main(["evaluate", *given, "--temper", "sample"]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
