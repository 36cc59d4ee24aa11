"""A mixture of softmaxes through every verb, on a user's own text, in small."""

import random

import pytest

import afterdrop as ad
from afterdrop.cli import main

SMALL = [
    "model.hidden_sizes=[12]",
    "model.embedding_size=6",
    "model.softmax_components=3",
    "model.projection_dropout=0.2",
    "schedule.intervals=1",
    "schedule.steps_per_interval=6",
    "schedule.drop_latest=1",
    "objective.batch_size=4",
    "objective.window=10",
    "validation.stripes=2",
]
MEMBERS = ["--alphas", "0", "1", "--multipliers", "0", "1", "--num-samples", "4", "--quiet"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    text = folder / "text"
    text.mkdir()
    words = random.Random(0)
    for split, lines in (("train", 100), ("valid", 12), ("test", 12)):
        rows = [" ".join(words.choices("abcdefgh", k=6)) for _ in range(lines)]
        (text / f"{split}.txt").write_text("\n".join(rows) + "\n")
    out = folder / "run"
    changes = [argument for change in SMALL for argument in ("--set", change)]
    assert main(["train", "lm", "--data", str(text), "--out", str(out), "--quiet", *changes]) == 0
    return out


def test_verbs_follow_a_temperature_on_components(run, tmp_path, capsys):
    assert main(["evaluate", str(run), "--temper", "component", *MEMBERS]) == 0
    assert main(["select", str(run)]) == 0
    assert "on each component" in capsys.readouterr().out
    assert main(["test", str(run), "--quiet"]) == 0
    found = ad.Run.open(run)
    assert found.choice.member.temper == "component"
    assert found.scores("test").request.grid.temper == "component"
    assert "mixture.projection_dropout" in {site[0] for site in found.scores().protocol.sites}
    (tmp_path / "some.txt").write_text("a b c\n")
    assert main(["score", str(run), str(tmp_path / "some.txt")]) == 0
    assert main(["sample", str(run), "--length", "3"]) == 0
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "each component before they are mixed" in page and "--temper component" in page


def test_lamb_tempers_the_components_of_a_mixture(run, tmp_path):
    assert main(["evaluate", str(run), "--lamb", "--out", str(tmp_path), *MEMBERS]) == 0
    request = ad.Run.open(tmp_path).scores().request
    assert (request.grid.temper, request.stream.carry) == ("component", "sampled")
