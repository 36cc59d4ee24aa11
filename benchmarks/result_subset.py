"""How many validation targets it takes to find a temperature.

    python benchmarks/result_subset.py RUN [RUN ...]

Fits T of DET and of AMC on random subsets of the examples (windows of a text, images) and prints
its spread, and what is lost on all of them against the T that is fitted on all (nats).
"""

import argparse
from pathlib import Path

import torch

import afterdrop as ad
from afterdrop.family.estimates import cluster_sums

SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--draws", type=int, default=100)
    options = parser.parse_args()
    heads = ("targets", 8), ("T", 8), ("± draws", 9), ("lost", 10), ("gained by T", 13)
    print(f"{'run':<18}{'member':<8}" + "".join(f"{head:>{width}}" for head, width in heads))
    for run in options.runs:
        scores = ad.Scores.load(run / "scores" / "valid.safetensors")
        groups = int(scores.clusters.max()) + 1
        sizes = cluster_sums(torch.ones(scores.num_targets).double(), scores.clusters)
        generator = torch.Generator().manual_seed(0)
        for name, member in (("DET", ad.DET), ("AMC", ad.AMC)):
            whole = scores.fit(member).member
            gained = scores.difference(member, whole).value
            for share in SHARES:
                keep = max(2, round(share * groups))
                chosen = torch.rand(options.draws, groups, generator=generator).argsort(1) < keep
                found = scores.fit_weighted(member, chosen.double())[0]
                losses = [
                    scores.difference(member.at_temperature(t), whole).value for t in found.tolist()
                ]
                lost = sum(losses) / len(losses)
                targets = (chosen.double() @ sizes).mean().item()
                print(
                    f"{run.name:<18}{name:<8}{targets:>8.0f}{found.mean().item():>8.3f}"
                    f"{found.std().item():>9.3f}{lost:>10.5f}{gained:>13.4f}"
                )
            print(f"{run.name:<18}{name:<8}{scores.num_targets:>8}{whole.temperature:>8.3f}")


if __name__ == "__main__":
    main()
