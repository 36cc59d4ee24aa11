"""afterdrop evaluate: scores of every member of the family."""

import contextlib
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from tyro.conf import Positional

from afterdrop.cli.options import (
    Likelihood,
    OptionalInt,
    OptionalPath,
    OptionalPaths,
    OptionalRange,
    OptionalText,
    logits_place,
    without_effect,
)
from afterdrop.cli.resolve import resolve_batches, resolve_model
from afterdrop.cli.torchrun import shared_evaluation, speaks
from afterdrop.errors import DataError
from afterdrop.evaluation import evaluate_samples
from afterdrop.evaluation.batches import Source, open_batches
from afterdrop.evaluation.loop import Execution, run_evaluation
from afterdrop.evaluation.request import (
    Adaptive,
    Request,
    default_samples,
    requested_samples,
)
from afterdrop.evaluation.rounding import epsilon_of
from afterdrop.evaluation.scores import Scores
from afterdrop.family.member import Grid, Temper
from afterdrop.models.fingerprint import fingerprint
from afterdrop.plain_text import one_line, shell_word
from afterdrop.runs import Run
from afterdrop.selection import family_table

Samples = Annotated[
    int | Literal["auto"] | None, tyro.conf.arg(metavar="INT|auto", help_behavior_hint="")
]
_OF_SAMPLES = (
    "samples",
    "targets",
    "out",
    "single",
    "split",
    "alphas",
    "temper",
    "temperatures",
    "ignore_index",
    "likelihood",
    "memory_mib",
    "overwrite",
    "quiet",
)


