import json
import os
import signal
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from afterdrop import recipes, train
from afterdrop.data import EvalStripes, load_text
from afterdrop.errors import DamagedError, DataError, ExtraError, FileError
from afterdrop.models.fingerprint import fingerprint
from afterdrop.tensor_files import write_tensors
from afterdrop.train import DivergedError, TrainError, training_loop
from afterdrop.train.checkpoint import read_checkpoint, write_checkpoint
from afterdrop.train.folder import RunFolder, locked
from afterdrop.train.load_run import kept_fingerprint
from afterdrop.train.text_task import TextTask
from afterdrop.train.trainer import Trainer
from afterdrop.train.validation import validate

TIMES = ("seconds", "targets_per_second")


def run(config, out, **options):
    return train.run(config, out, device="cpu", progress=False, **options)


def metrics(out):
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in (*TIMES, "digest")} for line in lines]


def tensors(out, which="last"):
    return load_file(Path(out) / "checkpoint" / f"{which}.safetensors")


def assert_same_run(one, other):
    assert metrics(one) == metrics(other)
    for which in ("last", "best"):
        a, b = tensors(one, which), tensors(other, which)
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), f"{which} {name}"


def test_a_run_learns_drops_averages_and_finishes(text_config, tmp_path):
    before = torch.get_rng_state()
    result = run(text_config, tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)  # the caller's randomness is untouched
    assert (result.finished, result.interval, result.step) == (True, 6, 30)
    lines = metrics(tmp_path / "run")
    assert [line["interval"] for line in lines] == list(range(7))
    assert lines[0]["loss"] is None and lines[-1]["best_xe"] < lines[0]["xe"] - 0.1
    assert [round(line["learning_rate"], 4) for line in lines] == [0.01] * 4 + [0.001] * 3
    assert [line["averaged"] for line in lines] == [0, 0, 0, 0, 0, 5, 10]
    assert result.best["xe_optimal"] == min(line["xe_optimal"] for line in lines)


def test_best_holds_what_was_validated(text_config, tmp_path):
    run(text_config, tmp_path / "run")
    best = tensors(tmp_path / "run", "best")
    last = tensors(tmp_path / "run", "last")
    assert metrics(tmp_path / "run")[-1]["best_interval"] == 6  # averaged
    before = torch.get_rng_state()
    model, config, load_data = train.load_model(tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.requires_grad and p.device.type == "cpu" for p in model.parameters())
    text = load_data()
    assert not model.training and config == text_config
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, best[f"model.{name}"])
        assert torch.equal(parameter, last[f"average.{name}"])
    with torch.no_grad():
        task = TextTask(config, text, torch.device("cpu"))
        found = validate(task.validation_batches(model))
    assert found.xe == metrics(tmp_path / "run")[-1]["xe"]
    assert found.targets == len(text.valid)
    other, _, _ = train.load_model(tmp_path / "run", "last")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


@pytest.mark.parametrize("averaged", [True, False])
def test_checkpoint_headers_hold_the_fingerprints_of_their_weights(text_config, tmp_path, averaged):
    config = text_config if averaged else text_config.override({"averaging.latest": None})
    run(config, tmp_path / "run", max_minutes=1e-9)
    assert kept_fingerprint(tmp_path / "run", "last") is not None
    assert kept_fingerprint(tmp_path / "run", "best") is None  # not validated yet
    run(config, tmp_path / "run", watch=lambda line: "stop" if line["interval"] == 5 else None)
    for which in ("best", "last"):
        model = train.load_model(tmp_path / "run", which).model
        assert kept_fingerprint(tmp_path / "run", which) == fingerprint(model)
    assert ("average.embedding" in tensors(tmp_path / "run")) == averaged


def test_validation_is_the_streams_cross_entropy(text_config, text_folder):
    text = load_text(text_folder)
    config = text_config.override({"validation.stripes": 1, "validation.window": 4})
    task = TextTask(config, text, torch.device("cpu"))
    model = task.build_model().eval()
    tokens = text.valid.long()
    inputs = torch.cat([torch.tensor([text.vocabulary.eos_id]), tokens[:-1]])
    with torch.no_grad():
        whole = torch.nn.functional.cross_entropy(model(inputs[None])[0][0], tokens)
        found = validate(task.validation_batches(model))
        assert found.xe == pytest.approx(whole.item(), abs=1e-5)
        few = text_config.override({"validation.max_targets": 20})
        task = TextTask(few, text, torch.device("cpu"))
        assert 20 <= validate(task.validation_batches(model)).targets < 20 + 3 * 6
    assert len(EvalStripes(text.valid, 0, 1, 4)) > 5


