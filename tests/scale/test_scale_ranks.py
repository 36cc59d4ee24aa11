"""Two ranks against one process: the same losses, the same Scores, the same decisions."""

import json
import signal
from pathlib import Path

import pytest
import tiny
import torch
from launch import torchrun
from safetensors.torch import load_file

import afterdrop as ad
from afterdrop import train
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.train.sections import PENALTIES
from afterdrop.train.text_task import TextTask

NUMBERS = (
    *("loss", "effective_samples", "prior", "xe", "temperature", "xe_optimal", "best_xe"),
    *(f"{name}_penalty" for name in PENALTIES),
)


def run(config, out, **options):
    return train.run(config, out, device="cpu", progress=False, **options)


def metrics(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def assert_equal_runs(one, other):
    """The same decisions to the bit, the same losses and weights but for rounding."""
    assert len(metrics(one)) == len(metrics(other))
    for a, b in zip(metrics(one), metrics(other)):
        for name in a.keys() - {"seconds", "targets_per_second", "digest"}:
            if name in NUMBERS and a[name] is not None:
                assert b[name] == pytest.approx(a[name], rel=2e-6), (
                    f"interval {a['interval']}: {name}"
                )
            else:
                assert b[name] == a[name], name
    for which in ("last", "best"):
        a, b = (load_file(r / "checkpoint" / f"{which}.safetensors") for r in (one, other))
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].shape == b[name].shape, name
            if name.startswith("random"):
                assert torch.equal(a[name], b[name]), name
            else:
                torch.testing.assert_close(b[name], a[name], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def world(text_folder):
    """One process's runs, then those of two ranks in the same folder; (folder, notes by rank)."""
    folder = text_folder.parent
    config = tiny.text_config(str(text_folder))
    run(config, folder / "text-one")
    run(tiny.image_config(), folder / "image-one")
    real, steps = TextTask.loss, iter(range(1000))

    def loss(self, model, step):
        if next(steps) == 12:
            signal.raise_signal(signal.SIGINT)
        return real(self, model, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextTask, "loss", loss)
        assert run(config, folder / "alone-then-two").step == 13
    model, batches = tiny.classifier()

    def cut():
        yield from batches[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ad.evaluate(model, cut(), grid=tiny.GRID, num_samples=4, resume=folder / "resumed-parts")
    done = torchrun(str(Path(__file__).with_name("driver.py")), str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == ""
    return folder, [json.loads((folder / f"notes-{r}.json").read_text()) for r in (0, 1)]


def test_two_ranks_train_a_language_model_as_one_process(world):
    folder, notes = world
    assert_equal_runs(folder / "text-one", folder / "text-two")
    assert notes[0]["text"] == notes[1]["text"] == notes[0]["again"] == notes[1]["again"]
    assert notes[0]["text"][:4] == [True, "all 4 intervals are done", 20, 4]


def test_two_ranks_train_a_classifier_as_one_process(world):
    assert_equal_runs(world[0] / "image-one", world[0] / "image-two")


def test_a_run_of_one_process_goes_on_with_two_ranks(world):
    assert_equal_runs(world[0] / "text-one", world[0] / "alone-then-two")


def test_a_run_of_two_ranks_goes_on_with_one_process(world):
    folder, notes = world
    assert notes[0]["stopped"] == notes[1]["stopped"]
    assert notes[0]["stopped"][:4] == [False, "SIGINT", 8, 1]
    assert run(tiny.text_config(str(folder / "text")), folder / "two-then-alone").finished
    assert_equal_runs(folder / "text-one", folder / "two-then-alone")


def test_the_time_limit_of_one_rank_stops_all(world):
    assert world[1][0]["late"] == world[1][1]["late"]
    assert world[1][0]["late"][:3] == [False, "max_minutes", 0]


@pytest.mark.parametrize(("name", "count"), [("five", 5), ("one", 1), ("resumed", 5)])
def test_every_rank_gets_the_scores_of_one_process_to_the_bit(world, tmp_path, name, count):
    model, batches = tiny.classifier()
    alone = ad.evaluate(model, batches[:count], grid=tiny.GRID, num_samples=4)
    alone.save(tmp_path / "alone")
    for rank in (0, 1):
        written = (world[0] / f"{name}-{rank}.safetensors").read_bytes()
        assert written == (tmp_path / "alone").read_bytes()
    assert not (world[0] / "resumed-parts").exists()


def test_ranks_decide_about_samples_as_one_process(world, tmp_path):
    model, batches = tiny.classifier()
    ad.evaluate(model, batches, grid=tiny.GRID, num_samples="auto").save(tmp_path / "alone")
    for rank in (0, 1):
        written = (world[0] / f"auto-{rank}.safetensors").read_bytes()
        assert written == (tmp_path / "alone").read_bytes()
    assert not (world[0] / "auto-parts").exists()


@pytest.mark.parametrize(
    ("name", "how"),
    [("text-deterministic", {}), ("text-sampled", {"carry": "sampled", "stripes": 2})],
)
def test_texts_are_shared_by_windows_or_by_multipliers(world, name, how):
    model, text = tiny.language_model()
    alone = run_text(model, text, 0, tiny.text_request(**how), Execution(windows=2), lines=False)
    for rank in (0, 1):
        shared = ad.Scores.load(world[0] / f"{name}-{rank}.safetensors")
        assert shared.protocol == alone.protocol
        assert shared.tensors.keys() == alone.tensors.keys()
        for key, tensor in alone.tensors.items():
            if tensor.is_floating_point():
                torch.testing.assert_close(shared.tensors[key], tensor, rtol=1e-5, atol=2e-5)
            else:
                assert torch.equal(shared.tensors[key], tensor), key
    assert not (world[0] / f"{name}.parts").exists()


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("odd batch", "ConfigError: objective.batch_size is 5; 2 ranks", None),
        ("other config", "TrainError: ranks 0 and 1", "TrainError: ranks 1 and 0"),
        ("held", "another configuration", "StoppedElsewhere: rank 0 stopped: "),
        ("other data", "DataError: the ranks were given different batches", None),
        ("other seed", "ScoresError: the evaluations of rank 0 and rank 1 differ in plan", None),
    ],
)
def test_what_cannot_be_shared_is_refused_in_words(world, name, first, second):
    _, notes = world
    assert first in notes[0][name]
    assert (second or first) in notes[1][name]
