"""afterdrop evaluate: scores of every member of the family."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalInt, OptionalPath, OptionalRange, OptionalText
from afterdrop.cli.resolve import resolve_batches, resolve_model
from afterdrop.cli.torchrun import shared_evaluation
from afterdrop.errors import DataError, FileError
from afterdrop.evaluation.api import Settings, run_evaluation
from afterdrop.evaluation.passes import Reader
from afterdrop.family.member import Grid
from afterdrop.masks.uniforms import Plan
from afterdrop.runs.chosen import is_run, parts_path
from afterdrop.runs.folder import scores_path
from afterdrop.runs.trained import evaluate_run
from afterdrop.selection.text_tables import family_table
from afterdrop.train import load_model


def evaluate(
    model: Annotated[Positional[str], tyro.conf.arg(metavar="RUN|MODEL")],
    batches: Annotated[Positional[str | None], tyro.conf.arg(metavar="[DATA]")] = None,
    /,
    out: OptionalPath = None,
    split: str = "valid",
    limit: OptionalInt = None,
    num_samples: int = 100,
    alphas: tuple[float, ...] = Grid().alphas,
    multipliers: tuple[float, ...] = Grid().multipliers,
    temper: Literal["mean", "sample"] = "mean",
    temperatures: OptionalRange = None,
    masks: Literal["lhs", "iid", "antithetic"] = "lhs",
    blocks: int = 2,
    seed: int = 0,
    rates: tuple[str, ...] = (),
    noise: tuple[str, ...] = (),
    batch_dim: int = 0,
    ignore_index: int = -100,
    window: OptionalInt = None,
    stripes: int = 1,
    carry: Literal["deterministic", "sampled"] = "deterministic",
    lifetime: Literal["window", "stream"] = "window",
    lamb: bool = False,
    which: Literal["best", "last"] = "best",
    data: OptionalPath = None,
    device: OptionalText = None,
    memory_mib: OptionalInt = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> None:
    """Evaluate every member of the extended dropout family on data.

    Takes a run folder of afterdrop train, or your own model and batches by import path, runs the
    model with dropout under control, and writes RUN/scores/SPLIT.safetensors. Interrupted, the
    same command goes on where it was.

    For example:
      afterdrop evaluate runs/ptb
      afterdrop evaluate mymodel:load_model mymodel:valid_batches --out runs/mine
      torchrun --nproc-per-node 4 -m afterdrop evaluate runs/ptb --device cuda

    Args:
        model: A run folder; or the import path of a module or of a function that returns it.
        batches: Import path of batches (inputs, targets), or of a function that returns them, or
            the name builtin:digits. Not with a run folder, which knows its data.
        out: The run folder that gets the scores; needed with an import path.
        split: Name of the data. Scores of "test" cannot be used to select.
        limit: Of a run's data: the first so many tokens or images only.
        num_samples: Mask samples K, even.
        alphas: Powers of the mean, 0 (geometric) to 1 (arithmetic).
        multipliers: Factors on every dropout rate, 0 (deterministic) to 1.
        temper: Where temperatures act: on the averaged distribution or on each sample.
        temperatures: The range of temperatures; by default around what suits the first batch.
        masks: Latin hypercube halves, independent, or antithetic pairs.
        blocks: Independent blocks of samples; 16 (of 96) also give the curve over K.
        seed: Seed of the masks.
        rates: Attributes that hold rates of masks the model draws itself, as in encoder.dropoute.
        noise: Modules whose random draws are not dropout and stay off.
        batch_dim: Batch dimension of inputs, targets and logits.
        ignore_index: Targets that do not count.
        window: Texts: tokens a window; by default that of training.
        stripes: Texts: shares that start from a zero state; 1 is the exact stream, more are faster.
        carry: Texts: windows start from the deterministic state, or each sample carries its own.
        lifetime: Texts: how long masks live that are shared over time.
        lamb: Texts: lamb's arithmetic evaluation (temper sample, sampled carry, independent masks).
        which: The run's best or last weights.
        data: The folder of the named data sets, if not the one of training.
        device: Where a run's model is evaluated; a GPU if there is one.
        memory_mib: Memory for accumulators and activations in MiB.
        overwrite: Replace scores that are there.
        quiet: No progress bar and no table.
    """
    trained = batches is None and is_run(model)
    if not trained and batches is None:
        raise DataError(
            f"{model!r} is no folder of afterdrop train; give one, or MODEL DATA --out RUN with "
            "import paths"
        )
    if not trained and out is None:
        raise DataError("--out is missing: the folder that gets the scores of your own model")
    of_runs = {
        "limit": limit is not None,
        "window": window is not None,
        "stripes": stripes != 1,
        "carry": carry != "deterministic",
        "lifetime": lifetime != "window",
        "lamb": lamb,
        "which": which != "best",
        "data": data is not None,
    }
    for name, given in of_runs.items():
        if given and not trained:
            raise DataError(f"--{name} is for a folder of afterdrop train, not for your own model")
    run = Path(model) if out is None else out
    path = scores_path(run, split)
    if path.exists() and not overwrite:
        raise FileError(
            f"{path} exists; --overwrite replaces it, another --out or --split keeps it"
        )
    if lamb:
        temper, carry, masks = "sample", "sampled", "iid"
    settings = Settings(
        Grid(alphas, multipliers, temper),
        Plan(num_samples, seed, masks, blocks),
        split,
        rates,
        noise,
        Reader(batch_dim, ignore_index),
        temperatures,
        memory=None if memory_mib is None else memory_mib * 2**20,
        resume=parts_path(run, split),
        progress=not quiet,
        limit=limit,
    )
    stream = {"stripes": stripes, "carry": carry, "lifetime": lifetime}
    if window is not None:
        if window < 1:
            raise DataError(f"window={window} must be at least 1 token")
        stream["time"] = window
    asked = device if trained else device or "cpu"  # a user's own model stays where it is
    with shared_evaluation(asked, parts_path(run, split)) as (where, ranks):
        settings = dataclasses.replace(settings, ranks=ranks)
        if trained:
            loaded = load_model(model, which, device=where)
            scores = evaluate_run(loaded, split, settings, stream, data)
        else:
            assert batches is not None
            found = resolve_batches(batches, split)
            scores = run_evaluation(resolve_model(model), found, settings)
    if not ranks.first:
        return
    scores.save(path)
    if not quiet:
        print(family_table(scores, tuned=False))
        print()
        print(family_table(scores, tuned=True))
        print(f"\nWrote {path}." + f" Next: afterdrop select {run}" * (split != "test"))
