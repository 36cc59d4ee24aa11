"""Every kind of file that afterdrop reads: how to damage it, and what reads and uses it."""

import contextlib
import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import mutations
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sample_files import (
    GRID,
    chain_of,
    classifier,
    distil_again,
    evaluate_stream,
    labelled_batches,
)

import afterdrop as ad
from afterdrop import files, recipes, tensor_files, train
from afterdrop.data import read_content
from afterdrop.data.images import parse_idx
from afterdrop.data.text_set import load_text_folder
from afterdrop.files import sealed, write_json
from afterdrop.report.class_counts import classes_of_file
from afterdrop.report.prose import certainty, headline
from afterdrop.report.report_input import read_input
from afterdrop.report.result_section import cards
from afterdrop.report.run_outcome import find_outcome
from afterdrop.tensor_files import write_tensors
from afterdrop.train.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from afterdrop.tune.optuna_backend import Backend
from afterdrop.tune.study_files import ranking_table, read_result
from afterdrop.tune.study_runner import join_study
from afterdrop.tune.study_settings import plan_study
from afterdrop.tune.trials import count

Rewrite = Callable[[Path, random.Random], None]


@dataclass(frozen=True)
class FileKind:
    """A kind of file.

    Attributes:
        folder: What is copied from the samples, the file or a folder around it.
        file: The file within the samples.
        read: Reads the copied folder and uses what it read, as the verbs do.
        rewrite: Damages the file's content and writes it again with afterdrop's own writer.
    """

    folder: str
    file: str
    read: Callable[[Path], object]
    rewrite: Rewrite


def copy_sample(kind: FileKind, samples: Path, place: Path) -> Path:
    """Copies the sample of a kind to `place`; returns the copied file or folder."""
    copied, source = place / kind.folder, samples / kind.folder
    copied.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, copied)
    else:
        shutil.copy(source, copied)
    return copied


def damage(kind: FileKind, samples: Path, place: Path, number: int) -> Path:
    """Copies the sample of a kind and damages the file; returns the copied file or folder."""
    rng = random.Random(number)
    copied, path = copy_sample(kind, samples, place), place / kind.file
    if rng.random() < 0.5:
        path.write_bytes(mutations.damage_bytes(path.read_bytes(), rng))
    else:
        with _unchecked_writers():
            kind.rewrite(path, rng)
    return copied


@contextlib.contextmanager
def _unchecked_writers() -> Iterator[None]:
    """Lets afterdrop's writers write what its readers refuse, with the right digest.

    The writers themselves refuse it, but a hostile program does not.
    """

    def as_json(record: Any) -> Any:
        return json.loads(json.dumps(record))

    with (
        mock.patch.object(files, "as_json", as_json),
        mock.patch.object(tensor_files, "as_json", as_json),
    ):
        yield


def _note(path: Path) -> dict[str, Any]:
    with safe_open(str(path), "pt") as file:
        return json.loads(file.metadata()["afterdrop"])


def _rewrite_json(path: Path, rng: random.Random) -> None:
    content = json.loads(path.read_bytes())
    kind, version, _ = (content.pop(name) for name in ("kind", "version", "digest"))
    changed = mutations.damage_value(content, rng)
    write_json(path, kind, version, changed if isinstance(changed, dict) else {"all": changed})


def _rewrite_text(change: Callable[[bytes, random.Random], bytes]) -> Rewrite:
    def rewrite(path: Path, rng: random.Random) -> None:
        path.write_bytes(change(path.read_bytes(), rng))

    return rewrite


def _rewrite_metrics(path: Path, rng: random.Random) -> None:
    lines = mutations.damage_lines(path.read_bytes(), rng).splitlines()
    values = [json.loads(line) for line in lines]
    kept = [json.dumps(sealed(line) if isinstance(line, dict) else line) for line in values]
    path.write_text("\n".join(kept) + "\n")


def _rewrite_scores(path: Path, rng: random.Random) -> None:
    tensors, note = load_file(path), _note(path)
    if rng.random() < 0.5:
        tensors = mutations.damage_tensors(tensors, rng)
    elif rng.random() < 0.7:
        protocol = mutations.damage_value(json.loads(note["protocol"]), rng)
        note["protocol"] = json.dumps(protocol)
    else:
        note = mutations.damage_value(note, rng)
    write_tensors(path, tensors, note)


