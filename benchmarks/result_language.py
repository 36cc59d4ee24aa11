"""Trains a recipe for some minutes on one GPU, then prints the paper's tables from it.

    python benchmarks/result_language.py train --recipe ptb-24m-2layer --data DIR --out RUN
    python benchmarks/result_language.py table --data DIR --out RUN

    python benchmarks/result_language.py fit --data DIR --out RUN --limit 50000

`train` applies --set to the recipe and stops after --call-minutes; the same command resumes.
`table` evaluates validation and test data (deterministic carry, one stripe) and prints DET, GMC,
alpha = 1/2 and AMC at multipliers 0.8, 0.9 and 1, at T = 1 and at the T fitted on validation data,
next to the paper's figures for PTB with 24M weights. `fit` prints the paper's Table 1.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

import afterdrop as ad
from afterdrop import recipes, train
from afterdrop.data import load_text
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.request import StreamSettings
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel
from afterdrop.selection import family_table
from afterdrop.train.folder import RunFolder

PAPER = (
    "DET 60.9/58.6, T* 57.5/56.0, AMC x.8 57.1/55.3 (PTB 24M d4, valid/test; Melis et al., 2018)"
)
MULTIPLIERS = (0.8, 0.9, 1.0)


def changed_config(options: argparse.Namespace) -> train.TrainConfig:
    """The recipe with the changes of --set; that of the run if there is one."""
    folder = RunFolder(options.out)
    if folder.config.exists():
        return folder.read_config()[0]
    changes = {
        name: json.loads(value) for name, _, value in (s.partition("=") for s in options.set)
    }
    return recipes.load(options.recipe).config.override({"seed": options.seed, **changes})


def scored(options: argparse.Namespace, split: str, grid: ad.Grid, limit: int | None) -> ad.Scores:
    """The scores of a split of the run's data, timed."""
    model, config, _ = train.load_model(options.out, device=options.device)
    assert isinstance(model, LanguageModel)
    text = load_text(config.data.name, options.data)
    start = time.perf_counter()
    stream = StreamSettings(window=config.objective.window or 35)
    request = ad.Request(grid, Plan(options.num_samples), split, stream=stream, limit=limit)
    tokens, eos = text.split(split)[:limit], text.vocabulary.eos_id
    scores = run_text(model, tokens, eos, request, Execution(windows=128))
    seconds = time.perf_counter() - start
    print(
        f"{split}: {scores.num_targets} tokens, {len(grid)} members x all T, "
        f"K = {options.num_samples}: {seconds:.1f} s",
        flush=True,
    )
    return scores


def line(scores: ad.Scores, member: ad.Member) -> dict[str, float]:
    """Value, value for infinitely many samples, and error."""
    found = scores.xe(member)
    return {"value": found.value, "corrected": found.corrected, "error": found.error}


def table(options: argparse.Namespace) -> None:
    grid = ad.Grid()
    valid = scored(options, "valid", grid, options.limit)
    test = scored(options, "test", ad.Grid(grid.alphas, (0.0, *MULTIPLIERS)), options.limit)
    print(f"{'member':<34}{'T=1 valid':>11}{'test':>8}{'T*':>7}{'valid':>8}{'test':>8}")
    summary = []
    for member in valid.members:
        fit = valid.fit(member).member
        row = {"alpha": member.alpha, "multiplier": member.multiplier, "T": fit.temperature}
        row |= {"valid": line(valid, member), "valid_T": line(valid, fit)}
        if member.multiplier in (0.0, *MULTIPLIERS):
            row |= {"test": line(test, member), "test_T": line(test, fit)}
            name = str(member).rsplit(", T", 1)[0]
            p = {k: math.exp(row[k]["value"]) for k in ("valid", "test", "valid_T", "test_T")}
            print(
                f"{name:<34}{p['valid']:>11.2f}{p['test']:>8.2f}{fit.temperature:>7.3f}"
                f"{p['valid_T']:>8.2f}{p['test_T']:>8.2f}",
                flush=True,
            )
        summary.append(row)
    (options.json or options.out / "summary.json").write_text(json.dumps(summary))
    print(f"paper: {PAPER}")
    choice = ad.select(valid)
    print(choice, flush=True)
    if choice.member.multiplier in (0.0, *MULTIPLIERS):
        perplexity = test.perplexity(choice.member).value
        print(
            f"chosen on test: perplexity {perplexity:.2f}; difference to DET at T = 1: "
            f"{test.difference(choice.member, ad.DET)}"
        )


def fit_table(options: argparse.Namespace) -> None:
    """The paper's Table 1: XE of the first training tokens over multipliers, for every alpha."""
    scores = scored(options, "train", ad.Grid(), options.limit)
    print(family_table(scores, tuned=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("train", "table", "fit"))
    parser.add_argument("--recipe", default="ptb-24m-2layer")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--set", nargs="*", default=[], help="changes, as in schedule.intervals=200"
    )
    parser.add_argument("--call-minutes", type=float, help="stop this call after this time")
    parser.add_argument("--num-samples", type=int, default=100)
    parser.add_argument("--limit", type=int, help="tokens of each split to evaluate")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU
    if options.action != "train":
        table(options) if options.action == "table" else fit_table(options)
        return
    result = train.run(
        changed_config(options),
        options.out,
        data=options.data,
        device=options.device,
        max_minutes=options.call_minutes,
        progress=False,
    )
    print(result.message, result.best)


if __name__ == "__main__":
    main()
