r"""Do the gains of the family combine with a mixture of softmaxes?

    python benchmarks/result_mos_question.py --out FOLDER --data DIR \
        --recipe ptb-24m-2layer-fast ptb-24m-mos2-fast ptb-24m-mos15-fast     # the same resumes

    python benchmarks/result_mos_question.py --out FOLDER --recipe pydoc-small --components 1 2 15

Trains every arm with every seed, evaluates the family on validation and test data, and chooses a
member on validation data. With several recipes each is an arm; with one, each of --components is,
at the parameter budget of the recipe. Prints DET, DET at T* and the selected member side by side,
and the difference of differences: what choosing from the family gains in an arm, minus what it
gains in the first one. Its errors: of masks and data (paired over targets), and between seeds.

Legend: N targets, G = 2 halves of the mask samples.
"""

import argparse
import dataclasses
import json
import math
import statistics
import time
from pathlib import Path

import torch

import afterdrop as ad
from afterdrop import recipes, train
from afterdrop.errors import FileError
from afterdrop.evaluation.loop import Execution
from afterdrop.family.estimates import Estimate, Values, estimate
from afterdrop.masks.uniforms import Plan
from afterdrop.models import count_parameters
from afterdrop.runs import Run
from afterdrop.train.build_task import load_set
from afterdrop.train.schedule_length import shorten

SPLITS = ("valid", "test")
COLUMNS = ("DET", "DET at T*", "selected")
GAINS = (("DET at T*", "DET"), ("selected", "DET"), ("selected", "DET at T*"))


@dataclasses.dataclass(frozen=True)
class Result:
    """One trained and evaluated model.

    Attributes:
        scores: Of each split.
        members: The members of `COLUMNS`, from validation data.
    """

    scores: dict[str, ad.Scores]
    members: dict[str, ad.Member]

    def gain(self, split: str, better: str, worse: str) -> Values:
        """Per-target XE of one column minus that of another; negative is a gain."""
        scores = self.scores[split]
        return scores.values(self.members[better]).minus(scores.values(self.members[worse]))


def arms(options: argparse.Namespace) -> dict[str, train.TrainConfig]:
    """The configuration of each arm, by its name."""
    changes = {
        name: json.loads(value) for name, _, value in (s.partition("=") for s in options.set)
    }
    configs = {name: recipes.load(name).config.override(changes) for name in options.recipe}
    if len(configs) == 1:
        [base] = configs.values()
        size = len(load_set(base, options.data).vocabulary)
        whole = base.model.language_model(size).resolved()
        own = whole.embedding_size / whole.hidden_sizes[-1]
        budget = {
            "model.hidden_sizes": None,
            "model.embedding_size": None,
            "model.budget": count_parameters(whole),
            "model.layers": len(whole.hidden_sizes),
            "model.embedding_ratio": options.embedding_ratio or own,
        }
        configs = {
            f"mos{count}": base.override({**budget, "model.softmax_components": count})
            for count in options.components
        }
    if options.steps is None:
        return configs
    return {name: cut(config, options.steps) for name, config in configs.items()}


def cut(config: train.TrainConfig, steps: int) -> train.TrainConfig:
    """The same schedule with about this number of steps, in intervals of the same length."""
    return shorten(config, max(1, round(steps / config.schedule.steps_per_interval)))


def trained_and_scored(
    config: train.TrainConfig, out: Path, options: argparse.Namespace
) -> Result | None:
    """A model's scores, trained and evaluated as far as they are missing; None if interrupted."""
    start = time.perf_counter()
    found = train.run(config, out, data=options.data, device=options.device, progress=False)
    if not found.finished:
        print(found.message)
        return None
    done, run, scores = time.perf_counter(), Run.open(out), {}
    for split in SPLITS:
        request = ad.Request(
            ad.Grid(options.alphas, options.multipliers),
            Plan(options.samples),
            split,
            stream=run.stream(),
            limit=options.limit,
        )
        try:
            scores[split] = run.kept_scores(request, run.fingerprints["best"])
        except FileError:
            if run.layout.scores(split).exists():
                raise
            execution = Execution(resume=run.layout.parts(split))
            scores[split] = run.evaluate(
                request, execution, which="best", device=options.device, folder=options.data
            )
            run.save_scores(scores[split])
    size = run.facts["model"]
    print(
        f"{out.name}: H {size['hidden_sizes']}, E {size['embedding_size']}, best interval "
        f"{found.best['interval']} of {found.interval}; training {done - start:.0f} s, evaluation "
        f"{time.perf_counter() - done:.0f} s in this call",
        flush=True,
    )
    valid = scores["valid"]
    chosen = (ad.DET, valid.fit(ad.DET).member, ad.select(valid).member)
    return Result(scores, dict(zip(COLUMNS, chosen)))