def _rewrite_header(path: Path, rng: random.Random) -> None:
    """Damages the header of a file of tensors, and gives it the right digest again."""
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    del header["__metadata__"]["digest"]
    header = mutations.damage_header(header, rng)
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict):
        metadata["digest"] = sealed(header)["digest"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[size:])


def _rewrite_checkpoint(path: Path, rng: random.Random) -> None:
    if rng.random() < 0.3:
        _rewrite_state(path, rng)  # of the whole note
        return
    saved = read_checkpoint(path)
    tensors, facts = dict(saved.tensors), dict(saved.facts)
    if rng.random() < 0.5:
        tensors = mutations.damage_tensors(tensors, rng)
    else:
        changed = mutations.damage_value(facts, rng)
        facts = changed if isinstance(changed, dict) else {}
    write_checkpoint(path, Checkpoint(tensors, facts))


def _read_config(folder: Path) -> None:
    run = ad.Run.open(folder)
    assert ad.train.TrainConfig.from_dict(run.config.to_dict()) == run.config
    run.load("best").load_data()


def _read_metrics(folder: Path) -> None:
    for line in ad.Run.open(folder).metrics:
        assert line["step"] >= 0 and isinstance(line["xe"], int | float)


def _read_best(folder: Path) -> None:
    ad.Run.open(folder).predictor()


def _load_weights(folder: Path) -> None:
    train.load_model(folder)


def _resume_previous(folder: Path) -> None:
    (folder / "checkpoint" / "last.safetensors").write_bytes(b"damaged")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the last checkpoint
        _resume(folder)


def _resume(folder: Path) -> None:
    run = ad.Run.open(folder)
    config = run.config.override({"seed": run.config.seed})
    train.run(config, folder, device="cpu", progress=False)


def _read_scores(folder: Path) -> None:
    scores = ad.Run.open(folder).scores()
    scores.xe(ad.DET)
    str(ad.select(scores, folds=0, resamples=0))


def _read_part(folder: Path) -> None:
    ad.evaluate(classifier(), labelled_batches(), grid=GRID, num_samples=4, resume=folder)


def _read_choice(folder: Path) -> None:
    run = ad.Run.open(folder)
    choice = run.choice
    str(choice)
    choice.test_request("test")
    run.predictor()


def _read_study(folder: Path) -> None:
    result = read_result(folder)
    ranking_table(result)


def _read_journal(folder: Path) -> None:
    backend = Backend(folder, None, folder.name)
    join_study(backend, plan_study(str(folder / "recipe.toml"), intervals=1, prune=False))
    count(backend.trials())


def _read_report(folder: Path) -> None:
    found = read_input(folder)
    assert found.missing or found.scores is not None


def _read_page_of_scores(folder: Path) -> None:
    _read_report(folder)
    found = read_input(folder)
    outcome = find_outcome(found)
    if outcome is not None:  # the words of the page; its figures take too long for every file
        for unit in (found.unit, "word"):
            headline(outcome, unit), certainty(outcome), cards(outcome, unit)


def _read_text(folder: Path) -> None:
    load_text_folder(folder)


def _read_packed(path: Path) -> None:
    read_content(path).decode("utf-8", "replace")


