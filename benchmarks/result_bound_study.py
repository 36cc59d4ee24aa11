"""What tightens the dropout bound? Trains one recipe with each regulariser and compares the family.

    python benchmarks/result_bound_study.py pydoc-small --steps 980 --seeds 1 2 --out runs/bounds

Arms: none, fraternal dropout (0.1), expectation-linear dropout (0.25), activation (2) and temporal
activation regularisation (1), two masks in the loss (D = 2), all dropout rates × 0.9. Fraternal and
expectation-linear dropout and D = 2 take two passes per step. With `--match passes` (the default)
they make half as many steps, so that all arms make the same number of passes; with
`--match steps` they make as many steps as the others.

Each run is evaluated on the first LIMIT tokens of the training text and on validation data. Prints
as Markdown each quantity of arm "none" (mean over seeds) and the paired difference of every other
arm from it, with its standard error. Everything is nats per token but T*, var and CV². The number
of samples is corrected for in XE and gaps (K = ∞), not in var and CV².

± combines two errors: of the data (the difference per token, averaged over seeds, clustered by
block of text) and of the seeds (the spread of the differences over seeds, pooled over all arms,
because two seeds alone say little about their spread). "Falls" and "rises" mean by more than two of
these errors; with one seed the error is unknown, and everything is level.

Readings of an arm, on each text: (a) variance: the Jensen gap falls and D_1 rises while DET at T*
is level; (b) bias: DET − GMC falls while the selected member is level; (c) regularisation: DET at
T* falls while neither the Jensen gap nor DET − GMC does. Where D_1 rises, the verdict says how much
of that is a smaller gap: D_1 = −XE(GMC) − normaliser gap, so the rest is a better GMC.

Finished runs and evaluations in OUT are kept, so the command can be repeated, and arms or seeds
added. With --no-report it only trains and evaluates what --arms and --seeds name, so that several
can run side by side before the one that reports.
"""

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor

import afterdrop as ad
from afterdrop import recipes, train
from afterdrop.evaluation.loop import Execution
from afterdrop.family.bounds import variance_of_probability
from afterdrop.family.estimates import clustered_error
from afterdrop.masks.uniforms import Plan
from afterdrop.train import TrainConfig
from afterdrop.train.schedule_length import shorten