def evaluate(
    model: Annotated[Positional[str | None], tyro.conf.arg(metavar="[RUN|MODEL]")] = None,
    batches: Annotated[Positional[str | None], tyro.conf.arg(metavar="[DATA]")] = None,
    /,
    out: OptionalPath = None,
    samples: OptionalPaths = None,
    targets: OptionalText = None,
    single: OptionalInt = None,
    split: str = "valid",
    limit: OptionalInt = None,
    num_samples: Samples = None,
    mask_share: float = Adaptive.mask_share,
    beaten_by: float = Adaptive.beaten_by,
    alphas: tuple[float, ...] = Grid().alphas,
    multipliers: tuple[float, ...] = Grid().multipliers,
    temper: Temper = "mean",
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
    targets_per_example: OptionalInt = None,
    batch_size: OptionalInt = None,
    likelihood: Likelihood = "categorical",
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
    model with dropout under control, and writes RUN/scores/SPLIT.safetensors. After an
    interruption, the same command resumes where it stopped.

    Samples that were computed elsewhere, such as the predictions of an ensemble, come as files.

    For example:
      afterdrop evaluate runs/ptb
      afterdrop evaluate mymodel:load_model mymodel:valid_batches --out runs/mine
      torchrun --nproc-per-node 4 -m afterdrop evaluate runs/ptb --device cuda
      afterdrop evaluate --samples logits.npy --targets labels.npy --out runs/ensemble

    Args:
        model: A run folder; or the import path of a module or of a function that returns it.
        batches: Import path of batches (inputs, targets), of mappings with labels or of a dataset,
            or of a function that returns them, or the name builtin:digits. Not with a run folder,
            which knows its data.
        out: The run folder that gets the scores; needed with an import path and with samples.
        samples: A .npy or .safetensors file of log-probabilities or logits [K, N, V], or one file
            [N, V] per member of an ensemble; of binary and multilabel without V, of gaussian means
            and variances [K, N, 2], of squared_error means [K, N]. Instead of a model.
        targets: With samples, the file of their targets, class numbers [N]. With your own model,
            the key of the targets in a batch that is a mapping, or the attribute of one that is an
            object; by default "labels" and "y".
        single: Number of the sample that is compared with, alone; by default the best one.
        split: Name of the data. Scores of "test" cannot be used to select.
        limit: Runs: number of leading tokens or images of the split to evaluate.
        num_samples: Mask samples K, even; or auto: a pilot on part of the data drops multipliers
            that cannot win and finds the K that the others need. By default auto on the split
            valid, and 100 with every multiplier on others, and with --carry sampled or --lamb.
        mask_share: With auto: tolerated mask error of differences between the leading members, as
            a share of the data error of their XE.
        beaten_by: With auto: standard errors by which a multiplier must be worse to be dropped.
        alphas: Powers of the mean, 0 (geometric) to 1 (arithmetic).
        multipliers: Factors on every dropout rate, 0 (deterministic) to 1.
        temper: Where temperatures act: on the averaged distribution, on each sample, or (texts of a
            mixture of softmaxes) on each component.
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
        targets_per_example: How many targets of an example count at most, such as pixels of an
            image, drawn by the seed.
        batch_size: Examples per batch, if DATA is a dataset of single examples.
        likelihood: The kind of targets: class numbers, 0 and 1 with one logit each (binary,
            multilabel), or numbers with means and variances (gaussian) or means (squared_error).
        window: Texts: tokens per window; by default that of training.
        stripes: Texts: shares that start from a zero state; 1 is the exact stream, more is faster.
        carry: Texts: windows start from the deterministic state, or each sample carries its own.
        lifetime: Texts: how long a mask that is shared over time lives.
        lamb: Texts: lamb's arithmetic evaluation (temper sample, or component of a mixture; sampled
            carry, independent masks).
        which: Runs: evaluate the best or the last weights.
        data: Runs: folder of the data, if they have moved since training.
        device: Runs: device to evaluate on; by default a GPU if any.
        memory_mib: Memory for accumulators and activations, in MiB.
        overwrite: Replace existing scores; without it, those of the same settings and weights are
            kept, and others refused.
        quiet: Show neither a progress bar nor tables.
    """
    given = locals()
    if samples is not None:
        idle = without_effect(evaluate, given, _OF_SAMPLES)
        if idle:
            raise DataError(
                f"--samples are predictions as they are: leave out {', '.join(idle)}, which "
                f"{'has' if len(idle) == 1 else 'have'} no effect on them"
            )
        grid = Grid(alphas, temper=temper)
        options: dict[str, Any] = {
            "split": split,
            "ignore_index": ignore_index,
            "likelihood": likelihood,
            "temperatures": temperatures,
        }
        options |= {"memory": None if memory_mib is None else memory_mib * 2**20}
        options |= {"grid": grid, "single": single, "progress": not quiet}
        if targets is None or out is None:
            raise DataError(
                "--samples needs --targets FILE and --out RUN, the folder of the scores"
            )
        run = Run(out)
        if run.layout.scores(split).exists() and not overwrite:
            now = _evaluate_files(samples, targets, **options)
            kept = run.kept_scores(now.request, now.protocol.fingerprint, lambda *_, **__: now)
            _print_kept(run, kept, quiet)
            return
        with run.reserved_scores(split, overwrite=overwrite):
            _save(run, _evaluate_files(samples, targets, **options), quiet)
        return
    if single is not None:
        raise DataError(
            "--single is the number of a sample: give it with --samples, or leave it out"
        )
    if model is None:
        raise DataError("give RUN, or MODEL DATA --out RUN, or --samples FILE --targets FILE")
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
    if trained and likelihood != "categorical":
        raise DataError("--likelihood is for your own model, not for a folder of afterdrop train")
    for name, wrong in of_runs.items():
        if wrong and not trained:
            raise DataError(f"--{name} is for a folder of afterdrop train, not for your own model")
    of_models = {
        "targets": targets is not None,
        "targets-per-example": targets_per_example is not None,
        "batch-size": batch_size is not None,
    }
    for name, wrong in of_models.items():
        if wrong and trained:
            raise DataError(f"--{name} is for your own model, not for a folder of afterdrop train")
    run = Run(model if out is None else out)
    if lamb:
        mixes = trained and Run(model).facts["model"].get("softmax_components", 1) > 1
        temper, carry, masks = "component" if mixes else "sample", "sampled", "iid"
    stream = Run(model).stream(window, stripes, carry, lifetime) if trained else None
    count = default_samples(split, carry) if num_samples is None else num_samples
    plan, adaptive = requested_samples(count, seed, masks, blocks, mask_share, beaten_by)
    request = Request(
        Grid(alphas, multipliers, temper),
        plan,
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
        targets=targets,
        targets_per_example=targets_per_example,
        adaptive=adaptive,
        likelihood=likelihood,
    )
    memory = None if memory_mib is None else memory_mib * 2**20
    if run.layout.scores(split).exists() and not overwrite:
        if trained:
            scores = run.kept_scores(request, Run(model).fingerprint(which))
        else:
            assert batches is not None
            scores = _kept_of_model(run, request, model, batches, batch_size, memory)
        if speaks():
            _print_kept(run, scores, quiet)
        return
    parts = run.layout.parts(split)
    asked = device if trained else device or "cpu"  # a user's own model stays where it is
    with contextlib.ExitStack() as held:
        with shared_evaluation(asked, parts) as (where, ranks):
            ranks.enter_on_rank0(held, run.reserved_scores(split, overwrite=overwrite))
            execution = Execution(0, memory, parts, not quiet, ranks)
            if trained:
                scores = Run(model).evaluate(
                    request, execution, which=which, device=where, folder=data
                )
            else:
                assert batches is not None
                read, source = resolve_batches(batches, split), Source(batch_size)
                own = resolve_model(model)
                scores = run_evaluation(own, read, request, execution, source=source)
        if ranks.first:
            _save(run, scores, quiet)


def _kept_of_model(
    run: Run,
    request: Request,
    model: str,
    batches: str,
    batch_size: int | None,
    memory: int | None,
) -> Scores:
    """The scores of the user's own model, if its data and code are those that were evaluated."""
    own = resolve_model(model)

    def again(asked: Request, *, first: bool) -> Scores:
        read, source = resolve_batches(batches, request.split), Source(batch_size)
        if first:
            read, source = [open_batches(read, batch_size)[0]], Source()
        return run_evaluation(own, read, asked, Execution(memory=memory), source=source)

    epsilon = epsilon_of(own, torch.float32, same_shapes=False)
    return run.kept_scores(request, fingerprint(own), again, epsilon)


def _evaluate_files(samples: tuple[Path, ...], targets: str, **options: Any) -> Scores:
    """Scores of samples in files."""
    if len(samples) == 1:
        return evaluate_samples(samples[0], targets, **options)
    return evaluate_samples(samples, targets, names=[path.stem for path in samples], **options)


def _save(run: Run, scores: Scores, quiet: bool) -> None:
    """Writes scores and prints their tables."""
    path = run.save_scores(scores)
    _print(scores, quiet)
    if not quiet:
        following = f" Next: afterdrop select {shell_word(run.path)}"
        print(f"\nWrote {one_line(path)}." + following * (scores.split != "test"))


def _print_kept(run: Run, scores: Scores, quiet: bool) -> None:
    _print(scores, quiet)
    path = one_line(run.layout.scores(scores.split))
    print(f"{path} was already there, with these settings and weights.")


def _print(scores: Scores, quiet: bool) -> None:
    if not quiet:
        print(family_table(scores, tuned=False))
        print()
        print(family_table(scores, tuned=True))
