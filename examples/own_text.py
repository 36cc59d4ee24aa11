"""
A language model of your own text
=================================

A folder with `train.txt`, `valid.txt` and `test.txt` is all that is needed. Here it is filled with
the docstrings of Python's standard library; each module is in one of the three files. A small LSTM
is trained on it, every member of the family is evaluated on `valid.txt`, and the choice predicts
`test.txt`. Less than a minute on two cores; the same on the command line is

::

    afterdrop train lm --data FOLDER --out runs/mine
    afterdrop evaluate runs/mine && afterdrop select runs/mine && afterdrop test runs/mine
"""

import argparse
import ast
import re
import sysconfig
import time
from pathlib import Path

import torch

import afterdrop as ad
from afterdrop import recipes, train
from afterdrop.data import TextSet
from afterdrop.models import LanguageModel
from afterdrop.selection import family_table


def docstrings(path: Path) -> str:
    """The docstrings of a module, one sentence of lower-case words per line."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    sentences = re.split(r"(?<=[.!?])\s+|\n\n+", "\n\n".join(text for text in found if text))
    words = [re.findall(r"[a-z]+|[.,!?]", text.lower()) for text in sentences]
    return "".join(" ".join(line) + "\n" for line in words if len(line) > 3)


def write_texts(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [docstrings(path) for path in sorted(library.glob("[a-m]*.py"))]
    for name, part in (("valid", texts[8::10]), ("test", texts[9::10])):
        (folder / f"{name}.txt").write_text("".join(part), encoding="utf-8")
    rest = [text for number, text in enumerate(texts) if number % 10 < 8]
    (folder / "train.txt").write_text("".join(rest), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and choose a model of your own text.")
    parser.add_argument("--out", type=Path, default=Path("runs/own-text"), help="folder to write")
    parser.add_argument("--intervals", type=int, default=6, help="how often it is validated")
    parser.add_argument("--steps", type=int, default=100, help="training steps per interval")
    parser.add_argument("--num-samples", type=int, default=16)
    options = parser.parse_args()
    start = time.time()
    folder = options.out / "text"
    write_texts(folder)

    config = recipes.load("lm").config.override(
        {
            "data.name": str(folder.resolve()),
            "model.hidden_sizes": (128, 128),
            "objective.batch_size": 16,
            "optimiser.learning_rate": 0.005,
            "schedule.steps_per_interval": options.steps,
            "schedule.intervals": options.intervals,
            "schedule.drop_latest": options.intervals - 1,
            "validation.stripes": 16,
        }
    )
    train.run(config, options.out / "run", progress=False)
    run = ad.Run.open(options.out / "run")
    text, model = run.data(), run.model()
    assert isinstance(text, TextSet) and isinstance(model, LanguageModel)
    eos = text.vocabulary.eos_id
    print(
        f"{len(text.train):,} words to train on, {len(text.vocabulary.tokens):,} different ones\n"
    )

    grid = ad.Grid(alphas=(0, 0.5, 1), multipliers=(0, 0.5, 0.75, 1))
    k = options.num_samples
    scores = ad.evaluate_text(model, text.valid, eos, grid=grid, num_samples=k, stripes=16)
    run.save_scores(scores)
    print(family_table(scores, tuned=True), end="\n\n")
    choice = ad.select(scores)
    run.save_choice(choice)
    print(f"Chosen: {choice.member}\n{choice.headline()}\n")

    member, bracket = choice.member, choice.temperatures
    chosen = ad.Grid((member.alpha,), (0.0, member.multiplier))
    options_of = {"grid": chosen, "num_samples": k, "stripes": 16, "temperatures": bracket}
    final = ad.evaluate_text(model, text.test, eos, split="test", **options_of)
    run.save_scores(final)
    for one in (ad.DET, choice.deterministic, member):
        perplexity = torch.tensor(final.xe(one).value).exp().item()
        print(f"Test perplexity {perplexity:8.2f}  {one}")
    found = final.difference(member, choice.deterministic)
    print(f"The choice minus temperature alone: {found.value:+.4f} ± {found.error:.4f} nats")

    stream = choice.predictor(model)
    assert isinstance(stream, ad.StreamPredictor)
    drawn = text.vocabulary.decode(torch.tensor(stream.sample(eos, 25)))
    print(f"\nDrawn from the choice: {' '.join(drawn)}\nTook {time.time() - start:.0f} s.")


if __name__ == "__main__":
    main()