def test_max_minutes_saves_and_going_on_is_exact(text_config, tmp_path):
    run(text_config, tmp_path / "whole")
    result = run(text_config, tmp_path / "parts", max_minutes=1e-9)
    assert (result.finished, result.reason, result.step, result.best) == (
        False,
        "max_minutes",
        0,
        {},
    )
    assert "To resume" in result.message
    assert run(text_config, tmp_path / "parts", resume="require").finished
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [0, 7, 10, 23])
def test_a_signal_saves_and_going_on_is_exact(text_config, tmp_path, monkeypatch, number, at):
    run(text_config, tmp_path / "whole")
    real, calls = TextTask.loss, iter(range(1000))

    def loss(self, model, step):
        if next(calls) == at:
            signal.raise_signal(number)
        return real(self, model, step)

    monkeypatch.setattr(TextTask, "loss", loss)
    result = run(text_config, tmp_path / "parts")
    assert (result.finished, result.step) == (False, at + 1)
    assert result.reason == number.name and "same command" in result.message
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert run(text_config, tmp_path / "parts").finished
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_signal_during_validation_leaves_it_for_later(text_config, tmp_path, monkeypatch):
    run(text_config, tmp_path / "whole")
    real, calls = TextTask.validation_batches, iter(range(100))

    def validation(self, model):
        if next(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        yield from real(self, model)

    monkeypatch.setattr(TextTask, "validation_batches", validation)
    assert run(text_config, tmp_path / "parts").interval == 1
    assert run(text_config, tmp_path / "parts").finished
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_finished_run_is_left_alone(text_config, tmp_path):
    first = run(text_config, tmp_path / "run")
    stamp = (tmp_path / "run/checkpoint/last.safetensors").stat().st_mtime_ns
    assert run(text_config, tmp_path / "run") == first
    assert (tmp_path / "run/checkpoint/last.safetensors").stat().st_mtime_ns == stamp


def test_another_run_or_other_files_are_refused(text_config, tmp_path):
    run(text_config, tmp_path / "run", max_minutes=1e-9)
    other = text_config.override({"optimiser.learning_rate": 0.02, "schedule.intervals": 9})
    with pytest.raises(TrainError, match=r"learning_rate: 0.01 → 0.02; schedule.intervals: 6 → 9"):
        run(other, tmp_path / "run")
    with pytest.raises(TrainError, match="'refuse'"):
        run(text_config, tmp_path / "run", resume="refuse")
    with pytest.raises(TrainError, match="'require'"):
        run(text_config, tmp_path / "new", resume="require")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(TrainError, match=r"thesis\.tex"):
        run(text_config, tmp_path / "home")
    with locked(tmp_path / "run"), pytest.raises(TrainError, match="another process"):
        run(text_config, tmp_path / "run")
    with pytest.raises(FileError, match="cannot train in"):
        run(text_config, tmp_path / "home" / "thesis.tex")


def test_a_run_that_never_began_leaves_nothing(text_config, tmp_path):
    gone = text_config.override({"data.name": str(tmp_path / "nowhere")})
    (tmp_path / "mine").mkdir()
    for name in ("new", "mine"):
        with pytest.raises(DataError, match="nowhere"):
            run(gone, tmp_path / name)
    assert not (tmp_path / "new").exists() and list((tmp_path / "mine").iterdir()) == []


def test_changed_data_are_refused(text_config, text_folder, tmp_path):
    run(text_config, tmp_path / "run", max_minutes=1e-9)
    (text_folder / "valid.txt").write_text("the fox\n")
    with pytest.raises(TrainError, match="checksums"):
        run(text_config, tmp_path / "run")
    run(text_config, tmp_path / "other")
    _, _, load_data = train.load_model(tmp_path / "other")
    (text_folder / "valid.txt").write_text("the dog\n")
    with pytest.raises(TrainError, match="checksums"):
        load_data()


def test_a_process_killed_between_last_and_best_resumes(text_config, tmp_path, monkeypatch):
    run(text_config, tmp_path / "whole")
    real = os.replace

    def replace(source, target):
        if str(target).endswith("best.safetensors") and len(metrics(tmp_path / "parts")) == 3:
            raise KeyboardInterrupt  # nothing handles it, as if the process were killed
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        run(text_config, tmp_path / "parts")
    monkeypatch.undo()
    run(text_config, tmp_path / "parts", max_minutes=1e-9)
    assert RunFolder(tmp_path / "parts").best.exists()
    kept = train.load_model(tmp_path / "parts")[0].state_dict()
    last = train.load_model(tmp_path / "parts", "last")[0].state_dict()
    assert all(torch.equal(kept[name], last[name]) for name in kept)
    assert run(text_config, tmp_path / "parts").finished
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("where", ["replace", "fsync"])
def test_a_full_disk_leaves_the_last_good_checkpoint(text_config, tmp_path, monkeypatch, where):
    run(text_config, tmp_path / "whole")
    out, real = tmp_path / "parts", getattr(os, where)

    def full(*args):
        if out.joinpath("metrics.jsonl").exists() and len(metrics(out)) == 4:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, where, full)
    with pytest.raises(
        FileError, match=r"No space left.*last good checkpoint.*step 10.*To continue"
    ):
        run(text_config, out)
    monkeypatch.undo()
    assert not [p for p in out.rglob(".*") if p.name != ".lock"]  # no temporary files are left
    assert run(text_config, out).finished
    assert_same_run(tmp_path / "whole", out)


