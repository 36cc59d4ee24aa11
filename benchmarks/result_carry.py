"""The dropout objective of a trained language model under both carries.

    afterdrop train pydoc-small --out RUN
    python benchmarks/result_carry.py RUN [--split valid] [--num-samples 64]

For multipliers 1 and 1/2, prints D (the mean over samples of log p(y)) and the geometric (GMC) and
arithmetic (AMC) members, under carry="deterministic" and carry="sampled", as mean log-probabilities
per token (one stripe, the window of training, T = 1). Then prints the paired difference of D per
token, sampled minus deterministic, with its standard error over windows.
"""

import argparse
import time
from pathlib import Path

import torch

import afterdrop as ad
from afterdrop import train
from afterdrop.evaluation.request import Carry
from afterdrop.family.estimates import Values, estimate
from afterdrop.models import LanguageModel

MULTIPLIERS = (0.5, 1.0)
CARRIES: tuple[Carry, Carry] = ("deterministic", "sampled")


def evaluate_both(options: argparse.Namespace) -> dict[Carry, ad.Scores]:
    loaded = train.load_model(options.run)
    text = loaded.load_data(options.data)
    assert isinstance(loaded.model, LanguageModel)
    found = {}
    for carry in CARRIES:
        start = time.perf_counter()
        found[carry] = ad.evaluate_text(
            loaded.model,
            text.split(options.split),
            text.vocabulary.eos_id,
            grid=ad.Grid((0.0, 1.0), (0.0, *MULTIPLIERS)),
            num_samples=options.num_samples,
            split=options.split,
            window=loaded.config.objective.window or 35,
            carry=carry,
        )
        print(f"{carry:<14} carry: {time.perf_counter() - start:.0f} s", flush=True)
    return found


def table(found: dict[Carry, ad.Scores]) -> None:
    scores = found["deterministic"]
    print(f"{scores.num_targets} tokens of {scores.split}, K = {scores.num_samples}, T = 1")
    print(f"DET {scores.bounds(ad.DET).objective:.4f}")
    print(f"{'multiplier':<12}{'carry':<16}{'D':>9}{'GMC':>9}{'AMC':>9}")
    for multiplier in MULTIPLIERS:
        for carry, scores in found.items():
            gmc, amc = (scores.bounds(ad.Member(alpha, multiplier)) for alpha in (0.0, 1.0))
            numbers = "".join(f"{x:>9.4f}" for x in (gmc.bound, gmc.objective, amc.objective))
            print(f"{multiplier:<12g}{carry:<16}{numbers}")
    for multiplier in MULTIPLIERS:
        row = scores.protocol.grid.stochastic.index(multiplier)
        # By position in the text: both carries evaluate windows in the same order.
        both = [found[carry].field("sampled", "bound")[row].double() for carry in CARRIES]
        values = Values(both[1] - both[0], None, 0)
        print(
            f"D at multiplier {multiplier:g}, sampled minus deterministic: "
            f"{estimate(values, scores.clusters, shared=True)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, help="folder of the data sets, if it has moved")
    parser.add_argument("--split", default="valid")
    parser.add_argument("--num-samples", type=int, default=64)
    options = parser.parse_args()
    found = evaluate_both(options)
    one, two = (found[carry].targets for carry in CARRIES)
    assert torch.equal(one, two), "targets in another order"
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    table(found)


if __name__ == "__main__":
    main()
