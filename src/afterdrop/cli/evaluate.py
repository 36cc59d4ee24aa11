"""afterdrop evaluate: scores of every member of the family."""

from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import (
    OptionalInt,
    OptionalPath,
    OptionalRange,
    OptionalText,
    logits_place,
)
from afterdrop.cli.resolve import resolve_batches, resolve_model
from afterdrop.cli.torchrun import shared_evaluation
from afterdrop.errors import DataError, FileError
from afterdrop.evaluation.loop import Execution, run_evaluation
from afterdrop.evaluation.request import Request
from afterdrop.family.member import Grid
from afterdrop.masks.uniforms import Plan
from afterdrop.runs import Run
from afterdrop.selection import family_table


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
    class_dim: OptionalInt = None,
    ignore_index: int = -100,
    logits: OptionalText = None,
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
    same command resumes where it stopped.

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
        limit: Runs: number of leading tokens or images of the split to evaluate.
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
        class_dim: Class dimension of the logits, such as 1 for [B, V, height, width]; by default
            the last, if no other fits the targets.
        ignore_index: Targets with this value do not count.
        logits: Index or key of the logits in the model's output, if several tensors may be the
            logits.
        window: Texts: tokens per window; by default that of training.
        stripes: Texts: shares that start from a zero state; 1 is the exact stream, more is faster.
        carry: Texts: windows start from the deterministic state, or each sample carries its own.
        lifetime: Texts: how long a mask that is shared over time lives.
        lamb: Texts: lamb's arithmetic evaluation (temper sample, sampled carry, independent masks).
        which: Runs: evaluate the best or the last weights.
        data: Runs: folder of the named data sets, if it has moved since training.
        device: Runs: device to evaluate on; by default a GPU if any.
        memory_mib: Memory for accumulators and activations, in MiB.
        overwrite: Replace existing scores.
        quiet: Show neither a progress bar nor tables.
    """
    trained = batches is None and Run(model).trained
    if not trained and batches is None:
        raise DataError(
            f"{model!r} is not a folder of afterdrop train; give one, or MODEL DATA --out RUN with "
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
    run = Run(model if out is None else out)
    path = run.layout.scores(split)
    if path.exists() and not overwrite:
        raise FileError(
            f"{path} exists; --overwrite replaces it, another --out or --split keeps it"
        )
    if lamb:
        temper, carry, masks = "sample", "sampled", "iid"
    stream = Run(model).stream(window, stripes, carry, lifetime) if trained else None
    request = Request(
        Grid(alphas, multipliers, temper),
        Plan(num_samples, seed, masks, blocks),
        split,
        rates,
        noise,
        batch_dim,
        class_dim,
        ignore_index,
        temperatures,
        stream,
        limit,
        logits_place(logits),
    )
    memory, parts = None if memory_mib is None else memory_mib * 2**20, run.layout.parts(split)
    asked = device if trained else device or "cpu"  # a user's own model stays where it is
    with shared_evaluation(asked, parts) as (where, ranks):
        execution = Execution(0, memory, parts, not quiet, ranks)
        if trained:
            scores = Run(model).evaluate(request, execution, which=which, device=where, folder=data)
        else:
            assert batches is not None
            found = resolve_batches(batches, split)
            scores = run_evaluation(resolve_model(model), found, request, execution)
    if not ranks.first:
        return
    run.save_scores(scores)
    if not quiet:
        print(family_table(scores, tuned=False))
        print()
        print(family_table(scores, tuned=True))
        print(f"\nWrote {path}." + f" Next: afterdrop select {run.path}" * (split != "test"))
