"""afterdrop predict: the prediction for each example, and how uncertain it is."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import nn
from tyro.conf import Positional

from afterdrop.cli.options import (
    Likelihood,
    OptionalFloat,
    OptionalInt,
    OptionalPath,
    OptionalText,
    logits_place,
)
from afterdrop.cli.resolve import resolve_batches, resolve_model
from afterdrop.data import ImageSet, batches
from afterdrop.errors import DataError, FileError
from afterdrop.evaluation.batches import call, open_batches, to_device
from afterdrop.evaluation.labelled_items import inputs_of
from afterdrop.family.member import Member
from afterdrop.files import make_folder
from afterdrop.models import LanguageModel
from afterdrop.plain_text import one_line, shell_word
from afterdrop.runs import Run
from afterdrop.selection import Predictor
from afterdrop.selection.prediction_file import PredictionTable, check_suffix
from afterdrop.train.device import choose_device


def predict(
    model: Annotated[Positional[str], tyro.conf.arg(metavar="RUN|MODEL")],
    data: Annotated[Positional[str], tyro.conf.arg(metavar="DATA")],
    /,
    out: Path,
    choice: OptionalPath = None,
    alpha: OptionalFloat = None,
    multiplier: OptionalFloat = None,
    temperature: OptionalFloat = None,
    num_samples: OptionalInt = None,
    blocks: int = 2,
    seed: int = 0,
    split: str = "test",
    unlabelled: bool = False,
    batch_size: OptionalInt = None,
    rates: tuple[str, ...] = (),
    noise: tuple[str, ...] = (),
    batch_dim: int = 0,
    class_dim: OptionalInt = None,
    logits: OptionalText = None,
    likelihood: Likelihood = "categorical",
    noise_variance: OptionalFloat = None,
    device: OptionalText = None,
    overwrite: bool = False,
) -> None:
    """Predict each example of some data, with or without labels, and say how uncertain that is.

    Writes the predicted class, its confidence, the entropy and the mutual information of each
    example to a npz, csv or jsonl file, with standard errors from the number of mask samples. For
    members without mutual information, a column "disagreement" takes its place. Where a model
    predicts numbers, the columns are the mean, the standard deviation, the mean of the samples'
    variances and the variance of their means.

    The member is the choice of RUN, or of --choice; or, without one, the plain mean at the trained
    rates (Monte Carlo dropout), unless --alpha, --multiplier or --temperature say otherwise.

    For example:
      afterdrop predict runs/digits test --out predictions.csv
      afterdrop predict mymodel:load_model mymodel:new_data --choice runs/mine --out new.npz
      afterdrop predict mymodel:load_model mymodel:images --unlabelled --out new.jsonl
      afterdrop predict mymodel:regressor mymodel:new_data --likelihood gaussian --out new.csv

    Args:
        model: A run folder of afterdrop train; or the import path of a module or of a function
            that returns it.
        data: Import path of batches (labels are ignored), of a dataset, or of a function that
            returns them; builtin:digits; or for a run folder a split of its own data, such as test.
        out: The file to write; it ends with .npz, .csv or .jsonl.
        choice: A run folder whose choice to predict with.
        alpha: Power of the mean over mask samples, 0 (geometric) to 1 (arithmetic).
        multiplier: Factor on every dropout rate, 0 (deterministic) to 1.
        temperature: Temperature of the averaged distribution.
        num_samples: Mask samples; by default those that the choice was made for, or 100.
        blocks: Independent blocks of samples; 8 or more make the standard errors precise.
        seed: Seed of the masks, without a choice.
        split: Split of built-in data.
        unlabelled: Batches that are lists or tuples hold positional inputs only, not targets.
        batch_size: Examples per batch, if DATA is a dataset of single examples.
        rates: Attributes that hold rates of masks the model draws itself, without a choice.
        noise: Modules whose random draws are not dropout, without a choice.
        batch_dim: Batch dimension of inputs and logits, without a choice.
        class_dim: Class dimension of the logits, without a choice.
        logits: Index or key of the logits in the model's output, without a choice.
        likelihood: The kind of targets, as for afterdrop evaluate, without a choice.
        noise_variance: Of squared_error: the noise variance of temperature 1, without a choice.
        device: Runs: where the model runs; a GPU if there is one.
        overwrite: Replace an existing file.
    """
    check_suffix(out)
    if out.exists() and not overwrite:
        raise FileError(f"{out} exists; --overwrite replaces it")
    make_folder(out.parent)
    run = Run(model) if Run(model).trained else None
    module, found = _opened(model, data, split, run, device)
    asked = (alpha, multiplier, temperature) != (None, None, None)
    chosen = Run.open(choice) if choice is not None else run
    if asked and choice is not None:
        raise DataError("--choice has a member of its own; omit --alpha and the like, or --choice")
    if chosen is not None and not asked and (chosen.has_choice or chosen is not run):
        predictor = chosen.choice.predictor(module, num_samples=num_samples, blocks=blocks)
        assert isinstance(predictor, Predictor)
    else:
        predictor = Predictor(
            module,
            Member(_or_one(alpha), _or_one(multiplier), _or_one(temperature)),
            100 if num_samples is None else num_samples,
            seed,
            rates=rates,
            noise=noise,
            batch_dim=batch_dim,
            class_dim=class_dim,
            logits=logits_place(logits),
            likelihood=likelihood,
            noise_variance=noise_variance,
            blocks=blocks,
        )
    table = _predict(predictor, found, batch_size, unlabelled)
    table.write(out)
    means = ", ".join(f"{name.replace('_', ' ')} {v:.4f}" for name, v in table.means().items())
    print(f"{predictor.extra_repr()}\nMean over {table.num_examples} examples: {means}")
    print(f"Wrote {one_line(out)}.")


def _or_one(value: float | None) -> float:
    return 1.0 if value is None else value


def _opened(
    model: str, data: str, split: str, run: Run | None, device: str | None
) -> tuple[nn.Module, Iterable[Any]]:
    """The model and its batches."""
    if run is None and Path(model).is_dir():
        raise DataError(
            f"{model} does not hold a trained model; give the import path of your own model, and "
            f"--choice {shell_word(model)} to predict as was chosen there"
        )
    if run is None:
        return resolve_model(model), resolve_batches(data, split)
    loaded = run.load(device=choose_device(device))
    if isinstance(loaded.model, LanguageModel):
        raise DataError(
            f"{model} holds a language model; print its log-probabilities with: afterdrop score "
            f"{shell_word(model)} FILE"
        )
    if ":" in data:
        return loaded.model, resolve_batches(data, split)
    own = loaded.load_data(None)
    part = getattr(own, data, None) if data in ("train", "valid", "test") else None
    if not isinstance(own, ImageSet) or part is None:
        raise DataError(f"{data!r} must be train, valid or test, or an import path of batches")
    return loaded.model, batches(part.images, part.labels, 128)


def _predict(
    predictor: Predictor, found: Iterable[Any], batch_size: int | None, unlabelled: bool
) -> PredictionTable:
    request = predictor.request
    class_dim = request.class_dim
    if class_dim is None or request.likelihood != "categorical":
        class_dim = -1
    table = PredictionTable(request.batch_dim, class_dim)
    device = next((p.device for p in predictor.parameters()), torch.device("cpu"))
    _, stream, _ = open_batches(found, batch_size)
    for item in stream:
        inputs = to_device(inputs_of(item, unlabelled), device)
        table.add(call(predictor.uncertainty, inputs))
    return table