ARMS: dict[str, dict[str, float]] = {
    "none": {},
    "FD 0.1": {"objective.fraternal_penalty": 0.1},
    "EL 0.25": {"objective.expectation_linear_penalty": 0.25},
    "AR 2": {"objective.activation_penalty": 2.0},
    "TAR 1": {"objective.temporal_activation_penalty": 1.0},
    "D = 2": {"objective.samples": 2},
    "rates × 0.9": {},
}
TWO_PASSES = ("FD 0.1", "EL 0.25", "D = 2")
GMC, AMC = ad.Member(0.0, 1.0), ad.Member(1.0, 1.0)
QUANTITIES = {
    "D_1": "the dropout objective at multiplier 1, mean over masks of log p(y)",
    "var": "variance of p(y) over masks",
    "CV²": "the same divided by the squared mean of p(y)",
    "Jensen": "Jensen gap of AMC: its log p(y) minus D_1",
    "normaliser": "normaliser gap of GMC: its log p(y) minus D_1",
    "DET": "XE of DET at T = 1",
    "DET − GMC": "XE of DET minus XE of GMC at multiplier 1, T = 1: the bias of DET",
    "T*": "optimal temperature of DET, on validation data",
    "DET at T*": "XE of DET at that T",
    "selected": "XE of the member selected on validation data",
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one run has on one split: values per token, or a number for all of them."""

    values: dict[str, Tensor]
    clusters: Tensor
    selected: ad.Member


@dataclasses.dataclass(frozen=True)
class Difference:
    """A quantity's mean difference from arm "none", with its errors."""

    value: float
    data_error: float
    seed_error: float

    @property
    def error(self) -> float:
        """Both errors together."""
        return math.hypot(self.data_error, self.seed_error)

    @property
    def sign(self) -> int:
        """−1 falls, 1 rises, 0 level: within two standard errors, or of unknown error."""
        return int(math.copysign(1, self.value)) if abs(self.value) > 2 * self.error else 0


def arm_config(options: argparse.Namespace, arm: str, seed: int) -> TrainConfig:
    """The recipe with the setting of an arm, at its number of steps."""
    config = recipes.load(options.recipe).config.override(
        {name: json.loads(value) for name, _, value in (t.partition("=") for t in options.set)}
    )
    changes: dict[str, object] = dict(ARMS[arm]) | {"seed": seed}
    if arm == "rates × 0.9":
        settings = config.model.settings
        changes |= {f"model.{n}": 0.9 * r for n, r in settings.items() if n.endswith("_dropout")}
    intervals = config.schedule.intervals
    steps = options.steps or intervals * config.schedule.steps_per_interval
    if options.intervals is not None:
        intervals = options.intervals
    elif options.steps is not None:
        intervals = min(intervals, max(1, steps // 50))
    each = max(1, steps // intervals)
    if options.match == "passes" and arm in TWO_PASSES:
        each //= 2
    return shorten(config.override(changes), intervals, each)


def evaluated(options: argparse.Namespace, arm: str, seed: int) -> dict[str, Measured]:
    """Trains and evaluates one run, as far as this is not done."""
    config = arm_config(options, arm, seed)
    steps = config.schedule.intervals * config.schedule.steps_per_interval
    name = "".join(c for c in arm if c.isalnum() or c == ".")
    folder = options.out / f"{name}-steps{steps}-seed{seed}"
    start, used = time.perf_counter(), time.process_time()
    train.run(config, folder, device=options.device, data=options.data, progress=False)
    scores = {}
    for split in ("valid", "train"):
        run = ad.Run(folder)
        if split not in run.splits:
            request = ad.Request(
                ad.Grid(tuple(options.alphas), tuple(options.multipliers)),
                Plan(options.num_samples),
                split=split,
                limit=options.limit if split == "train" else options.valid_limit,
                stream=run.stream(stripes=options.stripes),
            )
            found = run.evaluate(request, Execution(), device=options.device, folder=options.data)
            run.save_scores(found)
        scores[split] = run.scores(split)
    took, used = time.perf_counter() - start, time.process_time() - used
    print(f"{folder.name}: {took:.0f} s, processor {used:.0f} s", flush=True)
    fitted = scores["valid"].fit(ad.DET).member
    selected = ad.select(scores["valid"], folds=0, resamples=0).member
    return {split: measure(found, fitted, selected) for split, found in scores.items()}


def measure(scores: ad.Scores, fitted: ad.Member, selected: ad.Member) -> Measured:
    """Each quantity per token, in the order of the text."""
    row, column = scores.index(AMC)
    bound = scores.field("sampled", "bound")[row].double()
    mean, square = (scores.field("sampled", name)[row].double() for name in ("mean", "square"))
    second = scores.field("sampled", "second")[row, column].double()
    target = scores.field("sampled", "target")[row, column].double()
    xe = {m: scores.values(m).at(math.inf) for m in (ad.DET, GMC, AMC, fitted, selected)}
    values = {
        "D_1": bound,
        "var": variance_of_probability(mean, square),
        "CV²": (2 * (second - target)).expm1().clamp_min(0.0),
        "Jensen": -xe[AMC] - bound,
        "normaliser": -xe[GMC] - bound,
        "DET": xe[ad.DET],
        "DET − GMC": xe[ad.DET] - xe[GMC],
        "T*": torch.full_like(bound, fitted.temperature),
        "DET at T*": xe[fitted],
        "selected": xe[selected],
    }
    return Measured(values, scores.clusters, selected)


def differences(
    found: dict[str, list[Measured]], arms: list[str], name: str
) -> dict[str, Difference]:
    """One quantity's paired difference of every arm from arm "none"."""
    per_seed = {
        arm: torch.stack(
            [mine.values[name] - base.values[name] for mine, base in zip(found[arm], found["none"])]
        )
        for arm in arms
    }
    seeds = len(found["none"])
    variances = [diffs.mean(1).var().item() for diffs in per_seed.values()] if seeds > 1 else []
    spread = math.sqrt(sum(variances) / len(variances) / seeds) if variances else math.nan
    return {
        arm: Difference(
            diffs.mean().item(),
            clustered_error(diffs.mean(0), found["none"][0].clusters),
            spread,
        )
        for arm, diffs in per_seed.items()
    }


def readings(found: dict[str, Difference]) -> dict[str, bool]:
    """The three readings of an arm, from the signs of its differences."""
    sign = {name: difference.sign for name, difference in found.items()}
    tighter, less_bias = sign["Jensen"] < 0, sign["DET − GMC"] < 0
    return {
        "(a) variance": tighter and sign["D_1"] > 0 and sign["DET at T*"] == 0,
        "(b) bias": less_bias and sign["selected"] == 0,
        "(c) regularisation": sign["DET at T*"] < 0 and not tighter and not less_bias,
    }


def verdict(found: dict[str, Difference]) -> list[str]:
    """The readings of an arm, and what happened to bound, DET and choice, as table cells."""
    words = {-1: "falls", 0: "level", 1: "rises"}
    shown = ("Jensen", "normaliser", "D_1", "DET − GMC", "DET at T*", "selected")
    holds = [name for name, yes in readings(found).items() if yes]
    tightens = {-1: "tightens", 0: "does not change", 1: "loosens"}[found["Jensen"].sign]
    helps = {-1: "better", 0: "level", 1: "worse"}[found["selected"].sign]
    text = f"{tightens} the bound; the choice from the family is {helps}"
    if found["D_1"].sign > 0:
        share = -found["normaliser"].value / found["D_1"].value
        text += f"; {share:.0%} of the rise of D_1 is the gap's"
    return [*(words[found[name].sign] for name in shown), ", ".join(holds) or "none", text]


def table(head: list[str], rows: list[list[str]]) -> None:
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def report(found: dict[str, dict[str, list[Measured]]], arms: list[str]) -> None:
    """Both splits: the table of quantities, then the signs and readings."""
    for split, by_arm in found.items():
        base = by_arm["none"]
        diffs = {name: differences(by_arm, arms, name) for name in QUANTITIES}
        print(f"\n## {split}: {len(base[0].clusters):,} tokens, {len(base)} seeds")
        rows = []
        for name in QUANTITIES:
            mean = sum(one.values[name].mean().item() for one in base) / len(base)
            shown = [f"{d.value:+.4f} ± {d.error:.4f}" for d in diffs[name].values()]
            rows.append([name, f"{mean:.4f}", *shown])
        table(["quantity", "none", *(f"{arm} − none" for arm in arms)], rows)
        heads = ["Jensen gap", "normaliser gap", "D_1", "DET − GMC", "DET at T*", "selected"]
        rows = [[arm, *verdict({n: d[arm] for n, d in diffs.items()})] for arm in arms]
        table(["arm", *heads, "readings", "verdict"], rows)
    print("\nselected members, one per seed:")
    for arm, runs in found["valid"].items():
        print(f"- {arm}: {', '.join(str(one.selected) for one in runs)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="a recipe of a language model")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", type=int, help="training steps; by default those of the recipe")
    parser.add_argument("--intervals", type=int, help="validations; default: the recipe's, or less")
    parser.add_argument("--set", nargs="*", default=[], help="other settings, NAME=JSON")
    parser.add_argument("--match", choices=("passes", "steps"), default="passes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--no-report", action="store_true", help="train and evaluate --arms only")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--multipliers", type=float, nargs="+", default=[0.0, 0.5, 0.8, 1.0])
    parser.add_argument("--stripes", type=int, default=8)
    parser.add_argument("--limit", type=int, default=10_000, help="tokens of the training text")
    parser.add_argument("--valid-limit", type=int, help="tokens of validation data; default all")
    options = parser.parse_args()
    if not {0.0, 1.0} <= {*options.alphas} & {*options.multipliers}:
        parser.error("--alphas and --multipliers need 0 and 1 among them")
    arms = [arm for arm in options.arms if arm != "none"]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, match {options.match}")
    found: dict[str, dict[str, list[Measured]]] = {"train": {}, "valid": {}}
    for seed in options.seeds:
        for arm in options.arms if options.no_report else ("none", *arms):
            for split, one in evaluated(options, arm, seed).items():
                found[split].setdefault(arm, []).append(one)
    if not options.no_report:
        report(found, arms)


if __name__ == "__main__":
    main()
