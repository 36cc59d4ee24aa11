"""A real result: train a recipe for some minutes on one GPU, then the paper's table from it.

    python benchmarks/result_language.py train --recipe ptb-24m-2layer --data DIR --out RUN
    python benchmarks/result_language.py table --data DIR --out RUN

`train` takes the recipe with what --set changes, and --call-minutes; called again, it goes on.
`table` evaluates validation and test data (deterministic carry, one
stripe) and prints DET, GMC, alpha = 1/2 and AMC at multipliers .8, .9, 1, at T = 1 and at the T
fitted on validation data, beside what the paper reports for its PTB model of 24M weights.
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
from afterdrop.evaluate.evaluate import Settings
from afterdrop.evaluate.language import StreamSettings, evaluate_text
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel
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


def table(options: argparse.Namespace) -> None:
    model, config, _ = train.load_model(options.out, device=options.device)
    assert isinstance(model, LanguageModel)
    text = load_text(config.data.name, options.data)
    grid = ad.Grid((0.0, 0.5, 1.0), (0.0, *MULTIPLIERS))
    scores = {}
    for split in ("valid", "test"):
        start = time.perf_counter()
        settings = Settings(grid, Plan(options.num_samples), split)
        stream = StreamSettings(time=config.objective.window or 35)
        scores[split] = evaluate_text(
            model, text.split(split), text.vocabulary.eos_id, settings, stream
        )
        seconds = time.perf_counter() - start
        print(
            f"{split}: {scores[split].num_targets} tokens, {len(grid)} members x all T, "
            f"K = {options.num_samples}: {seconds:.1f} s",
            flush=True,
        )
    valid, test = scores["valid"], scores["test"]
    print(
        f"{'member':<34}{'T=1 valid':>11}{'test':>8}{'T*':>7}{'valid':>8}{'test':>8}{'± valid':>9}"
    )
    for member in valid.members:
        fit = valid.fit(member).member
        row = [math.exp(s.xe(m).value) for m in (member, fit) for s in (valid, test)]
        error = valid.difference(fit, ad.DET).error
        name = str(member).rsplit(", T", 1)[0]
        print(
            f"{name:<34}{row[0]:>11.2f}{row[1]:>8.2f}{fit.temperature:>7.3f}{row[2]:>8.2f}"
            f"{row[3]:>8.2f}{error:>9.4f}"
        )
    choice = ad.select(valid)
    print(choice)
    print(
        f"chosen on test: perplexity {test.perplexity(choice.member):.2f}; difference to DET at "
        f"T = 1: {test.difference(choice.member, ad.DET)}"
    )
    for member in valid.members:
        print(member, "|", valid.bounds(member))
    print(f"paper: {PAPER}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("train", "table"))
    parser.add_argument("--recipe", default="ptb-24m-2layer")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="changes, as in schedule.turns=200")
    parser.add_argument("--call-minutes", type=float, help="stop this call after so long")
    parser.add_argument("--num-samples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU
    if options.action == "table":
        table(options)
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
