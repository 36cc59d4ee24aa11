"""The number of validation targets that is needed to fit a temperature.

    python benchmarks/result_subset.py RUN [RUN ...] [--targets 250 1000 5000]

Fits T of DET and of AMC on random subsets of the examples (windows of a text, images), and prints
the spread of T and the loss in nats on all examples, compared with the T fitted on all of them.
"""

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

import afterdrop as ad
from afterdrop.family.estimates import cluster_sums

SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)


def subset_rows(
    scores: ad.Scores, member: ad.Member, sizes: Sequence[int] = (), draws: int = 100
) -> list[dict[str, float]]:
    """T on subsets of the given sizes, or of SHARES; sizes above half the data are skipped.

    The last row is the fit on all targets: `T`, and `gained` by it over T = 1.
    """
    groups = int(scores.clusters.max()) + 1
    each = cluster_sums(torch.ones(scores.num_targets).double(), scores.clusters)
    generator = torch.Generator().manual_seed(0)
    whole = scores.fit(member).member
    least = scores.values(whole).whole.mean().item()
    rows = []

    @cache
    def lost(thousandths: int) -> float:  # XE is flat at its minimum, so thousandths of T suffice
        at = member.at_temperature(thousandths / 1000)
        return scores.values(at).whole.mean().item() - least

    shares = [size / scores.num_targets for size in sizes] or SHARES
    for share in (share for share in shares if share <= 0.5):
        keep = max(2, round(share * groups))
        chosen = torch.rand(draws, groups, generator=generator).argsort(1) < keep
        found = scores.fit_weighted(member, chosen.double())[0]
        losses = torch.tensor([lost(round(1000 * t)) for t in found.tolist()])
        rows.append(
            {
                "targets": (chosen.double() @ each).mean().item(),
                "T": found.mean().item(),
                "spread": found.std().item(),
                "lost": losses.mean().item(),
                "lost_often": losses.quantile(0.9).item(),
            }
        )
    gained = scores.difference(member, whole).value
    return [*rows, {"targets": scores.num_targets, "T": whole.temperature, "gained": gained}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--targets", type=int, nargs="*", default=[], help="sizes of the subsets")
    parser.add_argument("--draws", type=int, default=100)
    options = parser.parse_args()
    heads = ("targets", 8), ("T", 8), ("± draws", 9), ("lost", 10), ("gained by T", 13)
    print(f"{'run':<18}{'member':<8}" + "".join(f"{head:>{width}}" for head, width in heads))
    for run in options.runs:
        scores = ad.Run.open(run).scores("valid")
        for name, member in (("DET", ad.DET), ("AMC", ad.AMC)):
            *rows, whole = subset_rows(scores, member, options.targets, options.draws)
            for row in rows:
                print(
                    f"{run.name:<18}{name:<8}{row['targets']:>8.0f}{row['T']:>8.3f}"
                    f"{row['spread']:>9.3f}{row['lost']:>10.5f}{whole['gained']:>13.4f}"
                )
            print(f"{run.name:<18}{name:<8}{whole['targets']:>8}{whole['T']:>8.3f}")


if __name__ == "__main__":
    main()