def mean_of(values: list[Values]) -> Values:
    """The mean over models of per-target values."""
    halves = [v.halves for v in values]
    known = [v.whole.expand(2, -1) if half is None else half for v, half in zip(values, halves)]
    sampled = any(half is not None for half in halves)
    return Values(
        torch.stack([v.whole for v in values]).mean(0),
        torch.stack(known).mean(0) if sampled else None,
        max(v.num_samples for v in values) if sampled else 0,
    )


def estimated(values: Values, of: Result, split: str) -> Estimate:
    scores = of.scores[split]
    return estimate(values, scores.clusters, shared=scores.protocol.shared)


def seeds_error(values: list[float]) -> float:
    """Standard error of a mean over seeds."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def print_table(found: dict[str, list[Result]], split: str) -> None:
    """XE of each column, mean over seeds, with its perplexity."""
    print(f"\n{split}: XE (perplexity), mean over seeds ± seeds")
    print(f"| arm | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    for name, results in found.items():
        cells = []
        for column in COLUMNS:
            xe = [r.scores[split].xe(r.members[column]).value for r in results]
            mean = statistics.fmean(xe)
            cells.append(f"{mean:.4f} ({math.exp(mean):.2f}) ± {seeds_error(xe):.4f}")
        print(f"| {name} | {' | '.join(cells)} |")


def print_gains(found: dict[str, list[Result]], split: str) -> None:
    """Gains of each arm, and their differences to those of the first arm."""
    first = next(iter(found))
    print(f"\n{split}: differences in XE, ± masks and data, ± seeds")
    print(f"| difference | arm | value | minus {first} |\n|---|---|---|---|")
    for better, worse in GAINS:
        base = [r.gain(split, better, worse) for r in found[first]]
        for name, results in found.items():
            values = [r.gain(split, better, worse) for r in results]
            mean, other = mean_of(values), mean_of(base)
            own = estimated(mean, results[0], split)
            spread = seeds_error([v.whole.mean().item() for v in values])
            cell = ""
            if name != first:
                both = estimated(mean.minus(other), results[0], split)
                base_spread = seeds_error([v.whole.mean().item() for v in base])
                seeds = math.hypot(spread, base_spread)
                cell = f"{both.value:+.4f} ± {both.error:.4f} ± {seeds:.4f}"
            value = f"{own.value:+.4f} ± {own.error:.4f} ± {spread:.4f}"
            print(f"| {better} − {worse} | {name} | {value} | {cell} |")


def print_members(found: dict[str, list[Result]]) -> None:
    print("\nselected on validation data (seeds in order)")
    for name, results in found.items():
        for result in results:
            tempered = result.members["DET at T*"].temperature
            print(f"- {name}: {result.members['selected']}; DET has T* = {tempered:.3f}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--recipe", nargs="+", default=["pydoc-small"])
    parser.add_argument("--components", nargs="+", type=int, default=[1, 2, 15])
    parser.add_argument("--embedding-ratio", type=float, help="E/H of all arms of one recipe")
    parser.add_argument("--data", type=Path, help="folder of the named data sets")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--steps", type=int, help="about this number of steps; the recipe's own")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--alphas", nargs="+", type=float, default=[0.0, 0.5, 1.0])
    parser.add_argument(
        "--multipliers", nargs="+", type=float, default=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    )
    parser.add_argument("--samples", type=int, default=100, help="mask samples K")
    parser.add_argument("--limit", type=int, help="tokens of each split; all")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    found: dict[str, list[Result]] = {}
    for seed in options.seeds:  # seed by seed, so that a stopped run has whole comparisons
        for name, config in arms(options).items():
            result = trained_and_scored(
                config.override({"seed": seed}), options.out / f"{name}-{seed}", options
            )
            if result is None:
                return
            found.setdefault(name, []).append(result)
    for split in SPLITS:
        print_table(found, split)
    for split in SPLITS:
        print_gains(found, split)
    print_members(found)


if __name__ == "__main__":
    main()