def _read_samples(form: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        scores = ad.evaluate_samples(folder / f"samples.{form}", folder / "targets.npy")
        str(ad.select(scores, folds=0, resamples=0))

    return read


def _rewrite_plain(path: Path, rng: random.Random) -> None:
    save_file(mutations.damage_tensors(load_file(path), rng), path)


def _rewrite_state(path: Path, rng: random.Random) -> None:
    tensors, note = load_file(path), _note(path)
    if rng.random() < 0.5:
        tensors = mutations.damage_tensors(tensors, rng)
    else:
        note = mutations.damage_value(note, rng)
    write_tensors(path, tensors, note if isinstance(note, dict) else {"all": note})


def _read_ensemble(folder: Path) -> None:
    choice = ad.Run.open(folder).choice
    str(choice)
    assert choice.ensemble is not None
    choice.combine(torch.randn(choice.ensemble.ensemble.num_samples, 2, 3))


def _read_chain(folder: Path) -> None:
    for plan in chain_of(folder)._read_plan().values():
        assert isinstance(plan.get("intervals", 1), int)


_BYTES = _rewrite_text(mutations.damage_bytes)
_JSON = _rewrite_text(mutations.damage_json_text)
_TOML = _rewrite_text(mutations.damage_toml)
_LINES = _rewrite_text(mutations.damage_lines)
_SCORES = "run/scores/valid.safetensors"
_BEST = "run/checkpoint/best.safetensors"
_PREVIOUS = "begun/checkpoint/previous.safetensors"

KINDS: dict[str, FileKind] = {
    "configuration": FileKind("run", "run/config.json", _read_config, _rewrite_json),
    "metrics": FileKind("run", "run/metrics.jsonl", _read_metrics, _rewrite_metrics),
    "weights": FileKind("run", _BEST, _read_best, _rewrite_checkpoint),
    "training state": FileKind(
        "begun", "begun/checkpoint/last.safetensors", _resume, _rewrite_checkpoint
    ),
    "weights alone": FileKind("run", _BEST, _load_weights, _rewrite_checkpoint),
    "previous training state": FileKind("begun", _PREVIOUS, _resume_previous, _rewrite_checkpoint),
    "scores": FileKind("run", _SCORES, _read_scores, _rewrite_scores),
    "header of scores": FileKind("run", _SCORES, _read_scores, _rewrite_header),
    "header of weights": FileKind("run", _BEST, _read_best, _rewrite_header),
    "part": FileKind("parts", "parts/part-000000000.safetensors", _read_part, _rewrite_scores),
    "part with states": FileKind(
        "stream", "stream/part-000000000.safetensors", evaluate_stream, _rewrite_scores
    ),
    "choice": FileKind("run", "run/choice.json", _read_choice, _rewrite_json),
    "study": FileKind("study", "study/study.json", _read_study, _rewrite_json),
    "journal": FileKind("study", "study/journal.log", _read_journal, _LINES),
    "recipe": FileKind("recipe.toml", "recipe.toml", recipes.load, _TOML),
    "classes": FileKind("classes.json", "classes.json", classes_of_file, _JSON),
    "text": FileKind("text", "text/train.txt", _read_text, _BYTES),
    "gzip": FileKind("train.txt.gz", "train.txt.gz", _read_packed, _BYTES),
    "xz": FileKind("train.txt.xz", "train.txt.xz", _read_packed, _BYTES),
    "images": FileKind(
        "images-idx3-ubyte",
        "images-idx3-ubyte",
        lambda path: parse_idx(path.read_bytes(), str(path)),
        _BYTES,
    ),
    "samples": FileKind("stored", "stored/samples.npy", _read_samples("npy"), _BYTES),
    "samples as tensors": FileKind(
        "stored", "stored/samples.safetensors", _read_samples("safetensors"), _rewrite_plain
    ),
    "targets": FileKind("stored", "stored/targets.npy", _read_samples("npy"), _BYTES),
    "scores of an ensemble": FileKind(
        "stored/run", "stored/run/scores/valid.safetensors", _read_scores, _rewrite_scores
    ),
    "choice of an ensemble": FileKind(
        "stored/run", "stored/run/choice.json", _read_ensemble, _rewrite_json
    ),
    "distillation": FileKind(
        "distilled", "distilled/distil.safetensors", distil_again, _rewrite_state
    ),
    "chain": FileKind("chain", "chain/plan.json", _read_chain, _rewrite_json),
    "report of a configuration": FileKind("run", "run/config.json", _read_report, _rewrite_json),
    "report of metrics": FileKind("run", "run/metrics.jsonl", _read_report, _rewrite_metrics),
    "report of scores": FileKind("run", _SCORES, _read_page_of_scores, _rewrite_scores),
    "report of a choice": FileKind("run", "run/choice.json", _read_report, _rewrite_json),
}