def test_a_folder_that_is_moved_during_training_is_found_again(text_config, tmp_path, monkeypatch):
    run(text_config, tmp_path / "whole")
    step, out = Trainer.train_step, tmp_path / "run"

    def moving(trainer):
        if trainer.step == 12:
            out.rename(tmp_path / "moved")
        return step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", moving)
        with pytest.raises(FileError, match=r"was moved or removed .* name the new place"):
            run(text_config, out)
    assert run(text_config, tmp_path / "moved").finished
    assert_same_run(tmp_path / "whole", tmp_path / "moved")


def test_a_watch_sees_every_interval_and_may_stop_the_run(text_config, tmp_path):
    run(text_config, tmp_path / "whole")
    seen = []

    def watch(line):
        seen.append(line["interval"])
        return "enough" if line["interval"] in (2, 6) else None

    result = run(text_config, tmp_path / "run", watch=watch)
    assert (result.finished, result.reason, result.interval, seen) == (
        False,
        "enough",
        2,
        [0, 1, 2],
    )
    result = run(text_config, tmp_path / "run", watch=watch)
    assert result.finished and seen == list(range(7))  # at the end there is nothing to stop
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("at", [3, 14])
def test_a_diverged_run_keeps_its_last_good_checkpoint(text_config, tmp_path, monkeypatch, at):
    real = TextTask.loss

    def loss(self, model, step):
        found = real(self, model, step)
        return found._replace(data=found.data * (float("nan") if step == at else 1))

    monkeypatch.setattr(TextTask, "loss", loss)
    good = at // 5 * 5
    message = rf"loss is nan.*learning_rate.*last good checkpoint is .*step {good}\)"
    with pytest.raises(DivergedError, match=message):
        run(text_config, tmp_path / "run")
    last = tensors(tmp_path / "run")
    assert all(t.isfinite().all() for t in last.values() if t.is_floating_point())
    weights = train.load_model(tmp_path / "run").model.parameters()
    assert all(weight.isfinite().all() for weight in weights)


def test_damaged_files_are_named(text_config, tmp_path):
    run(text_config, tmp_path / "run")
    path = tmp_path / "run/checkpoint/best.safetensors"
    content = path.read_bytes()
    flipped = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
    other = content.replace(b"afterdrop-checkpoint", b"afterdrop-checkpainx")
    for damaged in (b"", content[:100], content[:-8], flipped, other, content + b" "):
        path.write_bytes(damaged)
        with pytest.raises(DamagedError, match=r"the checkpoint .*restore it from a copy"):
            train.load_model(tmp_path / "run")
    tensors, note = {"w": torch.ones(1)}, {"kind": "another"}
    write_tensors(path, tensors, note)
    with pytest.raises(FileError, match="is not an afterdrop-checkpoint"):
        train.load_model(tmp_path / "run")
    path.unlink()
    with pytest.raises(FileError, match="no best checkpoint yet"):
        train.load_model(tmp_path / "run")
    with pytest.raises(FileError):
        train.load_model(tmp_path / "nowhere")


