"""afterdrop evaluate: scores of every member of the family."""

from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from afterdrop.cli.resolve import resolve_batches, resolve_model
from afterdrop.cli.run import parts_path, scores_path
from afterdrop.errors import FileError
from afterdrop.evaluate.evaluate import evaluate as evaluate_model
from afterdrop.family.member import Grid
from afterdrop.select.tables import family_table


def evaluate(
    model: Positional[str],
    data: Positional[str],
    /,
    out: Path,
    split: str = "valid",
    num_samples: int = 100,
    alphas: tuple[float, ...] = Grid().alphas,
    multipliers: tuple[float, ...] = Grid().multipliers,
    temper: Literal["mean", "sample"] = "mean",
    masks: Literal["lhs", "iid", "antithetic"] = "lhs",
    blocks: int = 2,
    seed: int = 0,
    rates: tuple[str, ...] = (),
    noise: tuple[str, ...] = (),
    batch_dim: int = 0,
    ignore_index: int = -100,
    memory_mib: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> None:
    """Evaluate every member of the extended dropout family on data.

    Reads a trained model and batches by import path, runs the model with dropout under control,
    and writes RUN/scores/SPLIT.safetensors. Interrupted, the same command goes on where it was.

    Example: afterdrop evaluate mymodel:load_model mymodel:valid_batches --out runs/mine

    Args:
        model: Import path of a module or of a function that returns it, as in pkg.module:name.
        data: Import path of batches (inputs, targets) or of a function that returns them; or
            builtin:digits.
        out: The run folder.
        split: Name of the data. Scores of "test" cannot be used to select.
        num_samples: Mask samples K, even.
        alphas: Powers of the mean, 0 (geometric) to 1 (arithmetic).
        multipliers: Factors on every dropout rate, 0 (deterministic) to 1.
        temper: Where temperatures act: on the averaged distribution or on each sample.
        masks: Latin hypercube halves, independent, or antithetic pairs.
        blocks: Independent blocks of samples; 16 also gives the curve over K.
        seed: Seed of the masks.
        rates: Attributes that hold rates of masks the model draws itself, as in encoder.dropoute.
        noise: Modules whose random draws are not dropout and stay off.
        batch_dim: Batch dimension of inputs, targets and logits.
        ignore_index: Targets that do not count.
        memory_mib: Memory for accumulators and activations in MiB.
        overwrite: Replace scores that are there.
        quiet: No progress bar and no table.
    """
    path = scores_path(out, split)
    if path.exists() and not overwrite:
        raise FileError(
            f"{path} exists; use --overwrite to replace it, or another --out or --split"
        )
    scores = evaluate_model(
        resolve_model(model),
        resolve_batches(data, split),
        grid=Grid(alphas, multipliers, temper),
        num_samples=num_samples,
        seed=seed,
        split=split,
        masks=masks,
        blocks=blocks,
        rates=rates,
        noise=noise,
        batch_dim=batch_dim,
        ignore_index=ignore_index,
        memory=None if memory_mib is None else memory_mib * 2**20,
        resume=parts_path(out, split),
        progress=not quiet,
    )
    scores.save(path)
    if not quiet:
        print(family_table(scores, tuned=False))
        print()
        print(family_table(scores, tuned=True))
        print(
            f"\nWrote {path}. Next: afterdrop select {out}"
            if split != "test"
            else f"\nWrote {path}."
        )
