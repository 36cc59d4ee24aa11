"""The whole chain of a reproduction, killed on the way and gone on with."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

import afterdrop as ad
from afterdrop.cli import main
from afterdrop.reproduce.chain import Chain
from afterdrop.reproduce.jobs import ChainJob
from afterdrop.reproduce.tables.build_tables import paper_tables
from afterdrop.train import TrainResult

BOTH = ["--only", "masks-shared", "masks-step"]
ARGUMENTS = ["reproduce", "--all", "--minutes", "0.1", "--quiet", *BOTH, "--out"]


@pytest.fixture(autouse=True)
def _no_data(monkeypatch):
    monkeypatch.delenv("AFTERDROP_DATA", raising=False)


def files(out):
    return {path: path.read_bytes() for path in sorted(out.glob("runs/*/scores/*.safetensors"))}


@pytest.mark.subprocess
def test_a_killed_chain_goes_on_where_it_was(tmp_path, capsys):
    out = tmp_path / "chain"
    process = subprocess.Popen(
        [sys.executable, "-m", "afterdrop", *ARGUMENTS, str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    first = out / "runs" / "masks-shared" / "scores" / "valid.safetensors"
    while process.poll() is None and not first.exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    said = process.communicate()[0]
    assert first.exists(), said
    kept, plan = files(out), json.loads((out / "plan.json").read_text())["jobs"]
    assert len(kept) < 4

    assert main([*ARGUMENTS, str(out)]) == 0
    printed = capsys.readouterr().out
    assert "Absent: ptb " in printed and "[2/2] masks-step" in printed
    done = files(out)
    assert len(done) == 4 and all(done[path] == kept[path] for path in kept)
    after = json.loads((out / "plan.json").read_text())["jobs"]
    for name in ("intervals", "steps_per_interval"):  # the runs may differ in their masks only
        assert after["masks-step"][name] == after["masks-shared"][name]
        assert after["masks-shared"][name] == plan["masks-shared"][name]
    text = (out / "tables" / "table5.txt").read_text()
    assert "state masks shared (S)" in text and "no mask shared (NS)" in text
    assert "− S, same seed" in text

    assert main([*ARGUMENTS, str(out)]) == 0  # nothing is left to do
    assert files(out) == done
    assert main(["reproduce", "--all", "--minutes", "1", "--out", str(out)]) == 2
    assert "minutes 0.1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_broken_data_set_does_not_stop_the_others(tmp_path, capsys):
    data, out = tmp_path / "data", tmp_path / "out"
    for split in ("train", "valid", "test"):
        path = data / "ptb" / f"ptb.{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not the published text\n")
    arguments = ["reproduce", "--all", "--minutes", "0.05", "--quiet", "--data", str(data)]
    assert main([*arguments, "--out", str(out), "--only", "ptb", "masks-shared"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("afterdrop: ptb: ") and "bytes uncompressed" in said.err
    assert (out / "tables" / "table5.csv").exists()
    assert main([*arguments, "--out", str(tmp_path / "none"), "--only", "ptb"]) == 1
    assert capsys.readouterr().err.startswith("afterdrop: ptb: ")
    assert main([*arguments, "--out", str(out), "--only", "mnist"]) == 2
    assert "ptb, masks-shared" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_during_training_stops_the_whole_chain(
    name, status, monkeypatch, tmp_path, capsys
):
    def stopped(config, folder, **options):
        return TrainResult(folder, False, name, "", 1, 0, {})

    monkeypatch.setattr("afterdrop.reproduce.chain.train_run", stopped)
    assert main([*ARGUMENTS, str(tmp_path / "chain")]) == status
    assert "run the same command to resume" in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_trains_evaluates_all_splits_and_selects(tmp_path):
    text, words = tmp_path / "text", random.Random(0)
    text.mkdir()
    for split, lines in (("train", 300), ("valid", 40), ("test", 40)):
        rows = [" ".join(words.choices("abcdefgh", k=6)) for _ in range(lines)]
        (text / f"{split}.txt").write_text("\n".join(rows) + "\n")
    small = {"model.hidden_sizes": [8], "objective.batch_size": 4, "objective.window": 10}
    job = ChainJob("words", "pydoc-small", {"data.name": str(text), **small})
    said = []
    chain = Chain(tmp_path / "out", None, 0.1, "cpu", 4, False, said.append)
    folders, faults = chain.run([job])
    assert not faults and folders == [tmp_path / "out" / "runs" / "words"]
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())["jobs"]["words"]
    assert plan["trained"] and set(plan["limits"]) == {"train", "valid", "test"}
    for split, limit in plan["limits"].items():
        scores = ad.Scores.load(folders[0] / "scores" / f"{split}.safetensors")
        assert scores.request.limit == limit
        assert scores.num_targets == limit or limit is None
        assert scores.protocol.grid.temper == ("mean" if split == "train" else "sample")
    assert ad.Run.open(folders[0]).choice.request.split == "valid"
    tables = paper_tables(folders)
    assert all(table.rows for table in tables[:4])
    assert not any(table.missing for table in tables[:2])