def test_a_damaged_line_of_metrics_is_named(text_config, tmp_path):
    run(text_config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    good = folder.metrics.read_text()
    first, second, *others = good.splitlines(keepends=True)
    changed = second.replace(": 1,", ": 2,")
    for line in ("nonsense\n", "[1]\n", changed, '{"interval": 1}\n', first, ""):
        folder.metrics.write_text("".join([first, line, *others]))
        with pytest.raises(DamagedError, match=r"line [23] of .*Restore a copy, or move"):
            folder.read_metrics()
    folder.metrics.write_text(good + '{"inter')  # as a killed writer leaves it
    assert len(folder.read_metrics()) == len(good.splitlines())
    for cut in range(1, len(others[-1])):
        folder.metrics.write_text(good[:-cut])
        assert len(folder.read_metrics()) == len(good.splitlines()) - 1
    for bit in range(8):  # of the last newline
        folder.metrics.write_bytes(good[:-1].encode() + bytes([ord("\n") ^ 1 << bit]))
        with pytest.raises(DamagedError, match=r"line 7 of .*Restore a copy, or move"):
            folder.read_metrics()


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock"])
def test_nothing_is_written_through_a_link_in_a_run_folder(text_config, tmp_path, name):
    run(text_config, tmp_path / "run", watch=lambda line: (line["interval"] == 1 and "x") or None)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(before := (tmp_path / "run" / "metrics.jsonl").read_bytes())
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(elsewhere)
    with pytest.raises((FileError, OSError), match=name):
        run(text_config, tmp_path / "run")
    assert elsewhere.read_bytes() == before


@pytest.mark.parametrize("place", [30, -30])  # in the header, in the payload
def test_a_damaged_last_checkpoint_falls_back_to_the_one_before(text_config, tmp_path, place):
    run(text_config, tmp_path / "whole")
    for stopped_at in (3, None):  # in the middle, and at the end
        out = tmp_path / f"parts-{stopped_at}"
        watch = None if stopped_at is None else lambda line: (line["interval"] == 3 and "x") or None
        run(text_config, out, watch=watch)
        last = RunFolder(out).last
        content = bytearray(last.read_bytes())
        content[place] ^= 1
        last.write_bytes(content)
        if place < 0 and stopped_at is None:  # finished, which the header says
            assert run(text_config, out).finished
            continue
        with pytest.warns(UserWarning, match=r"damaged.*from the one before it \(step"):
            assert run(text_config, out).finished
        assert_same_run(tmp_path / "whole", out)


def test_a_damaged_checkpoint_never_replaces_the_one_before(text_config, tmp_path, monkeypatch):
    run(text_config, tmp_path / "whole")
    out = tmp_path / "parts"
    run(text_config, out, watch=lambda line: (line["interval"] == 3 and "x") or None)
    last = RunFolder(out).last
    last.write_bytes(last.read_bytes()[:-8])

    def killed(path, checkpoint):
        raise KeyboardInterrupt  # nothing handles it, as if the process were killed

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="from the one before it"):
        patch.setattr(training_loop, "write_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            run(text_config, out)
    assert run(text_config, out).finished
    assert_same_run(tmp_path / "whole", out)


def test_states_of_the_optimiser_in_another_order_are_refused(text_config, tmp_path):
    train.run(text_config, tmp_path / "run", progress=False, max_minutes=1e-9)
    path = tmp_path / "run" / "checkpoint" / "last.safetensors"
    saved = read_checkpoint(path)
    saved.facts["optimiser"][0]["params"].reverse()
    write_checkpoint(path, saved)
    with pytest.raises(FileError, match=r"last.*not in the order of the parameters"):
        train.run(text_config, tmp_path / "run", progress=False)


def test_files_of_another_schema_version_are_refused(text_config, tmp_path):
    run(text_config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    checkpoint = folder.best.read_bytes()
    write_tensors(folder.best, {}, {"kind": "afterdrop-checkpoint", "version": 1})
    with pytest.raises(FileError, match="schema version 1, this afterdrop reads 2"):
        train.load_model(folder.path)
    folder.best.write_bytes(checkpoint)
    config = folder.config.read_text()
    folder.config.write_text(config.replace('"version": 2', '"version": 1'))
    with pytest.raises(FileError, match="schema version 1, this afterdrop reads 2"):
        train.load_model(folder.path)
    folder.config.write_text(config.replace('"seed": 1', '"seed": 2'))
    with pytest.raises(DamagedError, match=r"config.json does not match its digest"):
        train.load_model(folder.path)


def test_several_samples_and_torchs_adam_resume_too(text_config, tmp_path):
    config = text_config.override(
        {
            "objective.samples": 3,
            "objective.alpha": 0.5,
            "optimiser.name": "adam",
            "optimiser.beta1": 0.5,
            "schedule.intervals": 2,
        }
    )
    run(config, tmp_path / "whole")
    run(config.override({}), tmp_path / "parts", max_minutes=0.0005)
    run(config, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert tensors(tmp_path / "whole")["carried.0.h"].shape == (12, 8)
    first, *later = [line["effective_samples"] for line in metrics(tmp_path / "whole")]
    assert first is None and all(1 < found < 3 for found in later)


def test_state_reset_zeroes_whole_stripes(text_config, text_folder):
    config = text_config.override({"objective.state_reset": 0.5, "objective.batch_size": 64})
    task = TextTask(config, load_text(text_folder), torch.device("cpu"))
    model = task.build_model()
    task.loss(model, 0)
    state = task._before_window()
    zero = [(part == 0).all(1) for pair in state for part in pair]
    assert all(torch.equal(zero[0], other) for other in zero)
    assert 16 < int(zero[0].sum()) < 48
    kept = ~zero[0]
    assert torch.equal(state[0][0][kept], task.state[0][0][kept])  # no rescaling


def test_a_classifier_trains_and_resumes(tmp_path):
    config = recipes.load("digits-mlp").config.override(
        {
            "schedule.intervals": 3,
            "schedule.steps_per_interval": 10,
            "optimiser.learning_rate": 0.01,
        }
    )
    result = run(config, tmp_path / "whole")
    assert result.best["xe"] < 2.0 and "Best xe" in result.message
    run(config, tmp_path / "parts", max_minutes=0.0003)
    run(config, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    model, _, load_data = train.load_model(tmp_path / "whole")
    assert model(load_data().test.images).shape == (397, 10)


def test_a_model_must_go_with_its_data(text_config, tmp_path):
    content = text_config.to_dict() | {"data": {"name": "builtin:digits"}}
    with pytest.raises(DataError, match="set of images"):
        run(train.TrainConfig.from_dict(content), tmp_path / "run")


def test_tensorboard_is_an_extra(text_config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ExtraError, match=r"pip install 'afterdrop\[track\]'"):
        run(text_config, tmp_path / "run", track=True)
    written = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            assert purge_step == 0 and folder.endswith("tensorboard")

        def add_scalar(self, *scalar):
            written.append(scalar)

        def flush(self):
            pass

        close = flush

    fake = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    run(text_config, tmp_path / "run", track=True)
    assert ("averaged", 10, 30) in written


def test_the_bar_shows_loss_validation_and_speed(text_config, tmp_path, capsys):
    config = text_config.override({"schedule.steps_per_interval": 20, "schedule.intervals": 2})
    train.run(config, tmp_path / "run")
    shown = capsys.readouterr()
    for part in ("train ppl", "valid ppl", "at T=", "best ppl", "words/s", "40/40"):
        assert part in shown.err
    assert "Finished: all 2 intervals are done. Best ppl" in shown.out + shown.err


def test_the_trainer_knows_where_in_an_interval_it_is(text_config, text_folder):
    task = TextTask(text_config, load_text(text_folder), torch.device("cpu"))
    trainer = Trainer(text_config, task, task.build_model())
    assert trainer.interval_done and trainer.mean_loss() is None
    trainer.finish_interval(trainer.validate(lambda: False))
    for done in range(5):
        assert not trainer.interval_done and trainer.interval_steps == done
        trainer.train_step()
    assert trainer.interval_done and trainer.mean_loss() > 0


def test_a_run_that_lost_its_last_checkpoint_is_not_begun_anew(tmp_path):
    """As finished trials of a study have; their best weights would be replaced."""
    config = recipes.load("digits-mlp").config.override({"schedule.intervals": 2})
    train.run(config, tmp_path / "run", progress=False)
    last, best = (tmp_path / f"run/checkpoint/{which}.safetensors" for which in ("last", "best"))
    last.unlink()
    kept = best.read_bytes(), (tmp_path / "run/metrics.jsonl").read_bytes()
    for resume in ("auto", "require"):
        with pytest.raises(TrainError, match="train into another folder"):
            train.run(config, tmp_path / "run", progress=False, resume=resume)
    assert (best.read_bytes(), (tmp_path / "run/metrics.jsonl").read_bytes()) == kept
